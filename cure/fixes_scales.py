"""A fix of values that changes none: NVFP4 weights that vLLM fuses get one global scale, where that is exact.

In: a checkpoint's `RuntimeView`, and the proposal that its tensors are in. Out: new bytes for scales alone; and what
the value check finds in scales, as they are and as they would be.

Easy to get wrong: a block scale has eight bits. It takes a factor of two as long as it neither leaves E4M3's range nor
loses a bit below its smallest normal number. So the products of scales are compared, each of them; where one is
another, nothing is changed: vllm #54150 then needs another quantization.
"""

import math
import struct
from collections import defaultdict
from functools import partial

import torch

from ..checkpoints.safetensors_file import Entry
from ..checkpoints.values import read_tensor
from ..validate.check.reading import chosen, summaries
from ..validate.check.rules_values import objections
from ..validate.check.runtime_view import RuntimeView
from ..validate.facts.findings import Finding, errors_first, grouped
from .new_shards import as_it_was
from .proposal import Proposal

_DIVISOR, _FACTOR = "weight_global_scale", "weight_scale_2"
_Half = tuple[float, Entry, Entry]
"""One of the weights that share a global scale: its number, that tensor, and its block scales."""


def fused_scales_are_one(runtime: RuntimeView, proposal: Proposal) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """Gate and up, or q, k and v, with global scales that differ by a power of two: vllm #54150.

    Returns: what the value check finds in the scales of one value, as they are and after this.

    Raises:
        CheckpointError: a file ends early.
    """
    objected = [*objections(runtime, summaries(runtime, chosen(runtime, "scalars")))]
    groups: dict[str, list[_Half]] = defaultdict(list)
    for weight in runtime.weights.values():
        place, blocks = runtime.placed.get(weight.module), weight.parts.get("weight_scale")
        one = weight.parts.get(_DIVISOR) or weight.parts.get(_FACTOR)
        if place is None or not place.shares or blocks is None or one is None:
            continue
        if blocks.num_bytes and (one.dtype, math.prod(one.shape)) == ("F32", 1):
            groups[place.shares].append((float(read_tensor(proposal.source, one)), one, blocks))
    agree: set[str] = set()
    for halves in groups.values():
        if len({value for value, _, _ in halves}) > 1 and _have_one_scale(halves, proposal):
            agree |= {one.name for _, one, _ in halves}
    left = [each for each in objected if each.finding.rule != "fused-scales" or each.finding.where not in agree]
    return errors_first(grouped(objected)), errors_first(grouped(left))


def _have_one_scale(halves: list[_Half], proposal: Proposal) -> bool:
    """Give the scales of one fused module one of their own global scales; False where none is exact."""
    blocks = [as_it_was(entry).bytes_from(proposal.source) for _, _, entry in halves]
    for now, one, _ in halves:
        is_divisor = one.name.endswith(_DIVISOR)
        ways = [partial(_rescaled, is_divisor=is_divisor, was=was, now=now) for was, _, _ in halves]
        if not all(
            0 < was * now < math.inf
            and torch.equal(_products(rescale(data), is_divisor, now), _products(data, is_divisor, was))
            for (was, _, _), data, rescale in zip(halves, blocks, ways, strict=True)
        ):
            continue
        for (was, own, entry), rescale in zip(halves, ways, strict=True):
            if was != now:
                why = (
                    f"vLLM has one {own.name.rpartition('.')[2]} for the weights that it fuses; block scales and "
                    "global scale are written as the same products, each compared"
                )
                proposal.retensor(entry, as_it_was(entry), why, rescale)
                proposal.retensor(own, as_it_was(own), why, lambda data, now=now: struct.pack("<f", now))
        return True
    return False


def _products(blocks: bytes, is_divisor: bool, value: float) -> torch.Tensor:
    """What a weight's codes are multiplied by."""
    scales = torch.frombuffer(bytearray(blocks), dtype=torch.float8_e4m3fn).double()
    return scales / value if is_divisor else scales * value


def _rescaled(blocks: bytes, *, is_divisor: bool, was: float, now: float) -> bytes:
    """Block scales for another global scale."""
    products = _products(blocks, is_divisor, was)
    scales = products * now if is_divisor else products / now
    return scales.to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
