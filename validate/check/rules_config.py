"""Rules on the JSON files around the weights: config.json, its quantization config, the index.

In: a `RuntimeView`. Out: objections. Each rule names its sources by their numbers in
docs/failures.md.

Easy to get wrong: vLLM accepts an entry that matches nothing, and builds something else.
rules_forms.py finds that; the rules here say which entry to look at.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.source import INDEX, small_object
from ...recipes.family import HFName
from ..facts.findings import Objection, objection
from .dialects.choose import method_of, quantization_of, read_dialect
from .dialects.compressed_tensors import CompressedTensors
from .dialects.modelopt import ALGORITHMS, ModelOpt, reads_other_file
from .runtime_view import RuntimeView, StoredView
from .vllm_module import ConfigEntry, UnknownDialect

_SIZE_TOLERANCE = 0.01
# The algorithms of modelopt that vLLM names a method for where they are below `quantization`.
_NESTED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


def entries_match_a_module(runtime: RuntimeView) -> Iterator[Objection]:
    """Targets and ignore entries reach a runtime module: R2; F11, F17, F27, F34; G6, H1.

    The usual mistake is an entry with a name on disk. It is reported only if vLLM still builds
    quantized what the entry
    means to leave alone: a second, right entry cures it. An entry that matches nothing at all is
    reported only if the draft is built otherwise than it is stored, because tools write `mtp.*` for
    every family.
    """
    if isinstance(runtime.dialect, UnknownDialect):
        return
    asked, disk = runtime.known_names
    quantized, is_draft_wrong = set[str](), False
    for module in runtime.modules:
        if module.resolution.built.form != "plain":
            quantized.add(module.name)
            is_draft_wrong |= module.part == "mtp" and module.members[0].weight.form == "plain"
    for entry, of_draft in zip(runtime.dialect.entries, runtime.draft_dialect.entries, strict=True):
        known = disk if entry.by_disk else asked
        if any(_matched(runtime, each, known) for each in {entry, of_draft}):
            continue
        names = [entry.written]  # also an expert's, of which `disk` has the first alone
        if HFName(entry.written) not in runtime.placed:
            as_written = ConfigEntry(entry.where, entry.written, (entry.written,))
            names = sorted(_matched(runtime, as_written, disk))
        meant: dict[str, str] = {}
        for name in names:
            if place := runtime.placed.get(HFName(name)):
                meant[name] = place.runtime
        missed = [name for name, module in meant.items() if module in quantized]
        words, mtp = entry.written.replace("\\", ""), runtime.view.mtp_stem(0).rstrip(".")
        if entry.where in ("targets", "quantized_layers"):
            # A name on disk may be written for other readers, next to vLLM's: then all that it
            # means is quantized.
            is_second = meant and len(missed) == len(meant)
            is_class = entry.written.isidentifier()
            if is_class or is_second or _matched(runtime, entry, runtime.sglang_names):
                continue
            says, cause = "matches no module of vLLM's", f"target {bool(meant)}"
            for name in [*meant][:1]:
                says += f": {name} is {meant[name]} there"
        elif missed:
            says = (
                f"is a name on disk: vLLM calls {missed[0]} {meant[missed[0]]} and builds it "
                "quantized all the same"
            )
            cause = "ignore by name on disk"
        elif not meant and is_draft_wrong and any(word in words for word in ("mtp", "nextn", mtp)):
            says = "speaks of the MTP block but matches nothing, neither in vLLM nor on disk"
            cause = "ignore nothing"
        else:
            continue
        says, cure = f"({entry.where}) {says}", "Write vLLM's name, or remove the entry"
        yield objection("entry-unmatched", entry.written, says, cure, cause, severity="warning")


def _matched(runtime: RuntimeView, entry: ConfigEntry, names: frozenset[str]) -> list[str]:
    """The names that an entry reaches; an entry of compressed-tensors that is no expression is
    compared as a whole.
    """
    if found := [word for word in entry.read if word in names]:
        return found
    is_pattern = entry.written.startswith("re:") or not isinstance(
        runtime.dialect, CompressedTensors
    )
    return [*runtime.dialect.covered(entry, names)] if is_pattern else []


def quantization_configs_agree(runtime: RuntimeView) -> Iterator[Objection]:
    """config.json and hf_quant_config.json say the same: R5; M11."""
    config = runtime.source.config
    given, other = quantization_of(config), runtime.hf_quant_config
    if given is None or other is None:
        return
    where, warn = f"{HF_QUANT_CONFIG}: quantization", partial(objection, severity="warning")
    first = read_dialect(config, None, dtypes=runtime.dtypes)
    second = read_dialect(_without_quantization(config), other)
    if not isinstance(first, ModelOpt) or not isinstance(second, ModelOpt):
        # DeepSeek-V4 with NVFP4 experts repeats modelopt's keys in a config of another method.
        inner = other.get("quantization")
        inner = inner if isinstance(inner, Mapping) else {}
        pairs = (("quant_algo", "quant_algo"), ("ignore", "exclude_modules"))
        is_repeated = all(given.get(key) == inner.get(there) for key, there in pairs)
        if first.name != second.name and not (inner.get("quant_algo") and is_repeated):
            says = (
                f"is {second.name}, config.json's quantization_config is {first.name}: vLLM reads "
                "config.json, other "
                "engines may read this one"
            )
            cure = "Leave it if its maker wrote both; remove it if it is from another checkpoint"
            yield warn("two-configs", where, says, cure)
        return
    read = HF_QUANT_CONFIG if reads_other_file(given) else "config.json"
    if first.algorithm != second.algorithm:
        says = (
            f"is {second.algorithm}, in config.json {first.algorithm}: vLLM reads {read}, "
            "other engines may read the other"
        )
        cure = "Make both say what is on disk"
        yield objection("two-configs", f"{where}.quant_algo", says, cure)
    for entry in sorted({*first.exclude} ^ {*second.exclude}):
        file = "config.json" if entry in first.exclude else HF_QUANT_CONFIG
        says = (
            f"is excluded in {file} alone: vLLM reads {read} and judges modules by it, other "
            "engines may read the other"
        )
        yield warn("two-configs", entry, says, "Make both lists equal")


def _without_quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    hidden: dict[str, Any] = {"quantization_config": None, "compression_config": None}
    text_config = config.get("text_config")
    return {**config, **hidden, "text_config": {**text_config, **hidden} if text_config else None}


def config_has_what_vllm_reads(runtime: RuntimeView) -> Iterator[Objection]:
    """Keys that a class of vLLM needs, in the length it needs: E5, E6."""
    view, text = runtime.view, runtime.view.text_config
    original = "from the original release's config.json"
    faults: dict[str, tuple[str, str]] = {}
    for key in view.family.loader.needs:
        if text.get(key) is None:
            says = f"is missing: vLLM raises AttributeError: object has no attribute '{key}'"
            faults[key] = says, f"Start {original} and only add quantization_config"
    types, ratios = text.get("layer_types"), text.get("compress_ratios")
    expected = view.num_layers + (view.num_mtp_layers if view.family.layer_types_count_mtp else 0)
    if isinstance(types, list) and len(types) != expected:
        says = (
            f"has {len(types)} entries for num_hidden_layers={view.num_layers}: loading the "
            "config fails"
        )
        counted = "counted" if view.family.layer_types_count_mtp else "not counted"
        faults["layer_types"] = says, f"Take layer_types {original}: MTP layers are {counted}"
    if isinstance(ratios, list) and len(ratios) < view.num_layers:
        says = (
            f"has {len(ratios)} entries for num_hidden_layers={view.num_layers}: vLLM raises "
            "IndexError"
        )
        faults["compress_ratios"] = says, f"Take compress_ratios {original}"
    for key, (says, cure) in faults.items():
        yield objection("config", f"config.json: {key}", says, cure)


def modelopt_is_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """modelopt's algorithm is one that vLLM loads, and hf_quant_config.json has the fields that
    NVFP4 needs: R7.
    """
    dialect, given, other = runtime.dialect, runtime.given, runtime.hf_quant_config or {}
    in_config = given.file == "config.json"
    where, nested = (
        f"{given.file}: quantization{'_config' if in_config else ''}",
        f"{given.file}: quantization",
    )
    faults: dict[str, tuple[str, str]] = {}
    if isinstance(dialect, UnknownDialect) and dialect.name.startswith("modelopt"):
        says = (
            f"is {dialect.name.removeprefix('modelopt ')}: vLLM raises ValueError 'ModelOpt "
            "currently only supports'"
        )
        faults[f"{where}.quant_algo"] = says, f"Export again with one of {', '.join(ALGORITHMS)}"
    is_read = not in_config or (isinstance(dialect, ModelOpt) and reads_other_file(given.raw))
    if other and is_read and not _is_by_modelopt(other) and (in_config or not method_of(other)):
        effect = "takes no quantization method from it and builds a plain model"
        if in_config:
            effect = "raises ValueError 'Unsupported quantization config found for modelopt_mixed'"
        says = f"is not modelopt: vLLM 0.32 {effect}"
        faults[f"{HF_QUANT_CONFIG}: producer.name"] = (
            says,
            "Set it to modelopt, if the file is in modelopt's form",
        )
    if isinstance(dialect, ModelOpt) and given.nested is not None:
        # vLLM 0.32.0 transformers_utils/model_arch_config_convertor.py,
        # _normalize_quantization_config.
        is_named = _is_by_modelopt(given.raw) or "modelopt_quant_config" in given.nested
        if is_named and dialect.algorithm not in _NESTED:
            faults[f"{nested}.quant_algo"] = (
                f"is {dialect.algorithm}: of an algorithm below `quantization` vLLM says "
                "ValueError 'Unknown ModelOpt "
                f"quant algo: {dialect.algorithm}'",
                "Write quantization_config into config.json, with quant_method, quant_algo, "
                "ignore and the rest at its "
                "top level",
            )
        for key in (
            ("group_size", "kv_cache_quant_algo", "exclude_modules")
            if "NVFP4" in dialect.algorithm
            else ()
        ):
            if key not in given.nested:
                says = (
                    "is missing: vLLM raises ValueError 'NVFP4 quantization requires the "
                    "following fields in "
                )
                faults[f"{nested}.{key}"] = (
                    f"{says}hf_quant_config.json'",
                    "Export again with modelopt, or add it",
                )
    for place, (says, cure) in faults.items():
        yield objection("algorithm", place, says, cure)


def _is_by_modelopt(raw: Mapping[str, Any]) -> bool:
    producer = raw.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"


def extras_are_present(runtime: RuntimeView) -> Iterator[Objection]:
    """Keys that a family's runtime wants inside quantization_config: Fp4 (vllm #43288); M12."""
    quantization = quantization_of(runtime.source.config)
    for key, value in runtime.view.family.config_extras.items():
        if quantization is not None and key not in quantization:
            yield objection(
                "extras",
                f"config.json: quantization_config.{key}",
                "is missing: older vLLM raises KeyError, 0.32 picks another scale format for its "
                "FP8 kernels",
                f"Set it to {value!r}",
                severity="warning",
            )


