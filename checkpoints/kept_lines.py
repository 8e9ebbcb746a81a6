"""Files of lines that a long run appends to, and that survive whatever ends it.

In: a path and whole lines. Out: the same lines on the disk, each whole or not there.

Easy to get wrong: a killed process may leave a part of a line at the end. It is cut off before anything is appended, or
two lines would become one that nobody can read.
"""

import os
from pathlib import Path

from ..recipes.errors import CheckpointError


def append_lines(path: Path, first: str, text: str, *, cure: str) -> None:
    """Append lines; they are on the disk when this returns.

    Args:
        path: in a folder that is there.
        first: what a new file begins with.
        text: whole lines.
        cure: what to do where the disk does not take them.

    Raises:
        CheckpointError: the disk does not take it. What it took before stays.
    """
    try:
        with open(path, "a", encoding="utf-8") as file:
            if not file.tell():
                file.write(first)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(path, "must be writable", got=error.strerror or repr(error), cure=cure) from error


def has_whole_lines(path: Path) -> bool:
    """Whether there is one; a part of a line at the end is cut off."""
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return False
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        os.truncate(path, end)
    return end > 0
