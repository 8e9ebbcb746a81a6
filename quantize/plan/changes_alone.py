"""A change proposed to a repository: only the files that change are read and written.

In: the plan of a finished checkpoint of the Hub. Out: the same plan without links; the source with
the tensors that it reads; and the repository as it would be, to be judged.

Easy to get wrong: a server reads the whole repository, so that is what the check judges. Values are
read of the new files alone: the others are as their owner made them.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path

from ...checkpoints.companions import INDEX
from ...checkpoints.safetensors_file import read_header
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.schema import AUTO
from .configs import files_of
from .edited_configs import as_written
from .plan import Plan, read_alone

_WHERE = "--changed-only"


def changes_alone(plan: Plan) -> Plan:
    """The plan of the changed files.

    Raises:
        RecipeError: no finished checkpoint of the Hub, or a run that reads all of it.
    """
    rule = "is for a checkpoint of the Hub of which all stays but what --set names"
    if not plan.keeps_shards:
        got = f"{plan.source.where}, which becomes another one"
        raise RecipeError(_WHERE, rule, got=got, cure="Leave it out")
    if plan.source.folder is not None:
        cure = "Leave it out: what stays is a link, which takes no room"
        raise RecipeError(_WHERE, rule, got="a folder", cure=cure)
    if plan.needs_batches:
        rule = "reads no text, because calibration needs all weights"
        got = f"mtp: {AUTO}"
        if plan.needs_calibration:
            got = ", ".join(plan.needs_calibration)
        raise RecipeError(_WHERE, rule, got=got, cure="Choose a form without data, or leave it out")
    return replace(plan, changed_only=True)


def read_for_changes(plan: Plan) -> Source:
    """The source with the tensors that the changed files are made from, and no others."""
    units = chain(*[shard.units for shard in plan.written])
    return read_alone(plan.source, chain(*units))


def with_changes(plan: Plan, folder: Path) -> Source:
    """The repository with the files of an output in it: its headers and configs."""
    written = as_written(plan)
    entries = {**written.entries}
    for shard in plan.written:
        path = folder / shard.file
        entries |= read_header(path, str(path)).entries
    forgotten = plan.source.unindexed.items()
    unindexed = {name: entry for name, entry in forgotten if name not in entries}
    configs = files_of(plan)
    changed = {name: (folder / name).read_bytes() for name in (INDEX, *configs)}
    tensors = {"entries": entries, "unindexed": unindexed}
    return replace(written, config=configs["config.json"], changed=changed, **tensors)


def new_alone(plan: Plan, whole: Source, folder: Path) -> Source:
    """Of `with_changes`, the tensors that are in the output, to be read there."""
    files = {shard.file for shard in plan.written}
    entries = {name: entry for name, entry in whole.entries.items() if entry.file in files}
    return replace(whole, folder=folder, entries=entries, unindexed={})
