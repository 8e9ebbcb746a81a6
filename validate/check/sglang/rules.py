"""Rules on what SGLang 0.5.23 does with a checkpoint: does it have a draft, and is each weight stored as it is built?

In: a `RuntimeView`. Out: objections. Rules name the threads of sgl-project/sglang that they are from.

Easy to get wrong: SGLang's loaders pass over a name that they have no parameter for, without a word, so the parameter
keeps what was in memory. Only a name that no target matches, or a shape that differs, makes SGLang raise.
"""

from collections.abc import Callable, Iterator
from functools import partial

from ....checkpoints.stored import StoredWeight
from ...facts.findings import Objection, objection
from .. import rules_mtp
from ..layouts import layout_problem, leaves_built
from ..runtime_view import Member, RuntimeView
from ..vllm_module import VLLMModule
from .asked import Failing, Unread
from .compressed_tensors import SglangCompressedTensors
from .view import SglangBuilt, SglangView
from .words import cure_of, decided, manner, unresolved_cure

SGLANG = "SGLang 0.5.23"
_found = partial(objection, runtime="sglang")
_ELSEWHERE = "Serve it with vLLM, or without a draft"
_CONVERT = "Convert it: `keepmtp convert PATH --to compressed-tensors --out NEW`; or serve it with vLLM"
# SGLang's classes whose loader asserts that there is one MTP layer; the others say so themselves.
_COUNTED = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "GlmOcrForConditionalGeneration",
    }
)


def judge(runtime: RuntimeView) -> Iterator[Objection]:
    """All rules, on one view."""
    view = SglangView(runtime)
    for rule in RULES:
        yield from rule(view)


def draft_class_exists(view: SglangView) -> Iterator[Objection]:
    """SGLang has a class for the model and one for its draft (#32736 lists what it takes for a draft)."""
    if why := view.model.no_draft:
        architecture = (view.runtime.view.config.get("architectures") or ["none"])[0]
        yield _found(
            rule="sglang-draft",
            severity="error",
            where="config.json: architectures",
            says=f"{SGLANG} has no draft for {architecture}: {why} (sglang/srt/configs/model_config.py)",
            cure=_ELSEWHERE,
        )


def config_is_read(view: SglangView) -> Iterator[Objection]:
    """SGLang has a reader for the quantization config, and the reader takes it (#37322)."""
    dialect = view.dialects["backbone"]
    where = "config.json: quantization_config"
    if isinstance(dialect, Failing):
        yield _found(
            rule="sglang-config",
            severity="error",
            where=where,
            says=f"{SGLANG} reads it as {dialect.method} and raises {dialect.error}",
            cure=_ELSEWHERE if "Inkling" in dialect.error else _CONVERT,
        )
    elif isinstance(dialect, Unread):
        yield _found(
            rule="sglang-config",
            severity="warning",
            where=where,
            says=f"is {dialect.method}, whose names keepmtp does not compare as SGLang does: no module is judged",
            cure="Start SGLang with it, and look at the draft's acceptance",
        )


def one_layer_is_promised(view: SglangView) -> Iterator[Objection]:
    """SGLang's loaders assert one MTP layer; where they do not, they build the first of several."""
    runtime = view.runtime
    promised, model = runtime.promised, view.model
    if model.draft is None or promised <= 1 or "{i}" in model.draft:
        return
    key = f"config.json: {runtime.view.mtp_count_key}"
    if (runtime.view.config.get("architectures") or [""])[0] in _COUNTED:
        says, severity = "AssertionError 'Only 1 nextn layer is supported'", "error"
    else:
        says, severity = "no module for the others, and drafts with the first again and again", "warning"
    yield _found(
        rule="sglang-layers",
        severity=severity,  # type: ignore[arg-type]
        where=key,
        says=f"is {promised}: {SGLANG} has {says} (sglang/srt/{model.file})",
        cure="Serve it with vLLM to draft with all layers" if severity == "warning" else "Set it to 1 in a copy",
    )


