"""Right both ways: every broken checkpoint is caught and its culprit named, every good one passes without a word.

The whole of dry_corpus.py goes through the static check and through vLLM's own classes on a pretended GPU; each
part's score is printed as a table.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from checkpoint_files import write
from dry_corpus import DryCase, broken_cases, good_cases
from keepmtp.recipes.errors import VLLMError
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.dryload.loader import Job
from keepmtp.validate.facts.findings import Finding
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm

GPU = "sm100"
PARTS = 6  # of every family and every kind of breakage something stands in each
DRY_RULES = ("dry-load", "no-kernel")
DEFECT = "vllm-defect"
# Its sparse attention calls FlashAttention 3, which is for Hopper alone (vLLM 0.32.0 models/dots3_note/nvidia).
HOPPER_ALONE = "dots3-note-prev"


@dataclass
class Score:
    """Cases by who caught them, and what went wrong."""

    caught: dict[str, list[str]] = field(default_factory=lambda: {"both": [], "static": [], "dry": [], "neither": []})
    clean: list[str] = field(default_factory=list)
    defects: list[str] = field(default_factory=list)
    other_gpu: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def good(self) -> tuple[list[str], ...]:
        return self.clean, self.defects, self.other_gpu

    def table(self) -> str:
        counts = {who: len(names) for who, names in self.caught.items()}
        either = sum(counts.values()) - counts["neither"]
        rows = [
            ("broken checkpoints", sum(counts.values())),
            ("  caught by the static check", counts["static"] + counts["both"]),
            ("  caught by the dry load", counts["dry"] + counts["both"]),
            ("  caught by either", either),
            ("  by the dry load alone", counts["dry"]),
            ("  by the static check alone", counts["static"]),
            ("good checkpoints", sum(map(len, self.good)) + sum("false alarm" in w for w in self.wrong)),
            ("  without a finding", len(self.clean)),
            ("  refused for a known defect of vLLM's", len(self.defects)),
            ("  refused on this GPU alone", len(self.other_gpu)),
        ]
        return "\n".join(f"  {name:<42}{count:>5}" for name, count in rows)


@pytest.fixture(scope="module")
def vllm() -> VLLM:
    try:
        return find_vllm()
    except VLLMError as error:
        pytest.skip(str(error))


@pytest.mark.vllm
@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_right_both_ways(part: int, dry_loader, vllm: VLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    score = Score()
    loader = dry_loader(GPU)  # it imports vLLM while the checkpoints are written
    cases = [*good_cases(), *broken_cases()][part::PARTS]
    folders = [write(tmp_path / f"{number:03} {_slug(case.name)}", case.build()) for number, case in enumerate(cases)]
    examined = [examine(str(folder)) for folder in folders]
    jobs = [
        Job(folder=folder, tp=case.tp, num_drafts=case.num_drafts) for folder, case in zip(folders, cases, strict=True)
    ]
    accounts = loader.load_all(jobs)
    for case, checked, account in zip(cases, examined, accounts, strict=True):
        found = with_loads(checked, [account], vllm.version).data.findings
        (_score_broken if case.by else _score_good)(score, case, found)
    with capsys.disabled():
        print(f"\n\npart {part + 1} of {PARTS}, checked on {GPU}, vLLM {vllm.version}\n{score.table()}")
    assert not score.wrong, "\n".join(["", *score.wrong])


def _score_good(score: Score, case: DryCase, findings: tuple[Finding, ...]) -> None:
    alarms = [finding for finding in findings if finding.rule != DEFECT]
    if HOPPER_ALONE in case.name and alarms and all(_is_of_this_gpu(finding) for finding in alarms):
        score.other_gpu.append(case.name)
    elif alarms:
        score.wrong.append(f"false alarm: {case.name}: {_told(alarms)}")
    else:
        (score.defects if findings else score.clean).append(case.name)


def _is_of_this_gpu(finding: Finding) -> bool:
    return finding.rule == "no-kernel" and "compute capability" in finding.says


def _score_broken(score: Score, case: DryCase, findings: tuple[Finding, ...]) -> None:
    dry = [finding for finding in findings if finding.rule in DRY_RULES]
    static = [finding for finding in findings if finding.rule not in (*DRY_RULES, DEFECT)]
    who = ("both" if static else "dry") if dry else "static" if static else "neither"
    score.caught[who].append(case.name)
    if (case.by in ("static", "both") and not static) or (case.by in ("dry", "both") and not dry):
        score.wrong.append(f"caught by {who}, not by {case.by}: {case.name}: {_told(findings)}")
    elif not any(word in finding.where or word in finding.says for word in case.where for finding in findings):
        score.wrong.append(f"none of {case.where} named: {case.name}: {_told(findings)}")


def _told(findings: tuple[Finding, ...] | list[Finding]) -> str:
    return "; ".join(f"[{finding.rule}] {finding.where} {finding.says[:200]}" for finding in findings[:2]) or "nothing"


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)
