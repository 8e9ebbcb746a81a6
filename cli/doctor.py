"""`keepmtp doctor`: the versions that are installed here, and what is missing.

In: this Python's package metadata, vLLM's environment, the machine. Out: lines, or JSON. Nothing
heavy is imported.
"""

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from .. import __version__
from ..recipes.errors import VLLMError
from ..recipes.extras import install_command, missing, requirements
from ..recipes.frozen import Json
from ..validate.facts import vllm_env
from .exits import REFUSAL
from .options import JsonOption
from .tables import answer, in_words

EXTRAS = ("quantize", "report", "calibrate", "modelopt", "evaluate")


def doctor(as_json: JsonOption = False) -> None:
    """Print which versions are installed here, of vLLM too, and what is missing.

    Exit status 2 if VLLM_PYTHON names a Python that cannot work. What is not installed is no error.

    \b
    Example: `VLLM_PYTHON=/opt/vllm/bin/python keepmtp doctor`
    """
    found = diagnose()
    status = REFUSAL
    if found["ok"]:
        status = 0
    answer(found, _lines(found), as_json=as_json, status=status)


def diagnose() -> Json:
    """Look at this machine; asks vLLM's Python for versions, a second at most.

    Returns: the form of `keepmtp doctor --json`. `packages` are those that the extras name and that
        are installed, `missing` the extras, or vLLM, with the command that installs each.
    """
    packages = {}
    lacks = {}
    for extra in EXTRAS:
        for needed in requirements(extra):
            try:
                packages[needed.name] = version(needed.name)
            except PackageNotFoundError:
                continue
        if missing(extra):
            lacks[extra] = install_command(extra)
    found = {"keepmtp": __version__, "python": f"{platform.python_version()} ({sys.executable})"}
    found |= {"packages": packages, "ok": True}
    try:
        vllm = vllm_env.find_vllm()
        found["vllm"] = {"python": str(vllm.python), **vllm.versions}
    except VLLMError as error:
        found["vllm"] = str(error)
        lacks["vllm"] = vllm_env.command_for_vllm()
        # A VLLM_PYTHON that somebody chose cannot work; else the refusal is about "vllm".
        found["ok"] = error.where == "vllm"
    return {**found, "missing": lacks}


def _lines(found: Json) -> Iterator[str]:
    for name in ("keepmtp", "python", "packages", "vllm"):
        yield f"{name:<10}{in_words(found[name])}"
    for what, command in found["missing"].items():
        yield f"missing: {what}"
        yield f"  {command}"
