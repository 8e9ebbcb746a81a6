"""Rules on how weights are stored: the form on disk must be the form that vLLM builds.

In: a `RuntimeView`. Out: objections. Each rule names its sources by their numbers in docs/failures.md.

Easy to get wrong: whether vLLM raises. A packed weight has a parameter name of its own, so vLLM raises on a plain
weight in its place. An FP8 weight has the name `weight`, as a plain one has. So vLLM casts a plain weight in silence,
and never writes its scale. And headers cannot tell whether somebody has put the rows of a plain `qkv_proj` in order.
vLLM's target reads such a matrix as [q; k; v]; its draft cuts it by rank, which is right for one rank only.
"""

import re
from collections import Counter
from collections.abc import Iterator, Set

from ...checkpoints.stored import FP8, StoredWeight
from ...recipes.family import HFName, VLLMName
from ...recipes.family_view import FamilyView
from ..facts.findings import Objection, objection
from .dialects.compressed_tensors import CompressedTensors
from .layouts import Problem, layout_problem, leaves_built, name_of_leaf
from .runtime_view import Member, Module, RuntimeView
from .vllm_module import VLLMModule
from .words import cover_cure, decided, ignore_cure, packed_in_plain, plain_in_packed, resolution_cure, unknown_name

_IN_THREE = "Store q_proj, k_proj and v_proj in three tensors, as `keepmtp quantize` writes them from the release"


def fused_modules_are_uniform(runtime: RuntimeView) -> Iterator[Objection]:
    """Weights that vLLM fuses must be stored alike, scales included: R3; F8, F20, F28; M1, M15."""
    for module in runtime.modules:
        if not _is_mixed(module):
            continue
        usual = Counter(_manner(member.weight) for member in module.members).most_common(1)[0][0]
        for member in module.members:
            if (manner := _manner(member.weight)) != usual:
                yield objection(
                    rule="fused-uniform",
                    severity="error",
                    where=member.weight.weight.name,
                    says=f"stored as {manner}, but vLLM holds it in {module.name} together with weights stored as "
                    f"{usual}: it raises, or leaves this part of the parameter unwritten in silence",
                    cure="Store all parts of a fused module, and all experts of a layer, in one form with all scales",
                    cause=f"{module.part} {member.place.row.path} {manner} {usual}",
                )


def fused_shards_are_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """Inside one form: all weights of one projection have one shape, and FP8 blocks end where shards do: R15; M2."""
    for module in runtime.modules:
        if len(module.members) < 2:
            continue
        shapes: dict[str, tuple[int, ...]] = {}
        for member in module.members:
            expected = shapes.setdefault(member.place.row.path, member.weight.weight.shape)
            if member.weight.weight.shape != expected:
                yield objection(
                    rule="shapes",
                    severity="error",
                    where=member.weight.weight.name,
                    says=f"has shape {list(member.weight.weight.shape)} where the others of its projection have "
                    f"{list(expected)}: a narrower expert loads in silence, the rest raises",
                    cure="Quantize this weight again",
                    cause=f"{module.part} {member.place.row.path}",
                )
        built = module.resolution.built
        if built.form != "fp8_block" or not built.block:
            continue
        for member in module.members:
            is_last = member.place.row.path in runtime.view.last_shards and module.kind != "experts"
            rows = member.weight.weight.shape[0]
            if rows % built.block[0] and not is_last and member.weight.form == "fp8_block":
                yield objection(
                    rule="shapes",
                    severity="error",
                    where=member.weight.weight.name,
                    says=f"has {rows} rows, no multiple of the block of {built.block[0]}, and is fused with others: "
                    "vLLM raises ValueError (validate_fp8_block_shape)",
                    cure="Use FP8_DYNAMIC or BF16 for this module",
                    cause=f"block {module.part} {member.place.row.path}",
                )


