"""What the check finds: facts of the checkpoint, and findings with one cause each.

In: what the rules and the dry load object to, one `Objection` a tensor or entry. Out: a `Finding` a
cause.

Easy to get wrong: a cause is not a sentence. One lost shard of each expert is one finding, although
each has a name of its own in it; two layers without an alias are two, although their sentences are
equal.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

from ...checkpoints.fact import Count, Fact
from ...recipes.errors import shortened
from ...recipes.families import families
from ...recipes.family import Loader

Severity = Literal["error", "warning"]
Origin = Literal["static", "dry", "values"]
Runtime = Literal["vllm", "sglang"]
"""Whose reading of a checkpoint a finding is about."""
_MOST = 2000  # characters of a sentence; a name of a stranger may be longer


class Finding(Fact):
    """One cause, however many tensors it has.

    Attributes:
        origin: what found it: the static check, a dry load, or the value check.
        severity: error: vLLM 0.32 does not load it, or loads something else than the checkpoint
            holds.
        where: the first tensor or config entry concerned.
        says: what will happen at serve time.
        cure: what to do.
        rule: the rule's name.
        count: tensors or entries with this cause.
        runtime: the server that it is about.
    """

    origin: Origin = "static"
    severity: Severity = "error"
    where: str
    says: str
    cure: str
    rule: str
    count: Count = 1
    runtime: Runtime = "vllm"

    @property
    def key(self) -> tuple[str, str]:
        """What it is known by before and after a cure."""
        return self.rule, self.where


class CheckpointFacts(Fact):
    """What the checkpoint is, for people and for the card."""

    family: str = ""
    dialect: str = ""
    num_tensors: Count = 0
    num_bytes: Count = 0
    num_mtp_tensors: Count = 0
    num_mtp_layers: Count = 0
    mtp_forms: tuple[str, ...] = ()

    @property
    def mtp_layers_follow_k(self) -> bool:
        """Whether vLLM builds an MTP layer for each drafted token, and leaves alone those
        beyond.
        """
        return self._loader.builds_as_drafted

    def idle_mtp_layers(self, num_drafts: int) -> int:
        """MTP layers of the checkpoint that vLLM does not build to draft so many tokens a step."""
        most = self._loader.most_layers(num_drafts)
        return max(0, self.num_mtp_layers - most) if most else 0

    @property
    def _loader(self) -> Loader:
        """What vLLM's draft class does; nothing special where the family has no table."""
        family = families().get(self.family)
        return family.loader if family else Loader()


class Objection(NamedTuple):
    """One tensor or entry that is wrong; those of one cause become one `Finding`.

    Attributes:
        rule, where, says, cure, severity, origin, runtime: of the finding, if this is the first of
            its cause.
        cause: what tells it from others of its rule; "": those with the same words have one cause.
        times: how many it stands for, where a rule has counted and not gone through them.
    """

    rule: str
    where: str
    says: str
    cure: str
    cause: str = ""
    severity: Severity = "error"
    times: int = 1
    origin: Origin = "static"
    runtime: Runtime = "vllm"


def by_cause(objections: Iterable[Objection]) -> dict[tuple[str, str, str], Finding]:
    """The first finding of each cause, with the number of tensors or entries that have it.

    Names come from files, so they are made printable here, once for all who show them.
    """
    first: dict[tuple[str, str, str], Objection] = {}
    counts = Counter[tuple[str, str, str]]()
    for each in objections:
        key = (each.rule, each.severity, each.cause or f"{each.says} {each.cure}")
        first.setdefault(key, each)
        counts[key] += each.times
    found = {}
    for key, each in first.items():
        found[key] = Finding(
            origin=each.origin,
            severity=each.severity,
            where=shortened(each.where, _MOST),
            says=shortened(each.says, _MOST),
            cure=shortened(each.cure, _MOST),
            rule=each.rule,
            count=counts[key],
            runtime=each.runtime,
        )
    return found


def grouped(objections: Iterable[Objection]) -> list[Finding]:
    """`by_cause`, without what tells one cause from another."""
    return [*by_cause(objections).values()]


def errors_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors before warnings; else the order stays."""
    return tuple(sorted(findings, key=lambda finding: finding.severity != "error"))
