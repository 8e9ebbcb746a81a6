"""`keepmtp fix`: what the check finds and what needs no new values, cured.

In: a checkpoint. Out: an `Outcome`: the changes, each with its reason, the check before and after;
and a new folder.

Easy to get wrong: one cure uncovers another fault. Each round of fixes is judged by the check, from
headers, before a byte is written, and what is written is the round with the fewest errors.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.dialects.patterns import time_limit
from ..recipes.errors import KeepMTPError, RecipeError
from ..recipes.frozen import Say, silent
from ..validate.check.check import Checked, examine
from ..validate.facts.findings import Finding, errors_of
from ..validate.facts.results import CheckData
from . import fixes, fixes_lists
from .proposal import Faulty, Proposal
from .rewritten import Rewritten, rewrite

Fix = Callable[[Faulty], None]
_MAX_ROUNDS = 6
# What a list must say hangs on the numbers of layers: these end a round.
_OF_NUMBERS: tuple[Fix, ...] = (
    fixes.mtp_count_is_what_is_there,
    fixes.mtp_names_have_the_promised_number,
)
LIST_FIXES: tuple[tuple[str, Fix], ...] = (
    ("config-group", fixes_lists.lists_say_what_is_stored),
    ("form", fixes_lists.lists_say_what_is_stored),
    ("draft-head", fixes_lists.lists_say_what_is_stored),
    ("two-configs", fixes.two_configs_agree),
)
"""The rule of a finding, and what cures it, if anything: what a quantization config lists."""
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
    *LIST_FIXES,
    ("form", fixes.experts_are_named),
    ("form", fixes.tensors_have_the_form_that_is_built),
    ("form", fixes.orders_leave_the_draft),
    ("extras", fixes.extras_are_set),
)
"""In their order: what vLLM reads first comes first."""

_OF_BLOCKS = ("mtp-missing", "mtp-incomplete")
# What a graft of the release's MTP block cures where the tensor is one of that block.
_OF_TENSORS = ("glue", "form", "experts", "fused-uniform", "shapes", "unknown-tensor")
_OF_TENSORS += ("draft-head",)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What fix would do, judged from headers.

    Attributes:
        before: the check of the checkpoint as it is.
        after: the check of what it would be.
        proposal: the changes.
    """

    before: Checked
    after: Checked
    proposal: Proposal

    @property
    def cured(self) -> tuple[Finding, ...]:
        """Findings that are gone."""
        return _gone(self.before.data.findings, self.after.data)


def _gone(findings: Iterable[Finding], after: CheckData) -> tuple[Finding, ...]:
    """Those that a later check does not have."""
    left = {finding.key for finding in after.findings}
    return tuple(finding for finding in findings if finding.key not in left)


def proposed(where: str, *, progress: Say = silent) -> Outcome:
    """What fix would do with a checkpoint. Nothing is written.

    Args:
        where: a folder or a Hub id; of a repository only headers and small files are read.
        progress: gets a line that says what is done now.

    Raises:
        KeepMTPError: there is nothing to judge, or its files cannot be read.
    """
    progress(f"{where}: static check")
    return _outcome(examine(where), progress)


def write(outcome: Outcome, out: Path) -> Rewritten:
    """Write what is proposed: a new folder; see `rewritten.rewrite`.

    Raises:
        RecipeError: nothing would change, or OUT cannot be written.
    """
    if not outcome.proposal.edits:
        raise RecipeError(
            outcome.proposal.source.where,
            "fix writes a folder only if something changes",
            got="nothing that it can cure",
            cure="Serve it as it is",
        )
    return rewrite(outcome.proposal, out, made_by="fix")


