"""The plan: one fate for every tensor of the source, decided from headers before any work.

In: a recipe, and a source's config.json and headers. Out: a `Plan`. The writer, the ignore list,
the size estimate, the static check's expectations and the model card all read this one value, so
they cannot disagree.

Easy to get wrong: a decision is per module at *run time*. Modules that vLLM fuses must agree, a
module whose runtime class has no slot for scales must stay plain, and an MTP block promised by
config.json must be there.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import Source
from ...checkpoints.stored import stored_weights
from ...recipes.conventions import ALGORITHMS, CACHE, NOT_FOR_EXPERTS
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.families import find_family
from ...recipes.family import Family, HFName, Part, VLLMName
from ...recipes.family_view import FamilyView
from ...recipes.schema import AUTO, TUNED, Calibration, Recipe
from ...recipes.schemes import RESCALING, REWRITES, SCHEMES, SEARCHES, num_bytes
from .decide import Given, Patterns, added_aliases, decide_other, decide_weight, matching_limit
from .kv_cache import with_cache_scales
from .tensor_plan import Output, Spelled, TensorPlan, modelopt_outputs

SHARD_BYTES = 5_000_000_000
_NUMBERS = re.compile(r"(\d+)")
# Those of the target that a block has a copy of, or that are as large; and what no gradient moves.
_NEVER_TRAINED = ("embedding", "head", "state", "vision")
_GET_IT = "Get the MTP block from the original release: most tools drop it"
_LOST = (
    "Add --mtp-source with a checkpoint that has the block: the original release, since most "
    "tools drop it, or another "
    "repository where the release has none. llm-compressor quantizes a model that never had one"
)
Unit = tuple[TensorPlan, ...]
"""Tensors that are computed together, and written to one shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One output file: its units, and its tensors in the order of their bytes."""

    file: str
    units: tuple[Unit, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Plan:
    """Everything that will happen, before it does.

    Attributes:
        trust_remote_code: the user lets the checkpoint's own Python run, and travel with the
            output.
        recipe_text: the recipe as the checkpoint will carry it; "" where only the decisions are
            asked for.
        file_stem: how the names of the output files start.
    """

    recipe: Recipe
    source: Source
    view: FamilyView
    tensors: tuple[TensorPlan, ...]
    shard_bytes: int = SHARD_BYTES
    trust_remote_code: bool = False
    recipe_text: str = ""
    file_stem: str = "model"

    @property
    def companions(self) -> tuple[str, ...]:
        """The source's files, weights apart, that the output gets."""
        source = self.source
        return (*source.companions, *source.code) if self.trust_remote_code else source.companions

    @cached_property
    def num_bytes_before(self) -> int:
        """Bytes of the source tensors that are consumed."""
        consumed = {
            name for tensor in self.tensors if tensor.fate != "add" for name in tensor.inputs
        }
        entries = self.entries
        return sum(entries[name].num_bytes for name in consumed)

    @cached_property
    def num_bytes_after(self) -> int:
        """Bytes of the tensors to be written."""
        return sum(
            self.on_disk(output).num_bytes for tensor in self.tensors for output in tensor.outputs
        )

    @cached_property
    def spelled(self) -> Mapping[HFName, Spelled]:
        """Outputs that the recipe's `format` writes otherwise, by their names in
        compressed-tensors' convention.

        Calibration, packing and `TensorPlan.outputs` know compressed-tensors' names only; the
        writer turns them.
        """
        if self.recipe.format == "compressed-tensors":
            return {}
        respelled = (tensor for tensor in self.tensors if tensor.scheme or tensor.calibrated)
        return {name: other for tensor in respelled for name, other in modelopt_outputs(tensor)}

    def on_disk(self, output: Output) -> Output:
        """An output by the name, dtype and shape that it has in the finished checkpoint."""
        return self.spelled[output.name].output if output.name in self.spelled else output

    @cached_property
    def entries(self) -> Mapping[HFName, Entry]:
        """Every source tensor, also those of files that the index does not list."""
        return {**self.source.unindexed, **self.source.entries}

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Tensors to be computed together, in the order they are written."""
        by_unit: dict[str, list[TensorPlan]] = defaultdict(list)
        for tensor in self.tensors:
            if tensor.outputs:
                by_unit[tensor.unit].append(tensor)
        return tuple(tuple(members) for members in by_unit.values())

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """The output files, filled in order up to `shard_bytes`; a unit is never split.

        The MTP block has files of its own, the last ones, so that a loader of the draft can leave
        out the backbone's: vLLM 0.32.0 by `is_unused_checkpoint_weight` of its draft class, and
        sglang #35395 by the index. Embedding and head, which target and draft share, stay in the
        first files.
        """
        parts = groupby(self.units, key=lambda unit: unit[0].part)
        groups = [
            group for _, units in parts for group in filled(units, self.shard_bytes, self.on_disk)
        ]
        return tuple(
            self._shard(units, number, len(groups)) for number, units in enumerate(groups, start=1)
        )

    def _shard(self, units: list[Unit], number: int, count: int) -> Shard:
        outputs = [
            self.on_disk(output) for unit in units for tensor in unit for output in tensor.outputs
        ]
        return Shard(
            file=f"{self.file_stem}-{number:05d}-of-{count:05d}.safetensors",
            units=tuple(units),
            outputs=tuple(sorted(outputs, key=_disk_order)),
        )

    @property
    def needs_calibration(self) -> list[str]:
        """Schemes of this plan that need batches, the KV cache's among them, and the word for a
        tuned MTP block.
        """
        schemes = {tensor.scheme or CACHE for tensor in self.tensors if tensor.calibrated}
        return sorted(schemes | {f"mtp: {TUNED}" for tensor in self.tensors if tensor.tuned})

    @property
    def needs_batches(self) -> bool:
        """Whether text is run: for a scheme, for an algorithm, or to measure what `auto` or `tuned`
        decide.
        """
        return bool(self.needs_calibration) or self.recipe.measures_mtp or self.recipe.is_searched

    @property
    def calibration(self) -> Calibration:
        """The recipe's block of a plan that is calibrated."""
        assert self.recipe.calibration is not None, (
            f"{self.recipe.name}: nothing says what to calibrate on"
        )
        return self.recipe.calibration

    @property
    def may_calibrate_mtp(self) -> bool:
        """Whether tensors of the MTP block need batches; under `mtp: auto`, those of a
        candidate.
        """
        if self.recipe.mtp == AUTO and self.recipe.calibrated_mtp_schemes():
            return True
        return any(
            tensor.calibrated or tensor.tuned for tensor in self.tensors if tensor.part == "mtp"
        )


