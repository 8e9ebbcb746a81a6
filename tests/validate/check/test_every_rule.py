"""A rule's test is found by its name: what makes findings has a `test_` of its own, in the file that
mirrors its module.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from broken import BROKEN
from commands import ROOT
from keepmtp.validate.check.check import RULES, WITHOUT_FAMILY

MODULES = [
    *sorted((ROOT / "validate" / "check").rglob("*.py")),
    ROOT / "validate" / "dryload" / "verdict_findings.py",
]


def functions(file: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def makes_findings(function: ast.FunctionDef) -> bool:
    """Whether it returns objections, or makes one for what it returns."""
    if function.returns and "Objection" in ast.unparse(function.returns):
        return True
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id == "objection" for called in calls)


def untested(module: Path, tests: Path) -> list[str]:
    """The functions of a module that make findings and have no test in the file."""
    written = []
    if tests.is_file():
        body = ast.parse(tests.read_text()).body
        written = [getattr(node, "name", ast.unparse(node).partition(" ")[0]) for node in body]
    missing = []
    for function in functions(module):
        name = f"test_{function.name.lstrip('_')}"
        is_tested = any(test == name or test.startswith(f"{name}_") for test in written)
        if makes_findings(function) and not is_tested:
            missing.append(function.name)
    return missing


def test_what_makes_findings_has_a_test_of_its_name():
    missing = {}
    for module in MODULES:
        mirrored = module.relative_to(ROOT).with_name(f"test_{module.name}")
        names = untested(module, ROOT / "tests" / mirrored)
        if names:
            missing[str(mirrored)] = names
    assert missing == {}


def test_a_function_without_one_is_named(tmp_path):
    module = tmp_path / "rules.py"
    tests = tmp_path / "test_rules.py"
    module.write_text(
        "def one(view) -> Objections: ...\n"
        "def _other(view):\n    return [objection('x', '', '', '')]\n"
        "def no_rule(view) -> bool: ...\n"
    )
    assert untested(module, tests) == ["one", "_other"]
    tests.write_text("def test_one_of_many(): ...\n")
    assert untested(module, tests) == ["_other"]


def test_rules_say_what_they_hold_and_are_met_by_people():
    assert len({case.rule for case in BROKEN}) >= 26
    assert all(rule.__doc__ for rule in (*RULES, *WITHOUT_FAMILY))
