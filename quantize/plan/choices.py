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

from ...checkpoints.safetensors_file import total_bytes
from ...checkpoints.source import Source, view_of
from ...checkpoints.stored import StoredWeight, stored_weights
from ...recipes.errors import RecipeError
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
# Of config.json (which names modules that stay plain), record, recipe, and the headers of files.
_BYTES_OF_A_MODULE, _BYTES_OF_SMALL_FILES = 120, 100_000

SWEEP_TOKENS = 2_048
"""Tokens of a batch that a search sends forward and back."""
_SHARE, _FEWEST = (
    8,
    4,
)  # of the calibration text, at most one of so many sequences is looked at, but so many at least

Assignment = Mapping[str, str]
"""Unit -> word."""


@frozen
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


@frozen
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
        """The option of a word; where the word is left out, the one with the most bytes."""
        largest = max(self.options, key=lambda option: option.num_bytes)
        return next((each for each in self.options if each.word == word), largest)


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
        if limit.num_bytes is not None:
            return limit.num_bytes - self.fixed_bytes
        return int((limit.bits or 0) * self.num_weights / 8)

    def cost(self, option: Option) -> int:
        """What an option takes of the budget: under bits its tensors, under bytes their lines in
        files too.
        """
        if self.recipe.size_limit.num_bytes is None:
            return option.num_bytes
        return option.num_bytes + option.line_bytes

    @cached_property
    def smallest(self) -> dict[str, str]:
        """The words that cost least."""
        return {unit.name: min(unit.options, key=self.cost).word for unit in self.units}

    @cached_property
    def largest(self) -> dict[str, str]:
        """The words that cost most."""
        return {unit.name: max(unit.options, key=self.cost).word for unit in self.units}

    def _chosen(self, assignment: Assignment) -> Iterator[Option]:
        for unit in self.units:
            yield unit.option(assignment[unit.name])

    def fits(self, assignment: Assignment) -> bool:
        """Whether these words keep to the budget."""
        return sum(map(self.cost, self._chosen(assignment))) <= self.room

    def num_bytes(self, assignment: Assignment) -> int:
        """Bytes of all files of the checkpoint with these words; a little more than they are."""
        return self.fixed_bytes + sum(
            each.num_bytes + each.line_bytes for each in self._chosen(assignment)
        )

    def bits(self, assignment: Assignment) -> float:
        """Bits of weights and scales for each weight of the units."""
        return 8 * total_bytes(self._chosen(assignment)) / max(1, self.num_weights)

    def uniform(self, word: str) -> dict[str, str]:
        """One word for all units that it suits; the others have their largest option."""
        return {unit.name: unit.option(word).word for unit in self.units}

    def plan(self, assignment: Assignment) -> Plan:
        """The plan with these words, as far as weights go: for measuring, not for writing."""
        chosen = {
            tensor.name: tensor for each in self._chosen(assignment) for tensor in each.tensors
        }
        return replace(
            self.base,
            tensors=tuple(chosen.get(tensor.name, tensor) for tensor in self.base.tensors),
        )


def auto_of(recipe: Recipe) -> BackboneAuto:
    """What a recipe with `backbone: auto` leaves to the search."""
    assert recipe.backbone_auto is not None
    return recipe.backbone_auto


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
    weights, _ = stored_weights(with_separate_mtp(source, base.view).values())
    words = {
        word: Decisions(recipe.with_words(word), source, base.view)
        for word in auto_of(recipe).candidates
    }
    members: dict[str, list[TensorPlan]] = defaultdict(list)
    num_modules = sum(len(tensor.shape) > 1 for tensor in base.tensors)
    fixed = base.num_bytes_beside + num_modules * _BYTES_OF_A_MODULE + _BYTES_OF_SMALL_FILES
    with matching_limit():
        for tensor in base.tensors:
            if _is_searched(tensor, recipe, words):
                members[f"{tensor.part}:{tensor.runtime}"].append(tensor)
            else:
                fixed += base.num_bytes_of(tensor) + _line_bytes(tensor)
        units = [_unit(name, tensors, words, weights, base) for name, tensors in members.items()]
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
    bits = choices.bits(choices.smallest)
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
    calibration = recipe.calibration
    assert calibration is not None
    most = max(_FEWEST, calibration.samples // _SHARE)
    wanted = ceil(auto_of(recipe).tokens / calibration.sequence_length)
    return min(calibration.samples, max(_FEWEST, min(wanted, most)))


def narrowed(recipe: Recipe, source: Source) -> Recipe:
    """Without the groups that the model lacks, where `backbone: auto` means `auto` for every group
    there may be.
    """
    if {group for group, word in recipe.backbone.items() if word == AUTO} != {*QUANTIZABLE_ROLES}:
        return recipe
    places = filter(None, map(view_of(source).place, source.entries))
    have = {place.role for place in places if place.part == "backbone"}
    return recipe.model_copy(
        update={"backbone": {group: AUTO for group in recipe.backbone if group in have}}
    )


def _is_searched(tensor: TensorPlan, recipe: Recipe, words: Mapping[str, Decisions]) -> bool:
    """Whether the search chooses the word of this weight: the recipe's own overrides come first."""
    word = recipe.mtp if tensor.part == "mtp" else recipe.backbone.get(tensor.role)
    if word != AUTO or tensor.place.row.why_kept or len(tensor.shape) < 2 or tensor.slices:
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
    options = list[Option]()
    refusals = list[RecipeError]()
    for word, decisions in words.items():
        made = []
        try:
            for tensor in tensors:
                weight = weights.get(
                    tensor.module
                )  # but for a stack of experts, which has no `.weight`
                made.append(
                    decisions.weight(weight)
                    if weight
                    else decisions.other(base.entries[tensor.inputs[0]])
                )
            refuse_unservable(decisions.recipe, made)
        except RecipeError as error:
            refusals.append(error)
            continue
        if tuple(made) not in [option.tensors for option in options]:
            option = Option(
                word=word,
                num_bytes=sum(map(base.num_bytes_of, made)),
                line_bytes=sum(map(_line_bytes, made)),
                tensors=tuple(made),
            )
            options.append(option)
    if not options:
        cause = refusals[0]
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
        options=tuple(options),
    )