def stored_form_is_what_is_built(view: SglangView) -> Iterator[Objection]:
    """Each weight agrees with what SGLang builds (#34906, #36599, #36653, #38574, #35797, #38870, #39064, #40597)."""
    for module in () if view.model.no_draft else view.modules:
        resolution = module.resolution
        if isinstance(view.dialects[module.part], Failing):
            continue
        if resolution.error:
            yield _unresolved(view, module)
        elif resolution.built.form != "unknown":
            for member in module.members:
                if not _is_made_over(view, module, member):
                    yield from _compare(view, module, member)


def block_size_is_found(view: SglangView) -> Iterator[Objection]:
    """Of FP8 in blocks, SGLang reads the size from the target `Linear` alone (#32736, #37207)."""
    for module in view.modules:
        dialect = view.dialects[module.part]
        if not isinstance(dialect, SglangCompressedTensors) or "Linear" in dialect.builds:
            continue
        if module.name.endswith(".kv_b_proj") and module.resolution.built.form == "fp8_block":
            yield _found(
                rule="sglang-block-size",
                severity="error",
                where=module.members[0].weight.weight.name,
                says=f"SGLang splits {module.name} after loading and takes the size of its blocks from the target "
                "Linear, which is not in config_groups: it takes the scales for those of rows and raises on their "
                "shape (deepseek_weight_loader.py: _resolve_layer_weight_block_size)",
                cure="Keep kv_b_proj in BF16 or FP8_DYNAMIC, or make Linear the target of the blocks",
                cause=f"{module.part} block",
            )


def absorbed_weight_is_unpacked(view: SglangView) -> Iterator[Objection]:
    """SGLang splits kv_b_proj after loading, and reads `weight` as rows of numbers (deepseek_weight_loader.py)."""
    for module in view.modules:
        built = module.resolution.built
        if not module.name.endswith(".kv_b_proj") or built.form not in ("nvfp4", "nvfp4_modelopt", "int_packed"):
            continue
        for member in module.members:
            if member.weight.form == built.form:
                yield _found(
                    rule="sglang-absorbed",
                    severity="error",
                    where=member.weight.weight.name,
                    says=f"SGLang splits {module.name} after loading and reads its `weight` as one number an input; in "
                    f"{built.form} there is none, or two a byte: it raises, or splits bytes that are no numbers "
                    "(deepseek_weight_loader.py: post_load_weights)",
                    cure="Keep kv_b_proj in BF16 or FP8_DYNAMIC",
                    cause=f"{module.part} {built.form}",
                )


def block_is_whole(view: SglangView) -> Iterator[Objection]:
    """The files hold the promised block: what the files lack, SGLang does not notice (#36507)."""
    if view.model.draft is None:
        return
    for rule in (rules_mtp.promised_layers_exist, rules_mtp.mtp_glue_is_complete, rules_mtp.layers_are_complete):
        for finding, cause, times in rule(view.runtime):
            says = _WORDS.get(finding.rule, "")
            if says and finding.severity == "error":
                changed = {"says": says, "rule": f"sglang-{finding.rule}", "runtime": "sglang"}
                yield Objection(finding.model_copy(update=changed), cause, times)


_WORDS = {
    "mtp-missing": f"no file has a tensor of the MTP layer that config.json promises: {SGLANG} loads none, says "
    "nothing, and drafts from what was in memory",
    "mtp-not-promised": "config.json does not promise the MTP layers that the files hold: SGLang's loader raises "
    "ValueError 'num_nextn_predict_layers is not in the config', or reads them as decoder layers",
    "mtp-incomplete": f"is in no indexed file, and the MTP block cannot work without it: {SGLANG} leaves the parameter "
    "as it was in memory",
    "layer-missing": "no file has a tensor of a decoder layer that config.json promises: SGLang leaves it as it was in "
    "memory",
    "layer-incomplete": "is missing, though the decoder layers of this checkpoint have it: SGLang leaves the parameter "
    "as it was in memory",
}


