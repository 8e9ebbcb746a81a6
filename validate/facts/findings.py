"""What the check finds: facts of the checkpoint, and findings with one cause each.

In: what the rules and the dry load object to, one `Objection` a tensor or entry. Out: a `Finding` a
cause.

Easy to get wrong: a cause is not a sentence. One lost shard of each expert is one finding, although
each has a name of its own in it; two layers without an alias are two, although their sentences are
equal.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ...checkpoints.fact import Count, Fact
from ...recipes.errors import shortened
from ...recipes.families import families
from ...recipes.runtimes import Runtime

Severity = Literal["error", "warning"]
Origin = Literal["static", "dry", "values"]
CuredBy = Literal["edit", "block", "quantize", "server", "none"]
"""What cures a fault: an edit of configs, index or headers, which keepmtp fix makes; the release's
MTP block; quantizing again; another server, or other words for it; nothing that keepmtp has.
"""
# By the rule, where what it finds is cured alike; of the others, each finding says it.
_CURED_BY: Mapping[CuredBy, str] = {
    "edit": "draft-head extras kv-cache mtp-not-promised mtp-prefix names two-configs unindexed",
    "block": "mtp-incomplete mtp-missing norm",
    "quantize": "empty-weight experts finite fused-scales fused-uniform glue head-form "
    "layer-incomplete layer-missing release rows scale-magnitude scale-sign shapes source "
    "unknown-tensor zero-points",
    "server": "alias no-kernel ranks vllm-defect",
}
_OF_RULES = {rule: kind for kind, rules in _CURED_BY.items() for rule in rules.split()}
_MOST = 2000  # characters of a sentence; a name of a stranger may be longer


class Finding(Fact):
    """One cause, however many tensors it has.

    Attributes:
        origin: what found it: the static check, a dry load, or the value check.
        severity: error: vLLM does not load it, or loads something else than the checkpoint
            holds.
        where: the first tensor or config entry concerned.
        says: what will happen at serve time.
        cure: what to do.
        cured_by: the kind of what to do.
        rule: the rule's name.
        count: tensors or entries with this cause.
        runtime: the server that it is about.
    """

    origin: Origin = "static"
    severity: Severity = "error"
    where: str
    says: str
    cure: str
    cured_by: CuredBy = "none"
    rule: str
    count: Count = 1
    runtime: Runtime = "vllm"

    @property
    def key(self) -> tuple[str, str]:
        """What it is known by before and after a cure."""
        return self.rule, self.where


def errors_of(findings: Iterable[Finding]) -> list[Finding]:
    """Those that fail a checkpoint; warnings do not."""
    return [finding for finding in findings if finding.severity == "error"]


def commands(findings: Iterable[Finding], path: str) -> list[str]:
    """The command that cures all of a checkpoint that keepmtp can cure; RELEASE and NEW are filled
    in.

    None where decoder layers are lost: the number of layers is in the names of many an MTP block,
    and lists would be written for a wrong one.
    """
    kinds = set[CuredBy]()
    for finding in findings:
        if finding.rule.endswith("layer-missing"):
            return []
        kinds.add(finding.cured_by)
    if kinds.isdisjoint(("edit", "block")):
        return []
    words = f"keepmtp fix {shlex.quote(path)}"
    if "block" in kinds:
        words += " --from RELEASE"
    return [f"{words} --out NEW"]


class CheckpointFacts(Fact):
    """What the checkpoint is, for people and for the card.

    `num_unjudged` counts matrices of vision towers for which only a dry load can say what vLLM
    builds.
    """

    dropped = frozenset({"mtp_forms"})

    family: str = ""
    dialect: str = ""
    num_tensors: Count = 0
    num_bytes: Count = 0
    num_mtp_tensors: Count = 0
    num_mtp_layers: Count = 0
    num_unjudged: Count = 0

    @property
    def mtp_layers_follow_k(self) -> bool:
        """Whether vLLM builds an MTP layer for each drafted token, and leaves alone those
        beyond; not where the family has no table.
        """
        family = families().get(self.family)
        return family is not None and family.loader.builds_as_drafted


class Objection(NamedTuple):
    """One tensor or entry that is wrong, and the cause; "": those with the same words have one
    cause.

    Attributes:
        finding: about the first of them.
        cause: what they have in common.
        times: how many they are, where a rule has counted and not gone through them.
    """

    finding: Finding
    cause: str
    times: int


Objections = Iterator[Objection]
"""What a rule yields."""


def objection(
    rule: str,
    where: str,
    says: str,
    cure: str,
    cause: str = "",
    severity: Severity = "error",
    times: int = 1,
    **kind: Any,
) -> Objection:
    """What a rule yields. Names come from files, so they are made printable here, once for all who
    show them.

    Args:
        rule, where, says, cure, severity: of the finding.
        cause, times: of the objection.
        kind: origin, runtime and cured_by, where they are not as for most rules, or not as for
            what else this rule finds.
    """
    kind.setdefault("cured_by", _OF_RULES.get(rule, "none"))
    finding = Finding(
        rule=rule,
        where=shortened(where, _MOST),
        says=shortened(says, _MOST),
        cure=shortened(cure, _MOST),
        severity=severity,
        **kind,
    )
    return Objection(finding, cause, times)


def by_cause(objections: Iterable[Objection]) -> dict[tuple[str, str, str], Finding]:
    """The first finding of each cause, with the number of tensors or entries that have it."""
    first = dict[tuple[str, str, str], Finding]()
    counts = Counter[tuple[str, str, str]]()
    for finding, cause, times in objections:
        key = (finding.rule, finding.severity, cause or f"{finding.says} {finding.cure}")
        first.setdefault(key, finding)
        counts[key] += times
    counted = dict[tuple[str, str, str], Finding]()
    for key, finding in first.items():
        counted[key] = finding.model_copy(update={"count": counts[key]})
    return counted


def grouped(objections: Iterable[Objection]) -> list[Finding]:
    """`by_cause`, without what tells one cause from another."""
    return [*by_cause(objections).values()]


def errors_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors before warnings; else the order stays."""
    findings = list(findings)
    others = [finding for finding in findings if finding.severity != "error"]
    return (*errors_of(findings), *others)
