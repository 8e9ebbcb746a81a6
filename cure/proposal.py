"""A checkpoint as it would be after some changes: judged from headers before a byte is written,
then written.

In: an opened checkpoint, and changes of its JSON files, its index and its tensors, each with the
reason. Out: a diff; a folder of headers for the check and the dry load; and what
`rewritten.rewrite` writes.

Easy to get wrong: a change is made to what the changes before it have left. So tensors are named by
file and name of the moment, and each knows the old bytes that it is made from.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoints.companions import HF_QUANT_CONFIG, INDEX
from ..checkpoints.files import within
from ..checkpoints.safetensors_file import Entry, lay_out
from ..checkpoints.scratch import ScratchFolder
from ..checkpoints.source import Source, small_bytes, small_object
from ..recipes.errors import CheckpointError
from ..recipes.family import HFName
from ..validate.check.check import VLLM_ALONE, Checked, examine
from ..validate.check.runtime_view import RuntimeView
from ..validate.dryload.hollow import SMALL_FILES
from ..validate.facts.findings import Finding, Runtime
from .json_diff import in_form_of, json_diff
from .judged import named
from .new_shards import NewTensor, as_it_was, write_shard

JSONPath = tuple[str, ...]
"""Keys that lead to a value, such as ("quantization_config", "ignore")."""
CONFIG = "config.json"
COPIES = "mtp_copies.safetensors"
"""The shard of tensors that are copies of others."""
_PLACES: tuple[JSONPath, ...] = (
    ("quantization_config",),
    ("text_config", "quantization_config"),
    ("compression_config",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change that was made.

    Attributes:
        why: the reason.
        file: the JSON file that changes; "" for a tensor.
        says: what becomes of the tensor.
    """

    why: str
    file: str = ""
    says: str = ""


