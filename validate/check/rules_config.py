"""Rules on the JSON files around the weights: config.json, its quantization config, the index.

In: a `RuntimeView`. Out: objections. Each rule names its sources by their numbers in docs/failures.md.

Easy to get wrong: vLLM accepts an entry that matches nothing, and builds something else. rules_forms.py finds that;
the rules here say which entry to look at.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...recipes.family import HFName
from ..facts.findings import Objection, objection
from .dialects.choose import quantization_of, read_dialect
from .dialects.compressed_tensors import CompressedTensors
from .dialects.methods import method_of
from .dialects.modelopt import ALGORITHMS, ModelOpt, reads_other_file
from .runtime_view import RuntimeView
from .stored_view import StoredView
from .vllm_module import ConfigEntry, UnknownDialect

_SIZE_TOLERANCE = 0.01
# The algorithms of modelopt that vLLM names a method for where they are below `quantization`.
_NESTED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


def entries_match_a_module(runtime: RuntimeView) -> Iterator[Objection]:
    """Targets and ignore entries reach a runtime module: R2; F11, F17, F27, F34; G6, H1.

    The usual mistake is an entry with a name on disk. It is reported only if vLLM still builds quantized what the entry
    means to leave alone: a second, right entry cures it. An entry that matches nothing at all is reported only if the
    draft is built otherwise than it is stored, because tools write `mtp.*` for every family.
    """
    if isinstance(runtime.dialect, UnknownDialect):
        return
    asked, disk = runtime.known_names
    is_draft_wrong = _is_draft_wrong(runtime)
    for entry, of_draft in zip(runtime.dialect.entries, runtime.draft_dialect.entries, strict=True):
        known = disk if entry.by_disk else asked
        if _reaches(runtime, entry, known) or (of_draft != entry and _reaches(runtime, of_draft, known)):
            continue
        meant = _meant(runtime, entry, disk)
        if entry.where in ("targets", "quantized_layers"):
            yield from _unmatched_target(runtime, entry, meant)
        else:
            yield from _unmatched_ignore(runtime, entry, meant, is_draft_wrong=is_draft_wrong)


def _unmatched_target(runtime: RuntimeView, entry: ConfigEntry, meant: list[HFName]) -> Iterator[Objection]:
    # A name on disk may be written for other readers, next to vLLM's: then all that it means is built quantized.
    is_second = meant and all(runtime.placed[module].runtime in runtime.quantized for module in meant)
    if _is_class_name(entry) or is_second or _reaches(runtime, entry, runtime.sglang_names):
        return
    there = f": {meant[0]} is {runtime.placed[meant[0]].runtime} there" if meant else ""
    yield objection(
        rule="entry-unmatched",
        severity="warning",
        where=entry.written,
        says=f"({entry.where}) matches no module of vLLM's{there}",
        cure="Write vLLM's name, or remove the entry",
        cause=f"target {bool(meant)}",
    )


def _unmatched_ignore(
    runtime: RuntimeView, entry: ConfigEntry, meant: list[HFName], *, is_draft_wrong: bool
) -> Iterator[Objection]:
    missed = next((module for module in meant if runtime.placed[module].runtime in runtime.quantized), None)
    if missed is not None:
        yield objection(
            rule="entry-unmatched",
            severity="warning",
            where=entry.written,
            says=f"({entry.where}) is a name on disk: vLLM calls {missed} "
            f"{runtime.placed[missed].runtime} and builds it quantized all the same",
            cure="Write vLLM's name",
            cause="ignore by name on disk",
        )
    elif not meant and is_draft_wrong and _speaks_of_mtp(runtime, entry):
        yield objection(
            rule="entry-unmatched",
            severity="warning",
            where=entry.written,
            says=f"({entry.where}) speaks of the MTP block but matches nothing, neither in vLLM nor on disk",
            cure="Write vLLM's name, or remove the entry",
            cause="ignore nothing",
        )


def _is_draft_wrong(runtime: RuntimeView) -> bool:
    """Whether a module of the draft is plain on disk, and built quantized."""
    return any(
        module.name in runtime.quantized and module.part == "mtp" and module.members[0].weight.form == "plain"
        for module in runtime.modules
    )


def quantization_configs_agree(runtime: RuntimeView) -> Iterator[Objection]:
    """config.json and hf_quant_config.json say the same: R5; M11."""
    given, other = quantization_of(runtime.source.config), runtime.hf_quant_config
    if given is None or other is None:
        return
    where = f"{HF_QUANT_CONFIG}: quantization"
    second = read_dialect(_without_quantization(runtime.source.config), other)
    first = read_dialect(runtime.source.config, None, dtypes=runtime.dtypes)
    if not isinstance(first, ModelOpt) or not isinstance(second, ModelOpt):
        if first.name != second.name and not _says_the_same(given, other):
            yield objection(
                rule="two-configs",
                severity="warning",
                where=where,
                says=f"is {second.name}, config.json's quantization_config is {first.name}: vLLM reads config.json, "
                "other engines may read this one",
                cure="Leave it if its maker wrote both; remove it if it is from another checkpoint",
            )
        return
    read = HF_QUANT_CONFIG if reads_other_file(given) else "config.json"
    if first.algorithm != second.algorithm:
        yield objection(
            rule="two-configs",
            severity="error",
            where=f"{where}.quant_algo",
            says=f"is {second.algorithm}, in config.json {first.algorithm}: vLLM reads {read}, other engines may read "
            "the other",
            cure="Make both say what is on disk",
        )
    for entry in sorted(set(first.exclude) ^ set(second.exclude)):
        yield objection(
            rule="two-configs",
            severity="warning",
            where=entry,
            says=f"is excluded in {'config.json' if entry in first.exclude else HF_QUANT_CONFIG} alone: vLLM reads "
            f"{read} and judges modules by it, other engines may read the other",
            cure="Make both lists equal",
        )


def _says_the_same(given: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a config of another method repeats modelopt's keys, as DeepSeek-V4 with NVFP4 experts does."""
    inner = other.get("quantization")
    if not isinstance(inner, Mapping) or not inner.get("quant_algo"):
        return False
    return given.get("quant_algo") == inner["quant_algo"] and given.get("ignore") == inner.get("exclude_modules")


