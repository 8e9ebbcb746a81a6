"""What a load finds around it: one rank of a tensor-parallel world whose other ranks do not exist,
and the tensors of safetensors files, as headers alone.

In: vLLM's config, a TP size and a rank. Out: vLLM's process groups with torch's fake backend, which
answers for the other ranks. In: safetensors files; the data after a header may be a hole. Out:
(name, tensor) pairs in the files' order, on the meta device; no data is read.
"""

import functools
import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import gpu

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


def init(config: Any, *, tp: int, rank: int) -> None:
    """Become rank `rank` of `tp`. Call it once in a process."""
    import vllm.distributed.parallel_state as state
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    torch.distributed.init_process_group(
        backend="fake", store=FakeStore(), rank=rank, world_size=tp
    )
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda ranks=None, *args, **kwargs: new_group(
        ranks, backend="fake"
    )
    coordinate = state.GroupCoordinator.__init__

    @functools.wraps(coordinate)
    def without_message_queue(self: Any, *args: Any, **kwargs: Any) -> None:
        coordinate(self, *args, **{**kwargs, "use_message_queue_broadcaster": False})

    state.GroupCoordinator.__init__ = without_message_queue  # type: ignore[method-assign]
    state._node_count = gpu.returns(1)
    with set_current_vllm_config(config):
        state.init_distributed_environment(tp, rank, "env://", rank, "fake")
        state.initialize_model_parallel(tp, 1)
    init_workspace_manager(torch.device("cuda"))


def meta_tensors(files: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `files`, in vLLM's order: by file name, then as in the header."""
    for path in sorted(files):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        # A whole file at once: the account need not see how 130,000 tensors are made.
        tensors = dict[str, torch.Tensor]()
        with _disable_current_modes():
            for name, entry in header.items():
                dtype = DTYPES[entry["dtype"]]
                tensors[name] = torch.empty(entry["shape"], dtype=dtype, device="meta")
        yield from tensors.items()
