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
from ....checkpoints.dialects.dialect import Dialect, UnknownDialect, VLLMModule
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
_OF_THE_BLOCK = (
    rules_mtp.promised_layers_exist,
    rules_mtp.mtp_glue_is_complete,
    rules_mtp.layers_are_complete,
)


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
    if view.runtime.view.family.method == "dspark":
        says = f"the draft is not judged for {SGLANG}: {why} (sglang/srt/{view.model.file})"
        cure = "Start SGLang with it, and look at the draft's acceptance"
        yield _warning("sglang-draft", "config.json: dspark_target_layer_ids", says, cure)
    elif why:
        architectures = view.runtime.view.config.get("architectures") or ["none"]
        yield _error(
            "sglang-draft",
            "config.json: architectures",
            f"{SGLANG} has no draft for {architectures[0]}: {why} "
            "(sglang/srt/configs/model_config.py)",
            _ELSEWHERE,
        )


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
        yield _warning(
            "sglang-config",
            _CONFIG,
            f"is {dialect.name}, whose names keepmtp does not compare as SGLang does: no module is "
            "judged",
            "Start SGLang with it, and look at the draft's acceptance",
        )


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
    for rule in _OF_THE_BLOCK:
        for objected in rule(view.runtime):
            finding = objected.finding
            says = _BLOCK[finding.rule]
            changed = {"says": says, "rule": f"sglang-{finding.rule}", "runtime": "sglang"}
            yield objected._replace(finding=finding.model_copy(update=changed))


def stored_form_is_what_is_built(view: SglangView) -> Objections:
    """Each weight agrees with what SGLang builds (#34906, #36599, #36653, #38574, #35797, #38870,
    #39064, #40597).
    """
    for module in view.modules:
        dialect = view.dialects[module.part]
        built, _, error, refusal = module.resolution
        is_told = isinstance(dialect, OneAnswer) and dialect.answer.error
        if view.model.no_draft or is_told:
            continue
        weight = module.members[0].weight
        if error:
            # Exceptions of one kind name the module, and have one cause all the same.
            yield _error(
                "sglang-unresolved",
                module.name,
                f"{SGLANG} fails as it builds it ({error}); on disk {weight.weight.name} is "
                f"{manner(weight)}",
                _unresolved_cure(module, dialect),
                f"{module.part} {module.role} {weight.form} {refusal or error}",
            )
            continue
        for member in module.members:
            effect = _effect(view, built, member)
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
        # What is stored in another form is judged by the rule above.
        alike = [each for each in module.members if form in ("fp8_block", each.weight.form)]
        if not module.name.endswith(".kv_b_proj") or not alike:
            continue
        report = partial(
            _error,
            cure="Keep kv_b_proj in BF16 or FP8_DYNAMIC",
            cause=f"{module.part} {form}",
            times=len(alike),
        )
        splits = f"SGLang splits {module.name} after loading and "
        has_size = not isinstance(dialect, CompressedTensors) or "Linear" in dialect.builds
        if form == "fp8_block" and not has_size:
            says = (
                "takes the size of its blocks from the target Linear, which is not in "
                "config_groups: it raises on the "
                "scales' shape (deepseek_weight_loader.py: _resolve_layer_weight_block_size)"
            )
            yield report("sglang-block-size", alike[0].name, splits + says)
        elif form in ("nvfp4", "nvfp4_modelopt", "int_packed"):
            says = (
                f"reads its `weight` as one number an input, which {form} has not: it raises, or "
                "splits bytes that are no numbers (deepseek_weight_loader.py: post_load_weights)"
            )
            yield report("sglang-absorbed", alike[0].name, splits + says)


