"""What changes in a JSON file, as a diff that people read: each hunk with the reasons for it.

In: the file's bytes before and after, and reasons for places in it. Out: lines of text.

Easy to get wrong: the comma after an item is no part of it. A list that gets one more item has one changed line here,
not two; so lines have no comma at their end. Files are the same if their values are, however they are indented.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from ..recipes.errors import printable

JSONPath = tuple[str | int, ...]
"""Keys and numbers that lead to a value, such as ("quantization_config", "ignore", 3)."""
_CONTEXT = 2
_MOST_LINES = 14  # of one hunk that only adds or only removes


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the file, and where the value on it is."""

    text: str
    place: JSONPath


def json_diff(
    name: str, before: bytes | None, after: bytes | None, reasons: Sequence[tuple[JSONPath, str]] = ()
) -> list[str]:
    """The lines of a unified diff; [] if the values are the same.

    Args:
        name: the file's name.
        before, after: its bytes; None where there is no such file.
        reasons: a place and why it changes. A reason is said at each hunk that touches its place.
    """
    old, new = (_lines(data) for data in (before, after))
    pairs = _trimmed([line.text for line in old], [line.text for line in new])
    hunks = [_hunk(old, new, group, reasons) for group in pairs]
    if not hunks:
        return []
    names = [
        f"--- a/{name}" if before is not None else "--- /dev/null",
        f"+++ b/{name}" if after is not None else "+++ /dev/null",
    ]
    return [*names, *(line for hunk in hunks for line in hunk)]


def in_form_of(before: bytes | None, value: Mapping[str, Any]) -> bytes:
    """A JSON file with these values, indented and escaped as it was, so that a diff shows no more than what changed."""
    text = (before or b"").decode("utf-8", errors="replace")
    second = text.split("\n", 2)[1] if text.count("\n") else ""
    indent = len(second) - len(second.lstrip(" ")) or 2
    written = json.dumps(value, indent=indent, ensure_ascii="\\u" in text)
    return (written + ("\n" if text.endswith("\n") or not text else "")).encode()


def _lines(data: bytes | None) -> list[_Line]:
    if data is None:
        return []
    return [*_rendered(json.loads(data), (), "", "")]


def _rendered(value: Any, place: JSONPath, before: str, indent: str) -> Iterator[_Line]:
    """A value as `json.dumps` indents it, line by line; `before` is what its line has in front of it."""
    if isinstance(value, dict | list) and value:
        is_object = isinstance(value, dict)
        items = [*value.items()] if is_object else [*enumerate(value)]
        yield _Line(f"{indent}{before}{'{' if is_object else '['}", place)
        for key, item in items:
            name = f"{json.dumps(key, ensure_ascii=False)}: " if is_object else ""
            yield from _rendered(item, (*place, key), name, f"{indent}  ")
        yield _Line(f"{indent}{'}' if is_object else ']'}", place)
    else:
        yield _Line(f"{indent}{before}{json.dumps(value, ensure_ascii=False)}", place)


def _trimmed(old: list[str], new: list[str]) -> list[list[tuple[str, int, int, int, int]]]:
    """Hunks of changes. What the two have in common at both ends is not compared: an index has 100,000 lines."""
    start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    most = min(len(old), len(new)) - start
    end = next((i for i in range(most) if old[-1 - i] != new[-1 - i]), most)
    start, end = max(0, start - _CONTEXT), max(0, end - _CONTEXT)
    matcher = SequenceMatcher(None, old[start : len(old) - end], new[start : len(new) - end], autojunk=False)
    groups = matcher.get_grouped_opcodes(_CONTEXT)
    moved = [[(tag, *(each + start for each in span)) for tag, *span in group] for group in groups]
    return [group for group in moved if any(tag != "equal" for tag, *_ in group)]  # pyright: ignore[reportReturnType]


def _hunk(
    old: list[_Line],
    new: list[_Line],
    group: list[tuple[str, int, int, int, int]],
    reasons: Sequence[tuple[JSONPath, str]],
) -> list[str]:
    first, last = group[0], group[-1]
    body, places = [], []
    for tag, start, end, new_start, new_end in group:
        if tag == "equal":
            body += [f" {line.text}" for line in old[start:end]]
            continue
        body += _cut([f"-{line.text}" for line in old[start:end]])
        body += _cut([f"+{line.text}" for line in new[new_start:new_end]])
        places += [line.place for line in (*old[start:end], *new[new_start:new_end])]
    said = dict.fromkeys(why for place, why in reasons if any(_touches(place, other) for other in places))
    head = f"@@ -{first[1] + 1},{last[2] - first[1]} +{first[3] + 1},{last[4] - first[3]} @@"
    return [head, *(f"# {why}" for why in said), *map(printable, body)]


def _cut(lines: list[str]) -> list[str]:
    """A long run of lines, with a number in place of its middle."""
    if len(lines) <= _MOST_LINES:
        return lines
    kept = _MOST_LINES // 2
    return [*lines[:kept], f"{lines[0][0]}  ... {len(lines) - 2 * kept:,} more lines ...", *lines[-kept:]]


def _touches(place: JSONPath, other: JSONPath) -> bool:
    shorter = min(len(place), len(other))
    return place[:shorter] == other[:shorter]
