"""What each candidate for a layer does to answers.

In: a layer or MTP block with the released weights, its binding, and plans of `Choices`. Out: for
each unit and word a sum over tokens whose half is about the divergence in nats, from one backward
pass.

A candidate changes the output of a linear layer at one token by d: its real packed weights, with
its inputs rounded as on a server, against the released ones. If g is the gradient of the log
likelihood of tokens that the model itself would draw, the divergence is half the mean of (g . d)^2
to second order, for the mean of g g^T is Fisher's information. (Its first order is zero.) Tokens
and modules are taken to add up: errors of rounding hardly agree with one another.

Easy to get wrong: a static input scale is that of the search's own text, a part of the calibration
text. That of the final run may be a little larger.

Source: the score of modelopt's AutoQuantize is a squared gradient times a squared error, each
element for itself; here signs are kept within a token. James Martens, "New Insights and
Perspectives on the Natural Gradient Method" (2020), on sampled and on observed tokens.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn

from ....recipes.family import HFName
from ....recipes.schemes import SCHEMES
from ...plan.choices import Choices, ChoiceUnit, auto_of
from ...plan.plan import Plan
from ...run.ranks import gathered
from ..layers.activations import Rounding, rounding_of
from ..layers.served import InMemory, served_rows
from ..model.binding import Binding
from ..model.hooks import hooked

_E4M3_MAX, _E2M1_MAX = 448.0, 6.0
_TOKENS_AT_ONCE = 4_096

# Linear layer of a layer or block, by its path there -> the largest magnitude of its input.
LargestInputs = Mapping[str, float]


def static_scale(leaf: str, largest: float) -> Tensor:
    """The scale for inputs up to `largest`, [1]: a divisor for NVFP4, a multiplier for FP8."""
    amax = torch.tensor([largest or 1.0], dtype=torch.float32)
    if leaf == "input_global_scale":
        return _E4M3_MAX * _E2M1_MAX / amax
    return (amax / _E4M3_MAX).bfloat16()


def input_scales(binding: Binding, largest: LargestInputs) -> InMemory:
    """The static input scales of a layer, by their names in the finished checkpoint."""
    found = {}
    for name, pieces in binding.items():
        module = name.rpartition(".")[0]
        if module in largest:
            for leaf in ("input_scale", "input_global_scale"):
                scale = static_scale(leaf, largest[module])
                found |= {HFName(f"{piece.module}.{leaf}"): scale for piece in pieces}
    return InMemory(found)


def rebound(binding: Binding, plan: Plan) -> Binding:
    """The same binding with what another plan says of the same tensors."""
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    found = {}
    for name, pieces in binding.items():
        found[name] = tuple(replace(piece, tensor=by_name[piece.tensor.name]) for piece in pieces)
    return found


def _for_ct(scheme: str) -> QuantizationScheme:
    """The scheme as compressed-tensors has it."""
    return QuantizationScheme(targets=["Linear"], **SCHEMES[scheme].config_group())


@dataclass(frozen=True, slots=True)
class Seen:
    """What a linear layer read, [T, K], and the gradients at its output, [T, N].

    Rows without a gradient are left out, but for `largest`, which is of all inputs.
    """

    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    largest: list[Tensor] = field(default_factory=list)

    def look(self, _module: nn.Module, args: Any, output: Tensor) -> None:
        """A forward hook."""
        inputs = args[0].detach().flatten(0, -2)
        if inputs.numel():
            self.largest.append(inputs.abs().amax())

        def take(gradient: Tensor) -> None:
            rows = gradient.detach().flatten(0, -2)
            touched = rows.abs().amax(dim=-1) > 0
            self.inputs.append(inputs[touched])
            self.gradients.append(rows[touched])

        if output.requires_grad:
            output.register_hook(take)

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and gradients of a few tokens at a time."""
        for inputs, gradients in zip(self.inputs, self.gradients, strict=True):
            yield from zip(
                inputs.split(_TOKENS_AT_ONCE), gradients.split(_TOKENS_AT_ONCE), strict=True
            )


