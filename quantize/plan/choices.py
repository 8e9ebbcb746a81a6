"""What a search under a budget may choose: the units of a model, the words each can have, and what
each word costs.

In: a recipe with `backbone: auto`, and a source's headers. Out: `Choices`, or a refusal where no
plan fits the budget. torch is not needed, and no weight is read.

A unit is what vLLM gives one scheme: the modules that it fuses (q, k and v; gate and up), or all
routed experts of a layer. A word is left out of a unit that it does not suit, by the same rules as
in a plan.

Easy to get wrong: a budget in bytes is that of all files. A tensor has a line in the index and one
in the header of its file besides its bytes, and modules of small experts have hundreds of thousands
of these lines.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod

from ...checkpoints.source import Source
from ...checkpoints.stored import stored_weights
from ...recipes.errors import RecipeError
from ...recipes.families import find_family
from ...recipes.family import QUANTIZABLE_ROLES, HFName, Part, Role
from ...recipes.family_view import FamilyView
from ...recipes.schema import AUTO, Recipe
from .decide import Given, Patterns, decide_other, decide_weight, matching_limit
from .plan import (
    SHARD_BYTES,
    Plan,
    make_plan,
    refuse_calibration,
    refuse_wordless,
    with_separate_mtp,
)
from .tensor_plan import TensorPlan

# Of a tensor's two lines, in the index and in the header of its file, besides its name.
_BYTES_OF_LINES = 150
# Of config.json (which names modules that stay plain), record, recipe and the alignment of headers.
_BYTES_OF_A_MODULE, _BYTES_OF_SMALL_FILES = 120, 40_000

SWEEP_TOKENS = 2_048
"""Tokens of a batch that a search sends forward and back."""
_SHARE, _FEWEST = (
    8,
    4,
)  # of the calibration text, at most one of so many sequences is looked at, but so many at least

Assignment = Mapping[str, str]
"""Unit -> word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One word for a unit.

    Attributes:
        word: as a recipe has it.
        num_bytes: of its tensors on disk.
        line_bytes: of their lines in headers and index; a little more than they take.
        tensors: what the plan says of each of its weights then.
    """

    word: str
    num_bytes: int
    line_bytes: int
    tensors: tuple[TensorPlan, ...]

    @property
    def rounds(self) -> bool:
        """Whether this run rounds its weights."""
        return any(tensor.fate == "quantize" for tensor in self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceUnit:
    """Modules that vLLM gives one scheme.

    Attributes:
        name: in vLLM, with its part before it.
        num_weights: elements of its matrices.
        options: at least one; words that do the same are there once.
    """

    name: str
    part: Part
    role: Role
    layer: int | None
    num_weights: int
    options: tuple[Option, ...]

    def option(self, word: str) -> Option:
        """The option of a word; where the word is left out, one that does the same or the
        largest.
        """
        return next((each for each in self.options if each.word == word), self.largest)

    @property
    def largest(self) -> Option:
        """The option with the most bytes."""
        return max(self.options, key=lambda option: option.num_bytes)


@dataclass(frozen=True)
class Choices:
    """Everything that a search may choose from.

    Attributes:
        recipe: with `auto` for groups that the model has.
        base: the plan with BF16 for every unit.
        units: in the order of the plan.
        fixed_bytes: of all that no choice changes.
    """

    recipe: Recipe
    base: Plan
    units: tuple[ChoiceUnit, ...]
    fixed_bytes: int

    @cached_property
    def num_weights(self) -> int:
        """Of all units."""
        return sum(unit.num_weights for unit in self.units)

    @cached_property
    def room(self) -> int:
        """What the units may cost in all, see `cost`."""
        limit = self.recipe.size_limit
        if limit.bits is not None:
            return int(limit.bits * self.num_weights / 8)
        assert limit.num_bytes is not None
        return limit.num_bytes - self.fixed_bytes

    def cost(self, option: Option) -> int:
        """What an option takes of the budget: under bits its tensors, under bytes their lines in
        files too.
        """
        return option.num_bytes + (
            0 if self.recipe.size_limit.bits is not None else option.line_bytes
        )

    @cached_property
    def smallest(self) -> dict[str, str]:
        """The words that cost least."""
        return {unit.name: min(unit.options, key=self.cost).word for unit in self.units}

    @cached_property
    def largest(self) -> dict[str, str]:
        """The words that cost most."""
        return {unit.name: max(unit.options, key=self.cost).word for unit in self.units}

    def fits(self, assignment: Assignment) -> bool:
        """Whether these words keep to the budget."""
        return sum(map(self.cost, self._options(assignment))) <= self.room

    def num_bytes(self, assignment: Assignment) -> int:
        """Bytes of all files of the checkpoint with these words; a little more than they are."""
        return self.fixed_bytes + sum(
            each.num_bytes + each.line_bytes for each in self._options(assignment)
        )

    def bits(self, assignment: Assignment) -> float:
        """Bits of weights and scales for each weight of the units."""
        return (
            8 * sum(each.num_bytes for each in self._options(assignment)) / max(1, self.num_weights)
        )

    def _options(self, assignment: Assignment) -> list[Option]:
        return [unit.option(assignment[unit.name]) for unit in self.units]

    def uniform(self, word: str) -> dict[str, str]:
        """One word for all units that it suits; the others have their largest option."""
        return {unit.name: unit.option(word).word for unit in self.units}

    def plan(self, assignment: Assignment) -> Plan:
        """The plan with these words, as far as weights go: for measuring, not for writing."""
        chosen = {
            tensor.name: tensor
            for unit in self.units
            for tensor in unit.option(assignment[unit.name]).tensors
        }
        return replace(
            self.base,
            tensors=tuple(chosen.get(tensor.name, tensor) for tensor in self.base.tensors),
        )


def choices_of(recipe: Recipe, source: Source, *, trust_remote_code: bool = False) -> Choices:
    """The units of a model, and what each can become.

    Args:
        recipe: with groups that are `auto`.
        source: the released checkpoint's headers.
        trust_remote_code: see `Plan`.

    Raises:
        RecipeError: the recipe does not fit the model, or no candidate suits a unit.
        CheckpointError: see `make_plan`.
    """
    recipe = narrowed(recipe, source)
    base = make_plan(recipe.before_measuring, source, trust_remote_code=trust_remote_code)
    searched = _searched(recipe, base)
    assert recipe.backbone_auto is not None
    decided: dict[str, dict[HFName, TensorPlan | RecipeError]] = {
        word: dict(_decided(recipe.with_words(word), base, searched))
        for word in recipe.backbone_auto.candidates
    }
    members: dict[str, list[TensorPlan]] = defaultdict(list)
    for tensor in searched.values():
        members[f"{tensor.part}:{tensor.runtime}"].append(tensor)
    units = tuple(_unit(name, tensors, decided, base) for name, tensors in members.items())
    fixed = sum(
        sum(_bytes_of(base, tensor)) for tensor in base.tensors if tensor.name not in searched
    )
    return Choices(recipe, base, units, fixed + _bytes_of_files(base))


def refuse_budget(choices: Choices) -> None:
    """Refuse a budget that no plan fits, before anything is downloaded.

    Raises:
        RecipeError: it says the smallest that does, and what each candidate alone takes.
    """
    if choices.fits(choices.smallest):
        return
    assert choices.recipe.backbone_auto is not None
    words = choices.recipe.backbone_auto.candidates
    alone = [f"{word} {choices.num_bytes(choices.uniform(word)):,}" for word in words]
    size, bits = choices.num_bytes(choices.smallest), choices.bits(choices.smallest)
    raise RecipeError(
        choices.recipe.name,
        f"budget must leave room for the smallest plan, {size:,} bytes ({bits:.2f} bits)",
        got=f"{choices.recipe.budget}; bytes with one word for all units are {', '.join(alone)}",
        cure="Raise budget, or add a smaller candidate to backbone_auto",
    )


def rows_looked_at(recipe: Recipe) -> int:
    """Sequences of the calibration text on which sensitivities are measured, and of held-out text
    for each plan.
    """
    calibration, auto = recipe.calibration, recipe.backbone_auto
    assert calibration is not None and auto is not None
    most = max(_FEWEST, calibration.samples // _SHARE)
    wanted = ceil(auto.tokens / calibration.sequence_length)
    return min(calibration.samples, max(_FEWEST, min(wanted, most)))


# --- units
# --------------------------------------------------------------------------------------------------


def narrowed(recipe: Recipe, source: Source) -> Recipe:
    """Without the groups that the model lacks, where `backbone: auto` means `auto` for every group
    there may be.
    """
    if {group for group, word in recipe.backbone.items() if word == AUTO} != {*QUANTIZABLE_ROLES}:
        return recipe
    view = FamilyView(
        family=find_family(source.config, source.where, source.entries), config=source.config
    )
    places = filter(None, map(view.place, source.entries))
    have = {place.role for place in places if place.part == "backbone"}
    return recipe.model_copy(
        update={"backbone": {group: AUTO for group in recipe.backbone if group in have}}
    )


def _searched(recipe: Recipe, base: Plan) -> dict[HFName, TensorPlan]:
    """The weights whose word the search chooses."""
    patterns, found = Patterns(recipe), {}
    groups = {group for group, word in recipe.backbone.items() if word == AUTO}
    with matching_limit():
        for tensor in base.tensors:
            place = tensor.place
            is_auto = recipe.mtp == AUTO if tensor.part == "mtp" else tensor.role in groups
            if place.row.why_kept or not is_auto or len(tensor.shape) < 2 or not tensor.outputs:
                continue
            if (
                tensor.fate in ("keep", "dequantize")
                and patterns.override(place.module) is None
                and not tensor.slices
            ):
                found[tensor.name] = tensor
    return found


def _decided(
    recipe: Recipe, base: Plan, searched: Mapping[HFName, TensorPlan]
) -> Iterator[tuple[HFName, TensorPlan | RecipeError]]:
    """What becomes of each weight under one recipe, or why it cannot."""
    given = Given(recipe=recipe, source=base.source, view=base.view, patterns=Patterns(recipe))
    weights, others = stored_weights(with_separate_mtp(base.source, base.view).values())
    by_name = {HFName(f"{weight.module}.weight"): weight for weight in weights.values()}
    by_other = {entry.name: entry for entry in others}
    with matching_limit():
        for name, tensor in searched.items():
            try:
                made = (
                    decide_weight(by_name[name], given)
                    if name in by_name
                    else decide_other(by_other[tensor.inputs[0]], given)
                )
                alone = replace(base, recipe=recipe, tensors=(made,))
                refuse_calibration(alone)
                if recipe.format == "modelopt":
                    refuse_wordless(recipe, alone.tensors)
                yield name, made
            except RecipeError as error:
                yield name, error


def _unit(
    name: str,
    tensors: Sequence[TensorPlan],
    decided: Mapping[str, Mapping[HFName, TensorPlan | RecipeError]],
    base: Plan,
) -> ChoiceUnit:
    options: list[Option] = []
    refusals: list[RecipeError] = []
    for word, found in decided.items():
        made = [found[tensor.name] for tensor in tensors]
        refusals += [each for each in made if isinstance(each, RecipeError)]
        plans = tuple(each for each in made if isinstance(each, TensorPlan))
        is_another = all(plans != option.tensors for option in options)
        if len(plans) == len(made) and len({plan.scheme for plan in plans}) == 1 and is_another:
            sizes = [_bytes_of(base, plan) for plan in plans]
            size, lines = (sum(each) for each in zip(*sizes, strict=True))
            options.append(Option(word=word, num_bytes=size, line_bytes=lines, tensors=plans))
    if not options:
        first = refusals[0]
        cure = "Add bf16 to backbone_auto.candidates, or override these modules"
        rule = f"a candidate must suit {tensors[0].module}, where {first.rule}"
        raise RecipeError(first.where, rule, got=first.got, cure=cure)
    first = tensors[0]
    return ChoiceUnit(
        name=name,
        part=first.part,
        role=first.role,
        layer=first.layer,
        num_weights=sum(prod(tensor.shape) for tensor in tensors),
        options=tuple(options),
    )


# --- bytes
# --------------------------------------------------------------------------------------------------


def _bytes_of(base: Plan, tensor: TensorPlan) -> tuple[int, int]:
    """Of a tensor's outputs, and of their lines."""
    alone = replace(base, tensors=(tensor,))
    outputs = [alone.on_disk(output) for output in tensor.outputs]
    lines = sum(2 * len(output.name) + _BYTES_OF_LINES for output in outputs)
    return sum(output.num_bytes for output in outputs), lines


def _bytes_of_files(base: Plan) -> int:
    """Of config.json, tokenizer and other files; at most so many."""
    states = base.source.states
    others = sum(
        states[name].num_bytes for name in (*base.companions, "config.json") if name in states
    )
    num_files = 1 + base.num_bytes_before // SHARD_BYTES
    modules = sum(len(tensor.shape) > 1 for tensor in base.tensors)
    return others + modules * _BYTES_OF_A_MODULE + num_files * 64 + _BYTES_OF_SMALL_FILES