def make_plan(
    recipe: Recipe,
    source: Source,
    *,
    shard_bytes: int = SHARD_BYTES,
    trust_remote_code: bool = False,
) -> Plan:
    """Decide the fate of every tensor.

    Args:
        recipe: what to do with each module group; `mtp: auto` has been resolved to one of its
            candidates.
        source: the released checkpoint's headers.
        shard_bytes: upper bound for an output file, unless one unit alone is larger.
        trust_remote_code: the user lets the checkpoint's own Python run, and travel with the
            output.

    Raises:
        RecipeError: the recipe does not fit the model: a group without a decision or without
            modules, a width that a scheme cannot take, fused modules that disagree, a pattern that
            matches nothing.
        CheckpointError: a tensor outside the family table, or a promised MTP block that is absent.
    """
    assert recipe.mtp != AUTO, f"{recipe.name}: a plan is of one candidate"
    family = find_family(source.config, source.where, source.entries)
    _refuse_other_family(recipe, family, source)
    view = FamilyView(family=family, config=source.config)
    entries = with_separate_mtp(source, view)
    weights, others = stored_weights(entries.values())
    _refuse_lost_layers(view, source)
    names = [*(HFName(f"{module}.weight") for module in weights), *(entry.name for entry in others)]
    refuse_missing_mtp(view, source, names)
    given = Given(recipe=recipe, source=source, view=view, patterns=Patterns(recipe))
    with matching_limit():
        tensors = [decide_weight(weight, given) for weight in weights.values()]
        tensors += [decide_other(entry, given) for entry in others]
    tensors += added_aliases(view, entries)
    _refuse_unmatched(recipe, given.patterns)
    _refuse_unnamed_groups(recipe, tensors)
    refuse_disagreeing_fusions(recipe, tensors)
    if recipe.format == "modelopt":
        refuse_wordless(recipe, tensors)
    tensors = _with_calibration(recipe, tensors)
    if recipe.kv_cache is not None:
        tensors = with_cache_scales(recipe, view, tensors)
    tensors.sort(key=plan_order)
    plan = Plan(
        recipe=recipe,
        source=source,
        view=view,
        tensors=tuple(tensors),
        shard_bytes=shard_bytes,
        trust_remote_code=trust_remote_code,
    )
    refuse_calibration(plan)
    return plan


