"""Files of JSON, read and written whole."""

import json
from pathlib import Path
from typing import Any


def json_of(path: Path) -> Any:
    return json.loads(path.read_bytes())


def put_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
