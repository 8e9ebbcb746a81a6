"""A new folder from a finished checkpoint: whole or not there, and the old one stays as it is.

In: a `Rewrite`: the opened checkpoint, small files with their new bytes, names to leave out, and a function that writes
new shards. Out: OUT, a checkpoint of its own. What did not change is a hard link, so it takes no room and no time; a
copy where the file system cannot link. Of a Hub repository that is not here, OUT has the changed files alone.
OUT/.keepmtp/cure.json stays there: by it the same command finds that it has finished before.

Every regular file of the old folder is kept, its own Python too: it is a person's own copy on his own disk, nothing in
it is run, and `publish` asks again what may travel. keepmtp.json and recipe.yaml are left out: they say how the old
folder was made, and the new one was not made so. Hidden files are left out as well.

Easy to get wrong: a hard link is a second name of the same file. Who writes into a file of OUT writes into the old
checkpoint. So new shards are written first, while the folder has no links; a file that is changed is made anew under
OUT.partial and never opened where it was; and the old folder is compared again at the end.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from .. import __version__
from ..checkpoints.companions import INDEX, inside
from ..checkpoints.files import (
    WORK,
    complete,
    held,
    naming_file,
    partial_path,
    refuse_name,
    sync,
    two_sizes,
    within,
    write_whole,
)
from ..checkpoints.record import RECIPE, RECORD
from ..checkpoints.safetensors_file import Entry, read_header
from ..checkpoints.source import Source, small_object
from ..checkpoints.unchanged import refuse_changed, states_of
from ..quantize.write.output import refuse_place
from ..recipes.errors import CheckpointError, RecipeError

_STAMP = f"{WORK}/cure.json"
# What a file system says that cannot make this link: another disk, links that are not allowed or too many.
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES})
_CHANGED = "Run the same command again: it reads the checkpoint anew"


class _Stamp(BaseModel):
    """What OUT keeps of the command that writes it.

    Attributes:
        command: a sum over what the new folder depends on.
        new, linked, copied: as in `Rewritten`, once all is written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str
    new: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()

    def describes(self, out: Path) -> bool:
        """Whether all files are in OUT, and none was written to after this was."""
        names = (*self.new, *self.linked, *self.copied)
        states, made = states_of(out, (*names, _STAMP)), (out / _STAMP).stat().st_mtime_ns
        return len(states) > len(names) and all(state.mtime_ns <= made for state in states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """What the new folder has that the old one has not.

    Attributes:
        source: the finished checkpoint.
        made_by: the command in words: two commands never share what a killed one has left.
        files: small files by name, new or changed. The index is made here, unless it is among them.
        left_out: names of files that the new folder does not get.
        indexed: safetensors files that the old index does not list and the new one does.
        also_read: another checkpoint that the new shards are made from.
        write_shards: writes shards into the folder that it gets and returns their names; one with an old shard's name
            takes its place. What it keeps in the folder's `.keepmtp` is still there when a killed command runs again.
        num_shard_bytes: how much it will write.
    """

    source: Source
    made_by: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    indexed: frozenset[str] = frozenset()
    also_read: Source | None = None
    write_shards: Callable[[Path], Sequence[str]] = lambda folder: ()
    num_shard_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """What was written.

    Attributes:
        folder: the new checkpoint.
        new: names of files that the old folder has not, or has with other bytes.
        linked: names of files that are one file with the old folder's.
        copied: names of files that could not be linked.
        copied_bytes: their size.
        is_from_before: the same command had finished before, and this one wrote nothing.
    """

    folder: Path
    new: tuple[str, ...]
    linked: tuple[str, ...]
    copied: tuple[str, ...]
    copied_bytes: int
    is_from_before: bool = False

    @property
    def sentence(self) -> str:
        """What was written, for people."""
        if self.is_from_before:
            return f"{self.folder}: finished before, by the same command from the same files"
        parts = [f"{len(self.new)} new", f"{len(self.linked)} linked"]
        if self.copied:
            size, _ = two_sizes(self.copied_bytes, 0)
            parts.append(f"{len(self.copied)} copied, {size}: this disk has no links to them")
        return f"{self.folder}: files: {', '.join(parts)}"


def rewrite(wanted: Rewrite, out: Path) -> Rewritten:
    """Write the new folder; a killed run's is begun again, and gets the same bytes.

    Args:
        wanted: what is written.
        out: where; nothing may be there.

    Raises:
        RecipeError: something is there, the disk is too small, or another run is at work.
        CheckpointError: a link that leaves the old folder, one tensor in two files, or the old folder changed.
    """
    stamp = _stamp_of(wanted)
    found = _stamp_in(out)
    if found is not None and found.command == stamp and found.describes(out):
        return replace(_tidied(out, found), is_from_before=True)
    refuse_place(wanted.source, out)
    _refuse_full_disk(wanted, out)
    partial = partial_path(out)
    with held(partial, "only one run may write an output"):
        refuse_place(wanted.source, out)  # another run may have finished since this one looked
        _begin(partial, stamp)
        done = _fill(wanted, partial, stamp)
        write_whole(partial / _STAMP, done.model_dump_json())
        complete(out)
        return _tidied(out, done)


def new_index(
    source: Source,
    *,
    left_out: frozenset[str] = frozenset(),
    indexed: frozenset[str] = frozenset(),
    added: Sequence[Entry] = (),
) -> bytes | None:
    """The index of the new folder; None if the old one, or none, says all.

    Args:
        source: the old checkpoint.
        left_out, indexed: as in `Rewrite`.
        added: the tensors of new shards; a new shard with an old one's name takes its place.

    Raises:
        CheckpointError: a tensor would be in two files that the index lists.
    """
    gone = left_out | {entry.file for entry in added}
    kept = [entry for entry in source.entries.values() if entry.file not in gone]
    kept += [entry for entry in source.unindexed.values() if entry.file in indexed and entry.file not in gone]
    weight_map: dict[str, str] = {}
    for entry in (*kept, *added):
        if entry.name in weight_map:
            rule, cure = f"{entry.name} must be in one file only", "Leave out one of the two"
            raise CheckpointError(f"{source.where}/{entry.file}", rule, got=f"also {weight_map[entry.name]}", cure=cure)
        weight_map[entry.name] = entry.file
    old = small_object(source, INDEX)
    if old is None and len(set(weight_map.values())) == 1:
        return None
    old = old or {}
    found = old.get("metadata")
    metadata = {
        **(found if isinstance(found, dict) else {}),
        "total_size": sum(entry.num_bytes for entry in (*kept, *added)),
    }
    if old.get("weight_map") == weight_map and old.get("metadata") == metadata:
        return None
    index = {**old, "metadata": metadata, "weight_map": _in_order(weight_map, old.get("weight_map"))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _in_order(weight_map: Mapping[str, str], old: object) -> dict[str, str]:
    """Sorted; where the old one was not, its names come first and in its order, so that little changes."""
    names = [name for name in old if name in weight_map] if isinstance(old, dict) else []
    if names == sorted(names):
        names = []
    return {name: weight_map[name] for name in dict.fromkeys((*names, *sorted(weight_map)))}


def kept_files(source: Source) -> tuple[str, ...]:
    """Names of the old folder's files that a new one gets, sorted; see the top of this file.

    Raises:
        CheckpointError: one is a link out of the folder, or to nowhere. A shard may be one: its header was read.
    """
    if source.folder is None:
        return ()
    names = sorted(name for name in _files_in(source.folder) if name not in (RECORD, RECIPE))
    for name in names:
        refuse_name(source.folder / name)
        if not name.endswith(".safetensors") or name not in source.states:
            inside(source.folder, name)
    return tuple(names)


def _files_in(folder: Path) -> Iterator[str]:
    """All files that are not hidden; folders that are links are passed over."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith(".") and not name.endswith(".partial"):
                yield str(Path(root, name).relative_to(folder))


def _begin(partial: Path, stamp: str) -> None:
    """Clear a folder that this run holds; what the same command kept for itself stays."""
    found = _stamp_in(partial)
    if found is None and any(path.name != WORK for path in partial.iterdir()):
        rule = "an unfinished output can only be written by the command that began it"
        raise RecipeError(partial, rule, got="files of another command", cure="Choose another OUT")
    for path in partial.iterdir():
        if path.name != WORK or (found is not None and found.command != stamp):
            _remove(path)
    write_whole(partial / _STAMP, _Stamp(command=stamp).model_dump_json())


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _fill(wanted: Rewrite, partial: Path, stamp: str) -> _Stamp:
    """Write new shards, then new small files and the index, then link everything else."""
    source = wanted.source
    with naming_file(partial):
        shards = tuple(wanted.write_shards(partial))
        files = dict(wanted.files)
        if INDEX not in files and (index := _index_with(wanted, partial, shards)) is not None:
            files[INDEX] = index
        for name, data in files.items():
            path = within(partial, name)
            partial_path(path).write_bytes(data)
            complete(path)
        names = _linked_names(wanted, {*files, *shards})
        linked = [name for name in names if _is_linked(source, name, within(partial, name))]
        if source.folder is not None:
            refuse_changed(source.folder, source.states, cure=_CHANGED, is_linked=True)
        for root, _, _ in os.walk(partial):
            sync(Path(root))
    new, copied = tuple(sorted({*files, *shards})), tuple(sorted({*names} - {*linked}))
    return _Stamp(command=stamp, new=new, linked=tuple(linked), copied=copied)


def _tidied(out: Path, stamp: _Stamp) -> Rewritten:
    """What was written, once the folder has its name; what only an unfinished one needs is removed."""
    for path in (out / WORK).iterdir():
        if path != out / _STAMP:
            _remove(path)
    size = sum((out / name).stat().st_size for name in stamp.copied)
    return Rewritten(folder=out, new=stamp.new, linked=stamp.linked, copied=stamp.copied, copied_bytes=size)


def _index_with(wanted: Rewrite, partial: Path, shards: Sequence[str]) -> bytes | None:
    headers = [read_header(partial / name, f"{partial}/{name}").entries.values() for name in shards]
    added = [entry for entries in headers for entry in entries]
    return new_index(wanted.source, left_out=wanted.left_out, indexed=wanted.indexed, added=added)


def _linked_names(wanted: Rewrite, written: set[str]) -> list[str]:
    return [name for name in kept_files(wanted.source) if name not in written and name not in wanted.left_out]


def _is_linked(source: Source, name: str, path: Path) -> bool:
    """Give the old file a second name, or copy it where it can have none. A link of the Hub's cache: its blob."""
    assert source.folder is not None
    old = Path(os.path.realpath(source.folder / name))
    try:
        os.link(old, path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
        shutil.copyfile(old, path)
        sync(path)
        return False
    return True


def _refuse_full_disk(wanted: Rewrite, out: Path) -> None:
    """Refuse a disk that is too small for the new shards, and for the copies where it cannot link."""
    parent = next(path for path in out.absolute().parents if path.is_dir())
    needed, folder = wanted.num_shard_bytes + sum(map(len, wanted.files.values())), wanted.source.folder
    if folder is not None:
        states = [os.stat(folder / name) for name in _linked_names(wanted, set(wanted.files))]
        needed += sum(state.st_size for state in states if state.st_dev != parent.stat().st_dev)
    free = shutil.disk_usage(parent).free
    if needed > free:
        size, there = two_sizes(needed, free)
        cure = "Choose an OUT on the checkpoint's own disk, or make room"
        raise RecipeError(out, f"{size} must be free on its disk", got=there, cure=cure)


def _stamp_of(wanted: Rewrite) -> str:
    """What the new folder depends on."""
    digest = hashlib.sha256(f"{__version__}\0{wanted.made_by}\0".encode())
    for source in filter(None, (wanted.source, wanted.also_read)):
        digest.update(f"{source.where}\0{source.revision}\0".encode())
        for name, state in sorted(source.states.items()):
            # A link changes the ctime.
            digest.update(f"{name} {state.model_dump_json(exclude={'ctime_ns'})}\0".encode())
    for name, data in sorted(wanted.files.items()):
        digest.update(f"{name} {hashlib.sha256(data).hexdigest()}\0".encode())
    digest.update(json.dumps([sorted(wanted.left_out), sorted(wanted.indexed)]).encode())
    return digest.hexdigest()


def _stamp_in(folder: Path) -> _Stamp | None:
    path = folder / _STAMP
    try:
        return _Stamp.model_validate_json(path.read_bytes()) if path.is_file() else None
    except ValidationError:  # a stranger's
        return None
