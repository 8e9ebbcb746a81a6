"""Refuses a server that has no room on this machine, before anything is downloaded or started.

In: the checkpoints that are served, from their headers alone, and the user's words for `vllm serve`. Out: nothing, or a
refusal that says what would fit.

Easy to get wrong: a checkpoint that fits on no single GPU may fit on eight. vLLM splits weights over tensor-parallel
and pipeline-parallel ranks, and takes a share of each GPU's whole memory, not of what is free.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from ...checkpoints.scratch import remove_left
from ...checkpoints.source import Source
from ...recipes.errors import VLLMError
from ..facts.vllm_env import GPU, VLLM
from .bf16_copy import refuse_full_disk, why_no_kernel

# Source: vLLM 0.32.0 config/cache.py (gpu_memory_utilization).
_SHARE = 0.92
# With one of these words, weights are kept elsewhere, or on more machines than this one.
_ELSEWHERE = ("--cpu-offload-gb", "--offload-backend", "--nnodes", "--distributed-executor-backend", "--load-format")
_SPLITS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
# What the weights leave of the memory, at least, where keepmtp chooses the number of GPUs.
_KV_SHARE = 0.1
_SPLITS_EXPERTS = ("--enable-expert-parallel", "-ep", "--data-parallel-size", "-dp")


def refuse_no_room(sources: Sequence[Source | None], vllm: VLLM, *, out: Path, extra: Sequence[str]) -> None:
    """Refuse checkpoints that cannot be served here.

    Args:
        sources: served one after the other; None is left out.
        vllm: where vLLM lives.
        out: folder for BF16 copies, which only a CPU needs.
        extra: the user's words for `vllm serve`.

    Raises:
        VLLMError: too little memory on the GPUs, too few of them, or too little room on the disk.
        CheckpointError: a copy is needed and a weight cannot be read.
    """
    remove_left("keepmtp-", out)
    for source in filter(None, sources):
        if why_no_kernel(source, vllm):
            refuse_full_disk(source, out)
        refuse_full_gpus(source, vllm, extra)


def refuse_full_gpus(source: Source, vllm: VLLM, extra: Sequence[str]) -> None:
    """Refuse a checkpoint that the GPUs of this machine have no room for; without a GPU there is nothing to refuse.

    Raises:
        VLLMError: too little memory on the GPUs, or too few of them.
    """
    gpus = _known_gpus(vllm)
    if not gpus or {*named_options(extra)} & {*_ELSEWHERE, *_SPLITS_EXPERTS}:
        return
    ranks = _number(value_of(extra, "--tensor-parallel-size", "-tp"))
    ranks *= _number(value_of(extra, "--pipeline-parallel-size", "-pp"))
    if ranks > len(gpus):
        rule = f"{ranks} ranks need as many GPUs"
        raise VLLMError("vllm serve", rule, got=len(gpus), cure="Ask for fewer, or set CUDA_VISIBLE_DEVICES")
    share = float(value_of(extra, "--gpu-memory-utilization") or _SHARE)
    needed, usable = _gib_of(source), _usable(gpus[:ranks], share)
    if needed / ranks > usable:
        raise VLLMError(
            source.where,
            f"its weights need {needed / ranks:.0f} GiB on each of {ranks} GPUs",
            got=f"{usable:.0f} GiB that vLLM may use on {gpus[0].name}",
            cure=_what_fits(source, needed, usable, len(gpus)),
        )
    if busy := [gpu for gpu in gpus[:ranks] if gpu.free_gib < share * gpu.memory_gib]:
        gpu = busy[0]
        raise VLLMError(
            gpu.name,
            f"vLLM takes {share:.0%} of its {gpu.memory_gib:.0f} GiB",
            got=f"{gpu.free_gib:.0f} GiB free",
            cure=f"End what uses it, or add -- --gpu-memory-utilization {gpu.free_gib / gpu.memory_gib - 0.02:.2f}",
        )


def tensor_parallel_size(source: Source, vllm: VLLM, extra: Sequence[str]) -> int:
    """On how many of this machine's GPUs the weights are split: on as few as hold them, with room for a KV cache.

    1 where the user's own words say how, where nothing is known of the GPUs, and where no number fits.
    """
    gpus = _known_gpus(vllm)
    if {*named_options(extra)} & {*_SPLITS, *_ELSEWHERE, *_SPLITS_EXPERTS}:
        return 1
    share, needed = float(value_of(extra, "--gpu-memory-utilization") or _SHARE), _gib_of(source)
    for size in (1, *_sizes(source)):
        if size <= len(gpus) and needed / size <= (1 - _KV_SHARE) * _usable(gpus[:size], share):
            return size
    return 1


def least_gpus(source: Source, memory_bytes: int) -> int | None:
    """On how few GPUs of so much memory the weights fit, with room for a KV cache; None where 16 are too few."""
    needed, usable = _gib_of(source), (1 - _KV_SHARE) * _SHARE * memory_bytes / 2**30
    return next((size for size in (1, *_sizes(source)) if needed / size <= usable), None)


def value_of(words: Sequence[str], *names: str) -> str:
    """The value of an option among words, with or without an equals sign; "" if it is not there."""
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            return value if equals else next(iter(words[number + 1 : number + 2]), "")
    return ""


def _gib_of(source: Source) -> float:
    return sum(entry.num_bytes for entry in source.entries.values()) / 2**30


def _usable(gpus: Sequence[GPU], share: float) -> float:
    """What vLLM may take of each of these GPUs, in GiB."""
    return min(min(gpu.free_gib, share * gpu.memory_gib) for gpu in gpus)


def _sizes(source: Source) -> list[int]:
    """The tensor-parallel sizes above 1 that divide the attention heads: vLLM refuses others."""
    config = source.config.get("text_config") or source.config
    heads = config.get("num_attention_heads")
    return [size for size in (2, 4, 8, 16) if not isinstance(heads, int) or heads % size == 0]


def _what_fits(source: Source, needed: float, usable: float, num_gpus: int) -> str:
    sizes = _sizes(source)
    size = next((size for size in sizes if needed / size <= usable), None)
    if size is None:
        return f"Use GPUs with more memory than {needed / max([1, *sizes]):.0f} GiB"
    where = "" if size <= num_gpus else f", on a machine with {size} GPUs"
    return f"Add -- --tensor-parallel-size {size}{where}"


def named_options(words: Sequence[str]) -> list[str]:
    """The options among words for `vllm serve`, spelled with hyphens and without their values."""
    return [word.partition("=")[0].replace("_", "-") for word in words]


def _known_gpus(vllm: VLLM) -> Sequence[GPU]:
    """The GPUs that vLLM would use, if something is known of all: those that CUDA_VISIBLE_DEVICES names by number."""
    gpus = vllm.gpus if vllm.build == "cuda" else ()
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(number.strip().isdigit() and int(number) < len(gpus) for number in numbers):
        gpus = tuple(gpus[int(number)] for number in numbers)
    return gpus if all(gpu.memory_gib for gpu in gpus) else ()


def _number(word: str) -> int:
    """A count of ranks; what is no number is for vLLM to refuse."""
    return max(1, int(word)) if word.isdigit() else 1
