"""A checkpoint as it would be after some changes: judged from headers before a byte is written, then written.

In: an opened checkpoint, and `Edit`s. Out: a folder of headers for the check and the dry load; and a `Rewrite`.

Easy to get wrong: a change is made to what the changes before it have left. So names here are those of the moment, and
each tensor knows the old bytes that it is made from.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from ..checkpoints.companions import HF_QUANT_CONFIG, INDEX
from ..checkpoints.files import within
from ..checkpoints.safetensors_file import Entry
from ..checkpoints.scratch import ScratchFolder
from ..checkpoints.source import Source, read, small_bytes, small_object
from ..recipes.family import HFName
from ..validate.dryload.hollow import SMALL_FILES, write_headers
from .json_diff import JSONPath, in_form_of, json_diff
from .new_shards import NewTensor, as_it_was, write_shard
from .rewritten import Rewrite, new_index

Converts = Callable[[bytes], bytes] | None
CONFIG = "config.json"
COPIES = "mtp_copies.safetensors"
"""The shard of tensors that are copies of others."""
REMOVED = object()
"""A JSON value that is no longer there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetValue:
    """A value of a JSON file; REMOVED takes the key away, or, at the place (), the file."""

    file: str
    place: JSONPath
    value: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """A safetensors file that the index gets."""

    file: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexAgain:
    """The index is written from the files."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retensor:
    """A tensor in another form with the same values; None leaves it out.

    Attributes:
        name: its name now.
        new: name, dtype and shape; `data` is filled in.
        convert: its bytes in the new dtype; None where they stay.
    """

    name: HFName
    new: NewTensor | None
    why: str
    convert: Converts = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTensor:
    """A copy of a tensor under a second name."""

    name: HFName
    of: HFName
    why: str


Edit = SetValue | IndexFile | IndexAgain | Retensor | CopyTensor


class Proposal:
    """What a checkpoint would be.

    Attributes:
        source: as it is.
        edits: those that were made, in their order.
        not_here: reasons of those that need the shards on this machine, for a repository that was not downloaded.
    """

    def __init__(self, source: Source):
        self.source = source
        self.edits: list[Edit] = []
        self.not_here: dict[str, None] = {}
        self._before = {name: small_bytes(source, name) for name in (CONFIG, HF_QUANT_CONFIG)}
        self._docs: dict[str, Any] = {
            CONFIG: deepcopy(dict(source.config)),
            HF_QUANT_CONFIG: small_object(source, HF_QUANT_CONFIG) if self._before[HF_QUANT_CONFIG] else None,
        }
        everything = (*source.entries.values(), *source.unindexed.values())
        self._tensors = {entry.name: (entry.file, as_it_was(entry)) for entry in everything}
        self._indexed = {entry.file for entry in source.entries.values()}
        self._old_index = self._indexed.copy()
        self._touched: set[str] = set()
        self._is_index_new = False

    def copy(self) -> "Proposal":
        """Another one with the same changes, so that more can be tried; they share `not_here`."""
        other = copy(self)
        for name in ("edits", "_tensors", "_indexed", "_touched"):
            setattr(other, name, getattr(self, name).copy())
        other._docs = deepcopy(self._docs)
        return other

    @property
    def names(self) -> tuple[str, ...]:
        """The JSON files that it has."""
        return tuple(name for name, value in self._docs.items() if value is not None)

    def value(self, file: str, place: JSONPath) -> Any:
        """A copy of a value of a JSON file; None if it is not there."""
        value = self._docs[file]
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        return deepcopy(value)

    def bytes_of(self, name: HFName) -> bytes:
        """A tensor's bytes as they would be; its shard is on this machine."""
        tensor = self._tensors[name][1]
        assert isinstance(tensor.data, Entry)
        whole = bytearray(tensor.data.num_bytes)
        read(self.source, tensor.data, memoryview(whole))
        return bytes(whole) if tensor.convert is None else tensor.convert(bytes(whole))

    def make(self, change: Edit) -> bool:
        """Make a change; False if it changes nothing, or cannot be made here."""
        is_bytes = isinstance(change, Retensor | CopyTensor)
        if is_bytes and self.source.folder is None:
            self.not_here[change.why] = None
            return False
        is_made = {
            SetValue: self._set,
            IndexFile: self._index_file,
            IndexAgain: self._index_again,
            Retensor: self._retensor,
            CopyTensor: self._copy,
        }[type(change)](change)
        if is_made:
            self.edits.append(change)
        return is_made

    def diffs(self) -> list[str]:
        """The lines of a diff of every small file that changes, and a line for each kind of change of a tensor."""
        lines = []
        for name, data in sorted(self.files().items() | {(INDEX, index) for index in [self._index()] if index}):
            before = self._before[name] if name in self._before else small_bytes(self.source, name)
            lines += json_diff(name, before, data, self._reasons(name))
        return [*lines, *self._tensor_lines()]

    def _reasons(self, file: str) -> list[tuple[JSONPath, str]]:
        """Why a file changes, by place; all other changes are reasons of the index."""
        set_here = [change for change in self.edits if isinstance(change, SetValue)]
        if file != INDEX:
            return [(change.place, change.why) for change in set_here if change.file == file]
        named = [each for each in self.edits if not isinstance(each, SetValue) and not _keeps_its_name(each)]
        return [((), change.why) for change in named]

    def files(self) -> dict[str, bytes]:
        """The JSON files that change, without the index."""
        found = {}
        for name, value in self._docs.items():
            before = self._before[name]
            if value is not None and (before is None or value != json.loads(before)):
                found[name] = in_form_of(before, value)
        return found

    def small_files(self) -> dict[str, bytes | None]:
        """The small files that change, with the index; None for one that is left out."""
        gone = dict.fromkeys(name for name, value in self._docs.items() if value is None and self._before[name])
        index = self._index()
        return {**gone, **self.files(), **({INDEX: index} if index else {})}

    def rewrite(self, made_by: str) -> Rewrite:
        """How it is written."""
        gone = {name for name, value in self._docs.items() if value is None and self._before[name] is not None}
        shards = self._new_shards()
        tensors = [(file, *_as_written(tensor)) for file, tensors in shards.items() for tensor in tensors]
        digest = sha256(json.dumps(tensors).encode()).hexdigest()
        sizes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
        index = self._index()

        def write(partial: Path) -> Sequence[str]:
            return [write_shard(within(partial, file), tensors, self.source) for file, tensors in shards.items()]

        return Rewrite(
            source=self.source,
            made_by=f"{made_by} {digest}",
            files=self.files() | ({INDEX: index} if index else {}),
            left_out=frozenset(gone),
            indexed=frozenset(self._indexed - self._old_index),
            write_shards=write,
            num_shard_bytes=sizes,
        )

    @contextmanager
    def headers(self) -> Iterator[Path]:
        """A folder that the check and vLLM can read it from: JSON files, and headers with holes for the weights."""
        with ScratchFolder("keepmtp-proposal-") as folder:
            small = {name: small_bytes(self.source, name) for name in SMALL_FILES if name not in self._docs}
            small |= {name: json.dumps(value).encode() for name, value in self._docs.items() if value is not None}
            small |= dict.fromkeys(self.source.code, b"")
            small[INDEX] = self._index() or small_bytes(self.source, INDEX)
            for name, data in small.items():
                if data is not None:
                    within(folder, name).write_bytes(data)
            for file, entries in self._entries().items():
                write_headers(within(folder, file), entries)
            yield folder

    def _set(self, change: SetValue) -> bool:
        if change.place == ():
            is_there, self._docs[change.file] = self._docs[change.file] is not None, None
            return is_there
        holder = self._docs[change.file]
        for key in change.place[:-1]:
            holder = holder.setdefault(key, {})
        last = change.place[-1]
        if change.value is REMOVED:
            return holder.pop(last, REMOVED) is not REMOVED
        if last in holder and holder[last] == change.value:
            return False
        holder[last] = change.value
        return True

    def _index_file(self, change: IndexFile) -> bool:
        names = {name for name, (file, _) in self._tensors.items() if file == change.file}
        if change.file in self._indexed or not names:
            return False
        self._indexed.add(change.file)
        return True

    def _index_again(self, change: IndexAgain) -> bool:
        is_made = not self._is_index_new and new_index(self.source) is not None
        self._is_index_new = True
        return is_made

    def _retensor(self, change: Retensor) -> bool:
        if change.name not in self._tensors:
            return False
        file, old = self._tensors[change.name]
        new = change.new and replace(change.new, data=old.data, convert=_both(old.convert, change.convert))
        if new == old or (new is not None and new.name != old.name and new.name in self._tensors):
            return False
        del self._tensors[change.name]
        if new is not None:
            self._tensors[new.name] = (file, new)
        self._touched.add(file)
        return True

    def _copy(self, change: CopyTensor) -> bool:
        if change.name in self._tensors or change.of not in self._tensors:
            return False
        self._tensors[change.name] = (COPIES, replace(self._tensors[change.of][1], name=change.name))
        self._indexed.add(COPIES)
        self._touched.add(COPIES)
        return True

    def _new_shards(self) -> dict[str, list[NewTensor]]:
        """The shards that are written, with their tensors in the order that they had."""
        return {
            file: [tensor for where, tensor in self._tensors.values() if where == file]
            for file in sorted(self._touched)
        }

    def _entries(self) -> dict[str, list[Entry]]:
        """The headers of all shards."""
        found: dict[str, list[Entry]] = defaultdict(list)
        for file, tensor in self._tensors.values():
            start = found[file][-1].start + found[file][-1].num_bytes if found[file] else 0
            found[file].append(
                Entry(
                    name=tensor.name,
                    file=file,
                    dtype=tensor.dtype,
                    shape=tensor.shape,
                    start=start,
                    num_bytes=tensor.num_bytes,
                )
            )
        return found

    def _index(self) -> bytes | None:
        """The new index; None if the old one stays, or none is needed."""
        if not (self._is_index_new or self._touched or self._indexed != self._old_index):
            return None
        added = [entry for file, entries in self._entries().items() if file in self._touched for entry in entries]
        fresh = frozenset(self._indexed - self._old_index)
        return new_index(self.source, indexed=fresh, added=[entry for entry in added if entry.file in self._indexed])

    def _tensor_lines(self) -> list[str]:
        """What becomes of tensors, a line for each reason."""
        groups: dict[str, list[str]] = defaultdict(list)
        for change in self.edits:
            if isinstance(change, Retensor):
                new = change.new
                says = f"{new.name} {new.dtype}{list(new.shape)}" if new is not None else "left out"
                groups[change.why].append(f"{change.name} -> {says}")
            elif isinstance(change, CopyTensor):
                groups[change.why].append(f"{change.name}, a copy of {change.of}, in {COPIES}")
        lines = []
        for why, each in groups.items():
            more = [f"~  ... {len(each) - 4:,} more ..."] if len(each) > 4 else []
            lines += ["--- tensors", f"# {why}", *(f"~ {line}" for line in each[:4]), *more]
        return lines


def _keeps_its_name(change: Edit) -> bool:
    return isinstance(change, Retensor) and change.new is not None and change.new.name == change.name


def _as_written(tensor: NewTensor) -> tuple[str, str, list[int]]:
    return tensor.name, tensor.dtype, list(tensor.shape)


def _both(first: Converts, then: Converts) -> Converts:
    """One conversion after another."""
    if first is None or then is None:
        return first or then
    return lambda data: then(first(data))
