"""What is asked for before a job is what pip installs for it."""

import sys
import tomllib
from pathlib import Path

import pytest
from keepmtp.quantize.extras import EXTRAS, missing, require_extra
from keepmtp.recipes.errors import RecipeError

DECLARED = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def declared(extra: str) -> set[str]:
    """Import names of an extra's packages, those of the extras it includes too."""
    found = set()
    for requirement in DECLARED["optional-dependencies"][extra]:
        name, _, inner = requirement.partition(">=")[0].partition("[")
        found |= declared(inner.rstrip("]")) if name == "keepmtp" else {name.replace("-", "_")}
    return found


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_what_pyproject_says(extra):
    assert set(EXTRAS[extra]) == declared(extra)


def test_what_is_missing_is_named_with_its_cure(monkeypatch):
    assert missing("calibrate") == [], "the tests' own environment has everything"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RecipeError, match="got no datasets") as caught:
        require_extra("here", "calibrate", otherwise="do without")
    assert str(caught.value) == (
        "here: needs keepmtp's `calibrate` extra; got no datasets. Run pip install 'keepmtp[calibrate]', or do without."
    )
    require_extra("here", "quantize")
