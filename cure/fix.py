"""`keepmtp fix`: what the check finds and what needs no new values, cured.

In: a checkpoint. Out: an `Outcome`: the changes, each with its reason, the check before and after; and a new folder.

Easy to get wrong: one cure uncovers another fault. Each round of fixes is judged by the check, from headers, before a
byte is written, and what is written is the round with the fewest errors.
"""

import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..checkpoints.source import Source
from ..recipes.errors import KeepMTPError, RecipeError
from ..validate.check.check import Checked, examine, examine_source
from ..validate.check.dialects.patterns import time_limit
from ..validate.check.runtime_view import RuntimeView
from ..validate.facts.findings import Finding, errors_first
from ..validate.facts.results import CheckData
from . import fixes_config, fixes_foreign, fixes_lists, fixes_tensors
from .fixes_sglang import entries_for_sglang
from .proposal import Edit, Proposal
from .rewritten import Rewritten, rewrite

_MAX_ROUNDS = 6


FIXES: tuple[tuple[str, Callable[[Checked, Proposal], Iterator[Edit]]], ...] = (
    ("unindexed", fixes_tensors.mtp_files_are_indexed),
    ("mtp-not-promised", fixes_config.mtp_count_is_what_is_there),
    ("mtp-missing", fixes_config.mtp_count_is_what_is_there),
    ("config", fixes_config.layer_types_are_cut),
    ("mtp-prefix", fixes_tensors.mtp_names_lose_a_prefix),
    ("kv-scales", fixes_tensors.kv_scales_leave),
    ("kv-cache", fixes_config.kv_cache_is_one_that_vllm_has),
    ("algorithm", fixes_config.modelopt_fields_are_there),
    ("config-group", fixes_config.activations_are_named),
    ("config-group", fixes_lists.lists_say_what_is_stored),
    ("two-configs", fixes_config.two_configs_agree),
    ("form", fixes_lists.lists_say_what_is_stored),
    ("entry-unmatched", fixes_lists.lists_say_what_is_stored),
    ("form", fixes_foreign.plain_modules_are_listed),
    ("config-group", fixes_foreign.plain_modules_are_listed),
    ("draft-head", fixes_foreign.plain_modules_are_listed),
    ("draft-head", fixes_lists.draft_head_is_excluded),
    ("form", fixes_tensors.tensors_have_the_form_that_is_built),
    ("form", fixes_tensors.orders_leave_the_draft),
    ("scale-dtype", fixes_tensors.block_scales_are_f32),
    ("extras", fixes_config.extras_are_set),
    ("alias", fixes_tensors.copies_are_added),
    ("index-size", fixes_tensors.index_is_written_again),
)
"""The rule of a finding, and what yields its cure, or nothing; in their order: what vLLM reads first comes first."""

