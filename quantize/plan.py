"""The plan: one fate for every tensor of the source, decided from headers before any work.

In: a recipe, and a source's config.json and headers. Out: a `Plan`. The writer, the ignore list, the size estimate,
the static check's expectations and the model card all read this one value, so they cannot disagree.

Easy to get wrong: a decision is per module at *run time*. Modules that vLLM fuses must agree, a module whose runtime
class has no slot for scales must stay plain, and an MTP block promised by config.json must be there.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from ..checkpoints.safetensors_file import Entry
from ..checkpoints.source import Source
from ..checkpoints.stored import OTHER_LEAVES, Form, StoredWeight, stored_weights
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.families import find_family
from ..recipes.family import FamilyView, HFName, Part, Place, Role, VLLMName
from ..recipes.schema import Recipe
from ..recipes.schemes import RESCALING, REWRITES, SCHEMES, Scheme, num_bytes

Fate = Literal["quantize", "keep", "dequantize", "add", "drop"]
Calibrated = Literal["", "scales", "weights"]
SHARD_BYTES = 5_000_000_000
# Buffers that old checkpoints carry and every model class computes itself.
_RECOMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One tensor to be written."""

    name: HFName
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """What becomes of one weight, with its scales, or of one other tensor.

    Attributes:
        name: the weight's or tensor's name on disk, without a packed form's suffix (`....weight`).
        inputs: every source tensor this consumes; across a plan each source tensor is consumed once.
        fate: quantize to `scheme`; keep the bytes; dequantize to BF16; add a copy of `inputs`; drop.
        scheme: the form at run time: a scheme's name, or "" for plain tensors.
        reason: why, for people.
        form: how the source stores it.
        shape: logical shape.
        unit: tensors with the same unit are computed together and land in one shard.
        stacked: projections in a 3-D expert tensor, which becomes one tensor an expert where it is quantized.
        block: rows and columns per scale of the stored form, for block forms.
        calibrated: what batches contribute: the static input scales beside a weight packed from the source, or, where
            an algorithm rewrites the weight, every output.
        may_change: the algorithm moves scale between the modules of this layer, so batches may contribute all outputs
            of this one too, by unit.
    """

    name: HFName
    inputs: tuple[HFName, ...]
    fate: Fate
    scheme: str
    reason: str
    form: Form
    shape: tuple[int, ...]
    outputs: tuple[Output, ...]
    unit: str
    role: Role
    part: Part
    layer: int | None
    module: HFName
    runtime: VLLMName
    stacked: tuple[str, ...] = ()
    block: tuple[int, int] | None = None
    calibrated: Calibrated = ""
    may_change: bool = False

    @property
    def calibrated_outputs(self) -> tuple[Output, ...]:
        """The outputs that cannot be had without batches."""
        if self.calibrated == "weights":
            return self.outputs
        suffixes = {spec.suffix for spec in SCHEMES[self.scheme].extra} if self.calibrated else set()
        return tuple(output for output in self.outputs if output.name.rpartition(".")[2] in suffixes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One output file: the units that make it up, and its tensors in the order of their bytes."""

    file: str
    units: tuple[tuple[TensorPlan, ...], ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that will happen, before it does."""

    recipe: Recipe
    source: Source
    view: FamilyView
    tensors: tuple[TensorPlan, ...]
    shard_bytes: int = SHARD_BYTES

    @cached_property
    def num_bytes_before(self) -> int:
        """Bytes of the source tensors that are consumed."""
        entries = self.entries
        return sum(entries[name].num_bytes for name in {n for t in self.tensors for n in t.inputs if t.fate != "add"})

    @cached_property
    def num_bytes_after(self) -> int:
        """Bytes of the tensors to be written."""
        return sum(output.num_bytes for tensor in self.tensors for output in tensor.outputs)

    @cached_property
    def entries(self) -> Mapping[HFName, Entry]:
        """Every source tensor, also those of files that the index does not list."""
        return {**self.source.unindexed, **self.source.entries}

    @cached_property
    def units(self) -> tuple[tuple[TensorPlan, ...], ...]:
        """Tensors to be computed together, in the order they are written."""
        by_unit: dict[str, list[TensorPlan]] = defaultdict(list)
        for tensor in self.tensors:
            if tensor.outputs:
                by_unit[tensor.unit].append(tensor)
        return tuple(tuple(members) for members in by_unit.values())

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The output files, filled in order up to `shard_bytes`; a unit is never split."""
        groups: list[list[tuple[TensorPlan, ...]]] = [[]]
        filled = 0
        for unit in self.units:
            size = sum(output.num_bytes for tensor in unit for output in tensor.outputs)
            if groups[-1] and filled + size > self.shard_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(unit)
            filled += size
        return tuple(
            Shard(
                file=f"model-{number:05d}-of-{len(groups):05d}.safetensors",
                units=tuple(units),
                outputs=tuple(sorted((o for unit in units for t in unit for o in t.outputs), key=_disk_order)),
            )
            for number, units in enumerate(groups, start=1)
        )

    @property
    def needs_calibration(self) -> list[str]:
        """Schemes of this plan that cannot be had without batches."""
        return sorted({tensor.scheme for tensor in self.tensors if tensor.calibrated})


def make_plan(recipe: Recipe, source: Source, *, shard_bytes: int = SHARD_BYTES) -> Plan:
    """Decide the fate of every tensor.

    Args:
        recipe: what to do with each module group; `mtp: auto` has been resolved to one of its candidates.
        source: the released checkpoint's headers.
        shard_bytes: upper bound for an output file, unless one unit alone is larger.

    Raises:
        RecipeError: the recipe does not fit the model: a group without a decision or without modules, a width that a
            scheme cannot take, fused modules that disagree, a pattern that matches nothing.
        CheckpointError: a tensor outside the family table, or a promised MTP block that is absent.
    """
    assert recipe.mtp != "auto", f"{recipe.name}: a plan is of one candidate"
    family = find_family(source.config, source.where)
    if recipe.family not in (family.model_type, *family.also):
        raise RecipeError(
            recipe.name,
            f"family must be that of {source.where}",
            got=f"{recipe.family!r} for a {family.model_type}",
            cure="Choose another MODEL, or copy this recipe and change its family",
        )
    view = family.view(source.config)
    entries = _with_separate_mtp(source, view)
    weights, others = stored_weights(entries.values())
    _refuse_missing_mtp(view, source, entries)
    matcher = _Patterns(recipe)
    plans = [_plan_weight(weight, recipe, view, matcher, source) for weight in weights.values()]
    plans += [_plan_other(entry, recipe, view, matcher, source) for entry in others]
    plans += _plan_aliases(view, entries)
    matcher.refuse_unmatched(recipe)
    _refuse_unnamed_groups(recipe, plans)
    _refuse_disagreeing_fusions(recipe, plans)
    plans = _calibrated(recipe, plans)
    plans.sort(key=lambda plan: (plan.part == "mtp", plan.layer if plan.layer is not None else -1, _natural(plan.name)))
    plan = Plan(recipe=recipe, source=source, view=view, tensors=tuple(plans), shard_bytes=shard_bytes)
    refuse_calibration(plan)
    return plan


def refuse_calibration(plan: Plan) -> None:
    """Refuse static input scales where the runtime feeds a module what no batch showed.

    vLLM 0.32.0 folds latent attention's kv_b_proj into the query and the output, and gets its weight by running an
    identity matrix through the layer (get_and_maybe_dequant_weights in quantization/utils/quant_utils.py, called by
    split_kv_b_proj in layers/attention/mla_attention.py). Schemes that scale their inputs on the fly take ones and
    zeros exactly. A static scale s rounds 1 / s to E4M3 (FP8; NVFP4's scale of a group likewise), so the whole weight
    is off by one factor of up to 1/16, and clipped where the inputs seen were below 1.

    Raises:
        RecipeError: names the module and what to override it with.
    """
    for tensor in plan.tensors:
        if tensor.fate == "quantize" and SCHEMES[tensor.scheme].needs_calibration and _is_absorbed(tensor):
            raise RecipeError(
                f"{plan.recipe.name}: {tensor.part} {tensor.role}",
                "vLLM reads kv_b_proj through an identity matrix, which static input scales distort",
                got=f"{tensor.scheme} for {tensor.name}",
                cure="Add an override for `re:.*\\.kv_b_proj`: FP8_BLOCK, FP8_DYNAMIC or bf16",
            )


def _is_absorbed(tensor: TensorPlan) -> bool:
    return tensor.module.endswith(".kv_b_proj")


class _Patterns:
    """A recipe's overrides and keeps, remembering which of them matched."""

    def __init__(self, recipe: Recipe):
        self._compiled = {
            pattern: re.compile(pattern[3:] if pattern.startswith("re:") else re.escape(pattern))
            for pattern in (*(override.modules for override in recipe.overrides), *recipe.keep)
        }
        self._overrides = tuple((override.modules, override.scheme) for override in recipe.overrides)
        self._keep = recipe.keep
        self._matched: set[str] = set()

    def override(self, module: HFName) -> str | None:
        for pattern, scheme in self._overrides:
            if self._compiled[pattern].fullmatch(module):
                self._matched.add(pattern)
                return scheme
        return None

    def keeps(self, name: HFName) -> bool:
        hits = [pattern for pattern in self._keep if self._compiled[pattern].fullmatch(name)]
        self._matched.update(hits)
        return bool(hits)

    def refuse_unmatched(self, recipe: Recipe) -> None:
        for pattern in self._compiled:
            if pattern not in self._matched:
                raise RecipeError(
                    recipe.name,
                    f"pattern {pattern!r} must match a module of the model",
                    got="no match",
                    cure="Write the whole name as on disk, or `re:` and a regex of the whole name",
                )


def _with_separate_mtp(source: Source, view: FamilyView) -> dict[HFName, Entry]:
    """The indexed tensors, and MTP tensors of files that the index forgot."""
    separate = {name: entry for name, entry in source.unindexed.items() if view.is_mtp(name)}
    return {**source.entries, **separate}


def _refuse_missing_mtp(view: FamilyView, source: Source, entries: Mapping[HFName, Entry]) -> None:
    promised, found = view.num_mtp_layers, view.mtp_layers_of(entries)
    where = f"{source.where}/config.json"
    if missing := sorted(set(range(promised)) - found):
        raise CheckpointError(
            where,
            f"{view.mtp_count_key}={promised} promises MTP layers {view.mtp_stem(missing[0])}*",
            got="no such tensor in any file",
            cure="Get the MTP block from the original release: most tools drop it",
        )
    if extra := sorted(found - set(range(promised))):
        raise CheckpointError(
            where,
            f"{view.mtp_count_key} must count the MTP layers on disk",
            got=f"{promised}, but {view.mtp_stem(extra[0])}* exists",
            cure="Correct config.json",
        )
    if not promised:
        raise CheckpointError(
            where,
            f"{view.mtp_count_key} must promise an MTP block",
            got=promised,
            cure="keepmtp is for checkpoints with MTP; this one has none",
        )
    present = {name.rpartition(".")[0] for name in entries} | set(entries)
    for module in view.required_mtp_modules(range(promised)):
        if module not in present:
            raise CheckpointError(
                source.where,
                f"the MTP block must have {module}",
                got="no such tensor in any file",
                cure="Get the MTP block from the original release",
            )


def _place(name: HFName, view: FamilyView, source: Source) -> Place:
    place = view.place(name)
    if place is None:
        raise CheckpointError(
            source.where,
            f"every tensor must be known to family {view.family.model_type}",
            got=name,
            cure=f"Add it to recipes/families/{view.family.model_type}.py, or to `keep` of the recipe",
        )
    return place


def _plan_weight(
    weight: StoredWeight, recipe: Recipe, view: FamilyView, matcher: _Patterns, source: Source
) -> TensorPlan:
    name = HFName(f"{weight.module}.weight")
    if matcher.keeps(name):
        return _kept_unknown(name, weight.names(), [weight.parts[leaf] for leaf in weight.parts], weight.shape)
    place = _place(name, view, source)
    if place.leaf != "weight":  # a parameter whose own name ends in .weight
        return _plan_other(weight.weight, recipe, view, matcher, source)
    word, reason = _decide(place, recipe, matcher)
    where = f"{recipe.name}: {place.part} {place.role}"
    if weight.form in ("unknown", "mxfp8") or (weight.form == "int_packed" and not weight.scheme):
        leaves = ", ".join(f"{leaf} {entry.dtype}{list(entry.shape)}" for leaf, entry in weight.parts.items())
        raise CheckpointError(
            f"{source.where}: {name}",
            "must be plain, FP8, MXFP4, NVFP4 or symmetric integers in groups of 128",
            got=leaves,
            cure="Start from the original release",
        )
    if word in SCHEMES:
        scheme = SCHEMES[word]
        if _same_bytes(weight, scheme):
            outputs = _renamed_outputs(weight, scheme)
            return _tensor(weight, place, "keep", word, f"the source stores {word} already", outputs)
        _refuse_width(where, name, weight, place, scheme, view)
        outputs = _unstacked_outputs(place, scheme, weight.shape) or _packed_outputs(place.module, scheme, weight.shape)
        return _tensor(weight, place, "quantize", word, reason, outputs)
    if weight.form == "plain":
        return _tensor(weight, place, "keep", "", reason, (_same(weight.weight),))
    if word == "source" and weight.scheme and place.row.loads_quantized and _is_taken(weight, place, view):
        outputs = _renamed_outputs(weight, SCHEMES[weight.scheme])
        return _tensor(weight, place, "keep", weight.scheme, "as in the source, scales renamed", outputs)
    if word == "source" and not place.row.why_kept:
        raise RecipeError(
            where,
            "`source` needs a form that compressed-tensors can say",
            got=f"{weight.form} in {name}",
            cure="Use bf16 or a scheme",
        )
    output = Output(name=name, dtype="BF16", shape=weight.shape)
    return _tensor(weight, place, "dequantize", "", reason, (output,))


def _decide(place: Place, recipe: Recipe, matcher: _Patterns) -> tuple[str, str]:
    """The recipe's word for a module, and the reason to show."""
    override = matcher.override(place.module)
    if place.row.why_kept:
        if override in SCHEMES:
            raise RecipeError(
                recipe.name,
                f"{place.module} is never quantized ({place.row.why_kept})",
                got=override,
                cure="Remove the override",
            )
        passes = place.part == "mtp" and recipe.mtp == "source"
        return ("source" if passes else "bf16"), place.row.why_kept
    if override is not None:
        return override, "override of the recipe"
    if place.part == "backbone":
        word = recipe.backbone.get(place.role)
    elif isinstance(recipe.mtp, str):
        word = recipe.mtp
    else:
        word = recipe.mtp.get(place.role)
    if word is None:
        raise RecipeError(
            recipe.name,
            f"{place.part} must say what happens to {place.role}",
            got=f"nothing, but the model has {place.module}",
            cure=f"Add `{place.role}: source` or a scheme",
        )
    reason = f"recipe: {'mtp' if place.part == 'mtp' else 'backbone'} {place.role}"
    return word, reason


def _plan_other(entry: Entry, recipe: Recipe, view: FamilyView, matcher: _Patterns, source: Source) -> TensorPlan:
    """Biases, parameters without a module, and what is recomputed."""
    if matcher.keeps(entry.name):
        return _kept_unknown(entry.name, (entry.name,), [entry], entry.shape)
    if _RECOMPUTED.search(entry.name):
        return TensorPlan(
            name=entry.name,
            inputs=(entry.name,),
            fate="drop",
            scheme="",
            reason="every model class computes it",
            form="plain",
            shape=entry.shape,
            outputs=(),
            unit=entry.name,
            role="state",
            part="backbone",
            layer=None,
            module=entry.name,
            runtime=VLLMName(entry.name),
        )
    place = _place(entry.name, view, source)
    if place.row.stacked and place.leaf == "":  # a 3-D expert parameter is a weight whose name has no `.weight`
        weight = StoredWeight(module=entry.name, form="plain", parts={"weight": entry}, shape=entry.shape)
        return _plan_weight(weight, recipe, view, matcher, source)
    if not place.row.stacked and (place.leaf in ("weight", *OTHER_LEAVES) or place.role == "vision"):
        return _tensor_of(entry, place, "keep", "", place.row.why_kept or "a bias, not a matrix")
    raise CheckpointError(
        f"{source.where}: {entry.name}",
        f"{place.leaf!r} must belong to a weight of {place.module}",
        got="no such weight",
        cure="Check the download, or add the name to `keep` of the recipe",
    )


def _plan_aliases(view: FamilyView, entries: Mapping[HFName, Entry]) -> list[TensorPlan]:
    plans = []
    for index in range(view.num_mtp_layers):
        for alias in view.family.aliases:
            name, origin = HFName(view.mtp_stem(index) + alias.path), HFName(alias.source)
            if name in entries or origin not in entries:
                continue
            place = view.place(name)
            assert place is not None, f"alias {name} has no row in family {view.family.model_type}"
            output = Output(name=name, dtype=entries[origin].dtype, shape=entries[origin].shape)
            plan = _tensor_of(entries[origin], place, "add", "", alias.reason, name=name, outputs=(output,))
            plans.append(plan)
    return plans


def _tensor(
    weight: StoredWeight, place: Place, fate: Fate, scheme: str, reason: str, outputs: tuple[Output, ...]
) -> TensorPlan:
    name = HFName(f"{place.module}.weight")
    shares = fate == "quantize" and SCHEMES[scheme].shares_global_scale and place.shares
    return TensorPlan(
        name=name,
        inputs=weight.names(),
        fate=fate,
        scheme=scheme,
        reason=reason,
        form=weight.form,
        shape=weight.shape,
        outputs=outputs,
        unit=place.shares if shares else name,
        role=place.role,
        part=place.part,
        layer=place.layer,
        module=place.module,
        runtime=place.runtime,
        stacked=place.row.stacked,
        block=weight.block,
    )


def _tensor_of(
    entry: Entry,
    place: Place,
    fate: Fate,
    scheme: str,
    reason: str,
    *,
    name: HFName | None = None,
    outputs: tuple[Output, ...] = (),
) -> TensorPlan:
    return TensorPlan(
        name=name or entry.name,
        inputs=(entry.name,),
        fate=fate,
        scheme=scheme,
        reason=reason,
        form="plain",
        shape=entry.shape,
        outputs=outputs or (_same(entry),),
        unit=name or entry.name,
        role=place.role,
        part=place.part,
        layer=place.layer,
        module=place.module,
        runtime=place.runtime,
    )


def _kept_unknown(
    name: HFName, inputs: tuple[HFName, ...], entries: Iterable[Entry], shape: tuple[int, ...]
) -> TensorPlan:
    return TensorPlan(
        name=name,
        inputs=inputs,
        fate="keep",
        scheme="",
        reason="recipe: keep",
        form="plain",
        shape=shape,
        outputs=tuple(_same(entry) for entry in entries),
        unit=name,
        role="state",
        part="backbone",
        layer=None,
        module=HFName(name.rpartition(".")[0] or name),
        runtime=VLLMName(name.rpartition(".")[0] or name),
    )


def _same(entry: Entry) -> Output:
    return Output(name=entry.name, dtype=entry.dtype, shape=entry.shape)


def _packed_outputs(module: HFName, scheme: Scheme, shape: tuple[int, ...]) -> tuple[Output, ...]:
    return tuple(
        Output(name=HFName(f"{module}.{spec.suffix}"), dtype=spec.dtype, shape=spec.shape)
        for spec in scheme.tensors(*shape)
    )


def _unstacked_outputs(place: Place, scheme: Scheme, shape: tuple[int, ...]) -> tuple[Output, ...]:
    """The tensors that a stacked expert parameter becomes, expert by expert; none for other modules."""
    if not place.row.stacked:
        return ()
    num_experts, rows, columns = shape
    stem = place.module.removesuffix(place.row.path)
    return tuple(
        output
        for expert in range(num_experts)
        for path in place.row.unstacked
        for output in _packed_outputs(
            HFName(stem + path.replace("{e}", str(expert))), scheme, (rows // len(place.row.stacked), columns)
        )
    )


def _renamed_outputs(weight: StoredWeight, scheme: Scheme) -> tuple[Output, ...]:
    """The scheme's tensors for a weight that keeps its bytes; float scales keep their precision too."""
    scale = weight.parts.get("weight_scale")
    wide = scale.dtype if scale is not None and scale.dtype in ("F32", "F16") else "BF16"
    return tuple(
        replace(output, dtype=wide) if output.dtype == "BF16" else output
        for output in _packed_outputs(weight.module, scheme, weight.shape)
    )


def _is_taken(weight: StoredWeight, place: Place, view: FamilyView) -> bool:
    """Whether the draft's loader knows the scheme's names; true of the backbone's."""
    known = view.family.loader.mtp_leaves
    outputs = _renamed_outputs(weight, SCHEMES[weight.scheme])
    return place.part == "backbone" or not known or all(o.name.rpartition(".")[2] in known for o in outputs)


def _same_bytes(weight: StoredWeight, scheme: Scheme) -> bool:
    """Whether the source's bytes are already what `scheme` would put on disk, scales' names and dtypes aside."""
    if not weight.scheme:
        return False
    stored = SCHEMES[weight.scheme]
    suffixes = {spec.suffix for spec in scheme.tensors(128, 128)}
    return stored.weights == scheme.weights and suffixes <= {spec.suffix for spec in stored.tensors(128, 128)}


def _refuse_width(
    where: str, name: HFName, weight: StoredWeight, place: Place, scheme: Scheme, view: FamilyView
) -> None:
    if len(weight.shape) != (3 if place.row.stacked else 2):
        raise RecipeError(
            where,
            f"{scheme.name} needs a matrix",
            got=f"shape {list(weight.shape)} in {name}",
            cure=f"Set {place.role}: source",
        )
    if scheme.has_tensor_scale and not place.row.takes_tensor_scale:
        raise RecipeError(
            where,
            f"vLLM cannot load one scale a tensor into {place.runtime.rpartition('.')[2]} of this family",
            got=f"{scheme.name} for {name}",
            cure=f"Set {place.role}: FP8_DYNAMIC, FP8_BLOCK or bf16",
        )
    rows, columns = weight.shape[-2] // max(1, len(place.row.stacked)), weight.shape[-1]
    if columns % scheme.k_multiple():
        raise RecipeError(
            where,
            f"{scheme.name} needs K divisible by {scheme.k_multiple()}",
            got=f"K={columns} in {name}",
            cure=f"Set {place.role}: bf16, or override this module",
        )
    # vLLM 0.32.0 (fp8_utils.validate_fp8_block_shape) lets only the last shard of a fused module end in a part block.
    may_be_ragged = place.row.path in view.last_shards and place.role != "experts"
    if scheme.block and rows % scheme.block[0] and not may_be_ragged:
        raise RecipeError(
            where,
            f"{scheme.name} needs N divisible by {scheme.block[0]} where modules are fused",
            got=f"N={rows} in {name}",
            cure=f"Set {place.role}: FP8_DYNAMIC or bf16",
        )


def _refuse_unnamed_groups(recipe: Recipe, plans: Iterable[TensorPlan]) -> None:
    have: dict[Part, set[Role]] = {"backbone": set(), "mtp": set()}
    for plan in plans:
        have[plan.part].add(plan.role)
    named: dict[Part, Iterable[str]] = {"backbone": recipe.backbone}
    if isinstance(recipe.mtp, dict):
        named["mtp"] = recipe.mtp
    for part, groups in named.items():
        for group in groups:
            if group not in have[part]:
                raise RecipeError(
                    recipe.name,
                    f"{part} group {group} must match a module of the model",
                    got="no match",
                    cure=f"Remove {group} from {part}",
                )


def _refuse_disagreeing_fusions(recipe: Recipe, plans: Iterable[TensorPlan]) -> None:
    first: dict[VLLMName, TensorPlan] = {}
    for plan in plans:
        if len(plan.shape) < 2 or plan.fate == "drop":
            continue
        other = first.setdefault(plan.runtime, plan)
        if other.scheme != plan.scheme:
            raise RecipeError(
                recipe.name,
                f"vLLM fuses {other.module} and {plan.module} into {plan.runtime}, so they need one scheme",
                got=f"{other.scheme or 'plain'} and {plan.scheme or 'plain'}",
                cure="Give both the same scheme, or `bf16`",
            )


def _calibrated(recipe: Recipe, plans: list[TensorPlan]) -> list[TensorPlan]:
    """The plans, each saying what batches contribute to it."""
    algorithm = recipe.calibration.algorithm if recipe.calibration else "minmax"
    marked = [_contribution(plan, algorithm) for plan in plans]
    if algorithm not in RESCALING:
        return marked
    layers = {(plan.part, plan.layer) for plan in marked if plan.calibrated == "weights"} - {
        ("backbone", None),
        ("mtp", None),
    }
    return [
        replace(plan, may_change=True, reason=f"{plan.reason}; {algorithm} may rescale it")
        if (plan.part, plan.layer) in layers
        and plan.calibrated != "weights"
        and plan.role != "state"
        and (plan.fate in ("quantize", "dequantize") or (plan.fate == "keep" and plan.form == "plain"))
        else plan
        for plan in marked
    ]


def _contribution(plan: TensorPlan, algorithm: str) -> TensorPlan:
    if plan.fate != "quantize":
        return plan
    if plan.scheme in REWRITES[algorithm]:
        return replace(plan, calibrated="weights", reason=f"{plan.reason}; {algorithm} on calibration data")
    if SCHEMES[plan.scheme].needs_calibration:
        return replace(plan, calibrated="scales", reason=f"{plan.reason}; input scales from calibration data")
    return plan


def _disk_order(output: Output) -> tuple[int, str]:
    """Widest dtypes first, as safetensors writes them: every tensor then starts aligned."""
    return (-num_bytes(output.dtype, (8,)), output.name)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
