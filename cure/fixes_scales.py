"""A fix of values that changes none: NVFP4 weights that vLLM fuses get one global scale, where that is exact.

In: a `Checked`, and the proposal that its tensors are in. Out: new bytes for scales alone; and what the value check
finds in scales, as they are and as they would be.

Easy to get wrong: a block scale has eight bits. It takes a factor of two as long as it neither leaves E4M3's range nor
loses a bit below its smallest normal number; so each code that is used must have a code with exactly the other value,
and `code * global scale` is compared for all of them. Where one has none, nothing is changed: vllm #54150 then needs
another quantization.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from ..checkpoints.safetensors_file import Entry
from ..validate.check.check import Checked
from ..validate.check.reading import chosen as read_by
from ..validate.check.reading import summaries
from ..validate.check.runtime_view import RuntimeView
from ..validate.check.values import objections
from ..validate.facts.findings import Finding, Objection, errors_first, grouped
from .new_shards import NewTensor
from .proposal import Edit, Proposal, Retensor

_DIVISOR, _FACTOR = "weight_global_scale", "weight_scale_2"


class _Half(NamedTuple):
    """One of the weights that share a global scale: its number, its scales, and the codes of its block scales."""

    value: float
    leaf: str
    one: Entry
    blocks: Entry
    codes: bytes


def _e4m3(code: int) -> float:
    """The number of a byte in FP8 E4M3 (no infinity; 0x7f is not a number)."""
    sign, power, rest = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if power == 15 and rest == 7:
        return math.nan
    return sign * (math.ldexp(rest / 8, -6) if power == 0 else math.ldexp(1 + rest / 8, power - 7))


NUMBERS = tuple(map(_e4m3, range(256)))
_CODES: Mapping[float, int] = {number: code for code, number in reversed([*enumerate(NUMBERS)])}


def fused_scales_are_one(checked: Checked, proposal: Proposal) -> Iterator[Edit]:
    """Gate and up, or q, k and v, with global scales that differ by a power of two: vllm #54150."""
    runtime = checked.runtime
    if runtime is None or proposal.source.folder is None:
        return
    groups: dict[str, list[_Half]] = defaultdict(list)
    for weight in runtime.weights.values():
        place = runtime.placed.get(weight.module)
        leaf = next((leaf for leaf in (_DIVISOR, _FACTOR) if leaf in weight.parts), "")
        if place is not None and place.shares and leaf:
            one, blocks = weight.parts[leaf], weight.parts["weight_scale"]
            (value,) = struct.unpack("<f", proposal.bytes_of(one.name))
            groups[place.shares].append(_Half(value, leaf, one, blocks, b""))
    for halves in groups.values():
        if len({half.value for half in halves}) > 1:
            yield from _one_scale(halves, proposal)


def findings_in_scales(checked: Checked, edits: Collection[Edit]) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    """What the value check finds in the scales of one value: as they are, and after these edits.

    Raises:
        CheckpointError: a file ends early.
    """
    runtime = checked.runtime
    if runtime is None or runtime.source.folder is None:
        return (), ()
    shares = _shares(runtime)
    agreed = {shares.get(edit.name) for edit in edits if isinstance(edit, Retensor)}

    def stays(objected: Objection) -> bool:
        rule, where = objected.finding.rule, objected.finding.where
        return rule != "fused-scales" or where not in shares or shares[where] not in agreed

    objected = [*objections(runtime, summaries(runtime, read_by(runtime, "scalars")))]
    return errors_first(grouped(objected)), errors_first(grouped(filter(stays, objected)))


def _shares(runtime: RuntimeView) -> dict[str, str]:
    """The fused module of each global scale that vLLM has one of for several weights."""
    found: dict[str, str] = {}
    for weight in runtime.weights.values():
        place = runtime.placed.get(weight.module)
        if place is not None and place.shares:
            found |= {weight.parts[leaf].name: place.shares for leaf in (_DIVISOR, _FACTOR) if leaf in weight.parts}
    return found


def _one_scale(halves: list[_Half], proposal: Proposal) -> Iterator[Edit]:
    """The scales of one fused module with one of their own global scales for all; nothing where none is exact."""
    halves = [half._replace(codes=proposal.bytes_of(half.blocks.name)) for half in halves]
    for chosen in halves:
        tables = [_table(half, chosen.value) for half in halves]
        if all(table is not None for table in tables):
            for half, table in zip(halves, tables, strict=True):
                if half.value != chosen.value and table is not None:
                    yield from _edits(half, chosen.value, table)
            return


def _table(half: _Half, value: float) -> bytes | None:
    """For each code of a block scale the one that gives the same products with another global scale; None if none."""
    factor = value / half.value if half.leaf == _DIVISOR else half.value / value
    if not (math.isfinite(factor) and factor > 0):
        return None
    table = bytearray(range(256))
    for code in set(half.codes):
        new = _CODES.get(NUMBERS[code] * factor)
        if new is None or _product(half.leaf, new, value) != _product(half.leaf, code, half.value):
            return None
        table[code] = new
    return bytes(table)


def _product(leaf: str, code: int, value: float) -> float:
    return NUMBERS[code] / value if leaf == _DIVISOR else NUMBERS[code] * value


def _edits(half: _Half, value: float, table: bytes) -> Iterator[Edit]:
    why = (
        f"vLLM has one {half.leaf} for the weights that it fuses; block scales and global scale are written as the "
        "same products, compared for every code"
    )
    for entry, convert in (
        (half.blocks, lambda data: data.translate(table)),
        (half.one, lambda data: struct.pack("<f", value)),
    ):
        new = NewTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=b"")
        yield Retensor(name=entry.name, new=new, why=why, convert=convert)
