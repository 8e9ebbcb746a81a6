"""What a search under a budget may choose: the units of a model, the words each can have, and what
each word costs; and what it found, as a recipe.

In: a recipe with `backbone: auto`, and a source's headers. Out: `Choices`, or a refusal where no
plan fits the budget; of a word for each unit, a recipe without `auto`: for each module group the
word that most of its bytes have, and overrides for the units with another one, a line for all
layers with the same modules. torch is not needed, and no weight is read.

A unit is what vLLM gives one scheme: the modules that it fuses (q, k and v; gate and up), or all
routed experts of a layer. A word is left out of a unit that it does not suit, by the same rules as
in a plan.

Easy to get wrong: overrides are tried in their order, and the first match wins. Those of the user
come first: what they name was never searched. And a budget in bytes is that of all files. A tensor
has a line in the index and one in the header of its file besides its bytes, and modules of small
experts have hundreds of thousands of these lines.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from operator import attrgetter

from ...checkpoints.safetensors_file import total_bytes
from ...checkpoints.source import Source, view_of
from ...checkpoints.stored import StoredWeight, stored_weights
from ...recipes.errors import RecipeError, counted
from ...recipes.family import INDEX, QUANTIZABLE_ROLES, HFName, Part, Role
from ...recipes.frozen import Json, frozen
from ...recipes.model_file import flat_text, summary_of
from ...recipes.schema import AUTO, BackboneAuto, Override, Recipe, validated
from ...recipes.schemes import REWRITES
from .decide import Decisions, matching_limit
from .plan import Plan, make_plan, refuse_unservable, with_separate_mtp
from .tensor_plan import TensorPlan

# Of a tensor's two lines, in the index and in the header of its file, besides its name.
_BYTES_OF_LINES = 150
# Of config.json, which names modules that stay plain.
_BYTES_OF_A_MODULE = 120
# Of record, recipe, and the headers of files.
_BYTES_OF_SMALL_FILES = 100_000

SWEEP_TOKENS = 2_048
"""Tokens of a batch that a search sends forward and back."""
# Of the calibration text, at most one of so many sequences is looked at; but so many at least.
_SHARE = 8
_FEWEST = 4

Assignment = Mapping[str, str]
"""Unit -> word."""


@frozen
class Option:
    """One word for a unit."""

    # The word as a recipe has it.
    word: str
    # Bytes of its tensors on disk, with their lines in headers and index; a little more than these
    # take.
    num_bytes: int
    # What the plan says of each of its weights then.
    tensors: tuple[TensorPlan, ...]


@frozen
class ChoiceUnit:
    """Modules that vLLM gives one scheme."""

    # Its name in vLLM, with its part before it.
    name: str
    part: Part
    role: Role
    layer: int | None
    # Elements of all of its matrices.
    num_weights: int
    # At least one; words that do the same are there once.
    options: tuple[Option, ...]

    def option(self, word: str) -> Option:
        """The option of a word; where the word is left out, the one with the most bytes."""
        for option in self.options:
            if option.word == word:
                return option
        return max(self.options, key=attrgetter("num_bytes"))


@dataclass(frozen=True)
class Choices:
    """Everything that a search may choose from."""

    # The recipe, with `auto` for groups that the model has.
    recipe: Recipe
    # The plan with BF16 for every unit.
    base: Plan
    # All units, in the order of the plan.
    units: tuple[ChoiceUnit, ...]
    # Bytes of all that no choice changes.
    fixed_bytes: int

    @cached_property
    def smallest(self) -> dict[str, str]:
        """The words that cost least."""
        words = dict[str, str]()
        for unit in self.units:
            words[unit.name] = min(unit.options, key=attrgetter("num_bytes")).word
        return words

    def _chosen(self, assignment: Assignment) -> list[Option]:
        return [unit.option(assignment[unit.name]) for unit in self.units]

    def fits(self, assignment: Assignment) -> bool:
        """Whether these words keep to the budget."""
        return self.num_bytes(assignment) <= self.recipe.size_limit

    def num_bytes(self, assignment: Assignment) -> int:
        """Bytes of all files of the checkpoint with these words; a little more than they are."""
        return self.fixed_bytes + total_bytes(self._chosen(assignment))

    def uniform(self, word: str) -> dict[str, str]:
        """One word for all units that it suits; the others have their largest option."""
        return {unit.name: unit.option(word).word for unit in self.units}

    def plan(self, assignment: Assignment) -> Plan:
        """The plan with these words, as far as weights go: for pricing, not for writing."""
        chosen = dict[HFName, TensorPlan]()
        for option in self._chosen(assignment):
            for tensor in option.tensors:
                chosen[tensor.name] = tensor
        tensors = tuple(chosen.get(tensor.name, tensor) for tensor in self.base.tensors)
        return replace(self.base, tensors=tensors)


def auto_of(recipe: Recipe) -> BackboneAuto:
    """What a recipe with `backbone: auto` leaves to the search."""
    assert recipe.backbone_auto is not None
    return recipe.backbone_auto


def choices_of(recipe: Recipe, source: Source) -> Choices:
    """The units of a model, and what each can become.

    Args:
        recipe: with groups that are `auto`.
        source: the released checkpoint's headers.

    Raises:
        RecipeError: the recipe does not fit the model, or no candidate suits a unit.
        CheckpointError: see `make_plan`.
    """
    recipe = narrowed(recipe, source)
    base = make_plan(recipe.before_measuring, source)
    weights, _ = stored_weights(with_separate_mtp(source, base.view).values())
    words = dict[str, Decisions]()
    for word in auto_of(recipe).candidates:
        words[word] = Decisions(recipe.with_words(word), source, base.view, base.origins)
    members: dict[str, list[TensorPlan]] = defaultdict(list)
    fixed = base.num_bytes_beside + _BYTES_OF_SMALL_FILES
    with matching_limit():
        for tensor in base.tensors:
            if len(tensor.shape) > 1:
                fixed += _BYTES_OF_A_MODULE
            if _is_searched(tensor, recipe, words):
                members[f"{tensor.part}:{tensor.runtime}"].append(tensor)
            else:
                fixed += _num_bytes(tensor, base)
        units = list[ChoiceUnit]()
        for name, tensors in members.items():
            units.append(_unit(name, tensors, words, weights, base))
    return Choices(recipe, base, tuple(units), fixed)


def refuse_budget(choices: Choices) -> None:
    """Refuse a budget that no plan fits, before anything is downloaded.

    Raises:
        RecipeError: it says the smallest that does, and what each candidate alone takes.
    """
    if choices.fits(choices.smallest):
        return
    words = auto_of(choices.recipe).candidates
    alone = [f"{word} {choices.num_bytes(choices.uniform(word)):,}" for word in words]
    size = choices.num_bytes(choices.smallest)
    raise RecipeError(
        choices.recipe.name,
        f"budget must leave room for the smallest plan, {size:,} bytes",
        got=f"{choices.recipe.budget}; bytes with one word for all units are {', '.join(alone)}",
        cure="Raise budget, or add a smaller candidate to backbone_auto",
    )


def rows_looked_at(recipe: Recipe) -> int:
    """Sequences of the calibration text on which sensitivities are measured."""
    calibration = recipe.calibration
    assert calibration is not None
    most = max(_FEWEST, calibration.samples // _SHARE)
    wanted = ceil(auto_of(recipe).tokens / calibration.sequence_length)
    return min(calibration.samples, max(_FEWEST, min(wanted, most)))


def narrowed(recipe: Recipe, source: Source) -> Recipe:
    """Without the groups that the model lacks, where `backbone: auto` means `auto` for every group
    there may be.
    """
    everything = dict.fromkeys(QUANTIZABLE_ROLES, AUTO)
    if not everything.items() <= recipe.backbone.items():
        return recipe
    backbone = dict(recipe.backbone)
    for group in everything.keys() - view_of(source).groups["backbone"]:
        backbone.pop(group)
    return recipe.model_copy(update={"backbone": backbone})


def _is_searched(tensor: TensorPlan, recipe: Recipe, words: Mapping[str, Decisions]) -> bool:
    """Whether the search chooses the word of this weight: the recipe's own overrides come first."""
    word = recipe.backbone.get(tensor.role)
    if tensor.part == "mtp":
        word = recipe.mtp
    if word != AUTO or len(tensor.shape) < 2 or tensor.slices:
        return False
    if tensor.place.row.why_kept:
        return False
    if tensor.fate not in ("keep", "dequantize"):
        return False
    return next(iter(words.values())).override(tensor.module) is None


