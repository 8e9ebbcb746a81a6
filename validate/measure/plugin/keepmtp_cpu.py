"""Runs in every vLLM process on a CPU: lets NVFP4 linears run on vLLM's own emulation kernel, and
starts the engine in a second and ends at once.

In: vLLM calls `register` as one of its general plugins, in the front end, the engine and each
worker. Out: the kernel, registered for the CPU; and engine and workers that are forks of the front
end.

Easy to get wrong: a process may load plugins more than once. Then the kernel is listed twice, which
changes nothing.
"""

import atexit
import gc
from importlib import import_module


def register() -> None:
    """Add the emulation kernel to the CPU's NVFP4 kernels; let processes fork, and end at once."""
    kernels = import_module("vllm.model_executor.kernels.linear")
    cpu = import_module("vllm.platforms.interface").PlatformEnum.CPU
    # vLLM 0.32 lists none for the CPU (model_executor/kernels/linear/__init__.py). This one
    # dequantizes, and quantizes activations, in plain PyTorch: right numbers, no speed.
    kernels.register_linear_kernel(kernels.EmulationNvFp4LinearKernel, cpu, "nvfp4")
    # As they are of a script (envs.py): vLLM 0.32 has each process import vLLM anew
    # (platforms/cpu.py), which takes 13 s.
    variables = import_module("vllm.envs").environment_variables
    variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    # Python would walk all that vLLM imported once more, for 2 s.
    atexit.register(gc.freeze)
