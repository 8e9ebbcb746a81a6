"""One fate for each tensor: what the recipe says of it, and whether it can be done.

In: a weight or another tensor of the source, and `Given` (recipe, source, family, patterns). Out:
its `TensorPlan`, or a refusal that names the tensor.

Easy to get wrong: "the source's form" has two meanings. A weight whose bytes are already those of
the scheme is kept, whatever the recipe calls the scheme. The word `source` keeps a stored form only
where the runtime loads this module quantized and knows the names of its scales; elsewhere the
weight becomes BF16.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ...checkpoints.source import Entry, Source
from ...checkpoints.stored import NOT_COMPUTED, OTHER_LEAVES, StoredWeight
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.family import HFName
from ...recipes.family_view import FamilyView, Place, unknown_place
from ...recipes.match_clock import SIMPLER, MatchClock
from ...recipes.schema import TUNED, Recipe
from ...recipes.schemes import SCHEMES, Scheme
from .tensor_plan import (
    Fate,
    Output,
    TensorPlan,
    packed_outputs,
    renamed_outputs,
    same_output,
    separated_outputs,
)

FP8_TABLE = "F8_E4M3"
_FP8_ROWS = "FP8 rows with one scale, which vLLM looks up as they are"
# Buffers that old checkpoints carry and every model class computes itself.
_RECOMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


def _hangs(pattern: str, got: str) -> RecipeError:
    return RecipeError("recipe", f"{pattern} must be matched in a moment", got=got, cure=SIMPLER)


_clock = MatchClock(_hangs)
matching_limit = _clock.limit


class Patterns:
    """State: a recipe's overrides and keeps, and which of them have matched a name."""

    def __init__(self, recipe: Recipe):
        self._compiled = {
            pattern: re.compile(pattern[3:] if pattern.startswith("re:") else re.escape(pattern))
            for pattern in (*(override.modules for override in recipe.overrides), *recipe.keep)
        }
        self._overrides = tuple(
            (override.modules, override.scheme) for override in recipe.overrides
        )
        self._keep = recipe.keep
        self._matched: set[str] = set()

    def override(self, module: HFName) -> str | None:
        """The scheme of the first override that names this module."""
        for pattern, scheme in self._overrides:
            if _clock.timed(self._compiled[pattern].fullmatch, pattern, module):
                self._matched.add(pattern)
                return scheme
        return None

    def keeps(self, name: HFName) -> bool:
        """Whether the recipe's `keep` names this tensor."""
        hits = [
            each for each in self._keep if _clock.timed(self._compiled[each].fullmatch, each, name)
        ]
        self._matched.update(hits)
        return bool(hits)

    def unmatched(self) -> list[str]:
        """The patterns that have matched no name so far."""
        return [pattern for pattern in self._compiled if pattern not in self._matched]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What every decision reads."""

    recipe: Recipe
    source: Source
    view: FamilyView
    patterns: Patterns


def decide_weight(weight: StoredWeight, given: Given) -> TensorPlan:
    """The fate of a weight and its scales.

    Raises:
        RecipeError: the recipe has no word for the module, or a scheme that the module cannot take.
        CheckpointError: the family does not know the tensor, or its stored form cannot be read.
    """
    name = HFName(f"{weight.module}.weight")
    if given.patterns.keeps(name):
        return _kept(name, tuple(weight.parts.values()), weight.shape, given)
    place = _place(name, given)
    if place.leaf != "weight":  # a parameter whose own name ends in .weight
        return decide_other(weight.weight, given)
    word, reason = _word(place, given)
    if place.row.table_scale and weight.weight.dtype == FP8_TABLE:
        _refuse_missing_scale(weight, place, given.source)
        return _tensor(weight, place, "keep", "", _FP8_ROWS, (same_output(weight.weight),))
    _refuse_unreadable(weight, name, place, given.source)
    if place.row.interleaved:
        return _separated(weight, name, place, reason, given)
    if word in SCHEMES:
        return _to_scheme(weight, name, place, SCHEMES[word], reason, given)
    if weight.form == "plain":
        return _tensor(weight, place, "keep", "", reason, (same_output(weight.weight),))
    if word == "source" and _can_stay_quantized(weight, place, given.view):
        outputs = renamed_outputs(weight, weight.scheme)
        return _tensor(
            weight, place, "keep", weight.scheme, "as in the source, scales renamed", outputs
        )
    if word == "source" and not place.row.why_kept:
        raise RecipeError(
            _group(place, given.recipe),
            "`source` needs a form that compressed-tensors can say",
            got=f"{weight.form} in {name}",
            cure="Use bf16 or a scheme",
        )
    return _tensor(weight, place, "dequantize", "", reason, (Output(name, "BF16", weight.shape),))


def _refuse_missing_scale(weight: StoredWeight, place: Place, source: Source) -> None:
    """A part of a table in FP8 has one scale with all other parts."""
    scale = HFName(place.module.removesuffix(place.row.path) + place.row.table_scale)
    if scale not in source.entries:
        raise CheckpointError(
            f"{source.where}: {weight.weight.name}",
            f"a table in FP8 must have its scale {scale}",
            got="no such tensor",
            cure="Check the download",
        )


def decide_other(entry: Entry, given: Given) -> TensorPlan:
    """The fate of a tensor that is no matrix: a bias, a parameter without a module, a buffer that
    is recomputed.

    Raises:
        CheckpointError: the family does not know the tensor, or it is a scale without its weight.
    """
    if given.patterns.keeps(entry.name):
        return _kept(entry.name, (entry,), entry.shape, given)
    if _RECOMPUTED.search(entry.name):
        place = unknown_place(entry.name)
        return _placed(
            place,
            entry.name,
            (entry.name,),
            "drop",
            "every model class computes it",
            entry.shape,
            (),
        )
    place = _place(entry.name, given)
    if (
        place.row.stacked and place.leaf == ""
    ):  # a 3-D expert parameter is a weight whose name has no `.weight`
        weight = StoredWeight(
            module=entry.name, form="plain", parts={"weight": entry}, shape=entry.shape
        )
        return decide_weight(weight, given)
    if not place.row.stacked and (
        place.leaf in ("weight", *OTHER_LEAVES) or place.role == "vision"
    ):
        reason = place.row.why_kept or "a bias, not a matrix"
        return _placed(
            place, entry.name, (entry.name,), "keep", reason, entry.shape, (same_output(entry),)
        )
    raise CheckpointError(
        f"{given.source.where}: {entry.name}",
        f"{place.leaf!r} must belong to a weight of {place.module}",
        got="no such weight",
        cure="Check the download, or add the name to `keep` of the recipe",
    )


def added_aliases(view: FamilyView, entries: Mapping[HFName, Entry]) -> list[TensorPlan]:
    """Copies that the MTP block needs under its own names, where the source has the origin but not
    the copy.
    """
    plans = []
    for index in range(view.num_mtp_layers):
        for alias in view.family.aliases:
            name, origin = (
                HFName(view.mtp_stem(index) + alias.path),
                entries.get(HFName(alias.source)),
            )
            if name in entries or origin is None:
                continue
            place = view.place(name)
            assert place is not None, f"alias {name} has no row in family {view.family.model_type}"
            output = Output(name, origin.dtype, origin.shape)
            plans.append(
                _placed(place, name, (origin.name,), "add", alias.reason, origin.shape, (output,))
            )
    return plans


# --- what the recipe says
# ---------------------------------------------------------------------------------------------


def _place(name: HFName, given: Given) -> Place:
    place = given.view.place(name)
    if place is None:
        family = given.view.family.model_type
        raise CheckpointError(
            given.source.where,
            f"every tensor must be known to family {family}",
            got=name,
            cure=f"Add it to recipes/families/{family}.yaml, or to `keep` of the recipe",
        )
    return place


def _word(place: Place, given: Given) -> tuple[str, str]:
    """The recipe's word for a module, and the reason to show."""
    recipe, override = given.recipe, given.patterns.override(place.module)
    if place.row.why_kept:
        if override in SCHEMES:
            raise RecipeError(
                recipe.name,
                f"{place.module} is never quantized ({place.row.why_kept})",
                got=override,
                cure="Remove the override",
            )
        passes = place.part == "mtp" and recipe.mtp_policy == "source"
        return ("source" if passes else "bf16"), place.row.why_kept
    if override is not None:
        return override, "override of the recipe"
    if place.part == "backbone":
        word = recipe.backbone.get(place.role)
    elif isinstance(recipe.mtp_policy, str):
        word = recipe.mtp_policy
    else:
        word = recipe.mtp_policy.get(place.role)
    if word is None:
        raise RecipeError(
            recipe.name,
            f"{place.part} must say what happens to {place.role}",
            got=f"nothing, but the model has {place.module}",
            cure=f"Add `{place.role}: source` or a scheme",
        )
    return word, f"recipe: {place.part} {place.role}"


