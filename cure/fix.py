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

from ..recipes.errors import KeepMTPError, RecipeError
from ..recipes.frozen import Say
from ..validate.check.check import Checked, examine
from ..validate.check.dialects.patterns import time_limit
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
    ("form", fixes.tensors_have_the_form_that_is_built),
    ("form", fixes.orders_leave_the_draft),
    ("extras", fixes.extras_are_set),
)
"""In their order: what vLLM reads first comes first."""

_OF_BLOCKS = ("mtp-missing", "mtp-incomplete")
# What a graft of the release's MTP block cures where the tensor is one of that block.
_OF_TENSORS = ("glue", "form", "experts", "fused-uniform", "shapes", "unknown-tensor")
_OF_TENSORS += ("draft-head", "empty-weight", "norm")


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
        left = {each.key for each in self.after.data.findings}
        return tuple(each for each in self.before.data.findings if each.key not in left)


def proposed(where: str, *, progress: Say = lambda doing: None) -> Outcome:
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
    progress: Say = lambda doing: None,
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
        cures = dict.fromkeys(cure for rule, cure in rows if rule in rules)
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


def _outcome(checked: Checked, progress: Say = lambda doing: None) -> Outcome:
    return Outcome(checked, *settled(checked, Proposal(checked.readable()), FIXES, progress))


# --- commands


def with_commands(checked: Checked) -> Checked:
    """A check whose findings end with the command that cures them, where there is one.

    What fix would do decides, not a table: it is tried on headers, by the rules for vLLM, and
    SGLang's rules judge what is left.
    """
    data = checked.data
    commands = dict[Finding, str]()
    of_cures = dict[str, str]()
    static = [each for each in data.findings if each.origin == "static"]
    own = tuple(each for each in static if each.runtime == "vllm")
    of_sglang = [each for each in static if each.runtime == "sglang"]
    if checked.source is None or not static:
        return checked
    try:
        with time_limit():
            if of_sglang:
                own = examine(checked.source).data.findings
            alone = data.model_copy(update={"findings": own})
            outcome = _outcome(checked._replace(data=alone))
            cured = [*outcome.cured]
            if of_sglang and outcome.proposal.edits:
                after = examine(outcome.proposal.outcome(), runtimes=("sglang",))
                left = {each.key for each in after.data.findings}
                cured += [each for each in of_sglang if each.key not in left]
    except KeepMTPError:  # a cure that cannot be tried is none
        return checked
    # An MTP block beyond the last layer has the number of that layer in its names: lists wait for
    # the right one. And no fix that brings other errors.
    known = {each.key for each in own}
    errors = errors_of(outcome.after.data.findings)
    is_good = all(each.key in known and each.rule != "layer-missing" for each in errors)
    for each in static:
        commands[each] = cure_elsewhere(each, outcome)
        if is_good and each in cured:
            commands[each] = f"keepmtp fix {shlex.quote(outcome.proposal.source.where)} --out NEW"
        of_cures[each.cure] = commands[each]
    findings = []
    for each in data.findings:
        # A dry load has the static check's words for the same tensor.
        command = commands.get(each) or (each.origin == "dry" and of_cures.get(each.cure))
        if command:
            each = each.model_copy(update={"cure": f"{each.cure}. Run `{command}`"})
        findings.append(each)
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
    of_rule = [each for each in errors_of(outcome.after.data.findings) if each.rule == rule]
    is_of_block = finding in of_rule and all(runtime.is_mtp_name(each.where) for each in of_rule)
    if rule in _OF_BLOCKS or (rule in _OF_TENSORS and is_of_block):
        where = shlex.quote(name or outcome.proposal.source.where)
        return f"keepmtp graft {where} --from RELEASE --out NEW"
    return ""
