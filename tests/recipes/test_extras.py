"""What is asked for before a job is what pip installs for it."""

import sys
import tomllib
from pathlib import Path

import pytest
from keepmtp.recipes import extras
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.extras import missing, require_extra, requirements
from packaging.requirements import Requirement

DECLARED = tomllib.loads((Path(__file__).parent.parent.parent / "pyproject.toml").read_text())["project"]
EXTRAS = DECLARED["optional-dependencies"]


def declared(extra: str) -> set[str]:
    """An extra's packages, those of the extras it includes too."""
    found = set()
    for needed in map(Requirement, EXTRAS[extra]):
        if needed.name == "keepmtp":
            found |= set().union(*map(declared, needed.extras))
        else:
            found.add(f"{needed.name}{needed.specifier}")
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_what_pyproject_says(extra):
    """Of the installed package's metadata; where this fails, the checkout is to be installed again."""
    assert {f"{needed.name}{needed.specifier}" for needed in requirements(extra)} == declared(extra)


def test_what_is_missing_is_named_with_its_cure(monkeypatch):
    assert missing("calibrate") == [], "the tests' own environment has everything"
    known = extras.version
    monkeypatch.setattr(extras, "version", lambda name: absent(name) if name == "datasets" else known(name))
    with pytest.raises(RecipeError, match="got no datasets") as caught:
        require_extra("here", "calibrate", otherwise="do without")
    assert str(caught.value) == (
        "here: needs keepmtp's `calibrate` extra; got no datasets. "
        f"Run {sys.executable} -m pip install 'keepmtp[calibrate]', or do without."
    )
    require_extra("here", "quantize")


def absent(name: str) -> str:
    raise extras.PackageNotFoundError(name)


def test_a_version_that_is_too_old_is_missing(monkeypatch):
    monkeypatch.setattr(extras, "version", lambda name: "2.1.0")
    assert missing("quantize") == ["torch>=2.8"]
