"""Rules on how weights are stored: the form on disk must be the form that vLLM builds.

In: a `StoredView`, or the `RuntimeView` of a checkpoint with a family. Out: objections. Each rule
names its sources by their numbers in docs/tables/failures.md.

Easy to get wrong: whether vLLM raises. A packed weight has a parameter name of its own, so vLLM
raises on a plain weight in its place. An FP8 weight has the name `weight`, as a plain one has. So
vLLM casts a plain weight in silence, and never writes its scale. And headers cannot tell whether
somebody has put the rows of a plain `qkv_proj` in order. vLLM's target reads such a matrix as
[q; k; v]; its draft cuts it by rank, which is right for one rank only. A cure names vLLM's module,
not the one on disk.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mode

from ...checkpoints.dialects.compressed_tensors import CompressedTensors
from ...checkpoints.dialects.dialect import Exceptions, Refusal, UnknownDialect, entry_for
from ...checkpoints.dialects.fp8 import Fp8
from ...checkpoints.dialects.gptq import Awq, Gptq
from ...checkpoints.dialects.layouts import (
    SAY_IT,
    Problem,
    fits,
    layout_problem,
    leaves_built,
    manner,
    refitted,
)
from ...checkpoints.dialects.modelopt import ModelOpt
from ...checkpoints.dialects.quark import Quark
from ...checkpoints.dialects.runtime_view import Member, Module, RuntimeView, StoredView
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.stored import OTHER_LEAVES, StoredWeight, scale_of
from ...recipes.family import HFName, VLLMName
from ...recipes.forms import E8M0, FIRST_SCALES, FORMS, FP8
from ...recipes.frozen import Shape
from ...recipes.runtimes.vllm import holds
from ...recipes.tensor_parallel import Split, in_words, why_not
from ..facts.findings import CuredBy, Objections, objection

_FP8_TABLE = "float8_e4m3fn"
_TABLES = {"F8_E4M3": "fp8", "U8": "nvfp4"}
_AGAIN = "Quantize this weight again"
_EFFECT = "vLLM raises on it, or reads other numbers than were stored, in silence"
_COMPLETE = "Complete quantization_config, or quantize again in a scheme that vLLM has"
_CURES: Mapping[Refusal, str] = {
    "order": "Quantize it again with desc_act=False, or with static groups (actorder: static)",
    "inputs": "Say in the group's input_activations how inputs are quantized",
    "shards": "Name all parts of a fused module, or the fused module itself, in the same list",
    "projections": "Name all projections of the experts in the same list",
    "parts": "Name all parts of a fused module in extra_config",
}
_EXPERTS = {"fp8_block": "fp8", "mxfp4": "fp4"}
"""DeepSeek-V4's word for the form of its experts."""
# Of a config that names no dialect that keepmtp knows.
_USUAL = Exceptions(("ignore",), of_stem="re:^{}")


def fused_modules_are_uniform(runtime: RuntimeView) -> Objections:
    """Weights that vLLM fuses must be stored alike, scales included: R3; F8, F20, F28; M1, M15."""
    for module in runtime.modules:
        if not _is_mixed(module):
            continue
        usual = mode(manner(member.weight) for member in module.members)
        for member in module.members:
            own = manner(member.weight)
            if own != usual:
                yield objection(
                    "fused-uniform",
                    member.name,
                    f"stored as {own}, but vLLM holds it in {module.name} together with weights "
                    f"stored as {usual}: it raises, or leaves this part of the parameter unwritten "
                    "in silence",
                    "Store all parts of a fused module, and all experts of a layer, in one form "
                    "with all scales",
                    f"{module.part} {member.place.row.path} {own} {usual}",
                )


