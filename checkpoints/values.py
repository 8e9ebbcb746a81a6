"""Reads tensors of a checkpoint into PyTorch, and cuts the rows of a large one into pieces.

In: an opened checkpoint, or bytes of it. Out: tensors on the CPU, in the dtype that the file names.

Easy to get wrong: only this module and `dequantize.py` may import torch. Commands that read headers
alone run without it, so `source.py` and `safetensors_file.py` must not need it.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..recipes.conventions import Change
from ..recipes.errors import CheckpointError
from .safetensors_file import Entry
from .source import Source, read, view_of

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""A safetensors dtype -> PyTorch's; the same dtypes as in `recipes.schemes.DTYPE_BITS`."""

# Elements worked on at a time. On a CPU enough to hide 2 us of overhead a call and little enough to
# stay in the cache: 128 Ki to 1 Mi are within 30 % of each other, 64 Ki takes twice as long. A GPU
# wants long kernels.
_CHUNK_CPU = 512 * 1024
_CHUNK_GPU = 32 * 1024 * 1024


def read_tensor(source: Source, entry: Entry) -> Tensor:
    """One tensor of a local source.

    Raises:
        CheckpointError: its file ends early.
    """
    return typed(read_bytes(source, entry), entry.dtype, entry.shape)


def read_parts(source: Source, parts: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors that a weight is stored as, by the last component of their names."""
    return {leaf: read_tensor(source, entry) for leaf, entry in parts.items()}


def read_bytes(
    source: Source, entry: Entry, *, offset: int = 0, length: int | None = None
) -> Tensor:
    """A tensor's bytes from `offset` on, as U8; not zeroed first, which would take as long as
    reading them.
    """
    if length is None:
        length = entry.num_bytes - offset
    raw = torch.empty(length, dtype=torch.uint8)
    read(source, entry, raw.numpy().data, offset=offset)
    return raw


def typed(raw: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Raw bytes as a tensor of a safetensors dtype."""
    return raw.view(TORCH_DTYPES[dtype]).reshape(shape)


def row_ranges(weight: Tensor, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Row ranges of a matrix [N, K] that make up about one chunk each, starting at multiples of
    `multiple`.
    """
    num_rows, num_columns = weight.shape
    elements = _CHUNK_GPU
    if weight.device.type == "cpu":
        elements = _CHUNK_CPU
    step = max(1, elements // max(1, num_columns * multiple)) * multiple
    for first in range(0, num_rows, step):
        yield first, min(first + step, num_rows)


def changed(value: Tensor, change: Change, dtype: torch.dtype) -> Tensor:
    """A scale in the other convention (`recipes.conventions`): 1 / x in F32, correctly rounded, or
    another dtype.
    """
    if change == "reciprocal":
        return 1.0 / value.float()
    return value.to(dtype)


def refuse_other_norms(source: Source) -> None:
    """Refuse groups of donors that were made for other norms than the checkpoint has.

    Raises:
        CheckpointError: names the norm; or see `source.read`.
    """
    view = view_of(source)
    donors = dict[tuple[str, str], Source]()
    for group, donor in source.donors.items():
        if group != "mtp":  # which has norms of its own
            donors[donor.where, donor.revision] = donor
    for donor in donors.values():
        for name, entry in source.entries.items():
            place = view.place(name)
            is_norm = place is not None and (place.part, place.role) == ("backbone", "norm")
            if not is_norm or name not in donor.entries:
                continue
            ours = read_tensor(source, entry).to(torch.bfloat16)  # some tools write F32
            if not torch.equal(ours, read_tensor(donor, donor.entries[name]).to(torch.bfloat16)):
                raise CheckpointError(
                    f"{donor.where}: {name}",
                    f"a donor must have the norms of {source.where}",
                    got="other values, as where a tool moves scale from a norm into weights",
                    cure="Name another build of the model",
                )
