"""Whether the values of a release's MTP block are those of a trained one.

In: the block's plan over a release on this machine. Out: nothing, or a refusal that names the tensor.

Easy to get wrong: how much can be said. Values that are not finite, matrices of zeros, and norms that are all still
what they were set to are no trained block. Noise of the right size cannot be known from weights without a run.
"""

from collections.abc import Mapping
from dataclasses import replace

from ..quantize.plan import Plan
from ..recipes.errors import CheckpointError
from ..recipes.families import find_view
from ..recipes.family import HFName
from ..validate.check.findings import grouped
from ..validate.check.runtime_view import RuntimeView
from ..validate.values.reading import BytesRead, summaries
from ..validate.values.summary import Summary
from ..validate.values.values import objections
from .graft_refusals import block_entries

_CURE = "Download the release again; if its values stay so, nothing can draft with them"


def refuse_untrained_block(plan: Plan, progress: BytesRead) -> None:
    """Read every tensor of the block once, and refuse values that no trained block has.

    Args:
        plan: of the block.
        progress: called with numbers of bytes.

    Raises:
        CheckpointError: names the tensor.
    """
    entries = block_entries(plan)
    source = replace(plan.source, entries={entry.name: entry for entry in entries}, unindexed={})
    runtime = RuntimeView(source=source, view=find_view(source.config, source.where))
    read = summaries(runtime, entries, progress)
    found = [each for each in grouped(objections(runtime, read)) if each.severity == "error"]
    if found:
        rule = "the release's MTP block must hold what a trained model holds"
        raise CheckpointError(f"{source.where}: {found[0].where}", rule, got=found[0].says, cure=_CURE)
    _refuse_untouched_norms(plan, read)


def _refuse_untouched_norms(plan: Plan, read: Mapping[HFName, Summary]) -> None:
    norms = [tensor.name for tensor in plan.tensors if tensor.role == "norm" and tensor.name in read]
    if norms and all(read[name].is_constant for name in norms):
        got = f"{read[norms[0]].largest:g} everywhere, as in all {len(norms)} norms of the block"
        where = f"{plan.source.where}: {norms[0]}"
        raise CheckpointError(where, "training changes the weights of a norm", got=got, cure=_CURE)
