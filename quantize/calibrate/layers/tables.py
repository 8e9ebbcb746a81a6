"""Embedding and head as a server has them, where a recipe packs them.

In: a skeleton, and which stream is run. Out: a context, in which the model looks rows up and
multiplies by the values that are read back from the bytes of the finished checkpoint, and the head
rounds its inputs.

Easy to get wrong: the released model has its own embedding and head, in the same module. So each
use says whose stream it computes.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor, nn

from ....recipes.schemes import SCHEMES
from ...pack.unit import packed_groups
from ...plan.tensor_plan import TensorPlan
from ..model.skeleton import NoHead, Skeleton
from ..model.states import Stream
from .activations import rounded_inputs
from .served import InMemory, decompressed

_OF_A_SERVER: tuple[Stream, ...] = ("served", "mtp")


@contextmanager
def served_tables(skeleton: Skeleton, stream: Stream) -> Iterator[None]:
    """Gives the model its served embedding and head where a server computes the stream."""
    modules: dict[str, Any] = {"embedding": skeleton.model.get_input_embeddings()}
    head: Any = skeleton.model.get_output_embeddings()
    if not isinstance(head, NoHead):
        modules["head"] = head
    with ExitStack() as stack:
        for tensor in skeleton.packed_tables():
            module = modules.get(tensor.role)
            if module is None or stream not in _OF_A_SERVER:
                continue
            if tensor.name not in skeleton.served:
                skeleton.served[tensor.name] = _served(skeleton, tensor, module.weight)
            stack.callback(setattr, module, "weight", module.weight)
            module.weight = nn.Parameter(skeleton.served[tensor.name], requires_grad=False)
            if tensor.role == "head":
                group = SCHEMES[tensor.scheme].config_group()
                module.quantization_scheme = QuantizationScheme(targets=[], **group)
                stack.callback(delattr, module, "quantization_scheme")
                stack.enter_context(rounded_inputs([module]))
        yield


def _served(skeleton: Skeleton, tensor: TensorPlan, weight: Tensor) -> Tensor:
    """The values [N, K] of a table in the finished checkpoint."""
    (group,) = packed_groups(skeleton.plan, [tensor], InMemory(), device=weight.device)
    (packed,) = group
    return decompressed(SCHEMES[tensor.scheme], packed, weight.shape).to(weight.dtype)
