"""Rules on what SGLang does with a checkpoint: does it have a draft, and is each weight
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

from ...checkpoints.dialects.dialect import Resolution, UnknownDialect
from ...checkpoints.dialects.layouts import layout_problem, leaves_built, manner
from ...checkpoints.dialects.runtime_view import Member, RuntimeView
from ...checkpoints.sglang import VERSION
from ...checkpoints.sglang.view import SglangBuild
from ...recipes.family import Part
from ..facts.findings import Objection, Objections, objection
from . import rules_mtp

SGLANG = f"SGLang {VERSION}"
_CONFIG = "config.json: quantization_config"
_error = partial(objection, runtime="sglang")
_warning = partial(objection, severity="warning", runtime="sglang")
_TRY = "Start SGLang with it, and look at the draft's acceptance"
_ELSEWHERE = "Serve it with vLLM, or without a draft"
_CONVERT = "Run `keepmtp quantize PATH --set format=compressed-tensors`, or serve it with vLLM"
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
    build = SglangBuild(runtime.view, runtime.given.raw or None)
    for rule in RULES:
        yield from rule(runtime, build)


def draft_class_exists(runtime: RuntimeView, build: SglangBuild) -> Objections:
    """SGLang has a class for the model and one for its draft (#32736 lists what it takes for a
    draft).
    """
    why = build.model.no_draft
    if runtime.view.family.method == "dspark":
        says = f"the draft is not judged for {SGLANG}: {why} (sglang/srt/{build.model.file})"
        yield _warning("sglang-draft", "config.json: dspark_target_layer_ids", says, _TRY)
    elif why:
        architectures = runtime.view.config.get("architectures") or ["none"]
        yield _error(
            "sglang-draft",
            "config.json: architectures",
            f"{SGLANG} has no draft for {architectures[0]}: {why} "
            "(sglang/srt/configs/model_config.py)",
            _ELSEWHERE,
        )


def config_is_read(runtime: RuntimeView, build: SglangBuild) -> Objections:
    """SGLang has a reader for the quantization config, and the reader takes it (#37322)."""
    dialect = build.readers["backbone"].vllm
    if dialect.answer.error:
        says = f"{SGLANG} reads it as {dialect.name} and raises {dialect.answer.error}"
        cure = _CONVERT
        if build.model.own_config:
            cure = _ELSEWHERE
        yield _error("sglang-config", _CONFIG, says, cure)
    elif isinstance(dialect, UnknownDialect):
        says = (
            f"is {dialect.name}, whose names keepmtp does not compare as SGLang does: no module is "
            "judged"
        )
        yield _warning("sglang-config", _CONFIG, says, _TRY)


def one_layer_is_promised(runtime: RuntimeView, build: SglangBuild) -> Objections:
    """SGLang's loaders assert one MTP layer; where they do not, they build the first of several."""
    promised = runtime.promised
    model = build.model
    if model.draft is None or promised <= 1 or "{i}" in model.draft:
        return
    where = f"config.json: {runtime.view.mtp_count_key}"
    says = f"is {promised}: {SGLANG} has "
    if model.asserts_one_layer:
        says += f"AssertionError 'Only 1 nextn layer is supported' (sglang/srt/{model.file})"
        yield _error("sglang-layers", where, says, "Set it to 1 in a copy")
    else:
        says += "no module for the others, and drafts with the first again and again"
        yield _warning("sglang-layers", where, says, "Serve it with vLLM to draft with all layers")


def block_is_whole(runtime: RuntimeView, build: SglangBuild) -> Objections:
    """The files hold the promised block: what the files lack, SGLang does not notice (#36507)."""
    if build.model.draft is None:
        return
    for rule in _OF_THE_BLOCK:
        for objected in rule(runtime):
            finding = objected.finding
            says = _BLOCK[finding.rule]
            changed = {"says": says, "rule": f"sglang-{finding.rule}", "runtime": "sglang"}
            yield objected._replace(finding=finding.model_copy(update=changed))


def stored_form_is_what_is_built(runtime: RuntimeView, build: SglangBuild) -> Objections:
    """Each weight agrees with what SGLang builds (#34906, #36599, #36653, #38574, #35797, #38870,
    #39064, #40597), and SGLang can split kv_b_proj after loading (#32736, #37207).
    """
    failed = set[tuple[str, Part]]()
    dialect = build.readers["backbone"].vllm
    if build.model.no_draft or dialect.answer.error:
        return  # which is objected to
    for module in runtime.modules:
        for member in module.members:
            place = member.place
            if not build.is_judged(place):
                continue
            name, answer = build.resolve(place)
            form = answer.built.form
            if answer.error and (name, place.part) not in failed:
                failed.add((name, place.part))
                yield _unresolved(build, name, answer, member)
            if answer.error:
                continue
            effect = _effect(build, answer, member)
            if effect:
                yield _misbuilt(build, name, answer, member, effect)
            why = build.unsplit(name, answer.built, place.part)
            if why and form in ("fp8_block", member.weight.form):
                rule = "sglang-absorbed"
                if form == "fp8_block":
                    rule = "sglang-block-size"
                says = f"SGLang splits {name} after loading and {why}"
                cure = "Keep kv_b_proj in BF16 or FP8_DYNAMIC"
                yield _error(rule, member.name, says, cure, f"{place.part} {form}")


def table_is_looked_up(runtime: RuntimeView, build: SglangBuild) -> Objections:
    """SGLang's n-gram table is BF16 or FP8 (models/qwen4_exp.py: _ple_table_is_fp8)."""
    for module in runtime.modules:
        first = module.members[0].weight.weight
        if module.role == "table" and first.dtype == "U8":
            says = f"is packed, and {SGLANG} has no {module.name} but in BF16 or FP8"
            yield _error("sglang-table", first.name, says, "Serve it with vLLM 0.33")


RULES: tuple[Callable[[RuntimeView, SglangBuild], Objections], ...] = (
    draft_class_exists,
    config_is_read,
    one_layer_is_promised,
    block_is_whole,
    stored_form_is_what_is_built,
    table_is_looked_up,
)


def _effect(build: SglangBuild, answer: Resolution, member: Member) -> str:
    """What comes of a weight that is stored otherwise than it is built; "" where it is not."""
    built = answer.built
    weight = member.weight
    row = member.place.row
    forms = {built.form, weight.form}
    is_known = not isinstance(build.readers[member.place.part].vllm, UnknownDialect)
    # A loader of SGLang's own makes it over: sliced rows of q, k and v, and what its table names.
    is_remade = weight.form in ("fp8_sliced", build.model.remade.get(row.path))
    if is_remade or row.interleaved or forms == {"plain"}:
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


def _unresolved(build: SglangBuild, name: str, answer: Resolution, member: Member) -> Objection:
    weight = member.weight
    place = member.place
    cure = "Quantize it in a scheme that SGLang has a kernel for: `keepmtp ls schemes`"
    if answer.refusal in ("shards", "projections", "algorithms"):
        cure = "Name all parts of a fused module in the same list, under SGLang's names"
    elif weight.form == "plain" or answer.refusal == "target":
        cure = _entry(build, name, member)
    # Exceptions of one kind name the module, and have one cause all the same.
    return _error(
        "sglang-unresolved",
        name,
        f"{SGLANG} fails as it builds it ({answer.error}); on disk {weight.weight.name} is "
        f"{manner(weight)}",
        cure,
        f"{place.part} {place.role} {weight.form} {answer.refusal or answer.error}",
    )


def _misbuilt(
    build: SglangBuild, name: str, answer: Resolution, member: Member, effect: str
) -> Objection:
    built, entry, *_ = answer
    weight = member.weight
    place = member.place
    by = f"by {entry or build.readers[place.part].name}"
    cure = "Convert it, or quantize the release again in a scheme that SGLang has a kernel for"
    if not name or (place.part == "mtp" and build.why_plain):
        by = entry or f"sglang/srt/{build.model.file}"
        cure = "Store it in BF16: no entry changes it. Or serve it with vLLM"
    elif "plain" in (weight.form, built.form):
        cure = _entry(build, name, member)
    form = built.form.replace("unknown", "quantized weights")
    return _error(
        "sglang-form",
        weight.weight.name,
        f"stored as {manner(weight)}, but {SGLANG} builds {name or 'it'} as {form} ({by}): "
        f"{effect}",
        cure,
        f"{place.part} {place.role} {weight.form} {built.form} {entry}",
    )


def _entry(build: SglangBuild, name: str, member: Member) -> str:
    """What to add where an entry of the config does not reach SGLang's name."""
    dialect = build.readers[member.place.part].name
    if dialect in ("compressed-tensors", "quark"):
        # Of routed experts a stem.
        tail = "$"
        if member.place.role == "experts":
            tail = r"\."
        name = f"re:^{re.escape(name)}{tail}"
    listed = "the entries of its scheme"
    if member.weight.form == "plain":
        listed = _LISTS.get(dialect, "ignore")
    return f"Add '{name}' to {listed}: it is SGLang's name for it"
