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
    abilities: list[Ability]
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
) -> list[Ability]:
    """A row for everything that keepmtp does."""
    from ..validate.facts.dry_load import GPUS

    check, quantize, serve = "keepmtp check CHECKPOINT", "keepmtp quantize MODEL", "keepmtp serve-check CHECKPOINT"
    has_cuda = bool(gpus) and not lacking["quantize"] and not packages["torch"].endswith("+cpu")
    no_cuda = "" if has_cuda else "needs a GPU and torch built for CUDA"
    no_classes = "" if vllm else "needs vLLM's own classes, in an environment of their own"
    no_server, natively, copied = _serving(vllm, gpus)
    get_server = "a GPU, or VLLM_PYTHON=... of a vLLM built for CPUs" if vllm else vllm_env.command_for_vllm()
    packing, page = (_needs(lacking["quantize"]), _GET_QUANTIZE), _needs(lacking["report"])
    drawn, server = "jinja2 and matplotlib are here", (no_server, get_server)
    rows = [_ability("plan, static check", "headers and config.json are enough", check)]
    for gpu in GPUS:
        why = f"vLLM {vllm.version} on meta tensors, no GPU needed" if vllm else ""
        without = (no_classes, vllm_env.command_for_vllm())
        rows.append(_ability(f"dry load on a pretended {gpu}", why, f"{check} --gpu {gpu}", without))
    return [
        *rows,
        _ability("real server, natively", natively, serve, server),
        _ability(
            "real server, on a BF16 copy", copied, serve, (packing[0], get_server if no_server else packing[1]), server
        ),
        _ability("HTML report", drawn, f"{check} --html FOLDER", (page, _GET_REPORT)),
        _ability("packing weights, without data", f"torch {packages['torch']}, on the CPU", quantize, packing),
        _ability(
            "packing weights on a GPU",
            "one shard a GPU at a time",
            quantize,
            (no_cuda, ""),
        ),
        _ability(
            "calibrated recipes, mtp: auto",
            "llm-compressor, transformers and datasets are here",
            quantize,
            (_needs(lacking["calibrate"]), install_command("calibrate")),
        ),
        _ability(
            "calibration with backend: modelopt",
            f"nvidia-modelopt {packages['nvidia-modelopt']} is here",
            quantize,
            (_needs(lacking["modelopt"]), install_command("modelopt")),
        ),
        _ability(
            "GSM8K, with method=mtp",
            f"lm-eval {packages['lm-eval']} asks vLLM's server",
            "keepmtp eval CHECKPOINT",
            (_needs(lacking["evaluate"]), _GET_EVALUATE),
            (no_server and "needs a real server", get_server),
        ),
        _ability("model card", drawn, "keepmtp card CHECKPOINT", (page, _GET_EVALUATE)),
        _ability(
            "publishing to the Hub",
            f"a token from {token}, not tried",
            "keepmtp publish CHECKPOINT --repo ORG/NAME",
            (_needs(sorted({*lacking["report"], *lacking["quantize"]})), _GET_EVALUATE),
            ("" if token else "needs a token with write access", "hf auth login"),
        ),
    ]


def _ability(what: str, why: str, command: str, *without: tuple[str, str]) -> Ability:
    """What can be done here, unless something is not here: why it cannot, and the command that changes this."""
    for lack, cure in without:
        if lack:
            return Ability(what=what, can=False, why=lack, command=cure)
    return Ability(what=what, can=True, why=why, command=command)


def _needs(packages: list[str]) -> str:
    return f"needs {' and '.join(packages)}" if packages else ""


def _serving(vllm: vllm_env.VLLM | None, gpus: tuple[vllm_env.GPU, ...]) -> tuple[str, str, str]:
    """Why nothing can be served here; else how a checkpoint's own bytes are, and why a BF16 copy would be."""
    if vllm is None:
        return "needs vLLM", "", ""
    if vllm.build == "cpu":
        natively = "vLLM's CPU kernels: BF16, W4A16, FP8_DYNAMIC and INT8 linears, NVFP4 linears by emulation"
        return "", natively, "for what has no CPU kernel: quantized routed experts, FP8 in blocks, MXFP4"
    if not gpus:
        return "this vLLM is built for CUDA, and no GPU is here", "", ""
    return "", f"on {', '.join(gpu.name for gpu in gpus)}", "where the GPU has no kernel for a scheme"


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


def _show(found: Diagnosis, out: Console) -> None:
    """What was found, and what can be done with it: a row on a line, so that paths and commands stay whole."""
    supported = f"supported: {vllm_env.SUPPORTED}.*, tested: {', '.join(vllm_env.TESTED)}"
    rows, uses = {"keepmtp": found.keepmtp, "Python": found.python}, dict[str, str]()
    for extra in reversed(EXTRAS):
        uses |= {needed.name: EXTRAS[extra] for needed in requirements(extra)}
    rows |= {name: number or f"not installed: {uses[name]}" for name, number in found.packages.items()}
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
