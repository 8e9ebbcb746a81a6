"""Runs in every vLLM process on a CPU: lets NVFP4 linears run on vLLM's own emulation kernel.

In: vLLM calls `register` as one of its general plugins, in the front end, the engine and each
worker. Out: the kernel, registered for the CPU, where vLLM 0.32 lists none
(model_executor/kernels/linear/__init__.py). It dequantizes, and quantizes activations, in plain
PyTorch: right numbers, no speed.

Easy to get wrong: vLLM may load plugins more than once in a process.
"""

from importlib import import_module


def register() -> None:
    """Add the emulation kernel to the CPU's NVFP4 kernels."""
    kernels = import_module("vllm.model_executor.kernels.linear")
    cpu = import_module("vllm.platforms.interface").PlatformEnum.CPU
    if kernels.EmulationNvFp4LinearKernel not in kernels._POSSIBLE_NVFP4_KERNELS.get(cpu, ()):
        kernels.register_linear_kernel(kernels.EmulationNvFp4LinearKernel, cpu, "nvfp4")
