"""What happens to one tensor: the values that a plan is made of.

In: a weight as it is stored, and the scheme it will have. Out: `TensorPlan`, and the `Output`s that
a scheme puts on disk for it.

Easy to get wrong: the outputs of a 3-D expert parameter. Where it is quantized, it becomes one set
of tensors for each expert and each projection, under the names of single experts.
"""

from collections.abc import Iterable
from functools import cache
from typing import Literal, NamedTuple

from ...checkpoints.source import Entry
from ...checkpoints.stored import StoredWeight
from ...recipes.conventions import Change
from ...recipes.family import HFName, Part, Role, VLLMName
from ...recipes.family_view import Place
from ...recipes.forms import Form
from ...recipes.frozen import Shape
from ...recipes.schemes import SCHEMES, TensorSpec, num_bytes

Fate = Literal["quantize", "keep", "dequantize", "add", "drop"]


class Output(NamedTuple):
    """One tensor to be written. A tuple, because a plan has some hundred thousand of them."""

    name: HFName
    dtype: str
    shape: Shape

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


class Spelled(NamedTuple):
    """An output as another convention writes it, and what becomes of its values."""

    output: Output
    change: Change


class TensorPlan(NamedTuple):
    """What happens to a weight with its scales, or to another tensor; a tuple, as `Output` is."""

    # The weight's or tensor's name on disk, without a packed form's suffix (`....weight`).
    name: HFName
    # Every source tensor this consumes; across a plan each source tensor is consumed once.
    inputs: tuple[HFName, ...]
    # Quantize to `scheme`; keep the bytes; dequantize to BF16; add a copy of `inputs`; drop.
    fate: Fate
    # Why this fate, for people.
    reason: str
    # The logical shape, also of a packed weight.
    shape: Shape
    outputs: tuple[Output, ...]
    # What it is on disk and in vLLM.
    place: Place
    # The form at run time: a scheme's name, or "" for plain tensors.
    scheme: str = ""
    # How the source stores it.
    form: Form = "plain"
    # Rows and columns per scale of the stored form, for block forms.
    block: tuple[int, int] | None = None
    # Tensors that share this are computed together and are written to one shard; "" for one alone.
    shares: str = ""
    # For a matrix whose rows are interleaved, the rows of each output in one of its slices.
    slices: tuple[int, ...] = ()
    # Which outputs need batches. "scales": the static input scales, while the weight is packed from
    # the source. "weights": every output, because an algorithm rewrites the weight. "cache": a
    # scale of the KV cache, which no source tensor is the origin of.
    calibrated: Literal["", "scales", "weights", "cache"] = ""
    # For the projection of keys, where the attention has an FP8 cache: the names of its scales, of
    # keys and of values; () where no loader takes them, and they are 1. None for all other tensors.
    cache: tuple[HFName, ...] | None = None
    # The algorithm moves scale between the modules of this layer, so batches may also give all
    # outputs of this one, unit by unit.
    may_change: bool = False
    # Training gives every output of this tensor of the MTP block.
    tuned: bool = False

    @property
    def unit(self) -> str:
        """Tensors with the same unit are computed together."""
        return self.shares or self.name

    @property
    def role(self) -> Role:
        return self.place.row.role

    @property
    def part(self) -> Part:
        return self.place.part

    @property
    def layer(self) -> int | None:
        return self.place.layer

    @property
    def module(self) -> HFName:
        """Its module's name on disk."""
        return self.place.module

    @property
    def runtime(self) -> VLLMName:
        """What vLLM calls its module, fused with others where vLLM fuses them."""
        return self.place.runtime

    @property
    def stacked(self) -> tuple[str, ...]:
        """Projections in a 3-D expert tensor, which becomes one tensor an expert where it is
        quantized.
        """
        return self.place.row.stacked

    @property
    def calibrated_outputs(self) -> tuple[Output, ...]:
        """The outputs that need batches."""
        if self.calibrated in ("weights", "cache") or self.tuned:
            return self.outputs
        if not self.calibrated:
            return ()
        suffixes = batch_suffixes(self.scheme)
        return tuple(output for output in self.outputs if output.name.endswith(suffixes))


def batch_suffixes(scheme: str) -> tuple[str, ...]:
    """How the names of a scheme's tensors end that only batches give."""
    return tuple(f".{spec.suffix}" for spec in SCHEMES[scheme].extra)


def outputs_of(tensors: Iterable[TensorPlan]) -> list[Output]:
    """The outputs of several tensors."""
    return [output for tensor in tensors for output in tensor.outputs]


def same_output(entry: Entry) -> Output:
    """The output for a tensor that keeps its bytes and its name."""
    return Output(entry.name, entry.dtype, entry.shape)


def packed_outputs(place: Place, scheme: str, shape: Shape) -> tuple[Output, ...]:
    """The outputs for a weight that is quantized: one set of tensors, or one a projection of each
    stacked expert.
    """
    stacked = place.row.stacked
    if not stacked:
        return _outputs_of(place.module, scheme, shape)
    num_experts, rows, columns = shape
    outputs = list[Output]()
    for module in place.unstacked(num_experts):
        outputs += _outputs_of(module, scheme, (rows // len(stacked), columns))
    return tuple(outputs)


def renamed_outputs(weight: StoredWeight, scheme: str) -> tuple[Output, ...]:
    """The outputs for a weight that keeps its bytes under the scheme's names; float scales keep
    their precision.
    """
    scale = weight.parts.get("weight_scale") or weight.parts.get("scales")
    outputs = list(_outputs_of(weight.module, scheme, weight.shape))
    if scale is not None and scale.dtype in ("F32", "F16"):
        for number, output in enumerate(outputs):
            if output.dtype == "BF16":
                outputs[number] = output._replace(dtype=scale.dtype)
    return tuple(outputs)


def _outputs_of(module: HFName, scheme: str, shape: Shape) -> tuple[Output, ...]:
    outputs = list[Output]()
    for spec in _specs(scheme, *shape):
        outputs.append(Output(HFName(f"{module}.{spec.suffix}"), spec.dtype, spec.shape))
    return tuple(outputs)


@cache
def _specs(scheme: str, num_rows: int, num_columns: int) -> tuple[TensorSpec, ...]:
    """A model has a few shapes, and each of its experts has them."""
    return SCHEMES[scheme].tensors(num_rows, num_columns)
