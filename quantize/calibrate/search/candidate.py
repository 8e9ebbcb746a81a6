"""One candidate plan on a layer that was not calibrated for it: its weights, its rounded inputs,
and back again.

In: a layer or MTP block with the released weights, a plan of `Choices`, and the largest inputs that
were seen. Out: the layer as a server would compute it under that plan, for as long as a context
lasts.

Easy to get wrong: a static input scale is the largest of the modules that run as one, and of all
experts of a layer, as in a calibrated checkpoint. The inputs that were seen are those of the
search's own text, which is a part of the calibration text: a scale of the final run may be a little
larger.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from torch import Tensor

from ....recipes.family import HFName
from ....recipes.schemes import SCHEMES
from ...plan.plan import Plan
from ..layers.activations import Rounding, rounding_of
from ..layers.served import InMemory, served_rows
from ..layers.work import schemes_in
from ..model.binding import Binding

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_OWN = ("quantization_scheme", "quantization_status", "input_scale", "input_global_scale")

LargestInputs = Mapping[str, float]
"""Linear layer of a layer or block, by its path there -> the largest magnitude of its input."""


def input_scales(binding: Binding, largest: LargestInputs) -> InMemory:
    """The static input scales of a layer, by their names in the finished checkpoint."""
    found = {}
    for name, pieces in binding.items():
        module = name.rpartition(".")[0]
        if module in largest:
            for leaf in ("input_scale", "input_global_scale"):
                found |= {
                    HFName(f"{piece.module}.{leaf}"): static_scale(leaf, largest[module])
                    for piece in pieces
                }
    return InMemory(found)


def static_scale(leaf: str, largest: float) -> Tensor:
    """The scale for inputs up to `largest`, [1]: a divisor for NVFP4, a multiplier for FP8."""
    amax = torch.tensor([largest or 1.0], dtype=torch.float32)
    return (
        _E4M3_MAX * _E2M1_MAX / amax
        if leaf == "input_global_scale"
        else (amax / _E4M3_MAX).bfloat16()
    )


def rebound(binding: Binding, plan: Plan) -> Binding:
    """The same binding with what another plan says of the same tensors."""
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    return {
        name: tuple(replace(piece, tensor=by_name[piece.tensor.name]) for piece in pieces)
        for name, pieces in binding.items()
    }


def rounding_for(scheme: str, largest: float) -> Rounding:
    """How a server rounds the input of a linear layer with this scheme."""
    scale = 0.0
    for spec in SCHEMES[scheme].extra:
        scale = float(static_scale(spec.suffix, largest))
    return rounding_of(SimpleNamespace(quantization_scheme=_for_ct(scheme)), scale)


@contextmanager
def as_candidate(
    model: Any, plan: Plan | None, binding: Binding, path: str, largest: LargestInputs
) -> Iterator[None]:
    """A layer with the served weights of a plan and rounded inputs; afterwards with its weights as
    they were.

    Args:
        model: with the released weights.
        plan: of `Choices`; None for the release, which stays as it is.
        binding: of the layer or block, for any plan.
        path: its path in the model, with a dot; "" for the model itself.
        largest: of its inputs.
    """
    if plan is None:
        yield
        return
    binding = rebound(binding, plan)
    schemes = schemes_in(binding, path)
    before = {name: model.get_submodule(name).weight.data for name in schemes}
    try:
        for name, scheme in schemes.items():
            module = model.get_submodule(name)
            module.weight.data = module.weight.data.clone()
            module.quantization_scheme = _for_ct(scheme)
            module.quantization_status = (
                QuantizationStatus.COMPRESSED
            )  # so that its weight is not rounded again
            for spec in SCHEMES[scheme].extra:
                scale = static_scale(spec.suffix, largest[name.removeprefix(path)])
                setattr(
                    module,
                    spec.suffix,
                    torch.nn.Parameter(scale.to(module.weight.device), requires_grad=False),
                )
        for served in served_rows(model, plan, binding, path, input_scales(binding, largest)):
            served.weight.copy_(served.values)
        yield
    finally:
        for name, weight in before.items():
            module = model.get_submodule(name)
            module.weight.data = weight
            for own in _OWN:
                if hasattr(module, own):
                    delattr(module, own)


def _for_ct(scheme: str) -> QuantizationScheme:
    """The scheme as compressed-tensors has it."""
    return QuantizationScheme(targets=["Linear"], **SCHEMES[scheme].config_group())