def config_has_what_vllm_reads(runtime: RuntimeView) -> Iterator[Objection]:
    """Keys that a class of vLLM needs, in the length it needs: E5, E6."""
    view = runtime.view
    for key in view.family.loader.needs:
        if view.text_config.get(key) is None:
            yield objection(
                rule="config",
                severity="error",
                where=f"config.json: {key}",
                says=f"is missing: vLLM raises AttributeError: object has no attribute '{key}'",
                cure="Start from the original release's config.json and only add quantization_config",
            )
    layer_types = view.text_config.get("layer_types")
    expected = view.num_layers + (view.num_mtp_layers if view.family.layer_types_count_mtp else 0)
    if isinstance(layer_types, list) and len(layer_types) != expected:
        yield objection(
            rule="config",
            severity="error",
            where="config.json: layer_types",
            says=f"has {len(layer_types)} entries for num_hidden_layers={view.num_layers}: loading the config fails",
            cure="Cut it to the decoder layers; MTP layers are not counted"
            if expected == view.num_layers
            else "Take layer_types from the original release's config.json: its MTP layers are counted",
        )
    ratios = view.text_config.get("compress_ratios")
    if isinstance(ratios, list) and len(ratios) < view.num_layers:
        yield objection(
            rule="config",
            severity="error",
            where="config.json: compress_ratios",
            says=f"has {len(ratios)} entries for num_hidden_layers={view.num_layers}: vLLM raises IndexError",
            cure="Take compress_ratios from the original release's config.json",
        )


def modelopt_is_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """modelopt's algorithm is one that vLLM loads, and hf_quant_config.json has the fields that NVFP4 needs: R7."""
    dialect = runtime.dialect
    given = quantization_of(runtime.source.config)
    file = HF_QUANT_CONFIG if given is None else "config.json"
    if isinstance(dialect, UnknownDialect) and dialect.name.startswith("modelopt"):
        yield objection(
            rule="algorithm",
            severity="error",
            where=f"{file}: {'quantization' if given is None else 'quantization_config'}.quant_algo",
            says=f"is {dialect.name.removeprefix('modelopt ')}: vLLM raises ValueError 'ModelOpt currently only "
            "supports: ...'",
            cure=f"Export again with one of {', '.join(ALGORITHMS)}",
        )
    other = runtime.hf_quant_config or {}
    is_read = given is None or (isinstance(dialect, ModelOpt) and reads_other_file(given))
    if other and is_read and not _is_by_modelopt(other) and (given is not None or not method_of(other)):
        effect = "raises ValueError 'Unsupported quantization config found for modelopt_mixed'"
        yield objection(
            rule="algorithm",
            severity="error",
            where=f"{HF_QUANT_CONFIG}: producer.name",
            says="is not modelopt: vLLM 0.32 "
            + (effect if given is not None else "takes no quantization method from it and builds a plain model"),
            cure="Set it to modelopt, if the file is in modelopt's form",
        )
    raw = (other if given is None else given) or {}
    inner = raw.get("quantization")
    if isinstance(dialect, ModelOpt) and isinstance(inner, Mapping) and _has_no_nested_name(raw, dialect.algorithm):
        yield objection(
            rule="algorithm",
            severity="error",
            where=f"{file}: quantization.quant_algo",
            says=f"is {dialect.algorithm}: of an algorithm below `quantization` vLLM says ValueError 'Unknown ModelOpt "
            f"quant algo: {dialect.algorithm}'",
            cure="Write quantization_config into config.json, with quant_method, quant_algo, ignore and the rest at "
            "its top level",
        )
    if isinstance(dialect, ModelOpt) and "NVFP4" in dialect.algorithm and isinstance(inner, Mapping):
        for key in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
            if key not in inner:
                yield objection(
                    rule="algorithm",
                    severity="error",
                    where=f"{file}: quantization.{key}",
                    says="is missing: vLLM raises ValueError 'NVFP4 quantization requires the following fields in "
                    "hf_quant_config.json'",
                    cure="Export again with modelopt, or add it",
                )


