"""Refuses a server that has no room on this machine, before anything is downloaded or started.

In: the checkpoints that are served, from their headers alone, and the user's words for `vllm
serve`. Out: nothing, or a refusal that says what would fit.

Easy to get wrong: a checkpoint that fits on no single GPU may fit on eight.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.files import remove_left
from ...checkpoints.safetensors_file import total_bytes
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError, VLLMError, counted
from ...recipes.frozen import Raw
from ...recipes.tensor_parallel import WHOLE_EXPERTS, Cuts, Split, in_words, sizes_of, why_not
from ..facts.vllm_env import GPU, VLLM
from .bf16_copy import refuse_full_disk, why_no_kernel

SHARE = 0.92
"""Of a GPU's memory, by default: vLLM 0.32.0 config/cache.py (gpu_memory_utilization)."""
_EXPERTS = (WHOLE_EXPERTS, "-ep")
# With one of these words, weights are kept elsewhere, or on more machines than this one, or not
# split by ranks alone.
_ELSEWHERE = {
    *("--cpu-offload-gb", "--offload-backend", "--nnodes", "--distributed-executor-backend"),
    *("--load-format", *_EXPERTS, "--data-parallel-size", "-dp"),
}
_TENSOR = ("--tensor-parallel-size", "-tp")
_PIPELINE = ("--pipeline-parallel-size", "-pp")
# What the weights may take of the memory, at most, where keepmtp chooses the number of GPUs.
_WEIGHTS_SHARE = 0.9


def split_of(extra: Sequence[str]) -> Split:
    """How ranks share a model, by the user's words for `vllm serve`."""
    options = options_of(extra)
    return Split(_number(options, *_TENSOR) or 1, not options.keys().isdisjoint(_EXPERTS))


def refuse_no_room(
    sources: Sequence[Source | None], vllm: VLLM, *, out: Path, extra: Sequence[str]
) -> None:
    """Refuse checkpoints that cannot be served here.

    Args:
        sources: served one after the other; None is left out.
        vllm: where vLLM lives.
        out: folder for BF16 copies, which only a CPU needs.
        extra: the user's words for `vllm serve`.

    Raises:
        VLLMError: too little memory on the GPUs, or too few; or a weight cannot be split so.
        RecipeError: too little room on the disk.
        CheckpointError: a copy is needed and a weight cannot be read.
    """
    remove_left("keepmtp-", out)
    split = split_of(extra)
    for source in filter(None, sources):
        if split.size > 1:
            _refuse_split(source, split)
        if why_no_kernel(source, vllm):
            refuse_full_disk(source, out)
        refuse_full_gpus(source, vllm, extra)


def refuse_full_gpus(source: Source, vllm: VLLM, extra: Sequence[str]) -> None:
    """Refuse a checkpoint that the GPUs of this machine have no room for; without a GPU there is
    nothing to refuse.

    Raises:
        VLLMError: too little memory on the GPUs, or too few of them.
    """
    gpus = _known_gpus(vllm)
    options = options_of(extra)
    if not gpus or _ELSEWHERE & options.keys():
        return
    # vLLM splits weights over tensor-parallel and pipeline-parallel ranks. What is no number is for
    # vLLM to refuse.
    counts = [options.get(name, "") for name in (*_TENSOR, *_PIPELINE)]
    ranks = math.prod([int(count) for count in counts if count.isdigit()]) or 1
    if ranks > len(gpus):
        rule = f"{ranks} ranks need as many GPUs"
        cure = "Ask for fewer, or set CUDA_VISIBLE_DEVICES"
        raise VLLMError("vllm serve", rule, got=len(gpus), cure=cure)
    num_bytes = total_bytes(source.entries.values())
    needed = num_bytes / 2**30 / ranks
    usable = _usable(gpus[:ranks], options)
    if needed > usable:
        size = _fewest(loading_sizes(source), num_bytes, _usable(gpus[:1], options))
        cure = "Use GPUs with more memory"
        if size is not None:
            cure = f"Add -- --tensor-parallel-size {size}"
            if size > len(gpus):
                cure += f", on a machine with {size} GPUs"
        rule = f"its weights need {needed:.0f} GiB on each of {counted(ranks, 'GPU')}"
        got = f"{usable:.0f} GiB that vLLM may use on {gpus[0].name}"
        raise VLLMError(source.where, rule, got=got, cure=cure)


