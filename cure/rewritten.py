"""A new folder from a finished checkpoint: whole or not there, and the old one stays as it is; and
how it is judged, by the check and by vLLM's own loaders where there is a vLLM.

In: a `Proposal`. Out: OUT, a checkpoint of its own. What did not change is a hard link, so it takes
no room and no time; a copy where the file system cannot link. Of a Hub repository that is not here,
OUT has the changed files alone. OUT/.keepmtp/cure.json stays there: by it the same command finds
that it has finished before.

Easy to get wrong: a hard link is a second name of the same file. Who writes into a file of OUT
writes into the old checkpoint.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from .. import __version__
from ..checkpoints.companions import inside
from ..checkpoints.fact import Fact
from ..checkpoints.files import (
    WORK,
    can_link,
    complete,
    held,
    link,
    making,
    naming_file,
    note_on_links,
    partial_path,
    refuse_name,
    refuse_small_disk,
    refuse_strange,
    remove,
    sync,
    within,
    write_whole,
)
from ..checkpoints.identity import states_of
from ..checkpoints.record import RECIPE, RECORD
from ..checkpoints.safetensors_file import Entry, lay_out, total_bytes
from ..checkpoints.source import Source, read, refuse_changed_files
from ..quantize.plan.plan import Plan
from ..quantize.write.output import refuse_place
from ..recipes.errors import RecipeError, VLLMError
from ..recipes.frozen import Advance, Say, silent
from ..recipes.schemes import DTYPE_BITS
from ..validate.check.check import Checked, examine
from ..validate.facts.dry_load import GPU
from .proposal import Proposal

_STAMP = f"{WORK}/cure.json"
_CHANGED = "Run the same command again: it reads the checkpoint anew"
_PART = 64 << 20
GPUS: tuple[GPU, ...] = ("sm100",)
"""Where nobody names one: the GPU whose kernels take every scheme."""


class Rewritten(Fact):
    """What was written; OUT keeps it.

    Attributes:
        command: a sum over what the new folder depends on.
        new: names of files that the old folder has not, or has with other bytes.
        kept: names of files that are the old folder's: links, or copies where there are none.
        folder: the new checkpoint.
        is_from_before: the same command had finished before, and this one wrote nothing.
    """

    command: str
    new: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    folder: Path = Field(exclude=True, default=Path())
    is_from_before: bool = Field(exclude=True, default=False)

    @property
    def sentence(self) -> str:
        """What was written, for people."""
        if self.is_from_before:
            return f"{self.folder}: finished before, by the same command from the same files"
        line = f"{self.folder}: files: {len(self.new)} new, {len(self.kept)} kept."
        return f"{line} {note_on_links(self.folder, self.kept)}".rstrip(" .")


def rewrite(
    proposal: Proposal,
    out: Path,
    *,
    made_by: str,
    also_read: Source | None = None,
    make_shards: Callable[[Path], None] = lambda folder: None,
    num_bytes: int = 0,
) -> Rewritten:
    """Write the new folder; a killed run's is begun again, and gets the same bytes.

    Args:
        proposal: what it would be.
        out: where; nothing may be there.
        made_by: the command in words: two commands never share what a killed one has left.
        also_read: another checkpoint that shards are made from.
        make_shards: writes into the folder that it gets the shards that are not made from old
            tensors. What it keeps in the folder's `.keepmtp` is still there when a killed command
            runs again.
        num_bytes: how much that will be.

    Raises:
        RecipeError: something is there, the disk is too small, or another run is at work.
        CheckpointError: a link that leaves the old folder, an old file that ends early, or the old
            folder changed.
    """
    source = proposal.source
    again = proposal.shards_again
    small = dict[str, bytes]()
    gone = {*proposal.empty_shards}
    for name, data in proposal.files().items():
        if data is None:
            gone.add(name)
        else:
            small[name] = data
    parts = [__version__, made_by, *_states(source), small]
    if also_read is not None:
        parts += _states(also_read)
    text = "\0".join(map(repr, parts))
    command = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    found = _finished(out, command)
    if found is not None:
        _tidy(out)
        return found.model_copy(update={"folder": out, "is_from_before": True})
    refuse_place(source, out)
    new = {*small, *again, *proposal.made_shards}
    kept = [name for name in kept_files(source) if name not in new | gone]
    num_bytes += sum(map(len, small.values())) + sum(map(total_bytes, again.values()))
    if source.folder is not None and not can_link(source.folder, out):
        # What cannot be linked is copied.
        num_bytes += sum(os.stat(source.folder / name).st_size for name in kept)
    refuse_small_disk(
        out, num_bytes, cure="Choose an OUT on the checkpoint's own disk, or make room"
    )
    partial = partial_path(out)
    with held(partial, "only one run may write an output"), naming_file(partial):
        refuse_place(source, out)  # another run may have finished since this one looked
        begun = _stamp_in(partial)
        if begun is None and any(path.name != WORK for path in partial.iterdir()):
            raise RecipeError(
                partial,
                "an unfinished output can only be written by the command that began it",
                got="files of another command",
                cure="Choose another OUT",
            )
        # What the same command kept for itself stays.
        for path in partial.iterdir():
            if path.name != WORK or (begun is not None and begun.command != command):
                remove(path)
        states = refuse_changed_files(source, source.states, cure=_CHANGED)
        write_whole(partial / _STAMP, Rewritten(command=command).model_dump_json())
        # New shards first, while the folder has no links; a file that is changed is made anew under
        # OUT.partial, and never opened where it was.
        make_shards(partial)
        for name, entries in again.items():
            _write_shard(within(partial, name), entries, source)
        for name, data in small.items():
            with making(within(partial, name)) as path:
                path.write_bytes(data)
        states = refuse_changed_files(source, states, cure=_CHANGED)
        if source.folder is not None:
            for name in kept:
                link(source.folder / name, within(partial, name))
        # The old folder is compared again, before its files are links and after.
        states = refuse_changed_files(source, states, cure=_CHANGED)
        for root, _, _ in os.walk(partial):
            sync(Path(root))
        done = Rewritten(command=command, new=tuple(sorted(new)), kept=tuple(kept), folder=out)
        write_whole(partial / _STAMP, done.model_dump_json())
        refuse_changed_files(source, states, cure=_CHANGED)
        complete(out)
    _tidy(out)
    return done


def _finished(out: Path, command: str) -> Rewritten | None:
    """What the same command wrote before: all of its files are there, and none was written to after
    the stamp was.
    """
    found = _stamp_in(out)
    if found is None or found.command != command:
        return None
    names = (*found.new, *found.kept)
    times = [state.mtime_ns for state in states_of(out, names).values()]
    if len(times) < len(names) or max(times, default=0) > (out / _STAMP).stat().st_mtime_ns:
        return None
    return found


def write_planned(plan: Plan, folder: Path, progress: Advance) -> None:
    """Write the shards of a plan that are no links into an unfinished folder. What the same command
    had finished before it was killed is kept.
    """
    from ..quantize.write.writer import write_shards  # imports torch, which `fix` does not need

    work = folder / WORK / "shards"
    (work / WORK).mkdir(parents=True, exist_ok=True)
    write_shards(plan, work, threads=os.cpu_count() or 1, progress=progress)
    for shard in plan.written:
        os.replace(work / shard.file, within(folder, shard.file))


def _write_shard(path: Path, entries: Iterable[Entry], source: Source) -> None:
    """Write a shard from old tensors. Wider dtypes come first, since readers map the file; a shard
    that was touched is written again, whole, because vLLM reads whole files.
    """
    in_order = sorted(entries, key=lambda entry: (-DTYPE_BITS[entry.dtype], entry.start))
    layout = lay_out((entry.name, entry.dtype, entry.shape) for entry in in_order)
    with naming_file(path), open(path, "xb") as file:
        file.write(layout.header)
        for entry in in_order:
            buffer = memoryview(bytearray(min(_PART, entry.num_bytes)))
            for offset in range(0, entry.num_bytes, _PART):
                part = buffer[: entry.num_bytes - offset]
                read(source, entry, part, offset=offset)
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
        assert file.tell() == layout.num_bytes, f"{path}: bytes of another shape"


class Judged(NamedTuple):
    """What was found of a new checkpoint, and why vLLM was not asked, if it was not."""

    checked: Checked
    no_vllm: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return self.checked.refusal is None and self.checked.data.ok


def judge(
    folder: Path,
    *,
    gpus: Sequence[GPU] = GPUS,
    progress: Say = silent,
) -> Judged:
    """Check a folder, then let vLLM's classes load it, on each of these GPUs at TP 1. Without a
    vLLM there is still the check.

    Args:
        folder: a checkpoint.
        gpus: to pretend; none: the check alone.
        progress: gets a line that says what is done now.
    """
    no_vllm = None
    if gpus:
        from ..validate.dryload.check_on import check_on
        from ..validate.facts.vllm_env import find_vllm

        try:
            vllms = [find_vllm()]
            (found,) = check_on([str(folder)], vllms=vllms, gpus=gpus, progress=progress)
            return Judged(found)
        except VLLMError as error:
            no_vllm = str(error)
    progress(f"{folder}: static check")
    return Judged(examine(folder), no_vllm)


def kept_files(source: Source) -> tuple[str, ...]:
    """Names of the old folder's files that a new one gets, sorted.

    Raises:
        CheckpointError: one is a link out of the folder, or to nowhere. A shard may be one: its
            header was read.
    """
    if source.folder is None:
        return ()
    kept = []
    # Its own Python too: it is a person's own copy on his own disk, nothing in it is run, and
    # `publish` asks again what may travel.
    for root, folders, names in os.walk(source.folder):  # it passes over folders that are links
        folders[:] = [name for name in folders if not name.startswith(".")]
        for leaf in names:
            name = str(Path(root, leaf).relative_to(source.folder))
            # The record and the recipe say how the old folder was made; the new one was not.
            if leaf.startswith(".") or leaf.endswith(".partial") or name in (RECORD, RECIPE):
                continue
            refuse_name(source.folder / name)
            if not name.endswith(".safetensors") or name not in source.states:
                inside(source.folder, name)
            kept.append(name)
    return tuple(sorted(kept))


def _tidy(out: Path) -> None:
    """Remove what only an unfinished folder needs."""
    refuse_strange(out / WORK, below=True)
    for path in (out / WORK).iterdir():
        if path != out / _STAMP:
            remove(path)


def _states(source: Source) -> list[Any]:
    """What tells a checkpoint from another one. A link changes the ctime."""
    states = [source.where, source.revision]
    for name, state in sorted(source.states.items()):
        states.append(f"{name} {state.model_dump(exclude={'ctime_ns', 'num_links'})}")
    return states


def _stamp_in(folder: Path) -> Rewritten | None:
    path = folder / _STAMP
    if path.is_file():
        with suppress(ValidationError):  # a stranger's
            return Rewritten.model_validate_json(path.read_bytes())
    return None