def cache_scheme_is_read(view: SglangView) -> Objections:
    """Of compressed-tensors' KV schemes SGLang takes static FP8 with one scale; others it ignores
    with a warning.
    """
    raw = view.runtime.source.config.get("quantization_config") or {}
    scheme = raw.get("kv_cache_scheme")
    if not isinstance(scheme, dict) or not isinstance(view.dialects["backbone"], CompressedTensors):
        return
    taken = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    is_static = scheme.get("symmetric", True) and not scheme.get("dynamic")
    if not is_static or {**scheme, **taken} != scheme:
        yield _warning(
            "sglang-kv-cache",
            f"{_CONFIG}.kv_cache_scheme",
            f"{SGLANG} ignores it: only static symmetric per-tensor FP8 scales are supported",
            "Start SGLang with --kv-cache-dtype, or write static scales",
        )


def table_is_looked_up(view: SglangView) -> Objections:
    """SGLang's n-gram table is BF16 or FP8 (models/qwen4_exp.py: _ple_table_is_fp8)."""
    for module in view.runtime.modules:
        first = module.members[0].weight.weight
        if module.role == "table" and first.dtype == "U8":
            says = f"is packed, and {SGLANG} has no {module.name} but in BF16 or FP8"
            yield _error("sglang-table", first.name, says, "Serve it with vLLM 0.33")


RULES: tuple[Callable[[SglangView], Objections], ...] = (
    draft_class_exists,
    config_is_read,
    one_layer_is_promised,
    block_is_whole,
    stored_form_is_what_is_built,
    absorbed_weight_is_read,
    cache_scheme_is_read,
    table_is_looked_up,
)


def _effect(view: SglangView, built: VLLMModule, member: Member) -> str:
    """What comes of a weight that is stored otherwise than it is built; "" where it is not."""
    weight = member.weight
    row = member.place.row
    forms = {built.form, weight.form}
    is_known = not isinstance(view.dialects[member.place.part], UnknownDialect)
    # A loader of SGLang's own makes it over: sliced rows of q, k and v, and what its table names.
    is_remade = weight.form in ("fp8_sliced", view.model.remade.get(row.path))
    if is_remade or row.interleaved is not None or forms == {"plain"}:
        return ""
    if built.form == "unknown" and not (is_known and weight.form == "plain"):
        return ""
    if "plain" in forms:
        return "it passes over what it has no parameter for, and takes other numbers for the weight"
    have = leaves_built(built, weight).keys()
    for extra in sorted(have - built.leaves - built.optional):
        return f"it has no parameter for {extra} and passes over it"
    for missing in sorted(built.leaves - have):
        return f"nothing writes its {missing}"
    _, effect, _ = layout_problem(built, weight) or ("", "", "")
    return effect


def _misbuilt(view: SglangView, module: Module, weight: StoredWeight, effect: str) -> Objection:
    built, entry, *_ = module.resolution
    name = module.name
    dialect = view.dialects[module.part]
    by = f"by {entry or dialect.name}"
    cure = "Store it in BF16: no entry changes it. Or serve it with vLLM"
    if not module.loads_quantized:
        name = "it"  # SGLang gives it no name that an entry could reach
        by = f"sglang/srt/{view.model.file}"
    elif view.why_plain(module.part):
        by = view.why_plain(module.part)
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
    return _error(
        "sglang-form",
        weight.weight.name,
        f"stored as {manner(weight)}, but {SGLANG} builds {name} as {form} ({by}): {effect}",
        cure,
        f"{module.part} {module.role} {weight.form} {built.form} {entry}",
    )


def _unresolved_cure(module: Module, dialect: Dialect) -> str:
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


def _exception(module: Module, dialect: Dialect) -> str:
    """The entry by which SGLang builds a module plain."""
    expression = module.name
    if dialect.name in ("compressed-tensors", "quark"):
        expression = _expression(module)
    return f"Add '{expression}' to {_LISTS.get(dialect.name, 'ignore')}: it is SGLang's name for it"


def _expression(module: Module) -> str:
    """An expression for the module and its parts; routed experts by their stem."""
    tail = "$"
    if module.kind == "experts":
        tail = r"\."
    return f"re:^{re.escape(module.name)}{tail}"