class Faulty(NamedTuple):
    """What a fix looks at and changes: a checkpoint of a known family, with its findings, as it
    would be by now.
    """

    runtime: RuntimeView
    findings: Sequence[Finding]
    proposal: "Proposal"


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
        self._docs: dict[str, Any] = {
            CONFIG: deepcopy(dict(source.config)),
            HF_QUANT_CONFIG: small_object(source, HF_QUANT_CONFIG),
        }
        self._whole: dict[str, bytes | None] = {}
        self._indexed = {entry.file for entry in source.entries.values()}
        self._touched: set[str] = set()
        self.made_shards: set[str] = set()
        self._is_index_new = False

    @cached_property
    def _shards(self) -> dict[str, dict[HFName, NewTensor]]:
        """By file, in the order of their bytes; made once something looks at it."""
        shards: dict[str, dict[HFName, NewTensor]] = defaultdict(dict)
        both = (*self.source.entries.values(), *self.source.unindexed.values())
        for entry in sorted(both, key=lambda entry: entry.start):
            shards[entry.file][entry.name] = as_it_was(entry)
        return shards

    def copy(self) -> "Proposal":
        """Another one with the same changes, so that more can be tried; they share `not_here`."""
        other = copy(self)
        for name in ("edits", "_whole", "_indexed", "_touched"):
            setattr(other, name, getattr(self, name).copy())
        other._docs = deepcopy(self._docs)
        other._shards = defaultdict(dict)
        for file, tensors in self._shards.items():
            other._shards[file] = tensors.copy()
        return other

    # --- JSON files -------------------------------------------------------------------------------

    def value(self, file: str, place: JSONPath) -> Any:
        """A copy of a value of a JSON file; None if it is not there."""
        value = self._docs.get(file)
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        return deepcopy(value)

    def set(self, file: str, place: JSONPath, value: Any, why: str) -> None:
        """Give a JSON file another value."""
        holder = self._docs[file]
        for key in place[:-1]:
            holder = holder.setdefault(key, {})
        if place[-1] not in holder or holder[place[-1]] != value:
            holder[place[-1]] = value
            self.edits.append(Edit(file=file, why=why))

    def put(self, file: str, data: bytes | None, why: str) -> None:
        """Give a small file these bytes; None takes it away."""
        self._whole[file] = data
        self._docs.pop(file, None)
        self.edits.append(Edit(file=file, why=why))

    @property
    def config_place(self) -> JSONPath | None:
        """Where config.json has its quantization config, as `choose.quantization_of` looks for
        it.
        """
        return next(
            (place for place in _PLACES if isinstance(self.value(CONFIG, place), dict)), None
        )

    @property
    def quantization_at(self) -> tuple[str, JSONPath]:
        """The file and the place in it where vLLM finds algorithm and lists."""
        place = self.config_place
        if place is None:
            return HF_QUANT_CONFIG, ("quantization",)
        inner = (*place, "quantization")
        return CONFIG, inner if isinstance(self.value(CONFIG, inner), dict) else place

    def quantization(self, *keys: str) -> Any:
        """A copy of a value of the quantization config; None if it is not there."""
        file, place = self.quantization_at
        return self.value(file, (*place, *keys))

    def set_quantization(self, keys: JSONPath, value: Any, why: str) -> None:
        """Give the quantization config another value."""
        file, place = self.quantization_at
        self.set(file, (*place, *keys), value, why)

    # --- tensors and the index --------------------------------------------------------------------

    def retensor(
        self,
        entry: Entry,
        new: NewTensor | None,
        why: str,
        convert: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Give a tensor another name, dtype or shape, or leave it out; `convert` makes its bytes,
        which else stay.
        """
        if self.source.folder is None:
            self.not_here[why] = None
            return
        shard = self._shards[entry.file]
        old = shard.get(entry.name)
        if old is None:
            return
        says = "left out"
        if new is not None:
            if new.name != old.name and any(
                new.name in tensors for tensors in self._shards.values()
            ):
                return
            if new.data == entry:
                new = replace(new, data=old.data, convert=convert or old.convert)
            if new == old:
                return
            says = f"{new.name} {new.dtype}{list(new.shape)}"
        del shard[entry.name]
        if new is not None:
            shard[new.name] = new
        self._touched.add(entry.file)
        self.edits.append(Edit(why=why, says=f"{entry.name} -> {says}"))

    def copy_tensor(self, name: HFName, of: HFName, why: str) -> None:
        """Write a tensor once more, under a second name."""
        if self.source.folder is None:
            self.not_here[why] = None
            return
        tensors = {
            name: tensor for file in self._indexed for name, tensor in self._shards[file].items()
        }
        if name not in tensors and of in tensors:
            self._shards[COPIES][name] = replace(tensors[of], name=name)
            self._indexed.add(COPIES)
            self._touched.add(COPIES)
            self.edits.append(Edit(why=why, says=f"{name}, a copy of {of}, in {COPIES}"))

    def index(self, file: str, why: str) -> None:
        """Let the index list a file."""
        if file not in self._indexed and self._shards[file]:
            self._indexed.add(file)
            self.edits.append(Edit(file=INDEX, why=why))

    def index_again(self, why: str) -> None:
        """Write the index from the files."""
        if not self._is_index_new:
            self._is_index_new = True
            if self._new_index() is not None:
                self.edits.append(Edit(file=INDEX, why=why))

    def put_shards(self, gone: Iterable[Entry], made: Mapping[str, Sequence[Entry]]) -> None:
        """Take tensors away, and add whole shards that somebody else writes.

        Raises:
            CheckpointError: one of their names is that of a file with other tensors.
        """
        for entry in gone:
            del self._shards[entry.file][entry.name]
            self._touched.add(entry.file)
        for file, entries in made.items():
            if self._shards[file]:
                rule, cure = (
                    f"{file} must hold nothing but the MTP block",
                    "Give it another name, also in the index",
                )
                raise CheckpointError(
                    self.source.where, rule, got=next(iter(self._shards[file])), cure=cure
                )
            self._shards[file] = {entry.name: as_it_was(entry) for entry in entries}
        self._touched |= made.keys()
        self._indexed |= made.keys()
        self.made_shards |= made.keys()

    @property
    def empty_shards(self) -> tuple[str, ...]:
        """Old shards of which nothing is left: the new folder does not get them."""
        return tuple(sorted(file for file in self._touched if not self._shards[file]))

    @property
    def shards_again(self) -> dict[str, list[NewTensor]]:
        """The shards that are written from old tensors, with their tensors in the order that they
        had.
        """
        files = sorted(self._touched & self._indexed - self.made_shards)
        return {file: [*self._shards[file].values()] for file in files if self._shards[file]}

    @property
    def num_bytes_again(self) -> int:
        """Bytes of the tensors in `shards_again`."""
        return sum(t.num_bytes for tensors in self.shards_again.values() for t in tensors)

    # --- what becomes of it -----------------------------------------------------------------------

    def files(self) -> dict[str, bytes | None]:
        """The small files that change, with the index; None for one that is left out."""
        found = dict(self._whole)
        for name, value in self._docs.items():
            before = small_bytes(self.source, name)
            if value is not None and (before is None or value != json.loads(before)):
                found[name] = in_form_of(before, value)
        if index := self._new_index():
            found[INDEX] = index
        return found

    def diffs(self) -> list[str]:
        """The lines of a diff of every small file that changes, and a line for each kind of change
        of a tensor.
        """
        lines = []
        for name, data in sorted(self.files().items()):
            if name in (CONFIG, HF_QUANT_CONFIG, INDEX):
                reasons = [edit.why for edit in self.edits if edit.file == name]
                lines += json_diff(name, small_bytes(self.source, name), data, reasons)
        groups: dict[str, list[str]] = defaultdict(list)
        for edit in self.edits:
            if edit.says:
                groups[edit.why].append(f"~ {edit.says}")
        for why, each in groups.items():
            lines += ["--- tensors", f"# {why}", *each[:4]]
            if len(each) > 4:
                lines.append(f"~  ... {len(each) - 4:,} more ...")
        return lines

    @contextmanager
    def headers(self) -> Iterator[Path]:
        """A folder that the check and vLLM can read it from: JSON files, and headers with holes for
        the weights.
        """
        with ScratchFolder("keepmtp-proposal-") as folder:
            small = {name: small_bytes(self.source, name) for name in (CONFIG, INDEX, *SMALL_FILES)}
            small |= dict.fromkeys(self.source.code, b"")
            for name, data in (small | self.files()).items():
                if data is not None:
                    within(folder, name).write_bytes(data)
            for file, tensors in self._shards.items():
                if tensors:
                    layout = lay_out((t.name, t.dtype, t.shape) for t in tensors.values())
                    with open(within(folder, file), "wb") as written:
                        written.write(layout.header)
                        written.truncate(layout.num_bytes)
            yield folder

    def examined(self, runtimes: Sequence[Runtime] = VLLM_ALONE) -> Checked:
        """What the check finds of it, from headers, under the checkpoint's own name."""
        with self.headers() as folder:
            return named(examine(folder, runtimes=runtimes), folder, self.source.where)

    def write_shards(
        self, folder: Path, written: Callable[[int], None] = lambda count: None
    ) -> None:
        """Write the shards that are made from old tensors."""
        for file, tensors in self.shards_again.items():
            write_shard(within(folder, file), tensors, self.source, written=written)

    def described(self) -> str:
        """All that is written in shards but the bytes of old tensors, which are the source's."""
        files = sorted(self._touched)
        return json.dumps(
            [[f, *[[t.name, t.dtype, t.shape] for t in self._shards[f].values()]] for f in files]
        )

    def _new_index(self) -> bytes | None:
        """The new index; None if the old one stays, or none is needed."""
        before = {entry.file for entry in self.source.entries.values()}
        if not (self._is_index_new or self._touched or self._indexed != before):
            return None
        files, total = {}, 0
        for file in sorted(self._indexed):
            for name, tensor in self._shards[file].items():
                files[str(name)] = file
                total += tensor.num_bytes
        old = small_object(self.source, INDEX) or {}
        if not old and len({*files.values()}) == 1:
            return None
        given, listed = old.get("metadata"), old.get("weight_map", {})
        metadata = {"total_size": total}
        if isinstance(given, dict):
            metadata = {**given, **metadata}
        if (listed, given) == (files, metadata):
            return None
        # Names stay where they were, so that little changes.
        weight_map = {name: files[name] for name in (*listed, *sorted(files)) if name in files}
        index = {**old, "metadata": metadata, "weight_map": weight_map}
        return (json.dumps(index, indent=2) + "\n").encode()
