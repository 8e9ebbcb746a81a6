"""A peer's own run over a release: its command, its calibration and its export, on the tokens of a
recipe.

    python benchmarks/quality_peers.py llm-compressor|modelopt RECIPE SOURCE OUT

In: a flat recipe, for its scheme, its algorithm and its calibration text. Out: the folder that the
peer writes.

Easy to get wrong: neither peer keeps the MTP block, and neither is helped. What it cannot do ends
this program.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.recipes.find import read_recipe
from keepmtp.recipes.schema import Recipe
from torch import Tensor
from transformers import AutoModelForCausalLM

IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*in_proj_[ab]$"]


def llm_compressor(recipe: Recipe, model: Any, batches: list[Tensor], out: Path) -> None:
    """`oneshot` in its sequential pipeline with the preset of the recipe's scheme, and
    `save_pretrained`.
    """
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch.utils.data import DataLoader

    assert recipe.calibration is not None
    modifier = {"minmax": QuantizationModifier, "gptq": GPTQModifier}[recipe.calibration.algorithm]
    loader = DataLoader([{"input_ids": ids} for ids in batches], batch_size=None)
    modifiers = [modifier(targets="Linear", scheme=recipe.backbone["attention"], ignore=IGNORE)]
    oneshot(
        model=model,
        dataset=loader,
        recipe=modifiers,
        processor=NoProcessor(),
        pipeline="sequential",
    )
    model.save_pretrained(out)


def modelopt(recipe: Recipe, model: Any, batches: list[Tensor], out: Path) -> None:
    """`mtq.quantize` with its own NVFP4 configuration, and its export."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    assert recipe.backbone["attention"] == "NVFP4"

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            for ids in batches:
                model(input_ids=ids, use_cache=False)

    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, calibrate)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=out)


class NoProcessor:
    """llm-compressor saves a tokenizer with the model; here is none to save."""

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        """Saves nothing."""


PEERS = {"llm-compressor": llm_compressor, "modelopt": modelopt}


def main() -> None:
    """Run one peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    for name in ("recipe", "source", "out"):
        parser.add_argument(name, type=Path)
    chosen = parser.parse_args()
    recipe = read_recipe(chosen.recipe)
    assert recipe.calibration is not None
    data = calibration_data(recipe.calibration, open_source(chosen.source))
    model = AutoModelForCausalLM.from_pretrained(
        chosen.source, dtype=torch.bfloat16, attn_implementation="eager"
    )
    batches = [*data.ids.split(recipe.calibration.batch_size)]
    PEERS[chosen.peer](recipe, model, batches, chosen.out)


if __name__ == "__main__":
    main()
