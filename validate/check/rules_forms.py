"""Rules on how weights are stored: the form on disk must be the form that vLLM builds.

In: a `StoredView`, or the `RuntimeView` of a checkpoint with a family. Out: objections. Each rule
names its sources by their numbers in docs/failures.md.

Easy to get wrong: whether vLLM raises. A packed weight has a parameter name of its own, so vLLM
raises on a plain weight in its place. An FP8 weight has the name `weight`, as a plain one has. So
vLLM casts a plain weight in silence, and never writes its scale. And headers cannot tell whether
somebody has put the rows of a plain `qkv_proj` in order. vLLM's target reads such a matrix as [q;
k; v]; its draft cuts it by rank, which is right for one rank only.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Literal

from ...checkpoints.stored import FP8, StoredWeight
from ...recipes.family import HFName, VLLMName
from ..facts.findings import Objection, objection
from .dialects.compressed_tensors import CompressedTensors
from .dialects.fp8 import Fp8
from .dialects.modelopt import ModelOpt
from .layouts import Problem, layout_problem, leaves_built
from .runtime_view import Member, Module, RuntimeView
from .stored_view import StoredView
from .vllm_module import UnknownDialect
from .words import (
    cover_cure,
    decided,
    ignore_cure,
    packed_in_plain,
    plain_in_packed,
    resolution_cure,
    unknown_name,
)

_FP8_TABLE = "float8_e4m3fn"


def fused_modules_are_uniform(runtime: RuntimeView) -> Iterator[Objection]:
    """Weights that vLLM fuses must be stored alike, scales included: R3; F8, F20, F28; M1, M15."""
    for module in filter(_is_mixed, runtime.modules):
        usual, _ = Counter(_manner(member.weight) for member in module.members).most_common(1)[0]
        for member in module.members:
            if (manner := _manner(member.weight)) != usual:
                yield objection(
                    "fused-uniform",
                    member.weight.weight.name,
                    says=(
                        f"stored as {manner}, but vLLM holds it in {module.name} together with "
                        f"weights stored as {usual}: it raises, or leaves this part of the "
                        "parameter unwritten in silence"
                    ),
                    cure="Store all parts of a fused module, and all experts of a layer, in one "
                    "form with all scales",
                    cause=f"{module.part} {member.place.row.path} {manner} {usual}",
                )


def fused_shards_are_complete(runtime: RuntimeView) -> Iterator[Objection]:
    """Inside one form: all weights of one projection have one shape, and FP8 blocks end where
    shards do: R15; M2.
    """
    for module in runtime.modules:
        block = (
            module.resolution.built.block if module.resolution.built.form == "fp8_block" else None
        )
        shapes: dict[str, tuple[int, ...]] = {}
        for member in module.members if len(module.members) > 1 else ():
            path, weight = member.place.row.path, member.weight.weight
            expected = shapes.setdefault(path, weight.shape)
            is_last = path in runtime.view.last_shards and module.kind != "experts"
            if weight.shape != expected:
                yield objection(
                    "shapes",
                    weight.name,
                    says=(
                        f"has shape {list(weight.shape)} where the others of its projection have "
                        f"{list(expected)}: a narrower expert loads in silence, the rest raises"
                    ),
                    cure="Quantize this weight again",
                    cause=f"{module.part} {path}",
                )
            elif (
                block
                and weight.shape[0] % block[0]
                and not is_last
                and member.weight.form == "fp8_block"
            ):
                yield objection(
                    "shapes",
                    weight.name,
                    says=(
                        f"has {weight.shape[0]} rows, no multiple of the block of {block[0]}, and "
                        "is fused with others: vLLM raises ValueError (validate_fp8_block_shape)"
                    ),
                    cure="Use FP8_DYNAMIC or BF16 for this module",
                    cause=f"block {module.part} {path}",
                )


def stored_form_is_what_is_built(view: StoredView) -> Iterator[Objection]:
    """Each weight agrees with what vLLM builds for its runtime name: R2, R4, R7; F11-F29, F34-F42;
    Fp5, Fp9, G1-H7, M5.

    It finds three faults: plain on disk but built packed; packed on disk but built plain, by the
    config or whatever the config says; packed in both, but with other tensors. vLLM may also raise
    while it resolves a module: shards that disagree, FP8 blocks with `input_activations: null`
    (M10).
    """
    for module in view.modules:
        answer = module.resolution
        if answer.error:
            error = answer.error.replace(module.name, "*")
            yield objection(
                "config-group",
                answer.entry or module.name,
                says=f"vLLM fails as it builds {module.name} "
                f"({module.members[0].weight.weight.name}): {answer.error}",
                cure=resolution_cure(answer.error),
                cause=error if "activations" in error else f"{answer.entry} {error}",
            )
        elif answer.built.form != "unknown" and not (module.loads_quantized and _is_mixed(module)):
            for member in module.members:
                if not _is_made_over(view, module, member):
                    yield from _compare(view, module, member.weight, member.place.row.why_kept)


def _compare(
    view: StoredView, module: Module, weight: StoredWeight, why_kept: str
) -> Iterator[Objection]:
    built, rule, where = module.resolution.built, "form", weight.weight.name
    stored, by = f"stored as {_manner(weight)}, but vLLM builds", decided(view, module)
    if built.form == weight.form == "plain":
        return
    if not module.loads_quantized:
        rule, cause = "glue", f"{module.part} {module.members[0].place.row.path} {weight.form}"
        effect = packed_in_plain(view, module, weight)
        says = f"{stored} it plain whatever the config says ({why_kept}): {effect}"
        cure = "Store it in BF16: copy it from the original release, or dequantize it"
    elif built.form == "plain":
        says = f"{stored} {module.name} plain ({by}): {packed_in_plain(view, module, weight)}"
        cure, cause = (
            cover_cure(view, module),
            f"built plain {module.part} {weight.form} {module.resolution.entry}",
        )
    elif weight.form == "plain":
        says = f"{stored} {module.name} as {built.form} ({by}): {plain_in_packed(view, module)}"
        cure, cause = (
            ignore_cure(view, module),
            f"built packed {module.part} {built.form} {module.resolution.entry}",
        )
    elif problem := _leaves_problem(view, module, weight) or layout_problem(built, weight):
        leaf, said, cure = problem
        entry = leaves_built(built, weight).get(leaf)
        where = HFName(f"{weight.module}.{leaf}") if entry is None else entry.name
        says = f"vLLM builds {module.name} as {built.form} ({by}); {said}"
        cause = f"{module.part} {built.form} {leaf} {re.sub(r'[0-9]+', '*', said)}"
    else:
        yield from _scale_dtype(view, module, weight)
        return
    yield objection(rule, where, says=says, cure=cure, cause=cause)


def _leaves_problem(view: StoredView, module: Module, weight: StoredWeight) -> Problem | None:
    """A tensor too few or too many."""
    built = module.resolution.built
    leaves, optional = leaves_built(built, weight).keys(), set(built.optional)
    if view.loader and view.loader.unknown_name == "KeyError" and module.part == "mtp":
        optional.discard("g_idx")  # the loaders of vLLM's other classes drop it (AutoWeightsLoader)
    if module.kind == "experts" and built.form == "nvfp4":
        optional.add("input_global_scale")  # experts of NVFP4A16 have a slot for it too (M13)
    if extra := sorted(leaves - built.leaves - optional):
        wanted = ", ".join(sorted(built.leaves))
        says = (
            f"its parameters are {wanted}, so {extra[0]} has no place: "
            f"{unknown_name(view, module, extra[0])}"
        )
        cure = (
            f"Rename or convert the tensors to {wanted}, or change the quantization config to "
            "the stored form"
        )
        if extra == ["g_idx"]:
            cure = "Remove the g_idx of the MTP block: without desc_act it is the natural order"
        return extra[0], says, cure
    if missing := sorted(built.leaves - leaves):
        effect = (
            "stays uninitialised in silence: vLLM's completeness check is off for quantized models"
        )
        if (
            built.form == "nvfp4_modelopt"
            and missing[0] == "weight_scale"
            and module.kind == "linear"
        ):
            effect = "makes vLLM raise 'never loaded (still NaN)'"
        return (
            missing[0],
            f"{missing[0]} is not in the checkpoint and {effect}",
            "Quantize this weight again",
        )
    return None


def _scale_dtype(view: StoredView, module: Module, weight: StoredWeight) -> Iterator[Objection]:
    """FP8 block scales in BF16 (Fp2) or, outside DeepSeek-V4's own format, in E8M0."""
    scale = weight.parts.get("weight_scale")
    is_block = module.resolution.built.form == "fp8_block" and isinstance(
        view.dialect, CompressedTensors
    )
    if is_block and scale is not None and scale.dtype != "F32":
        yield objection(
            "scale-dtype",
            scale.name,
            severity="warning",
            says=(
                f"block scales are {scale.dtype}: DeepGEMM asserts float32 ones at the first "
                "forward on Hopper and Blackwell; other kernels take them"
            ),
            cure="Store the scales as F32",
            cause=f"{module.part} {scale.dtype}",
        )