def _has_no_nested_name(raw: Mapping[str, Any], algorithm: str) -> bool:
    """vLLM 0.32.0 transformers_utils/model_arch_config_convertor.py, _normalize_quantization_config."""
    return (_is_by_modelopt(raw) or "modelopt_quant_config" in raw["quantization"]) and algorithm not in _NESTED


def _is_by_modelopt(raw: Mapping[str, Any]) -> bool:
    producer = raw.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"


def extras_are_present(runtime: RuntimeView) -> Iterator[Objection]:
    """Keys that a family's runtime wants inside quantization_config: Fp4 (vllm #43288); M12."""
    quantization = quantization_of(runtime.source.config)
    for key, value in runtime.view.family.config_extras.items():
        if quantization is not None and key not in quantization:
            yield objection(
                rule="extras",
                severity="warning",
                where=f"config.json: quantization_config.{key}",
                says="is missing: older vLLM raises KeyError, 0.32 picks another scale format for its FP8 kernels",
                cure=f"Set it to {value!r}",
            )


def index_size_is_sane(view: StoredView) -> Iterator[Objection]:
    """The index' total_size is that of the tensors: R6; an index merged by hand tells by it."""
    metadata = (view.index or {}).get("metadata") or {}
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, bool) or not isinstance(total, int | float) or not total:
        return
    have = sum(entry.num_bytes for entry in view.source.entries.values())
    said = total if isinstance(total, int) else f"{total:.0f}"
    if not abs(total - have) <= _SIZE_TOLERANCE * have:  # also where it is no number
        yield objection(
            rule="index-size",
            severity="warning",
            where="model.safetensors.index.json: metadata.total_size",
            says=f"is {said}, the tensors have {have} bytes: loaders that plan memory by it go wrong, and a file "
            "may have been replaced after the index was written",
            cure="Write the index again from the files",
        )


def own_code_is_known(runtime: RuntimeView) -> Iterator[Objection]:
    """Python that the checkpoint brings, or takes from another repository: it would run as whoever serves it.

    An `auto_map` alone says nothing: a quantized release may keep the key without the files.
    """
    elsewhere = sorted(_repositories_of(runtime.source.config))
    cure = "Serve it without --trust-remote-code, since vLLM has a class of its own for this family; or read it"
    yield from own_code(runtime, elsewhere, cure)


def own_code(view: StoredView, elsewhere: Sequence[str], cure: str) -> Iterator[Objection]:
    """Python in the same folder as the weights, and the words of config.json that take it from elsewhere."""
    code = [name for name in view.source.code if "/" not in name] + [*elsewhere]
    if code:
        yield objection(
            rule="own-code",
            severity="warning",
            where=code[0],
            says="is code of the checkpoint: vLLM runs what auto_map names with --trust-remote-code, and only then",
            cure=cure,
            count=len(code),
        )


def _repositories_of(config: Mapping[str, Any]) -> set[str]:
    """Code that `auto_map` takes from another repository, written ORG/NAME--FILE.CLASS."""
    auto_map = config.get("auto_map")
    values = auto_map.values() if isinstance(auto_map, Mapping) else ()
    classes = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return {f"config.json: auto_map {name}" for name in classes if isinstance(name, str) and "--" in name}


RULES = (
    entries_match_a_module,
    quantization_configs_agree,
    config_has_what_vllm_reads,
    modelopt_is_complete,
    extras_are_present,
    index_size_is_sane,
    own_code_is_known,
)


def _reaches(runtime: RuntimeView, entry: ConfigEntry, names: frozenset[str]) -> bool:
    if any(word in names for word in entry.read):
        return True
    return _is_pattern(runtime, entry) and bool(runtime.dialect.covered(entry, names))


def _meant(runtime: RuntimeView, entry: ConfigEntry, disk: frozenset[str]) -> list[HFName]:
    """Modules on disk that the entry as written names."""
    as_written = ConfigEntry(where=entry.where, written=entry.written, read=(entry.written,))
    if not _is_pattern(runtime, entry):
        names = [entry.written] if HFName(entry.written) in runtime.placed else []
    else:
        names = runtime.dialect.covered(as_written, disk)
    return sorted(HFName(name) for name in names if HFName(name) in runtime.placed)


def _is_pattern(runtime: RuntimeView, entry: ConfigEntry) -> bool:
    """Whether matching takes more than comparing whole names."""
    return entry.written.startswith("re:") or not isinstance(runtime.dialect, CompressedTensors)


def _is_class_name(entry: ConfigEntry) -> bool:
    return re.fullmatch(r"\w+", entry.written) is not None


def _speaks_of_mtp(runtime: RuntimeView, entry: ConfigEntry) -> bool:
    words = entry.written.replace("\\", "")
    return "mtp" in words or "nextn" in words or runtime.view.mtp_stem(0).rstrip(".") in words


def _without_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text_config = {
        key: value for key, value in (config.get("text_config") or {}).items() if key != "quantization_config"
    }
    kept = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    return kept | ({"text_config": text_config} if text_config else {})
