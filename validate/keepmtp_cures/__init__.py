"""Mends vLLM's own defects with MTP drafts where vLLM runs: one of its general plugins.

In: KEEPMTP_CURES, "1" for every cure or names with commas; unset, nothing happens. vLLM calls
`register` in its front end, its engine and each worker. Out: the classes and functions of vLLM that
a cure names, mended as their modules are imported; `OUTCOMES` and a line of the log for each.

A cure is called as its file and function, "step.draft_scales"; so names it the key `cure_in_vllm`
of validate/dryload/failures.toml. It changes how a model is built or loaded, never what is computed
from the same weights, and is applied only if the source of what it replaces has a hash that it was
written against: another version of vLLM, or somebody's fork, has the defect as long as it has that
source. Of what is not as it was read nothing is patched, and one line says why.

Easy to get wrong: this runs in vLLM's environment and has nothing else of keepmtp. A module that
was imported before `register` is mended at once, but a name that another module took from it is
not.
"""

import ast
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "KEEPMTP_CURES"
OUTCOMES: dict[str, str] = {}
"""Cure -> what became of it in this process: "" where it was applied, else why it was not. One
whose module was not imported is not there.
"""


@dataclass(frozen=True)
class Cure:
    """What replaces a piece of vLLM.

    Attributes:
        apply: mends a module that was imported.
        module: of vLLM.
        names: what is replaced there, such as "Step3p5MTP.load_weights".
        hashes: of their sources, one for each text that the cure was written against.
    """

    apply: Callable[[Any], None]
    module: str
    names: tuple[str, ...]
    hashes: tuple[str, ...]

    def refused(self, file: str) -> str:
        """The hash of the source of its names in a file, where it is another; "" where it fits."""
        own_hash = source_hash(Path(file), self.names)
        if own_hash in self.hashes:
            return ""
        return own_hash or "none"


Waiting = dict[str, dict[str, Cure]]
"""Module -> the cures that wait for its import, by name."""


def mends(module: str, *names: str, hashes: str) -> Callable[[Callable[[Any], None]], Cure]:
    """Make a function a `Cure`; hashes have spaces between them. benchmarks/follow.py prints those
    of another version.
    """

    def cure(apply: Callable[[Any], None]) -> Cure:
        return Cure(apply, module, names, tuple(hashes.split()))

    return cure


def add_config(module: Any, model_type: str, config: Any) -> None:
    """Give vLLM a class of config.json for a model that it has none for; one of its own stays.

    Raises:
        AttributeError: it has one.
    """
    if model_type in module._CONFIG_REGISTRY:
        raise AttributeError(f"it has a class for {model_type}")
    module._CONFIG_REGISTRY[model_type] = config


def register() -> None:
    """Mend what KEEPMTP_CURES names; vLLM's door for plugins."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen not in ("", "0"):
        mend(chosen)


def mend(chosen: str) -> None:
    """Mend what has a cure, now or as its module is imported: "1" is all, names have commas."""
    every = cures()
    wanted = {name.strip() for name in chosen.split(",")} - {""}
    if "1" in wanted:
        wanted = {*every}
    waiting: Waiting = defaultdict(dict)
    for name in sorted(wanted - OUTCOMES.keys()):  # a second call mends nothing twice
        if name in every:
            waiting[every[name].module][name] = every[name]
        else:
            _say(name, "there is no such cure")
    sys.meta_path.insert(0, _Finder(waiting))  # first: a cure may import a module with another
    for module in [*waiting]:
        if module in sys.modules:
            _apply(sys.modules[module], waiting.pop(module, {}))


def cures() -> dict[str, Cure]:
    """Every cure, by its name."""
    found = dict[str, Cure]()
    for file in Path(__file__).parent.glob("[a-z]*.py"):
        for name, value in vars(importlib.import_module(f"{__name__}.{file.stem}")).items():
            if isinstance(value, Cure):
                found[f"{file.stem}.{name}"] = value
    return found


class _Finder(importlib.abc.MetaPathFinder):
    """Mends modules as they are imported, each once."""

    def __init__(self, waiting: Waiting):
        self._waiting = waiting

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self._waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        # Only here does the module leave the list: a spec may be looked up and never be used.
        def execute_and_mend(module: Any) -> None:
            execute(module)
            _apply(module, self._waiting.pop(fullname, {}))

        loader.exec_module = execute_and_mend
        return spec


def _apply(module: Any, cures: dict[str, Cure]) -> None:
    for name, cure in cures.items():
        other = cure.refused(str(module.__file__))
        if other:
            _say(name, f"{module.__name__} is not the source that it was written for: {other}")
            continue
        try:
            cure.apply(module)
        # Another fork: the function alone is the same.
        except (AttributeError, ImportError) as error:
            _say(name, f"{module.__name__} is not the source that it was written for: {error}")
        else:
            _say(name, "")


def source_hash(file: Path, names: Sequence[str]) -> str:
    """Of the texts of functions and classes in a file; "" where there is no such file, or one of
    them is not in it.
    """
    if not file.is_file():
        return ""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    digest = hashlib.sha256()
    for name in names:
        node: Any = tree
        for part in name.split("."):
            inner = [child for child in node.body if getattr(child, "name", "") == part]
            if not inner:
                return ""
            node = inner[0]
        digest.update("".join(lines[node.lineno - 1 : node.end_lineno]).encode())
    return digest.hexdigest()[:12]


def _say(name: str, why_not: str) -> None:
    """One line, written by ourselves: vLLM sets up its logging after its config classes load."""
    OUTCOMES[name] = why_not
    outcome = "was applied"
    if why_not:
        outcome = f"did nothing: {why_not}"
    sys.stderr.write(f"keepmtp's cure {name} {outcome}\n")
