"""A pretended CUDA platform: vLLM builds and loads its CUDA model classes on a machine without a
GPU, and `device="cuda"` means the meta device.

In: a `Device`, before anything of vLLM but `vllm.platforms` is imported. Out: a process in which
`current_platform` is CUDA of that capability, and torch.cuda's functions answer.

Easy to get wrong: many modules read the capability when they are imported. So each capability needs
a process of its own, and the platform must be set before the first of these imports. torch._dynamo
refuses one function with two names, so each replacement is an object of its own. A function mode
also sees every `.shape`. So it is left while weights load (`weights_only`), which halves the time;
the account's dispatch mode maps devices there. It runs under
vLLM 0.31.0 to 0.33.0.
"""

import contextlib
import enum
import importlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import stubs
from .stubs import refuse_dunder


@dataclass(frozen=True, slots=True)
class Device:
    """What vLLM asks a GPU about itself; shared memory is that of one block, by CUDA's programming
    guide.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    shared_memory_bytes: int = 227 << 10


# One GPU for each capability that vLLM has kernels or limits of its own for.
DEVICES = {
    "sm80": Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 80 << 30, 163 << 10),
    "sm86": Device("NVIDIA GeForce RTX 3090", (8, 6), 82, 24 << 30, 99 << 10),
    "sm89": Device("NVIDIA L40S", (8, 9), 142, 48 << 30, 99 << 10),
    "sm90": Device("NVIDIA H200", (9, 0), 132, 141 << 30),
    "sm100": Device("NVIDIA B200", (10, 0), 148, 180 << 30),
    "sm120": Device(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 188, 96 << 30, 99 << 10
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


def _answer_for(device: Device) -> None:
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
        if func is torch.Tensor.to:
            if len(args) > 1 and not isinstance(args[1], int) and _is_cuda(args[1]):
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
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int)


def _answer(module: Any, **answers: Any) -> None:
    for name, answer in answers.items():
        setattr(module, name, returns(answer))


def install(device: Device) -> None:
    """Pretend `device`. Call it once, before the rest of vLLM is imported."""
    import vllm
    from vllm import platforms

    is_cuda_wheel = any(Path(vllm.__path__[0]).glob("_C_stable*"))
    let_operators_appear = returns(None)
    if not is_cuda_wheel:
        stubs.install_packages()
        major, minor = device.capability
        let_operators_appear = stubs.install_operators(major * 10 + minor)
    _answer_for(device)
    platforms.vllm_version_matches_substr = lambda substr: (
        substr in "cuda"
    )  # this build's version ends in +cpu
    platforms._current_platform = _platform()
    _activate_triton(device)
    import vllm._custom_ops  # registers fakes for the operators that exist; only then may all exist

    let_operators_appear()
    if is_cuda_wheel:
        # A table on the host, seen from the GPU; it has no kernel for tensors without bytes.
        torch.library.impl("_C::get_cuda_view_from_cpu_tensor", "Meta", torch.empty_like)
    else:
        _answer_for_libraries()
    # vLLM inspects each architecture in a second Python (20 to 40 s each) and caches the result of
    # the CPU build.
    from vllm.model_executor.model_loader import utils
    from vllm.model_executor.models import registry

    _answer(utils, record_metadata_for_reloading=None)  # of weights that change while it serves
    registry._run_in_subprocess = lambda look: look()
    _answer(
        registry._LazyRegisteredModel,
        _load_modelinfo_from_cache=None,
        _save_modelinfo_to_cache=None,
    )


def _answer_for_libraries() -> None:
    """vLLM asks kernel libraries for names, numbers, tables and files, and a stub has none."""
    from vllm.utils import flashinfer, import_utils
    from vllm.vllm_flash_attn import flash_attn_interface

    _answer(
        import_utils,
        has_deep_gemm=True,
        has_cutedsl=True,
        has_tilelang=True,
        has_triton_kernels=True,
    )
    flash_attn_interface.FA4_AVAILABLE = True
    kinds = ("dense", "indexed", "grouped_contiguous", "grouped_masked")
    humming = importlib.import_module("humming.config")
    humming.GemmType = enum.Enum("GemmType", [(kind.upper(), kind) for kind in kinds])
    # 0.33 makes a buffer of that size with every layer of attention on sm100.
    sizes = importlib.import_module("flashinfer.utils")
    sizes.get_trtllm_gen_multi_ctas_kv_counter_bytes = returns(1)
    _answer(
        flashinfer,
        has_flashinfer_sparse_mla_sm120_config=True,
        has_flashinfer_sm90_nope_mla=True,
    )


def _platform() -> Any:
    """vLLM's own, which asks torch.cuda about the device."""
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    answers = {
        "is_fully_connected": True,
        "device_count": 8,
        "set_device": None,
        "is_pin_memory_available": True,  # pinning itself does nothing here
        "get_device_communicator_cls": (
            "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
        ),
    }
    attributes: dict[str, Any] = {"dist_backend": "fake"}
    for name, answer in answers.items():
        attributes[name] = classmethod(returns(answer))
    return type("PretendedCuda", (NonNvmlCudaPlatform,), attributes)()


def _activate_triton(device: Device) -> None:
    """Let vLLM see one active Triton driver: kernels are real functions, never compiled.

    Without it Model Runner V2 is off and modules that size their kernels while they are imported
    fail.
    """
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    for name, backend in backends.items():
        if backend.driver is not None:
            backend.driver.is_active = staticmethod(returns(name == "nvidia"))
    limits = {
        "max_shared_mem": device.shared_memory_bytes,
        "multiprocessor_count": device.num_sms,
        "warpSize": 32,
        "max_num_regs": 65536,
    }
    major, minor = device.capability
    pretended = Inert()
    pretended.utils = types.SimpleNamespace(get_device_properties=returns(limits))
    _answer(
        pretended,
        get_current_target=GPUTarget("cuda", major * 10 + minor, 32),
        get_current_device=0,
        get_benchmarker=returns([0.0]),
    )
    driver.set_active(pretended)
