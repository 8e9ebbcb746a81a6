"""modelopt's own whole result: the peer of the modelopt back-end, and of every other recipe.

In: a folder with a checkpoint, token ids, and the name of one of modelopt's presets. Out: its model
with its quantizers (`calibrated`), or a folder that its own exporter wrote (`exported`). Both run
on a CPU; modelopt's fake quantization of NVFP4 does not, nor do its presets that sweep, which need
its Triton kernels.

Easy to get wrong: transformers' class has no MTP block, and so the exported folder has none.
"""

import copy
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def calibrated(
    source: Path,
    batches: Iterable[Tensor],
    preset: str = "NVFP4_DEFAULT_CFG",
    *,
    cache: str = "",
    forwards: AbstractContextManager[Any] | None = None,
    model: Any = None,
) -> Any:
    """The whole model after `mtq.quantize`, in BF16 with eager attention.

    Args:
        source: a checkpoint's folder.
        batches: token ids [B, L].
        preset: an attribute of `modelopt.torch.quantization`.
        cache: another one, for keys and values.
        forwards: a context to calibrate in.
        model: of that folder, where it is there already.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import modelopt.torch.quantization as mtq

    model = model or loaded(source)

    def run(model: Any) -> None:
        with torch.no_grad():
            for ids in batches:
                model(input_ids=ids, use_cache=False)

    config = copy.deepcopy(getattr(mtq, preset))
    if cache:
        config["quant_cfg"] = [*config["quant_cfg"], *getattr(mtq, cache)["quant_cfg"]]
    with forwards or nullcontext():
        return mtq.quantize(model, config, run)


def exported(
    source: Path, batches: Iterable[Tensor], out: Path, preset: str = "NVFP4_DEFAULT_CFG"
) -> None:
    """Write modelopt's own checkpoint to `out`, with the tokenizer of the source."""
    model = calibrated(source, batches, preset)
    from modelopt.torch.export import export_hf_checkpoint

    export_hf_checkpoint(model, export_dir=out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def loaded(source: Path) -> Any:
    """The released model, as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
