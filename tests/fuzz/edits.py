"""One change to one file, described in words: what a fuzz case is made of.

In: a file's bytes, text or JSON tree, and a random generator. Out: an `Edit`, which is applied to a
folder.

Easy to get wrong: an edit must not depend on what another one did, because a failing case is shrunk
by leaving edits out. So each reads the file as it is when it is applied.
"""

import json
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml
from data_files import json_of, put_json, table

UNEDITABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    struct.error,
    yaml.YAMLError,
)
"""What an edit may raise where one before it has left nothing to edit."""
ODD = table("fuzz/odd")
NAMES = (*ODD["names"], "x" * 100_000, "é" * 300)
REGEXES = (*ODD["regexes"], "re:" + "(" * 400)
OTHERS = (*ODD["others"], [1] * 10_000)
SPELLED = {
    "@5000 lists in lists@": "[" * 5000 + "]" * 5000,
    "@400 digits@": "9" * 400,
    "@1e400@": "1e400",
}
"""Values that `json.dumps` cannot write."""


@dataclass(frozen=True, slots=True)
class Edit:
    """What is done, in words, and the function that does it to a folder."""

    says: str
    do: Callable[[Path], object]


def value(rng: Random) -> Any:
    """A value that nobody expects."""
    return rng.choice(rng.choice((REGEXES, NAMES, ODD["numbers"], OTHERS)))


def shown(given: Any) -> str:
    text = ascii(given)
    if len(text) <= 60:
        return text
    return f"{text[:50]}... ({len(text)} characters)"


# --- files and bytes ------------------------------------------------------------------------------


def regular(path: Path) -> Path:
    """The path, if it is a file of moderate size: another edit may have put a FIFO or a device
    there.
    """
    if not path.is_file() or path.stat().st_size > 2**30:
        raise FileNotFoundError(path)
    return path


def replace(path: Path, content: bytes) -> None:
    """Write a file anew: the old one may be a hard link to the original."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def on_bytes(file: str, says: str, change: Callable[[bytes], bytes]) -> Edit:
    def do(folder: Path) -> None:
        path = folder / file
        replace(path, change(regular(path).read_bytes()))

    return Edit(f"{file}: {says}", do)


def mangled(rng: Random, file: str, length: int) -> Edit:
    """A change that knows nothing of what the bytes mean."""
    at = rng.randrange(max(length, 1))
    byte = rng.randrange(256)
    encoding = rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig"))
    raws = (b"", b"null", b"[]", b"1" * 5000, b"[" * 100_000, b'{"a":' * 100_000 + b"1" * 9)
    other = rng.choice(raws)
    more = rng.choice((bytes(9), b'"\xe9'))
    ways = (
        (f"byte {at} is {byte}", lambda raw: raw[:at] + bytes([byte]) + raw[at + 1 :]),
        (f"cut after {at} bytes", lambda raw: raw[:at]),
        (f"in {encoding}", lambda raw: raw.decode("utf-8", "replace").encode(encoding)),
        (f"{more!a} at {at}", lambda raw: raw[:at] + more + raw[at:]),
        ("once more after it", lambda raw: raw + raw),
        (f"{shown(other)} in its place", lambda raw: other),
    )
    return on_bytes(file, *rng.choice(ways))


def no_file(rng: Random, file: str) -> Edit:
    """A file that is no file."""
    links = ("loop", "nothing", "/dev/zero", ".", "beside/secret", "beside/secret.json")
    says = rng.choice(("a FIFO", "a folder", "gone", "a socket", "1.5 GiB of holes", *links))

    def do(folder: Path) -> None:
        path = folder / file
        path.unlink(missing_ok=True)
        if says == "a FIFO":
            os.mkfifo(path)
        elif says == "a folder":
            path.mkdir()
        elif says == "a socket":
            # The name of a socket has at most 107 bytes.
            with socket.socket(socket.AF_UNIX) as bound, chdir(path.parent):
                bound.bind(path.name)
        elif says == "1.5 GiB of holes":
            path.touch()
            os.truncate(path, 3 * 2**29)
        elif says == "loop":
            path.symlink_to(path.name)
        elif says.startswith("beside"):  # what lies beside the case's folder
            rooms = (room for room in path.parents if (room / "beside").is_dir())
            path.symlink_to(os.path.relpath(next(rooms, path.parent) / says, path.parent))
        elif says in links:
            path.symlink_to(says)

    return Edit(f"{file}: is {says}", do)


# --- JSON trees -----------------------------------------------------------------------------------


def text_of(tree: Any) -> str:
    """JSON, with the values that json.dumps cannot write."""
    text = json.dumps(tree)
    for word, raw in SPELLED.items():
        text = text.replace(json.dumps(word), raw)
    return text


def places(tree: Any, under: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a tree, without the root's."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield (*under, key)
            yield from places(child, (*under, key))


def on_tree(file: str, says: str, change: Callable[[Any], Any], *, header: bool = False) -> Edit:
    """A change of a file's JSON, or of a shard's header, in place, or a new tree if `change`
    returns one.
    """

    def do(folder: Path) -> None:
        path = folder / file
        if header:
            tree, _ = read_header(path)
            write = write_shard
        else:
            tree = json_of(regular(path))
            write = replace
        changed = change(tree)
        if changed is None:
            changed = tree
        write(path, text_of(changed).encode())

    where = file
    if header:
        where = f"{file}: header"
    return Edit(f"{where}: {says}", do)


def at(tree: Any, place: tuple[Any, ...]) -> Any:
    """The value at the end of a path."""
    for key in place:
        tree = tree[key]
    return tree


def put(file: str, place: tuple[Any, ...], new: Any, *, header: bool = False) -> Edit:
    """A value of the tree, or of a shard's header, is this one, which may be there or not."""

    def do(tree: Any) -> None:
        at(tree, place[:-1])[place[-1]] = new

    where = ".".join(str(key) for key in place)
    return on_tree(file, f"{where[:80]} = {shown(new)}", do, header=header)


