"""Is the MTP block one that was trained? Weights of a block that never was are finite, and answer nonsense.

In: a `RuntimeView`, and the summaries of its tensors. Out: warnings: norms that are as they were made, matrices whose
numbers have another size than the backbone's, and matrices of chance.

The largest singular value of a matrix [N, K] of independent numbers of size s is near s (sqrt(N) + sqrt(K)), whatever
their distribution: the edge of Marchenko and Pastur. Training leaves directions that are larger. Measured: 0.97 to 0.98
of the edge for normal and uniform noise from 256 x 512 to 5120 x 10240; 1.28 to 2.62 for the MTP matrices of the two
shipped models, which were trained for minutes.

Easy to get wrong: nothing here is proof. A block of the right size and with trained directions may still be another
model's; only its acceptance says how good it is.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ...checkpoints.dequantize import dequantize
from ...checkpoints.stored import FLOATS, NOT_COMPUTED, StoredWeight
from ...checkpoints.values import read_tensor
from ...recipes.family import HFName
from ..facts.findings import Objection, objection
from .runtime_view import RuntimeView
from .values_summary import Summary

_warning = partial(objection, severity="warning", origin="values")
_CURE = "Measure its acceptance before it is served"
# Sizes of one kind of matrix differ between layers by a few times. A block of another origin differs by more.
_OTHER_SIZE = 100.0
_SMALLEST_SIDE = 512
_EDGE = 1.05
_STEPS = 12


def glue(runtime: RuntimeView) -> list[StoredWeight]:
    """The matrices that join embedding and hidden state in the MTP block; wide enough to tell chance from training."""
    found = []
    for module, weight in runtime.weights.items():
        place = runtime.placed.get(module)
        if place is None or place.part != "mtp" or place.role != "glue" or weight.form in NOT_COMPUTED:
            continue
        if len(weight.shape) == 2 and min(weight.shape) >= _SMALLEST_SIDE:
            found.append(weight)
    return found


def matrices_are_not_chance(runtime: RuntimeView) -> Iterator[Objection]:
    """No matrix of the MTP block's glue has the spectrum of independent random numbers: MiniMax-M2#47."""
    for weight in glue(runtime):
        parts = {leaf: read_tensor(runtime.source, entry) for leaf, entry in weight.parts.items()}
        values = dequantize(weight.form, parts, shape=weight.shape, block=weight.block)
        share = edge_share(values)
        if math.isfinite(share) and 0 < share < _EDGE:
            yield _warning(
                rule="mtp-noise",
                where=weight.weight.name,
                says=f"looks like random numbers: its largest singular value is {share:.2f} of what chance gives, and "
                "training leaves larger ones. The draft then guesses, and nearly nothing is accepted",
                cure=_CURE,
            )


def edge_share(matrix: Tensor) -> float:
    """The largest singular value of a matrix [N, K], of the one that independent numbers of its size would have.

    From power iteration, so a little below the true share; NaN for a matrix of zeros, or with values that are not
    finite.
    """
    values = matrix.float()
    num_rows, num_columns = values.shape
    vector = torch.randn(num_columns, generator=torch.Generator().manual_seed(0))
    square = vector.norm()
    for _ in range(_STEPS):
        vector = values.T @ (values @ (vector / square))
        square = vector.norm()
    size = values.square().mean().sqrt()
    return (square.sqrt() / (size * (math.sqrt(num_rows) + math.sqrt(num_columns)))).item()


def norms_have_learned(runtime: RuntimeView, summaries: Mapping[HFName, Summary]) -> Iterator[Objection]:
    """The norms of an MTP layer are not all as they were made: ones, or zeros where the model adds one."""
    initial = 0.0 if runtime.view.family.norms_add_one else 1.0
    layers: dict[int | None, list[HFName]] = defaultdict(list)
    for name, summary in summaries.items():
        place = runtime.view.place(name)
        if place is not None and place.part == "mtp" and place.role == "norm":
            is_initial = summary.is_constant and summary.largest == initial and not summary.has_negative
            layers[place.layer].append(name if is_initial else HFName(""))
    for names in layers.values():
        if len(names) > 1 and all(names):
            yield _warning(
                rule="mtp-untrained",
                where=names[0],
                says=f"all {len(names)} norms of this MTP layer hold {initial:g} only, as before training: the draft "
                "then guesses, and nearly nothing is accepted",
                cure=_CURE,
            )


def sizes_are_those_of_the_backbone(runtime: RuntimeView, summaries: Mapping[HFName, Summary]) -> Iterator[Objection]:
    """The largest number of an MTP matrix is not far from those of the backbone's matrices of the same kind."""
    backbone: dict[str, list[float]] = defaultdict(list)
    draft: dict[HFName, tuple[str, float]] = {}
    for module, weight in runtime.weights.items():
        place, entry = runtime.placed.get(module), weight.weight
        if place is None or entry.dtype not in FLOATS or len(entry.shape) != 2 or entry.name not in summaries:
            continue
        largest = summaries[entry.name].largest
        if place.part == "mtp":
            draft[entry.name] = place.row.path, largest
        else:
            backbone[place.row.path].append(largest)
    for name, (path, largest) in draft.items():
        usual = [value for value in backbone[path] if 0 < value < math.inf]
        if usual and 0 < largest < math.inf and not min(usual) / _OTHER_SIZE < largest < max(usual) * _OTHER_SIZE:
            yield _warning(
                rule="mtp-size",
                where=name,
                says=f"reaches {largest:.3g}, where the backbone's {path} reach {min(usual):.3g} to {max(usual):.3g}: "
                "it is not of this model, or was never trained",
                cure=_CURE,
                cause=f"mtp {path} size",
            )
