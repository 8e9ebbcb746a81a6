"""`keepmtp eval --only acceptance` with real vLLM servers on the CPU: what it finds, and that it leaves
nothing behind.

A server takes 20 to 60 s to start, so each one here answers as many questions as it can.
"""

import json
import time
from pathlib import Path
from uuid import uuid4

import pytest
from commands import KEEPMTP, ROOT, captured
from data_files import json_of, put_json, put_lines
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.check.check import examine
from keepmtp.validate.facts.results import report_folder
from keepmtp.validate.facts.served import ServeCheck, Served
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.serve_check import AcceptanceStation, Check
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.report import read_json, verify
from processes import MARK, none_left
from readme import ACCEPTED
from real_vllm import NEEDS_VLLM, QWEN, UNIPROC, VLLM_PYTHON, measure
from releases import made_of
from wheel import stranger
from written_values import broken

# PyTorch's CPU build multiplies in FP8 by oneDNN's reference code, 0.2 s a token: few tokens, one
# thread.
ASKED = (
    "Question: Bob shares 72 shells among 9 friends. How many shells does each friend get?\nAnswer:",
    "Question: Ida has 36 eggs. Ida gives away 18 eggs. How many eggs are left?\nAnswer:",
)
MAX_TOKENS = 40

pytestmark = [*NEEDS_VLLM, pytest.mark.full, pytest.mark.usefixtures("in_f32")]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory) -> Path:
    return made_of("tiny-qwen3_5", tmp_path_factory.mktemp("made") / "fp8", source=str(QWEN))


def alone(folder: Path, out: Path, prompts: tuple[str, ...] = ASKED) -> Served:
    setup = Setup(vllm=find_vllm(), out=out, timeout=400, extra=UNIPROC)
    model = Model(role="checkpoint", source=open_source(folder), identity=identify(folder))
    check = Check(ks=(1,), prompts=prompts, max_tokens=MAX_TOKENS)
    return measure(
        AcceptanceStation(setup=setup, source=None, checkpoint=model, check=check)
    ).checkpoint


def test_a_good_checkpoint_and_its_twin_with_a_broken_ignore_list(fp8, installed, tmp_path):
    """The same bytes twice: the good one passes by the command line, its twin answers right and
    fails by acceptance.

    vLLM loads the twin without a word; the static check names the tensors.

    The command is that of keepmtp's wheel with the extra `evaluate` and nothing else.
    """
    prompts = tmp_path / "prompts.jsonl"
    put_lines(prompts, [{"prompt": prompt} for prompt in ASKED])
    out = tmp_path / "out"
    keepmtp = str(installed("evaluate") / "keepmtp")
    mark = uuid4().hex
    words = f"{keepmtp} eval {fp8} --only acceptance -k 1 --prompts {prompts} --max-tokens {MAX_TOKENS} --json --out {out} --timeout 400 -- --max-num-batched-tokens 2048".split()
    words += UNIPROC
    environment = stranger(OMP_NUM_THREADS="1", VLLM_PYTHON=str(VLLM_PYTHON), **{MARK: mark})
    done = captured(words, cwd=ROOT, env=environment, status=3)
    none_left(mark)
    found = json.loads(done.stdout)
    verdicts = {reason["gate"]: reason["verdict"] for reason in found["judgement"]["reasons"]}
    # Two prompts are too few to tell how much is kept; what they could tell, they told.
    assert verdicts == {
        "findings": "pass",
        "loads": "pass",
        "acceptance": "infeasible",
        "gsm8k": "infeasible",
    }
    assert "it would be a pass with about" in found["judgement"]["reasons"][2]["says"]
    assert read_json(out / "report.json").judgement is not None
    found |= found["serve"]
    source = found["source"]
    assert Path(source["path"]).resolve() == QWEN, "found by keepmtp.json's record"
    for one in (source, found["checkpoint"]):
        assert one["as_served"] == "native" and [run["k"] for run in one["runs"]] == [0, 1]
        plain, drafted = one["runs"]
        assert plain["drafts"] == 0 and drafted["drafts"] > 20 and drafted["acceptance"] > 0.85
        assert drafted["accepted_per_position"] == [drafted["accepted_tokens"]]
        assert [output["text"].rpartition("####")[2].strip() for output in drafted["outputs"]] == [
            "8",
            "18",
        ]
        # Every generated token but each first one is a target's or an accepted draft's.
        assert plain["tokens_per_second"] > 0 and drafted["speed_up"] > 0
        logs = [Path(run["log"]).read_text() for run in one["runs"]]
        assert ["'method': 'mtp'" in log for log in logs] == [False, True]
        assert all("max_num_batched_tokens': 2048" in log for log in logs)
    assert (out / "report.json").is_file()
    assert '"role": "source"' in done.stderr and '"role": "checkpoint"' in done.stderr

    folder = broken(fp8, tmp_path / "twin")
    assert any(
        finding.where.startswith("mtp.layers.0.") for finding in examine(folder).data.findings
    )
    twin = alone(folder, tmp_path, ASKED[:1])
    (run,) = twin.runs
    assert run.loaded and "8" in run.outputs[0].text.rpartition("####")[2], (
        "right answers all the same"
    )
    assert run.draft_tokens > 20 and run.accepted_tokens == 0
    shown = {
        name: accepted / drafted for name, (accepted, drafted) in ACCEPTED.items()
    }  # in the README's picture
    served = {"right": found["checkpoint"]["runs"][1]["acceptance"], "wrong": run.acceptance}
    assert shown == pytest.approx(served, abs=0.05)
    # A field that holds nothing is in no file.
    right = {name: found.get(name) for name in ServeCheck.model_fields}
    both = ServeCheck.model_validate(right).model_copy(update={"checkpoint": twin})
    judged = judge(gates=Gates(), check=None, serve=both, evaluation=None)
    reasons = {reason.gate: reason for reason in judged.reasons}
    assert reasons["acceptance"].verdict == "regression"
    assert "0.00 %" in reasons["acceptance"].says


def test_nvfp4_linears_run_on_vllms_emulation(tmp_path):
    choices = {"source": str(QWEN), "mtp": "NVFP4"}
    made = made_of("tiny-qwen3_5.nvfp4", tmp_path / "made", **choices)
    found = alone(made, tmp_path / "out")
    (run,) = found.runs
    assert found.as_served == "native" and run.loaded, run.error
    assert "Using EmulationNvFp4LinearKernel for NVFP4 GEMM" in Path(run.log).read_text()
    assert run.draft_tokens > 20 and run.accepted_tokens > 0


def test_a_server_that_dies_while_loading_is_quoted(tmp_path):
    """One MLP is narrower than config.json says: vLLM's own words within the start, not a timeout,
    and kept.
    """
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
    loads = next(reason for reason in found["judgement"]["reasons"] if reason["gate"] == "loads")
    assert (
        run["error"].rstrip(".") in loads["says"]
        and run["error"].split(":")[0] in Path(run["log"]).read_text()
    )
    full = verify(report_folder(bad))
    assert full.serve is not None and full.serve.checkpoint.runs[0].error == run["error"]
    assert (
        not full.verdict.ok
        and full.judgement is not None
        and full.judgement.verdict == "regression"
    )
    assert full.results.keys() == {"check.json", "serve.json"} and full.identity == identify(bad)
