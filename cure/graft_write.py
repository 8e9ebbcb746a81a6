"""Carries out a graft: brings the release's MTP block here, judges its values, packs it, and writes
the new folder.

In: a `Graft`. Out: OUT, whole or not there: new shards with the block, new config files and index,
and hard links.

Only the block's tensors are read, from a Hub repository by range requests: into files of holes with
the repository's names and offsets. They are kept under OUT.partial until the end, so a run that was
killed asks only for what it had not yet. A range counts as here once its line is in the list of
ranges, and the line is written after its bytes.

Easy to get wrong: what the value check only warns of. A block of chance, or with norms as they were
made, may be served by whoever measures it; but nobody wants it put into another checkpoint.
"""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Lock

from ..checkpoints.files import WORK, within, write_at
from ..checkpoints.hub import AT_A_TIME, read_range
from ..checkpoints.identity import refuse_changed, states_of
from ..checkpoints.source import Source
from ..quantize.write.writer import write_shards
from ..recipes.errors import CheckpointError
from ..recipes.families import find_view
from ..validate.check.reading import joined
from ..validate.check.runtime_view import RuntimeView
from ..validate.check.values import Watch, check_values
from .graft import Graft
from .rewritten import Rewritten, rewrite

Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def no_bar(total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Shows nothing."""
    return nullcontext(lambda _bytes: None)


def carry_out(
    graft: Graft,
    out: Path,
    *,
    threads: int | None = None,
    fetching: Bar = no_bar,
    reading: Bar = no_bar,
    packing: Bar = no_bar,
) -> Rewritten:
    """Write the new folder; a run that was killed is continued by the same call, with the same
    bytes.

    Args:
        graft: from `plan_graft`.
        out: the new folder; nothing may be there.
        threads: files that are packed at the same time; default one a core.
        fetching, reading, packing: bars for the bytes from the Hub, for those that are judged, and
            for packing.

    Raises:
        RecipeError: see `rewritten.rewrite`.
        CheckpointError: the release's block was never trained, a file ends early, or a folder
            changed meanwhile.
    """
    release, num_bytes = graft.plan.source, graft.plan.num_bytes_after
    if release.folder is None:
        num_bytes += graft.num_bytes_read

    def make(folder: Path) -> None:
        """Write the block's files."""
        plan, work = graft.plan, folder / WORK / "graft"
        if release.folder is None:
            with fetching(graft.num_bytes_read) as progress:
                plan = replace(plan, source=_fetched(graft, work / "release", progress))
        _refuse_untrained_block(graft, plan.source, reading)
        (work / WORK).mkdir(parents=True, exist_ok=True)
        with packing(plan.num_bytes_before) as progress:
            write_shards(plan, work, threads=threads or os.cpu_count() or 1, progress=progress)
        if release.folder is not None:
            refuse_changed(release.folder, release.states, cure="Run the same command again")
        for shard in plan.shards:
            os.replace(work / shard.file, within(folder, shard.file))

    return rewrite(
        graft.proposal,
        out,
        made_by=f"graft {graft.plan.recipe.mtp}",
        also_read=release,
        make_shards=make,
        num_bytes=num_bytes,
    )


def _fetched(graft: Graft, folder: Path, progress: Callable[[int], None]) -> Source:
    """The release with the block's tensors in a folder of its own; what an earlier run brought
    there is not asked for again.
    """
    source, lines, lock = graft.plan.source, folder / "ranges.jsonl", Lock()
    folder.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[str, int, int]] = []
    for stretch in joined(source, graft.entries):
        first = stretch.entries[0]
        end = first.start + stretch.num_bytes
        size = -(-stretch.num_bytes // max(1, stretch.num_requests))
        for start in range(first.start, end, size or 1):
            wanted.append((first.file, start, min(size, end - start)))
    # A line that a kill cut in two is none.
    *whole, rest = lines.read_text(encoding="utf-8").split("\n") if lines.is_file() else [""]
    if rest:
        lines.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
    done = {(*json.loads(line),) for line in whole}

    def bring(file: str, start: int, num_bytes: int) -> None:
        # One piece in memory for each connection.
        buffer = bytearray(num_bytes)
        into = memoryview(buffer)
        read_range(
            source.where, file, commit=source.revision, start=start, into=into, arrived=progress
        )
        descriptor = os.open(within(folder, file), os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            write_at(descriptor, buffer, start)
        finally:
            os.close(descriptor)
        with lock, open(lines, "a", encoding="utf-8") as written:
            written.write(json.dumps([file, start, num_bytes]) + "\n")

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        jobs = []
        for piece in wanted:
            if piece in done:
                progress(piece[2])
            else:
                jobs.append(pool.submit(bring, *piece))
        try:
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)
    return replace(source, folder=folder, states=states_of(folder, {file for file, _, _ in wanted}))


def _refuse_untrained_block(graft: Graft, source: Source, reading: Bar) -> None:
    """Read every tensor of the block once, and refuse values that no trained block has."""
    entries = {entry.name: entry for entry in graft.entries}
    source = replace(source, entries=entries, unindexed={})
    view = find_view(source.config, source.where, source.entries)
    runtime = RuntimeView(source=source, view=view)
    for found in check_values(runtime, "all", watch=Watch(reading=reading)).findings:
        if found.severity == "error" or found.rule in ("mtp-noise", "mtp-untrained"):
            rule = "the release's MTP block must hold what a trained model holds"
            cure = "Download the release again; if its values stay so, nothing can draft with them"
            raise CheckpointError(f"{source.where}: {found.where}", rule, got=found.says, cure=cure)