def draft_head_is_excluded(runtime: RuntimeView) -> Iterator[Objection]:
    """A dialect that quantizes heads must exclude the draft's placeholder head: R10; F36, F38 (vllm
    #57532).
    """
    view = runtime.view
    heads: dict[str, HFName] = {}
    for name, (disk, *_) in view.disk_modules.items():
        place = view.place(HFName(f"{disk}.weight"))
        if (
            place is not None
            and place.part == "mtp"
            and place.role == "head"
            and place.layer is not None
        ):
            heads[name] = disk
    if view.layout.draft_head and not heads:
        heads[view.layout.draft_head] = HFName(view.layout.head.removesuffix(".weight"))
    for name, disk in heads.items():
        weight = runtime.weights.get(disk)
        form = runtime.resolve(VLLMName(name), (), "head", "mtp").built.form
        if form not in ("nvfp4_modelopt", "gptq", "awq") or (
            weight is not None and weight.form != "plain"
        ):
            continue
        effect = "KeyError, or a parameter that nothing fills"
        if form == "nvfp4_modelopt":
            effect = (
                "RuntimeError 'NVFP4 weight_scale for layer ... was never loaded (still NaN)', "
                "or a shape mismatch"
            )
        yield objection(
            "draft-head",
            name,
            says=f"vLLM builds the draft's head as {form}, for which the checkpoint has no "
            f"scales: {effect}",
            cure=f"Exclude {name}"
            + ("" if disk == name else f"; an entry for {disk} does not reach it"),
            cause="draft head",
        )


