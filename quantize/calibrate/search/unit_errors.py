"""What every candidate would do to the answers, unit by unit, from one backward pass through a
layer.

In: a layer or MTP block whose linear layers have computed, with their inputs and the gradients of a
sampled log likelihood at their outputs. Out: for each unit and word, a sum over tokens whose half
is about the divergence in nats.

A candidate changes the output of a linear layer at one token by d: its real packed weights, with
its inputs rounded as on a server, against the released ones. If g is the gradient of the log
likelihood of tokens that the model itself would draw, the divergence is half the mean of (g . d)^2
to second order, for the mean of g g^T is Fisher's information. (Its first order is zero.) Tokens
and modules are taken to add up: errors of rounding hardly agree with one another.

Easy to get wrong: d is a small difference of large numbers. So it is never made: the change of the
weights and that of the inputs are multiplied with the gradient one by one.

Source: the score of modelopt's AutoQuantize is a squared gradient times a squared error, each
element for itself; here signs are kept within a token. James Martens, "New Insights and
Perspectives on the Natural Gradient Method" (2020), on sampled and on observed tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....recipes.schemes import SCHEMES
from ...plan.choices import Choices
from ...run.ranks import Ranks
from ..layers.served import served_rows
from ..model.binding import Binding
from ..model.hooks import hooked
from .candidate import LargestInputs, input_scales, rebound, rounding_for

_TOKENS_AT_ONCE = 4_096

UnitErrors = dict[str, dict[str, float]]
"""Unit -> word -> sum over tokens of (g . d)^2."""

Projected = dict[tuple[str, int], list[Tensor]]
"""Linear layer and first row of a weight there -> the gradients at its inputs, [T, K], by
chunks.
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a linear layer read, [T, K], and the gradients at its output, [T, N]; rows without a
    gradient are left out.

    Attributes:
        largest: of all inputs, also of the rows that are left out.
    """

    inputs: list[Tensor]
    gradients: list[Tensor]
    largest: list[float]


@contextmanager
def watching(model: Any, names: Mapping[str, str]) -> Iterator[dict[str, Seen]]:
    """Collects inputs and gradients of linear layers, while forwards and backwards run inside.

    Args:
        model: with these modules.
        names: path in the model -> the name to collect under.
    """
    seen = {name: Seen([], [], []) for name in names.values()}
    handles = []
    last: list[
        tuple[object, float]
    ] = []  # experts and fused layers read the same tensor one after the other
    for path, name in names.items():

        def look(_module: nn.Module, args: Any, output: Tensor, own: Seen = seen[name]) -> None:
            inputs = args[0].detach().flatten(0, -2)
            if not last or last[0][0] is not args[0]:
                last[:] = [(args[0], float(inputs.abs().amax()) if inputs.numel() else 0.0)]
            own.largest.append(last[0][1])

            def take(gradient: Tensor) -> None:
                rows = gradient.detach().flatten(0, -2)
                touched = rows.abs().amax(dim=-1) > 0
                own.inputs.append(inputs[touched])
                own.gradients.append(rows[touched])

            if output.requires_grad:
                output.register_hook(take)

        handles.append(model.get_submodule(path).register_forward_hook(look))
    with hooked(handles):
        yield seen


def largest_inputs(seen: Mapping[str, Seen], binding: Binding, ranks: Ranks) -> dict[str, float]:
    """Over all ranks; one value for all first projections of a layer's experts, and one for all
    second ones.
    """
    own = [max(each.largest, default=0.0) for each in seen.values()]
    values = torch.zeros(ranks.size, len(own), dtype=torch.float64)
    values[ranks.rank] = torch.tensor(own, dtype=torch.float64)
    found = dict(zip(seen, ranks.sum(values).amax(dim=0).tolist(), strict=True))
    groups: dict[bool, list[str]] = {False: [], True: []}
    for name, pieces in binding.items():
        module = name.rpartition(".")[0]
        if module in found and pieces[0].tensor.role == "experts":
            groups[module.endswith("down_proj")].append(module)
    for modules in groups.values():
        found |= dict.fromkeys(modules, max((found[module] for module in modules), default=0.0))
    return found


def unit_errors(
    choices: Choices,
    model: Any,
    binding: Binding,
    path: str,
    seen: Mapping[str, Seen],
    largest: LargestInputs,
) -> UnitErrors:
    """This rank's sums for every unit of a layer or block, and every word that rounds it.

    Args:
        choices: of the search.
        model: with the released weights.
        binding: of the layer or block, for any plan.
        path: its path in the model, with a dot; "" for the model itself.
        seen: by module under that path.
        largest: likewise.
    """
    unit_of = {tensor.name: unit for unit in choices.units for tensor in unit.options[0].tensors}
    names = {piece.tensor.name for pieces in binding.values() for piece in pieces}
    found: UnitErrors = {unit_of[name].name: {} for name in sorted(names & unit_of.keys())}
    projected: Projected = {}
    assert choices.recipe.backbone_auto is not None
    for word in choices.recipe.backbone_auto.candidates:
        plan = choices.plan(choices.uniform(word))
        own = rebound(binding, plan)
        for served in served_rows(model, plan, own, path, input_scales(own, largest)):
            unit, rows = unit_of.get(served.tensor.name), served.rows
            if unit is None or unit.option(word).word != word:
                continue
            weight, inputs = (
                model.get_submodule(f"{path}{served.module}").weight.data[rows],
                seen[served.module],
            )
            through = rounding = None
            if SCHEMES[served.tensor.scheme].inputs is not None:
                key = served.module, rows.start
                if key not in projected:
                    projected[key] = _projected(inputs, rows, weight)
                through = projected[key]
                rounding = rounding_for(served.tensor.scheme, largest[served.module])
            error = _sum_of_squares(inputs, rows, weight, served.values, rounding, through)
            found[unit.name][word] = found[unit.name].get(word, 0.0) + error
    return found


def _projected(seen: Seen, rows: slice, weight: Tensor) -> list[Tensor]:
    """The gradients at one weight's inputs, a chunk at a time: the same for all words."""
    dtype = _dtype(weight)
    return [gradients[:, rows].to(dtype) @ weight.to(dtype) for _, gradients in _chunks(seen)]


