"""What is asked for before a job is what pip installs for it, and what some module of keepmtp
imports.
"""

import ast
import sys
import tomllib

import house
import pytest
from commands import ROOT
from keepmtp.recipes import extras
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.extras import missing, require_extra, requirements
from packaging.requirements import Requirement

DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = DECLARED["optional-dependencies"]


# Import names that are not the distribution's own.
IMPORTED_AS = {
    "lm-eval": "lm_eval",
    "markdown-it-py": "markdown_it",
    "nvidia-modelopt": "modelopt",
    "pyyaml": "yaml",
}
# `Tensor.numpy()` and `torch.from_numpy` import it; PyTorch does not require it.
BY_PYTORCH = {"numpy"}
# Programs and test modules, which no module of the package imports.
NO_PART_OF_THE_PACKAGE = "test"


def imported() -> set[str]:
    """The first parts of all names that modules of the package import, in any function."""
    found: set[str] = set()
    for path in house.sources():
        for node in ast.walk(house.parsed(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.partition(".")[0])
    return found


def unused(extras: dict[str, list[str]], modules: set[str]) -> list[str]:
    """The packages that an extra declares and no module imports."""
    known = modules | BY_PYTORCH | {"keepmtp"}
    never = list[str]()
    for extra, lines in extras.items():
        for line in lines:
            name = Requirement(line).name
            if IMPORTED_AS.get(name, name.replace("-", "_")) not in known:
                never.append(f"{name} of {extra}")
    return never


@pytest.mark.full
def test_what_no_module_imports_is_not_declared():
    extras = {name: lines for name, lines in EXTRAS.items() if name != NO_PART_OF_THE_PACKAGE}
    assert unused(extras | {"": DECLARED["dependencies"]}, imported()) == []
    assert unused({"calibrate": ["torch>=2", "pandas>=2"]}, imported()) == [
        "pandas of calibrate"
    ], "the twin"


def declared(extra: str) -> set[str]:
    """An extra's packages, those of the extras it includes too."""
    found = set()
    for line in EXTRAS[extra]:
        needed = Requirement(line)
        if needed.name == "keepmtp":
            for included in needed.extras:
                found |= declared(included)
        else:
            found.add(f"{needed.name}{needed.specifier}")
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_what_pyproject_says(extra):
    """Of the installed package's metadata; where this fails, the checkout is to be installed
    again.
    """
    assert {f"{needed.name}{needed.specifier}" for needed in requirements(extra)} == declared(extra)


def test_what_is_missing_is_named_with_its_cure(monkeypatch):
    assert missing("calibrate") == [], "the tests' own environment has everything"
    known = extras.version

    def version(name: str) -> str:
        if name == "datasets":
            raise extras.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(extras, "version", version)
    with pytest.raises(RecipeError, match="got no datasets") as caught:
        require_extra("here", "calibrate")
    assert str(caught.value) == (
        "here: needs keepmtp's `calibrate` extra; got no datasets. "
        f"Run {sys.executable} -m pip install 'keepmtp[calibrate]'."
    )
    require_extra("here", "quantize")


def test_a_version_that_is_too_old_is_missing(monkeypatch):
    monkeypatch.setattr(extras, "version", lambda name: "2.1.0")
    assert missing("quantize") == ["torch>=2.8"]