def _group(place: Place, recipe: Recipe) -> str:
    """How a refusal names a module group of the recipe."""
    return f"{recipe.name}: {place.part} {place.role}"


# --- what can be done
# -------------------------------------------------------------------------------------------------


def _to_scheme(
    weight: StoredWeight, name: HFName, place: Place, scheme: Scheme, reason: str, given: Given
) -> TensorPlan:
    is_tuned = place.part == "mtp" and given.recipe.mtp == TUNED
    if _same_bytes(weight.scheme, scheme.name) and not is_tuned:
        outputs = renamed_outputs(weight, scheme.name)
        return _tensor(
            weight, place, "keep", scheme.name, f"the source stores {scheme.name} already", outputs
        )
    where = _group(place, given.recipe)
    _refuse_shape(where, name, weight, place, scheme)
    _refuse_width(where, name, weight, place, scheme, given.view)
    return _tensor(
        weight,
        place,
        "quantize",
        scheme.name,
        reason,
        packed_outputs(place, scheme.name, weight.shape),
    )


def _separated(
    weight: StoredWeight, name: HFName, place: Place, reason: str, given: Given
) -> TensorPlan:
    """q, k and v in three matrices, each with its rows in order: vLLM takes those at any number of
    ranks.
    """
    count, *slices = given.view.slices(place)
    if len(weight.shape) != 2 or weight.shape[0] != count * sum(slices):
        raise CheckpointError(
            f"{given.source.where}: {name}",
            f"its rows must be {count} slices of {' + '.join(map(str, slices))} rows of q, k and "
            "v, by config.json",
            got=f"shape {list(weight.shape)}",
            cure="Take config.json from the original release",
        )
    outputs = separated_outputs(weight, place, tuple(slices))
    return _tensor(weight, place, "dequantize", "", reason, outputs)._replace(slices=tuple(slices))


