"""Runs in every vLLM process on a CPU: lets NVFP4 linears run on vLLM's own emulation kernel, and
starts the engine in a second.

In: vLLM calls `register` as one of its general plugins, in the front end, the engine and each
worker. Out: the kernel, registered for the CPU, where vLLM 0.32 lists none
(model_executor/kernels/linear/__init__.py); it dequantizes, and quantizes activations, in plain
PyTorch: right numbers, no speed. And engine and workers are forks of the front end, as they are of
a script (envs.py), where vLLM 0.32 has each import vLLM anew (platforms/cpu.py): 13 s a process.

Easy to get wrong: a process may load plugins more than once. Then the kernel is listed twice, which
changes nothing.
"""

from importlib import import_module


def register() -> None:
    """Add the emulation kernel to the CPU's NVFP4 kernels; let processes fork."""
    kernels = import_module("vllm.model_executor.kernels.linear")
    cpu = import_module("vllm.platforms.interface").PlatformEnum.CPU
    kernels.register_linear_kernel(kernels.EmulationNvFp4LinearKernel, cpu, "nvfp4")
    variables = import_module("vllm.envs").environment_variables
    variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
