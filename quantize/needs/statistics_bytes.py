"""How large GPTQ's Hessians, AWQ's caches and sums of squared inputs of one layer are, counted from headers.

In: what a plan says of the layer's tensors. Out: bytes, for all of them together or for one turn of the experts.

Easy to get wrong: what counts is not modules but inputs. q, k and v read one tensor, and so do the gate and up
projections of all experts, unless each is calibrated on the tokens that the router sends it.

Source: calibrate/hessians.py and calibrate/awq.py; compared with what they hold in
tests/quantize/calibrate/test_bounded.py.
"""

from collections.abc import Iterable, Mapping

from ..plan.tensor_plan import TensorPlan

_F64, _F32, _BF16 = 8, 4, 2
_MLP = frozenset({"dense_mlp", "shared_experts", "experts"})
SECOND = ("down_proj", "w2")
"""How the projection of an MLP that reads what the first ones computed is called."""


def hessian_bytes(tensors: Iterable[TensorPlan], *, routed: bool = False, one_turn: bool = False) -> int:
    """Of the modules that GPTQ rewrites: K x K in F32 for each distinct input.

    Args:
        tensors: of one layer, or of the MTP block.
        routed: each expert reads its own tokens.
        one_turn: experts are taken in turns, one at a time.
    """
    shared: dict[object, int] = {}
    of_experts: dict[object, int] = {}
    for tensor in _rewritten(tensors):
        size = _F32 * tensor.shape[-1] ** 2
        if tensor.role == "experts" and (routed or _is_second(tensor)):
            # The first projections of an expert share an input.
            of_experts |= {(expert, _is_second(tensor)): size for expert in _experts(tensor)}
        elif tensor.role in _MLP and not _is_second(tensor):
            shared["input of the MLP", tensor.shape[-1]] = size
        else:
            shared[tensor.runtime] = size
    return sum(shared.values()) + _together(of_experts, one_turn)


def group_hessian_bytes(tensors: Iterable[TensorPlan]) -> int:
    """Of the modules whose scales modelopt's local-hessian sweeps: 16 x 16 in F32 for each 16 input channels."""
    return sum(
        _F32 * 16 * tensor.shape[-1] * (tensor.shape[0] * len(tensor.stacked) if tensor.stacked else 1)
        for tensor in _rewritten(tensors)
    )


def squares_bytes(tensors: Iterable[TensorPlan]) -> int:
    """Of the modules whose importance is summed: their input channels in F64, of all batches and of the present one."""
    return sum(2 * _F64 * output.shape[0] for tensor in tensors for output in tensor.importances)


def awq_cache_bytes(tensors: Iterable[TensorPlan], tokens: int, *, one_turn: bool = False) -> int:
    """What AWQ keeps on the host: the inputs of attention and MLP, and of each projection behind another one.

    Args:
        tensors: of one layer, or of the MTP block.
        tokens: of all batches of a process.
        one_turn: experts are taken in turns, one at a time.
    """
    shared: dict[object, int] = {}
    of_experts: dict[object, int] = {}
    for tensor in _rewritten(tensors):
        size = _BF16 * tokens * tensor.shape[-1]
        if tensor.role == "experts" and _is_second(tensor):
            of_experts |= dict.fromkeys(_experts(tensor), size)
        elif tensor.role in _MLP:
            shared[tensor.module if _is_second(tensor) else "input of the MLP"] = size
        else:
            shared[tensor.runtime] = size
    return sum(shared.values()) + _together(of_experts, one_turn)


def _together(of_experts: Mapping[object, int], one_turn: bool) -> int:
    return max(of_experts.values(), default=0) if one_turn else sum(of_experts.values())


def _rewritten(tensors: Iterable[TensorPlan]) -> list[TensorPlan]:
    return [tensor for tensor in tensors if tensor.calibrated == "weights"]


def _is_second(tensor: TensorPlan) -> bool:
    """Whether this is the projection of an MLP that reads what the first ones computed."""
    return tensor.module.endswith(SECOND)


def _experts(tensor: TensorPlan) -> list[object]:
    """The experts that have a part in this tensor."""
    if tensor.stacked:
        return [(tensor.module.rpartition(".")[0], expert) for expert in range(tensor.shape[0])]
    return [tensor.module.rpartition(".")[0]]
