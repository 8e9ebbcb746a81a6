"""Each failure of docs/failures.md that a checkpoint can have: who cures it, and that the check is
green afterwards.

In: the checkpoints that tests/helpers/broken.py breaks, each by the change of its thread. Out: for
those that `fix` or `graft` cures, a new folder that is green while the old one stays; for all
others, what they need.

"""

import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from broken import BROKEN, GOOD, Case
from checkpoint_files import write
from curable import CURED, GRAFTED, NOT_CURED, OTHERS, THE_RELEASE, release_of
from keepmtp import api
from keepmtp.checkpoints.source import open_source
from keepmtp.cure import fix
from keepmtp.cure.graft import carry_out, plan_graft
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.check.check import examine
from keepmtp.validate.check.values import check_values
from keepmtp.validate.facts.findings import Finding
from live_tensors import tensors_of
from outputs import digests
from written_values import fill, opened, poke

# By the base of a case: the word that gives the block its old form, where it is not what graft
# chooses.
WORDS = {"glm w4a16": "W4A16", "v3 nvfp4": "bf16", "dsv4 bf16": "bf16"}


ROOT = Path(__file__).parents[2]


def has(findings: Sequence[Finding], case: Case) -> bool:
    """Whether the failure of the case is among them."""
    return any((each.rule, each.severity) == (case.rule, case.severity) for each in findings)


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> Path:
    """Where releases are, each written once."""
    return tmp_path_factory.mktemp("releases")


@pytest.fixture(scope="module")
def grafted(releases, tmp_path_factory) -> Callable[[Case], tuple[Path, Path]]:
    """The broken checkpoint with values, and the one that graft makes of it; each case once."""

    @cache
    def made(case: Case) -> tuple[Path, Path]:
        place = tmp_path_factory.mktemp("graft")
        old = write(place / "old", case.build())
        fill(old)
        release = open_source(release_of(old, releases))
        planned = plan_graft(open_source(old), release, mtp=WORDS.get(str(case.base)))
        return old, carry_out(planned, place / "new").folder

    return made


@pytest.fixture(scope="module")
def fixed(tmp_path_factory) -> Callable[[Case], tuple[fix.Outcome, Path]]:
    """What fix made of a broken checkpoint, each case once; the old folder stays."""

    @cache
    def made(case: Case) -> tuple[fix.Outcome, Path]:
        place = tmp_path_factory.mktemp("fix")
        old = write(place / "old", case.build())
        before = digests(old)
        found = fix.proposed(str(old))
        fix.write(found, place / "new")
        assert digests(old) == before
        return found, place / "new"

    return made


@pytest.mark.few(24)
@pytest.mark.parametrize("case", CURED, ids=lambda case: case.name)
def test_fix_cures(case: Case, fixed):
    found, folder = fixed(case)
    assert has(found.before.data.findings, case), "the check finds it before"
    assert found.after.data.ok and not has(found.after.data.findings, case)
    assert all(change.why for change in found.proposal.edits) and found.proposal.diffs()
    after = examine(folder).data
    assert after.ok and not has(after.findings, case), after.findings
    assert after.facts.num_mtp_tensors == found.after.data.facts.num_mtp_tensors > 0


@pytest.mark.few(8)
@pytest.mark.parametrize("case", GRAFTED, ids=lambda case: case.name)
def test_graft_cures(case: Case, grafted, releases):
    """`fix` names graft, and graft gives back what there was before: every name, dtype and
    shape.
    """
    old, new = grafted(case)
    found = fix.proposed(str(old))
    assert has(found.before.data.findings, case), "the check finds it before"
    left = [each for each in found.after.data.findings if each.severity == "error"]
    assert any("keepmtp graft" in fix.cure_elsewhere(each, found) for each in left), left
    assert examine(new).data.findings == ()
    assert [
        each for each in check_values(opened(new), "all").findings if each.severity == "error"
    ] == []
    good = {
        name: (dtype, tuple(shape))
        for name, (dtype, shape) in GOOD[str(case.base)]().tensors.items()
    }
    view, before, now = opened(new).view, tensors_of(old), tensors_of(new)
    assert {name: tensor[:2] for name, tensor in now.items()} == good
    assert all(now[name] == before[name] for name in now if not view.is_mtp(name)), (
        "the backbone stays"
    )
    wanted = tensors_of(release_of(old, releases))
    same = [
        name
        for name in now
        if view.is_mtp(name) and name in wanted and wanted[name][:2] == good[name]
    ]
    assert len(same) > 4 and all(now[name] == wanted[name] for name in same), (
        "what is stored as released is the same"
    )


