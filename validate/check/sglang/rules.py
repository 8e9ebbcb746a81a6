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
from collections.abc import Callable
from functools import partial

from ....checkpoints.dialects.compressed_tensors import CompressedTensors
from ....checkpoints.dialects.dialect import UnknownDialect, VLLMModule
from ....checkpoints.dialects.matching import OneAnswer
from ....checkpoints.dialects.runtime_view import Member, Module, RuntimeView
from ....checkpoints.stored import StoredWeight
from ...facts.findings import Objection, Objections, objection
from .. import rules_mtp
from ..layouts import layout_problem, leaves_built, manner
from .view import SglangView

SGLANG = "SGLang 0.5.23"
_CONFIG = "config.json: quantization_config"
_error = partial(objection, runtime="sglang")
_warning = partial(objection, severity="warning", runtime="sglang")
_ELSEWHERE = "Serve it with vLLM, or without a draft"
_CONVERT = (
    "Convert it: `keepmtp convert PATH --to compressed-tensors --out NEW`; or serve it with vLLM"
)
# The list of what stays plain, where it is not called `ignore`.
_LISTS = {"quark": "exclude", "fp8": "modules_to_not_convert"}
# What SGLang does where rules_mtp finds that the block is not whole.
_LOST = (
    f"is in no indexed file, though config.json or the other layers promise it: {SGLANG} says "
    "nothing, and drafts from what was in memory"
)
_BLOCK = {
    **dict.fromkeys(("mtp-missing", "mtp-incomplete", "layer-missing", "layer-incomplete"), _LOST),
    "mtp-not-promised": "config.json does not promise the MTP layers that the files hold: SGLang's "
    "loader raises ValueError, or reads them as decoder layers",
}


def judge(runtime: RuntimeView) -> Objections:
    """All rules, on one view."""
    view = SglangView(runtime)
    for rule in RULES:
        yield from rule(view)


def draft_class_exists(view: SglangView) -> Objections:
    """SGLang has a class for the model and one for its draft (#32736 lists what it takes for a
    draft).
    """
    why = view.model.no_draft
    if why:
        architectures = view.runtime.view.config.get("architectures") or ["none"]
        says = (
            f"{SGLANG} has no draft for {architectures[0]}: {why} "
            "(sglang/srt/configs/model_config.py)"
        )
        yield _error("sglang-draft", "config.json: architectures", says, _ELSEWHERE)


def config_is_read(view: SglangView) -> Objections:
    """SGLang has a reader for the quantization config, and the reader takes it (#37322)."""
    dialect = view.dialects["backbone"]
    if isinstance(dialect, OneAnswer) and dialect.answer.error:
        says = f"{SGLANG} reads it as {dialect.name} and raises {dialect.answer.error}"
        cure = _CONVERT
        if view.model.own_config:
            cure = _ELSEWHERE
        yield _error("sglang-config", _CONFIG, says, cure)
    elif isinstance(dialect, UnknownDialect):
        says = (
            f"is {dialect.name}, whose names keepmtp does not compare as SGLang does: no "
            "module is judged"
        )
        cure = "Start SGLang with it, and look at the draft's acceptance"
        yield _warning("sglang-config", _CONFIG, says, cure)


def one_layer_is_promised(view: SglangView) -> Objections:
    """SGLang's loaders assert one MTP layer; where they do not, they build the first of several."""
    promised = view.runtime.promised
    model = view.model
    if model.draft is None or promised <= 1 or "{i}" in model.draft:
        return
    where = f"config.json: {view.runtime.view.mtp_count_key}"
    says = f"is {promised}: {SGLANG} has "
    if model.asserts_one_layer:
        says += f"AssertionError 'Only 1 nextn layer is supported' (sglang/srt/{model.file})"
        yield _error("sglang-layers", where, says, "Set it to 1 in a copy")
    else:
        says += "no module for the others, and drafts with the first again and again"
        yield _warning("sglang-layers", where, says, "Serve it with vLLM to draft with all layers")


