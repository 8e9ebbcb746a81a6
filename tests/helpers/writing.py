"""Tiny releases, recipes that differ from a shipped one, whole runs of the writer, and MTP blocks over
checkpoints, for the tests that compare them with somebody else's.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.model.binding import fill
from keepmtp.quantize.calibrate.mtp.mtp_block import MtpBlock, bind_block, build_block
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.write.output import claim, publish, refuse_output
from keepmtp.quantize.write.writer import write
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from releases import source_layout, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor


def tiny(folder: Path, model: str, data: Literal["sparse", "random"] = "random") -> Path:
    """A tiny release in a folder, made once."""
    if not folder.is_dir():
        write_checkpoint(folder, *source_layout(model), data=data)
    return folder


def recipe_with(name: str, **changes: Any) -> Recipe:
    """A shipped recipe but for these words."""
    return Recipe.model_validate(find_recipe(name)[0].model_dump() | changes)


def written(
    plan: Plan, out: Path, *, recipe_text: str = "", threads: int = 2, **given: Any
) -> dict[str, Tensor]:
    """The tensors of a whole run of the writer; the folder has its final name."""
    refuse_output(plan, out)
    with claim(plan, out) as partial:
        write(plan, partial, recipe_text=recipe_text, threads=threads, **given)
        publish(partial, out)
    return weights_of(out)


def lively(
    folder: Path,
    model: str,
    *,
    changes: Mapping[str, Any] | None = None,
    is_packed: bool = True,
) -> Path:
    """A tiny checkpoint of BF16 noise whose matrices are four times as large as the layouts' own.

    At 0.02 the scores of attention are all but equal, and nothing that turns or masks keys would
    show. Norms are
    spread, too: of two norms that follow each other, one near 1 would not show either.

    DeepSeek-V4's packed experts stay what they are, unless `is_packed` is False.
    """
    config, tensors = source_layout(model, changes=changes)
    if not (is_packed and any(dtype == "I8" for dtype, _ in tensors.values())):
        config = {key: value for key, value in config.items() if key != "quantization_config"}
        tensors = {
            name: ("BF16", (*shape[:-1], 2 * shape[-1]))
            if dtype == "I8"
            else ("BF16" if dtype.startswith("F8") else dtype, shape)
            for name, (dtype, shape) in tensors.items()
            if not name.endswith(("weight_scale_inv", ".scale"))
        }
    write_checkpoint(folder, config, tensors, num_shards=1, data="random")
    file = folder / "model.safetensors"
    weights = load_file(file)
    noise = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        if value.ndim > 1 and value.dtype in (torch.bfloat16, torch.float32):
            weights[name] = value * 4.0
        elif "norm" in name and name.endswith(".weight"):
            weights[name] = value * (0.4 + 1.2 * torch.rand(value.shape, generator=noise)).to(
                value.dtype
            )
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def plan_over(folder: Path, model: str, *, mtp: str | None = None) -> Plan:
    """A plan over a local checkpoint, by the shipped recipe of `model`."""
    recipe, _ = find_recipe(model, mtp=mtp)
    return make_plan(recipe, open_source(folder))


def changed(plan: Plan, **draft: Any) -> Plan:
    """The same plan under a family table whose `Draft` says something else."""
    assert plan.view.family.draft is not None
    family = replace(plan.view.family, draft=replace(plan.view.family.draft, **draft))
    return replace(plan, view=replace(plan.view, family=family))


def filled(plan: Plan, *, index: int = 0, dtype: torch.dtype = torch.bfloat16) -> MtpBlock:
    """The block with its weights; parameters that the source has in float32 stay so."""
    block = build_block(plan.view, index)

    def dtype_of(_name: str, _empty: Tensor, value: Tensor) -> torch.dtype:
        return dtype if value.dtype == torch.bfloat16 else value.dtype

    fill(block, bind_block(block, plan), plan, device=torch.device("cpu"), dtype_of=dtype_of)
    return block.requires_grad_(False)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint."""
    return {
        name: value
        for file in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(file).items()
    }
