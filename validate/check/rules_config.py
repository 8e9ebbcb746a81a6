"""Rules on the files around the weights: config.json, its quantization config, code.

In: a `RuntimeView`. Out: objections. Each rule names its sources by their numbers in
docs/tables/failures.md.

Easy to get wrong: of two quantization configs vLLM reads one, and which one hangs on their keys.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.dialects.choose import method_of, quantization_of, without_quantization
from ...checkpoints.dialects.dialect import UnknownDialect
from ...checkpoints.dialects.given import Raw
from ...checkpoints.dialects.modelopt import ALGORITHMS, MIXED, ModelOpt, reads_other_file
from ...checkpoints.dialects.runtime_view import RuntimeView, StoredView
from ...recipes.errors import did_you_mean
from ...recipes.families import is_drafted
from ...recipes.family import VLLMName
from ...recipes.runtimes.vllm import asked, minor
from ..facts.findings import Objections, objection

_ORIGINAL = "from the original release's config.json"
# The algorithms of modelopt that vLLM names a method for where they are below `quantization`.
_NESTED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


def quantization_configs_agree(runtime: RuntimeView) -> Objections:
    """config.json and hf_quant_config.json are of one tool, name one algorithm, and leave the same
    modules plain: R5; M11.
    """
    config = runtime.source.config
    given = quantization_of(config)
    if given is None or runtime.hf_quant_config is None:
        return
    first = runtime.dialect
    is_other_read = reads_other_file(given)
    if not isinstance(first, ModelOpt):
        if "producer" not in given and not is_other_read:
            yield objection(
                "two-tools",
                HF_QUANT_CONFIG,
                f"is another tool's config: vLLM reads config.json, which says {first.name}; "
                "engines that look for this file first read other names and scales than are stored",
                f"Remove {HF_QUANT_CONFIG}",
                severity="warning",
            )
        return
    # Without its own config a checkpoint has that of the other file.
    source = replace(runtime.source, config=without_quantization(config))
    others = RuntimeView(source, runtime.view, vllm=runtime.vllm)
    second = others.dialect
    if not isinstance(second, ModelOpt):
        return
    cure = "Make both say what is on disk"
    algorithm = first.algorithm
    read = "config.json"
    if is_other_read:
        algorithm = MIXED
        read = HF_QUANT_CONFIG
    if algorithm != second.algorithm:
        yield objection(
            "two-configs",
            f"{HF_QUANT_CONFIG}: quantization.quant_algo",
            f"is {second.algorithm}, in config.json {algorithm}: vLLM reads {read}, "
            "other engines may read the other",
            cure,
        )
    elif not is_other_read:
        names = list[VLLMName]()  # plain by one of the two files
        for module, same in zip(runtime.modules, others.modules, strict=True):
            forms = {module.resolution.built.form, same.resolution.built.form}
            if module.loads_quantized and len(forms) > 1 and "plain" in forms:
                names.append(module.name)
        for name in names[:1]:
            yield objection(
                "two-configs",
                f"{HF_QUANT_CONFIG}: quantization.exclude_modules",
                f"excepts other modules than config.json: {name} is plain by one of them alone. "
                "vLLM and SGLang read config.json, TensorRT-LLM reads this file",
                cure,
                severity="warning",
                times=len(names),
            )


def config_has_what_vllm_reads(runtime: RuntimeView) -> Objections:
    """Keys that a class of vLLM needs, in the length it needs: E5, E6."""
    view = runtime.view
    text = view.text_config
    activation = text.get("hidden_act")
    taken = view.family.activations
    if taken and activation not in (None, *taken):
        says = f"is {activation}: vLLM raises ValueError 'Unsupported activation', and takes "
        says += " and ".join(taken)
        yield objection("config", "config.json: hidden_act", says, f"Take hidden_act {_ORIGINAL}")
    for key in view.family.loader.needs:
        if text.get(key) is None:
            yield objection(
                "config",
                f"config.json: {key}",
                f"is missing: vLLM raises AttributeError: object has no attribute '{key}'",
                f"Start {_ORIGINAL} and only add quantization_config",
            )
    types = text.get("layer_types")
    ratios = text.get("compress_ratios")
    expected = view.num_layers
    counted = "not counted"
    if view.family.layer_types_count_mtp:
        expected += view.num_mtp_layers
        counted = "counted"
    for_layers = f"entries for num_hidden_layers={view.num_layers}"
    if isinstance(types, list) and len(types) != expected:
        cured_by = "none"
        if len(types) > expected:
            cured_by = "edit"
        yield objection(
            "config",
            "config.json: layer_types",
            f"has {len(types)} {for_layers}: loading the config fails",
            f"Take layer_types {_ORIGINAL}: MTP layers are {counted}",
            cured_by=cured_by,
        )
    if isinstance(ratios, list) and len(ratios) < view.num_layers:
        yield objection(
            "config",
            "config.json: compress_ratios",
            f"has {len(ratios)} {for_layers}: vLLM raises IndexError",
            f"Take compress_ratios {_ORIGINAL}",
        )


def architecture_is_known(runtime: RuntimeView) -> Objections:
    """vLLM has a class for one of the architectures.

    vLLM 0.33.0 model_executor/models/registry.py, resolve_model_cls; config/speculative.py,
    hf_config_override.
    """
    config = runtime.source.config
    named = config.get("architectures") or []
    known = asked(runtime.vllm).models
    # A draft alone is of its target's class; of strange layers another rule knows the class.
    if not known.isdisjoint(named) or not runtime.view.num_layers or runtime.strange_layers:
        return
    if named or not is_drafted(config, runtime.vllm):
        says = f"is {named}, and vLLM {minor(runtime.vllm)} has no class of that name"
        cure = f"Take architectures {_ORIGINAL}"
        cure = did_you_mean(" ".join(named[:1]), known, otherwise=cure)
        yield objection("config", "config.json: architectures", says, cure)


def modelopt_is_complete(runtime: RuntimeView) -> Objections:
    """modelopt's algorithm is one that vLLM loads, and hf_quant_config.json has the fields that
    NVFP4 needs: R7.
    """
    dialect = runtime.dialect
    file, raw, nested = runtime.given
    other = runtime.hf_quant_config or {}
    in_config = file == "config.json"
    below = f"{file}: quantization"
    where = below
    if in_config:
        where = "config.json: quantization_config"
    report = partial(objection, "algorithm")
    if isinstance(dialect, UnknownDialect) and dialect.name.startswith("modelopt"):
        yield report(
            f"{where}.quant_algo",
            f"is {dialect.name.removeprefix('modelopt ')}: vLLM raises ValueError 'ModelOpt "
            "currently only supports'",
            f"Export again with one of {', '.join(ALGORITHMS)}",
        )
    is_read = not in_config or (isinstance(dialect, ModelOpt) and reads_other_file(raw))
    if other and is_read and not _is_by_modelopt(other) and (in_config or not method_of(other)):
        effect = "takes no quantization method from it and builds a plain model"
        if in_config:
            effect = "raises ValueError 'Unsupported quantization config found for modelopt_mixed'"
        yield report(
            f"{HF_QUANT_CONFIG}: producer.name",
            f"is not modelopt: vLLM {effect}",
            "Set it to modelopt, if the file is in modelopt's form",
        )
    if not isinstance(dialect, ModelOpt) or nested is None:
        return
    # vLLM 0.32.0 transformers_utils/model_arch_config_convertor.py,
    # _normalize_quantization_config.
    is_converted = "modelopt_quant_config" in nested or _is_by_modelopt(raw)
    if dialect.algorithm not in _NESTED and is_converted:
        yield report(
            f"{below}.quant_algo",
            f"is {dialect.algorithm}: of an algorithm below `quantization` vLLM says ValueError "
            f"'Unknown ModelOpt quant algo: {dialect.algorithm}'",
            "Write quantization_config into config.json, with quant_method, quant_algo, ignore "
            "and the rest at its top level",
            cured_by="edit",
        )
    for key in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
        if "NVFP4" in dialect.algorithm and key not in nested:
            yield report(
                f"{below}.{key}",
                "is missing: vLLM raises ValueError 'NVFP4 quantization requires the following "
                "fields in hf_quant_config.json'",
                "Export again with modelopt, or add it",
                cured_by="edit",
            )


def _is_by_modelopt(raw: Raw) -> bool:
    producer = raw.get("producer")
    return isinstance(producer, Mapping) and producer.get("name") == "modelopt"


def extras_are_present(runtime: RuntimeView) -> Objections:
    """Keys that a family's runtime wants inside quantization_config: Fp4 (vllm #43288); M12."""
    quantization = quantization_of(runtime.source.config)
    for key, value in runtime.view.family.config_extras.items():
        if quantization is not None and key not in quantization:
            yield objection(
                "extras",
                f"config.json: quantization_config.{key}",
                "is missing: vLLM before 0.32 raises KeyError, later ones pick another scale "
                "format for their FP8 kernels",
                f"Set it to {value!r}",
                severity="warning",
            )


def own_code_is_known(view: StoredView) -> Objections:
    """Python that the checkpoint brings, or takes from another repository: it would run as whoever
    serves it.
    """
    code = [name for name in view.source.code if "/" not in name]
    auto_map = view.source.config.get("auto_map")
    if isinstance(auto_map, Mapping):
        for names in auto_map.values():
            for name in names if isinstance(names, list) else [names]:
                # A class of another repository is ORG/NAME--FILE.CLASS. One of this repository
                # says nothing: a quantized release may keep the key without the files.
                if "--" in str(name):
                    code.append(f"config.json: auto_map {name}")
    for first in code[:1]:
        yield objection(
            "own-code",
            first,
            "is code of the checkpoint: vLLM runs what auto_map names with --trust-remote-code, "
            "and only then",
            "Serve it without --trust-remote-code if vLLM has a class for the model; else read it "
            "first",
            severity="warning",
            times=len({*code}),
        )


RULES = (
    quantization_configs_agree,
    config_has_what_vllm_reads,
    architecture_is_known,
    modelopt_is_complete,
    extras_are_present,
    own_code_is_known,
)
