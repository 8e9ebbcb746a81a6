"""Data of tests, which a reader can open: JSON, tables of cases in YAML beside the tests, and texts that
commands print, in tests/printed/.
"""

import json
import os
from collections.abc import Callable, Iterable
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import yaml


def json_of(path: Path) -> Any:
    return json.loads(path.read_bytes())


def put_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def put_lines(path: Path, rows: Iterable[object]) -> None:
    """JSON Lines: each row is a line of its own."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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


_STORED = Path(__file__).parents[1] / "printed"


def printed(name: str, text: str) -> None:
    """Compare `text` with tests/printed/`name`. WRITE_PRINTED=1 stores it instead: read the difference before a commit."""
    path = _STORED / name
    if os.environ.get("WRITE_PRINTED"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    changes = unified_diff(path.read_text().splitlines(), text.splitlines(), lineterm="")
    assert text == path.read_text(), "\n".join(
        [f"{path}: what is printed has changed; WRITE_PRINTED=1 stores it.", *changes]
    )
