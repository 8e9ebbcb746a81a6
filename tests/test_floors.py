"""The floors of the house: recipes, checkpoints, quantize, validate, cure, cli; each imports only from those before it.

api.py is built on the whole line, and the verbs of the command are built on api.py. Nothing that it needs imports it.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = ("recipes", "checkpoints", "quantize", "validate", "cure", "cli")
# They run in vLLM's environment and import nothing of keepmtp.
ELSEWHERE = ("validate/dryload/in_vllm", "validate/serving/plugin")


def module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module(path): path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")} | {"api": ROOT / "api.py"}


def imported(name: str) -> set[str]:
    """The modules of keepmtp that a module names in its imports, those for type checkers alone included."""
    path = FILES[name]
    package = path.relative_to(ROOT).parent.parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            found |= {inner if (inner := f"{base}.{alias.name}".lstrip(".")) in FILES else base for alias in node.names}
    return found - {""}


def upward(name: str) -> set[tuple[str, str]]:
    own = FLOORS.index(name.split(".")[0])
    return {(name, other) for other in imported(name) - {"api"} if FLOORS.index(other.split(".")[0]) > own}


def needed(name: str) -> set[str]:
    """The modules that a module needs, directly or through others."""
    found, waiting = set[str](), [name]
    while waiting:
        new = imported(waiting.pop()) - found
        found |= new
        waiting += [each for each in new if each in FILES]
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_from_those_before_it(floor):
    names = [name for name in FILES if name.split(".")[0] == floor]
    assert names
    found = set().union(*(upward(name) for name in names))
    assert found == set(), "an import of a later floor"


def test_only_verbs_are_built_on_the_api():
    assert {name.split(".")[0] for name in FILES if "api" in imported(name)} == {"cli"}
    assert {"cli.pipeline", "quantize.plan"} <= needed("api") and "api" not in needed("api")


@pytest.mark.parametrize("folder", ELSEWHERE)
def test_what_runs_in_vllms_python_imports_nothing_of_keepmtp(folder):
    for path in (ROOT / folder).rglob("*.py"):
        depth = len(path.parent.relative_to(ROOT / folder).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert "keepmtp" not in {name.split(".")[0] for name in names}, path
            assert not isinstance(node, ast.ImportFrom) or node.level <= depth + 1, path
