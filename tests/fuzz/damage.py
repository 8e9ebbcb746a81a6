"""Damage to files, as hypothesis draws it: plain values, which it shrinks and prints.

In: a folder, and a file in it. Out: strategies of edits, each of which is applied to a copy.

Easy to get wrong: an edit must not depend on what another one did, because a failing case is shrunk
by leaving edits out. So each reads the file as it is when it is applied.
"""

import json
import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from data_files import spelled, table
from hypothesis import strategies as st

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
NAMES = st.sampled_from([*ODD["names"], "x" * 100_000, "é" * 300]) | st.text(max_size=9)
FILES = st.sampled_from([*ODD["folders"], *ODD["files"]]) | NAMES.map(
    lambda name: (
        name[:90].translate({0: "0", ord("/"): "\u2215", 0xD800: "\udc80"}).strip(".") or "..."
    )
)
"""What a file can be called."""
VALUES = st.one_of(
    NAMES,
    st.sampled_from([*ODD["regexes"], "re:" + "(" * 400]),
    st.sampled_from([*ODD["numbers"], *ODD["others"], [1] * 10_000]),
    st.recursive(st.none() | st.integers() | st.floats(), st.lists, max_leaves=4),
)
"""Values that nobody expects."""
SPELLED = {
    "@5000 lists in lists@": "[" * 5000 + "]" * 5000,
    "@400 digits@": "9" * 400,
    "@1e400@": "1e400",
}
"""Those that `json.dumps` cannot write."""
BYTES = st.binary(max_size=9) | st.sampled_from(
    [spelled(raw).encode("latin") for raw in ODD["raw"]]
)
INDEX = "model.safetensors.index.json"


def regular(path: Path) -> Path:
    """The path, if it is a file of moderate size: another edit may have put a FIFO there."""
    if not path.is_file() or path.stat().st_size > 2**30:
        raise FileNotFoundError(path)
    return path


def replace(path: Path, content: bytes) -> None:
    """Write a file anew: the old one may be a hard link to the original."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def header_of(path: Path) -> bytes:
    with open(regular(path), "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return file.read(min(length, 2**30))


def put_header(path: Path, header: bytes, *, length: int | None = None, data: bytes = b"") -> None:
    """The shard with another header; without `data` its tensors are holes, so that gigabytes cost
    nothing.
    """
    size = max(0, path.stat().st_size - 8 - len(header_of(path)))
    replace(path, struct.pack("<Q", len(header) if length is None else length) + header + data)
    os.truncate(path, path.stat().st_size + size * (not data))


def tree_of(path: Path) -> Any:
    """What a file says: JSON, a shard's header, YAML, or a list of JSON lines."""
    if path.suffix == ".safetensors":
        return json.loads(header_of(path))
    if path.suffix == ".yaml":
        return yaml.safe_load(regular(path).read_text())
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in regular(path).read_text().splitlines()[:40]]
    return json.loads(regular(path).read_bytes())


def put_tree(path: Path, tree: Any) -> None:
    rows = [tree]
    if path.suffix == ".jsonl":
        rows = tree
    text = "\n".join(json.dumps(row) for row in rows)
    for word, raw in SPELLED.items():
        text = text.replace(json.dumps(word), raw)
    write = replace
    if path.suffix == ".safetensors":
        write = put_header
    write(path, text.encode())


