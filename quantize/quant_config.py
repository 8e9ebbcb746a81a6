"""Plan -> the `quantization_config` of config.json, in compressed-tensors' dialect and vLLM's runtime names.

In: a plan, or the matrices of a finished checkpoint with their schemes. Out: `config_groups` whose targets cover
exactly the quantized modules, and an `ignore` list that covers exactly the others. Every entry is a regex anchored at
both ends, because vLLM matches `re:` from the start only, and lists every spelling under which a module may be asked
for: the fused runtime name, its shards, the routed experts' projections (w1 or gate_proj, by vLLM's version), and the
name on disk for tools that read those.

Easy to get wrong: in vLLM 0.32 a module that no target matches is silently unquantized, and one that an ignore entry
covers by accident (`model.layers.1` hits layers 10 to 19) is too. Layer numbers are therefore written as exact ranges.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from ..recipes.family import HFName, Part, Role, VLLMName
from ..recipes.family_view import FamilyView, Place
from ..recipes.schemes import SCHEMES
from .plan import Plan
from .tensor_plan import TensorPlan


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeModule:
    """One module whose quantization vLLM decides by name.

    Attributes:
        name: the prefix vLLM constructs it with.
        scheme: what the plan writes for it, "" for plain.
        members: its modules on disk; () for routed experts.
        asked: the names under which some version of vLLM, or a reader of names on disk, looks it up.
    """

    name: VLLMName
    scheme: str
    members: tuple[HFName, ...]
    asked: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Spelled:
    """A module's spellings, split into where its block is and what follows: the unit the regexes are built from."""

    stems: tuple[str, ...]
    layer: int | None
    paths: tuple[str, ...]


def compressed_tensors_config(view: FamilyView, matrices: Iterable[Matrix]) -> dict[str, Any]:
    """The value of config.json's `quantization_config`.

    Source of the keys: compressed-tensors 0.19.0 quantization/quant_config.py; of the matching rules: vLLM 0.32.0
    quantization/compressed_tensors/{utils,compressed_tensors}.py, quantization/utils/config_utils.py.
    """
    by_scheme: dict[str, set[_Spelled]] = defaultdict(set)
    routed: set[str] = set()
    for matrix in matrices:
        by_scheme[matrix.scheme].add(_spell(view, matrix))
        # transformers 5.17 (integrations/compressed_tensors.get_experts_scheme) takes the first group whose targets
        # mention "experts" for the routed ones; a group with shared experts alone must not come before it.
        routed |= {matrix.scheme} if matrix.role == "experts" else set()
    ignored = by_scheme.pop("", set())
    groups = {
        f"group_{number}": {"targets": _regexes(by_scheme[scheme]), **SCHEMES[scheme].config_group()}
        for number, scheme in enumerate(sorted(by_scheme, key=lambda scheme: (scheme not in routed, scheme)))
    }
    formats = sorted({group["format"] for group in groups.values()})
    is_single = len(formats) == 1 and formats[0] != view.family.rerouted_format
    opaque = [f"re:^(?:{re.escape(runtime)}|{re.escape(disk)})" for disk, runtime, _ in view.layout.opaque]
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if is_single else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _regexes(ignored) + opaque,
        "kv_cache_scheme": None,
        **view.family.config_extras,
    }


def runtime_modules(plan: Plan) -> list[RuntimeModule]:
    """Every module of the plan that vLLM may ask its quantization config about, by its fused runtime name."""
    return modules_of(plan.view, matrices_of(plan))


def modules_of(view: FamilyView, matrices: Iterable[Matrix]) -> list[RuntimeModule]:
    """The runtime modules that these matrices make up."""
    schemes: dict[VLLMName, str] = {}
    asked: dict[VLLMName, dict[str, None]] = defaultdict(dict)
    members: dict[VLLMName, dict[HFName, None]] = defaultdict(dict)
    for matrix in matrices:
        schemes[matrix.runtime] = matrix.scheme
        asked[matrix.runtime].update(dict.fromkeys(_concrete(_spell(view, matrix))))
        if matrix.role != "experts":
            members[matrix.runtime][matrix.module] = None
    return [
        RuntimeModule(name=name, scheme=scheme, members=tuple(members[name]), asked=tuple(asked[name]))
        for name, scheme in schemes.items()
    ]


def matrices_of(plan: Plan) -> list[TensorPlan]:
    """The plan's weights of two and more dimensions: what a Linear, an expert stack, an embedding or a head holds."""
    opaque = tuple(disk for disk, _, _ in plan.view.layout.opaque)
    return [
        tensor
        for tensor in plan.tensors
        if len(tensor.shape) >= 2
        and tensor.fate != "drop"
        and (tensor.module != tensor.name or tensor.role == "experts")
        and not tensor.name.startswith(opaque)
    ]


def _spell(view: FamilyView, matrix: Matrix) -> _Spelled:
    place = view.place(matrix.name)
    if place is None:  # carried over by the recipe's `keep`
        return _Spelled(stems=("",), layer=None, paths=(re.escape(matrix.module),))
    if place.layer is None:
        paths = (place.runtime, place.module, *place.row.aliases)
        return _Spelled(stems=("",), layer=None, paths=tuple(dict.fromkeys(map(re.escape, paths))))
    stems = (view.runtime_stem(place.part, place.layer), view.disk_stem(place.part, place.layer))
    if _runtime_number(view, place.part, place.layer) != place.layer:
        return _Spelled(stems=tuple(map(re.escape, stems)), layer=None, paths=_paths(view, place))
    # Stems of one kind differ by the layer's number alone: cut it out here, put it back as a range for all layers.
    digits = str(place.layer)
    cut = (re.escape("{}".join(stem.rsplit(digits, 1))).replace(r"\{\}", "{}") for stem in stems)
    return _Spelled(stems=tuple(dict.fromkeys(cut)), layer=place.layer, paths=_paths(view, place))


def _runtime_number(view: FamilyView, part: Part, layer: int) -> int:
    stem = view.layout.mtp if part == "mtp" and view.layout.mtp else view.layout.layers
    return view.runtime_number(layer) if "{n}" in stem.runtime else layer


def _paths(view: FamilyView, place: Place) -> tuple[str, ...]:
    """Regexes of a module's spellings below its block's stem: shard, fused, projections of routed experts."""
    row = place.row
    if row.stacked:
        paths = [*row.unstacked]
    elif "{e}" in row.path:
        paths = [row.path, *row.aliases]
    else:
        runtime = place.runtime.removeprefix(view.runtime_stem(place.part, place.layer or 0))
        paths = [row.path, *([runtime] if row.runtime else []), *row.aliases]
    return tuple(dict.fromkeys(re.escape(path).replace(r"\{e\}", r"\d+") for path in paths))


def _concrete(spelled: _Spelled) -> Iterator[str]:
    """The names of a set of spellings; expert 0 is the one vLLM asks about."""
    for stem in spelled.stems:
        for path in spelled.paths:
            pattern = stem.replace("{}", str(spelled.layer)) + path
            yield re.sub(r"\\(.)", r"\1", pattern.replace(r"\d+", "0"))


def _regexes(modules: Iterable[_Spelled]) -> list[str]:
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
