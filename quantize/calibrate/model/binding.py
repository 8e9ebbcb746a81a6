"""Which tensors on disk make up each parameter of a transformers module, and the other way round.

In: a module on the meta device (a decoder layer, an embedding, a norm), and the plan's tensors that
belong to it. Out: a `Binding`: parameter -> pieces on disk. Names follow transformers' own
conversion rules for the model's class; experts are single linears on the module's side, which is
how algorithms see them (`linear_experts`), one by one or stacked on disk.

Easy to get wrong: a loader that skips what it does not know calibrates a layer of noise. Here every
tensor is used exactly once and every parameter is filled, or the binding is refused and names the
tensor. And a gate may read constants of its experts (limits, slopes); the linear ones keep them.

Source: transformers 5.17 conversion_mapping.py and core_model_loading.py (WeightRenaming,
WeightConverter).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, cast

import torch
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter, WeightTransform

from ....recipes.errors import CheckpointError
from ....recipes.family import HFName
from ....recipes.frozen import frozen
from ...pack.unit import load, load_rows
from ...plan.plan import Plan
from ...plan.tensor_plan import TensorPlan

# What families call the projections of one expert, and what llm-compressor's linear experts do.
_EXPERT_LINEARS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
EXPERT = re.compile(r"^(?P<stack>.*\bexperts)\.(?P<expert>\d+)\.(?P<linear>\w+)\.(?P<leaf>\w+)$")
_DATA_FREE = "Use a data-free scheme for this model (`keepmtp ls models`)"
_IN_LAYER = re.compile(r"^(?:.*?\.)??layers\.\d+\.")


@frozen
class Piece:
    """A tensor of the plan, or a part of it.

    Attributes:
        tensor: what the plan says of it.
        expert: index into the first dimension of a stacked parameter.
        part: which of the stacked projections of that expert.
    """

    tensor: TensorPlan
    expert: int | None = None
    part: int = 0

    @property
    def module(self) -> HFName:
        """The module's name on disk, in the finished checkpoint where it is quantized."""
        if self.expert is None or self.tensor.fate != "quantize":
            return self.tensor.module
        outputs = self.tensor.outputs
        per_matrix = len(outputs) // (self.tensor.shape[0] * len(self.tensor.stacked))
        first = outputs[(self.expert * len(self.tensor.stacked) + self.part) * per_matrix]
        return HFName(first.name.rpartition(".")[0])


def scheme_of(piece: Piece) -> str:
    """The scheme a linear is rounded to by this run; "" for what is carried over."""
    if piece.tensor.fate != "quantize":
        return ""
    return piece.tensor.scheme


# Parameter or buffer of a module -> its pieces, to be concatenated along the first dimension.
Binding = Mapping[str, tuple[Piece, ...]]


