"""Embedding and head as a server has them, where a recipe packs them; and a head's input scale.

In: a skeleton, and which stream is run. Out: a context, in which the model looks rows up and
multiplies by the values that are read back from the bytes of the finished checkpoint, and the head
rounds its inputs.

Easy to get wrong: the released model has its own embedding and head, in the same module. So each
use says whose stream it computes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn

from ....recipes.family import HFName
from ....recipes.schemes import SCHEMES
from ...pack.unit import from_source, packed_groups
from ...plan.tensor_plan import TensorPlan
from ..model.batches import Batches
from ..model.binding import Piece
from ..model.skeleton import NoHead, Skeleton
from ..model.states import Stream
from .activations import rounded_inputs
from .layer import Calibrated, calibrate
from .served import InMemory, decompressed
from .work import LayerWork

_OF_A_SERVER: tuple[Stream, ...] = ("served", "mtp")


@contextmanager
def served_tables(skeleton: Skeleton, stream: Stream) -> Iterator[None]:
    """Gives the model its served embedding and head where a server computes the stream."""
    modules: dict[str, Any] = {"embedding": skeleton.model.get_input_embeddings()}
    head: Any = skeleton.model.get_output_embeddings()
    if not isinstance(head, NoHead):
        modules["head"] = head
    with ExitStack() as stack:
        for tensor in skeleton.plan.packed_tables:
            module = modules.get(tensor.role)
            if module is None or stream not in _OF_A_SERVER:
                continue
            if tensor.name not in skeleton.served:
                skeleton.served[tensor.name] = _served(skeleton, tensor, module.weight)
            stack.callback(setattr, module, "weight", module.weight)
            module.weight = nn.Parameter(skeleton.served[tensor.name], requires_grad=False)
            if tensor.role == "head":
                group = SCHEMES[tensor.scheme].config_group()
                attributes: dict[str, Any] = {}
                attributes["quantization_scheme"] = QuantizationScheme(targets=[], **group)
                for spec in SCHEMES[tensor.scheme].extra:
                    scale = HFName(f"{tensor.module}.{spec.suffix}")
                    attributes[spec.suffix] = skeleton.given[scale]
                for name, value in attributes.items():
                    setattr(module, name, value)
                    stack.callback(delattr, module, name)
                stack.enter_context(rounded_inputs([module]))
        yield


def _served(skeleton: Skeleton, tensor: TensorPlan, weight: Tensor) -> Tensor:
    """The values [N, K] of a table in the finished checkpoint."""
    given = InMemory(skeleton.given)
    read = from_source(skeleton.plan, weight.device)
    (group,) = packed_groups(skeleton.plan, [tensor], given, device=weight.device, read=read)
    (packed,) = group
    scheme = SCHEMES[tensor.scheme]
    return decompressed(scheme, packed, weight.shape).to(weight.dtype)


def calibrate_head(
    skeleton: Skeleton, head: TensorPlan, batches: Batches
) -> tuple[LayerWork, Calibrated]:
    """Let an observer look at what the last layer hands on to the head.

    Args:
        skeleton: while its model has no head.
        head: what the plan says of it.
        batches: of the calibration text, after the last layer.
    """
    work = LayerWork.of(skeleton.plan, {"0.weight": (Piece(tensor=head),)})
    # An algorithm that rewrites layers rewrites no head.
    work = replace(work, algorithm="minmax", knobs={})
    states = _states_before(batches)
    with skeleton.head():
        # The observed one is thrown away with what is hung on it. llm-compressor takes it for no
        # head, which it would leave out.
        observed: Any = deepcopy(skeleton.model.get_output_embeddings())
        alone: Any = nn.Sequential(observed)
        alone.config = skeleton.model.config
    return work, calibrate(alone, states, work)


def _states_before(batches: Batches) -> Iterator[dict[str, Tensor]]:
    """What a head would be handed of each batch."""
    for arguments in batches:
        with torch.no_grad():
            output = batches.skeleton.model(**arguments, use_cache=False)
        yield {"input": output.logits}