def _sum_of_squares(
    seen: Seen,
    rows: slice,
    weight: Tensor,
    values: Tensor,
    rounding: Any,
    projected: list[Tensor] | None,
) -> float:
    """Over tokens, (g . d)^2 of one weight [N, K] that becomes `values`; `projected` where its
    inputs are rounded.
    """
    dtype = _dtype(weight)
    change_NK = (values.float() - weight.float()).to(dtype)
    total = 0.0
    for number, (inputs, gradients) in enumerate(_chunks(seen)):
        inputs_TK, gradients_TN = inputs.to(dtype), gradients[:, rows].to(dtype)
        rounded_TK = inputs_TK if rounding is None else rounding(inputs).to(dtype)
        moved_T = ((gradients_TN @ change_NK).float() * rounded_TK).sum(dim=-1)
        if projected is not None:
            moved_T += (projected[number].float() * (rounded_TK - inputs_TK)).sum(dim=-1)
        total += float(moved_T.double().square().sum())
    return total


def _dtype(weight: Tensor) -> torch.dtype:
    """Products of BF16 are slow on a CPU."""
    return torch.float32 if weight.device.type == "cpu" else weight.dtype


def _chunks(seen: Seen) -> Iterator[tuple[Tensor, Tensor]]:
    for inputs, gradients in zip(seen.inputs, seen.gradients, strict=True):
        yield from zip(inputs.split(_TOKENS_AT_ONCE), gradients.split(_TOKENS_AT_ONCE), strict=True)
