"""Rules on shapes: a tensor has the sides that config.json gives, and those of its like in layers
of the same kind.

In: a `RuntimeView`. Out: objections. vLLM's loaders raise on another shape, or fill a part of the
parameter in silence.

Easy to get wrong: layers of one model differ on purpose. Where one tensor of a module differs alone
it is broken; where others differ with it the layer is of another kind.

Source: vLLM 0.32.0 and 0.33.0 model_loader/weight_utils.py, default_weight_loader;
layers/linear.py, layers/vocab_parallel_embedding.py.
"""

from collections import defaultdict
from collections.abc import Iterator
from statistics import mode

from ...checkpoints.dialects.runtime_view import Member, RuntimeView
from ..facts.findings import Objection, Objections, objection
from .rules_mtp import is_shape_known, way_to_a_block


def sides_are_those_of_config(runtime: RuntimeView) -> Objections:
    """Embeddings, heads, what joins embedding and hidden state, and what the table says so of, have
    the sides that config.json gives.
    """
    for member in _members(runtime):
        place, weight = member
        sides = runtime.view.sides(place)
        if len(weight.shape) == 1 and weight.shape != (1,):
            sides = sides[:1]
        if len(sides) != len(weight.shape) or place.leaf not in ("", "bias", "weight"):
            continue
        for (words, side), own in zip(sides, weight.shape, strict=True):
            if side not in (None, own):
                yield _misshaped(runtime, member, f"config.json says {words}={side}")
                break


def likes_are_alike(runtime: RuntimeView) -> Objections:
    """A tensor has the shape that it has in the other layers where all beside it are alike."""
    layers: dict[tuple[object, ...], dict[str, Member]] = defaultdict(dict)
    for member in _members(runtime):
        place = member.place
        if place.layer is not None and not place.row.interleaved:
            # Attention, or the feed-forward part.
            holder = place.row.path.partition(".")[0]
            # Without numbers of experts.
            at = f"{place.row.path} {place.leaf}"
            layers[place.part, place.layer, holder].setdefault(at, member)
    seen: dict[tuple[object, ...], list[Member]] = defaultdict(list)
    for members in layers.values():
        for at, member in members.items():
            others = [(other, each.weight.shape) for other, each in members.items() if other != at]
            seen[at, *sorted(others)].append(member)
    for members in seen.values():
        usual = mode(member.weight.shape for member in members)
        for member in members:
            if member.weight.shape != usual:
                yield _misshaped(runtime, member, f"other layers have {list(usual)}")


def _misshaped(runtime: RuntimeView, member: Member, wanted: str) -> Objection:
    place, weight = member
    cure = "Take this tensor from the release, or quantize it again"
    cause = place.row.path
    if place.part == "mtp":
        cure = way_to_a_block(runtime)
        cause = f"mtp {place.layer}"
    return objection(
        "shapes",
        member.name,
        f"has shape {list(weight.shape)} where {wanted}: vLLM raises, but leaves a part of packed "
        "experts uninitialised in silence",
        cure,
        cause,
    )


def _members(runtime: RuntimeView) -> Iterator[Member]:
    """Every tensor of the language model whose shape the headers show."""
    for key, weight in runtime.tensors.items():
        place = runtime.placed.get(key)
        if place is None or place.role in ("vision", "table") or not is_shape_known(weight):
            continue
        yield Member(place, weight)


RULES = (sides_are_those_of_config, likes_are_alike)