def settled(
    checked: Checked,
    proposal: Proposal,
    rows: Iterable[tuple[str, Fix]],
    progress: Say = silent,
) -> tuple[Checked, Proposal]:
    """The round of fixes with the fewest errors, and the check of it.

    Args:
        checked: what the check finds of `proposal` as it is; further changes are made to copies.
        proposal: to begin with.
        rows: as in FIXES.
        progress: gets a line for each check.
    """
    best = checked, proposal
    for _ in range(_MAX_ROUNDS):
        rules = {finding.rule for finding in checked.data.findings}
        cures = dict[Fix, None]()
        for rule, cure in rows:
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
        checked = proposal.examined(checked.runtime.vllm)
        if _weight(checked.data) < _weight(best[0].data):
            best = checked, proposal
    return best


def _weight(data: CheckData) -> tuple[int, int]:
    """Errors and warnings, each with its tensors: fewer are better."""
    sums = Counter[str]()
    for finding in data.findings:
        sums[finding.severity] += finding.count
    return sums["error"], sums["warning"]


def _outcome(checked: Checked, progress: Say = silent) -> Outcome:
    after, proposal = settled(checked, Proposal(checked.readable()), FIXES, progress)
    return Outcome(checked, after, proposal)


# --- commands


def with_commands(checked: Checked) -> Checked:
    """A check whose findings end with the command that cures them, where there is one.

    What fix would do decides, not a table: it is tried on headers, by the rules for vLLM, and
    SGLang's rules judge what is left.
    """
    data = checked.data
    static = [finding for finding in data.findings if finding.origin == "static"]
    if checked.source is None or not static:
        return checked
    of_sglang = [finding for finding in static if finding.runtime == "sglang"]
    try:
        with time_limit():
            own = static
            if of_sglang:
                own = [*examine(checked.source).data.findings]
            alone = data.model_copy(update={"findings": tuple(own)})
            outcome = _outcome(checked._replace(data=alone))
            cured = [*outcome.cured]
            if of_sglang and outcome.proposal.edits:
                after = examine(outcome.proposal.outcome(), runtimes=("sglang",))
                cured += _gone(of_sglang, after.data)
    except KeepMTPError:  # a cure that cannot be tried is none
        return checked
    # An MTP block beyond the last layer has the number of that layer in its names: lists wait for
    # the right one. And no fix that brings other errors.
    known = {finding.key for finding in own}
    is_good = True
    for finding in errors_of(outcome.after.data.findings):
        is_good &= finding.key in known and finding.rule != "layer-missing"
    commands = dict[Finding, str]()
    # A dry load has the static check's words for the same tensor.
    of_cures = dict[str, str]()
    for finding in static:
        commands[finding] = cure_elsewhere(finding, outcome)
        if is_good and finding in cured:
            where = shlex.quote(outcome.proposal.source.where)
            commands[finding] = f"keepmtp fix {where} --out NEW"
        of_cures[finding.cure] = commands[finding]
    findings = list[Finding]()
    for finding in data.findings:
        command = commands.get(finding, "")
        if finding.origin == "dry":
            command = of_cures.get(finding.cure, "")
        if command:
            finding = finding.model_copy(update={"cure": f"{finding.cure}. Run `{command}`"})
        findings.append(finding)
    return checked._replace(data=data.model_copy(update={"findings": tuple(findings)}))


def cure_elsewhere(finding: Finding, outcome: Outcome, name: str = "") -> str:
    """The command for what needs new values, here or in the folder `name`; "" where the finding's
    own cure says all.
    """
    runtime = outcome.before.runtime
    if runtime is None:
        return ""
    # What is wrong with the backbone as well is wrong in config.json, and a new block would be
    # wrong there too.
    rule = finding.rule.removeprefix("sglang-")
    is_left = False
    is_of_block = True
    for other in errors_of(outcome.after.data.findings):
        if other.rule == rule:
            is_left |= other == finding
            is_of_block &= runtime.is_mtp_name(other.where)
    if rule in _OF_BLOCKS or (rule in _OF_TENSORS and is_left and is_of_block):
        where = shlex.quote(name or outcome.proposal.source.where)
        return f"keepmtp graft {where} --from RELEASE --out NEW"
    return ""