@cache
def _same_bytes(stored: str, wanted: str) -> bool:
    """Whether a weight in one scheme has the bytes that another would write; names and dtypes of
    scales may differ.
    """
    if not stored:
        return False
    suffixes = [
        {spec.suffix for spec in SCHEMES[scheme].tensors(128, 128)} for scheme in (wanted, stored)
    ]
    return SCHEMES[stored].weights == SCHEMES[wanted].weights and suffixes[0] <= suffixes[1]


def _can_stay_quantized(weight: StoredWeight, place: Place, view: FamilyView) -> bool:
    """Whether the runtime loads this module quantized, and its loader knows the names of the
    scales.
    """
    if not weight.scheme or not place.row.loads_quantized:
        return False
    known = view.family.loader.mtp_leaves
    if place.part == "backbone" or not known:
        return True
    outputs = renamed_outputs(weight, weight.scheme)
    return all(output.name.rpartition(".")[2] in known for output in outputs)


def _refuse_unreadable(weight: StoredWeight, name: HFName, place: Place, source: Source) -> None:
    is_foreign_integer = weight.form == "int_packed" and not weight.scheme
    is_sliced = weight.form == "fp8_sliced" and not place.row.interleaved
    if weight.form in (*NOT_COMPUTED, "mxfp8") or is_foreign_integer or is_sliced:
        raise CheckpointError(
            f"{source.where}: {name}",
            "must be plain, FP8, MXFP4, NVFP4, or integers in an order and in groups that a "
            "scheme has",
            got=", ".join(
                f"{leaf} {entry.dtype}{list(entry.shape)}" for leaf, entry in weight.parts.items()
            ),
            cure="Start from the original release",
        )