def fused_shards_are_complete(runtime: RuntimeView) -> Objections:
    """Inside one form: all weights of one projection have one shape, and FP8 blocks end where
    shards do: R15; M2.
    """
    for module in runtime.modules:
        built = module.resolution.built
        shapes = dict[str, Shape]()
        for member in module.members:
            path = member.place.row.path
            shape = member.weight.weight.shape
            expected = shapes.setdefault(path, shape)
            # The last part of a fused module may end in a part of a block, but for experts.
            is_inside = path not in runtime.view.last_shards or module.kind == "experts"
            are_blocks = built.form == member.weight.form == "fp8_block" and built.block
            if shape != expected:
                yield objection(
                    "shapes",
                    member.name,
                    f"has shape {list(shape)} where the others of its projection have "
                    f"{list(expected)}: a narrower expert loads in silence, the rest raises",
                    _AGAIN,
                    f"{module.part} {path}",
                )
            elif len(module.members) > 1 and are_blocks and is_inside and shape[0] % are_blocks[0]:
                yield objection(
                    "shapes",
                    member.name,
                    f"has {shape[0]} rows, no multiple of the block of {are_blocks[0]}, and is "
                    "fused with others: vLLM raises ValueError (validate_fp8_block_shape)",
                    "Use FP8_DYNAMIC or BF16 for this module",
                    f"block {module.part} {path}",
                )


def stored_form_is_what_is_built(view: StoredView) -> Objections:
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
            cause = answer.error.replace(module.name, "*")
            cured_by = "quantize"
            if answer.refusal in ("inputs", "shards", "projections"):
                cured_by = "edit"
            if answer.refusal != "inputs":
                cause = f"{answer.entry} {cause}"
            yield objection(
                "config-group",
                answer.entry or module.name,
                f"vLLM fails as it builds {module.name} ({module.members[0].name}): {answer.error}",
                _CURES.get(answer.refusal, _COMPLETE),
                cause,
                cured_by=cured_by,
            )
        elif not module.loads_quantized or not _is_mixed(module):
            for member in module.members:
                if not _is_judged_elsewhere(view, module, member):
                    yield from _compare(view, module, member)


def _compare(view: StoredView, module: Module, member: Member) -> Objections:
    weight = member.weight
    built, entry, *_ = module.resolution
    if built.form == weight.form == "plain":
        return
    stored = f"stored as {manner(weight)}, but vLLM builds"
    if not module.loads_quantized:
        yield objection(
            "glue",
            member.name,
            f"{stored} it plain whatever the config says ({member.place.row.why_kept}): {_EFFECT}",
            "Store it in BF16: copy it from the original release, or dequantize it",
            f"{module.part} {module.members[0].place.row.path} {weight.form}",
        )
    elif built.form == "plain":
        cure, cured_by = _cover_cure(view, module, weight)
        says = f"{stored} {module.name} plain ({_decided(view, module)}): {_EFFECT}"
        cause = f"built plain {module.part} {weight.form} {entry}"
        yield objection("form", member.name, says, cure, cause, cured_by=cured_by)
    elif weight.form == "plain":
        form = built.form.replace("unknown", "quantized weights")
        cure, cured_by = _ignore_cure(view, module)
        says = f"{stored} {module.name} as {form} ({_decided(view, module)}): {_EFFECT}"
        cause = f"built packed {module.part} {built.form} {entry}"
        yield objection("form", member.name, says, cure, cause, cured_by=cured_by)
    elif problem := _leaves_problem(view, module, weight) or layout_problem(built, weight):
        leaf, said, cure = problem
        cured_by = "quantize"
        if leaf in ("weight_zero_point", "g_idx") or refitted(built, weight) is not None:
            cured_by = "edit"
        if cure == SAY_IT:
            cure, cured_by = _config_cure(view, module, weight)
        part = leaves_built(built, weight).get(leaf)
        yield objection(
            "form",
            part.name if part else f"{weight.module}.{leaf}",
            f"vLLM builds {module.name} as {built.form} ({_decided(view, module)}); {said}",
            cure,
            f"{module.part} {built.form} {leaf} {re.sub(r'[0-9]+', '*', said)}",
            cured_by=cured_by,
        )
    else:
        yield from _scales_are_read(view, module, weight)