def refuse_calibration(plan: Plan) -> None:
    """Refuse static input scales where the runtime feeds a module an input that no batch has.

    vLLM 0.32.0 folds latent attention's kv_b_proj into the query and the output, and gets its
    weight by running an identity matrix through the layer (get_and_maybe_dequant_weights in
    quantization/utils/quant_utils.py, called by split_kv_b_proj in
    layers/attention/mla_attention.py). Schemes that scale their inputs on the fly take ones and
    zeros exactly. A static scale s rounds 1 / s to E4M3 (FP8; NVFP4's scale of a group likewise),
    so the whole weight is off by one factor of up to 1/16, and clipped where the inputs of
    calibration were below 1.

    Raises:
        RecipeError: names the module and what to override it with.
    """
    for tensor in plan.tensors:
        is_absorbed = tensor.module.endswith(".kv_b_proj")
        if is_absorbed and tensor.fate == "quantize" and SCHEMES[tensor.scheme].needs_calibration:
            raise RecipeError(
                f"{plan.recipe.name}: {tensor.part} {tensor.role}",
                "vLLM reads kv_b_proj through an identity matrix, which static input scales "
                "distort",
                got=f"{tensor.scheme} for {tensor.name}",
                cure="Add an override for `re:.*\\.kv_b_proj`: FP8_BLOCK, FP8_DYNAMIC or bf16",
            )


# --- recipe and model must fit --------------------------------------------------------------------


def _refuse_other_family(recipe: Recipe, family: Family, source: Source) -> None:
    if recipe.family not in (family.model_type, *family.also):
        raise RecipeError(
            recipe.name,
            f"family must be that of {source.where}",
            got=f"{recipe.family!r} for a {family.model_type}",
            cure="Choose another MODEL, or copy this recipe and change its family",
        )


def with_separate_mtp(source: Source, view: FamilyView) -> dict[HFName, Entry]:
    """The indexed tensors, and MTP tensors of files that the index forgot."""
    separate = {name: entry for name, entry in source.unindexed.items() if view.is_mtp(name)}
    return {**source.entries, **separate}


def _refuse_lost_layers(view: FamilyView, source: Source) -> None:
    """Each layer of the backbone that config.json counts has a tensor: a download that was cut has
    not.
    """
    stems = [view.disk_stem("backbone", index) for index in range(view.num_layers)]
    depth = stems[0].count(".") if stems else 0
    held = {".".join([*name.split(".", depth)[:depth], ""]) for name in source.entries}
    for stem in stems:
        if stem not in held:
            raise CheckpointError(
                f"{source.where}/config.json",
                f"num_hidden_layers={view.num_layers} promises {stem}*",
                got="no such tensor in any file",
                cure="Download the checkpoint again",
            )