def stored_form_is_what_is_built(runtime: RuntimeView) -> Iterator[Objection]:
    """Each weight agrees with what the config resolves for its runtime name: R2, R7; F11-F29, F34, F35; Fp5, G1-G6, H1.

    It finds three faults: plain on disk but built packed; packed on disk but built plain; packed in both, but with
    other tensors. vLLM may also raise while it resolves a module: shards that disagree, FP8 blocks with
    `input_activations: null` (M10).
    """
    for module in runtime.modules:
        if not module.loads_quantized:
            continue
        resolution = module.resolution
        if resolution.error:
            yield objection(
                rule="config-group",
                severity="error",
                where=resolution.entry or module.name,
                says=f"vLLM fails as it builds {module.name} ({module.members[0].weight.weight.name}): "
                f"{resolution.error}",
                cure=resolution_cure(resolution.error),
                cause=_cause_of(module),
            )
        elif resolution.built.form != "unknown" and not _is_mixed(module):
            for member in module.members:
                if not is_put_in_order(module, member) and not _is_replaced(runtime.view, module, member):
                    yield from _compare(runtime, module, member)


def glue_is_plain(runtime: RuntimeView) -> Iterator[Objection]:
    """Modules that vLLM builds without a quantization config must be plain: R4; F13, F38, F42; Fp9, G5, H7; M5."""
    for module in runtime.modules:
        if module.loads_quantized:
            continue
        for member in module.members:
            weight = member.weight
            if weight.form == "plain" or member.place.row.table_scale or _is_dequantized_on_load(runtime.view, member):
                continue
            if _is_replaced(runtime.view, module, member):
                continue
            yield objection(
                rule="glue",
                severity="error",
                where=weight.weight.name,
                says=f"stored as {_manner(weight)}, but vLLM builds it plain whatever the config says "
                f"({member.place.row.why_kept}): {packed_in_plain(runtime.view, module, member)}",
                cure="Store it in BF16: copy it from the original release, or dequantize it",
                cause=f"{module.part} {member.place.row.path} {weight.form}",
            )


def draft_head_is_excluded(runtime: RuntimeView) -> Iterator[Objection]:
    """A dialect that quantizes heads must exclude the draft's placeholder head: R10; F36, F38 (vllm #57532)."""
    for name, disk in _draft_heads(runtime):
        weight = runtime.weights.get(disk)
        resolution = runtime.resolve(name, (), "head", "mtp")
        form = resolution.built.form
        if form not in ("nvfp4_modelopt", "gptq", "awq") or (weight is not None and weight.form != "plain"):
            continue
        effect = "KeyError, or a parameter that nothing fills"
        if form == "nvfp4_modelopt":
            effect = "RuntimeError 'NVFP4 weight_scale for layer ... was never loaded (still NaN)', or a shape mismatch"
        yield objection(
            rule="draft-head",
            severity="error",
            where=name,
            says=f"vLLM builds the draft's head as {_TITLES.get(form, form)}, for which the checkpoint has no scales: "
            f"{effect}",
            cure=f"Exclude {name}" + ("" if disk == name else f"; an entry for {disk} does not reach it"),
            cause="draft head",
        )


_TITLES = {"nvfp4_modelopt": "NVFP4"}


def interleaved_rows_are_put_in_order(runtime: RuntimeView) -> Iterator[Objection]:
    """q, k and v in one tensor, as in MiMo-V2.5, load right in the release's own FP8 only: vllm #42803, #57508."""
    for module in runtime.modules:
        for member in module.members:
            if member.place.row.interleaved and not is_put_in_order(module, member):
                yield _unordered(module, member)


def is_put_in_order(module: Module, member: Member) -> bool:
    """Whether vLLM computes the order of the rows: FP8 with `weight_scale_inv`, built as that form."""
    has_leaves = {"weight", "weight_scale_inv"} == set(member.weight.parts) == module.resolution.built.leaves
    return bool(member.place.row.interleaved) and has_leaves and member.weight.weight.dtype in FP8


