"""JSON of others, parsed once: a checkpoint's config.json, index and small files; and the lines of
a user's file.

In: a file. Out: its object, the config with the right types, the index as tensor -> file, or a
value for each line.

Easy to get wrong: Python's JSON takes what vLLM does not (UTF-16, a byte order mark), and a deep
value ends in a RecursionError only where somebody copies it. Both are refused here. Infinity is
taken: configs of state-space models have it.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..recipes.config_keys import refuse_wrong_types
from ..recipes.errors import CheckpointError
from ..recipes.frozen import Json, Raw
from .safetensors_file import open_regular

_CURE = "Download it again"
_MAX_BYTES = 160 * 1024 * 1024  # an index of a million tensors
_MAX_DEPTH = 64


def read_bytes_of(path: Path, where: object, *, cure: str = _CURE) -> bytes:
    """The bytes of a file that is small.

    Raises:
        CheckpointError: no regular file, or too large.
    """
    with open_regular(path, where) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes > _MAX_BYTES:
            raise CheckpointError(
                where, f"must be at most {_MAX_BYTES} bytes long", got=num_bytes, cure=cure
            )
        return file.read(num_bytes)


def read_object(path: Path, where: object, *, cure: str = _CURE) -> Json:
    """The object of a JSON file.

    Args:
        path: the file.
        where: its name in messages.
        cure: what to do where it is refused.

    Raises:
        CheckpointError: no regular file, too large, not UTF-8, not JSON, too deep, half a
            character, or no object.
    """
    return object_of(read_bytes_of(path, where, cure=cure), where, cure=cure)


def object_of(raw: bytes, where: object, *, cure: str = _CURE) -> Json:
    """The object of JSON that was read already; see `read_object`."""
    found = parsed(_decoded(raw, where, cure), where, cure=cure)
    if not isinstance(found, dict):
        raise CheckpointError(where, "must be a JSON object", got=repr(found), cure=cure)
    return found


def parsed(text: str, where: object, *, cure: str = _CURE) -> Any:
    """The value of a stranger's JSON.

    Raises:
        CheckpointError: not JSON, too deep, or half a character: a surrogate without its other half
            is kept by Python, and fails where it is written again.
    """
    found = None
    try:
        found = json.loads(text)
        depth = _depth(found)
        if "\\ud" in text.lower():
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise CheckpointError(
            where,
            "every character must be one that UTF-8 can write",
            got="half of a surrogate pair",
            cure=cure,
        ) from error
    except ValueError as error:
        got = str(error)
        if not text:
            got = "an empty file"
        raise CheckpointError(where, "must be JSON", got=got, cure=cure) from error
    except RecursionError:
        depth = _MAX_DEPTH + 1
    if depth > _MAX_DEPTH:
        raise CheckpointError(
            where, f"values must be at most {_MAX_DEPTH} levels deep", got="more levels", cure=cure
        )
    return found


def read_text(path: Path, *, cure: str) -> str:
    """The text of a file that a user names, however long it is.

    Raises:
        CheckpointError: no regular file, or not UTF-8.
    """
    with open_regular(path, path, cure=cure) as file:
        return _decoded(file.read(), path, cure)


def read_lines(path: Path, *, cure: str) -> Iterator[tuple[str, Any]]:
    """Place (file:line) and value of each line of a .jsonl file that is not empty.

    Raises:
        CheckpointError: as `read_text` and `parsed`; names the line.
    """
    for number, line in enumerate(read_text(path, cure=cure).split("\n"), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, parsed(line, where, cure=cure)


def read_config(path: Path, where: object) -> Raw:
    """config.json, whose keys have the types that readers rely on (`recipes.config_keys`).

    Raises:
        CheckpointError: as `read_object`, or a key has another type; names it.
    """
    config = read_object(path, where)
    refuse_wrong_types(config, where)
    return config


def read_index(path: Path, where: object) -> Mapping[str, str]:
    """The index's weight_map: tensor -> file.

    Raises:
        CheckpointError: as `read_object`, or no weight_map, or one that does not map names to
            names.
    """
    found = read_object(path, where).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        rule = "weight_map must be an object with a file's name for each tensor"
        raise CheckpointError(where, rule, got=repr(found), cure=_CURE)
    return found


def _decoded(raw: bytes, where: object, cure: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(
            where, "must be text in UTF-8", got=f"{error.reason} at byte {error.start}", cure=cure
        ) from error


def _depth(value: Any) -> int:
    """Objects and lists inside of each other."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return 0
    return 1 + max(map(_depth, value), default=0)