@frozen
class Names:
    """How one model class renames what is on disk."""

    transforms: tuple[WeightTransform, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Names":
        return cls(transforms=tuple(get_model_conversion_mapping(model)))

    def rename(self, name: str) -> tuple[str, int]:
        """The parameter a tensor on disk goes to, and its turn where several are concatenated.

        Raises:
            CheckpointError: the class converts the values too, in a way that is not undone here.
        """
        for transform in self.transforms:
            if not isinstance(transform, WeightConverter):
                name, _ = transform.rename_source_key(name)
        for transform in self.transforms:
            if not isinstance(transform, WeightConverter) or ".experts." in name:
                continue
            renamed, pattern = transform.rename_source_key(name)
            if pattern is None:
                continue
            for step in transform.operations:
                if not isinstance(step, Concatenate) or step.dim:
                    raise CheckpointError(
                        name,
                        "only concatenation can be undone after calibration",
                        got=type(step).__name__,
                        cure=_DATA_FREE,
                    )
            return renamed, transform.source_patterns.index(pattern)
        return name, 0

    def in_layer(self, name: str) -> tuple[str, int]:
        """The same, as a path inside the decoder layer."""
        renamed, turn = self.rename(name)
        return _IN_LAYER.sub("", renamed), turn


def linear_experts(model: Any) -> None:
    """Replaces experts stored as 3-D stacks by one linear layer each, on the meta device, in place.

    Raises: CheckpointError where an expert module has a constructor or a forward of its own (Llama
    4).
    """
    for name, module in get_non_linearized_moes(model):
        experts_class: Any = LinearExperts2D.get_linear_experts_cls(cast(Any, type(module)))
        own = experts_class.__init__, experts_class.forward
        if own != (LinearExperts2D.__init__, LinearExperts2D.forward):
            raise CheckpointError(
                name,
                "experts must have the common layout to be calibrated",
                got=type(module).__name__,
                cure="Use a data-free scheme for this model",
            )
        with torch.device("meta"):
            linear = experts_class(getattr(module, "config", model.config))
        for key, value in vars(module).items():
            if isinstance(value, int | float) and not hasattr(linear, key):
                setattr(linear, key, value)
        model.set_submodule(name, linear)


def bind(
    module: nn.Module,
    tensors: Iterable[TensorPlan],
    path_of: Callable[[HFName], tuple[str, int]],
    where: str,
) -> Binding:
    """Match a module's parameters with tensors on disk, one to one.

    Args:
        module: on any device; experts already single linears.
        tensors: everything on disk that belongs to it.
        path_of: a tensor's path inside the module, and its turn among those of the same path.
        where: how messages name the checkpoint.

    Raises:
        CheckpointError: a tensor without a parameter, or a parameter without a tensor, by name.
    """
    state = module.state_dict()
    owner = f"transformers' {type(module).__name__}"
    turned: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for tensor in tensors:
        path, turn = path_of(tensor.name)
        for target, piece in _targets(path, tensor, state):
            if target not in state:
                raise CheckpointError(
                    where,
                    f"{owner} must have a parameter for {tensor.name}",
                    got=f"none called {target}",
                    cure=_DATA_FREE,
                )
            turned[target].append((turn, piece))
    for target in state.keys() - turned.keys():
        raise CheckpointError(
            where,
            f"every parameter of {owner} must be on disk",
            got=f"nothing for {target}",
            cure=f"Check the download. {_DATA_FREE}",
        )
    binding = {}
    for target, pieces in turned.items():
        pieces.sort(key=itemgetter(0))
        binding[target] = tuple(piece for _, piece in pieces)
    return binding


def _targets(path: str, tensor: TensorPlan, state: Mapping[str, Tensor]) -> list[tuple[str, Piece]]:
    """The parameters a tensor fills: many for stacked experts, one otherwise."""
    if tensor.stacked:
        stack = path
        # Whatever the parameter is called on disk, a layer has one stack of experts.
        for name in state:
            parts = EXPERT.match(name)
            if parts is not None:
                stack = parts["stack"]
                break
        targets = []
        for expert in range(tensor.shape[0]):
            for part, linear in enumerate(tensor.stacked):
                piece = Piece(tensor=tensor, expert=expert, part=part)
                targets.append((f"{stack}.{expert}.{linear}.weight", piece))
        return targets
    parts = EXPERT.match(path)
    if parts is not None:
        linear = _EXPERT_LINEARS.get(parts["linear"], parts["linear"])
        path = f"{parts['stack']}.{parts['expert']}.{linear}.{parts['leaf']}"
    return [(path, Piece(tensor=tensor))]


def fill(
    module: nn.Module,
    binding: Binding,
    plan: Plan,
    *,
    device: torch.device,
    dtype_of: Callable[[str, Tensor, Tensor], torch.dtype],
) -> None:
    """Give a module its weights, dequantized, in place of its parameters.

    Args:
        module: what `binding` was made for.
        binding: from `bind`.
        plan: over a local source.
        device: where the weights go.
        dtype_of: the dtype a parameter is computed in, given its name, the parameter before, and
            the value on disk.

    Raises:
        CheckpointError: a shape on disk is not the parameter's.
    """
    state = module.state_dict()
    values = {}
    last: tuple[object, Sequence[Tensor]] = None, ()
    for name, pieces in binding.items():
        parts = []
        for piece in pieces:
            if piece.expert is None:
                parts.append(load(plan, piece.tensor, device))
                continue
            # Those of one expert in a stack follow each other, and are read together.
            key = piece.tensor.name, piece.expert
            if key != last[0]:
                rows = load_rows(plan, piece.tensor, piece.expert, piece.expert + 1, device)
                last = key, rows[0].chunk(len(piece.tensor.stacked))
            parts.append(last[1][piece.part])
        value = parts[0]
        if len(parts) > 1:
            value = torch.cat(parts)
        if value.shape != state[name].shape:
            raise CheckpointError(
                plan.source.where,
                f"{pieces[0].tensor.name} must have shape {list(state[name].shape)}",
                got=list(value.shape),
                cure="Check config.json",
            )
        values[name] = value.to(device=device, dtype=dtype_of(name, state[name], value))
    module.load_state_dict(values, strict=True, assign=True)
