"""Rules on what TensorRT-LLM does with a checkpoint in modelopt's dialect. They were read in its source, and not run.

In: a `RuntimeView`. Out: objections; each ends with the file that its rule was read in.

Easy to get wrong: TensorRT-LLM names modules otherwise than vLLM. It excludes a module whose own name, or that of a
module above it, an entry matches as a glob or as `re:` in full; a part of a name excludes nothing. Qwen's and
Nemotron's MTP layers are `model.layers.N` there, N being the number of decoder layers, so `mtp*` reaches none of them.
And of two configs it reads hf_quant_config.json, where vLLM reads config.json.

Source: NVIDIA/TensorRT-LLM, tensorrt_llm/: the files of READ, at their commits where one is given.
"""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..facts.findings import Objection, objection
from .dialects.choose import quantization_of
from .dialects.methods import method_of
from .dialects.patterns import matches_start
from .runtime_view import Member, Module, RuntimeView

READ: Mapping[str, str] = {
    "drafts": "_torch/models/modeling_speculative.py at 00679c66c3e3, MTPForCausalLM",
    "config": "_torch/model_config.py at 008e0af8980f, _build_modelopt_quant_config",
    "exclusion": "models/modeling_utils.py, is_module_excluded_from_quantization",
    "loader": "_torch/models/modeling_glm.py, Glm4WeightLoader",
    "qwen": "_torch/models/checkpoints/hf/qwen3_next_weight_mapper.py at 32e0e21a97db",
    "nemotron": "_torch/models/modeling_nemotron_h.py, _get_mtp_sublayer_quant_config",
    "glue": "_torch/models/modeling_deepseekv3.py and modeling_qwen3_next.py, which build it without a quant_config",
}
# The model_types of MTPForCausalLM; those of models with vision are of their text_config.
DRAFTED = frozenset(
    {
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "exaone_moe",
        "glm4_moe",
        "glm_moe_dsa",
        "nemotron_h",
        "nemotron_h_puzzle",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp_text",
        "step3p5",
        "step3p7",
    }
)
# Whose MTP block is judged name by name: their names on disk, or a mapper that was read.
_BY_NAME = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "nemotron_h", "qwen3_next")
ALGORITHMS = frozenset(
    {
        "FP8",
        "FP8_BLOCK_SCALES",
        "FP8_PB_WO",
        "FP8_PER_CHANNEL_PER_TOKEN",
        "MIXED_PRECISION",
        "MXFP8",
        "NO_QUANT",
        "NVFP4",
        "W4A16_AWQ",
        "W4A16_GPTQ",
        "W4A16_MXFP4",
        "W4A16_NVFP4",
        "W4A8_AWQ",
        "W4A8_MXFP4_FP8",
        "W4A8_MXFP4_MXFP8",
        "W4A8_NVFP4_FP8",
        "W8A16",
        "W8A8_SQ_PER_CHANNEL",
    }
)
_GLUE = (".eh_proj", ".fc")


def judge_for_tensorrt_llm(runtime: RuntimeView) -> Iterator[Objection]:
    """Has it a draft class, does it know the algorithm, and is the MTP block stored as its names resolve?"""
    yield from _draft_class(runtime)
    yield from _missing_layers(runtime)
    given = _given(runtime)
    if given is None or runtime.view.family.model_type not in _BY_NAME:
        yield from _not_judged(runtime, given)
    if given is None:
        return
    algorithm = given.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm.upper() not in ALGORITHMS:
        yield _objection(
            "algorithm",
            where=f"{_file(runtime)}: quant_algo",
            says=f"is {algorithm!r}: QuantAlgo raises ValueError",
            cure="Export again with an algorithm that TensorRT-LLM has",
            read="config",
        )
    elif algorithm.upper() == "MIXED_PRECISION":
        yield from _mixed(runtime, given)
    elif runtime.view.family.model_type in _BY_NAME:
        yield from _blocks(runtime, _entries(given))


def excluded(name: str, entries: tuple[str, ...]) -> str:
    """The entry that leaves a module plain, by its own name or by that of a module above it; "" for none."""
    while name:
        for entry in entries:
            stem = entry.removesuffix(".*")
            is_whole = (
                matches_start(name, rf"(?:{entry[3:]})\Z") if entry.startswith("re:") else fnmatchcase(name, entry)
            )
            if is_whole or (stem != entry and fnmatchcase(name, stem)):
                return entry
        name = name.rpartition(".")[0]
    return ""


def name_in_tensorrt_llm(runtime: RuntimeView, module: str) -> str:
    """What TensorRT-LLM calls a module that is named so on disk."""
    layers = runtime.view.num_layers
    if runtime.view.family.model_type == "qwen3_next":
        if match := re.match(r"mtp\.layers\.(\d+)\.(.*)", module):
            return f"model.layers.{layers + int(match[1])}.{match[2]}"
        return re.sub(r"^mtp\.", f"model.layers.{layers}.", module)
    if runtime.view.family.model_type == "nemotron_h":
        return re.sub(r"^mtp\.", f"model.layers.{layers}.", module).replace("backbone", "model", 1)
    return module


def _draft_class(runtime: RuntimeView) -> Iterator[Objection]:
    model_type = str(runtime.view.text_config.get("model_type", ""))
    if model_type in DRAFTED:
        return
    yield _objection(
        "draft",
        where="config.json: model_type",
        says=f"is {model_type!r}: ValueError 'Model type {model_type} not supported for MTP'",
        cure="Serve it without speculative_config there, or with vLLM",
        read="drafts",
    )


