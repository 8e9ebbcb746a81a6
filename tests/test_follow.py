"""benchmarks/follow.py tells what another vLLM changes: here from made-up versions, and from 0.31 over 0.32
to 0.33 from wheels.
"""

import re
import sys
from itertools import pairwise

import follow
import pytest
from data_files import cases, table
from keepmtp.recipes.errors import VLLMError
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.vllm_env import find_vllm
from releases import MODELS


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
    assert page.endswith("\n\n1. no x\n")


def test_a_cure_whose_source_is_another_is_told(tmp_path):
    """And one whose defect a version does not have."""
    file = tmp_path / "vllm/model_executor/models/step3p5_mtp.py"
    file.parent.mkdir(parents=True)
    file.write_text("class Step3p5MTP:\n    def load_weights(self): ...\n")
    told = dict(follow.cures_that_end(tmp_path, "0.33.0"))
    assert told["step.draft_scales"].startswith("vllm.model_executor.models.step3p5_mtp has ")
    assert told["step.layer_types"] == "the defect is not in 0.33.0: <0.33"
    assert told["heads.k_exaone"].startswith("gone: ExaoneMoeForCausalLM.__init__ of ")


@pytest.mark.full
@pytest.mark.vllm
def test_from_0_31_over_0_32_to_0_33(monkeypatch, capsys, tmp_path):
    """Two families whose defects ended, one in each step."""
    try:
        found = had_vllms(["0.31.0,0.32.0,0.33.0"], find_vllm())[0]
    except VLLMError as error:
        pytest.skip(f"the package index gives no wheel: {error}")
    monkeypatch.setattr(follow, "KEPT", tmp_path)
    monkeypatch.setattr(follow, "PAGE", tmp_path / "versions.md")
    follow.PAGE.touch()
    for model in {*MODELS} - {"longcat-flash-chat", "step-3.5-flash"}:
        monkeypatch.delitem(MODELS, model)
    told = list[str]()
    for old, new in pairwise(vllm.version for vllm in found):
        monkeypatch.setattr(sys, "argv", ["follow", new, "--since", old])
        follow.main()
        told.append(capsys.readouterr().out)
    for name in ("nemotron_h_mtp.py", "inkling/nvidia/mtp.py", "models/step3p7.py"):
        assert f"{name}\n    recipes/families/" in told[1]
    defect = "released\n    loads with cures: a defect of vLLM, not of the checkpoint: {}"
    assert f"longcat-flash-chat, {defect.format('its target skips')}" in told[0]
    assert "longcat" not in told[1].partition("families that")[2]
    assert f"step-3.5-flash, {defect.format('it cuts layer_types')}" in told[1]
    assert "any_model\n    False -> True" in told[1] and "step5" in told[1]
    assert "| family | 0.31.0 | 0.32.0 | 0.33.0 |" in (tmp_path / "versions.md").read_text()