def interleaved_rows_are_put_in_order(runtime: RuntimeView) -> Iterator[Objection]:
    """q, k and v in one tensor, as in MiMo-V2.5, load right in the release's own FP8 only: vllm
    #42803, #57508.
    """
    for module in runtime.modules:
        for member in module.members:
            if not member.place.row.interleaved or _is_put_in_order(module, member):
                continue
            says = (
                "holds q, k and v in one tensor: vLLM 0.32's target reads it as [q; k; v], and "
                "its draft cuts it by rank (vllm #42803). The release's rows are in another order"
            )
            is_fp8 = "weight" in member.weight.parts and member.weight.weight.dtype == "F8_E4M3"
            if is_fp8:
                says = (
                    "holds q, k and v in FP8, which vLLM 0.32 loads only with a weight_scale_inv "
                    "that its parameter "
                    "has too: without one it waits for it, and never loads the weight"
                )
            yield objection(
                "rows",
                member.weight.weight.name,
                severity="error" if is_fp8 else "warning",
                says=says,
                cure=(
                    "Store q_proj, k_proj and v_proj in three tensors, as `keepmtp quantize` "
                    "writes them from the release"
                ),
                cause=f"{module.part} {is_fp8}",
            )


def schemes_are_known(view: StoredView) -> Iterator[Objection]:
    """A method or scheme whose tensors the check does not know is said to be one, or silence would
    read as good: R8.

    Under a method that is not known at all, a plain MTP block must be on the list of what is left
    alone.
    """
    dialect = view.dialect
    unknown = [
        module
        for module in view.modules
        if module.resolution.built.form == "unknown" and not module.resolution.error
    ]
    if dialect.name.startswith("modelopt") or not (unknown or isinstance(dialect, UnknownDialect)):
        return
    yield objection(
        "dialect",
        "config.json: quantization_config",
        severity="warning",
        says=(
            f"is {dialect.name} with a scheme that keepmtp does not reproduce: {len(unknown)} "
            "modules' weights are not judged against it"
        ),
        cure="Add --gpu sm90 (or sm100, sm120): the dry load asks vLLM itself",
    )
    plain = [
        module
        for module in unknown
        if module.part == "mtp"
        and module.members[0].weight.form == "plain"
        and module.role not in ("norm", "head")
    ]
    names = frozenset(module.name for module in plain)
    is_named = any(dialect.covered(entry, names) for entry in dialect.entries)
    if plain and isinstance(dialect, UnknownDialect) and not is_named:
        yield objection(
            "dialect",
            plain[0].members[0].weight.weight.name,
            says=(
                f"is plain, and no list of {dialect.name} (modules_to_not_convert, exclude, "
                f"ignore) names {plain[0].name}: vLLM builds the draft quantized, and raises "
                "KeyError or a shape mismatch"
            ),
            cure=f"Add {plain[0].name} and its like to that list",
        )