def _scales_are_read(view: StoredView, module: Module, weight: StoredWeight) -> Objections:
    """Scales that a kernel refuses (Fp2), or that vLLM reads as other numbers.

    vLLM 0.29 to 0.33 models/deepseek_v4/nvidia/{model,mtp,dspark}.py (load_weights) and
    quant_config.py (is_scale_e8m0); quantization/fp8.py for the parameters.
    """
    built = module.resolution.built
    is_own = isinstance(view, RuntimeView) and bool(view.view.family.fp8_class)
    in_bytes: Entry | None = None
    if is_own and module.kind == "experts" and FORMS[built.form].scales != E8M0:
        for leaf, part in weight.parts.items():
            # The loader asks for "weight_scale" in the name, as it has it then.
            if leaf in (*FIRST_SCALES, "weight_scale_2") and part.dtype == "F8_E8M0":
                in_bytes = part
    if in_bytes:
        scale = in_bytes
    elif built.form in ("fp8_block", "mxfp4"):
        scale = scale_of(weight.parts)
    else:
        return
    severity = "error"
    in_powers = "Store the scales as F8_E8M0, with the weights rounded for them"
    cure = "Store the scales as F32"
    if built.form == "mxfp4":
        if scale.dtype in E8M0:
            return
        severity = "warning"
        says = f"scales are {scale.dtype}: vLLM rounds them to powers of two in silence"
        cure = in_powers
    elif in_bytes:
        says = "experts' scales are F8_E8M0, whose bytes this loader puts into float32 as the "
        says += "numbers 0 to 255, in silence"
        cure += ": their numbers, not their bytes"
    elif is_own and isinstance(view.dialect, Fp8):
        is_usual = view.dialect.experts == view.dialect.linear
        if is_usual or built.scales or scale.dtype == "F8_E8M0":
            return
        says = f"block scales are {scale.dtype}, and vLLM's parameter is F8_E8M0, as experts are "
        says += "no FP8: it rounds them to powers of two in silence"
        cure = in_powers
    elif isinstance(view.dialect, CompressedTensors) and scale.dtype != "F32":
        severity = "warning"
        says = f"block scales are {scale.dtype}: DeepGEMM asserts float32 ones at the first "
        says += "forward on Hopper and Blackwell; other kernels take them"
    else:
        return
    cause = f"{module.part} {scale.dtype}"
    yield objection("scale-dtype", scale.name, says, cure, cause, severity)


def _leaves_problem(view: StoredView, module: Module, weight: StoredWeight) -> Problem | None:
    """A tensor too few or too many: its leaf, what happens, the cure."""
    built = module.resolution.built
    leaves = leaves_built(built, weight).keys()
    if leaves == built.leaves:
        return None
    optional = set(built.optional)
    if module.part == "mtp" and view.loader.unknown_name == "KeyError":
        optional.discard("g_idx")  # the loaders of vLLM's other classes drop it (AutoWeightsLoader)
    if module.kind == "experts" and built.form == "nvfp4":
        optional.add("input_global_scale")  # experts of NVFP4A16 have a slot for it too (M13)
    wanted = ", ".join(sorted(built.leaves))
    for extra in sorted(leaves - built.leaves - optional):
        cure = SAY_IT
        if refitted(built, weight) is not None:
            cure = f"Rename the tensors to {wanted}: the bytes mean the same"
        if extra == "weight_zero_point":
            cure = "Set symmetric of the config group's weights to false: they have zero points"
        if extra == "g_idx":
            cure = "Remove the g_idx of the MTP block: without desc_act it is the natural order"
        return extra, f"its parameters are {wanted}, so {extra} has no place: {_EFFECT}", cure
    for missing in sorted(built.leaves - leaves):
        says = f"{missing} is not in the checkpoint: vLLM raises, or leaves it uninitialised "
        cure = _AGAIN
        if missing == "weight_zero_point":
            cure = "Set symmetric of the config group's weights to true: they have no zero points"
        return missing, f"{says}in silence", cure
    return None