# What headers do not show: the block's values are spoilt, each as in its thread.
DRAFT = "model.layers.3"
SPOILT = {
    "an MTP layer of zeros": ("empty-weight", f"{DRAFT}.self_attn.o_proj.weight_packed", 0),
    "glue of zeros": ("empty-weight", f"{DRAFT}.eh_proj.weight", 0.0),
    "a norm of zeros": ("norm", f"{DRAFT}.enorm.weight", 0.0),
    "vllm 53537, NaN in the glue": ("finite", f"{DRAFT}.eh_proj.weight", math.nan),
    "an infinite global scale": (
        "finite",
        f"{DRAFT}.mlp.experts.2.up_proj.weight_global_scale",
        math.inf,
    ),
    "a global scale of zero": (
        "scale-sign",
        f"{DRAFT}.mlp.experts.1.down_proj.weight_global_scale",
        0.0,
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_graft_cures_values_of_the_block(name: str, releases, tmp_path):
    rule, tensor, value = SPOILT[name]
    old = write(tmp_path / "old", GOOD["glm nvfp4"]())
    fill(old)
    poke(old, tensor, value)
    found = [each for each in check_values(opened(old), "all").findings if each.severity == "error"]
    assert (rule, tensor) in [(each.rule, each.where) for each in found]
    assert {each.cure for each in found} == {
        f"Run `keepmtp graft {old} --from RELEASE --replace --out NEW`"
    }
    made = plan_graft(
        open_source(old), open_source(release_of(old, releases)), mtp="NVFP4A16", is_replaced=True
    )
    new = carry_out(made, tmp_path / "new").folder
    assert check_values(opened(new), "all").findings == () == examine(new).data.findings
    assert [each[:2] for _, each in sorted(tensors_of(new).items())] == [
        each[:2] for _, each in sorted(tensors_of(old).items())
    ]


@pytest.mark.parametrize("case", NOT_CURED, ids=lambda case: case.name)
def test_what_has_no_cure_here_is_not_said_to_have_one(case: Case, tmp_path):
    """The failure is left, and no command is named for it."""
    old = write(tmp_path / "old", case.build())
    if case.rule == "files":
        with pytest.raises(CheckpointError, match="; got "):
            fix.proposed(str(old))
        return
    found = fix.proposed(str(old))
    left = [
        each for each in found.after.data.findings if has([each], case) and case.where in each.where
    ]
    assert left and {fix.cure_elsewhere(each, found) for each in left} == {""}


@pytest.mark.full
@pytest.mark.vllm
def test_vllm_loads_what_was_cured(fixed, grafted):
    """One vLLM for all: everything that was grafted, and of the fixes the first of each number."""
    first = {case.name.partition(" ")[0]: case for case in reversed(CURED)}.values()
    folders = [fixed(case)[1] for case in first] + [grafted(case)[1] for case in GRAFTED]
    loaded = api.check_all(folders, gpus=["sm100"])
    for case, checked in zip([*first, *GRAFTED], loaded, strict=True):
        assert checked.data.ok and checked.data.dry[0].failure is None, (
            case.name,
            checked.data.findings,
        )


def test_a_group_of_two_sides_is_a_finding_and_no_defect(tmp_path):
    """AutoRound's FP8 has [128, 128] as its group."""
    case = next(case for case in BROKEN if case.name.startswith("F38 AutoRound"))
    checkpoint = case.build()
    checkpoint.quantization["group_size"] = [128, 128]
    assert fix.proposed(str(write(tmp_path / "old", checkpoint))).before.data.findings


def test_every_case_has_one_cure():
    for case in BROKEN:
        assert sum(case.name.startswith(start) for start in OTHERS) <= 1, case.name
    assert all(any(case.name.startswith(start) for case in BROKEN) for start in OTHERS)


def numbers_of(cases: list[Case]) -> list[str]:
    """The numbers of docs/failures.md that the cases have, in order."""
    found = {re.match(r"(F|E|Fp|G|H|M|R)(\d+)(?= )", case.name) for case in cases} - {None}
    return [f"{letter}{number}" for letter, number in sorted({(m[1], int(m[2])) for m in found})]


# The rows of the page's table, and their cases.
ROWS = {
    "`keepmtp fix`": CURED,
    "`keepmtp graft`": GRAFTED,
    "quantize anew": [case for case in NOT_CURED if not case.name.startswith(THE_RELEASE)],
    "the release's own files": [case for case in NOT_CURED if case.name.startswith(THE_RELEASE)],
}


@pytest.mark.parametrize("cure", ROWS)
def test_the_page_lists_what_has_which_cure(cure):
    page = (ROOT / "docs" / "failures.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {cure} |"))
    numbers, count = row.split("|")[2:4]
    assert numbers.partition(":")[0].strip() == ", ".join(numbers_of(ROWS[cure]))
    assert count.strip() == f"{len(ROWS[cure])} of {len(BROKEN)}"


def test_the_readme_says_how_many():
    words = " ".join((ROOT / "README.md").read_text().split())
    told = f"Of {len(BROKEN)} broken as in public threads `fix` cures {len(CURED)} and `graft` {len(GRAFTED)}"
    assert told in words
