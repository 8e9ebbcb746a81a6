"""Carries out a graft: brings the release's MTP block here, judges its values, packs it, and writes
the new folder.

In: a `Graft`. Out: OUT, whole or not there: new shards with the block, new config files and index,
and hard links.

Only the block's tensors are read, from a Hub repository by range requests. They are kept under
OUT.partial until the end, so a run that was killed asks only for what it had not yet.

Easy to get wrong: what the value check only warns of. A block of chance, or with norms as they were
made, may be served by whoever measures it; but nobody wants it put into another checkpoint.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from ..checkpoints.files import WORK, within
from ..checkpoints.unchanged import refuse_changed
from ..quantize.plan.plan import Plan
from ..quantize.write.writer import write_shards
from ..recipes.errors import CheckpointError
from ..recipes.families import find_view
from ..validate.check.runtime_view import RuntimeView
from ..validate.check.values import Watch, check_values
from .graft import Graft
from .graft_fetch import fetch
from .graft_refusals import block_entries
from .rewritten import Rewritten, rewrite

Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]
_UNTRAINED = ("mtp-noise", "mtp-untrained")


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
                fetched = fetch(release, block_entries(plan), work / "release", progress)
                plan = replace(plan, source=fetched)
        _refuse_untrained_block(plan, reading)
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


def _refuse_untrained_block(plan: Plan, reading: Bar) -> None:
    """Read every tensor of the block once, and refuse values that no trained block has."""
    entries = {entry.name: entry for entry in block_entries(plan)}
    source = replace(plan.source, entries=entries, unindexed={})
    runtime = RuntimeView(
        source=source, view=find_view(source.config, source.where, source.entries)
    )
    for found in check_values(runtime, "all", watch=Watch(reading=reading)).findings:
        if found.severity == "error" or found.rule in _UNTRAINED:
            rule = "the release's MTP block must hold what a trained model holds"
            cure = "Download the release again; if its values stay so, nothing can draft with them"
            raise CheckpointError(f"{source.where}: {found.where}", rule, got=found.says, cure=cure)
