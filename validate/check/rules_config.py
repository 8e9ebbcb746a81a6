"""Rules on the files around the weights: config.json, its quantization config, code.

In: a `RuntimeView`. Out: objections. Each rule names its sources by their numbers in
docs/failures.md.

Easy to get wrong: of two quantization configs vLLM reads one, and which one hangs on their keys.
"""

from collections.abc import Mapping

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.dialects.choose import method_of, quantization_of, read_dialect
from ...checkpoints.dialects.dialect import Dialect, UnknownDialect
from ...checkpoints.dialects.given import Raw
from ...checkpoints.dialects.modelopt import ALGORITHMS, ModelOpt, read_modelopt, reads_other_file
from ...checkpoints.dialects.runtime_view import RuntimeView, StoredView
from ...recipes.family import Part, VLLMName
from ...recipes.renamer import renamer
from ..facts.findings import Objections, objection

# The algorithms of modelopt that vLLM names a method for where they are below `quantization`.
_NESTED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")


def quantization_configs_agree(runtime: RuntimeView) -> Objections:
    """config.json and hf_quant_config.json name one algorithm, and leave the same modules plain:
    R5; M11.
    """
    config = runtime.source.config
    given = quantization_of(config)
    other = runtime.hf_quant_config
    if given is None or other is None:
        return
    first = read_dialect(config, None, dtypes=runtime.dtypes, vllm=runtime.vllm)
    # Without its own config a checkpoint has that of the other file.
    named = {"architectures": config.get("architectures")}
    second = read_dialect(named, other, vllm=runtime.vllm)
    if not isinstance(first, ModelOpt) or not isinstance(second, ModelOpt):
        return
    cure = "Make both say what is on disk"
    if first.algorithm != second.algorithm:
        read = "config.json"
        if reads_other_file(given):
            read = HF_QUANT_CONFIG
        says = (
            f"is {second.algorithm}, in config.json {first.algorithm}: vLLM reads {read}, "
            "other engines may read the other"
        )
        where = f"{HF_QUANT_CONFIG}: quantization.quant_algo"
        yield objection("two-configs", where, says, cure)
        return
    if reads_other_file(given):
        return
    names = _plain_in_one(runtime, other)
    if names:
        says = f"excepts other modules than config.json: {names[0]} is plain by one of them alone"
        if len(names) > 1:
            says += f", and so are {len(names) - 1:,} more"
        says += ". vLLM and SGLang read config.json, TensorRT-LLM reads this file"
        where = f"{HF_QUANT_CONFIG}: quantization.exclude_modules"
        yield objection("two-configs", where, says, cure, severity="warning")


def _plain_in_one(runtime: RuntimeView, other: Raw) -> list[VLLMName]:
    """The modules that one of the two files leaves plain, and the other does not."""
    names = list[VLLMName]()
    readers: dict[Part, Dialect] = {"backbone": runtime.dialect, "mtp": runtime.draft_dialect}
    for part, of_config in readers.items():
        rename = renamer(runtime.source.config, part, runtime.vllm)
        of_other = read_modelopt({"quant_method": "modelopt", **other}, {}, rename, runtime.vllm)
        for module in runtime.modules:
            if module.part != part or not module.loads_quantized:
                continue
            forms = set[str]()
            for dialect in (of_config, of_other):
                answer = dialect.resolve(module.name, shards=module.shards, kind=module.kind)
                forms.add(answer.built.form)
            if len(forms) > 1 and "plain" in forms:
                names.append(module.name)
    return names


def config_has_what_vllm_reads(runtime: RuntimeView) -> Objections:
    """Keys that a class of vLLM needs, in the length it needs: E5, E6."""
    view = runtime.view
    text = runtime.view.text_config
    original = "from the original release's config.json"
    faults = dict[str, tuple[str, str]]()
    for key in view.family.loader.needs:
        if text.get(key) is None:
            says = f"is missing: vLLM raises AttributeError: object has no attribute '{key}'"
            faults[key] = says, f"Start {original} and only add quantization_config"
    types = text.get("layer_types")
    ratios = text.get("compress_ratios")
    expected = view.num_layers
    counted = "not counted"
    if view.family.layer_types_count_mtp:
        expected += view.num_mtp_layers
        counted = "counted"
    if isinstance(types, list) and len(types) != expected:
        says = (
            f"has {len(types)} entries for num_hidden_layers={view.num_layers}: loading the "
            "config fails"
        )
        faults["layer_types"] = says, f"Take layer_types {original}: MTP layers are {counted}"
    if isinstance(ratios, list) and len(ratios) < view.num_layers:
        says = (
            f"has {len(ratios)} entries for num_hidden_layers={view.num_layers}: vLLM raises "
            "IndexError"
        )
        faults["compress_ratios"] = says, f"Take compress_ratios {original}"
    for key, (says, cure) in faults.items():
        yield objection("config", f"config.json: {key}", says, cure)


def modelopt_is_complete(runtime: RuntimeView) -> Objections:
    """modelopt's algorithm is one that vLLM loads, and hf_quant_config.json has the fields that
    NVFP4 needs: R7.
    """
    dialect = runtime.dialect
    given = runtime.given
    other = runtime.hf_quant_config or {}
    in_config = given.file == "config.json"
    nested = f"{given.file}: quantization"
    where = nested
    if in_config:
        where = "config.json: quantization_config"
    faults = dict[str, tuple[str, str]]()
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
        says = f"is not modelopt: vLLM {effect}"
        cure = "Set it to modelopt, if the file is in modelopt's form"
        faults[f"{HF_QUANT_CONFIG}: producer.name"] = says, cure
    if isinstance(dialect, ModelOpt) and given.nested is not None:
        # vLLM 0.32.0 transformers_utils/model_arch_config_convertor.py,
        # _normalize_quantization_config.
        is_converted = "modelopt_quant_config" in given.nested
        if dialect.algorithm not in _NESTED and (is_converted or _is_by_modelopt(given.raw)):
            says = (
                f"is {dialect.algorithm}: of an algorithm below `quantization` vLLM says "
                f"ValueError 'Unknown ModelOpt quant algo: {dialect.algorithm}'"
            )
            cure = (
                "Write quantization_config into config.json, with quant_method, quant_algo, ignore "
                "and the rest at its top level"
            )
            faults[f"{nested}.quant_algo"] = says, cure
        says = (
            "is missing: vLLM raises ValueError 'NVFP4 quantization requires the following fields "
            "in hf_quant_config.json'"
        )
        cure = "Export again with modelopt, or add it"
        for key in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
            if "NVFP4" in dialect.algorithm and key not in given.nested:
                faults[f"{nested}.{key}"] = says, cure
    for place, (says, cure) in faults.items():
        yield objection("algorithm", place, says, cure)


def _is_by_modelopt(raw: Raw) -> bool:
    producer = raw.get("producer")
    if not isinstance(producer, Mapping):
        return False
    return producer.get("name") == "modelopt"


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
    if not isinstance(auto_map, Mapping):
        auto_map = {}
    for names in auto_map.values():
        if not isinstance(names, list):
            names = [names]
        for name in names:
            # A class of another repository is ORG/NAME--FILE.CLASS. One of this repository says
            # nothing: a quantized release may keep the key without the files.
            if isinstance(name, str) and "--" in name:
                code.append(f"config.json: auto_map {name}")
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
    quantization_configs_agree,
    config_has_what_vllm_reads,
    modelopt_is_complete,
    extras_are_present,
    own_code_is_known,
)
