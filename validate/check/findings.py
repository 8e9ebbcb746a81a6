"""What a check says: findings, and the report that holds them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..dryload.loader import Side, Verdict

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
    """The verdict on one checkpoint: findings with errors first, and the dry loads that were made."""

    path: str
    findings: tuple[Finding, ...]
    facts: Facts
    dry: tuple[Verdict, ...] = ()

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
        told: dict[str, object] = {"path": self.path, "ok": self.ok, "findings": findings, "facts": asdict(self.facts)}
        return told | ({"dry": [_dry_load(verdict) for verdict in self.dry]} if self.dry else {})


def _dry_load(verdict: Verdict) -> dict[str, Any]:
    failure = verdict.failure
    return {
        "gpu": verdict.gpu,
        "tp": verdict.tp,
        "num_drafts": verdict.num_drafts,
        "loads": failure is None,
        "failure": asdict(failure) if failure else None,
        "runner": verdict.runner,
        "quant_config": verdict.quant_config,
        "target": _side(verdict.target),
        "draft": _side(verdict.draft),
        "seconds": round(sum(verdict.seconds.values()), 2),
        "peak_mib": verdict.peak_mib,
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "class": side.cls,
        "parameters": side.num_params,
        "written": side.num_written,
        "shared": list(side.shared),
        "padded": [fault.param for fault in side.padded],
        "kernels": [asdict(kernel) for kernel in side.kernels],
    }


def grouped(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings with one cause become the first of them with a count; errors come first, else the order stays."""
    merged: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.rule, finding.severity, finding.cause or f"{finding.says} {finding.cure}")
        seen = merged.get(key)
        merged[key] = finding if seen is None else replace(seen, count=seen.count + finding.count)
    return tuple(sorted(merged.values(), key=lambda finding: finding.severity != "error"))
