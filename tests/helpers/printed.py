"""What a user sees, compared whole with a text that a reader can open: tests/printed/."""

import os
from difflib import unified_diff
from pathlib import Path

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
