"""`keepmtp doctor`: what is installed here, what can be checked with it, and what would enable the rest.

In: this Python's package metadata, vLLM's environment, the machine. Out: tables, or JSON. Nothing heavy is imported.

Easy to get wrong: what is not installed is not broken, because planning and checking need no torch and no vLLM. What
somebody chose and cannot work is broken: a VLLM_PYTHON without vLLM, a vLLM outside the supported range. The doctor
finds a token and never shows it.
"""

import os
import platform
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer
from rich.console import Console

from .. import __version__
from ..recipes.errors import VLLMError
from ..recipes.extras import install_command, missing, requirements
from ..validate.facts import vllm_env
from .options import JsonOption
from .tables import escape, print_json, say

# Extra -> what needs it. A package that several need is listed with the first.
EXTRAS = {
    "quantize": "packing weights needs it",
    "report": "the HTML report needs it",
    "calibrate": "calibrated recipes need it",
    "modelopt": "`backend: modelopt` needs it",
    "evaluate": "evaluating needs it",
}
_TOKEN_NAMES = ("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_GET_QUANTIZE = install_command("quantize")
_GET_REPORT = install_command("report")
_GET_EVALUATE = install_command("evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """One thing that keepmtp can do: whether it can do it here, why, and the command that does or enables it."""

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
    abilities: tuple[Ability, ...]
    broken: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The form of `keepmtp doctor --json`."""
        return asdict(self) | {
            "vllm": self.vllm.as_dict() if self.vllm else None,
            "supported_vllm": {"range": f"{vllm_env.SUPPORTED}.*", "tested": list(vllm_env.TESTED)},
            "ok": not self.broken,
        }


def doctor(
    as_json: JsonOption = False,
) -> None:
    """Say what was found on this machine, what can be checked here, and what would enable the rest.

    Looks at keepmtp's own environment, at vLLM's (VLLM_PYTHON, else .venv-vllm in keepmtp's checkout or next to its
    environment), at the processor, at NVIDIA GPUs, and whether there is a token for the Hub, which is neither shown
    nor tried.
    Exit status 2 if something that was chosen cannot work; what is merely not installed is none of it.

    Example: `VLLM_PYTHON=/opt/vllm/bin/python keepmtp doctor`
    """
    found = diagnose()
    if as_json:
        print_json(found.as_dict())
    else:
        _show(found, Console())
    if found.broken:
        raise typer.Exit(2)


def diagnose() -> Diagnosis:
    """Look at this machine; asks vLLM's Python for versions, a second at most."""
    packages = {needed.name: _version(needed.name) for extra in EXTRAS for needed in requirements(extra)}
    vllm, no_vllm, is_broken = None, "", False
    try:
        vllm = vllm_env.find_vllm(any_version=True)
        vllm_env.find_vllm()
    except VLLMError as error:
        # The refusal is about "vllm" where none was named and none is in its usual place: not installed, not broken.
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
        abilities=_abilities({extra: missing(extra) for extra in EXTRAS}, packages, usable, gpus, token),
    )


def _abilities(
    lacking: dict[str, list[str]],
    packages: dict[str, str],
    vllm: vllm_env.VLLM | None,
    gpus: tuple[vllm_env.GPU, ...],
    token: str,
) -> tuple[Ability, ...]:
    from ..validate.facts.dry_load import GPUS

    return (
        Ability(
            what="plan, static check",
            can=True,
            why="headers and config.json are enough",
            command="keepmtp check CHECKPOINT",
        ),
        *(_dry_load(gpu, vllm) for gpu in GPUS),
        *_servers(vllm, gpus, lacking["quantize"]),
        _page("HTML report", lacking["report"], "keepmtp check CHECKPOINT --html FOLDER", _GET_REPORT),
        *_packing(lacking["quantize"], packages["torch"], gpus),
        _needing(
            lacking["calibrate"],
            what="calibrated recipes, mtp: auto",
            why="llm-compressor, transformers and datasets are here",
            command="keepmtp quantize MODEL",
            get=install_command("calibrate"),
        ),
        _needing(
            lacking["modelopt"],
            what="calibration with backend: modelopt",
            why=f"nvidia-modelopt {packages['nvidia-modelopt']} is here",
            command="keepmtp quantize MODEL",
            get=install_command("modelopt"),
        ),
        _scoring(lacking["evaluate"], packages["lm-eval"], vllm, gpus),
        _page("model card", lacking["report"], "keepmtp card CHECKPOINT", _GET_EVALUATE),
        _publishing(sorted({*lacking["report"], *lacking["quantize"]}), token),
    )


def _needing(lacking: list[str], *, what: str, why: str, command: str, get: str) -> Ability:
    """What needs packages only: `why` and `command` where they are here, else what is missing, and how to get it."""
    if lacking:
        return Ability(what=what, can=False, why=f"needs {' and '.join(lacking)}", command=get)
    return Ability(what=what, can=True, why=why, command=command)


def _page(what: str, lacking: list[str], command: str, get: str) -> Ability:
    return _needing(lacking, what=what, why="jinja2 and matplotlib are here", command=command, get=get)


def _dry_load(gpu: str, vllm: vllm_env.VLLM | None) -> Ability:
    what = f"dry load on a pretended {gpu}"
    if vllm is None:
        why = "needs vLLM's own classes, in an environment of their own"
        return Ability(what=what, can=False, why=why, command=vllm_env.command_for_vllm())
    why = f"vLLM {vllm.version} on meta tensors, no GPU needed"
    return Ability(what=what, can=True, why=why, command=f"keepmtp check CHECKPOINT --gpu {gpu}")


def _can_serve(vllm: vllm_env.VLLM | None, gpus: tuple[vllm_env.GPU, ...]) -> bool:
    return vllm is not None and (vllm.build == "cpu" or bool(gpus))


def _get_server(vllm: vllm_env.VLLM | None) -> str:
    return vllm_env.command_for_vllm() if vllm is None else "a GPU, or VLLM_PYTHON=... of a vLLM built for CPUs"


def _servers(
    vllm: vllm_env.VLLM | None, gpus: tuple[vllm_env.GPU, ...], no_packing: list[str]
) -> tuple[Ability, Ability]:
    """A server of the checkpoint's own bytes, and one of a BF16 copy, which keepmtp has to pack."""
    natively, copied = _serving(vllm, gpus)
    can_serve = _can_serve(vllm, gpus)
    serve = "keepmtp serve-check CHECKPOINT"
    copy_command = _GET_QUANTIZE if can_serve else _get_server(vllm)
    return (
        Ability(
            what="real server, natively",
            can=can_serve,
            why=natively,
            command=serve if can_serve else _get_server(vllm),
        ),
        Ability(
            what="real server, on a BF16 copy",
            can=can_serve and not no_packing,
            why=f"needs {' and '.join(no_packing)}" if no_packing else copied,
            command=serve if can_serve and not no_packing else copy_command,
        ),
    )


def _packing(lacking: list[str], torch: str, gpus: tuple[vllm_env.GPU, ...]) -> tuple[Ability, Ability]:
    on_gpu = not lacking and bool(gpus) and not torch.endswith("+cpu")
    return (
        _needing(
            lacking,
            what="packing weights, without data",
            why=f"torch {torch}, on the CPU",
            command="keepmtp quantize MODEL",
            get=_GET_QUANTIZE,
        ),
        Ability(
            what="packing weights on a GPU",
            can=on_gpu,
            why="one shard a GPU at a time" if on_gpu else "needs a GPU and torch built for CUDA",
            command="keepmtp quantize MODEL" if on_gpu else "",
        ),
    )


def _scoring(lacking: list[str], lm_eval: str, vllm: vllm_env.VLLM | None, gpus: tuple[vllm_env.GPU, ...]) -> Ability:
    what = "GSM8K, with method=mtp"
    if not lacking and not _can_serve(vllm, gpus):
        return Ability(what=what, can=False, why="needs a real server", command=_get_server(vllm))
    why = f"lm-eval {lm_eval} asks vLLM's server"
    return _needing(lacking, what=what, why=why, command="keepmtp eval CHECKPOINT", get=_GET_EVALUATE)


def _publishing(lacking: list[str], token: str) -> Ability:
    what = "publishing to the Hub"
    if not lacking and not token:
        return Ability(what=what, can=False, why="needs a token with write access", command="hf auth login")
    why = f"a token from {token}, not tried"
    command = "keepmtp publish CHECKPOINT --repo ORG/NAME"
    return _needing(lacking, what=what, why=why, command=command, get=_GET_EVALUATE)


def _serving(vllm: vllm_env.VLLM | None, gpus: tuple[vllm_env.GPU, ...]) -> tuple[str, str]:
    """Why a checkpoint can be served with its own bytes, and why on a BF16 copy."""
    if vllm is None:
        return "needs vLLM", "needs vLLM"
    if vllm.build == "cpu":
        return (
            "vLLM's CPU kernels: BF16, W4A16, FP8_DYNAMIC and INT8 linears, NVFP4 linears by emulation",
            "for what has no CPU kernel: quantized routed experts, FP8 in blocks, MXFP4",
        )
    if not gpus:
        why = "this vLLM is built for CUDA, and no GPU is here"
        return why, why
    return f"on {', '.join(gpu.name for gpu in gpus)}", "where the GPU has no kernel for a scheme"


def _where_token() -> str:
    """Where huggingface_hub 1.33 finds a token; the Hub is not asked whether it is valid."""
    from huggingface_hub import get_token

    named = next((name for name in _TOKEN_NAMES if os.environ.get(name, "").strip()), "")
    return named or ("`hf auth login`" if get_token() else "")


def _use(package: str) -> str:
    return next(what for extra, what in EXTRAS.items() if package in {needed.name for needed in requirements(extra)})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _show(found: Diagnosis, out: Console) -> None:
    """What was found, and what can be done with it: a row on a line, so that paths and commands stay whole."""
    supported = f"supported: {vllm_env.SUPPORTED}.*, tested: {', '.join(vllm_env.TESTED)}"
    rows = {"keepmtp": found.keepmtp, "Python": found.python}
    rows |= {name: number or f"not installed: {_use(name)}" for name, number in found.packages.items()}
    if found.vllm:
        rows |= {"vLLM": f"{found.vllm.version}, {found.vllm.build.upper()} build ({supported})"}
        rows |= {"  Python": str(found.vllm.python)}
        for name in ("torch", "transformers", "compressed_tensors"):
            rows[f"  {name.replace('_', '-')}"] = getattr(found.vllm, name) or "not installed"
    else:
        rows["vLLM"] = f"none ({supported})"
    rows["Hub token"] = f"from {found.token}" if found.token else "none"
    gpus = [f"{gpu.name}, sm{gpu.capability.replace('.', '')}, {gpu.memory_gib:.0f} GiB" for gpu in found.gpus]
    rows |= {"GPU": ", ".join(gpus) or "none", "CPU": found.cpu or "unknown"}
    rows["  features"] = ", ".join(found.cpu_features) or "none that vLLM's CPU kernels ask for"
    width = max(map(len, rows)) + 2
    _lines(out, ["found", *(f"  {name:<{width}}{value}" for name, value in rows.items()), "", "what can be done here"])
    told = set[str]()
    for ability in found.abilities:
        sign = "[green]yes[/]" if ability.can else "[yellow]no[/] "
        out.print(f"  {sign}  {ability.what}: {escape(ability.why)}", highlight=False, soft_wrap=True)
        if ability.command and ability.command not in told:
            _lines(out, [f"         {ability.command}"])
        told.add(ability.command)
    if found.no_vllm:
        out.print(f"{'[red]broken:[/] ' * bool(found.broken)}{escape(found.no_vllm)}", highlight=False, soft_wrap=True)


def _lines(out: Console, lines: Iterable[str]) -> None:
    for line in lines:
        say(out, line)
