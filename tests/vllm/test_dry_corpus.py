"""Right both ways: every broken checkpoint is caught and its culprit named, every good one passes
without a word.

The whole of dry_corpus.py goes through the static check and through vLLM's own classes on a
pretended GPU.
"""

from functools import cache
from pathlib import Path

import pytest
from dry_corpus import DryCase, broken_cases, good_cases, judged
from keepmtp.validate.dryload.explain import explain, parse_log
from keepmtp.validate.facts.dry_load import LoadFailure
from keepmtp.validate.facts.findings import Finding
from keepmtp.validate.facts.vllm_env import find_vllm

GPU = "sm100"
PARTS = 24  # of every family and every kind of breakage something stands in each
DRY_RULES = {"dry-load", "no-kernel"}
# Its sparse attention calls FlashAttention 3, which is for Hopper alone (vLLM 0.32.0
# models/dots3_note/nvidia).
HOPPER_ALONE = "dots3-note-prev"
# Cases whose exception `keepmtp explain` recognizes in a server's log: the failure, and words of
# the tensor or entry that the answer must name.
EXPLAINED = {
    "F1 dropped, count kept": ["MTP weights dropped", "model.layers.3."],
    "F14 experts of the draft not ignored": [
        "experts built in another form",
        "mtp.layers.0.mlp.experts",
    ],
    "F32 KV scales in the draft": [
        "scales of the KV cache in the MTP layer",
        "layers.3.self_attn.k_proj.k_scale",
    ],
    "F38 placeholder head quantized": [
        "weight of another width",
        "model.layers.3.shared_head.head",
    ],
    "H7 eh_proj packed": ["scale without a parameter in the draft", "model.layers.3.eh_proj"],
    "INT4 cache": ["number format of the KV cache", "kv_cache_scheme"],
}


@cache
def all_cases() -> list[DryCase]:
    return [*good_cases(), *broken_cases()]


@pytest.mark.vllm
@pytest.mark.few(1)
@pytest.mark.parametrize("part", range(PARTS))
def test_right_both_ways(part: int, dry_loader, tmp_path: Path):
    # it imports vLLM while checkpoints are written
    loader = dry_loader(GPU)
    wrong = list[str]()
    cases = all_cases()
    assert EXPLAINED.keys() <= {case.name for case in cases}
    found_of = judged(cases[part::PARTS], loader, find_vllm().version, tmp_path)
    for case, checked, account in found_of:
        found = checked.data.findings
        fault = _fault(case, found)
        if fault:
            wrong.append(f"{case.name}: {fault}: {[str(finding) for finding in found[:2]]}")
        if case.name in EXPLAINED:
            (answer,) = explain(checked, parse_log(_serve_log(account.load.failure))).answers
            name, words = EXPLAINED[case.name]
            assert answer.failure.name == name
            assert words in " ".join((answer.names, answer.on_disk, *answer.confirmed))
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


def _serve_log(failure: LoadFailure) -> bytes:
    """vLLM's own words, as a worker writes them to the log of a server."""
    file, _, line = failure.at.rpartition(":")
    said = [f'  File "/opt/venv/lib/python3.12/site-packages/{file}", line {line}, in load_weights']
    said += f"{failure.type}: {failure.words}".splitlines()
    before = "(Worker_TP0 pid=4242) ERROR 02-27 16:21:24 [multiproc_executor.py:796] "
    return "".join(f"{before}{words}\n" for words in said).encode()