def cache_scheme_is_read(view: SglangView) -> Iterator[Objection]:
    """Of compressed-tensors' KV schemes SGLang takes static FP8 with one scale; others it ignores with a warning."""
    raw = view.runtime.source.config.get("quantization_config") or {}
    scheme = raw.get("kv_cache_scheme")
    if not isinstance(scheme, dict) or not isinstance(view.dialects["backbone"], SglangCompressedTensors):
        return
    wanted = {"type": "float", "num_bits": 8, "strategy": "tensor"}
    is_taken = all(scheme.get(key) == value for key, value in wanted.items())
    if not is_taken or not scheme.get("symmetric", True) or scheme.get("dynamic"):
        yield _found(
            rule="sglang-kv-cache",
            severity="warning",
            where="config.json: quantization_config.kv_cache_scheme",
            says=f"{SGLANG} ignores it: only static symmetric per-tensor FP8 scales are supported",
            cure="Start SGLang with --kv-cache-dtype, or write static scales",
        )


RULES: tuple[Callable[[SglangView], Iterator[Objection]], ...] = (
    draft_class_exists,
    config_is_read,
    one_layer_is_promised,
    block_is_whole,
    stored_form_is_what_is_built,
    block_size_is_found,
    absorbed_weight_is_unpacked,
    cache_scheme_is_read,
)


def _unresolved(view: SglangView, module: SglangBuilt) -> Objection:
    error = module.resolution.error
    weight = module.members[0].weight
    kind, _, words = error.partition(": ")
    return _found(
        rule="sglang-unresolved",
        severity="error",
        where=module.name,
        says=f"{SGLANG} raises {kind} '{words}' as it builds it; on disk {weight.weight.name} is {manner(weight)}",
        cure=unresolved_cure(view, module),
        cause=f"{module.part} {module.role} {weight.form} {error.partition(' for ')[0]}",
    )


def _compare(view: SglangView, module: SglangBuilt, member: Member) -> Iterator[Objection]:
    built, weight = module.resolution.built, member.weight
    if built.form == weight.form == "plain":
        return
    if built.form == "plain" or weight.form == "plain":
        effect = _lost_scales(weight) if built.form == "plain" else _unwritten(built)
    elif problem := _leaves_problem(built, weight):
        effect = problem
    else:
        return
    name = module.name if module.asks else "it"
    yield _found(
        rule="sglang-form",
        severity="error",
        where=weight.weight.name,
        says=f"stored as {manner(weight)}, but {SGLANG} builds {name} as {built.form} "
        f"({decided(view, module)}): {effect}",
        cure=cure_of(view, module, weight),
        cause=f"{module.part} {module.role} {weight.form} {built.form} {module.resolution.entry}",
    )


def _is_made_over(view: SglangView, module: SglangBuilt, member: Member) -> bool:
    """Weights that a loader of SGLang's makes over: sliced rows of q, k and v, and DeepSeek-V4's FP8 wo_a."""
    is_v4 = view.runtime.view.family.model_type == "deepseek_v4"
    is_wo_a = is_v4 and member.place.row.path == "attn.wo_a" and member.weight.form == "fp8_block"
    return is_wo_a or member.weight.form == "fp8_sliced" or member.place.row.interleaved is not None


def _lost_scales(weight: StoredWeight) -> str:
    if weight.weight.name.endswith(".weight"):
        return "the bytes are taken for numbers, and the scales are passed over without a word"
    return "its loader has no parameter for the packed tensors, passes over them, and never writes the weight"


def _unwritten(built: VLLMModule) -> str:
    if "weight" not in built.leaves:
        return f"its loader has no parameter for `weight`, passes over it, and never writes {min(built.leaves)}"
    if built.form in ("nvfp4_modelopt", "mxfp4"):
        return "the shapes differ and it raises"
    return "the weight is cast to 8 bits, with scales that nothing writes"


def _leaves_problem(built: VLLMModule, weight: StoredWeight) -> str:
    """A tensor too few or too many, or of another shape."""
    have = leaves_built(built, weight).keys()
    if extra := sorted(have - built.leaves - built.optional):
        return f"it has no parameter for {extra[0]} and passes over it"
    if missing := sorted(built.leaves - have):
        return f"nothing writes its {missing[0]}"
    problem = layout_problem(built, weight)
    return problem[1] if problem else ""