def block_is_whole(view: SglangView) -> Objections:
    """The files hold the promised block: what the files lack, SGLang does not notice (#36507)."""
    if view.model.draft is None:
        return
    rules = (
        rules_mtp.promised_layers_exist,
        rules_mtp.mtp_glue_is_complete,
        rules_mtp.layers_are_complete,
    )
    for rule in rules:
        for objected in rule(view.runtime):
            finding = objected.finding
            if finding.rule in _BLOCK and finding.severity == "error":
                changed = {
                    "says": _BLOCK[finding.rule],
                    "rule": f"sglang-{finding.rule}",
                    "runtime": "sglang",
                }
                yield objected._replace(finding=finding.model_copy(update=changed))


def stored_form_is_what_is_built(view: SglangView) -> Objections:
    """Each weight agrees with what SGLang builds (#34906, #36599, #36653, #38574, #35797, #38870,
    #39064, #40597).
    """
    if view.model.no_draft:
        return
    for module in view.modules:
        dialect = view.dialects[module.part]
        answer = module.resolution
        if isinstance(dialect, OneAnswer) and dialect.answer.error:
            continue
        if answer.error:
            weight = module.members[0].weight
            kind = f"{module.part} {module.role} {weight.form}"
            says = (
                f"{SGLANG} fails as it builds it ({answer.error}); on disk "
                f"{weight.weight.name} is {manner(weight)}"
            )
            # Exceptions of one kind name the module, and have one cause all the same.
            cause = f"{kind} {answer.refusal or answer.error}"
            cure = _unresolved_cure(module, dialect.name)
            yield _error("sglang-unresolved", module.name, says, cure, cause)
        else:
            for member in module.members:
                effect = _effect(view, answer.built, member)
                if effect:
                    yield _misbuilt(view, module, member.weight, effect)


def absorbed_weight_is_read(view: SglangView) -> Objections:
    """SGLang splits kv_b_proj after loading, and reads `weight` as rows of numbers (#32736,
    #37207).

    Of FP8 in blocks it reads the size of a block from the target `Linear` alone.
    """
    for module in view.modules:
        form = module.resolution.built.form
        dialect = view.dialects[module.part]
        if not module.name.endswith(".kv_b_proj"):
            continue
        alike = module.members
        if form != "fp8_block":
            # What is stored in another form is judged by the rule above.
            alike = [member for member in module.members if member.weight.form == form]
        if not alike:
            continue
        rule = ""
        says = f"SGLang splits {module.name} after loading and "
        has_size = not isinstance(dialect, CompressedTensors) or "Linear" in dialect.builds
        if form == "fp8_block" and not has_size:
            rule = "sglang-block-size"
            says += (
                "takes the size of its blocks from the target Linear, which is not in "
                "config_groups: it raises on the "
                "scales' shape (deepseek_weight_loader.py: _resolve_layer_weight_block_size)"
            )
        elif form in ("nvfp4", "nvfp4_modelopt", "int_packed"):
            rule = "sglang-absorbed"
            says += (
                f"reads its `weight` as one number an input, which {form} has not: it raises, or "
                "splits bytes that are no numbers (deepseek_weight_loader.py: post_load_weights)"
            )
        if rule:
            cure = "Keep kv_b_proj in BF16 or FP8_DYNAMIC"
            cause = f"{module.part} {form}"
            yield _error(rule, alike[0].name, says, cure, cause, times=len(alike))


def cache_scheme_is_read(view: SglangView) -> Objections:
    """Of compressed-tensors' KV schemes SGLang takes static FP8 with one scale; others it ignores
    with a warning.
    """
    raw = view.runtime.source.config.get("quantization_config") or {}
    scheme = raw.get("kv_cache_scheme")
    if not isinstance(scheme, dict) or not isinstance(view.dialects["backbone"], CompressedTensors):
        return
    is_fp8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    is_static = scheme.get("symmetric", True) and not scheme.get("dynamic")
    if not is_fp8 or not is_static or scheme.get("strategy") != "tensor":
        says = f"{SGLANG} ignores it: only static symmetric per-tensor FP8 scales are supported"
        cure = "Start SGLang with --kv-cache-dtype, or write static scales"
        yield _warning("sglang-kv-cache", f"{_CONFIG}.kv_cache_scheme", says, cure)


