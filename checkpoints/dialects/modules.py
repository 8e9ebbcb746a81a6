"""The modules that a quantization config names, how each is spelled, and anchored regexes that
cover exactly a set.

In: the matrices of a checkpoint, each with its place and its scheme. Out: a `NamedModule` for each,
once for all routed experts; the runtime modules that they make up; regexes for many of them.

Easy to get wrong: a block may have another number at run time than on disk.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...recipes.family import HFName, VLLMName
from ...recipes.family_view import FamilyView, Place


@dataclass(frozen=True, slots=True, order=True)
class Spellings:
    """A module's spellings, split into where its block is and what follows: the unit the regexes
    are built from.
    """

    stems: tuple[str, ...]
    layer: int | None
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module on disk, once for all routed experts, with its scheme, "" for plain, and its
    spellings.
    """

    place: Place
    scheme: str
    spelled: Spellings


class RuntimeModule(NamedTuple):
    """One module whose quantization vLLM decides by name.

    Attributes:
        name: the prefix vLLM constructs it with.
        scheme: what is written for it, "" for plain.
        members: its modules on disk; () for routed experts.
        asked: the names under which some version of vLLM, or a reader of names on disk, looks it
            up.
    """

    name: VLLMName
    scheme: str = ""
    members: tuple[HFName, ...] = ()
    asked: tuple[str, ...] = ()


def named_modules(view: FamilyView, matrices: Iterable[tuple[Place, str]]) -> list[NamedModule]:
    """The modules of matrices, each by its place and its scheme, in their order."""
    found = dict[tuple[str, str, int | None, str], NamedModule]()
    for place, scheme in matrices:
        key = (place.row.path, place.part, place.layer, scheme)
        if key in found:
            continue
        found[key] = NamedModule(place, scheme, spell(view, place))
        joined = place.row.joins
        if joined:
            # vLLM loads the same tensors into a module that has one name for all layers.
            spelled = spell_whole(joined)
            place = replace(place, runtime=VLLMName(joined))
            found[joined, *key[1:]] = NamedModule(place, scheme, spelled)
    return list(found.values())


def runtime_modules(modules: Iterable[NamedModule]) -> list[RuntimeModule]:
    """Every module that vLLM may ask its quantization config about, by its fused runtime name."""
    fused = dict[VLLMName, RuntimeModule]()
    for module in modules:
        name = module.place.runtime
        _, _, members, asked = fused.get(name, RuntimeModule(name))
        if module.place.role != "experts":
            members += (module.place.module,)
        asked = dict.fromkeys((*asked, *concrete(module.spelled)))
        fused[name] = RuntimeModule(name, module.scheme, members, tuple(asked))
    return [*fused.values()]


def spell(view: FamilyView, place: Place) -> Spellings:
    """A module's spellings on disk and in vLLM."""
    if place.layer is None:
        return spell_whole(place.runtime, place.module, *place.row.aliases)
    paths = tuple(dict.fromkeys(map(path_regex, table_paths(view, place))))
    stems = (view.runtime_stem(place.part, place.layer), view.disk_stem(place.part, place.layer))
    block = view.layout.layers
    if place.part == "mtp" and view.layout.mtp:
        block = view.layout.mtp
    # A block with another number at run time than on disk has both in its stems.
    if "{n}" in block.runtime and view.runtime_number(place.layer) != place.layer:
        return Spellings(tuple(map(re.escape, stems)), None, paths)
    cut = dict.fromkeys(without_number(stem, place.layer) for stem in stems)
    return Spellings(tuple(cut), place.layer, paths)


def spell_whole(*paths: str) -> Spellings:
    """The spellings of a module that is in no layer."""
    return Spellings(("",), None, tuple(dict.fromkeys(map(re.escape, paths))))


def table_paths(view: FamilyView, place: Place) -> tuple[str, ...]:
    """A module's spellings below its block's stem in the family's table: shard, fused, projections
    of experts.
    """
    row = place.row
    if row.stacked:
        return row.unstacked
    if "{e}" in row.path:
        return (row.path, *row.aliases)
    paths = [row.path]
    if row.runtime:
        paths.append(place.runtime.removeprefix(view.runtime_stem(place.part, place.layer or 0)))
    return tuple(dict.fromkeys([*paths, *row.aliases]))


def without_number(stem: str, layer: int) -> str:
    """The regex of a block's stem, with `{}` for the layer's number: `regexes` writes a range for
    all layers there.
    """
    return re.escape("{}".join(stem.rsplit(str(layer), 1))).replace(r"\{\}", "{}")


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
    """Anchored regexes that cover exactly `modules`: one for each parent module and set of
    layers.
    """
    # Stems of one kind differ by the layer's number alone, so one regex covers a range of layers.
    layers: dict[tuple[tuple[str, ...], tuple[str, ...]], set[int]] = defaultdict(set)
    for module in modules:
        numbered = layers[module.stems, module.paths]
        if module.layer is not None:
            numbered.add(module.layer)
    leaves: dict[tuple[tuple[str, ...], tuple[int, ...], str], set[str]] = defaultdict(set)
    for (stems, paths), numbers in layers.items():
        for path in paths:
            parent, dot, leaf = path.rpartition(r"\.")
            leaves[stems, tuple(sorted(numbers)), parent + dot].add(leaf)
    found = []
    for (stems, numbers, parent), names in sorted(leaves.items()):
        start = _any_of(stems)
        if numbers:
            heads = list[str]()
            tails = set[str]()
            for stem in stems:
                head, _, tail = stem.partition("{}")
                heads.append(head)
                tails.add(tail)
            assert len(tails) == 1, f"stems {stems} differ behind the layer's number"
            start = _any_of(heads) + number_regex(numbers) + tails.pop()
        found.append(f"re:^{start}{parent}{_any_of(sorted(names))}$")
    return found


def _any_of(choices: Sequence[str]) -> str:
    if len(choices) == 1:
        return choices[0]
    return f"(?:{'|'.join(choices)})"


def number_regex(numbers: Iterable[int]) -> str:
    """A regex for exactly these numbers in decimal, e.g. 3..61 -> `(?:[3-9]|[1-5]\\d|6[0-1])`."""
    # What comes before the last digit -> the last digits that follow it.
    by_head: dict[str, set[int]] = defaultdict(set)
    for number in set(numbers):
        text = str(number)
        by_head[text[:-1]].add(int(text[-1]))
    # Numbers that end alike are one part, whose beginnings are numbers themselves.
    by_digits: dict[str, list[int]] = defaultdict(list)
    parts = list[str]()
    for head, digits in by_head.items():
        if head:
            by_digits[digit_regex(digits)].append(int(head))
        else:
            parts.append(digit_regex(digits))
    for digits, heads in by_digits.items():
        parts.append(number_regex(heads) + digits)
    return _any_of(sorted(sorted(parts), key=len))


def digit_regex(digits: Iterable[int]) -> str:
    """A regex for exactly these digits: one, a range, a set, or any."""
    ordered = sorted(digits)
    if len(ordered) == 1:
        return str(ordered[0])
    if len(ordered) == 10:
        return r"\d"
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"[{ordered[0]}-{ordered[-1]}]"
    return f"[{''.join(map(str, ordered))}]"
