"""A checkpoint as it would be after some changes: judged from headers before a byte is written.

In: an opened checkpoint, and changes of its configs, its index and its tensors, each with the
reason. Out: the small files that change, and the `Source` that it would be, for the check and the
dry load.

Easy to get wrong: a change is made to what the changes before it have left. So tensors are known by
file and name of the moment. Each keeps the place of its old bytes.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

from ..recipes.errors import CheckpointError
from ..recipes.family import HFName
from ..recipes.frozen import Json, Raw
from .companions import HF_QUANT_CONFIG, INDEX
from .safetensors_file import Entry
from .source import Source, small_bytes, small_object

JSONPath = tuple[str, ...]
"""Keys that lead to a value, such as ("quantization_config", "ignore")."""
CONFIG = "config.json"
_PLACES: tuple[JSONPath, ...] = (
    ("quantization_config",),
    ("text_config", "quantization_config"),
    ("compression_config",),
)


class Edit(NamedTuple):
    """A change that was made.

    Attributes:
        why: the reason.
        file: the JSON file that changes; "" for a tensor.
        says: what becomes of the tensor.
    """

    why: str
    file: str = ""
    says: str = ""


class Proposal:
    """What a checkpoint would be.

    Attributes:
        source: as it is.
        edits: those that were made, in their order.
        not_here: reasons of those that need the shards on this machine, for a repository that was
            not downloaded.
        made_shards: names of new shards that somebody else writes.
    """

    def __init__(self, source: Source):
        self.source = source
        self.edits: list[Edit] = []
        self.not_here: dict[str, None] = {}
        self.made_shards: set[str] = set()
        self._docs: dict[str, Any] = {
            CONFIG: deepcopy(dict(source.config)),
            HF_QUANT_CONFIG: small_object(source, HF_QUANT_CONFIG),
        }
        self._listed = frozenset(entry.file for entry in source.entries.values())
        self._indexed = set(self._listed)
        self._touched: set[str] = set()
        self._has_index = source.has_index

    @cached_property
    def _shards(self) -> dict[str, dict[HFName, Entry]]:
        """The tensors of each file; made once something looks at it."""
        shards: dict[str, dict[HFName, Entry]] = defaultdict(dict)
        for entry in (*self.source.entries.values(), *self.source.unindexed.values()):
            shards[entry.file][entry.name] = entry
        return shards

    def copy(self) -> "Proposal":
        """Another one with the same changes, so that more can be tried; they share `not_here`."""
        other = copy(self)
        other.edits = self.edits.copy()
        other._docs = deepcopy(self._docs)
        other._indexed = self._indexed.copy()
        other._touched = self._touched.copy()
        other._shards = defaultdict(dict)
        for file, tensors in self._shards.items():
            other._shards[file] = tensors.copy()
        return other

    # --- JSON files -------------------------------------------------------------------------------

    def value(self, file: str, place: JSONPath) -> Any:
        """A copy of a value of a JSON file; None if it is not there."""
        value = self._docs.get(file)
        for key in place:
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return deepcopy(value)

    def set(self, file: str, place: JSONPath, value: Any, why: str) -> None:
        """Give a JSON file another value; without a place, another content, or none at all."""
        holder = self._docs
        place = (file, *place)
        for key in place[:-1]:
            holder = holder.setdefault(key, {})
        if place[-1] not in holder or holder[place[-1]] != value:
            holder[place[-1]] = value
            self.edits.append(Edit(why, file))

    @property
    def config_place(self) -> JSONPath | None:
        """Where config.json has its quantization config, as `choose.quantization_of` looks for
        it.
        """
        for place in _PLACES:
            if isinstance(self.value(CONFIG, place), dict):
                return place
        return None

    @property
    def quantization_at(self) -> tuple[str, JSONPath]:
        """The file and the place in it where vLLM finds algorithm and lists."""
        place = self.config_place
        if place is None:
            return HF_QUANT_CONFIG, ("quantization",)
        inner = (*place, "quantization")
        if isinstance(self.value(CONFIG, inner), dict):
            return CONFIG, inner
        return CONFIG, place

    @property
    def is_nested(self) -> bool:
        """Whether that is below `quantization`, as modelopt writes it."""
        return self.quantization_at[1][-1] == "quantization"

    def quantization(self, *keys: str) -> Any:
        """A copy of a value of the quantization config; None if it is not there."""
        file, place = self.quantization_at
        return self.value(file, (*place, *keys))

    def set_quantization(self, keys: JSONPath, value: Any, why: str) -> None:
        """Give the quantization config another value."""
        file, place = self.quantization_at
        self.set(file, (*place, *keys), value, why)

    # --- tensors and the index --------------------------------------------------------------------

    def retensor(self, entry: Entry, new: Entry | None, why: str) -> bool:
        """Give a tensor another name, dtype or shape, or leave it out: whether that could be
        done.
        """
        if self.source.folder is None:
            self.not_here[why] = None
            return False
        shard = self._shards[entry.file]
        says = "left out"
        # A change before this one was to the same tensor, or another writes the shard.
        if shard.get(entry.name) != entry or entry.file in self.made_shards:
            return False
        if new is not None:
            if new.name != entry.name:
                for tensors in self._shards.values():
                    if new.name in tensors:
                        return False
            says = f"{new.name} {new.dtype}{list(new.shape)}"
        del shard[entry.name]
        if new is not None:
            shard[new.name] = new
        self._touched.add(entry.file)
        self.edits.append(Edit(why, says=f"{entry.name} -> {says}"))
        return True

    def index(self, file: str, why: str) -> None:
        """Let the index list a file."""
        if file not in self._indexed and self._shards[file]:
            self._indexed.add(file)
            self.edits.append(Edit(why, INDEX))

    def write_index(self) -> None:
        """Let an index list the files that none lists."""
        if not self._has_index:
            self._has_index = True
            why = "other readers than vLLM and SGLang look for shards in an index"
            self.edits.append(Edit(why, INDEX))

    def put_shards(
        self, gone: Iterable[Entry], made: Mapping[str, Sequence[Entry]], why: str
    ) -> None:
        """Take tensors away, and add whole shards that somebody else writes.

        Raises:
            CheckpointError: one of their names is that of a file with other tensors.
        """
        for entry in gone:
            del self._shards[entry.file][entry.name]
            self._touched.add(entry.file)
            self.edits.append(Edit(why, says=f"{entry.name} -> left out"))
        for file, entries in made.items():
            for other in self._shards[file]:
                raise CheckpointError(
                    self.source.where,
                    f"{file} must hold nothing but the MTP block",
                    got=other,
                    cure="Give it another name, also in the index",
                )
            self._shards[file] = {entry.name: entry for entry in entries}
        self._touched |= made.keys()
        self._indexed |= made.keys()
        self.made_shards |= made.keys()

    @property
    def empty_shards(self) -> tuple[str, ...]:
        """Old shards of which nothing is left: the new folder does not get them."""
        return tuple(sorted(file for file in self._touched if not self._shards[file]))

    @property
    def shards_again(self) -> dict[str, list[Entry]]:
        """The shards that are written from old tensors, with their tensors."""
        again = {}
        for file in sorted(self._touched & self._indexed - self.made_shards):
            if self._shards[file]:
                again[file] = [*self._shards[file].values()]
        return again

    # --- what becomes of it -----------------------------------------------------------------------

    def files(self) -> dict[str, bytes | None]:
        """The small files that change, with the index; None for one that is left out."""
        found = {}
        for name, value in self._docs.items():
            before = small_bytes(self.source, name)
            if value is None and before is not None:
                found[name] = None
            elif value is not None and (before is None or value != json.loads(before)):
                found[name] = in_form_of(before, value)
        index = self._new_index()
        if index is not None:
            found[INDEX] = index
        return found

    def outcome(self) -> Source:
        """What it would be: the headers of the new folder, under the checkpoint's own name."""
        entries = dict[HFName, Entry]()
        unindexed = dict[HFName, Entry]()
        for file, tensors in self._shards.items():
            if file in self._indexed:
                entries |= tensors
            else:
                unindexed |= tensors
        config = deepcopy(self._docs[CONFIG])
        tensors = {"entries": entries, "unindexed": unindexed, "has_index": self._has_index}
        return replace(self.source, config=config, changed=self.files(), **tensors)

    def _new_index(self) -> bytes | None:
        """The new index; None if the old one stays, or none is needed."""
        is_whole = self._has_index == self.source.has_index
        if not self._touched and self._indexed == self._listed and is_whole:
            return None
        files = {}
        total = 0
        for file in sorted(self._indexed):
            for name, entry in self._shards[file].items():
                files[str(name)] = file
                total += entry.num_bytes
        old = small_object(self.source, INDEX) or {}
        if not old and len({*files.values()}) == 1:
            return None
        index = index_like(old, files, total)
        if index == old:
            return None
        return (json.dumps(index, indent=2) + "\n").encode()


def index_like(old: Raw, files: Mapping[str, str], num_bytes: int) -> Json:
    """The index of these tensors; names stay where they were, so that little changes.

    Args:
        old: the index as it is, {} for none.
        files: the file of each tensor.
        num_bytes: of all tensors.
    """
    given = old.get("metadata")
    metadata = {"total_size": num_bytes}
    if isinstance(given, dict):
        metadata = {**given, **metadata}
    weight_map = dict[str, str]()
    for name in (*old.get("weight_map", ()), *sorted(files)):
        if name in files:
            weight_map[name] = files[name]
    return {**old, "metadata": metadata, "weight_map": weight_map}


def in_form_of(before: bytes | None, value: Mapping[str, Any]) -> bytes:
    """A JSON file with these values, indented and escaped as it was, so that a diff shows no more
    than what changed.
    """
    text = (before or b"").decode("utf-8", errors="replace")
    second = text.partition("\n")[2]
    indent = len(second) - len(second.lstrip(" ")) or 2
    written = json.dumps(value, indent=indent, ensure_ascii="\\u" in text)
    if text.endswith("\n") or not text:
        written += "\n"
    return written.encode()
