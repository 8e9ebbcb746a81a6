"""Rules on shapes: a tensor has the sides that config.json gives, that its feed-forward part has,
and that its like has in layers of the same kind.

In: a `RuntimeView`. Out: objections. vLLM's loaders raise on another shape, or fill a part of the
parameter in silence.

Easy to get wrong: layers of one model differ on purpose. Where one tensor of a module differs alone
it is broken; where others differ with it the layer is of another kind.

Source: vLLM 0.32.0 and 0.33.0 model_loader/weight_utils.py, default_weight_loader;
layers/linear.py, layers/vocab_parallel_embedding.py.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ...checkpoints.dialects.runtime_view import RuntimeView, described
from ...checkpoints.stored import StoredWeight
from ...recipes.family import HFName
from ...recipes.family_view import Place
from ...recipes.frozen import Shape
from ..facts.findings import Objection, Objections, objection
from .rules_mtp import is_shape_known, way_to_a_block

_FFN_ROLES = ("dense_mlp", "shared_experts", "experts")


class _Spot(NamedTuple):
    """A tensor, and where in its layer it stands.

    Attributes:
        name: of the tensor.
        at: its path below the layer, without numbers of experts.
        layer: part and number; a tensor outside of layers has none.
        holder: the part of the layer that it is in: attention, or feed-forward.
    """

    name: HFName
    place: Place
    shape: Shape

    @property
    def at(self) -> str:
        return f"{self.place.row.path} {self.place.leaf}"

    @property
    def holder(self) -> str:
        return self.place.row.path.partition(".")[0]


def sides_are_those_of_config(runtime: RuntimeView) -> Objections:
    """Embeddings, heads, what joins embedding and hidden state, and what the table says so of, have
    the sides that config.json gives.
    """
    for spot in _spots(runtime):
        sides = runtime.view.sides(spot.place)
        is_vector = len(spot.shape) == 1 and spot.shape != (1,)
        if is_vector:
            sides = sides[:1]
        if len(sides) != len(spot.shape) or spot.place.leaf not in ("", "bias", "weight"):
            continue
        for (words, side), own in zip(sides, spot.shape, strict=True):
            if side not in (0, own):
                yield _misshaped(runtime, spot, f"config.json says {words}={side}")
                break


def feed_forward_parts_fit(runtime: RuntimeView) -> Objections:
    """Gate and up have one shape, and down has it transposed."""
    parts: dict[tuple[object, ...], list[_Spot]] = defaultdict(list)
    for spot in _spots(runtime):
        place = spot.place
        if place.role in _FFN_ROLES and place.layer is not None and len(spot.shape) == 2:
            parts[place.part, place.layer, spot.place.row.path.rpartition(".")[0]].append(spot)
    for spots in parts.values():
        rows = {spot.at: spot.place for spot in spots}
        fused = {at for at, place in rows.items() if place.shares}
        if (len(rows), len(fused)) != (3, 2):
            continue
        shapes = Counter[Shape]()
        turned = list[tuple[_Spot, Shape]]()
        for spot in spots:
            shape = spot.shape
            if spot.at not in fused:
                shape = (shape[1], shape[0])
            turned.append((spot, shape))
            shapes[shape] += 1
        usual = shapes.most_common(1)[0][0]
        for spot, shape in turned:
            if shape != usual:
                others = f"the projections beside it have {list(usual)}, or that transposed"
                yield _misshaped(runtime, spot, others)


def likes_are_alike(runtime: RuntimeView) -> Objections:
    """A tensor has the shape that it has in the other layers where all beside it are alike."""
    layers: dict[tuple[object, ...], dict[str, _Spot]] = defaultdict(dict)
    for spot in _spots(runtime):
        place = spot.place
        if place.layer is not None and not place.row.interleaved:
            layers[place.part, place.layer, spot.holder].setdefault(spot.at, spot)
    seen: dict[tuple[object, ...], list[_Spot]] = defaultdict(list)
    for (_, _, holder), spots in layers.items():
        for at, spot in spots.items():
            others = {other: beside.shape for other, beside in spots.items() if other != at}
            seen[holder, at, *sorted(others.items())].append(spot)
    for spots in seen.values():
        shapes = Counter(spot.shape for spot in spots)
        usual = shapes.most_common(1)[0][0]
        for spot in spots:
            if spot.shape != usual:
                yield _misshaped(runtime, spot, f"other layers have {list(usual)}")


def _misshaped(runtime: RuntimeView, spot: _Spot, wanted: str) -> Objection:
    place = spot.place
    cure = "Take this tensor from the release, or quantize it again"
    cause = place.row.path
    if place.part == "mtp":
        cure = way_to_a_block(runtime)
        cause = f"mtp {place.layer}"
    return objection(
        "shapes",
        spot.name,
        f"has shape {list(spot.shape)} where {wanted}: vLLM raises, but leaves a part of packed "
        "experts uninitialised in silence",
        cure,
        cause,
    )


def _spots(runtime: RuntimeView) -> Iterator[_Spot]:
    """Every tensor of the language model whose shape the headers show."""
    weights = dict[HFName, StoredWeight](runtime.weights)
    weights |= {entry.name: described(entry) for entry in runtime.others}
    for key, weight in weights.items():
        place = runtime.placed.get(key)
        if place is None or place.role in ("vision", "table") or not is_shape_known(weight):
            continue
        yield _Spot(weight.weight.name, place, weight.shape)


RULES = (sides_are_those_of_config, feed_forward_parts_fit, likes_are_alike)
