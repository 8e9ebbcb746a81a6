"""Files of lines that a long run appends to, and that survive whatever ends it.

In: a path and whole lines, the first of them a header. Out: the same lines on the disk, each whole or not there.

Easy to get wrong: a killed process may leave a part of a line at the end. It is cut off before anything is appended, or
two lines would become one that nobody can read. And lines of one protocol say nothing under another: a file of another
header is set aside, and taken up again when that comes back.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import ValidationError

from ..recipes.errors import CheckpointError, first_fault
from .fact import Fact
from .json_file import read_bytes_of


class KeptHeader(Fact):
    """The first line: all that the lines below depend on."""

    @property
    def digits(self) -> str:
        """Eight hexadecimal digits that tell headers apart."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:8]


class _KeptFile(Protocol):
    @property
    def header(self) -> KeptHeader: ...


_Kept = TypeVar("_Kept", bound=_KeptFile)
_Line = TypeVar("_Line", bound=Fact)


def open_kept(
    path: Path, header: KeptHeader, *, read: Callable[[Path], _Kept], make: Callable[[], _Kept]
) -> tuple[_Kept, Path | None]:
    """The file to go on with, and where one with another header has been set aside to.

    Args:
        path: of the file; its folder is made.
        header: of the run.
        read: every line of a file that is there.
        make: a file without a line.

    Raises:
        CheckpointError: a file that cannot be read.
    """
    aside = None
    if has_whole_lines(path):
        found = read(path)
        if found.header == header:
            return found, None
        aside = _aside(path, found.header)
        os.replace(path, aside)
    kept = _aside(path, header)
    if kept.is_file():
        os.replace(kept, path)
        return read(path), aside
    path.parent.mkdir(parents=True, exist_ok=True)
    return make(), aside


def read_kept(path: Path, *, cure: str) -> list[str]:
    """The lines of a file, without their ends; an empty file has one empty line.

    Raises:
        CheckpointError: no such file, bytes that are no text, or a part of a line at the end.
    """
    try:
        lines = read_bytes_of(path, path, cure=cure).decode().split("\n")  # not splitlines, which knows other ends
    except UnicodeDecodeError as error:
        raise CheckpointError(path, "must be a file of lines of text", got=str(error), cure=cure) from error
    if lines.pop():
        raise CheckpointError(path, "must end with a line's end", got="a part of a line", cure=cure)
    return lines or [""]


def parse_line(kind: type[_Line], line: str, where: str, *, rule: str, cure: str) -> _Line:
    """The fact that a line holds.

    Raises:
        CheckpointError: it holds none of this kind.
    """
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        raise CheckpointError(where, rule, got=first_fault(error), cure=cure) from error


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


def _aside(path: Path, header: KeptHeader) -> Path:
    return path.with_name(f"{path.stem}.{header.digits}{path.suffix}")