RULES = (
    fused_modules_are_uniform,
    stored_form_is_what_is_built,
    fused_shards_are_complete,
    glue_is_plain,
    draft_head_is_excluded,
    interleaved_rows_are_put_in_order,
)


def _compare(runtime: RuntimeView, module: Module, member: Member) -> Iterator[Objection]:
    built, weight = module.resolution.built, member.weight
    if built.form == "plain" and weight.form == "plain":
        return
    by = decided(runtime, module)
    if built.form == "plain":
        says = (
            f"stored as {_manner(weight)}, but vLLM builds {module.name} plain ({by}): "
            f"{packed_in_plain(runtime.view, module, member)}"
        )
        cure = cover_cure(runtime, module)
        cause = f"built plain {module.part} {weight.form} {module.resolution.entry}"
        where = weight.weight.name
    elif weight.form == "plain":
        says = (
            f"stored as {_manner(weight)}, but vLLM builds {module.name} as {built.form} ({by}): "
            f"{plain_in_packed(runtime.view, module, built)}"
        )
        cure = ignore_cure(runtime, module)
        cause = f"built packed {module.part} {built.form} {module.resolution.entry}"
        where = weight.weight.name
    elif problem := _leaves_problem(runtime.view, module, built, leaves_built(built, weight).keys()) or layout_problem(
        built, weight
    ):
        leaf, said, cure = problem
        where = name_of_leaf(built, weight, leaf)
        says = f"vLLM builds {module.name} as {built.form} ({by}); {said}"
        cause = f"{module.part} {built.form} {leaf} {re.sub(r'[0-9]+', '*', said)}"
    else:
        yield from _scale_dtype(runtime, module, weight)
        return
    yield objection(rule="form", severity="error", where=where, says=says, cure=cure, cause=cause)


def _leaves_problem(view: FamilyView, module: Module, built: VLLMModule, leaves: Set[str]) -> Problem | None:
    """A tensor too few or too many."""
    optional = set(built.optional)
    if view.family.loader.unknown_name == "KeyError" and module.part == "mtp":
        optional.discard("g_idx")  # the loaders of vLLM's other classes drop it (AutoWeightsLoader)
    if module.kind == "experts" and built.form == "nvfp4":
        optional.add("input_global_scale")  # experts of NVFP4A16 have a slot for it too (M13)
    if extra := sorted(leaves - built.leaves - optional):
        if extra == ["g_idx"]:
            says = f"g_idx has no place in this draft's loader: {unknown_name(view, module, 'g_idx')}"
            return "g_idx", says, "Remove the g_idx of the MTP block: without desc_act it is the natural order"
        wanted = ", ".join(sorted(built.leaves))
        return (
            extra[0],
            f"its parameters are {wanted}, so {extra[0]} has no place: {unknown_name(view, module, extra[0])}",
            f"Rename or convert the tensors to {wanted}, or change the quantization config to the stored form",
        )
    if missing := sorted(built.leaves - leaves):
        has_sentinel = built.form == "nvfp4_modelopt" and missing[0] == "weight_scale" and module.kind == "linear"
        effect = "stays uninitialised in silence: vLLM's completeness check is off for quantized models"
        if has_sentinel:
            effect = "makes vLLM raise 'never loaded (still NaN)'"
        return missing[0], f"{missing[0]} is not in the checkpoint and {effect}", "Quantize this weight again"
    return None


def _scale_dtype(runtime: RuntimeView, module: Module, weight: StoredWeight) -> Iterator[Objection]:
    """FP8 block scales in BF16 (Fp2) or, outside DeepSeek-V4's own format, in E8M0."""
    if module.resolution.built.form != "fp8_block" or not isinstance(runtime.dialect, CompressedTensors):
        return
    scale = weight.parts.get("weight_scale")
    if scale is not None and scale.dtype != "F32":
        yield objection(
            rule="scale-dtype",
            severity="warning",
            where=scale.name,
            says=f"block scales are {scale.dtype}: DeepGEMM asserts float32 ones at the first forward on Hopper and "
            "Blackwell; other kernels take them",
            cure="Store the scales as F32",
            cause=f"{module.part} {scale.dtype}",
        )


