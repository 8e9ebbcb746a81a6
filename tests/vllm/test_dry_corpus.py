"""Right both ways: every broken checkpoint is caught and its culprit named, every good one passes
without a word.

The whole of dry_corpus.py goes through the static check and through vLLM's own classes on a
pretended GPU; each part's score is printed as a table.
"""

import re
from collections import Counter
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
# Its sparse attention calls FlashAttention 3, which is for Hopper alone (vLLM 0.32.0
# models/dots3_note/nvidia).
HOPPER_ALONE = "dots3-note-prev"


@pytest.fixture(scope="module")
def vllm() -> VLLM:
    try:
        return find_vllm()
    except VLLMError as error:
        pytest.skip(str(error))


@pytest.mark.vllm
@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_right_both_ways(
    part: int, dry_loader, vllm: VLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    score, wrong = Counter[str](), list[str]()
    loader = dry_loader(GPU)  # it imports vLLM while the checkpoints are written
    cases = [*good_cases(), *broken_cases()][part::PARTS]
    folders = [
        write(tmp_path / f"{number:03} {_slug(case.name)}", case.build())
        for number, case in enumerate(cases)
    ]
    examined = [examine(str(folder)) for folder in folders]
    jobs = [
        Job(folder=folder, tp=case.tp, num_drafts=case.num_drafts)
        for folder, case in zip(folders, cases, strict=True)
    ]
    accounts = loader.load_all(jobs)
    for case, checked, account in zip(cases, examined, accounts, strict=True):
        found = with_loads(checked, [account], vllm.version).data.findings
        outcome, fault = (_broken if case.by else _good)(case, found)
        score[outcome] += 1
        wrong += [f"{case.name}: {fault}: {_told(found)}"] if fault else []
    with capsys.disabled():
        print(f"\n\npart {part + 1} of {PARTS}, checked on {GPU}, vLLM {vllm.version}")
        print("\n".join(f"  {outcome:<42}{count:>5}" for outcome, count in sorted(score.items())))
    assert not wrong, "\n".join(["", *wrong])


def _good(case: DryCase, findings: tuple[Finding, ...]) -> tuple[str, str]:
    alarms = [finding for finding in findings if finding.rule != DEFECT]
    if HOPPER_ALONE in case.name and alarms and all(_is_of_this_gpu(finding) for finding in alarms):
        return "good, refused on this GPU alone", ""
    if alarms:
        return "good", "false alarm"
    return "good, a known defect of vLLM's" if findings else "good, without a finding", ""


def _is_of_this_gpu(finding: Finding) -> bool:
    return finding.rule == "no-kernel" and "compute capability" in finding.says


def _broken(case: DryCase, findings: tuple[Finding, ...]) -> tuple[str, str]:
    rules = {finding.rule for finding in findings} - {DEFECT}
    who = {"static": bool(rules.difference(DRY_RULES)), "dry": bool(rules.intersection(DRY_RULES))}
    outcome = (
        "broken, caught by "
        f"{' and '.join(name for name, caught in who.items() if caught) or 'neither'}"
    )
    if not all(who[name] for name in who if case.by in (name, "both")):
        return outcome, f"not caught by {case.by}"
    is_named = any(
        word in finding.where or word in finding.says for word in case.where for finding in findings
    )
    return outcome, "" if is_named else f"none of {case.where} named"


def _told(findings: tuple[Finding, ...]) -> str:
    return (
        "; ".join(
            f"[{finding.rule}] {finding.where} {finding.says[:200]}" for finding in findings[:2]
        )
        or "nothing"
    )


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)
