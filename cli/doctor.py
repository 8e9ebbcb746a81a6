"""`keepmtp doctor`: what is installed here, what can be checked with it, and what would enable the
rest.

In: this Python's package metadata, vLLM's environment, the machine. Out: tables, or JSON. Nothing
heavy is imported.
"""

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from rich.console import RenderableType
from rich.text import Text

from .. import __version__
from ..recipes.errors import VLLMError, printable
from ..recipes.extras import install_command, missing, requirements
from ..recipes.frozen import Json, Raw, without
from ..recipes.runtimes.vllm import KNOWN
from ..validate.facts import vllm_env
from .exits import REFUSAL
from .options import JsonOption
from .tables import answer, in_words

EXTRAS = ("quantize", "report", "calibrate", "modelopt", "evaluate")
_TOKEN_NAMES = ("HF_OIDC_RESOURCE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def doctor(as_json: JsonOption = False) -> None:
    """Say what was found on this machine, what can be checked here, and what would enable the rest.

    Looks at keepmtp's own environment, at vLLM's (VLLM_PYTHON, else .venv-vllm in keepmtp's
    checkout or next to its environment), at the processor, at NVIDIA GPUs, and whether there is a
    token for the Hub, which is neither shown nor tried.
    Exit status 2 if something that was chosen cannot work; what is merely not installed is none of
    it.

    Example: `VLLM_PYTHON=/opt/vllm/bin/python keepmtp doctor`
    """
    diagnosis = diagnose()
    status = 0
    if diagnosis["broken"]:
        status = REFUSAL
    answer(diagnosis, _parts(diagnosis), as_json=as_json, status=status)


def diagnose() -> Json:
    """Look at this machine; asks vLLM's Python for versions, a second at most.

    Returns: the form of `keepmtp doctor --json`. A package that is not installed has the version
    ""; `vllm` is None if there is none, and `no_vllm` the refusal if it cannot be
    used; `token` says where one of the Hub was found, "" if nowhere; `broken` has a sentence for
    what was chosen and cannot work.
    """
    packages = {}
    for extra in EXTRAS:
        for needed in requirements(extra):
            try:
                packages[needed.name] = version(needed.name)
            except PackageNotFoundError:
                packages[needed.name] = ""
    vllm = None
    no_vllm = ""
    broken = []
    try:
        vllm = vllm_env.find_vllm()
    except VLLMError as error:
        no_vllm = str(error)
        # What is not installed is not broken, because planning and checking need no vLLM: the
        # refusal is then about "vllm", which is in none of its usual places. A VLLM_PYTHON that
        # somebody chose and that cannot work is broken.
        if error.where != "vllm":
            broken = [no_vllm]
    gpus = vllm_env.gpus_here()
    cpu, flags = vllm_env.cpu_here()
    token = _place_of_token()
    # What is missing for what is done here, and the cure.
    lacks = {extra: (missing(extra), install_command(extra)) for extra in EXTRAS}
    lacks |= dict.fromkeys(("cuda", "token", "loaders", "server"), ([], ""))
    if not gpus or not packages["torch"] or packages["torch"].endswith("+cpu"):
        lacks["cuda"] = ["a GPU and torch built for CUDA"], ""
    if not token:
        lacks["token"] = ["a token with write access"], "hf auth login"
    if vllm is None:
        lacks["loaders"] = lacks["server"] = ["vLLM"], vllm_env.command_for_vllm()
    elif vllm.build != "cpu" and not gpus:
        cure = "a GPU, or VLLM_PYTHON=... of a vLLM built for CPUs"
        lacks["server"] = ["a GPU: this vLLM is built for CUDA"], cure
    return {
        "keepmtp": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "packages": packages,
        "vllm": vllm and vllm.as_dict(),
        "known_vllm": {"read": list(KNOWN), "tested": list(vllm_env.TESTED)},
        "no_vllm": no_vllm,
        "gpus": [asdict(gpu) for gpu in gpus],
        "cpu": cpu,
        "cpu_features": [flag for flag in vllm_env.CPU_FLAGS if flag in flags],
        "token": token,
        "abilities": abilities(lacks),
        "broken": broken,
        "ok": not broken,
    }


def _place_of_token() -> str:
    """Where a token of the Hub was found; "" if nowhere. It is never shown, and never tried."""
    from huggingface_hub import get_token

    for name in _TOKEN_NAMES:
        if os.environ.get(name, "").strip():
            return name
    if get_token():
        return "`hf auth login`"
    return ""


def abilities(lacks: Mapping[str, tuple[list[str], str]]) -> list[Json]:
    """A row for everything that keepmtp does: whether it can be done here, why not, and the command
    that does it or enables it.

    Args:
        lacks: by extra, or other thing that is needed: what is missing of it, and the cure.
    """
    check = "keepmtp check CHECKPOINT"
    quantize = "keepmtp quantize MODEL"
    publish = "keepmtp publish CHECKPOINT --repo ORG/NAME"
    rows = [
        ("plan, static check", check),
        ("dry load on a pretended GPU", f"{check} --gpu sm100", "loaders"),
        ("real server", "keepmtp serve-check CHECKPOINT", "server"),
        ("packing weights, without data", quantize, "quantize"),
        ("packing weights on a GPU", quantize, "quantize", "cuda"),
        ("calibrated recipes, mtp: auto", quantize, "calibrate"),
        ("calibration with backend: modelopt", quantize, "modelopt"),
        ("tasks, with method=mtp", "keepmtp eval CHECKPOINT", "evaluate", "server"),
        ("model card", "keepmtp card CHECKPOINT", "report"),
        ("publishing to the Hub", publish, "report", "quantize", "token"),
    ]
    abilities = []
    for what, command, *needs in rows:
        why = ""
        # Where several lack something, the first is said: without it the others help nobody.
        for need in reversed(needs):
            absent, cure = lacks[need]
            if absent:
                why = f"needs {' and '.join(dict.fromkeys(absent))}"
                command = cure
        abilities.append({"what": what, "can": not why, "why": why, "command": command})
    return abilities


def _parts(diagnosis: Raw) -> Iterator[RenderableType]:
    """What was found, and what can be done with it: a row on a line, so that paths and commands
    stay whole.
    """
    yield "found"
    for name, value in without(diagnosis, "abilities", "broken", "ok").items():
        yield f"  {name.replace('_', ' '):<14}{in_words(value)}"
    yield ""
    yield "what can be done here"
    printed = {""}
    for ability in diagnosis["abilities"]:
        command = ability["command"]
        sign = ("yes", "green")
        why = ""
        if not ability["can"]:
            sign = ("no ", "yellow")
            why = f": {printable(ability['why'])}"
        yield Text.assemble("  ", sign, f"  {ability['what']}{why}")
        if command not in printed:
            yield f"         {command}"
        printed.add(command)
    for broken in diagnosis["broken"]:
        yield Text.assemble(("broken: ", "red"), printable(broken))
