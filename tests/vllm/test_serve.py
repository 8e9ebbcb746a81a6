"""Acceptance on real vLLM servers on the CPU: NVFP4, and a server that dies while it loads.
test_gsm8k.py has a good checkpoint beside its source, test_tiny_models.py every other scheme.
"""

import json
import time
from pathlib import Path

import pytest
from commands import KEEPMTP, captured
from data_files import json_of, put_json
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.cures import in_words
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.serve_check import AcceptanceStation
from killed import small_recipe
from real_vllm import NEEDS_VLLM, QWEN, UNIPROC, measure
from releases import made_of

ASKED = (
    "Question: Bob shares 72 shells among 9 friends. How many shells does each friend get?\nAnswer:",
    "Question: Ida has 36 eggs. Ida gives away 18 eggs. How many eggs are left?\nAnswer:",
)

pytestmark = [*NEEDS_VLLM, pytest.mark.full, pytest.mark.usefixtures("in_f32")]


def test_nvfp4_linears_run_on_vllms_emulation(tmp_path):
    choices = {"source": str(QWEN), "mtp": "NVFP4"}
    recipe = small_recipe(tmp_path, "tiny-qwen3_5.nvfp4")
    made = made_of(str(recipe), tmp_path / "made", **choices)
    setup = Setup(vllm=find_vllm(), out=tmp_path / "out", timeout=400, extra=UNIPROC)
    model = Model(role="checkpoint", source=open_source(made), identity=identify(made))
    asked = {"ks": (1,), "prompts": ASKED, "max_tokens": 40}
    found = measure(
        AcceptanceStation(setup=setup, source=None, checkpoint=model, **asked)
    ).checkpoint
    (run,) = found.runs
    assert found.as_served == "native" and run.loaded, run.error
    assert "Using EmulationNvFp4LinearKernel for NVFP4 GEMM" in Path(run.log).read_text()
    assert run.draft_tokens > 20 and run.accepted_tokens > 0


def test_a_server_that_dies_while_loading_is_quoted(tmp_path):
    """One MLP is narrower than config.json says: vLLM's own words within the start, not a timeout."""
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in QWEN.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    config = json_of(bad / "config.json")
    put_json(bad / "config.json", {**config, "intermediate_size": 512})
    words = f"{KEEPMTP} eval {bad} --only acceptance --source none --json".split()
    start = time.monotonic()
    done = captured(words, status=1)
    assert time.monotonic() - start < 300, "the default timeout is 30 minutes"
    found = json.loads(done.stdout)
    (run,) = found["serve"]["checkpoint"]["runs"]
    assert not run["loaded"] and "Error" in run["error"] and "Engine core" not in run["error"], run[
        "error"
    ]
    assert in_words(Path(run["log"])) == ""
    assert run["error"].split(":")[0] in Path(run["log"]).read_text()
    loads = next(reason for reason in found["judgement"]["reasons"] if reason["gate"] == "loads")
    assert run["error"].rstrip(".") in loads["says"]
    assert found["judgement"]["verdict"] == "regression"
