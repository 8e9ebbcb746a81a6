"""Carries out a graft: brings the release's MTP block here, judges its values, packs it, and writes the new folder.

In: a `Graft`. Out: OUT, whole or not there: new shards with the block, new config files and index, and hard links.

Only the block's tensors are read, from a Hub repository by range requests. They are kept under OUT.partial until the
end, so a run that was killed asks only for what it had not yet.

Easy to get wrong: hard links. New files are written before any file of the old checkpoint is linked, and a file that
loses tensors is made anew.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..checkpoints.files import WORK, within
from ..checkpoints.unchanged import refuse_changed
from ..quantize.plan.plan import Plan
from ..quantize.write.writer import write_shards
from ..recipes.family import HFName
from .graft import Graft
from .graft_fetch import fetch
from .graft_refusals import block_entries
from .graft_values import refuse_untrained_block
from .new_shards import shard_again, write_shard
from .rewritten import Rewrite, Rewritten, rewrite

Bar = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def carry_out(
    graft: Graft,
    out: Path,
    *,
    threads: int | None = None,
    fetching: Bar | None = None,
    reading: Bar | None = None,
    packing: Bar | None = None,
) -> Rewritten:
    """Write the new folder; a run that was killed is continued by the same call, with the same bytes.

    Args:
        graft: from `plan_graft`.
        out: the new folder; nothing may be there.
        threads: files that are packed at the same time; default one a core.
        fetching, reading, packing: bars for the bytes from the Hub, for those that are judged, and for packing.

    Raises:
        RecipeError: see `rewritten.rewrite`.
        CheckpointError: the release's block was never trained, a file ends early, or a folder changed meanwhile.
    """
    source, plan = graft.plan.source, graft.plan
    fetched = graft.num_bytes_read if source.folder is None else 0
    rewritten = sum(entry.num_bytes for entry in graft.added if entry.file in graft.again)
    wanted = Rewrite(
        source=graft.quantized,
        made_by=f"graft {plan.recipe.mtp}",
        also_read=source,
        files=graft.files,
        left_out=graft.left_out,
        write_shards=partial(
            _write, graft, threads=threads or os.cpu_count() or 1, fetching=fetching, reading=reading, packing=packing
        ),
        num_shard_bytes=plan.num_bytes_after + fetched + rewritten,
    )
    return rewrite(wanted, out)


def _write(
    graft: Graft, folder: Path, *, threads: int, fetching: Bar | None, reading: Bar | None, packing: Bar | None
) -> Sequence[str]:
    """Write the block's files, and those of the checkpoint that lose tensors."""
    work = folder / WORK / "graft"
    plan = _on_this_machine(graft, work / "release", fetching)
    refuse_untrained_block(plan, reading)
    (work / WORK).mkdir(parents=True, exist_ok=True)
    with _shown(packing, plan.num_bytes_before) as progress:
        write_shards(plan, work, threads=threads, progress=progress)
    if graft.plan.source.folder is not None:
        cure = "Run the same command again"
        refuse_changed(graft.plan.source.folder, graft.plan.source.states, cure=cure)
    for shard in plan.shards:
        os.replace(work / shard.file, within(folder, shard.file))
    gone: dict[HFName, None] = {entry.name: None for entry in graft.old}
    again = [
        write_shard(within(folder, file), shard_again(graft.quantized, file, gone), graft.quantized)
        for file in graft.again
    ]
    return [*(shard.file for shard in plan.shards), *again]


def _on_this_machine(graft: Graft, folder: Path, fetching: Bar | None) -> Plan:
    plan = graft.plan
    if plan.source.folder is not None:
        return plan
    with _shown(fetching, graft.num_bytes_read) as progress:
        return replace(plan, source=fetch(plan.source, block_entries(plan), folder, progress))


def _shown(bar: Bar | None, total: int) -> AbstractContextManager[Callable[[int], None]]:
    return bar(total) if bar else nullcontext(lambda _bytes: None)