RULES: tuple[Callable[[SglangView], Objections], ...] = (
    draft_class_exists,
    config_is_read,
    one_layer_is_promised,
    block_is_whole,
    stored_form_is_what_is_built,
    absorbed_weight_is_read,
    cache_scheme_is_read,
)


def _effect(view: SglangView, built: VLLMModule, member: Member) -> str:
    """What comes of a weight that is stored otherwise than it is built; "" where it is not."""
    weight = member.weight
    row = member.place.row
    dialect = view.dialects[member.place.part]
    is_unknown = built.form == "unknown"
    if is_unknown and (weight.form != "plain" or isinstance(dialect, UnknownDialect)):
        return ""
    # A loader of SGLang's own makes it over: sliced rows of q, k and v, and what its table names.
    is_remade = view.model.remade.get(row.path) == weight.form
    if is_remade or weight.form == "fp8_sliced" or row.interleaved is not None:
        return ""
    if built.form == "plain" or weight.form == "plain":
        if built.form == weight.form:
            return ""
        return "it passes over what it has no parameter for, and takes other numbers for the weight"
    have = leaves_built(built, weight).keys()
    extra = have - built.leaves - built.optional
    if extra:
        return f"it has no parameter for {min(extra)} and passes over it"
    missing = built.leaves - have
    if missing:
        return f"nothing writes its {min(missing)}"
    problem = layout_problem(built, weight)
    if problem:
        return problem[1]
    return ""


def _misbuilt(view: SglangView, module: Module, weight: StoredWeight, effect: str) -> Objection:
    built = module.resolution.built
    entry = module.resolution.entry
    name = module.name
    dialect = view.dialects[module.part].name
    why_plain = view.why_plain(module.part)
    by = f"by {entry or dialect}"
    cure = "Store it in BF16: no entry changes it. Or serve it with vLLM"
    if not module.loads_quantized:
        name = "it"  # SGLang gives it no name that an entry could reach
        by = f"sglang/srt/{view.model.file}"
    elif why_plain:
        by = why_plain
    elif weight.form == "plain":
        cure = _exception(module, dialect)
    elif built.form == "plain":
        cure = (
            f"Let an entry reach {module.name}: it is SGLang's name for it, or store the "
            "weight in BF16"
        )
    else:
        cure = "Convert it, or quantize the release again in a scheme that SGLang has a kernel for"
    form = built.form.replace("unknown", "quantized weights")
    says = f"stored as {manner(weight)}, but {SGLANG} builds {name} as {form} ({by}): {effect}"
    cause = f"{module.part} {module.role} {weight.form} {built.form} {entry}"
    return _error("sglang-form", weight.weight.name, says, cure, cause)


def _unresolved_cure(module: Module, dialect: str) -> str:
    """What to write where SGLang raises as it builds a module."""
    refusal = module.resolution.refusal
    if refusal in ("shards", "parts", "projections", "algorithms"):
        return "Name all parts of a fused module in the same list, under SGLang's names"
    if module.is_plain:
        return _exception(module, dialect)
    if refusal == "target":
        return (
            f"Add '{_expression(module)}' to the targets of its group: it is SGLang's name for it"
        )
    return "Quantize it in a scheme that SGLang has a kernel for: `keepmtp ls schemes`"


def _exception(module: Module, dialect: str) -> str:
    """The entry by which SGLang builds a module plain."""
    expression = module.name
    if dialect in ("compressed-tensors", "quark"):
        expression = _expression(module)
    return f"Add '{expression}' to {_LISTS.get(dialect, 'ignore')}: it is SGLang's name for it"


def _expression(module: Module) -> str:
    """An expression for the module and its parts; routed experts by their stem."""
    tail = "$"
    if module.kind == "experts":
        tail = r"\."
    return f"re:^{re.escape(module.name)}{tail}"