def grafted(
    rng: Random, file: str, tree: Any, *, under: tuple[Any, ...] = (), header: bool = False
) -> Edit:
    """A value of the tree, or of a shard's header, is another, gone, wrapped in a list, or under
    another name.
    """
    found = [place for place in places(tree) if place[: len(under)] == under and place]
    if not found:
        return on_bytes(file, "null", lambda raw: b"null")
    # Deep trees have most of their values in few lists; each depth gets its share.
    by_depth: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for place in found:
        by_depth[len(place)].append(place)
    place = rng.choice(by_depth[rng.choice(sorted(by_depth))])
    new = value(rng)
    name = rng.choice(NAMES)
    how = rng.choice(("set", "set", "set", "set", "remove", "wrap", "rename"))

    def change(tree: Any) -> None:
        holder = at(tree, place[:-1])
        old = holder.pop(place[-1])
        key = place[-1]
        if how == "remove":
            return
        put = {"set": new, "wrap": [old], "rename": old}[how]
        if isinstance(holder, list):
            holder.insert(key, put)
        elif how == "rename":
            holder[name] = put
        else:
            holder[key] = put

    to = shown(new)
    if how == "rename":
        to = shown(name)
    where = ".".join(str(key) for key in place)
    return on_tree(file, f"{where[:80]} {how} {to}", change, header=header)


def grafted_line(rng: Random, file: str, rows: list[Any]) -> Edit:
    """A value in one line of a file of JSON lines is another."""
    at = rng.randrange(len(rows))
    inner = grafted(rng, "row", rows[at])

    def do(folder: Path) -> None:
        put_json(folder / "row", rows[at])
        inner.do(folder)
        changed = (folder / "row").read_bytes()
        (folder / "row").unlink()
        lines = [json.dumps(row).encode() for row in rows]
        lines[at] = changed
        replace(folder / file, b"\n".join(lines))

    return Edit(f"{file}: line {at + 1}, {inner.says}", do)


def spoilt(rng: Random, folder: Path, file: str, *, under: tuple[Any, ...] = ()) -> Edit:
    """One file is another: no file, other bytes, or, of JSON and of JSON lines, one other value."""
    path = folder / file
    way = rng.random()
    if way < 0.12 or not path.is_file():
        return no_file(rng, file)
    if path.suffix == ".json" and way < 0.9 and path.stat().st_size < 10**6:
        return grafted(rng, file, json_of(path), under=under)
    if path.suffix == ".jsonl" and way < 0.9:
        rows = [json.loads(line) for line in path.read_text().splitlines()[:40]]
        return grafted_line(rng, file, rows)
    return mangled(rng, file, path.stat().st_size)


# --- headers --------------------------------------------------------------------------------------


def read_header(path: Path) -> tuple[Any, int]:
    """A shard's header, and where its tensors start."""
    with open(regular(path), "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(min(length, 2**30))), 8 + length


def write_shard(path: Path, header: bytes, *, length: int | None = None) -> None:
    """The shard with another header; the tensors are holes, so that a file of gigabytes costs
    nothing.
    """
    try:
        _, start = read_header(path)
        size = path.stat().st_size - start
    except UNEDITABLE:
        size = 0
    if length is None:
        length = len(header)
    replace(path, struct.pack("<Q", length) + header)
    os.truncate(path, path.stat().st_size + size)
