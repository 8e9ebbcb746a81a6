"""Acceptance without a server against vLLM's own counters, position by position, on the shipped
models.

The shipped blocks draft almost without a miss, so blocks with noise in their projection are
compared too: there the agreement says something. All are asked the same problems, and the held-out
text is what vLLM wrote.
"""

from pathlib import Path

import pytest
import written_values
from commands import GLM
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.schema import Recipe
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.server import server_environment
from passes import END, as_calibrated, finished, laid_out, plan_over, prompts
from real_vllm import HAS_AVX512, NEEDS_VLLM, NO_AVX512, PLUGIN, QWEN, in_vllm

ASKED = prompts(60)
TOLERANCE = 0.03
# What is served, tokens drafted a step, and which row of the MTP pass that is.
CASES = {
    "glm": [3, 0],
    "glm-noise": [3, 0],
    "glm-noise-head": [3, 1],
    "qwen-noise": [1, 0],
    "qwen-noise-nvfp4-kv": [1, 2],
}
SERVED = [case for case in CASES if HAS_AVX512 or not case.endswith(("kv", "head"))]

pytestmark = [*NEEDS_VLLM, pytest.mark.full, pytest.mark.usefixtures("in_f32")]


def noisy(source: Path, out: Path, deviations: float) -> Path:
    """A copy whose block's projection has noise on top, in standard deviations of its weights."""
    names = r"(eh_proj|mtp\.fc)\.weight$"
    return written_values.noisy(source, out, names, lambda value: deviations * value.std())


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> dict[str, tuple[Plan, dict]]:
    """By case: the plan whose pass is to be compared, and what vLLM wrote and counted. One process
    serves all.
    """
    made = tmp_path_factory.mktemp("made")
    folders = {
        "glm": GLM,
        "glm-noise": noisy(GLM, made / "glm", 2.5),
        "qwen-noise": noisy(QWEN, made / "qwen", 1.5),
    }
    plans = {
        "glm": plan_over(folders["glm"], "tiny-glm4-moe.nvfp4"),
        "glm-noise": plan_over(folders["glm-noise"], "tiny-glm4-moe.nvfp4"),
        "qwen-noise": plan_over(folders["qwen-noise"], "tiny-qwen3_5.nvfp4"),
    }
    plan, text = plan_for("tiny-qwen3_5.nvfp4", source=str(folders["qwen-noise"]), mtp="NVFP4")
    # vLLM's CPU build serves an FP8 cache, too; it reads the checkpoint's entry.
    plan = make_plan(
        Recipe.model_validate(plan.recipe.model_dump() | {"kv_cache": "FP8"}), plan.source
    )
    folders["qwen-noise-nvfp4-kv"] = quantize(plan, text, out=made / "qwen-nvfp4").out
    plans["qwen-noise-nvfp4-kv"] = plan
    # Target and draft compute with the packed head, and nothing else is quantized.
    recipe = plans["glm"].recipe
    words = dict.fromkeys(recipe.backbone, "bf16") | {"head": "W4A16"}
    recipe = recipe.model_copy(update={"backbone": words, "calibration": None})
    plan = make_plan(recipe, plans["glm-noise"].source)
    folders["glm-noise-head"] = quantize(plan, "", out=made / "glm-head").out
    plans["glm-noise-head"] = as_calibrated(plan)
    (made / "plugin").mkdir()
    server_environment(find_vllm(), made / "plugin")  # without it vLLM has no NVFP4 on CPUs
    jobs = []
    for name in SERVED:
        num_drafts, _ = CASES[name]
        jobs.append({"folder": str(folders[name]), "prompts": ASKED, "num_drafts": num_drafts})
    counted = in_vllm("serve.py", jobs, made / "plugin", PLUGIN)
    return {name: (plans[name], each) for name, each in zip(SERVED, counted, strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_vllm_counts(case, served, tmp_path):
    if case not in SERVED:
        pytest.skip(NO_AVX512)
    k, row = CASES[case]
    plan, counted = served[case]
    answers = counted["token_ids"]
    for answer in answers:
        if answer[-1] != END:
            answer.append(END)
    assert plan.source.folder is not None
    held_out, written = laid_out(plan.source.folder, ASKED, answers)
    backbone = finished(plan, tmp_path / "pass", held_out=held_out, written=written, samples=32)
    found = mtp_pass(plan, backbone)[1].rows[row].acceptance
    assert found is not None and counted["drafts"] > 200
    rates = [accepted / counted["drafts"] for accepted in counted["accepted_per_position"]]
    assert found.by_position[str(k)] == pytest.approx(rates, abs=TOLERANCE), rates
    if "noise" in case:
        assert 0.3 < rates[-1] < 0.97, "neither all nor nothing"
