"""Files of JSON, read and written whole."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def json_of(path: Path) -> Any:
    return json.loads(path.read_bytes())


def put_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def put_lines(path: Path, rows: Iterable[object]) -> None:
    """JSON Lines: each row is a line of its own."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
