"""The rule on matrices whose rows are not in the order that vLLM computes with.

In: a `RuntimeView`. Out: objections.

Easy to get wrong: headers cannot tell whether somebody has put the rows of a plain `qkv_proj` in order. vLLM's target
reads such a matrix as [q; k; v]; its draft cuts it by rank, which is right for one rank only.
"""

from collections.abc import Iterator

from ...checkpoints.stored import FP8
from ..facts.findings import Objection, objection
from .runtime_view import Member, Module, RuntimeView

_CURE = "Store q_proj, k_proj and v_proj in three tensors, as `keepmtp quantize` writes them from the release"


def interleaved_rows_are_put_in_order(runtime: RuntimeView) -> Iterator[Objection]:
    """q, k and v in one tensor, as in MiMo-V2.5, load right in the release's own FP8 only: vllm #42803, #57508."""
    for module in runtime.modules:
        for member in module.members:
            if member.place.row.interleaved and not is_put_in_order(module, member):
                yield _objection(module, member)


def is_put_in_order(module: Module, member: Member) -> bool:
    """Whether vLLM computes the order of the rows: FP8 with `weight_scale_inv`, built as that form."""
    has_leaves = {"weight", "weight_scale_inv"} == set(member.weight.parts) == module.resolution.built.leaves
    return bool(member.place.row.interleaved) and has_leaves and member.weight.weight.dtype in FP8


def _objection(module: Module, member: Member) -> Objection:
    weight = member.weight.parts.get("weight")
    is_lost = weight is not None and weight.dtype == "F8_E4M3"
    return objection(
        rule="rows",
        severity="error" if is_lost else "warning",
        where=member.weight.weight.name,
        says=(
            "holds q, k and v in FP8, which vLLM 0.32 loads only with a weight_scale_inv that its parameter has too: "
            "without one it waits for it, and never loads the weight"
            if is_lost
            else "holds q, k and v in one tensor: vLLM 0.32's target reads it as [q; k; v], and its draft cuts it by "
            "rank (vllm #42803). The release's rows are in another order"
        ),
        cure=_CURE,
        cause=f"{module.part} {is_lost}",
    )


RULES = (interleaved_rows_are_put_in_order,)
