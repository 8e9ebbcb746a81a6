"""Safetensors headers as meta tensors.

In: safetensors files; the data after a header may be a hole. Out: (name, tensor) pairs in the
files' order, on the meta device; no data is read.
"""

import json
import struct
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.uint8,
}


def meta_tensors(files: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `files`, in vLLM's order: by file name, then as in the header."""
    for path in sorted(files):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        with (
            _disable_current_modes()
        ):  # a whole file at once: the account need not see how 130,000 tensors are made
            tensors = [
                torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")
                for entry in header.values()
            ]
        yield from zip(header, tensors, strict=True)