def refuse_missing_mtp(view: FamilyView, source: Source, names: Collection[HFName]) -> None:
    """config.json and the tensors' names must agree on the MTP layers, and every module of the
    block must be there.
    """
    promised, found = view.num_mtp_layers, view.mtp_layers_of(names)
    where = f"{source.where}/config.json"
    if promised and not any(map(view.is_mtp, names)):
        raise CheckpointError(
            where,
            f"{view.mtp_count_key}={promised} promises MTP layers {view.mtp_stem(0)}*",
            got="no MTP tensor in any file",
            cure=_LOST,
        )
    if missing := sorted(set(range(promised)) - found):
        raise CheckpointError(
            where,
            f"{view.mtp_count_key}={promised} promises MTP layers {view.mtp_stem(missing[0])}*",
            got="no such tensor in any file",
            cure=_GET_IT,
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
            cure=_LOST,
        )
    present = {name.rpartition(".")[0] for name in names} | set(names)
    for module in view.required_mtp_modules(range(promised)):
        if module not in present:
            raise CheckpointError(
                source.where,
                f"the MTP block must have {module}",
                got="no such tensor in any file",
                cure="Get the MTP block from the original release",
            )


def _refuse_unmatched(recipe: Recipe, patterns: Patterns) -> None:
    for pattern in patterns.unmatched():
        raise RecipeError(
            recipe.name,
            f"pattern {pattern!r} must match a module of the model",
            got="no match",
            cure="Write the whole name as on disk, or `re:` and a regex of the whole name",
        )


def _refuse_unnamed_groups(recipe: Recipe, tensors: Iterable[TensorPlan]) -> None:
    """Every module group that the recipe names must be in the model."""
    have: set[tuple[Part, str]] = {(tensor.part, tensor.role) for tensor in tensors}
    named: dict[Part, Iterable[str]] = {"backbone": recipe.backbone}
    if isinstance(recipe.mtp_policy, dict):
        named["mtp"] = recipe.mtp_policy
    for part, groups in named.items():
        for group in groups:
            if (part, group) not in have:
                raise RecipeError(
                    recipe.name,
                    f"{part} group {group} must match a module of the model",
                    got="no match",
                    cure=f"Remove {group} from {part}",
                )


def refuse_disagreeing_fusions(recipe: Recipe, tensors: Iterable[TensorPlan]) -> None:
    """Modules that vLLM fuses must have one scheme."""
    first: dict[VLLMName, TensorPlan] = {}
    for tensor in tensors:
        if len(tensor.shape) < 2 or tensor.fate == "drop":
            continue
        other = first.setdefault(tensor.runtime, tensor)
        if other.scheme != tensor.scheme:
            raise RecipeError(
                recipe.name,
                f"vLLM fuses {other.module} and {tensor.module} into {tensor.runtime}, so they "
                "need one scheme",
                got=f"{other.scheme or 'plain'} and {tensor.scheme or 'plain'}",
                cure="Give both the same scheme, or `bf16`",
            )


def refuse_wordless(recipe: Recipe, tensors: Iterable[TensorPlan]) -> None:
    """Refuse what vLLM's modelopt loader has no word for: schemes, and scales a row for routed
    experts.
    """
    for tensor in tensors:
        is_known = tensor.scheme in ALGORITHMS and not (
            tensor.role == "experts" and tensor.scheme in NOT_FOR_EXPERTS
        )
        if tensor.scheme and not is_known:
            of_experts = " of routed experts" if tensor.scheme in ALGORITHMS else ""
            raise RecipeError(
                f"{recipe.name}: {tensor.part} {tensor.role}",
                "vLLM's loader of modelopt checkpoints must have a word for "
                f"{tensor.scheme}{of_experts}",
                got=f"none, for {tensor.name}",
                cure=f"Use {_WORDS_OF[tensor.role == 'experts']}, or format: compressed-tensors",
            )


_WORDS_OF = {
    is_experts: ", ".join(
        word for word in ALGORITHMS if not (is_experts and word in NOT_FOR_EXPERTS)
    )
    for is_experts in (False, True)
}


# --- what batches give ----------------------------------------------------------------------------


