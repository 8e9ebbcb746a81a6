"""The rooms of the house, from the ground up: each imports only from those before it.

api.py is built on the whole line, and the verbs of the command are built on api.py. Nothing that it
needs imports it.
"""

import ast

import house
import pytest
from commands import ROOT

# From the ground up. A room imports from itself and from those before it.
ROOMS = (
    "recipes",
    "checkpoints",
    "checkpoints.dialects",
    "quantize.plan",
    "quantize.run",
    "quantize.needs",
    "quantize.pack",
    "quantize.write",
    "quantize.calibrate.data",
    "quantize.calibrate.model",
    "quantize.calibrate.layers",
    "quantize.calibrate.mtp",
    "quantize.calibrate.search",
    "quantize.calibrate",
    "validate.facts",
    "validate.check",
    "validate.dryload",
    "validate.measure",
    "validate.report",
    "validate.publish",
    "cure",
    "pipeline",
    "api",
    "cli",
)
# They run in vLLM's environment and import nothing of keepmtp.
ELSEWHERE = ("validate/dryload/in_vllm", "validate/keepmtp_cures", "validate/measure/plugin")


FILES = {
    house.module_name(path): path
    for path in house.sources()
    if path.parent != ROOT or path.stem in ROOMS
}


def room(name: str) -> str | None:
    """The room of a module: the longest that its name begins with. A folder of rooms alone is
    none.
    """
    return max((each for each in ROOMS if f"{name}.".startswith(f"{each}.")), key=len, default=None)


def imported(name: str) -> set[str]:
    """The modules of keepmtp that a module names in its imports, those for type checkers alone
    included.
    """
    path = FILES[name]
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(house.parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            outer = package[: len(package) - node.level + 1]
            base = ".".join([*outer, node.module] if node.module else outer)
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                found.add(inner if inner in FILES else base)
    return found - {""}


def needed(name: str) -> set[str]:
    """The modules that a module needs, directly or through others."""
    found, waiting = set[str](), [name]
    while waiting:
        new = imported(waiting.pop()) - found
        found |= new
        waiting += [each for each in new if each in FILES]
    return found


@pytest.mark.parametrize("own", ROOMS)
def test_a_room_imports_only_from_those_before_it(own):
    names = [name for name in FILES if room(name) == own]
    assert names
    for name in names:
        for other in imported(name):
            its = room(other)
            assert its is None or ROOMS.index(its) <= ROOMS.index(own), f"{name} imports {other}"


def test_only_verbs_are_built_on_the_api():
    assert {name.split(".")[0] for name in FILES if "api" in imported(name)} == {"cli"}
    assert {"pipeline", "quantize.plan.plan"} <= needed("api") and "api" not in needed("api")


@pytest.mark.parametrize("folder", ELSEWHERE)
def test_what_runs_in_vllms_python_imports_nothing_of_keepmtp(folder):
    for path in (ROOT / folder).rglob("*.py"):
        depth = len(path.parent.relative_to(ROOT / folder).parts)
        for node in ast.walk(house.parsed(path)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if not node.level else []
                assert node.level <= depth + 1, path
            assert "keepmtp" not in {name.split(".")[0] for name in names}, path