def table_is_as_built(runtime: RuntimeView) -> Iterator[Objection]:
    """A table whose rows are looked up is stored as vLLM holds it: BF16, or FP8 with one scale for
    all of its parts.

    vLLM chooses the form by a key of text_config first, and by the quantization config where that
    key is absent. Under modelopt and compressed-tensors a table that is not excluded is refused,
    and one that is excluded is BF16 (0.32.0 models/qwen4_exp/common/ngram_embedding.py:
    Qwen4ExpPLEEmbeddingMethod.from_quant_config).
    """
    tables: dict[tuple[HFName, VLLMName], list[StoredWeight]] = defaultdict(list)
    for module in runtime.modules:
        for member in module.members:
            if scale := member.place.row.table_scale:
                stem = member.place.module.removesuffix(member.place.row.path)
                tables[HFName(stem + scale), module.name].append(member.weight)
    for (scale, name), parts in tables.items():
        built = _table_built(runtime, name)
        packed = [part.weight.name for part in parts if part.weight.dtype == "F8_E4M3"]
        odd = (
            packed
            if built == "plain"
            else [part.weight.name for part in parts if part.form == "plain"]
        )
        where, cure, says = scale, "Take the table and its scale from one release", ""
        if built == "refused":
            where, cure = name, f"Add {name} to the modules that stay plain"
            says = f"{runtime.dialect.name} quantizes it, which vLLM refuses: NotImplementedError"
        elif built != "unknown" and odd:
            where, key = odd[0], runtime.view.family.fp8_table_key
            cure = (
                f'Set "{key}" of text_config to what is stored: "{_FP8_TABLE}", or nothing and '
                f"exclude {name}"
            )
            says = (
                f"vLLM builds {name} {built}, so it casts its rows without a scale, or raises "
                "ValueError"
            )
        elif built == "fp8" and packed and scale not in runtime.source.entries:
            says = (
                "is not in the checkpoint: vLLM raises ValueError 'FP8 PLE checkpoint is missing "
                "its global scale'"
            )
        elif built == "plain" and scale in runtime.source.entries:
            says = f"is the scale of a table in FP8, but {name} is BF16: vLLM raises ValueError"
        if says:
            yield objection("table", where, says=says, cure=cure, count=len(parts))


