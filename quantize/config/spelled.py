"""A module's spellings in a quantization config, and anchored regexes that cover exactly a set of them.

In: a matrix and the family's view. Out: `Spellings`, where its block is and what follows; regexes for many of them.

Easy to get wrong: stems of one kind differ by the layer's number alone, so that one regex covers a range of layers; a
block with another number at run time than on disk has stems of its own.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ...recipes.family import HFName, Part, Role, VLLMName
from ...recipes.family_view import FamilyView, Place
from ...recipes.runtimes.sglang import table_paths


class Matrix(Protocol):
    """A matrix that vLLM may ask the quantization config about: a `TensorPlan`, or what `cure/` finds on disk."""

    @property
    def name(self) -> HFName: ...
    @property
    def module(self) -> HFName: ...
    @property
    def runtime(self) -> VLLMName: ...
    @property
    def role(self) -> Role: ...
    @property
    def scheme(self) -> str: ...


@dataclass(frozen=True, slots=True, order=True)
class Spellings:
    """A module's spellings, split into where its block is and what follows: the unit the regexes are built from."""

    stems: tuple[str, ...]
    layer: int | None
    paths: tuple[str, ...]


def spell(view: FamilyView, matrix: Matrix) -> Spellings:
    """A matrix's spellings on disk and in vLLM."""
    place = view.place(matrix.name)
    if place is None:  # carried over by the recipe's `keep`
        return Spellings(stems=("",), layer=None, paths=(re.escape(matrix.module),))
    if place.layer is None:
        paths = (place.runtime, place.module, *place.row.aliases)
        return Spellings(stems=("",), layer=None, paths=tuple(dict.fromkeys(map(re.escape, paths))))
    stems = (view.runtime_stem(place.part, place.layer), view.disk_stem(place.part, place.layer))
    if _runtime_number(view, place.part, place.layer) != place.layer:
        return Spellings(stems=tuple(map(re.escape, stems)), layer=None, paths=_paths(view, place))
    # Stems of one kind differ by the layer's number alone: cut it out here, put it back as a range for all layers.
    digits = str(place.layer)
    cut = (re.escape("{}".join(stem.rsplit(digits, 1))).replace(r"\{\}", "{}") for stem in stems)
    return Spellings(stems=tuple(dict.fromkeys(cut)), layer=place.layer, paths=_paths(view, place))


def _runtime_number(view: FamilyView, part: Part, layer: int) -> int:
    stem = view.layout.mtp if part == "mtp" and view.layout.mtp else view.layout.layers
    return view.runtime_number(layer) if "{n}" in stem.runtime else layer


def _paths(view: FamilyView, place: Place) -> tuple[str, ...]:
    """Regexes of a module's spellings below its block's stem: shard, fused, projections of routed experts."""
    return tuple(dict.fromkeys(map(path_regex, table_paths(view, place))))


def path_regex(path: str) -> str:
    """The regex of a path, with any number for the index of an expert."""
    return re.escape(path).replace(r"\{e\}", r"\d+")


def concrete(spelled: Spellings) -> Iterator[str]:
    """The names of a set of spellings; expert 0 is the one vLLM asks about."""
    for stem in spelled.stems:
        for path in spelled.paths:
            pattern = stem.replace("{}", str(spelled.layer)) + path
            yield re.sub(r"\\(.)", r"\1", pattern.replace(r"\d+", "0"))


def regexes(modules: Iterable[Spellings]) -> list[str]:
    """Anchored regexes that cover exactly `modules`: one for each parent module and set of layers."""
    layers: dict[tuple[tuple[str, ...], tuple[str, ...]], set[int]] = defaultdict(set)
    for module in modules:
        layers[module.stems, module.paths] |= set() if module.layer is None else {module.layer}
    leaves: dict[tuple[tuple[str, ...], tuple[int, ...], str], set[str]] = defaultdict(set)
    for (stems, paths), numbers in layers.items():
        for path in paths:
            parent, dot, leaf = path.rpartition(r"\.")
            leaves[stems, tuple(sorted(numbers)), parent + dot].add(leaf)
    return [
        f"re:^{_stem_regex(stems, numbers)}{parent}{_any_of(sorted(names))}$"
        for (stems, numbers, parent), names in sorted(leaves.items())
    ]


def _stem_regex(stems: tuple[str, ...], numbers: tuple[int, ...]) -> str:
    if not numbers:
        return _any_of(list(stems))
    heads, tails = zip(*(stem.split("{}") for stem in stems), strict=True)
    assert len(set(tails)) == 1, f"stems {stems} differ behind the layer's number"
    return _any_of(list(heads)) + number_regex(numbers) + tails[0]


def _any_of(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


def number_regex(numbers: Iterable[int]) -> str:
    """A regex for exactly these numbers in decimal, e.g. 3..61 -> `(?:[3-9]|[1-5]\\d|6[0-1])`."""
    by_head: dict[str, set[int]] = defaultdict(set)
    for number in set(numbers):
        text = str(number)
        by_head[text[:-1]].add(int(text[-1]))
    by_digits: dict[str, list[str]] = defaultdict(list)
    for head, digits in by_head.items():
        by_digits[_digit_class(digits)].append(head)
    parts = []
    for digits, heads in by_digits.items():
        if "" in heads:
            parts.append(digits)
        if longer := [int(head) for head in heads if head]:
            parts.append(number_regex(longer) + digits)
    return _any_of(sorted(parts, key=lambda part: (len(part), part)))


def _digit_class(digits: set[int]) -> str:
    if len(digits) == 10:
        return r"\d"
    ordered = sorted(digits)
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"[{ordered[0]}-{ordered[-1]}]"
    return f"[{''.join(map(str, ordered))}]"
