"""benchmarks/follow.py tells what another vLLM changes: here from made-up versions, and from 0.31 over 0.32
to 0.33 from wheels.
"""

import re

import follow
import pytest
from data_files import cases, table


@pytest.mark.parametrize("is_gone", [False, True])
@cases
def test_a_cited_file_that_changes_is_told_with_its_place(file, place, is_gone, tmp_path):
    """Alone: nothing is told of the others."""
    sites = tmp_path / "old", tmp_path / "new"
    for site in sites:
        for name in table("test_follow")["FILES"]:
            path = site / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("as it was")
    changed = sites[1] / "vllm" / file
    says = file
    if is_gone:
        says = f"{file} is gone"
        changed.unlink()
    else:
        changed.write_text("otherwise")
    ((told, places),) = follow.changed_files(*sites)
    assert told == says
    assert re.search(rf"(^|, ){place}:\d+", places), places


def test_answers_that_differ_are_told(monkeypatch):
    answers = {
        "old": {"model_types": ["a", "b"], "any_model": False, "methods": ["fp8"]},
        "new": {"model_types": ["b", "c"], "any_model": True, "methods": ["fp8"]},
    }
    monkeypatch.setattr(follow, "ask", answers.get)
    assert dict(follow.asked_otherwise("old", "new")) == {
        "model_types": "new: c; gone: a",
        "any_model": "False -> True",
    }


def test_the_page_counts_and_gives_every_reason_once():
    good = {f"glm-4.7, {variant}": "loads" for variant in follow.VARIANTS}
    first, second, *_ = good
    bad = good | {first: "no x", second: "loads with cures: no x"}
    page = follow.versions_page({"9.1.0": bad, "9.2.0": good})
    assert (
        "| family | 9.1.0 | 9.2.0 |" in page
        and "| glm4_moe | 3 of 5, 4 with cures [1] | 5 of 5 |" in page
    )
    assert page.count("no x") == 1
    assert page.endswith("\n\n1. no x")


def test_a_cure_whose_source_is_another_is_told(tmp_path):
    """And one whose defect a version does not have."""
    file = tmp_path / "vllm/model_executor/models/step3p5_mtp.py"
    file.parent.mkdir(parents=True)
    file.write_text("class Step3p5MTP:\n    def load_weights(self): ...\n")
    told = dict(follow.cures_that_end(tmp_path, "0.33.0"))
    assert told["step.draft_scales"].startswith("vllm.model_executor.models.step3p5_mtp has ")
    assert told["step.layer_types"] == "the defect is not in 0.33.0: <0.33"
    assert told["heads.k_exaone"].startswith("gone: ExaoneMoeForCausalLM.__init__ of ")
