"""What changes in a JSON file, as a unified diff that people read, with the reasons for it.

In: the file's bytes before and after, and the reasons. Out: lines of text.

Easy to get wrong: the comma after an item is no part of it. A list that gets one more item has one
changed line here, not two; so lines have no comma at their end. Files are the same if their values
are, however they are indented.
"""

import json
from collections.abc import Iterable, Mapping
from difflib import unified_diff
from itertools import groupby
from typing import Any

from ..recipes.errors import printable

_MOST_LINES = 14  # of one run that only adds or only removes
_MOST_COMPARED = (
    20_000  # lines: difflib takes minutes for an index in which thousands of lines change
)


def json_diff(
    name: str, before: bytes | None, after: bytes | None, reasons: Iterable[str] = ()
) -> list[str]:
    """The lines of a unified diff; [] if the values are the same.

    Args:
        name: the file's name.
        before, after: its bytes; None where there is no such file.
        reasons: why it changes.
    """
    old, new = _lines(before), _lines(after)
    if old == new:
        return []
    names = (
        ("/dev/null" if before is None else f"a/{name}"),
        ("/dev/null" if after is None else f"b/{name}"),
    )
    if len(old) + len(new) <= _MOST_COMPARED:
        _, _, *body = unified_diff(old, new, n=2, lineterm="")
    else:
        there, now = set(old), set(new)
        gone, added = (
            [line for line in old if line not in now],
            [line for line in new if line not in there],
        )
        body = [
            f"@@ -{len(old)} +{len(new)} @@",
            *(f"-{line}" for line in gone),
            *(f"+{line}" for line in added),
        ]
    lines = [f"--- {names[0]}", f"+++ {names[1]}", *(f"# {why}" for why in dict.fromkeys(reasons))]
    for _, run in groupby(body, key=lambda line: line[0]):
        lines += _cut([*run])
    return [printable(line) for line in lines]


def in_form_of(before: bytes | None, value: Mapping[str, Any]) -> bytes:
    """A JSON file with these values, indented and escaped as it was, so that a diff shows no more
    than what changed.
    """
    text = (before or b"").decode("utf-8", errors="replace")
    second = text.split("\n", 2)[1] if text.count("\n") else ""
    indent = len(second) - len(second.lstrip(" ")) or 2
    written = json.dumps(value, indent=indent, ensure_ascii="\\u" in text)
    return (written + ("\n" if text.endswith("\n") or not text else "")).encode()


def _lines(data: bytes | None) -> list[str]:
    if data is None:
        return []
    text = json.dumps(json.loads(data), indent=2, ensure_ascii=False)
    return [line.removesuffix(",") for line in text.split("\n")]


def _cut(lines: list[str]) -> list[str]:
    """A long run of lines, with a number in place of its middle."""
    if len(lines) <= _MOST_LINES or lines[0][0] not in "+-":
        return lines
    kept = _MOST_LINES // 2
    return [
        *lines[:kept],
        f"{lines[0][0]}  ... {len(lines) - 2 * kept:,} more lines ...",
        *lines[-kept:],
    ]
