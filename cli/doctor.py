"""`keepmtp doctor`: what is installed here, what can be checked with it, and what would enable the
rest.

In: this Python's package metadata, vLLM's environment, the machine. Out: tables, or JSON. Nothing
heavy is imported.

Easy to get wrong: what is not installed is not broken, because planning and checking need no torch
and no vLLM. What somebody chose and cannot work is broken: a VLLM_PYTHON without vLLM, a vLLM
outside the supported range. The doctor finds a token and never shows it.
"""

import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from .. import __version__
from ..recipes.errors import VLLMError, printable
from ..recipes.extras import install_command, missing, requirements
from ..validate.facts import vllm_env
from .options import JsonOption
from .tables import answer

EXTRAS = ("quantize", "report", "calibrate", "modelopt", "evaluate")
_TOKEN_NAMES = ("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """One thing that keepmtp can do: whether it can do it here, why not, and the command that does
    or enables it.
    """

    what: str
    can: bool
    why: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found on this machine.

    Attributes:
        packages: versions in keepmtp's environment; "" where not installed.
        vllm: the environment that was found, of any version; None if there is none.
        no_vllm: the refusal, if vLLM cannot be used.
        gpus, cpu, cpu_features: of this machine.
        token: where a token of the Hub was found; "" if nowhere. Not the token.
        broken: what was chosen and cannot work, a sentence each.
    """

    keepmtp: str
    python: str
    packages: dict[str, str]
    vllm: vllm_env.VLLM | None
    no_vllm: str
    gpus: tuple[vllm_env.GPU, ...]
    cpu: str
    cpu_features: tuple[str, ...]
    token: str
    abilities: list[Ability]
    broken: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The form of `keepmtp doctor --json`."""
        return asdict(self) | {
            "vllm": self.vllm.as_dict() if self.vllm else None,
            "supported_vllm": {"range": f"{vllm_env.SUPPORTED}.*", "tested": list(vllm_env.TESTED)},
            "ok": not self.broken,
        }


def doctor(as_json: JsonOption = False) -> None:
    """Say what was found on this machine, what can be checked here, and what would enable the rest.

    Looks at keepmtp's own environment, at vLLM's (VLLM_PYTHON, else .venv-vllm in keepmtp's
    checkout or next to its environment), at the processor, at NVIDIA GPUs, and whether there is a
    token for the Hub, which is neither shown nor tried.
    Exit status 2 if something that was chosen cannot work; what is merely not installed is none of
    it.

    Example: `VLLM_PYTHON=/opt/vllm/bin/python keepmtp doctor`
    """
    found = diagnose()
    answer(found.as_dict(), _parts(found), as_json=as_json, status=2 if found.broken else 0)


def diagnose() -> Diagnosis:
    """Look at this machine; asks vLLM's Python for versions, a second at most."""
    packages = {
        needed.name: _version(needed.name) for extra in EXTRAS for needed in requirements(extra)
    }
    vllm, no_vllm, is_broken = None, "", False
    try:
        vllm = vllm_env.find_vllm(any_version=True)
        vllm_env.find_vllm()
    except VLLMError as error:
        # The refusal is about "vllm" where none was named and none is in its usual place: not
        # installed, not broken.
        no_vllm, is_broken = str(error), error.where != "vllm"
    gpus, (cpu, flags) = vllm_env.gpus_here(), vllm_env.cpu_here()
    features = tuple(flag for flag in vllm_env.CPU_FLAGS if flag in flags)
    usable, token = vllm if not no_vllm else None, _where_token()
    return Diagnosis(
        keepmtp=__version__,
        python=f"{platform.python_version()} ({sys.executable})",
        packages=packages,
        vllm=vllm,
        no_vllm=no_vllm,
        gpus=gpus,
        cpu=cpu,
        cpu_features=features,
        token=token,
        broken=(no_vllm,) if is_broken else (),
        abilities=_abilities(
            {extra: missing(extra) for extra in EXTRAS}, packages, usable, gpus, token
        ),
    )


def _abilities(
    lacking: dict[str, list[str]],
    packages: dict[str, str],
    vllm: vllm_env.VLLM | None,
    gpus: tuple[vllm_env.GPU, ...],
    token: str,
) -> list[Ability]:
    """A row for everything that keepmtp does."""
    from ..validate.facts.dry_load import GPUS

    lacks = {}
    for extra, absent in lacking.items():
        if absent:
            lacks[extra] = f"needs {' and '.join(absent)}", install_command(extra)
    if not gpus or lacking["quantize"] or packages["torch"].endswith("+cpu"):
        lacks["cuda"] = "needs a GPU and torch built for CUDA", ""
    if not token:
        lacks["token"] = "needs a token with write access", "hf auth login"
    if not vllm:
        lacks["server"] = "needs vLLM", vllm_env.command_for_vllm()
        lacks["loaders"] = (
            "needs vLLM's own classes, in an environment of their own",
            vllm_env.command_for_vllm(),
        )
    elif vllm.build != "cpu" and not gpus:
        cure = "a GPU, or VLLM_PYTHON=... of a vLLM built for CPUs"
        lacks["server"] = "this vLLM is built for CUDA, and no GPU is here", cure
    check, quantize = "keepmtp check CHECKPOINT", "keepmtp quantize MODEL"
    rows = [
        ("plan, static check", check),
        *((f"dry load on a pretended {gpu}", f"{check} --gpu {gpu}", "loaders") for gpu in GPUS),
        ("real server", "keepmtp serve-check CHECKPOINT", "server"),
        ("HTML report", f"{check} --html FOLDER", "report"),
        ("packing weights, without data", quantize, "quantize"),
        ("packing weights on a GPU", quantize, "cuda"),
        ("calibrated recipes, mtp: auto", quantize, "calibrate"),
        ("calibration with backend: modelopt", quantize, "modelopt"),
        ("tasks, with method=mtp", "keepmtp eval CHECKPOINT", "evaluate", "server"),
        ("model card", "keepmtp card CHECKPOINT", "report"),
        (
            "publishing to the Hub",
            "keepmtp publish CHECKPOINT --repo ORG/NAME",
            "report",
            "quantize",
            "token",
        ),
    ]
    abilities = []
    for what, command, *needs in rows:
        lack = next((lacks[need] for need in needs if need in lacks), None)
        why, command = lack or ("", command)
        abilities.append(Ability(what=what, can=lack is None, why=why, command=command))
    return abilities


def _where_token() -> str:
    """Where huggingface_hub 1.33 finds a token; the Hub is not asked whether it is valid."""
    from huggingface_hub import get_token

    named = next((name for name in _TOKEN_NAMES if os.environ.get(name, "").strip()), "")
    return named or ("`hf auth login`" if get_token() else "")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _parts(found: Diagnosis) -> Iterator[RenderableType]:
    """What was found, and what can be done with it: a row on a line, so that paths and commands
    stay whole.
    """
    rows = _found(found)
    width = max(map(len, rows)) + 2
    yield "found"
    for name, value in rows.items():
        yield f"  {name:<{width}}{value}"
    yield ""
    yield "what can be done here"
    told = {""}
    for ability in found.abilities:
        sign = ("yes", "green") if ability.can else ("no ", "yellow")
        yield Text.assemble(
            "  ", sign, f"  {ability.what}", f": {printable(ability.why)}" if ability.why else ""
        )
        if ability.command not in told:
            yield f"         {ability.command}"
        told.add(ability.command)
    if found.no_vllm:
        yield Text.assemble(("broken: " if found.broken else "", "red"), printable(found.no_vllm))


def _found(found: Diagnosis) -> dict[str, str]:
    supported = f"supported: {vllm_env.SUPPORTED}.*, tested: {', '.join(vllm_env.TESTED)}"
    rows = {"keepmtp": found.keepmtp, "Python": found.python}
    rows |= {name: number or "not installed" for name, number in found.packages.items()}
    rows["vLLM"] = f"none ({supported})"
    if found.vllm:
        rows["vLLM"] = f"{found.vllm.version}, {found.vllm.build.upper()} build ({supported})"
        rows["  Python"] = str(found.vllm.python)
        for name in ("torch", "transformers", "compressed_tensors"):
            rows[f"  {name.replace('_', '-')}"] = getattr(found.vllm, name) or "not installed"
    rows["Hub token"] = f"from {found.token}" if found.token else "none"
    gpus = [
        f"{gpu.name}, sm{gpu.capability.replace('.', '')}, {gpu.memory_gib:.0f} GiB"
        for gpu in found.gpus
    ]
    rows |= {"GPU": ", ".join(gpus) or "none", "CPU": found.cpu or "unknown"}
    rows["  features"] = ", ".join(found.cpu_features) or "none that vLLM's CPU kernels ask for"
    return rows
