"""torch.cuda of a GPU that is not there: its functions answer, and `device="cuda"` means the meta
device.

In: a `Device`. Out: nothing; torch is changed as long as the process runs.

Easy to get wrong: torch._dynamo refuses one function with two names, so each replacement is an
object of its own. A function mode also sees every `.shape`. So it is left while weights load
(`weights_only`), which halves the time; the account's dispatch mode maps devices there.
"""

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .stubs import refuse_dunder


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What vLLM asks a GPU about itself; shared memory is that of one block, by CUDA's programming
    guide.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    shared_memory_bytes: int = 227 << 10


# One GPU for each capability that vLLM 0.32 has kernels of its own for.
DEVICES = {
    "sm89": Device(
        name="NVIDIA L40S",
        capability=(8, 9),
        num_sms=142,
        memory_bytes=48 << 30,
        shared_memory_bytes=99 << 10,
    ),
    "sm90": Device(name="NVIDIA H200", capability=(9, 0), num_sms=132, memory_bytes=141 << 30),
    "sm100": Device(name="NVIDIA B200", capability=(10, 0), num_sms=148, memory_bytes=180 << 30),
    "sm120": Device(
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        capability=(12, 0),
        num_sms=188,
        memory_bytes=96 << 30,
        shared_memory_bytes=99 << 10,
    ),
}


def returns(value: Any) -> Any:
    """A new function that takes every argument and returns `value`."""
    return lambda *args, **kwargs: value


class Inert:
    """In place of a CUDA stream, event or graph: every method does nothing."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        refuse_dunder(name)
        return returns(None)

    def __enter__(self) -> "Inert":
        return self

    def __exit__(self, *exc: object) -> bool:
        return False


def install(device: Device) -> None:
    """Answer torch.cuda's and torch.accelerator's questions for `device`."""
    properties = types.SimpleNamespace(
        name=device.name,
        major=device.capability[0],
        minor=device.capability[1],
        total_memory=device.memory_bytes,
        multi_processor_count=device.num_sms,
        shared_memory_per_block_optin=device.shared_memory_bytes,
        shared_memory_per_multiprocessor=device.shared_memory_bytes
        + 1024,  # CUDA keeps 1 KiB for itself
        warp_size=32,
        L2_cache_size=50 << 20,
        uuid="pretended",
        is_integrated=False,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
    )
    memory = (device.memory_bytes, device.memory_bytes)
    for name in ("Stream", "Event", "ExternalStream", "CUDAGraph"):
        setattr(torch.cuda, name, type(name, (Inert,), {}))
    _answer(
        torch.cuda,
        is_initialized=True,
        _lazy_init=None,
        init=None,
        device_count=8,
        current_device=0,
        set_device=None,
        synchronize=None,
        empty_cache=None,
        manual_seed_all=None,
        get_device_properties=properties,
        get_device_capability=device.capability,
        get_device_name=device.name,
        mem_get_info=memory,
        memory_allocated=0,
        max_memory_allocated=0,
        memory_reserved=0,
        is_current_stream_capturing=False,
        current_stream=Inert(),
        default_stream=Inert(),
        stream=contextlib.nullcontext(),
        device=contextlib.nullcontext(),
        is_available=False,  # until vLLM is imported: Triton and others would look for a driver
    )
    _answer(
        torch.accelerator,
        current_accelerator=torch.device("cuda"),
        is_available=True,
        current_device_index=0,
        current_device_idx=0,
        device_count=8,
        empty_cache=None,
        synchronize=None,
    )
    torch.version.cuda = "13.0"
    _MODE.__enter__()


@contextlib.contextmanager
def weights_only() -> Iterator[None]:
    """Leave the function mode: inside, only operators see devices."""
    _MODE.__exit__(None, None, None)
    try:
        yield
    finally:
        _MODE.__enter__()


class _CudaIsMeta(torch.overrides.TorchFunctionMode):
    """Every device argument that names CUDA becomes the meta device, and so does pinned memory,
    which the GPU reads.

    Pinning a tensor that is there does nothing.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs = {**kwargs, "device": "meta"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False, "device": "meta"}
        if (
            func is torch.Tensor.to
            and len(args) > 1
            and not isinstance(args[1], int)
            and _is_cuda(args[1])
        ):
            args = (args[0], "meta", *args[2:])
        elif func is torch.Tensor.cuda:
            return args[0].to("meta")
        elif func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **kwargs)


_MODE = _CudaIsMeta()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda"))


def _answer(module: Any, **answers: Any) -> None:
    for name, answer in answers.items():
        setattr(module, name, returns(answer))