def _decided(view: StoredView, module: Module) -> str:
    """Which entry of the config decided it."""
    if module.resolution.entry:
        return f"by the entry {module.resolution.entry!r}"
    if module.resolution.built.form != "plain":
        return f"by {view.dialect.name}, which quantizes what is not excluded"
    if view.dialect.name == "none":
        return "config.json has no quantization_config"
    return "no target matches it"


def _ignore_cure(view: StoredView, module: Module) -> tuple[str, CuredBy]:
    """How the dialect leaves a module alone, and whether an edit can."""
    dialect = view.dialect
    if isinstance(dialect, Gptq) and dialect.is_blind_to_experts and module.kind == "experts":
        cure = "Quantize again in groups of 128: in other groups no entry excepts experts"
        return cure, "quantize"
    exceptions = dialect.exceptions or _USUAL
    entry = entry_for(exceptions.of_name, module.name)
    if exceptions.of_stem:
        stem = ""
        if isinstance(view, RuntimeView) and module.part == "mtp":
            stem = view.plain_draft_stem or view.stem_of(module)
        elif isinstance(view, RuntimeView) and module.role == "vision":
            stem = view.stem_of(module)
        entry = entry_for(exceptions.of_stem, stem or module.name)
    return f"Add '{entry}' to {exceptions.keys[0]}: vLLM's name, not the one on disk", "edit"


def _config_cure(view: StoredView, module: Module, weight: StoredWeight) -> tuple[str, CuredBy]:
    """How the dialect says the form that a module is stored in, and whether an edit can."""
    dialect = view.dialect
    entry = module.resolution.entry
    if isinstance(dialect, Fp8) and module.kind == "experts" and dialect.name != "fp8":
        cure = f'Set expert_dtype of config.json to "{_EXPERTS.get(weight.form, "fp4")}"'
        if scale_of(weight.parts).dtype == "F8_E8M0" and weight.form == "fp8_block":
            cure += ", and store the experts' scales as F32: their numbers, not their bytes"
            return cure, "quantize"
        return cure, "edit"
    if isinstance(dialect, Quark) and entry:
        cure = f"Let layer_quant_config name the modules that are stored so, and not by {entry!r}"
        return cure, "edit"
    if isinstance(dialect, CompressedTensors):
        # A form that another group builds is one of its targets more. Of two groups with one target
        # the last builds.
        forms = {answer.built.form for answer in dialect.builds.values()}
        forms.discard(module.resolution.built.form)
        targets = [one for one in dialect.entries if one.where == "targets"]
        if weight.form in forms or len(targets) > len(dialect.builds):
            return SAY_IT, "edit"
    return SAY_IT, "quantize"


def _cover_cure(view: StoredView, module: Module, weight: StoredWeight) -> tuple[str, CuredBy]:
    """How the dialect reaches a module that it builds plain, and whether an edit can."""
    dialect = view.dialect
    entry = module.resolution.entry
    if dialect.name == "none":
        cure = "Write quantization_config into config.json, or ship the weights in BF16"
        return cure, "quantize"
    # vLLM itself may decide it, whatever is written.
    written = {name for one in dialect.entries for name in (one.written, *one.read)}
    is_draft_head = module.part == "mtp" and module.kind == "head"  # vLLM makes it the target's
    cured_by = "edit"
    if weight.form == "unknown" or is_draft_head or (entry and written and entry not in written):
        cured_by = "quantize"
    cure = f"Let a target match {' and '.join(module.shards) or module.name}"
    if isinstance(dialect, Awq) and not dialect.entries:
        cure = "Write modules_to_not_convert: without it vLLM makes a list of the headers"
    elif isinstance(dialect, ModelOpt) and entry in dialect.quantized_layers:
        algorithm = dialect.quantized_layers[entry]
        cure = f"Serve it with a newer vLLM, if one has {algorithm} for {module.kind}"
        cured_by = "server"
    elif isinstance(dialect, ModelOpt) and not entry:
        cure = f"Name {module.name} in quantized_layers: vLLM's name, not the one on disk"
    elif entry:
        cure = f"Narrow the entry {entry!r} so that it leaves {module.name} alone"
    return f"{cure}, or store the weight in BF16", cured_by