_OF_BLOCKS = frozenset({"mtp-missing", "mtp-incomplete"})
# What a graft of the release's MTP block cures where the tensor is one of that block.
_OF_TENSORS = frozenset(
    {"glue", "form", "experts", "fused-uniform", "shapes", "unknown-tensor", "draft-head", "empty-weight", "norm"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What fix would do, judged from headers.

    Attributes:
        source: the checkpoint as it is.
        before: the check of it.
        after: the check of what it would be.
        proposal: the changes.
        not_for_sglang: why no entry lets SGLang serve it, where that was asked for.
        runtime: the names of the checkpoint as it is; None without a family's table.
    """

    source: Source
    runtime: RuntimeView | None
    before: CheckData
    after: CheckData
    proposal: Proposal
    not_for_sglang: tuple[str, ...] = ()

    @property
    def cured(self) -> tuple[Finding, ...]:
        """Findings that are gone."""
        left = {each.key for each in self.after.findings}
        return tuple(each for each in self.before.findings if each.key not in left)

    @property
    def left(self) -> tuple[Finding, ...]:
        """Findings that stay."""
        return self.after.findings


def proposed(
    where: str,
    *,
    with_scales: bool = False,
    for_sglang: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> Outcome:
    """What fix would do with a checkpoint. Nothing is written.

    Args:
        where: a folder or a Hub id; of a repository only headers and small files are read.
        with_scales: also read the scales of one value of a folder, and cure those that disagree.
        for_sglang: also add the entries that SGLang needs; vLLM's verdict stays.
        progress: gets a line that says what is done now.

    Raises:
        KeepMTPError: there is nothing to judge, or its files cannot be read.
    """
    progress(f"{where}: static check")
    return _outcome(examine(where), with_scales=with_scales, for_sglang=for_sglang, progress=progress)


def with_commands(checked: Checked) -> Checked:
    """A check whose findings end with the command that cures them, where there is one.

    What fix would do decides, not a table: it is tried on headers, by the rules for vLLM, and for SGLang by those.
    """
    data = checked.data
    of_vllm = tuple(each for each in data.findings if (each.origin, each.runtime) == ("static", "vllm"))
    of_sglang = [each for each in data.findings if each.runtime == "sglang"]
    if not (of_vllm or of_sglang) or checked.source is None:
        return checked
    try:
        with time_limit():
            for_vllm = checked._replace(data=data.model_copy(update={"findings": of_vllm}))
            outcome = _outcome(for_vllm if of_vllm else examine_source(checked.source))
            commands = _for_sglang(of_sglang, outcome)
    except KeepMTPError:  # a cure that cannot be tried is none
        return checked
    option = " --runtime sglang" if "--runtime" in "".join(commands.values()) else ""
    of_cures = {}
    for each in of_vllm:
        commands[each] = of_cures[each.cure] = _command_for(each, outcome, option)
    findings = []
    for each in data.findings:
        # A dry load has the static check's words for the same tensor.
        words = of_cures.get(each.cure) if each.origin == "dry" else commands.get(each)
        cure = f"{each.cure}. Run `{words}`" if words else each.cure
        findings.append(each.model_copy(update={"cure": cure}))
    return checked._replace(data=data.model_copy(update={"findings": tuple(findings)}))


def _for_sglang(findings: list[Finding], outcome: Outcome) -> dict[Finding, str]:
    """The commands for what SGLang would do wrong."""
    if not findings or outcome.runtime is None:
        return {}
    proposal = outcome.proposal
    with suppress(RecipeError):  # the lists of this dialect cannot be extended: fix alone may still cure it
        named = proposal.copy()
        _name_for_sglang(named, outcome.after)
        proposal = named
    option = " --runtime sglang" if len(proposal.edits) > len(outcome.proposal.edits) else ""
    with proposal.headers() as folder:
        after = examine(folder, runtimes=("sglang",)).data.findings
    left = {each.key for each in after}
    is_better = left <= {each.key for each in findings}
    commands = {}
    for each in findings:
        alike = each.model_copy(update={"rule": each.rule.removeprefix("sglang-")})
        is_cured = is_better and each.key not in left
        commands[each] = _fix(outcome, option) if is_cured else cure_elsewhere(alike, outcome)
    return commands


def _command_for(finding: Finding, outcome: Outcome, option: str) -> str:
    """The command that cures it; "" for none. A fix that brings other errors is no cure."""
    known = {each.key for each in outcome.before.findings}
    # An MTP block beyond the last layer has the number of that layer in its names: lists wait for the right one.
    errors = [each for each in outcome.left if each.severity == "error"]
    if finding in outcome.cured and all(each.key in known and each.rule != "layer-missing" for each in errors):
        return _fix(outcome, option)
    return cure_elsewhere(finding, outcome)


def _fix(outcome: Outcome, option: str) -> str:
    return f"keepmtp fix {shlex.quote(outcome.source.where)}{option} --out NEW"


def _outcome(
    checked: Checked,
    *,
    with_scales: bool = False,
    for_sglang: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> Outcome:
    source, runtime, before = checked.readable(), checked.runtime, checked.data
    where = source.where
    proposal = Proposal(source)
    if with_scales:
        from . import fixes_scales  # it reads values, by torch

        progress(f"{where}: reading scales")
        for edit in fixes_scales.fused_scales_are_one(checked, proposal):
            proposal.make(edit)
        on_disk, left = fixes_scales.findings_in_scales(checked, proposal.edits)
    else:
        on_disk = left = ()
    best = (_weight(before), proposal, before)
    for _ in range(_MAX_ROUNDS):
        if not _round(checked, proposal := proposal.copy()):
            break
        progress(f"{where}: check of what it would be")
        with proposal.headers() as folder:
            checked = examine(folder)
        if _weight(checked.data) < best[0]:
            best = _weight(checked.data), proposal, checked.data.model_copy(update={"path": before.path})
    obstacles: tuple[str, ...] = ()
    if for_sglang:
        progress(f"{where}: SGLang's names")
        obstacles = _name_for_sglang(best[1], best[2])
    before, after = _also(before, on_disk), _also(best[2], left)
    return Outcome(
        source=source, runtime=runtime, before=before, after=after, proposal=best[1], not_for_sglang=obstacles
    )


def _name_for_sglang(proposal: Proposal, judged: CheckData) -> tuple[str, ...]:
    """Make the changes for SGLang; why there are none, if something stands against them.

    Raises:
        RecipeError: vLLM's verdict would be another.
    """
    with proposal.headers() as folder:
        found = entries_for_sglang(examine(folder))
    for edit in found.edits:
        proposal.make(edit)
    if found.edits:
        with proposal.headers() as folder:
            after = examine(folder).data
        if after.findings != judged.findings:
            got = next((each.says for each in after.findings if each not in judged.findings), "fewer findings")
            rule = "entries for SGLang must leave vLLM's verdict as it is"
            raise RecipeError("--runtime sglang", rule, got=got, cure="Leave out --runtime")
    return found.obstacles


def write(outcome: Outcome, out: Path) -> Rewritten:
    """Write what is proposed: a new folder; see `rewritten.rewrite`.

    Raises:
        RecipeError: nothing would change, or OUT cannot be written.
    """
    if not outcome.proposal.edits:
        rule = "fix writes a folder only if something changes"
        raise RecipeError(outcome.source.where, rule, got="nothing that it can cure", cure="Serve it as it is")
    return rewrite(outcome.proposal.rewrite("fix"), out)


def cure_elsewhere(finding: Finding, outcome: Outcome, name: str = "") -> str:
    """The command for what needs new values, here or in the folder `name`; "" where the finding's own cure says all."""
    runtime = outcome.runtime
    if runtime is None:
        return ""
    # What is wrong with the backbone as well is wrong in config.json, and a new block would be wrong there too.
    of_rule = [each for each in outcome.left if (each.rule, each.severity) == (finding.rule, "error")]
    is_of_block = finding in of_rule and all(runtime.is_mtp_name(each.where) for each in of_rule)
    if finding.rule in _OF_BLOCKS or (finding.rule in _OF_TENSORS and is_of_block):
        words = shlex.quote(name or outcome.source.where), runtime.base_model or "RELEASE"
        return "keepmtp graft {} --from {} --out NEW".format(*words)
    return ""


def _round(checked: Checked, proposal: Proposal) -> int:
    """Make the changes of each fix whose rule has a finding; how many there were."""
    rules = {finding.rule for finding in checked.data.findings}
    made, tried = 0, set()
    for rule, cure in FIXES:
        if rule in rules and cure not in tried:
            tried.add(cure)
            made += sum([proposal.make(change) for change in cure(checked, proposal)])
    return made


def _also(data: CheckData, findings: tuple[Finding, ...]) -> CheckData:
    return data.model_copy(update={"findings": errors_first((*data.findings, *findings))})


def _weight(data: CheckData) -> tuple[int, int]:
    """Errors and warnings, each with its tensors: fewer are better."""
    sums = {"error": 0, "warning": 0}
    for finding in data.findings:
        sums[finding.severity] += finding.count
    return sums["error"], sums["warning"]
