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
    "checkpoints.sglang",
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


FILES = {}
for path in house.sources():
    if path.parent != ROOT or path.stem in ROOMS:
        FILES[house.module_name(path)] = path


def room(name: str) -> str | None:
    """The room of a module: the longest that its name begins with. A folder of rooms alone is
    none.
    """
    rooms = [room for room in ROOMS if f"{name}.".startswith(f"{room}.")]
    return max(rooms, key=len, default=None)


def imported(name: str) -> set[str]:
    """The modules of keepmtp that a module names in its imports, those for type checkers alone
    included.
    """
    path = FILES[name]
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(house.parsed(path)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = list(package[: len(package) - node.level + 1])
        if node.module:
            base.append(node.module)
        for alias in node.names:
            inner = ".".join([*base, alias.name])
            if inner in FILES:
                found.add(inner)
            elif base:
                found.add(".".join(base))
    return found


def needed(name: str) -> set[str]:
    """The modules that a module needs, directly or through others."""
    found = set[str]()
    waiting = [name]
    while waiting:
        new = imported(waiting.pop()) - found
        found |= new
        waiting += new & FILES.keys()
    return found


@pytest.mark.parametrize("own", ROOMS)
def test_a_room_imports_only_from_those_before_it(own):
    allowed = {None, *ROOMS[: ROOMS.index(own) + 1]}
    names = [name for name in FILES if room(name) == own]
    assert names
    for name in names:
        for other in imported(name):
            assert room(other) in allowed, f"{name} imports {other}"


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
            elif isinstance(node, ast.ImportFrom) and node.level:
                assert node.level <= depth + 1, path
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                assert name.partition(".")[0] != "keepmtp", path
