"""A report for other people, without the folders of this machine: each path becomes its last name.

In: a `FullReport`, or any text. Out: the same without a path that begins at the root. Numbers,
prompts and outputs stay as they are.

Easy to get wrong: a name with a space in it. First the folders of the report's own paths are
removed, whatever their names are. After that, only slashes show what is a path.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..facts.schema import FullReport

# Not after a letter, which is a relative path, nor after a slash or colon, which is an address; not
# a server's /v1/.
_PATH = re.compile(r"(?<![\w/:.~-])/(?!v1/)(?:[^\s/'\"`,;:()<>|]+/)+(?=[^\s/'\"`,;:()<>|])")
_PATH_FIELDS = frozenset({"path", "log", "samples"})
# Text of a model, or for one.
_TEXT_FIELDS = frozenset({"prompts", "outputs", "worst"})


def portable(report: FullReport) -> FullReport:
    """The report without this machine's folders; equal reports give equal ones."""
    content = report.model_dump(mode="json", by_alias=True)
    folders = {
        f"{PurePosixPath(path).parent}/" for path in _paths(content) if path.startswith("/")
    } - {"//"}
    return FullReport.model_validate(
        _walk(content, sorted(folders, key=lambda folder: (-len(folder), folder)))
    )


def shortened(text: str, folders: Sequence[str] = ()) -> str:
    """Text whose absolute paths are their last name; `folders`, with a slash at their ends, are
    removed first.
    """
    for folder in folders:
        text = text.replace(folder, "")
    return _PATH.sub("", text)


def _paths(value: Any, field: str = "") -> Iterator[str]:
    """Every value of a field that is a path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _paths(inner, field)
    elif field in _PATH_FIELDS and isinstance(value, str):
        yield value


def _walk(value: Any, folders: Sequence[str]) -> Any:
    if isinstance(value, dict):
        walked = {}
        for key, inner in value.items():
            walked[key] = inner
            if key not in _TEXT_FIELDS:
                walked[key] = _walk(inner, folders)
        return walked
    if isinstance(value, list):
        return [_walk(inner, folders) for inner in value]
    if isinstance(value, str):
        return shortened(value, folders)
    return value