def _cause_of(module: Module) -> str:
    """What makes vLLM fail as it builds a module: an entry that reaches some of its parts, or what a group says."""
    error = module.resolution.error.replace(module.name, "*")
    return error if "activations" in error else f"{module.resolution.entry} {error}"


def _is_mixed(module: Module) -> bool:
    first = module.members[0].weight
    return any(
        _coarse(member.weight) != _coarse(first) or member.weight.parts.keys() != first.parts.keys()
        for member in module.members
    )


def _coarse(weight: StoredWeight) -> str:
    """The form; FP8 by tensor, channel and block are one, because a small weight's scale does not show which it is."""
    return "fp8" if weight.form.startswith("fp8") else weight.form


def _manner(weight: StoredWeight) -> str:
    if weight.form == "plain":
        return f"plain {weight.weight.dtype}"
    if weight.form == "unknown":
        return ", ".join(f"{leaf} {entry.dtype}{list(entry.shape)}" for leaf, entry in weight.parts.items())
    return f"{weight.form} ({', '.join(weight.parts)})"


def _is_dequantized_on_load(view: FamilyView, member: Member) -> bool:
    """vLLM turns the FP8 indexer.wk of DeepSeek-V3.2 and GLM-5 into BF16 as it loads it."""
    is_block = member.weight.weight.dtype in FP8 and "weight_scale_inv" in member.weight.parts
    return is_block and member.place.row.path.endswith("indexer.wk")


def _is_replaced(view: FamilyView, module: Module, member: Member) -> bool:
    """A draft gets the target's embedding and head once it is loaded, so its own may have any form that loads.

    vLLM 0.32.0 v1/worker/gpu/spec_decode/eagle/utils.py, _should_share; v1/spec_decode/llm_base_proposer.py.
    """
    row, parts, loader = member.place.row, member.weight.parts, view.family.loader
    if module.part != "mtp" or row.role not in ("embedding", "head") or row.is_drafts_own:
        return False
    rows, width = (view.text_config.get(key) for key in ("vocab_size", "hidden_size"))
    if parts["weight"].shape != (rows, width) if "weight" in parts else loader.unknown_name:
        return False
    if not module.resolution.built.form.startswith(("plain", "fp8")):
        return False
    others = parts.keys() - {"weight"}
    return not others or not loader.unknown_name or (loader.drops_scales and others == {"weight_scale"})


def _draft_heads(runtime: RuntimeView) -> Iterator[tuple[VLLMName, HFName]]:
    """Heads that the draft builds with a quantization config: their runtime names, and their names on disk."""
    view = runtime.view
    head = next((row for row in view.family.mtp_block if row.role == "head"), None)
    if head is not None:
        for index in range(runtime.promised):
            disk_index = index + (view.num_layers if view.layout.mtp is None else 0)
            name = view.runtime_stem("mtp", disk_index) + (head.runtime or head.path)
            yield VLLMName(name), HFName(view.mtp_stem(index) + head.path)
    elif view.layout.draft_head:
        yield VLLMName(view.layout.draft_head), HFName(view.layout.head.removesuffix(".weight"))


def _unordered(module: Module, member: Member) -> Objection:
    weight = member.weight.parts.get("weight")
    is_lost = weight is not None and weight.dtype == "F8_E4M3"
    return objection(
        rule="rows",
        severity="error" if is_lost else "warning",
        where=member.weight.weight.name,
        says=(
            "holds q, k and v in FP8, which vLLM 0.32 loads only with a weight_scale_inv that its parameter has too: "
            "without one it waits for it, and never loads the weight"
            if is_lost
            else "holds q, k and v in one tensor: vLLM 0.32's target reads it as [q; k; v], and its draft cuts it by "
            "rank (vllm #42803). The release's rows are in another order"
        ),
        cure=_IN_THREE,
        cause=f"{module.part} {is_lost}",
    )