def _table_built(
    runtime: RuntimeView, name: VLLMName
) -> Literal["fp8", "plain", "refused", "unknown"]:
    """How vLLM holds the table."""
    dialect = runtime.dialect
    if runtime.view.text_config.get(runtime.view.family.fp8_table_key) == _FP8_TABLE:
        return "fp8"
    if isinstance(dialect, UnknownDialect):
        return "unknown"
    if isinstance(dialect, Fp8):
        is_plain = any(
            entry == name or entry.startswith(f"{name}.shard_") for entry in dialect.ignored
        )
        return "plain" if is_plain else "fp8"
    form = dialect.resolve(name, shards=(), kind="linear").built.form
    if isinstance(dialect, ModelOpt) and dialect.algorithm == "MIXED_PRECISION":
        return "fp8" if form == "fp8_tensor" else "plain"
    return "plain" if form == "plain" else "refused"


RULES = (
    fused_modules_are_uniform,
    stored_form_is_what_is_built,
    fused_shards_are_complete,
    draft_head_is_excluded,
    interleaved_rows_are_put_in_order,
    schemes_are_known,
    table_is_as_built,
)


def _is_mixed(module: Module) -> bool:
    """FP8 by tensor, channel and block are one form, because a small weight's scale does not show
    which it is.
    """
    weights = [member.weight for member in module.members]
    forms = {"fp8" if weight.form.startswith("fp8") else weight.form for weight in weights}
    return len(forms) > 1 or any(
        weight.parts.keys() != weights[0].parts.keys() for weight in weights
    )


def _manner(weight: StoredWeight) -> str:
    """How a weight is stored."""
    if weight.form == "plain":
        return f"plain {weight.weight.dtype}"
    if weight.form == "unknown":
        return ", ".join(
            f"{leaf} {entry.dtype}{list(entry.shape)}" for leaf, entry in weight.parts.items()
        )
    return f"{weight.form} ({', '.join(weight.parts)})"


def _is_put_in_order(module: Module, member: Member) -> bool:
    """Whether vLLM computes the order of the rows: FP8 with `weight_scale_inv`, built as that
    form.
    """
    has_leaves = (
        {"weight", "weight_scale_inv"} == set(member.weight.parts) == module.resolution.built.leaves
    )
    return bool(member.place.row.interleaved) and has_leaves and member.weight.weight.dtype in FP8


def _is_made_over(view: StoredView, module: Module, member: Member) -> bool:
    """Whether the loader makes the weight anew, or another rule judges it.

    vLLM turns the FP8 indexer.wk of DeepSeek-V3.2 and GLM-5 into BF16 as it loads it.
    """
    row, parts = member.place.row, member.weight.parts
    is_wk = (
        row.path.endswith("indexer.wk")
        and "weight_scale_inv" in parts
        and member.weight.weight.dtype in FP8
    )
    if not module.loads_quantized and (row.table_scale or is_wk):
        return True
    return _is_put_in_order(module, member) or _is_replaced(view, module, member)


def _is_replaced(view: StoredView, module: Module, member: Member) -> bool:
    """A draft gets the target's embedding and head once it is loaded, so its own may have any form
    that loads.

    vLLM 0.32.0 v1/worker/gpu/spec_decode/eagle/utils.py, _should_share;
    v1/spec_decode/llm_base_proposer.py.
    """
    row, parts, loader = member.place.row, member.weight.parts, view.loader
    if (
        loader is None
        or module.part != "mtp"
        or row.role not in ("embedding", "head")
        or row.is_drafts_own
    ):
        return False
    size = tuple(view.text_config.get(key) for key in ("vocab_size", "hidden_size"))
    if parts["weight"].shape != size if "weight" in parts else loader.unknown_name:
        return False
    if not module.resolution.built.form.startswith(("plain", "fp8")):
        return False
    others = parts.keys() - {"weight"}
    return (
        not others
        or not loader.unknown_name
        or (loader.drops_scales and others == {"weight_scale"})
    )
