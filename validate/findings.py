"""What a check says: findings, and the report that holds them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, however many tensors it has.

    Attributes:
        rule: the rule's name.
        severity: error: vLLM 0.32 does not load it, or loads something else than the checkpoint holds.
        where: the first tensor or config entry concerned.
        says: what will happen at serve time.
        cure: what to do.
        count: tensors or entries with this cause.
        cause: findings of one rule with the same cause are one; where empty, those with the same words.
    """

    rule: str
    severity: Severity
    where: str
    says: str
    cure: str
    count: int = 1
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the checkpoint is, for people and for the card."""

    family: str = ""
    dialect: str = ""
    num_tensors: int = 0
    num_bytes: int = 0
    num_mtp_tensors: int = 0
    num_mtp_layers: int = 0
    mtp_forms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The verdict on one checkpoint: findings with errors first."""

    path: str
    findings: tuple[Finding, ...]
    facts: Facts

    @property
    def ok(self) -> bool:
        """No errors; warnings do not count."""
        return all(finding.severity != "error" for finding in self.findings)

    def as_dict(self) -> dict[str, object]:
        """The form that `keepmtp check --json` prints on one line."""
        findings = [
            {"severity": f.severity, "where": f.where, "says": f.says, "cure": f.cure, "rule": f.rule, "count": f.count}
            for f in self.findings
        ]
        return {"path": self.path, "ok": self.ok, "findings": findings, "facts": asdict(self.facts)}


def grouped(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings with one cause become the first of them with a count; errors come first, else the order stays."""
    merged: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.rule, finding.severity, finding.cause or f"{finding.says} {finding.cure}")
        seen = merged.get(key)
        merged[key] = finding if seen is None else replace(seen, count=seen.count + finding.count)
    return tuple(sorted(merged.values(), key=lambda finding: finding.severity != "error"))