def index_size_is_sane(view: StoredView) -> Iterator[Objection]:
    """The index' total_size is that of the tensors: R6; an index merged by hand tells by it."""
    metadata = (small_object(view.source, INDEX) or {}).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(total, bool) or not isinstance(total, int | float) or not total:
        return
    have = sum(entry.num_bytes for entry in view.source.entries.values())
    if not abs(total - have) <= _SIZE_TOLERANCE * have:  # also where it is no number
        yield objection(
            "index-size",
            "model.safetensors.index.json: metadata.total_size",
            f"is {total}, the tensors have {have} bytes: loaders that plan memory by it go wrong, "
            "and a file may "
            "have been replaced after the index was written",
            "Write the index again from the files",
            severity="warning",
        )


def own_code_is_known(view: StoredView) -> Iterator[Objection]:
    """Python that the checkpoint brings, or takes from another repository: it would run as whoever
    serves it.

    `auto_map` names a class of another repository as ORG/NAME--FILE.CLASS. An `auto_map` alone says
    nothing: a quantized release may keep the key without the files.
    """
    code = [name for name in view.source.code if "/" not in name]
    auto_map = view.source.config.get("auto_map")
    for value in auto_map.values() if isinstance(auto_map, Mapping) else ():
        names = value if isinstance(value, list) else [value]
        code += [
            f"config.json: auto_map {name}"
            for name in names
            if isinstance(name, str) and "--" in name
        ]
    if code:
        yield objection(
            "own-code",
            code[0],
            "is code of the checkpoint: vLLM runs what auto_map names with --trust-remote-code, "
            "and only then",
            "Serve it without --trust-remote-code if vLLM has a class for the model; else read it "
            "first",
            severity="warning",
            times=len(set(code)),
        )


RULES = (
    entries_match_a_module,
    quantization_configs_agree,
    config_has_what_vllm_reads,
    modelopt_is_complete,
    extras_are_present,
    index_size_is_sane,
    own_code_is_known,
)
