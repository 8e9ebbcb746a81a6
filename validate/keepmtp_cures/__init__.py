"""Mends vLLM's own defects with MTP drafts where vLLM runs: one of its general plugins.

In: KEEPMTP_CURES, "1" for every cure or names with commas; unset, nothing happens. vLLM calls
`register` in its front end, its engine and each worker. Out: the classes and functions of vLLM that
a cure names, mended as their modules are imported; `OUTCOMES` and a line of the log for each.

The versions that have a defect are those of validate/dryload/failures.toml, whose key `cure` names
a function here, as "step.draft_scales". A cure changes how a model is built or loaded, never what
is computed from the same weights. It is applied only if the source of what it replaces has a hash
that it was written against, and the version is one that keepmtp knows.

Easy to get wrong: this runs in vLLM's environment, which has no keepmtp: nothing is imported but
vLLM, what vLLM needs, and the standard library. A module that was imported before `register` is
mended at once, but a name that another module took from it is not.
"""

import ast
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

VARIABLE = "KEEPMTP_CURES"
OUTCOMES: dict[str, str] = {}
"""Cure -> what became of it in this process: "" where it was applied, else why it was not. One
whose module was not imported is not there.
"""
_VALIDATE = Path(__file__).resolve().parent.parent
_DEFECTS = _VALIDATE / "dryload" / "failures.toml"
_KNOWN = _VALIDATE.parent / "recipes" / "runtimes" / "vllm.json"
_LOG = logging.getLogger("vllm.keepmtp_cures")


@dataclass(frozen=True)
class Target:
    """What a cure replaces.

    Attributes:
        modules: of vLLM, where another version has it elsewhere.
        names: in the module, such as "Step3p5MTP.load_weights".
        hashes: of their sources, one for each text that the cure was written against.
    """

    modules: tuple[str, ...]
    names: tuple[str, ...]
    hashes: tuple[str, ...]


Cure = Callable[[ModuleType], None]


def mends(module: str, *names: str, hashes: str) -> Callable[[Cure], Cure]:
    """Say what a cure replaces. `hashes` has spaces between them; benchmarks/ask_cures.py prints
    them.
    """

    def named(cure: Cure) -> Cure:
        cure.target = Target(tuple(module.split()), names, tuple(hashes.split()))  # type: ignore[attr-defined]
        return cure

    return named


def register() -> None:
    """Mend what KEEPMTP_CURES names; vLLM's door for plugins."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen not in ("", "0"):
        mend(chosen)


def mend(chosen: str, version: str = "") -> None:
    """Mend what has a cure, now or as its module is imported.

    Args:
        chosen: "1" for all, or names with commas.
        version: of vLLM; its own if "".
    """
    version = version or _own_version()
    waiting = dict[str, dict[str, Cure]]()
    for name in _that_apply(chosen, version):
        file, _, function = name.partition(".")
        cure: Any = getattr(importlib.import_module(f"{__name__}.{file}"), function)
        for module in cure.target.modules:
            waiting.setdefault(module, {})[name] = cure
    _refuse_twice(waiting)
    if waiting:
        sys.meta_path.insert(0, _Finder(waiting))  # first: a cure may import a module with another
    for module in [*waiting]:
        if module in sys.modules and module in waiting:
            _apply(sys.modules[module], waiting.pop(module))


def _own_version() -> str:
    from vllm import __version__

    return __version__


def _that_apply(chosen: str, version: str) -> list[str]:
    """The cures that are chosen and that this version has a defect for."""
    try:
        release = Version(Version(version).base_version)
    except InvalidVersion:
        _say(chosen, f"vLLM says no version that can be compared, but {version}")
        return []
    newest = max(map(Version, json.loads(_KNOWN.read_text())))
    if release.release[:2] > newest.release[:2]:
        _say(chosen, f"vLLM {version} is newer than any that was read, which end with {newest}")
        return []
    names = set(chosen.split(","))
    found = []
    for defect in tomllib.loads(_DEFECTS.read_text())["defects"]:
        name = defect.get("cure_in_vllm", "")
        if not name or (chosen != "1" and name not in names):
            continue
        names.discard(name)
        if release in SpecifierSet(defect["versions"]):
            found.append(name)
        elif chosen != "1":
            _say(name, f"vLLM {version} does not have the defect")
    for name in sorted(names - {"1"}):
        _say(name, "there is no such cure")
    return list(dict.fromkeys(found))


def _refuse_twice(waiting: dict[str, dict[str, Cure]]) -> None:
    """Leave out cures that replace the same thing: the second would undo the first."""
    for cures in waiting.values():
        holders = dict[str, list[str]]()
        for name, cure in cures.items():
            for replaced in cure.target.names:  # type: ignore[attr-defined]
                holders.setdefault(replaced, []).append(name)
        for replaced, names in holders.items():
            if len(names) > 1:
                for name in names:
                    cures.pop(name, None)
                    _say(name, f"{' and '.join(names)} replace {replaced}")


class _Finder(importlib.abc.MetaPathFinder):
    """Mends modules as they are imported, each once."""

    def __init__(self, waiting: dict[str, dict[str, Cure]]):
        self._waiting = waiting

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self._waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        # Only here does the module leave the list: a spec may be looked up and never be used.
        def execute_and_mend(module: ModuleType) -> None:
            execute(module)
            _apply(module, self._waiting.pop(name, {}))

        spec.loader.exec_module = execute_and_mend  # type: ignore[method-assign]
        return spec


def _apply(module: ModuleType, cures: dict[str, Cure]) -> None:
    for name, cure in cures.items():
        found = source_hash(Path(str(module.__file__)), cure.target.names)  # type: ignore[attr-defined]
        if found in cure.target.hashes:  # type: ignore[attr-defined]
            cure(module)
            _say(name, "")
        elif found or len(cure.target.modules) == 1:  # type: ignore[attr-defined]
            _say(name, f"{module.__name__} is not the source that it was written for ({found})")


def source_hash(file: Path, names: Sequence[str]) -> str:
    """Of the texts of functions and classes in a file; "" where one of them is not there."""
    text = file.read_text(encoding="utf-8")
    lines, digest = text.splitlines(keepends=True), hashlib.sha256()
    for name in names:
        node: ast.AST = ast.parse(text)
        for part in name.split("."):
            inner = [
                each for each in ast.iter_child_nodes(node) if getattr(each, "name", "") == part
            ]
            if not inner:
                return ""
            node = inner[0]
        digest.update("".join(lines[node.lineno - 1 : node.end_lineno]).encode())  # type: ignore[attr-defined]
    return digest.hexdigest()[:12]


def _say(name: str, why_not: str) -> None:
    OUTCOMES[name] = why_not
    if why_not:
        _LOG.warning("keepmtp's cure %s did nothing: %s", name, why_not)
    else:
        _LOG.info("keepmtp's cure %s was applied", name)