def _with_calibration(recipe: Recipe, tensors: list[TensorPlan]) -> list[TensorPlan]:
    """The tensors, each with what batches give it."""
    algorithm = recipe.calibration.algorithm if recipe.calibration else "minmax"
    marked = [_marked(tensor, recipe, algorithm) for tensor in tensors]
    if algorithm not in RESCALING:
        return marked
    rewritten = {
        (t.part, t.layer) for t in marked if t.calibrated == "weights" and t.layer is not None
    }
    return [
        tensor._replace(may_change=True, reason=f"{tensor.reason}; {algorithm} may rescale it")
        if (tensor.part, tensor.layer) in rewritten and _can_be_rescaled(tensor)
        else tensor
        for tensor in marked
    ]


def _marked(tensor: TensorPlan, recipe: Recipe, algorithm: str) -> TensorPlan:
    """A tensor with how its scales are chosen, what batches give it, and whether it is trained.

    Weights of a tuned block are rounded to nearest, whatever the algorithm.
    """
    tuned = recipe.mtp_tuned if tensor.part == "mtp" else None
    reasons, calibrated, is_weighted = [tensor.reason], tensor.calibrated, False
    if tensor.fate == "quantize":
        if recipe.search is not None and tensor.scheme in SEARCHES[recipe.search]:
            reasons.append(f"scales by {recipe.search}")
            is_weighted = recipe.search == "imatrix"
        if tensor.scheme in REWRITES[algorithm] and tuned is None:
            calibrated = "weights"
            reasons.append(f"{algorithm} on calibration data")
        elif SCHEMES[tensor.scheme].needs_calibration:
            calibrated = "scales"
            reasons.append("input scales from calibration data")
        elif is_weighted:
            calibrated = "scales"
    is_trained = (
        tuned is not None
        and tensor.role not in (*_NEVER_TRAINED, *tuned.frozen)
        and _is_weight(tensor)
    )
    if is_trained:
        reasons.append("tuned")
    if len(reasons) == 1:
        return tensor
    reason = "; ".join(reasons)
    return tensor._replace(
        reason=reason, calibrated=calibrated, weighted=is_weighted, tuned=is_trained
    )


def _is_weight(tensor: TensorPlan) -> bool:
    """Whether this is a weight or a bias that is written in floating point or packed anew; no
    buffer, no table.
    """
    if tensor.fate == "keep" and (tensor.form != "plain" or tensor.scheme):
        return False
    is_float = all(output.dtype in ("BF16", "F16", "F32") for output in tensor.outputs)
    named = tensor.name.endswith((".weight", ".bias")) or bool(tensor.stacked)
    return named and (
        tensor.fate == "quantize" or (tensor.fate in ("keep", "dequantize") and is_float)
    )


def _can_be_rescaled(tensor: TensorPlan) -> bool:
    """Whether this run computes the tensor's values anew, or could: its bytes are not those of a
    stored scheme.
    """
    if tensor.calibrated == "weights" or tensor.role == "state":
        return False
    return tensor.fate in ("quantize", "dequantize") or (
        tensor.fate == "keep" and tensor.form == "plain"
    )


# --- orders ---------------------------------------------------------------------------------------


def _as_planned(output: Output) -> Output:
    return output


def filled(
    units: Iterable[Unit], most_bytes: int, on_disk: Callable[[Output], Output] = _as_planned
) -> list[list[Unit]]:
    """The units of each file, in order."""
    groups: list[list[Unit]] = []
    filled = 0
    for unit in units:
        size = sum(on_disk(output).num_bytes for tensor in unit for output in tensor.outputs)
        if not groups or filled + size > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(unit)
        filled += size
    return groups


def _disk_order(output: Output) -> tuple[int, str]:
    """Widest dtypes first, as safetensors writes them: every tensor then starts aligned."""
    return (-num_bytes(output.dtype, (8,)), output.name)


def plan_order(tensor: TensorPlan) -> tuple[bool, int, list[str | int]]:
    """The backbone before the MTP block; in each, layer by layer, and by name with numbers as
    numbers.
    """
    layer = tensor.layer if tensor.layer is not None else -1
    natural: list[str | int] = [*_NUMBERS.split(tensor.name)]
    natural[1::2] = map(int, natural[1::2])  # every second part is a number
    return (tensor.part == "mtp", layer, natural)
