"""A new folder from a finished checkpoint: whole or not there, and the old one stays as it is.

In: a `Proposal`. Out: OUT, a checkpoint of its own. What did not change is a hard link, so it takes
no room and no time; a copy where the file system cannot link. Of a Hub repository that is not here,
OUT has the changed files alone. OUT/.keepmtp/plan.sha256 stays there: by it the same command
finds that it has finished before.

Easy to get wrong: the old folder may be written to meanwhile. It is compared before its files are
links, and after.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import __version__
from ..checkpoints.companions import inside
from ..checkpoints.files import (
    can_link,
    complete,
    making,
    naming_file,
    note_on_links,
    own_files,
    partial_path,
    refuse_small_disk,
    within,
)
from ..checkpoints.identity import states_of
from ..checkpoints.output import (
    STAMP,
    claimed,
    gather,
    refuse_place,
    stamp_of,
    tidy,
)
from ..checkpoints.proposal import Proposal
from ..checkpoints.record import RECIPE, RECORD
from ..checkpoints.safetensors_file import Entry, lay_out, total_bytes
from ..checkpoints.source import Source, read
from ..recipes.frozen import Bar, unwatched
from ..recipes.schemes import DTYPE_BITS

if TYPE_CHECKING:
    from ..quantize.plan.plan import Plan

_PART = 64 << 20


class Rewritten(NamedTuple):
    """What was written.

    Attributes:
        folder: the new checkpoint.
        new: names of files that the old folder has not, or has with other bytes.
        kept: names of files that are the old folder's: links, or copies where there are none.
        is_from_before: the same command had finished before, and this one wrote nothing.
    """

    folder: Path
    new: tuple[str, ...]
    kept: tuple[str, ...]
    is_from_before: bool = False

    @property
    def sentence(self) -> str:
        """What was written, for people."""
        if self.is_from_before:
            return f"{self.folder}: finished before, by the same command from the same files"
        line = f"{self.folder}: files: {len(self.new)} new, {len(self.kept)} kept."
        return f"{line} {note_on_links(self.folder, self.kept)}".rstrip(" .")


def _no_bar(_: str) -> Bar:
    return unwatched


def rewrite(
    proposal: Proposal,
    out: Path,
    *,
    block: "Plan | None" = None,
    bar: Callable[[str], Bar] = _no_bar,
) -> Rewritten:
    """Write the new folder; a killed run is continued by the same call, with the same bytes.

    Args:
        proposal: what it would be.
        out: where; nothing may be there.
        block: the plan of the release's, whose shards are written too.
        bar: a bar for bytes, by what is done with them.

    Raises:
        RecipeError: something is there, the disk is too small, or another run is at work.
        CheckpointError: a link that leaves the old folder, an old file that ends early, or the old
            folder changed.
    """
    source = proposal.source
    again = proposal.shards_again
    small = dict[str, str]()
    gone = {*proposal.empty_shards}
    for name, data in proposal.files().items():
        if data is None:
            gone.add(name)
        else:
            small[name] = data.decode()
    parts = [__version__, *_states(source), small]
    num_bytes = 0
    for content in small.values():
        num_bytes += len(content)
    for entries in again.values():
        num_bytes += total_bytes(entries)
    if block is not None:
        parts += [block.recipe.mtp, *_states(block.source)]
        num_bytes += block.num_bytes_after
    text = "\0".join(map(repr, parts))
    stamp = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    was_there = stamp_of(out) == stamp
    if not was_there:
        refuse_place(source, out)
    new = {*small, *again, *proposal.made_shards}
    kept = [name for name in kept_files(source) if name not in new | gone]
    made = Rewritten(out, tuple(sorted(new)), tuple(kept))
    if was_there and _is_whole(made):
        tidy(out, keeps_stamp=True)
        return made._replace(is_from_before=True)
    if source.folder is not None and not can_link(source.folder, out):
        # What cannot be linked is copied.
        num_bytes += sum(os.stat(source.folder / name).st_size for name in kept)
    refuse_small_disk(
        out, num_bytes, cure="Choose an OUT on the checkpoint's own disk, or make room"
    )
    changed = f"Remove {partial_path(out)}, and run the same command again"
    with claimed(source, out, stamp) as partial, naming_file(partial):
        # New shards first, while the folder has no links; a file that is changed is made anew under
        # OUT.partial, and never opened where it was.
        if block is not None:
            from .block import write_block  # imports torch

            write_block(block, partial, bar)
        for name, entries in again.items():
            with making(within(partial, name)) as path:
                _write_shard(path, entries, source)
        files = {**small, STAMP: stamp}
        gather(source, partial, links=kept, files=files, new=new, cure=changed)
        complete(out)
    tidy(out, keeps_stamp=True)
    return made


def _is_whole(made: Rewritten) -> bool:
    """Whether all of its files are there, and none was written to after the stamp was."""
    names = (*made.new, *made.kept)
    times = [state.mtime_ns for state in states_of(made.folder, names).values()]
    made_ns = (made.folder / STAMP).stat().st_mtime_ns
    return len(times) == len(names) and max(times, default=0) <= made_ns


def _write_shard(path: Path, entries: Iterable[Entry], source: Source) -> None:
    """Write a shard from old tensors. Wider dtypes come first, since readers map the file; a shard
    that was touched is written again, whole, because vLLM reads whole files.
    """
    in_order = sorted(entries, key=lambda entry: (-DTYPE_BITS[entry.dtype], entry.start))
    layout = lay_out((entry.name, entry.dtype, entry.shape) for entry in in_order)
    with open(path, "xb") as file:
        file.write(layout.header)
        for entry in in_order:
            buffer = memoryview(bytearray(min(_PART, entry.num_bytes)))
            for offset in range(0, entry.num_bytes, _PART):
                part = buffer[: entry.num_bytes - offset]
                read(source, entry, part, offset=offset)
                file.write(part)
        assert file.tell() == layout.num_bytes, f"{path}: bytes of another shape"


def kept_files(source: Source) -> tuple[str, ...]:
    """Names of the old folder's files that a new one gets, sorted.

    Raises:
        CheckpointError: one is a link out of the folder, or to nowhere. A shard may be one: its
            header was read. Or see `own_files`.
    """
    if source.folder is None:
        return ()
    kept = []
    # Its own Python too: it is a person's own copy on his own disk, nothing in it is run, and
    # `publish` asks again what may travel.
    for path in own_files(source.folder):
        name = str(path.relative_to(source.folder))
        # The record and the recipe say how the old folder was made; the new one was not.
        if name in (RECORD, RECIPE):
            continue
        if not name.endswith(".safetensors") or name not in source.states:
            inside(source.folder, name)
        kept.append(name)
    return tuple(sorted(kept))


def _states(source: Source) -> list[Any]:
    """What tells a checkpoint from another one. A link changes the ctime."""
    states = [source.where, source.revision]
    for name, state in sorted(source.states.items()):
        states.append(f"{name} {state.model_dump(exclude={'ctime_ns', 'num_links'})}")
    return states