def _missing_layers(runtime: RuntimeView) -> Iterator[Objection]:
    """The files hold the MTP layers that config.json promises."""
    for index in sorted(set(range(runtime.promised)) - runtime.found):
        yield _objection(
            "mtp-missing",
            where=f"{runtime.view.mtp_stem(index)}*",
            says="has no tensor in any indexed file, though config.json promises the layer: it finds no weight to load",
            cure="Put the release's block in: `keepmtp graft PATH --from RELEASE --out NEW`",
            read="loader",
        )


def _not_judged(runtime: RuntimeView, given: Mapping[str, Any] | None) -> Iterator[Objection]:
    """What keepmtp has read nothing about: silence would read as good."""
    what = (
        f"is {runtime.dialect.name}"
        if given is None
        else f"is modelopt's, of the family {runtime.view.family.model_type}"
    )
    if runtime.dialect.name == "none":
        return
    yield objection(
        rule="tensorrt-llm-dialect",
        runtime="tensorrt-llm",
        severity="warning",
        where="config.json: quantization_config",
        says=f"{what}: TensorRT-LLM's names were read of {', '.join(_BY_NAME)} under modelopt alone, so the "
        "MTP block is not judged for it",
        cure="Load it there once, and look at the acceptance that it reports",
    )


def _given(runtime: RuntimeView) -> Mapping[str, Any] | None:
    """modelopt's config as TensorRT-LLM reads it; None where there is none."""
    file, said = runtime.hf_quant_config, quantization_of(runtime.source.config)
    if file is not None and isinstance(file.get("quantization"), Mapping):
        return file["quantization"]
    if said is None or not method_of(said).startswith("modelopt"):
        return None
    inner = said.get("quantization")
    return inner if isinstance(inner, Mapping) else {**said, "exclude_modules": said.get("ignore")}


def _file(runtime: RuntimeView) -> str:
    return "config.json" if runtime.hf_quant_config is None else "hf_quant_config.json"


def _entries(given: Mapping[str, Any]) -> tuple[str, ...]:
    listed = given.get("exclude_modules")
    return tuple(entry for entry in listed if isinstance(entry, str)) if isinstance(listed, list | tuple) else ()


def _mixed(runtime: RuntimeView, given: Mapping[str, Any]) -> Iterator[Objection]:
    """A mixture must say the algorithm of each layer."""
    layers = given.get("quantized_layers")
    if not isinstance(layers, Mapping) or not layers:
        yield _objection(
            "algorithm",
            where=f"{_file(runtime)}: quantized_layers",
            says="is missing under MIXED_PRECISION: TypeError, it is gone through",
            cure="Export again with modelopt, which writes it",
            read="config",
        )


def _blocks(runtime: RuntimeView, entries: tuple[str, ...]) -> Iterator[Objection]:
    """The MTP block: what an entry excludes is plain on disk, and what none excludes is packed."""
    is_nemotron = runtime.view.family.model_type == "nemotron_h"
    for module in runtime.modules:
        if module.part != "mtp" or module.role in ("norm", "router", "head", "embedding"):
            continue
        for member in module.members:
            name = name_in_tensorrt_llm(runtime, member.weight.module)
            is_glue = name.endswith(_GLUE)
            entry = "" if is_glue or is_nemotron else _entry_for(module, name, entries)
            is_plain = bool(entry) or is_glue or is_nemotron
            reason = "nemotron" if is_nemotron else "glue" if is_glue else "exclusion"
            reason = "qwen" if reason == "exclusion" and name != member.weight.module else reason
            yield from _compare(member, name, entry, reason, is_plain=is_plain)


def _entry_for(module: Module, name: str, entries: tuple[str, ...]) -> str:
    """The entry that excludes a module; routed experts are one module with the name above theirs."""
    if module.kind == "experts":
        name = name[: name.index(".experts") + len(".experts")] if ".experts" in name else name
    return excluded(name, entries)


def _compare(member: Member, name: str, entry: str, reason: str, *, is_plain: bool) -> Iterator[Objection]:
    weight = member.weight
    if len(weight.weight.shape) < 2 or (weight.form == "plain") == is_plain:
        return
    if is_plain:
        by = f"the entry {entry!r} excludes it" if entry else "it is built plain whatever the config says"
        says = f"is packed, but TensorRT-LLM calls it {name}, and {by}: its scales have no parameter"
        cure = f"Narrow {entry!r}" if entry else "Store it in BF16: `keepmtp graft PATH --from RELEASE --out NEW`"
    else:
        says = f"is plain, but TensorRT-LLM calls it {name}, and no entry excludes that: it waits for scales and raises"
        cure = f"Add '{_layer_of(name)}*' to exclude_modules, in both configs; vLLM has no use for it and takes it"
    cause = f"{reason} {entry} {is_plain}"
    yield _objection("form", where=weight.weight.name, says=says, cure=cure, read=reason, cause=cause)


def _layer_of(name: str) -> str:
    """The prefix of a module's layer, or the module above it."""
    match = re.match(r"model\.layers\.\d+", name)
    return match[0] if match else name.rpartition(".")[0]


def _objection(rule: str, *, where: str, says: str, cure: str, read: str, cause: str = "") -> Objection:
    says = f"{says} (read in TensorRT-LLM, not run: {READ[read]})"
    rule = f"tensorrt-llm-{rule}"
    return objection(
        rule=rule, runtime="tensorrt-llm", severity="error", where=where, says=says, cure=cure, cause=cause
    )
