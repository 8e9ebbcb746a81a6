"""Right both ways: every broken checkpoint is caught and its culprit named, every good one passes
without a word.

Every broken checkpoint of dry_corpus.py, every good one of good_checkpoints.py and every second of
what keepmtp makes of each family goes through the static check and through vLLM's own classes on a
pretended GPU.
"""

from functools import cache
from pathlib import Path

import pytest
from dry_corpus import DryCase, broken_cases, good_cases, judged
from good_checkpoints import GOOD
from keepmtp.validate.facts.findings import Finding
from keepmtp.validate.facts.vllm_env import find_vllm

GPU = "sm100"
PARTS = 18  # of every family and every kind of breakage something stands in each
DRY_RULES = {"dry-load", "no-kernel"}
# Its sparse attention calls FlashAttention 3, which is for Hopper alone (vLLM 0.32.0
# models/dots3_note/nvidia).
HOPPER_ALONE = "dots3-note-prev"


@cache
def all_cases() -> list[DryCase]:
    good = [*good_cases()]
    made = [case for case in good if case.name not in GOOD]
    # A family has seven of them, so each form is there of every second family.
    return [*(case for case in good if case.name in GOOD), *made[::2], *broken_cases()]


@pytest.mark.vllm
@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_right_both_ways(part: int, dry_loader, tmp_path: Path):
    # it imports vLLM while checkpoints are written
    loader = dry_loader(GPU)
    wrong = list[str]()
    cases = all_cases()
    found_of = judged(cases[part::PARTS], loader, find_vllm().version, tmp_path)
    for case, checked, _ in found_of:
        found = checked.data.findings
        fault = _fault(case, found)
        if fault:
            wrong.append(f"{case.name}: {fault}: {[str(finding) for finding in found[:2]]}")
    assert not wrong, "\n".join(["", *wrong])


def _fault(case: DryCase, findings: tuple[Finding, ...]) -> str:
    """What is wrong with these findings, or nothing."""
    says = " ".join(f"{finding.where} {finding.says}" for finding in findings)
    rules = {finding.rule for finding in findings} - {"vllm-defect"}
    dry = rules & DRY_RULES
    static = rules - DRY_RULES
    if not case.by:
        is_of_gpu = HOPPER_ALONE in case.name and "compute capability" in says
        if static or (dry and not is_of_gpu):
            return "false alarm"
        return ""
    if (case.by != "dry" and not static) or (case.by != "static" and not dry):
        return f"not caught by {case.by}"
    if any(word in says for word in case.where):
        return ""
    return f"none of {case.where} named"
