"""A quantization config as SGLang reads it: what it builds for a name.

In: the config, and the part whose class reads it. Out: a `SglangReader`, which asks vLLM's reader
of the same config, and says what SGLang does otherwise; one answer for all modules where SGLang
raises on the config, or has no reader that keepmtp knows.

Easy to get wrong: lists of modelopt and native FP8 are compared by parts between dots, and a module
that no target of compressed-tensors matches is an exception, where vLLM leaves it plain.

Source: SGLang 0.5.23 configs/model_config.py (_parse_modelopt_quant_config),
layers/quantization/{compressed_tensors,quark}, fp8.py, modelopt_quant.py and utils.py
(is_layer_skipped). Compared with its own classes by tests/checkpoints/test_sglang.py.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import NamedTuple

from ...recipes.errors import CheckpointError, shortened
from ...recipes.family import Part, VLLMName
from ...recipes.family_view import FamilyView
from ...recipes.frozen import Raw, without_none
from ...recipes.renamer import Renamer
from ...recipes.runtimes.vllm import NEWEST
from ..dialects.choose import NO_METHOD, method_of
from ..dialects.compressed_tensors import CompressedTensors, read_compressed_tensors
from ..dialects.dialect import PLAIN, UNKNOWN, Dialect, Kind, Resolution, UnknownDialect
from ..dialects.fp8 import Fp8, read_fp8
from ..dialects.matching import FUSED, MXFP4, SHARDS_DIFFER, left_out, plain, raises, skipped
from ..dialects.modelopt import FOUR_BITS, MIXED, ModelOpt, inverse_blocks, read_modelopt
from ..dialects.quark import Quark, read_quark
from .names import entry_renames, sglang_model

Shards = Sequence[VLLMName]
# Parts of latent attention's projections, which name those of every layer in modelopt's lists.
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
# Modules that Quark's reader knows to be fused although no class says so.
_FUSED_IN_QUARK = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
}

_ONLY_FP8 = "ValueError: ModelOptFp8Config only supports regular FP8 quantization, but found '{}'"


class SglangReader(NamedTuple):
    """A quantization config as SGLang reads it.

    Attributes:
        name: SGLang's name of the reader.
        vllm: the config as vLLM would read it, under SGLang's names.
        resolve: what SGLang builds for a name, its shards and its kind, or why it raises.
    """

    name: str
    vllm: Dialect
    resolve: Callable[[VLLMName, Shards, Kind], Resolution]


def read(raw: Raw, view: FamilyView, part: Part) -> SglangReader:
    """A quantization config as SGLang's class of a part reads it.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no expression.
    """
    method = method_of(raw)
    if not method and ("quant_algo" in raw or "quantization" in raw):
        method = "modelopt"
    if sglang_model(view.config).own_config and "modelopt_quant_config" not in raw:
        error = "KeyError: 'modelopt_quant_config', the only form that its class reads"
        return fixed(method, raises(error))
    rename = entry_renames(view, part, method)
    if method == "compressed-tensors":
        return _compressed_tensors(raw, rename)
    if method == "fp8":
        return _fp8(raw, view.config)
    if method == "quark":
        # What vLLM wants besides it does not look for.
        wanted = {"export": {}, "layer_type_quant_config": {}}
        quark = read_quark(wanted | without_none(raw), rename)
        return SglangReader("quark", quark, cache(partial(_of_quark, quark)))
    if method.startswith("modelopt"):
        return _modelopt(raw, rename)
    unknown = UnknownDialect(name=method or NO_METHOD)
    return SglangReader(unknown.name, unknown, lambda *_: unknown.answer)


def fixed(name: str, answer: Resolution) -> SglangReader:
    """The same answer for every module."""
    return SglangReader(name, Dialect(name=name, answer=answer), lambda *_: answer)


def is_excluded(name: str, entries: Sequence[str]) -> bool:
    """Whether a module stays plain by a list of modelopt's; errors as `read`."""
    return _entry_below(entries, name) is not None or _excluding_entry(entries, name) is not None


# --- compressed-tensors ---------------------------------------------------------------------------


def _compressed_tensors(raw: Raw, rename: Renamer) -> SglangReader:
    found = read_compressed_tensors(raw, rename)
    for key, group in (raw.get("config_groups") or {}).items():
        if not group.get("weights"):
            where = f"config_groups.{key}.weights"
            error = f"ValidationError: SGLang reads {where}, which is not there"
            return fixed(found.name, raises(error))
    format_ = raw.get("format") or ""
    return SglangReader(found.name, found, cache(partial(_of_groups, found, format_)))


def _of_groups(
    groups: CompressedTensors, format_: str, name: VLLMName, shards: Shards, kind: Kind
) -> Resolution:
    is_packed = format_ == "pack-quantized"
    is_experts = kind == "experts"
    if is_experts and "mxfp4" in format_:
        return Resolution(MXFP4)  # whatever the entries say
    answer = groups.resolve(name, shards=shards, kind=kind)
    form = answer.built.form
    if answer == plain() and kind != "head":
        config = "the compressed-tensors config."
        if is_experts:
            name = shards[0]
        error = f"ValueError: Unable to find matching target for {name} in {config}"
        return raises(error, "", "target")
    if answer.refusal == "order":  # which vLLM alone refuses
        answer = answer._replace(error="", refusal="")
    if form == "int_packed" and is_experts and not is_packed:
        return raises(
            "it takes integers of routed experts only where all of the config is pack-quantized"
        )
    has_class = form in ("plain", "nvfp4", "int_packed", "fp8_block", "fp8_channel", "fp8_tensor")
    if is_experts:
        has_class |= is_packed and form == "unknown"
    else:
        has_class |= form == "int8"
    if has_class or (answer.error and answer.refusal != "inputs"):
        return answer
    return raises("it has no class for these weights and inputs")


