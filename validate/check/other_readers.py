"""Readers besides vLLM that do not take a compressed-tensors config with several groups, by the threads that say so.

In: a checkpoint as vLLM sees it. Out: a line for each reader, and the command that writes what they take. It is no
finding: vLLM loads the checkpoint, and most people serve it with vLLM.

Easy to get wrong: `mixed-precision` is only what compressed-tensors calls a config whose groups have several formats.
llama.cpp looks at the number of groups, and takes several only if all of them are NVFP4. Of modelopt's dialect it takes
NVFP4, and FP8 whose scales have one dimension; blocks have four, and would be read as NVFP4.

Source: Blaizzy/mlx-vlm #1706 and #1711; ggml-org/llama.cpp #22247, #26407, #27161, #28636 and conversion/base.py;
unslothai/llama.cpp #195; sgl-project/sglang #27906, #32736, #37207.
"""

from collections.abc import Iterator

from .dialects.choose import quantization_of
from .dialects.given import CompressedTensorsGiven, GivenGroup, read_given
from .runtime_view import RuntimeView

_NVFP4 = "nvfp4-pack-quantized"
_MIXED = "mixed-precision"
CONVERT = "`keepmtp convert PATH --to modelopt --out NEW` writes what llama.cpp and SGLang take"


def other_readers(runtime: RuntimeView) -> tuple[str, ...]:
    """A line for each reader that refuses this config, or reads it wrongly; then the cure, where there is one."""
    if runtime.dialect.name != "compressed-tensors":
        return ()
    given = read_given(CompressedTensorsGiven, quantization_of(runtime.source.config) or {})
    groups = [*(given.config_groups or {}).values()]
    lines = [*_lines(given.format, groups)]
    return (*lines, CONVERT) if lines and _can_be_converted(runtime, groups) else tuple(lines)


def _lines(format_: str | None, groups: list[GivenGroup]) -> Iterator[str]:
    if len(groups) > 1 and not all(group.format == _NVFP4 for group in groups):
        open_ones = "cures that are open: #27161, #28636, unslothai/llama.cpp #195"
        yield f"llama.cpp's convert_hf_to_gguf.py refuses {len(groups)} config_groups (#26407; {open_ones})"
    if format_ == _MIXED:
        yield "mlx-vlm 0.6.5 stops at mixed-precision: parameters not in model (#1706, cured by #1711)"
        yield "SGLang without #32736 loads mixed-precision without quantization, and says nothing"
    targets = [target for group in groups for target in group.targets or ()]
    if len(groups) > 1 and any(map(_has_blocks, groups)) and "Linear" not in targets:
        yield "SGLang reads the size of FP8 blocks from the target Linear alone, which is not here (#37207 is open)"


def _has_blocks(group: GivenGroup) -> bool:
    return group.weights is not None and group.weights.strategy == "block"


def _can_be_converted(runtime: RuntimeView, groups: list[GivenGroup]) -> bool:
    """Whether modelopt's dialect has words for all of it that these readers take."""
    are_known = all(group.format in (_NVFP4, "float-quantized") and not _has_blocks(group) for group in groups)
    experts = (module.resolution.built.form for module in runtime.modules if module.kind == "experts")
    return are_known and "fp8_channel" not in experts