def vectors_are_plain(runtime: RuntimeView) -> Objections:
    """Biases, states and stacked experts without a scale are no FP8: M3."""
    for entry in runtime.others:
        place = runtime.placed.get(entry.name)
        if entry.dtype not in FP8 or place is None or place.role in ("table", "vision"):
            continue
        if place.leaf in OTHER_LEAVES:
            yield objection(
                "form",
                entry.name,
                f"is {entry.dtype} without a scale, and vLLM holds it plain: {_EFFECT}",
                "Copy it from the original release",
                f"{place.part} {place.row.path}",
            )


def draft_head_is_excluded(runtime: RuntimeView) -> Objections:
    """A dialect that quantizes heads must exclude the draft's placeholder head: R10; F36, F38 (vllm
    #57532).
    """
    view = runtime.view
    heads = dict[str, HFName]()
    for name, (disk, *_) in view.disk_modules.items():
        place = view.place(HFName(f"{disk}.weight"))
        if place and place.part == "mtp" and place.role == "head" and place.layer is not None:
            heads[name] = disk
    if view.layout.draft_head and not heads:
        heads[view.layout.draft_head] = HFName(view.layout.head.removesuffix(".weight"))
    for name, disk in heads.items():
        form = runtime.resolve(VLLMName(name), (), "head", "mtp").built.form
        is_plain = disk not in runtime.weights or runtime.weights[disk].form == "plain"
        if is_plain and form in ("nvfp4_modelopt", "gptq", "awq"):
            yield objection(
                "draft-head",
                name,
                f"vLLM builds the draft's head as {form}, for which the checkpoint has no scales: "
                "it raises, or nothing fills them",
                f"Exclude {name}: vLLM's name, not the one on disk",
                "draft head",
            )
        is_filled = name == view.layout.draft_head and not runtime.loader.fills_head
        if is_filled and form == "plain" and not is_plain:
            yield objection(
                "draft-head",
                name,
                "vLLM builds the draft's head plain, and the stored one is packed: it raises",
                f"Let no exception reach {name}, and a target reach it",
            )