def _line_bytes(tensor: TensorPlan) -> int:
    return sum(2 * len(output.name) + _BYTES_OF_LINES for output in tensor.outputs)


# --- what was found, as a recipe that a person can read and run again -----------------------------

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def found_recipe(choices: Choices, assignment: Assignment) -> Recipe:
    """The recipe of an assignment. Its calibration block is that of the search, needed or not."""
    recipe = choices.recipe
    weights: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for unit in choices.units:
        weights[unit.part, unit.role][assignment[unit.name]] += unit.num_weights
    words = {group: counts.most_common(1)[0][0] for group, counts in weights.items()}
    backbone = dict(recipe.backbone)
    for group, word in recipe.backbone.items():
        if word == AUTO:
            backbone[group] = words.get(("backbone", group), "bf16")
    changed: Json = {"backbone": backbone, "budget": None, "backbone_auto": None}
    if recipe.mtp == AUTO:
        of_block = {group: word for (part, group), word in words.items() if part == "mtp"}
        same = {*of_block.values()}
        changed["mtp"] = same.pop() if len(same) == 1 else of_block or "bf16"
    overrides = (*recipe.overrides, *_overrides(choices, assignment, words))
    made = recipe.model_copy(update=changed | {"overrides": overrides})
    summary = summary_of(made.backbone, made.mtp, is_calibrated=True)
    return made.model_copy(
        update={"summary": f"{summary}, and {len(overrides)} overrides: found for {recipe.budget}"}
    )


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
        for tensor in tensors:  # `{}` for the layer, any number for an expert
            literal, *others = map(re.escape, _NUMBER.split(tensor.module))
            templates.add(literal + "{}" * bool(others) + INDEX.join(others))
        layers[word, tuple(sorted(templates))].append(int(number[0]) if number else 0)
    for (word, templates), numbers in sorted(layers.items()):
        pattern = f"(?:{'|'.join(templates)})".replace(
            "{}", f"(?:{'|'.join(map(str, sorted(numbers)))})"
        )
        yield Override(modules=f"re:{pattern}", scheme=word)


def found_plan(choices: Choices, assignment: Assignment, *, shard_bytes: int) -> Plan:
    """The plan of that recipe, which is the assignment, unit by unit."""
    base = choices.base
    recipe = found_recipe(choices, assignment)
    plan = make_plan(
        recipe, base.source, shard_bytes=shard_bytes, trust_remote_code=base.trust_remote_code
    )
    schemes = {tensor.name: (tensor.fate, tensor.scheme) for tensor in plan.tensors}
    for unit in choices.units:
        for tensor in unit.option(assignment[unit.name]).tensors:
            found = schemes[tensor.name]
            assert found == (tensor.fate, tensor.scheme), f"{tensor.module}: {found}"
    return plan


def found_text(recipe: Recipe) -> str:
    """The recipe as a file. A calibration block that nothing needs any more is left out, for it
    would be refused.
    """
    calibration = recipe.calibration
    assert calibration is not None, f"{recipe.name}: a search has batches"
    raw = recipe.model_dump(mode="json", exclude_defaults=True)
    if (
        calibration.algorithm != "minmax"
        and not REWRITES[calibration.algorithm] & recipe.decisions()
    ):
        calibration = calibration.model_copy(update={"algorithm": "minmax"})
    raw["calibration"] = None
    if recipe.uses_batches():
        raw["calibration"] = calibration.model_dump(mode="json", exclude_defaults=True)
    validated(raw, "the recipe that was found")
    return flat_text(raw)