# --- modelopt, native FP8 and Quark ---------------------------------------------------------------


def _modelopt(raw: Raw, rename: Renamer) -> SglangReader:
    found = read_modelopt(raw, {}, rename, NEWEST)
    if isinstance(found, UnknownDialect):
        if "FP4" in found.name:
            return SglangReader(found.name, found, lambda *_: found.answer)
        return fixed("modelopt", raises(_ONLY_FP8.format(found.name)))
    # It has one reader for FP8, one for NVFP4 and one for both; without an NVFP4 layer it takes
    # MIXED_PRECISION for W4AFP8, which is another thing.
    if found.algorithm == MIXED:
        name = "modelopt_mixed"
        if {*FOUR_BITS}.isdisjoint(found.quantized_layers.values()):
            error = "ValueError: MIXED_PRECISION without an NVFP4 layer is read as W4AFP8"
            return fixed("w4afp8", raises(error))
    elif found.algorithm in FOUR_BITS:
        name = "modelopt_fp4"
    elif found.algorithm == "FP8":
        name = "modelopt_fp8"
    else:
        return fixed("modelopt", raises(_ONLY_FP8.format(found.algorithm)))
    exclude = [rename.name(word) for word in chain(*found.listed.values())]
    if rename.renames is not None:
        # An entry for the language model also counts without its prefix.
        exclude += [entry.removeprefix("language_model.") for entry in exclude]
    found = replace(found, listed={}, looks_above=False)
    return SglangReader(name, found, cache(partial(_of_modelopt, found, exclude)))


def _of_modelopt(
    found: ModelOpt, exclude: Sequence[str], name: VLLMName, shards: Shards, kind: Kind
) -> Resolution:
    answer = None
    if kind != "experts":
        answer = _skipped(name, shards, exclude)
    pattern = _excluding_entry(exclude, name)
    if answer is None and pattern is not None:
        answer = plain(pattern)
    answer = answer or found.resolve(name, shards=shards, kind=kind)
    # Of MIXED_PRECISION, linear modules too have the blocks of native FP8, and none a scale a row.
    if answer.built.form == "fp8_block":
        return answer._replace(built=inverse_blocks(found.block, found.block))
    if answer.built.form == "fp8_channel":
        return answer._replace(built=PLAIN)
    return answer


def _fp8(raw: Raw, config: Raw) -> SglangReader:
    found = read_fp8(raw, config, Renamer())
    # Each entry counts with and without `model.` before it.
    ignored = list[str]()
    for entry in found.words:
        bare = entry.removeprefix("model.")
        ignored += (bare, f"model.{bare}")
    found = replace(found, listed={})
    if found.name != "fp8":
        found = replace(found, experts=UNKNOWN, keeps_mxfp4=())  # DeepSeek-V4's may be MXFP4
    return SglangReader("fp8", found, cache(partial(_of_fp8, found, ignored)))


def _of_fp8(
    found: Fp8, ignored: Sequence[str], name: VLLMName, shards: Shards, kind: Kind
) -> Resolution:
    if kind == "experts":
        shards = ()
    answer = found.resolve(name, shards=shards, kind=kind)
    if kind == "head":
        return answer
    return _skipped(name, shards, ignored) or answer


def _of_quark(quark: Quark, name: VLLMName, shards: Shards, kind: Kind) -> Resolution:
    last = name.rpartition(".")[2]
    parts = [VLLMName(name.replace(last, part)) for part in _FUSED_IN_QUARK.get(last, ())]
    answer = quark.resolve(name, shards=parts or shards, kind=kind)
    if answer.error and not answer.refusal:
        return Resolution(UNKNOWN)  # what it raises on weights and inputs
    return answer


# --- lists ----------------------------------------------------------------------------------------


def _skipped(module: str, shards: Sequence[str], entries: Sequence[str]) -> Resolution | None:
    """`is_layer_skipped`; routed experts have no shards there."""
    last = module.rpartition(".")[2]
    shards = shards or [module.replace(last, part) for part in FUSED.get(last, ())]
    if not shards and "experts" in module:
        answer = skipped(module, (), entries)
        if answer is not None:
            return answer
    hit = partial(_entry_below, entries)
    return left_out(shards or (module,), hit, SHARDS_DIFFER.format(module))


def _entry_below(entries: Iterable[str], name: str) -> str | None:
    """The entry whose parts between dots are in the name.

    So `mlp.gate` does not reach `mlp.gate_up_proj`, but `model.layers.1` reaches all below it and
    nothing of layer 10.
    """
    dotted = f".{name.rstrip('.')}."
    for entry in entries:
        if f".{entry.rstrip('.')}." in dotted:
            return entry
    return None


def _excluding_entry(entries: Iterable[str], name: str) -> str | None:
    """modelopt's `is_layer_excluded`: a glob for the whole name, or for one part of it between
    dots.
    """
    short = name.removeprefix("language_model.")
    parts = {name, short, *name.split(".")}
    for entry in entries:
        tail = entry.rpartition(".")[2]
        is_latent = tail in _LATENT and tail in name.rpartition(".")[2]
        if is_latent or any(map(_glob(entry).fullmatch, parts)):
            return entry
    return None


@cache
def _glob(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry.replace(".", r"\.").replace("*", ".*"))
    except (re.error, OverflowError, RecursionError) as error:
        rule = "must be a glob that SGLang can make a regular expression of, or SGLang raises"
        raise CheckpointError(shortened(entry), rule, got=str(error), cure="Mend it") from error
