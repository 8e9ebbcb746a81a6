"""`keepmtp fix`: what the check finds, cured, if need be with the MTP block of the release.

In: a checkpoint, and its release where it lacks a good block. Out: an `Outcome`: the changes, each
with its reason, the check before and after; and a new folder.

Easy to get wrong: one cure uncovers another fault. Each round of fixes is judged by the check, from
headers, before a byte is written, and what is written is the round with the fewest errors.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checkpoints.proposal import Proposal
from ..checkpoints.source import Source, uncollected
from ..recipes.errors import CheckpointError
from ..recipes.frozen import Say, silent
from ..validate.check.check import Checked, examine
from ..validate.facts.findings import Finding, errors_of
from ..validate.facts.results import CheckData
from . import fixes
from .fixes import Faulty

if TYPE_CHECKING:
    from ..quantize.plan.plan import Plan

Fix = Callable[[Faulty], None]
_MAX_ROUNDS = 6
# What a list must say hangs on the numbers of layers: these end a round.
_OF_NUMBERS: tuple[Fix, ...] = (
    fixes.mtp_count_is_what_is_there,
    fixes.mtp_names_have_the_promised_number,
)
FIXES: tuple[tuple[str, Fix], ...] = (
    ("names", fixes.layers_have_known_names),
    ("unindexed", fixes.mtp_files_are_indexed),
    ("mtp-not-promised", fixes.mtp_count_is_what_is_there),
    ("mtp-missing", fixes.mtp_count_is_what_is_there),
    ("mtp-missing", fixes.mtp_names_have_the_promised_number),
    ("config", fixes.layer_types_are_cut),
    ("mtp-prefix", fixes.mtp_names_lose_a_prefix),
    ("kv-scales", fixes.kv_scales_leave),
    ("kv-cache", fixes.kv_cache_is_one_that_vllm_has),
    ("algorithm", fixes.modelopt_fields_are_there),
    ("config-group", fixes.activations_are_named),
    ("config-group", fixes.lists_say_what_is_stored),
    ("form", fixes.lists_say_what_is_stored),
    ("draft-head", fixes.lists_say_what_is_stored),
    ("two-configs", fixes.two_configs_agree),
    ("form", fixes.experts_are_named),
    ("form", fixes.tensors_have_the_form_that_is_built),
    ("form", fixes.orders_leave_the_draft),
    ("extras", fixes.extras_are_set),
)
"""The rule of a finding, and what cures it. In their order: what vLLM reads first comes first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What fix would do, judged from headers.

    Attributes:
        before: the check of the checkpoint as it is.
        after: the check of what it would be.
        proposal: the changes.
        block: the plan of the release's, where it is asked for.
    """

    before: Checked
    after: Checked
    proposal: Proposal
    block: "Plan | None" = None

    @property
    def changes(self) -> bool:
        """Whether a new folder would be another checkpoint."""
        return bool(self.proposal.edits) or self.block is not None

    @property
    def cured(self) -> tuple[Finding, ...]:
        """Findings that are gone."""
        left = {finding.key for finding in self.after.data.findings}
        return tuple(each for each in self.before.data.findings if each.key not in left)


@uncollected()
def proposed(
    where: str | Source,
    *,
    release: Source | None = None,
    mtp: str | None = None,
    progress: Say = silent,
) -> Outcome:
    """What fix would do with a checkpoint. Nothing is written.

    Args:
        where: a folder or a Hub id; of a repository only headers and small files are read.
        release: what it was made from; its MTP block takes the place of the checkpoint's.
        mtp: the form of that block; see `put_block`.
        progress: gets a line that says what is done now.

    Raises:
        KeepMTPError: there is nothing to judge, or its files cannot be read; see `put_block`; or
            the block is not built as it would be stored.
    """
    progress(f"{where}: static check")
    before = examine(where)
    proposal = Proposal(before.readable())
    if release is None:
        after, proposal = settled(before, proposal, progress)
        return Outcome(before, after, proposal)
    from .block import put_block  # imports torch, which a release is read with

    block = put_block(proposal, release, mtp)
    after, proposal = settled(examine(proposal.outcome()), proposal, progress)
    for error in errors_of(after.data.findings):
        if after.runtime and after.runtime.is_mtp_name(error.where):
            rule = "the new MTP block must be built as it is stored"
            raise CheckpointError(error.where, rule, got=error.says, cure=error.cure)
    return Outcome(before, after, proposal, block)


def settled(
    checked: Checked, proposal: Proposal, progress: Say = silent
) -> tuple[Checked, Proposal]:
    """The round of fixes with the fewest errors, and the check of it.

    Args:
        checked: what the check finds of `proposal` as it is; further changes are made to copies.
        proposal: to begin with.
        progress: gets a line for each check.
    """
    best = checked, proposal
    for _ in range(_MAX_ROUNDS):
        rules = {finding.rule for finding in checked.data.findings}
        cures = dict[Fix, None]()
        for rule, cure in FIXES:
            if rule in rules:
                cures[cure] = None
        if checked.runtime is None or not cures:
            break
        had = len(proposal.edits)
        proposal = proposal.copy()
        for cure in cures:
            cure(Faulty(checked.runtime, checked.data.findings, proposal))
            if cure in _OF_NUMBERS and len(proposal.edits) > had:
                break
        if len(proposal.edits) == had:
            break
        progress(f"{proposal.source.where}: check of what it would be")
        checked = examine(proposal.outcome(), vllm=checked.runtime.vllm)
        if _weight(checked.data) < _weight(best[0].data):
            best = checked, proposal
    return best


def _weight(data: CheckData) -> tuple[int, int]:
    """Errors and warnings, each with its tensors: fewer are better."""
    sums = Counter[str]()
    for finding in data.findings:
        sums[finding.severity] += finding.count
    return sums["error"], sums["warning"]
