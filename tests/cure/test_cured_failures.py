"""Each failure of docs/failures.md that a checkpoint can have: who cures it, and that the check is green afterwards.

In: the checkpoints that tests/helpers/broken.py breaks, each by the change of its thread. Out: for those that `fix`
cures, a new folder that is green while the old one stays; for all others, what they need.

`print_share` prints how many are cured: `python tests/cure/test_cured_failures.py` from the checkout.
"""

import re
from pathlib import Path

import pytest
from broken import BROKEN, Case
from checkpoint_files import write
from keepmtp import api
from keepmtp.checkpoints.unchanged import states_of
from keepmtp.cure import fix
from keepmtp.validate.check.check import examine
from keepmtp.validate.check.findings import Finding

# What the others need, by the start of the case's name.
GRAFT = (
    "F1 dropped",
    "F3 dropped",
    "F5 only the glue",
    "F10 vision-language, stripped",
    "R1 neither",
    "F2 ",
    "M1 eh_proj lost",
    "F8 o_proj of the draft",
    "E7 ",
    "E2 one expert of the draft",
    "F42 ",
    "H7 ",
    "F12 mtp.fc packed",
    "E9 ",
    "R7 scale without weight",
    "R7 a scale the draft's loader",
    "R7 orphan scale",
    "R2 eight bits",
    "R15 width",
)
QUANTIZE_ANEW = (
    "E8 ",
    "M1 norm of a decoder",
    "E2 experts of one rank",
    "M1 scale of",
    "R3 one expert",
    "F8 global scale",
    "Fp7 ",
    "G5 ",
    "R4 ",
    "Fp1 global scale with two",
    "M2 ",
    "R15 part blocks",
    "R7 GPTQ with an order",
)
# vLLM has no such form in modelopt's dialect, and convert wants a checkpoint that vLLM reads as it is.
NOT_IN_MODELOPT = (
    "R7 FP8 blocks of experts",
    "R7 FP8 a channel",
    "R7 an algorithm of experts",
    "R7 mixed FP8 a channel",
)
THE_RELEASE = (
    "E6 ",
    "M8 ",
    "R6 shard cut short",
    "R8 a family",
    "R8 a dialect",
    "R2 GPTQ in 8 bits",
    "R7 algorithm vLLM does not load",
    "R2 no quantization config",
    "F7 ",
)
OTHERS = (*GRAFT, *QUANTIZE_ANEW, *NOT_IN_MODELOPT, *THE_RELEASE)
CURED = [case for case in BROKEN if not case.name.startswith(OTHERS)]


@pytest.mark.parametrize("case", CURED, ids=lambda case: case.name)
def test_fix_cures(case: Case, tmp_path):
    def is_it(finding: Finding) -> bool:
        return (finding.rule, finding.severity) == (case.rule, case.severity)

    old = write(tmp_path / "old", case.build())
    states = states_of(old, [path.name for path in old.iterdir()])
    found = fix.proposed(str(old))
    assert any(map(is_it, found.before.findings)), "the check finds it before"
    assert found.after.ok and not any(map(is_it, found.after.findings))
    assert all(change.why for change in found.proposal.edits) and found.proposal.diffs()
    fix.write(found, tmp_path / "new")
    after = examine(tmp_path / "new").data
    assert after.ok and not any(map(is_it, after.findings)), after.findings
    assert after.facts.num_mtp_tensors == found.after.facts.num_mtp_tensors > 0
    now = states_of(old, [path.name for path in old.iterdir()])
    assert [name for name in states if now[name].mtime_ns != states[name].mtime_ns] == [], "the old folder stays"


@pytest.mark.parametrize("start", GRAFT)
def test_what_needs_the_block_names_graft(start, tmp_path):
    case = next(case for case in BROKEN if case.name.startswith(start))
    found = fix.proposed(str(write(tmp_path / "old", case.build())))
    left = [each for each in found.left if each.severity == "error"]
    assert any("keepmtp graft" in fix.cure_elsewhere(each, found) for each in left), left


@pytest.mark.vllm
def test_vllm_loads_what_fix_has_cured(tmp_path):
    """One for each kind of change: a list, names of tensors, another tool's list, layer_types."""
    cases = [next(case for case in CURED if case.name.startswith(start)) for start in ("F11 ", "F37 ", "F20 ", "E5 ")]
    for number, case in enumerate(cases):
        fix.write(fix.proposed(str(write(tmp_path / f"{number}", case.build()))), tmp_path / f"{number}-new")
    loaded = api.check_all([tmp_path / f"{number}-new" for number in range(len(cases))], gpus=["sm100"])
    for case, checked in zip(cases, loaded, strict=True):
        assert checked.data.ok and checked.data.dry[0].failure is None, (case.name, checked.data.findings)


def test_a_group_of_two_sides_is_a_finding_and_no_defect(tmp_path):
    """AutoRound's FP8 has [128, 128] as its group."""
    case = next(case for case in BROKEN if case.name.startswith("F38 AutoRound"))
    checkpoint = case.build()
    checkpoint.quantization["group_size"] = [128, 128]
    assert fix.proposed(str(write(tmp_path / "old", checkpoint))).before.findings


def test_every_case_has_one_cure():
    for case in BROKEN:
        assert sum(case.name.startswith(start) for start in OTHERS) <= 1, case.name
    assert all(any(case.name.startswith(start) for case in BROKEN) for start in OTHERS)


def numbers_of(cases: list[Case]) -> list[str]:
    """The numbers of docs/failures.md that the cases have."""
    found = {match[0] for case in cases if (match := re.match(r"(?:F|E|Fp|G|H|M|R)\d+(?= )", case.name))}
    return sorted(found, key=lambda number: (re.sub(r"\d", "", number), int(re.sub(r"\D", "", number))))


def test_the_page_lists_what_fix_cures():
    page = (Path(__file__).parent.parent.parent / "docs" / "failures.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| `keepmtp fix` |"))
    assert row.split("|")[2].partition(":")[0].strip() == ", ".join(numbers_of(CURED))


def print_share() -> None:
    """How many cases, and which numbers of docs/failures.md, have which cure."""
    kinds = {"graft": GRAFT, "quantize anew": (*QUANTIZE_ANEW, *NOT_IN_MODELOPT), "the release": THE_RELEASE}
    rows = {"fix": CURED} | {name: [c for c in BROKEN if c.name.startswith(starts)] for name, starts in kinds.items()}
    for name, cases in rows.items():
        print(f"{name}: {len(cases)} of {len(BROKEN)} cases; numbers: {', '.join(numbers_of(cases))}")
    curable = {number for cases in (CURED, rows["graft"]) for number in numbers_of(cases)}
    threads = sorted(number for number in curable if re.match(r"F\d", number))
    print(f"of the 47 public threads F1 to F47: {len(threads)} have a cure without quantizing anew")


if __name__ == "__main__":
    print_share()
