"""Rules on what SGLang 0.5.23 does with a checkpoint: does it have a draft, and is each weight
stored as it is built?

In: a `RuntimeView`. Out: objections. Rules name the threads of sgl-project/sglang that they are
from.

Easy to get wrong: SGLang's loaders pass over a name that they have no parameter for, without a
word, so the parameter keeps what was in memory. Only a name that no target matches, or a shape that
differs, makes SGLang raise. A cure names SGLang's module. The entry for vLLM's stays: both servers
read the same list.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial

from ....checkpoints.stored import StoredWeight
from ...facts.findings import Objection, objection
from .. import rules_mtp
from ..dialects.compressed_tensors import CompressedTensors
from ..dialects.matching import OneAnswer
from ..layouts import layout_problem, leaves_built
from ..runtime_view import Member, Module, RuntimeView
from ..vllm_module import UnknownDialect, VLLMModule
from .view import SglangView

SGLANG = "SGLang 0.5.23"
_CONFIG = "config.json: quantization_config"
_error = partial(objection, runtime="sglang", severity="error")
_warning = partial(objection, runtime="sglang", severity="warning")
_ELSEWHERE = "Serve it with vLLM, or without a draft"
_CONVERT = (
    "Convert it: `keepmtp convert PATH --to compressed-tensors --out NEW`; or serve it with vLLM"
)
# The list of what stays plain, where it is not called `ignore`.
_LISTS = {"quark": "exclude", "fp8": "modules_to_not_convert"}
# What SGLang does where rules_mtp finds that the block is not whole.
_BLOCK = {
    "mtp-missing": (
        f"no file has a tensor of the MTP layer that config.json promises: {SGLANG} loads none, "
        "says nothing, and drafts from what was in memory"
    ),
    "mtp-not-promised": (
        "config.json does not promise the MTP layers that the files hold: SGLang's loader raises "
        "ValueError 'num_nextn_predict_layers is not in the config', or reads them as decoder "
        "layers"
    ),
    "mtp-incomplete": (
        f"is in no indexed file, and the MTP block cannot work without it: {SGLANG} leaves the "
        "parameter as it was in memory"
    ),
    "layer-missing": (
        "no file has a tensor of a decoder layer that config.json promises: SGLang leaves it as "
        "it was in memory"
    ),
    "layer-incomplete": (
        "is missing, though the decoder layers of this checkpoint have it: SGLang leaves the "
        "parameter as it was in memory"
    ),
}


def judge(runtime: RuntimeView) -> Iterator[Objection]:
    """All rules, on one view."""
    view = SglangView(runtime)
    for rule in RULES:
        yield from rule(view)


def draft_class_exists(view: SglangView) -> Iterator[Objection]:
    """SGLang has a class for the model and one for its draft (#32736 lists what it takes for a
    draft).
    """
    if why := view.model.no_draft:
        architecture = (view.runtime.view.config.get("architectures") or ["none"])[0]
        says = (
            f"{SGLANG} has no draft for {architecture}: {why} (sglang/srt/configs/model_config.py)"
        )
        yield _error(
            rule="sglang-draft", where="config.json: architectures", says=says, cure=_ELSEWHERE
        )


def config_is_read(view: SglangView) -> Iterator[Objection]:
    """SGLang has a reader for the quantization config, and the reader takes it (#37322)."""
    dialect = view.dialects["backbone"]
    if isinstance(dialect, OneAnswer) and dialect.answer.error:
        says = f"{SGLANG} reads it as {dialect.name} and raises {dialect.answer.error}"
        cure = _ELSEWHERE if view.model.own_config else _CONVERT
        yield _error(rule="sglang-config", where=_CONFIG, says=says, cure=cure)
    elif isinstance(dialect, UnknownDialect):
        says = (
            f"is {dialect.name}, whose names keepmtp does not compare as SGLang does: no module "
            "is judged"
        )
        cure = "Start SGLang with it, and look at the draft's acceptance"
        yield _warning(rule="sglang-config", where=_CONFIG, says=says, cure=cure)


def one_layer_is_promised(view: SglangView) -> Iterator[Objection]:
    """SGLang's loaders assert one MTP layer; where they do not, they build the first of several."""
    promised, model = view.runtime.promised, view.model
    if model.draft is None or promised <= 1 or "{i}" in model.draft:
        return
    found = partial(_warning, cure="Serve it with vLLM to draft with all layers")
    says = "no module for the others, and drafts with the first again and again"
    if model.asserts_one_layer:
        found = partial(_error, cure="Set it to 1 in a copy")
        says = "AssertionError 'Only 1 nextn layer is supported'"
    where = f"config.json: {view.runtime.view.mtp_count_key}"
    yield found(
        rule="sglang-layers",
        where=where,
        says=f"is {promised}: {SGLANG} has {says} (sglang/srt/{model.file})",
    )


def block_is_whole(view: SglangView) -> Iterator[Objection]:
    """The files hold the promised block: what the files lack, SGLang does not notice (#36507)."""
    if view.model.draft is None:
        return
    for rule in (
        rules_mtp.promised_layers_exist,
        rules_mtp.mtp_glue_is_complete,
        rules_mtp.layers_are_complete,
    ):
        for finding, cause, times in rule(view.runtime):
            if finding.rule in _BLOCK and finding.severity == "error":
                changed = {
                    "says": _BLOCK[finding.rule],
                    "rule": f"sglang-{finding.rule}",
                    "runtime": "sglang",
                }
                yield Objection(finding.model_copy(update=changed), cause, times)


def stored_form_is_what_is_built(view: SglangView) -> Iterator[Objection]:
    """Each weight agrees with what SGLang builds (#34906, #36599, #36653, #38574, #35797, #38870,
    #39064, #40597).
    """
    for module in () if view.model.no_draft else view.modules:
        dialect, resolution = view.dialects[module.part], module.resolution
        if isinstance(dialect, OneAnswer) and dialect.answer.error:
            continue
        if resolution.error:
            yield _unresolved(module)
        elif resolution.built.form != "unknown":
            for member in module.members:
                effect = (
                    "" if _is_made_over(view, member) else _effect(resolution.built, member.weight)
                )
                if effect:
                    yield _misbuilt(view, module, member.weight, effect)


def absorbed_weight_is_read(view: SglangView) -> Iterator[Objection]:
    """SGLang splits kv_b_proj after loading, and reads `weight` as rows of numbers (#32736,
    #37207).

    Of FP8 in blocks it reads the size of a block from the target `Linear` alone.
    """
    for module in view.modules:
        form, dialect = module.resolution.built.form, view.dialects[module.part]
        alike = [each for each in module.members if form in ("fp8_block", each.weight.form)]
        stored = [each.weight.weight.name for each in alike]
        if not stored or not module.name.endswith(".kv_b_proj"):
            continue
        says = f"SGLang splits {module.name} after loading and "
        has_size = not isinstance(dialect, CompressedTensors) or "Linear" in dialect.targets.builds
        found = partial(_error, where=stored[0], count=len(stored), cause=f"{module.part} {form}")
        if form == "fp8_block" and not has_size:
            says += (
                "takes the size of its blocks from the target Linear, which is not in "
                "config_groups: it takes the scales for those of rows and raises on their shape "
                "(deepseek_weight_loader.py: _resolve_layer_weight_block_size)"
            )
            cure = "Keep kv_b_proj in BF16 or FP8_DYNAMIC, or make Linear the target of the blocks"
            yield found(rule="sglang-block-size", says=says, cure=cure)
        elif form in ("nvfp4", "nvfp4_modelopt", "int_packed"):
            says += (
                f"reads its `weight` as one number an input; in {form} there is none, or two a "
                "byte: it raises, or "
                "splits bytes that are no numbers (deepseek_weight_loader.py: post_load_weights)"
            )
            yield found(
                rule="sglang-absorbed", says=says, cure="Keep kv_b_proj in BF16 or FP8_DYNAMIC"
            )


def cache_scheme_is_read(view: SglangView) -> Iterator[Objection]:
    """Of compressed-tensors' KV schemes SGLang takes static FP8 with one scale; others it ignores
    with a warning.
    """
    raw = view.runtime.source.config.get("quantization_config") or {}
    scheme = raw.get("kv_cache_scheme")
    if not isinstance(scheme, dict) or not isinstance(view.dialects["backbone"], CompressedTensors):
        return
    wanted = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    is_taken = all(scheme.get(key) == value for key, value in wanted.items())
    if is_taken and scheme.get("symmetric", True) and not scheme.get("dynamic"):
        return
    yield _warning(
        rule="sglang-kv-cache",
        where=f"{_CONFIG}.kv_cache_scheme",
        says=f"{SGLANG} ignores it: only static symmetric per-tensor FP8 scales are supported",
        cure="Start SGLang with --kv-cache-dtype, or write static scales",
    )


RULES: tuple[Callable[[SglangView], Iterator[Objection]], ...] = (
    draft_class_exists,
    config_is_read,
    one_layer_is_promised,
    block_is_whole,
    stored_form_is_what_is_built,
    absorbed_weight_is_read,
    cache_scheme_is_read,
)


def _unresolved(module: Module) -> Objection:
    error, weight = module.resolution.error, module.members[0].weight
    return _error(
        rule="sglang-unresolved",
        where=module.name,
        says=f"{SGLANG} fails as it builds it ({error}); on disk {weight.weight.name} is "
        f"{_manner(weight)}",
        cure=_unresolved_cure(module),
        cause=f"{module.part} {module.role} {weight.form} {error.partition(' for ')[0]}",
    )


def _misbuilt(view: SglangView, module: Module, weight: StoredWeight, effect: str) -> Objection:
    built, entry = module.resolution.built, module.resolution.entry
    name = module.name if module.loads_quantized else "it"
    return _error(
        rule="sglang-form",
        where=weight.weight.name,
        says=f"stored as {_manner(weight)}, but {SGLANG} builds {name} as {built.form} "
        f"({_decided(view, module)}): {effect}",
        cure=_form_cure(view, module, weight),
        cause=f"{module.part} {module.role} {weight.form} {built.form} {entry}",
    )


def _is_made_over(view: SglangView, member: Member) -> bool:
    """Weights that a loader of SGLang's makes over: sliced rows of q, k and v, and DeepSeek-V4's
    FP8 wo_a.
    """
    is_v4 = view.runtime.view.family.model_type == "deepseek_v4"
    is_wo_a = is_v4 and member.place.row.path == "attn.wo_a" and member.weight.form == "fp8_block"
    return is_wo_a or member.weight.form == "fp8_sliced" or member.place.row.interleaved is not None


def _effect(built: VLLMModule, weight: StoredWeight) -> str:
    """What comes of a weight that is stored otherwise than it is built; "" where it is not."""
    if built.form == "plain" or weight.form == "plain":
        if built.form == weight.form:
            return ""
        return _lost_scales(weight) if built.form == "plain" else _unwritten(built)
    have = leaves_built(built, weight).keys()
    if extra := sorted(have - built.leaves - built.optional):
        return f"it has no parameter for {extra[0]} and passes over it"
    if missing := sorted(built.leaves - have):
        return f"nothing writes its {missing[0]}"
    problem = layout_problem(built, weight)
    return problem[1] if problem else ""


def _lost_scales(weight: StoredWeight) -> str:
    if weight.weight.name.endswith(".weight"):
        return "the bytes are taken for numbers, and the scales are passed over without a word"
    return (
        "its loader has no parameter for the packed tensors, passes over them, and never writes "
        "the weight"
    )


def _unwritten(built: VLLMModule) -> str:
    if "weight" not in built.leaves:
        return (
            "its loader has no parameter for `weight`, passes over it, and never writes "
            f"{min(built.leaves)}"
        )
    if built.form in ("nvfp4_modelopt", "mxfp4"):
        return "the shapes differ and it raises"
    return "the weight is cast to 8 bits, with scales that nothing writes"


def _manner(weight: StoredWeight) -> str:
    """How a weight is stored."""
    if weight.form == "plain":
        return f"plain {weight.weight.dtype}"
    return f"{weight.form} ({', '.join(weight.parts)})"


def _decided(view: SglangView, module: Module) -> str:
    """What made SGLang build it so, with its file."""
    if not module.loads_quantized:
        return f"sglang/srt/{view.model.file}"
    if why := view.why_plain(module.part):
        return why
    if entry := module.resolution.entry:
        return f"by the entry {entry!r}"
    name = view.dialects[module.part].name
    return "by no quantization config" if name == "none" else f"by {name}"


def _unresolved_cure(module: Module) -> str:
    """What to write where SGLang raises as it builds a module."""
    error = module.resolution.error
    if "matching target" in error:
        which = "ignore" if module.members[0].weight.form == "plain" else "the targets of its group"
        return f"Add '{_expression(module)}' to {which}: it is SGLang's name for it"
    if any(words in error for words in ("shards", "MoE projections", "Mixed quant_algo")):
        return "Name all parts of a fused module in the same list, under SGLang's names"
    if "pack-quantized" in error:
        return (
            "Quantize routed experts alone (format pack-quantized), or to NVFP4 or FP8: see "
            "`keepmtp ls schemes`"
        )
    return "Quantize it in a scheme that SGLang has a kernel for: `keepmtp ls schemes`"


def _form_cure(view: SglangView, module: Module, weight: StoredWeight) -> str:
    """What to do where a weight is stored otherwise than SGLang builds it."""
    if not module.loads_quantized or view.why_plain(module.part):
        return "Store it in BF16: no entry changes it. Or serve it with vLLM"
    if weight.form != "plain":
        if module.resolution.built.form == "plain":
            return (
                f"Let an entry reach {module.name}: it is SGLang's name for it, or store the "
                "weight in BF16"
            )
        return "Convert it, or quantize the release again in a scheme that SGLang has a kernel for"
    dialect = view.dialects[module.part].name
    entry = _expression(module) if dialect in ("compressed-tensors", "quark") else module.name
    return f"Add '{entry}' to {_LISTS.get(dialect, 'ignore')}: it is SGLang's name for it"


def _expression(module: Module) -> str:
    """An expression for the module and its parts; routed experts by their stem."""
    tail = r"\." if module.kind == "experts" else "$"
    return f"re:^{re.escape(module.name)}{tail}"