@contextmanager
def watching(
    model: Any, choices: Choices, binding: Binding, path: str
) -> Iterator[dict[str, Seen]]:
    """Collects inputs and gradients of the linear layers that a search decides about.

    Forwards and backwards run inside.

    Args:
        model: with these modules.
        choices: of the search.
        binding: of the layer or block, for any plan.
        path: its path in the model, with a dot; "" for the model itself.
    """
    searched = _unit_of(choices)
    seen = {}
    hooks = []
    for name, pieces in binding.items():
        if pieces[0].tensor.name in searched:
            module = name.rpartition(".")[0]
            own = seen[module] = Seen()
            hooks.append(model.get_submodule(f"{path}{module}").register_forward_hook(own.look))
    with hooked(hooks):
        yield seen


def _unit_of(choices: Choices) -> dict[HFName, ChoiceUnit]:
    """Tensor on disk -> the unit whose word is searched."""
    return {tensor.name: unit for unit in choices.units for tensor in unit.options[0].tensors}


def largest_inputs(seen: Mapping[str, Seen], binding: Binding) -> dict[str, float]:
    """The largest magnitude that each linear layer has read, over all ranks."""
    own = []
    for module in seen.values():
        own.append(max(map(float, module.largest), default=0.0))
    of_ranks = torch.tensor(gathered(own), dtype=torch.float64)
    found = dict(zip(seen, of_ranks.amax(dim=0).tolist(), strict=True))
    # A server gives the experts of a layer one input scale for each of their two projections, as a
    # calibrated checkpoint has it (`LayerWork.of`).
    for is_second in (False, True):
        group = []
        for module in seen:
            is_expert = binding[f"{module}.weight"][0].tensor.role == "experts"
            if is_expert and module.endswith("down_proj") is is_second:
                group.append(module)
        if group:
            found |= dict.fromkeys(group, max(found[module] for module in group))
    return found


def unit_errors(
    choices: Choices,
    model: Any,
    binding: Binding,
    path: str,
    seen: Mapping[str, Seen],
) -> dict[tuple[str, str], float]:
    """This rank's sums for every unit of a layer or block, and every word that rounds it.

    Args:
        choices: of the search.
        model: with the released weights.
        binding: of the layer or block, for any plan.
        path: its path in the model, with a dot; "" for the model itself.
        seen: by module under that path.

    Returns: by unit and word, the sum over tokens of (g . d)^2.
    """
    largest = largest_inputs(seen, binding)
    unit_of = _unit_of(choices)
    errors: dict[tuple[str, str], float] = defaultdict(float)
    for word in auto_of(choices.recipe).candidates:
        plan = choices.plan(choices.uniform(word))
        own = rebound(binding, plan)
        for served in served_rows(model, plan, own, path, input_scales(own, largest)):
            unit = unit_of.get(served.tensor.name)
            module = served.module
            rows = served.rows
            if unit is None or unit.option(word).word != word:
                continue
            weight_NK = model.get_submodule(f"{path}{module}").weight.data[rows]
            # Products of BF16 are slow on a CPU.
            dtype = torch.float32 if weight_NK.device.type == "cpu" else weight_NK.dtype
            change_NK = (served.values.float() - weight_NK.float()).to(dtype)
            rounding = rounding_for(served.tensor.scheme, largest[module])
            error = 0.0
            for inputs, grads in seen[module].chunks():
                rounded_TK = rounding(inputs).to(dtype)
                grads_TN = grads[:, rows].to(dtype)
                at_inputs_TK = grads_TN @ weight_NK.to(dtype)
                # g . d, but d is a small difference of large numbers, and is never made: the change
                # of the weights and that of the inputs are multiplied with g one by one.
                moved_T = ((grads_TN @ change_NK).float() * rounded_TK).sum(dim=-1)
                moved_T += (at_inputs_TK.float() * (rounded_TK - inputs.to(dtype))).sum(dim=-1)
                error += float(moved_T.double().square().sum())
            errors[unit.name, word] += error
    return errors


def rounding_for(scheme: str, largest: float) -> Rounding:
    """How a server rounds the input of a linear layer with this scheme."""
    if SCHEMES[scheme].inputs is None:
        return lambda inputs: inputs
    scale = 0.0
    for spec in SCHEMES[scheme].extra:
        scale = float(static_scale(spec.suffix, largest))
    return rounding_of(SimpleNamespace(quantization_scheme=_for_ct(scheme)), scale)
