"""Whether the values of a release's MTP block are those of a trained one.

In: the block's plan over a release on this machine. Out: nothing, or a refusal that names the tensor.

Easy to get wrong: what the value check only warns of. A block of chance, or with norms as they were made, may be served
by whoever measures it; but nobody wants it put into another checkpoint.
"""

from dataclasses import replace

from ..checkpoints.identity import ReadingBar
from ..quantize.plan.plan import Plan
from ..recipes.errors import CheckpointError
from ..recipes.families import find_view
from ..validate.check.runtime_view import RuntimeView
from ..validate.check.values import UNWATCHED, Watch, check_values
from .graft_refusals import block_entries

_UNTRAINED = ("mtp-noise", "mtp-untrained")


def refuse_untrained_block(plan: Plan, reading: ReadingBar | None = None) -> None:
    """Read every tensor of the block once, and refuse values that no trained block has.

    Args:
        plan: of the block.
        reading: shows the bytes that are read.

    Raises:
        CheckpointError: names the tensor.
    """
    entries = {entry.name: entry for entry in block_entries(plan)}
    source = replace(plan.source, entries=entries, unindexed={})
    runtime = RuntimeView(source=source, view=find_view(source.config, source.where, source.entries))
    values = check_values(runtime, "all", watch=Watch(reading=reading) if reading else UNWATCHED)
    for found in values.findings:
        if found.severity == "error" or found.rule in _UNTRAINED:
            rule = "the release's MTP block must hold what a trained model holds"
            cure = "Download the release again; if its values stay so, nothing can draft with them"
            raise CheckpointError(f"{source.where}: {found.where}", rule, got=found.says, cure=cure)