def interleaved_rows_are_put_in_order(runtime: RuntimeView) -> Objections:
    """q, k and v in one tensor, as in MiMo-V2.5, load right in the release's own FP8 only, with the
    rows of config.json and scales of each slice or of all rows: vllm #42803, #57508.

    vLLM 0.32.0 and 0.33.0 models/mimo_v2.py.
    """
    for module in runtime.modules:
        for member in module.members:
            weight = member.weight
            if not member.place.row.interleaved:
                continue
            severity = "error"
            says = "holds q, k and v in FP8, which vLLM never loads without scales"
            cure = "Store q_proj, k_proj and v_proj in three tensors, as `keepmtp quantize` "
            cure += "writes them"
            if _is_put_in_order(module, member):
                count, *slices = runtime.view.slices(member.place)
                rows = sum(slices)
                scale = scale_of(weight.parts)
                scales = (count * -(-rows // 128), -(-count * rows // 128))
                is_whole = weight.shape[0] == count * rows and scale.shape[0] in scales
                if is_whole and scale.dtype in FORMS["fp8_block"].scales:
                    continue
                says = (
                    f"has shape {[*weight.shape]} and scales {scale.dtype}{[*scale.shape]}, in "
                    f"config.json {count} slices of {rows} rows: vLLM raises, or reads other "
                    "numbers"
                )
                cure = _AGAIN
            elif weight.weight.dtype != "F8_E4M3":
                severity = "warning"
                says = (
                    "holds q, k and v in one tensor, whose rows vLLM reads in another order than "
                    "the release's (vllm #42803)"
                )
            yield objection("rows", member.name, says, cure, module.part, severity)


def schemes_are_known(view: StoredView) -> Objections:
    """A method or scheme whose tensors the check does not know is said to be one, or silence would
    read as good: R8.

    Under a method that is not known at all, a plain MTP block must be on the list of what is left
    alone.
    """
    dialect = view.dialect
    unknown = list[Module]()
    for module in view.modules:
        if module.resolution.built.form == "unknown" and not module.resolution.error:
            unknown.append(module)
    is_unknown = isinstance(dialect, UnknownDialect)
    if dialect.name.startswith("modelopt") or not (unknown or is_unknown):
        return
    yield objection(
        "dialect",
        "config.json: quantization_config",
        f"is {dialect.name} with a scheme that keepmtp does not reproduce: {len(unknown)} "
        "modules' quantized weights are not judged against it",
        "Add --gpu sm90 (or sm100, sm120): the dry load asks vLLM itself",
        severity="warning",
    )
    for module in unknown:
        name = module.name
        member = module.members[0]
        is_plain = member.weight.form == "plain" and module.role not in ("norm", "head")
        if not is_unknown or module.part != "mtp" or not is_plain:
            continue
        if not any(dialect.hits(entry.read, name) for entry in dialect.entries):
            yield objection(
                "dialect",
                member.name,
                f"is plain, and no list of {dialect.name} names {name}: {_EFFECT}",
                "Add its like to the list of what stays plain",
                "plain draft",
            )


def table_is_as_built(runtime: RuntimeView) -> Objections:
    """A table whose rows are looked up is stored as vLLM holds it: BF16, FP8 with one scale for
    all of its parts, or NVFP4 with one more for every 16 values.

    vLLM chooses the form by a key of text_config first, and by the quantization config where that
    key is absent. Under modelopt and compressed-tensors a table that is not excluded is refused,
    and one that is excluded is BF16; 0.33 has NVFP4 tables too, and builds a plain one where it
    refused before (models/qwen4_exp/common/ngram_embedding.py: Qwen4ExpPLEEmbeddingMethod
    .from_quant_config).
    """
    tables: dict[tuple[HFName, VLLMName], list[StoredWeight]] = defaultdict(list)
    for module in runtime.modules:
        for member in module.members:
            scale = member.place.row.table_scale
            if scale:
                tables[HFName(member.place.stem + scale), module.name].append(member.weight)
    for (scale, name), parts in tables.items():
        built = _table_built(runtime, name)
        parts.sort(key=lambda part: (len(part.module), part.module))  # as they are numbered
        count = runtime.view.text_config.get("split_ngram_parts", len(parts))
        if count != len(parts):
            says = f"has {len(parts):,} parts, in config.json {count}: vLLM raises, or leaves rows "
            says += "uninitialised in silence"
            yield objection("table", name, says, "Take all of its parts from the release")
        wrong = [*_parts_stored_otherwise(parts, built)]
        scales = {"fp8": scale, "nvfp4": HFName(f"{scale}_2")}
        for form, shared in scales.items():
            if (shared in runtime.source.entries) != (form == built):
                wrong.append(shared)
        if built == "unknown" or not wrong:
            continue
        where = wrong[0]
        if built == "refused":
            where = name
        key = runtime.view.family.table_key
        cure = (
            f'Set "{key}" of text_config to what is stored: "{_FP8_TABLE}", "nvfp4" for vLLM 0.33, '
            f"or nothing and add {name} to the modules that stay plain; with the table's own scale"
        )
        if not key:
            cure = "Take the table and its scale from the release: vLLM has no other form of it"
        yield objection(
            "table",
            where,
            f"vLLM builds {name} {built}, and takes no table that is stored otherwise",
            cure,
            times=len(parts),
        )


def ranks_get_whole_groups(runtime: RuntimeView, splits: Iterable[Split]) -> Objections:
    """Each tensor-parallel rank gets whole heads, and whole groups or blocks of what is packed:
    F22, F40.
    """
    config = runtime.source.text_config
    for split in splits:
        refused = why_not(config, runtime.cuts, split)
        if refused:
            says = f"vLLM cannot split it at TP {split.size}: {refused.says}"
            cure = f"Serve it otherwise: it {in_words(config, runtime.cuts)}"
            yield objection("ranks", refused.where, says, cure)


def _parts_stored_otherwise(parts: Sequence[StoredWeight], built: str) -> Iterator[HFName]:
    """The tensors of a table that vLLM's loader does not take: of several parts all have one shape,
    but the last may have fewer rows.
    """
    usual = parts[0].weight.shape
    for part in parts:
        rows = part.weight
        is_shorter = part is parts[-1] and rows.shape[1:] == usual[1:] and rows.shape < usual
        scale = part.parts.get("weight_scale")
        own = part.parts.get("scale")  # DeepSeek-V4.1's, one for 32 columns
        if _TABLES.get(rows.dtype, "plain") != built or not (rows.shape == usual or is_shorter):
            yield rows.name
        elif own and (
            own.dtype not in E8M0
            or own.shape[:1] != rows.shape[:1]
            or 32 * own.num_bytes != rows.num_bytes
        ):
            yield own.name
        elif built == "nvfp4" and (
            scale is None or scale.dtype != "F8_E4M3" or 8 * scale.num_bytes != rows.num_bytes
        ):
            yield HFName(f"{part.module}.weight_scale")


def _table_built(runtime: RuntimeView, name: VLLMName) -> str:
    """How vLLM holds the table."""
    dialect = runtime.dialect
    has_nvfp4 = holds(">=0.33", runtime.vllm)
    key = runtime.view.family.table_key
    named = runtime.view.text_config.get(key)
    if not key or named == _FP8_TABLE:
        return "fp8"
    if named is not None and has_nvfp4:
        return {"nvfp4": "nvfp4"}.get(named, "refused")
    if isinstance(dialect, UnknownDialect):
        return "unknown"
    if isinstance(dialect, Fp8):
        # The table itself, or a shard of it.
        if any(f"{entry}.shard_".startswith(f"{name}.shard_") for entry in dialect.words):
            return "plain"
        return "fp8"
    form = dialect.resolve(name, shards=(), kind="linear").built.form
    is_mixed = isinstance(dialect, ModelOpt) and dialect.algorithm == "MIXED_PRECISION"
    if is_mixed and form == "fp8_tensor":
        return "fp8"
    if is_mixed and has_nvfp4 and form == "nvfp4_modelopt":
        return "nvfp4"
    # 0.33 refuses what else mixed precision gives the table; 0.32 what every other dialect does.
    if form == "plain" or is_mixed != has_nvfp4:
        return "plain"
    return "refused"


def packed_head_loads(runtime: RuntimeView) -> Objections:
    """A packed head has a form that its target's loader takes, and the draft's.

    vLLM 0.32.0 vocab_parallel_embedding.py, models/glm4_moe_mtp.py.
    """
    loader = runtime.loader
    target = runtime.weights.get(HFName(runtime.view.layout.head.removesuffix(".weight")))
    is_filled = loader.fills_head and target is not None and "weight" in target.parts
    for module in runtime.modules:
        built = module.resolution.built
        if module.kind != "head" or module.is_plain:
            continue
        if built.form == "plain" or not module.loads_quantized:
            continue  # `stored_form_is_what_is_built` objects
        says = ""
        cure = "Store the head in FP8 with a scale a row, or in BF16"
        if module.part == "mtp":
            if is_filled and loader.unknown_name and "weight" not in built.leaves:
                says = (
                    f"has no `weight`, and vLLM fills it with the target's: {loader.unknown_name}"
                )
                cure = f"Store it in BF16, and exclude {module.name}: vLLM's name"
        elif built.block:
            says = (
                "holds FP8 blocks, and a head is loaded row by row: vLLM raises AssertionError at "
                "their scales (vocab_parallel_embedding.py)"
            )
        elif loader.fills_head and built.form == "nvfp4_modelopt":
            says = (
                "holds codes of 4 bits, and this draft first fills a plain head of its own with "
                "them: vLLM raises RuntimeError, output with shape doesn't match"
            )
        if says:
            yield objection("head-form", module.members[0].name, says, cure, "head")


RULES = (
    fused_modules_are_uniform,
    stored_form_is_what_is_built,
    fused_shards_are_complete,
    vectors_are_plain,
    draft_head_is_excluded,
    interleaved_rows_are_put_in_order,
    schemes_are_known,
    table_is_as_built,
    packed_head_loads,
)


def _is_mixed(module: Module) -> bool:
    """FP8 by tensor, channel and block are one form, because a small weight's scale does not show
    which it is.
    """
    kinds = set[tuple[str, ...]]()
    built = module.resolution.built
    for _, weight in module.members:
        form = weight.form
        if "unknown" == form != built.form and fits(built, weight):
            form = built.form
        if form.startswith("fp8"):
            form = "fp8"
        # vLLM drops GPTQ's order of inputs, which is the natural one.
        kinds.add((form, *sorted(weight.parts.keys() - {"g_idx"})))
    return len(kinds) > 1


def _is_put_in_order(module: Module, member: Member) -> bool:
    """Whether vLLM computes the order of the rows: FP8 with `weight_scale_inv`, built as that
    form.
    """
    leaves = {"weight", "weight_scale_inv"}
    is_block = module.resolution.built.leaves == leaves == member.weight.parts.keys()
    is_fp8 = member.weight.weight.dtype in FP8
    return is_block and is_fp8 and member.place.row.interleaved != ()


def _is_judged_elsewhere(view: StoredView, module: Module, member: Member) -> bool:
    """Whether nobody knows what vLLM builds, its loader makes the weight anew, or another rule
    judges it.

    vLLM turns the FP8 indexer.wk of DeepSeek-V3.2 and GLM-5 into BF16 as it loads it. A scheme that
    is not known has no plain weights.
    """
    row = member.place.row
    weight = member.weight
    is_plain = weight.form == "plain" and not isinstance(view.dialect, UnknownDialect)
    if module.resolution.built.form == "unknown" and not is_plain:
        return True
    has_scale = "weight_scale_inv" in weight.parts and weight.weight.dtype in FP8
    is_remade = has_scale and row.path.endswith("indexer.wk")
    if not module.loads_quantized and (row.table_scale or is_remade):
        return True
    return _is_put_in_order(module, member) or _is_replaced(view, module, member)


def _is_replaced(view: StoredView, module: Module, member: Member) -> bool:
    """A draft gets the target's embedding and head once it is loaded, so its own may have any form
    that loads.

    vLLM 0.32.0 v1/worker/gpu/spec_decode/eagle/utils.py, _should_share;
    v1/spec_decode/llm_base_proposer.py.
    """
    row = member.place.row
    if module.part != "mtp" or row.is_drafts_own:
        return False
    built = module.resolution.built.form
    if row.role not in ("embedding", "head") or not built.startswith(("plain", "fp8")):
        return False
    parts = dict(member.weight.parts)
    size = (view.source.text_config.get("vocab_size"), view.source.text_config.get("hidden_size"))
    if "weight" in parts and parts.pop("weight").shape != size:
        return False
    is_dropped = view.loader.drops_scales and parts.keys() == {"weight_scale"}
    return is_dropped or not parts or not view.loader.unknown_name
