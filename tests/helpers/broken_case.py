"""A checkpoint that is broken on purpose, and what the check must say of it: a row of a rule's test.

In: a good checkpoint and changes. Out: `Case`s, and `finds`, a test of some. broken.py
collects those that people met.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from checked import check
from checkpoint_files import Change, Checkpoint, changed, write
from good_checkpoints import GOOD
from keepmtp.validate.facts.findings import Finding

Good = str | Callable[[], Checkpoint]
Wanted = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One broken checkpoint.

    Attributes:
        base: the good one's name, or what makes it.
        found: for each finding the rule, the severity, and parts of other fields.
        is_met: people had it; the name starts with its number in docs/tables/failures.md.
        among: there may be further findings.
    """

    name: str
    base: Good
    changes: tuple[Change, ...]
    found: tuple[Wanted, ...]
    is_met: bool = False
    among: bool = False

    @property
    def rule(self) -> str:
        return self.found[0]["rule"]

    @property
    def severity(self) -> str:
        return self.found[0]["severity"]

    @property
    def where(self) -> str:
        return self.found[0]["where"]

    def build(self) -> Checkpoint:
        make = self.base
        if isinstance(make, str):
            make = GOOD[make]
        return changed(make, *self.changes)


def met(name: str, base: Good, *changes: Change, **wanted: Any) -> Case:
    """What people met: one finding, and perhaps others that follow from it."""
    return Case(name, base, changes, (wanted,), is_met=True, among=True)


def case(
    name: str,
    base: Good,
    *changes: Change,
    found: Iterable[Wanted] | None = None,
    among: bool = False,
    **wanted: Any,
) -> Case:
    """One finding, or all of `found`; and no others, unless it is said to be `among` others."""
    if found is None:
        found = [wanted]
    return Case(name, base, changes, tuple(found), among=among)


def rows(rule: str, *cases: Case) -> pytest.MarkDecorator:
    """The rows of a test; a finding is an error of `rule` where it does not say otherwise."""
    filled = list[Case]()
    for row in cases:
        found = [{"rule": rule, "severity": "error"} | wanted for wanted in row.found]
        filled.append(replace(row, found=tuple(found)))
    return pytest.mark.parametrize("case", filled, ids=[row.name for row in filled])


def finds(
    rule: str, *cases: Case, about: Iterable[str] = (), **asked: Any
) -> Callable[[Case, Path], None]:
    """A test of these rows: the check finds what the row says, and nothing of its rule in the good
    checkpoint.

    Args:
        about: the rules that are looked at, if not all.
        asked: `source` and `runtimes` of the check.
    """

    @rows(rule, *cases)
    def test(case: Case, tmp_path: Path) -> None:
        findings = check(write(tmp_path / "checkpoint", case.build()), **asked).findings
        assert_all(case, [each for each in findings if each.rule in (about or [each.rule])])
        if isinstance(case.base, str):
            rules = {wanted["rule"] for wanted in case.found}
            assert rules.isdisjoint(_rules_of(case.base))

    return test


def assert_all(case: Case, findings: Iterable[Finding]) -> None:
    """The findings are those of the row."""
    findings = list(findings)
    for wanted in case.found:
        assert any(_fits(finding, wanted) for finding in findings), (wanted, findings)
    assert case.among or len(findings) == len(case.found), findings
    assert all(finding.says and finding.cure and finding.where for finding in findings)


def _fits(finding: Finding, wanted: Wanted) -> bool:
    for key, value in wanted.items():
        given = getattr(finding, key)
        is_part = key in ("where", "says", "cure") and value in given
        if given != value and not is_part:
            return False
    return True


@cache
def _rules_of(good: str) -> set[str]:
    """The rules of the findings on a good checkpoint."""
    with TemporaryDirectory() as place:
        findings = check(write(Path(place) / "good", GOOD[good]())).findings
    return {finding.rule for finding in findings}
