"""A pretended CUDA platform: vLLM builds and loads its CUDA model classes on a machine without a
GPU.

In: a `Device`, before anything of vLLM but `vllm.platforms` is imported. Out: a process in which
`current_platform` is CUDA of that capability.

Easy to get wrong: many modules read the capability when they are imported. So each capability needs
a process of its own, and the platform must be set before the first of these imports. Written
against vLLM 0.32.0.
"""

import types
from typing import Any

import torch

from . import cuda, stubs


def install(device: cuda.Device) -> None:
    """Pretend `device`. Call it once, before the rest of vLLM is imported."""
    from vllm import platforms

    stubs.install_packages()
    major, minor = device.capability
    let_operators_appear = stubs.install_operators(major * 10 + minor)
    cuda.install(device)
    platforms.vllm_version_matches_substr = lambda substr: (
        substr in "cuda"
    )  # this build's version ends in +cpu
    platforms._current_platform = _platform(device)
    _activate_triton(device)
    import vllm._custom_ops  # noqa: F401  registers fakes for the operators that exist; only then may all exist

    let_operators_appear()
    _let_vllm_find_its_packages()
    _look_at_classes_in_this_process()


def _platform(device: cuda.Device) -> Any:
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*device.capability)
    answers = {
        "get_device_capability": capability,
        "get_device_name": device.name,
        "num_compute_units": device.num_sms,
        "get_device_total_memory": device.memory_bytes,
        "is_fully_connected": True,
        "device_count": 8,
        "is_integrated_gpu": False,
        "set_device": None,
        "is_pin_memory_available": True,  # pinning itself does nothing here
        "get_device_communicator_cls": (
            "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
        ),
    }
    methods = {name: classmethod(cuda.returns(answer)) for name, answer in answers.items()}
    return type("PretendedCuda", (NonNvmlCudaPlatform,), {"dist_backend": "fake", **methods})()


def _activate_triton(device: cuda.Device) -> None:
    """Let vLLM see one active Triton driver: kernels are real functions, never compiled.

    Without it Model Runner V2 is off and modules that size their kernels while they are imported
    fail.
    """
    from triton.backends import backends
    from triton.runtime import driver

    for name, backend in backends.items():
        if backend.driver is not None:
            backend.driver.is_active = staticmethod(lambda name=name: name == "nvidia")
    driver.set_active(_TritonDriver(device))


class _TritonDriver(cuda.Inert):
    def __init__(self, device: cuda.Device):
        self._device = device
        limits = {
            "max_shared_mem": device.shared_memory_bytes,
            "multiprocessor_count": device.num_sms,
            "warpSize": 32,
            "max_num_regs": 65536,
        }
        self.utils = types.SimpleNamespace(get_device_properties=lambda index: limits)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._device.capability
        return GPUTarget("cuda", major * 10 + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_benchmarker(self) -> Any:
        return lambda *args, **kwargs: [0.0]


def _let_vllm_find_its_packages() -> None:
    """vLLM asks kernel libraries for tables, and a stub has none."""
    from vllm.utils import flashinfer, import_utils

    for name in ("has_deep_gemm", "has_cutedsl", "has_tilelang", "has_triton_kernels"):
        if hasattr(import_utils, name):
            setattr(import_utils, name, lambda: True)
    if hasattr(flashinfer, "has_flashinfer_sparse_mla_sm120_config"):
        flashinfer.has_flashinfer_sparse_mla_sm120_config = lambda heads, topk: True


def _look_at_classes_in_this_process() -> None:
    """vLLM inspects each architecture in a second Python (20 to 40 s each) and caches the result of
    the CPU build.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()
    registry._LazyRegisteredModel._load_modelinfo_from_cache = lambda self, module_hash: None
    registry._LazyRegisteredModel._save_modelinfo_to_cache = lambda self, info, module_hash: None
    torch.cuda.is_available = lambda: True