def places(tree: Any, under: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a tree, without the root's."""
    if isinstance(tree, list):
        tree = dict(enumerate(tree))
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield (*under, key)
            yield from places(child, (*under, key))


# --- edits ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bytes:
    """Some bytes of a file, or of a shard's header, are others."""

    file: str
    at: int
    removed: int
    put: bytes
    in_header: bool = False

    def do(self, folder: Path) -> None:
        path = folder / self.file
        if self.in_header:
            put_header(path, self.changed(header_of(path)))
        else:
            replace(path, self.changed(regular(path).read_bytes()))

    def changed(self, raw: bytes) -> bytes:
        return raw[: self.at] + self.put + raw[self.at + self.removed :]


@dataclass(frozen=True)
class Encoded:
    """A text in another encoding."""

    file: str
    encoding: str

    def do(self, folder: Path) -> None:
        text = regular(folder / self.file).read_bytes().decode("utf-8", "replace")
        replace(folder / self.file, text.encode(self.encoding))


@dataclass(frozen=True)
class Length:
    """A shard's field of its header's length is another."""

    file: str
    length: int

    def do(self, folder: Path) -> None:
        path = folder / self.file
        put_header(path, header_of(path), length=self.length)


@dataclass(frozen=True)
class Tree:
    """A value is another, gone, in a list, under another name, or there twice."""

    file: str
    place: tuple[Any, ...]
    how: str
    new: Any
    name: str

    def do(self, folder: Path) -> None:
        tree = tree_of(folder / self.file)
        holder = tree
        for key in self.place[:-1]:
            holder = holder[key]
        key = self.place[-1]
        old = holder.pop(key)
        new = {"set": self.new, "wrap": [old, self.new]}.get(self.how, old)
        if isinstance(holder, list):
            holder[key:key] = [new] * (self.how != "remove")
        elif self.how != "remove":
            holder[key] = new
        if self.how in ("rename", "twin") and isinstance(holder, dict):
            holder[self.name] = old
        if self.how == "rename":
            del holder[key]
        put_tree(folder / self.file, tree)


@dataclass(frozen=True)
class Other:
    """At a name there is something else: no file, or one with this content."""

    file: str
    what: str

    def do(self, folder: Path) -> None:
        path = Path(os.path.normpath(f"{folder}/{self.file}"))
        beside = next(room for room in path.parents if (room / "beside").is_dir()) / "beside"
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            path.rename(beside / "was")
        path.unlink(missing_ok=True)
        what = self.what.format(beside=beside, near=os.path.relpath(beside, path.parent))
        if what == "a FIFO":
            os.mkfifo(path)
        elif what == "a folder":
            path.mkdir()
        elif what == "another user's folder":
            path.mkdir()
            os.chown(path, 1, 1)
        elif what == "a socket":
            # The name of a socket has at most 107 bytes.
            with socket.socket(socket.AF_UNIX) as bound, chdir(path.parent):
                bound.bind(path.name)
        elif what == "1.5 GiB of holes":
            path.touch()
            os.truncate(path, 3 * 2**29)
        elif what == "a hard link":
            os.link(beside / "secret", path)
        elif what.startswith("link "):
            path.symlink_to(what.removeprefix("link "))
        elif what != "gone":
            path.write_text(what)


@dataclass(frozen=True)
class Renamed:
    """A shard, and its lines in the index; or a tensor, in both."""

    where: str
    place: int
    name: str
    is_shard: bool

    def do(self, folder: Path) -> None:
        folder = folder / self.where
        index = tree_of(folder / INDEX)
        weights = index["weight_map"]
        old = sorted(weights)[self.place % len(weights)]
        file = weights[old]
        if self.is_shard:
            new = f"{self.name}.safetensors"
            index["weight_map"] = {key: {file: new}.get(at, at) for key, at in weights.items()}
            (folder / new).parent.mkdir(exist_ok=True)
            (folder / file).rename(folder / new)
        else:
            weights[self.name] = weights.pop(old)
            raw = header_of(folder / file)
            header = json.loads(raw)
            header[self.name] = header.pop(old)
            data = (folder / file).read_bytes()[8 + len(raw) :]
            put_header(folder / file, json.dumps(header).encode(), data=data)
        put_tree(folder / INDEX, index)


# --- strategies -----------------------------------------------------------------------------------


def trees(folder: Path, file: str, under: str = "") -> st.SearchStrategy[Tree]:
    """Deep trees have most of their values in few lists; each depth gets its share."""
    by_depth: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for place in places(tree_of(folder / file)):
        if not under or place[0] == under:
            by_depth[len(place)].append(place)
    place = st.one_of([st.sampled_from(by_depth[depth]) for depth in sorted(by_depth)])
    how = st.sampled_from(["set", "set", "set", "remove", "wrap", "rename", "twin"])
    return st.builds(Tree, st.just(file), place, how, VALUES, NAMES)


def damaged(folder: Path, file: str, under: str = "") -> st.SearchStrategy[Any]:
    """One file is another: no file, other bytes, or one other value."""
    name = st.just(file)
    ways = [st.builds(Other, name, st.sampled_from(ODD["things"]))]
    path = folder / file
    if not path.is_file():
        return ways[0]
    removed = st.sampled_from([0, 1, 8, 10**9])
    is_shard = path.suffix == ".safetensors"
    length = path.stat().st_size
    if is_shard:
        length = len(header_of(path))
        ways.append(
            st.builds(Length, name, st.sampled_from(ODD["lengths"]) | st.integers(0, 2**64 - 1))
        )
        ways.append(st.builds(Bytes, name, st.integers(0, length), removed, BYTES, st.just(True)))
    ways.append(st.builds(Bytes, name, st.integers(0, length), removed, BYTES))
    if not is_shard and length < 10**6:
        ways.append(st.builds(Encoded, name, st.sampled_from(["utf-16", "utf-32", "utf-8-sig"])))
    if path.suffix in (".json", ".jsonl", ".yaml", ".safetensors") and length < 10**6:
        ways += [trees(folder, file, under)] * (2 * len(ways))
    return st.one_of(ways)