def _refuse_shape(
    where: str, name: HFName, weight: StoredWeight, place: Place, scheme: Scheme
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
            f"vLLM cannot load one scale a tensor into {place.runtime.rpartition('.')[2]} of "
            "this family",
            got=f"{scheme.name} for {name}",
            cure=f"Set {place.role}: FP8_DYNAMIC, FP8_BLOCK or bf16",
        )


def _refuse_width(
    where: str, name: HFName, weight: StoredWeight, place: Place, scheme: Scheme, view: FamilyView
) -> None:
    rows, columns = weight.shape[-2] // max(1, len(place.row.stacked)), weight.shape[-1]
    if columns % scheme.k_multiple():
        raise RecipeError(
            where,
            f"{scheme.name} needs K divisible by {scheme.k_multiple()}",
            got=f"K={columns} in {name}",
            cure=f"Set {place.role}: bf16, or override this module",
        )
    if rows % scheme.n_multiple():
        raise RecipeError(
            where,
            f"{scheme.name} needs N divisible by {scheme.n_multiple()}: zero points of so many "
            "rows are one word",
            got=f"N={rows} in {name}",
            cure=f"Set {place.role}: W4A16, or override this module",
        )
    # vLLM 0.32.0 (fp8_utils.validate_fp8_block_shape) lets only the last shard of a fused module
    # end in a part block.
    may_be_ragged = place.row.path in view.last_shards and place.role != "experts"
    if scheme.block and rows % scheme.block[0] and not may_be_ragged:
        raise RecipeError(
            where,
            f"{scheme.name} needs N divisible by {scheme.block[0]} where modules are fused",
            got=f"N={rows} in {name}",
            cure=f"Set {place.role}: FP8_DYNAMIC or bf16",
        )


# --- values
# --------------------------------------------------------------------------------------------------


def _tensor(
    weight: StoredWeight,
    place: Place,
    fate: Fate,
    scheme: str,
    reason: str,
    outputs: tuple[Output, ...],
) -> TensorPlan:
    """A weight with its scales."""
    is_shared = fate == "quantize" and SCHEMES[scheme].has_tensor_scale and bool(place.shares)
    name = HFName(f"{place.module}.weight")
    return TensorPlan(
        name=name,
        inputs=weight.names(),
        fate=fate,
        scheme=scheme,
        reason=reason,
        form=weight.form,
        shape=weight.shape,
        outputs=outputs,
        unit=place.shares if is_shared else name,
        place=place,
        block=weight.block,
    )


def _placed(
    place: Place,
    name: HFName,
    inputs: tuple[HFName, ...],
    fate: Fate,
    reason: str,
    shape: tuple[int, ...],
    outputs: tuple[Output, ...],
) -> TensorPlan:
    """A tensor that is no matrix, or a copy of one."""
    return TensorPlan(
        name=name,
        inputs=inputs,
        fate=fate,
        scheme="",
        reason=reason,
        form="plain",
        shape=shape,
        outputs=outputs,
        unit=name,
        place=place,
    )


def _kept(
    name: HFName, entries: tuple[Entry, ...], shape: tuple[int, ...], given: Given
) -> TensorPlan:
    """A tensor that the recipe's `keep` names, which the family's table mostly does not know."""
    place = given.view.place(name) or unknown_place(HFName(name.rpartition(".")[0] or name))
    inputs = tuple(entry.name for entry in entries)
    return _placed(
        place, name, inputs, "keep", "recipe: keep", shape, tuple(map(same_output, entries))
    )