def tensor_parallel_size(source: Source, vllm: VLLM, extra: Sequence[str]) -> int:
    """On how many of this machine's GPUs the weights are split: on as few as hold them, with room
    for a KV cache.

    1 where the user's own words say how, where nothing is known of the GPUs, and where no number
    fits.
    """
    options = options_of(extra)
    gpus = _known_gpus(vllm)
    if not gpus or {*_TENSOR, *_PIPELINE, *_ELSEWHERE} & options.keys():
        return 1
    sizes = [size for size in loading_sizes(source) if size <= len(gpus)]
    return _fewest(sizes, total_bytes(source.entries.values()), _usable(gpus, options)) or 1


def loading_sizes(source: Source) -> tuple[int, ...]:
    """The tensor-parallel sizes at which vLLM loads a checkpoint; without a family's table, those
    that cut its heads.
    """
    return sizes_of(*_cut(source))


def _refuse_split(source: Source, split: Split) -> None:
    config, cuts = _cut(source)
    refused = why_not(config, cuts, split)
    if refused:
        rule = f"vLLM must be able to split it at TP {split.size}"
        got = f"{refused.where}: {refused.says}"
        cure = f"Serve it otherwise: it {in_words(config, cuts)}"
        raise VLLMError(source.where, rule, got=got, cure=cure)


def _cut(source: Source) -> tuple[Raw, Cuts]:
    """What ranks share: the language model's config, and the weights that they cut."""
    try:
        return source.text_config, RuntimeView.of(source).cuts
    except RecipeError:
        return source.text_config, {}


def least_gpus(sizes: Sequence[int], num_bytes: int, memory_bytes: int) -> int | None:
    """On how few GPUs of so much memory so many bytes of weights fit, with room for a KV cache;
    None where none of the sizes does.
    """
    return _fewest(sizes, num_bytes, SHARE * memory_bytes / 2**30)


def _number(options: Mapping[str, str], *names: str) -> int:
    """A whole number among options; 0 where there is none."""
    given = [options[name] for name in names if options.get(name, "").isdigit()]
    return int(next(iter(given), 0))


def options_of(words: Sequence[str]) -> dict[str, str]:
    """The options among words for `vllm serve`, spelled with hyphens, and their values, with or
    without an equals sign.
    """
    options = {}
    for word, after in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        options[name.replace("_", "-")] = value if equals else after
    return options


def refuse_options(
    where: str, words: Sequence[str], refused: Mapping[str, str], *, rule: str
) -> None:
    """Refuse options for `vllm serve` that keepmtp must choose.

    Args:
        where: the command.
        words: the user's.
        refused: options, and what to do instead of each.
        rule: why.

    Raises:
        RecipeError: names the first such option.
    """
    for name in options_of(words):
        if name in refused:
            raise RecipeError(where, rule, got=name, cure=refused[name])


def _fewest(sizes: Sequence[int], num_bytes: int, usable: float) -> int | None:
    """The least of these sizes with which the weights fit, and a KV cache, on GPUs of so many
    usable GiB.
    """
    for size in sizes:
        if num_bytes / 2**30 / size <= _WEIGHTS_SHARE * usable:
            return size
    return None


def _usable(gpus: Sequence[GPU], options: Mapping[str, str]) -> float:
    """What vLLM may take of each of these GPUs, in GiB."""
    # It takes a share of each GPU's whole memory, not of what is free.
    share = _share(options)
    return min([min(gpu.free_gib, share * gpu.memory_gib) for gpu in gpus])


def _share(options: Mapping[str, str]) -> float:
    """What vLLM may take of a GPU's memory; what is no share of it is for vLLM to refuse."""
    try:
        share = float(options.get("--gpu-memory-utilization", SHARE))
    except ValueError:
        return SHARE
    if 0 < share <= 1:
        return share
    return SHARE


def _known_gpus(vllm: VLLM) -> Sequence[GPU]:
    """The GPUs that vLLM would use, if something is known of all: those that CUDA_VISIBLE_DEVICES
    names by number.
    """
    gpus = vllm.gpus
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if all(number.strip().isdigit() and int(number) < len(gpus) for number in numbers):
        gpus = [gpus[int(number)] for number in numbers]
    if vllm.build == "cuda" and all(gpu.memory_gib for gpu in gpus):
        return gpus
    return ()
