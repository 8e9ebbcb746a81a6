"""Acceptance without a server against vLLM's own counters, position by position, on the shipped
models.

The shipped blocks draft almost without a miss, so blocks with noise in their projection are
compared too: there the agreement says something. All are asked the same problems, and the held-out
text is what vLLM wrote.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from asked import asked_values
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.calibrate.mtp.mtp_pass import mtp_pass
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.schema import Recipe
from passes import END, ROOT, finished, laid_out, plan_over, prompts
from real_vllm import NEEDS_VLLM, VLLM_PYTHON
from safetensors.torch import load_file, save_file

PLUGIN = ROOT / "validate" / "measure" / "plugin"  # without it vLLM has no NVFP4 on CPUs
ASKED = prompts(60)
TOLERANCE = 0.03
# What is served, tokens drafted a step, and which row of the MTP pass that is.
CASES = {"glm": (3, 0), "glm-noise": (3, 0), "qwen-noise": (1, 0), "qwen-noise-nvfp4-kv": (1, 2)}

pytestmark = NEEDS_VLLM


def noisy(source: Path, out: Path, deviations: float) -> Path:
    """A copy whose block's projection has noise on top, in standard deviations of its weights."""
    shutil.copytree(source, out)
    draw = torch.Generator().manual_seed(0)
    for path in out.glob("*.safetensors"):
        tensors = load_file(path)
        for name, value in tensors.items():
            if name.endswith(("eh_proj.weight", "mtp.fc.weight")):
                noise = torch.randn(value.shape, generator=draw) * value.float().std() * deviations
                tensors[name] = (value.float() + noise).to(value.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> dict[str, tuple[Plan, dict]]:
    """By case: the plan whose pass is to be compared, and what vLLM wrote and counted. One process
    serves all.
    """
    made = tmp_path_factory.mktemp("made")
    glm, qwen = ROOT / "models" / "tiny-glm4-moe", ROOT / "models" / "tiny-qwen3_5"
    folders = {
        "glm": glm,
        "glm-noise": noisy(glm, made / "glm", 2.5),
        "qwen-noise": noisy(qwen, made / "qwen", 1.5),
    }
    plans = {
        name: plan_over(folder, f"tiny-{'glm4-moe' if 'glm' in name else 'qwen3_5'}.nvfp4")
        for name, folder in folders.items()
    }
    plan, text = plan_for("tiny-qwen3_5.nvfp4", source=str(folders["qwen-noise"]), mtp="NVFP4")
    # vLLM's CPU build serves an FP8 cache, too; it reads the checkpoint's entry.
    plan = make_plan(
        Recipe.model_validate(plan.recipe.model_dump() | {"kv_cache": "FP8"}), plan.source
    )
    folders["qwen-noise-nvfp4-kv"] = quantize(plan, text, out=made / "qwen-nvfp4").out
    plans["qwen-noise-nvfp4-kv"] = plan
    entry = made / "plugin" / "keepmtp_cpu-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: keepmtp-cpu\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkeepmtp_cpu = keepmtp_cpu:register\n"
    )
    asked = [name for name in CASES if name in asked_values(request, "case")]
    jobs = [
        json.dumps({"folder": str(folders[name]), "prompts": ASKED, "num_drafts": CASES[name][0]})
        for name in asked
    ]
    path = os.pathsep.join(map(str, (entry.parent, PLUGIN, PLUGIN / "stubs")))
    words = [str(VLLM_PYTHON), str(Path(__file__).with_name("serve.py")), *jobs]
    done = subprocess.run(
        words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    lines = [
        json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    assert len(lines) == len(asked), done.stdout[-3000:] + done.stderr[-6000:]
    return {name: (plans[name], line) for name, line in zip(asked, lines, strict=True)}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_it_is_what_vllm_counts(case, served, tmp_path):
    (k, row), (plan, counted) = CASES[case], served[case]
    answers = [answer if answer[-1] == END else [*answer, END] for answer in counted["token_ids"]]
    assert plan.source.folder is not None
    held_out, written = laid_out(plan.source.folder, ASKED, answers)
    backbone = finished(plan, tmp_path / "pass", held_out=held_out, written=written, samples=32)
    found = mtp_pass(plan, backbone)[1].rows[row].acceptance
    assert found is not None and counted["drafts"] > 200
    rates = [accepted / counted["drafts"] for accepted in counted["accepted_per_position"]]
    assert found.by_position[str(k)] == pytest.approx(rates, abs=TOLERANCE), rates
    if "noise" in case:
        assert 0.3 < rates[-1] < 0.97, "neither all nor nothing"