def _unit(
    name: str,
    tensors: Sequence[TensorPlan],
    words: Mapping[str, Decisions],
    weights: Mapping[HFName, StoredWeight],
    base: Plan,
) -> ChoiceUnit:
    """A unit with the words that suit all of its tensors."""
    first = tensors[0]
    options = dict[tuple[TensorPlan, ...], Option]()
    causes = list[RecipeError]()
    for word, decisions in words.items():
        planned = list[TensorPlan]()
        try:
            for tensor in tensors:
                weight = weights.get(tensor.module)
                if weight is not None:
                    planned.append(decisions.weight(weight))
                else:  # a stack of experts, which has no `.weight`
                    planned.append(decisions.other(base.entries[tensor.inputs[0]]))
            refuse_unservable(decisions.recipe, planned)
        except RecipeError as error:
            causes.append(error)
            continue
        made = tuple(planned)
        if made not in options:
            options[made] = Option(
                word=word,
                num_bytes=sum(_num_bytes(tensor, base) for tensor in made),
                tensors=made,
            )
    if not options:
        cause = causes[0]
        raise RecipeError(
            cause.where,
            f"a candidate must suit {first.module}, where {cause.rule}",
            got=cause.got,
            cure="Add bf16 to backbone_auto.candidates, or override these modules",
        )
    return ChoiceUnit(
        name=name,
        part=first.part,
        role=first.role,
        layer=first.layer,
        num_weights=sum(prod(tensor.shape) for tensor in tensors),
        options=tuple(options.values()),
    )


