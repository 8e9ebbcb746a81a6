"""Cases and facts that are data: YAML files beside the tests, which a reader can open."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

_TESTS = Path(__file__).parents[1]


def table(name: str) -> Any:
    """What is in tests/`name`.yaml."""
    return yaml.safe_load((_TESTS / f"{name}.yaml").read_text())


def cases(test: Callable[..., None]) -> Callable[..., None]:
    """`parametrize` from the YAML file of a test's own name: under the test, parameters and their
    rows.
    """
    file = Path(test.__code__.co_filename)
    ((names, rows),) = yaml.safe_load(file.with_suffix(".yaml").read_text())[test.__name__].items()
    return pytest.mark.parametrize(names, rows)(test)


def spelled(text: str | list[tuple[str, int]]) -> str:
    """A text of a table, or the pieces of a long one, each as often as it says."""
    if isinstance(text, str):
        return text
    return "".join(piece * times for piece, times in text)