def _num_bytes(tensor: TensorPlan, plan: Plan) -> int:
    total = plan.num_bytes_of(tensor) + len(tensor.outputs) * _BYTES_OF_LINES
    for output in tensor.outputs:
        total += 2 * len(output.name)
    return total


# --- what was found, as a recipe that a person can read and run again -----------------------------

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_PLACE = "{}"


def found_recipe(choices: Choices, assignment: Assignment) -> Recipe:
    """The recipe of an assignment. Its calibration block is that of the search, needed or not."""
    recipe = choices.recipe
    weights: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for unit in choices.units:
        weights[unit.part, unit.role][assignment[unit.name]] += unit.num_weights
    words = dict[tuple[str, str], str]()
    of_block = dict[str, str]()
    for (part, group), counts in weights.items():
        words[part, group] = counts.most_common(1)[0][0]
        if part == "mtp":
            of_block[group] = words[part, group]
    backbone = dict(recipe.backbone)
    for group, word in recipe.backbone.items():
        if word == AUTO:
            backbone[group] = words.get(("backbone", group), "bf16")
    changed: Json = {"backbone": backbone, "budget": None, "backbone_auto": None}
    if recipe.mtp == AUTO:
        changed["mtp"] = of_block or "bf16"
        if len({*of_block.values()}) == 1:  # one word for all of it
            (changed["mtp"],) = {*of_block.values()}
    overrides = (*recipe.overrides, *_overrides(choices, assignment, words))
    made = recipe.model_copy(update=changed | {"overrides": overrides})
    summary = summary_of(made.backbone, made.mtp, is_calibrated=True)
    summary += f", and {counted(len(overrides), 'override')}: found for {recipe.budget}"
    return made.model_copy(update={"summary": summary})


def _overrides(
    choices: Choices, assignment: Assignment, words: Mapping[tuple[str, str], str]
) -> Iterator[Override]:
    """One for all layers whose modules differ in the number of the layer alone."""
    layers: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for unit in choices.units:
        word = assignment[unit.name]
        tensors = unit.options[0].tensors
        templates = set[str]()
        if word == words[unit.part, unit.role]:
            continue
        number = _NUMBER.search(tensors[0].module)
        assert number is not None, "a unit is in a layer"
        for tensor in tensors:
            # One place for the layer's number; any number for an expert.
            first, *others = [re.escape(part) for part in _NUMBER.split(tensor.module)]
            templates.add(first + _PLACE + INDEX.join(others))
        layers[word, tuple(sorted(templates))].append(int(number[0]))
    for (word, templates), numbers in sorted(layers.items()):
        any_layer = "|".join(str(number) for number in sorted(numbers))
        pattern = "|".join(templates).replace(_PLACE, f"(?:{any_layer})")
        yield Override(modules=f"re:(?:{pattern})", scheme=word)


def found_plan(searched: Plan, choices: Choices, assignment: Assignment) -> Plan:
    """The plan of that recipe, which is the assignment, unit by unit."""
    plan = searched.again(found_recipe(choices, assignment))
    schemes = {tensor.name: (tensor.fate, tensor.scheme) for tensor in plan.tensors}
    for unit in choices.units:
        for tensor in unit.option(assignment[unit.name]).tensors:
            planned = schemes[tensor.name]
            assert planned == (tensor.fate, tensor.scheme), f"{tensor.module}: {planned}"
    return plan


def found_text(recipe: Recipe) -> str:
    """The recipe as a file. A calibration block that nothing needs any more is left out, for it
    would be refused.
    """
    calibration = recipe.calibration
    raw = recipe.model_dump(mode="json", exclude_defaults=True)
    if calibration is None:
        return flat_text(raw)
    is_rewriting = REWRITES[calibration.algorithm] & recipe.decisions()
    if calibration.algorithm != "minmax" and not is_rewriting:
        calibration = calibration.model_copy(update={"algorithm": "minmax"})
    raw["calibration"] = None
    if recipe.uses_batches():
        raw["calibration"] = calibration.model_dump(mode="json", exclude_defaults=True)
    validated(raw, "the recipe that was found")
    return flat_text(raw)
