"""`keepmtp serve` with a stub for vLLM: what is refused before, what is said while it runs and when
it ends.

tests/vllm/test_serve_verb.py has the real server. What the stub counts: ten drafts of one token for
each answer.
"""

import json
import os
import re
import shutil
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import benches
import httpx
import pytest
from checkpoint_files import write
from commands import GLM, free_port, ran, refused, started
from good_checkpoints import GOOD
from json_files import json_of
from keepmtp.checkpoints.files import write_whole
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.serving import attention_words
from keepmtp.quantize.needs.cards import GPU
from keepmtp.recipes.errors import VLLMError
from keepmtp.validate.facts.results import report_folder, write_result
from keepmtp.validate.facts.served import Drafts
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.foreground import (
    ENOUGH_DRAFTS,
    Address,
    doubt,
    in_words,
    refuse_taken,
)
from keepmtp.validate.measure.serve_line import docker_words
from keepmtp.validate.report.best_k import best_k
from keepmtp.validate.report.report import refresh
from printed import printed
from shipped import made_of
from stub_vllm import stub_vllm
from survivors import MARK, none_left, says, until
from wheel import stranger
from written_values import poke


class Served:
    """keepmtp serve with a stub, asked so many times."""

    def __init__(self, folder: Path, words: str = "", **stub: float) -> None:
        python, port, self.mark = stub_vllm(folder, start=0.3, **stub), free_port(), uuid4().hex
        ours = {"VLLM_PYTHON": str(python), "VLLM_API_KEY": "mine", MARK: self.mark}
        self.url = f"http://127.0.0.1:{port}"
        env = stranger(TMPDIR=str(folder), **ours)
        command = f"serve {GLM} --port {port} --every 1 {words}"
        self.process = started(command, env=env, cwd=folder)

    def ask(self, times: int) -> "Served":
        """Once it is healthy."""
        deadline = time.monotonic() + 120
        body = {"model": str(GLM), "prompt": "x"}
        while times:
            assert self.process.poll() is None, self.process.communicate()
            try:
                httpx.post(f"{self.url}/v1/completions", json=body).raise_for_status()
                times -= 1
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        return self

    def end(self, number: signal.Signals | None, *, after: float = 0.0) -> tuple[str, str]:
        time.sleep(after)
        if number is not None:
            self.process.send_signal(number)
        said = self.process.communicate(timeout=60)
        none_left(self.mark, seconds=10)
        assert "Traceback" not in said[1]
        return said


def test_it_serves_until_ctrl_c(tmp_path):
    served = Served(tmp_path, "-k 1", accepted=8).ask(3)
    time.sleep(2.5)  # two lines of acceptance are due; the second would be the same
    out, err = served.ask(1).end(signal.SIGINT)
    says = "with k=1; 40 drafts, 80.0 % of their tokens accepted, 1.80 tokens a step"
    assert re.fullmatch(rf"{GLM}: \d+ s {says}\n", out)
    lines = err.splitlines()
    assert lines[0] == "k=1: as you say" or lines[0].startswith("k=1: one for each MTP layer")
    assert lines[1].startswith(f'vllm serve {GLM} --speculative-config \'{{"method":"mtp"')
    assert "(EngineCore pid=1) starting" in lines, "the server's own log"
    assert err.count("30 drafts") == 1 and f"serves {served.url} after" in err
    assert served.process.returncode == 0, "how vLLM ends once it is stopped is no failure"


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_it(tmp_path, number):
    # keepmtp looks five times a second whether the server is healthy.
    out, err = Served(tmp_path, "--json --log log").ask(2).end(number, after=3.0)
    assert "starting" in (tmp_path / "log").read_text() and "starting" not in err
    if number != signal.SIGKILL:
        counted = {"drafts": 20, "accepted_tokens": 20, "k": 1, "status": 143, "doubt": ""}
        counted |= {"is_stopped": True, "is_healthy": True}
        found = json.loads(out)
        assert {key: found[key] for key in counted} == counted


@pytest.mark.full
def test_before_it_is_healthy(tmp_path):
    served = Served(tmp_path)
    until(lambda: says(served.mark, "time.sleep(600)"))  # the stub's own workers
    out, _ = served.end(signal.SIGTERM)
    assert "nothing was drafted" in out
    assert served.process.returncode == 143, "the stub ends by SIGTERM, and nobody was served"


@pytest.mark.full
def test_a_draft_of_garbage_is_said(tmp_path):
    """Nothing accepted: said once while it runs, and at the end with what to do."""
    served = Served(tmp_path, accepted=0).ask(ENOUGH_DRAFTS // 10)
    out, err = served.end(signal.SIGTERM, after=1.5)
    says = f"only 0.0% of first drafted tokens are accepted, over {ENOUGH_DRAFTS} drafts"
    assert err.count(f"warning: {says}") == 2 and "0.0 % of their tokens accepted" in out
    assert f"`keepmtp check {GLM} --values` reads the draft's tensors" in err


@pytest.mark.full
@pytest.mark.parametrize("status, ours", [(7, 7), (0, 1)])
def test_a_server_that_ends_by_itself(status, ours, tmp_path):
    """With status 0 too, which is vLLM's where an engine has died."""
    served = Served(tmp_path, "--log log", ends=1.0, status=status).ask(1)
    _, err = served.end(None)
    assert served.process.returncode == ours
    assert f"must serve until it is stopped; got exit status {status}" in err
    assert "ValueError: the stub ends by itself" in err


# --- before it starts -----------------------------------------------------------------------------


@pytest.mark.full
def test_no_vllm():
    refused(f"serve {GLM}", says="VLLM_PYTHON", VLLM_PYTHON="/no/python")


def test_an_address_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        says = rf"127\.0\.0\.1:{port}: must be free .* Choose another --port"
        with pytest.raises(VLLMError, match=says):
            refuse_taken(Address(host="127.0.0.1", port=port))
    refuse_taken(Address(host="127.0.0.1", port=port))
    with pytest.raises(VLLMError, match="an address of this machine with --host"):
        refuse_taken(Address(host="203.0.113.7", port=port))


@pytest.mark.full
def test_a_checkpoint_with_an_error_is_not_served(tmp_path):
    """The twin: layers that vLLM's draft counts and the files do not have."""
    folder = shutil.copytree(GLM, tmp_path / "glm")
    config = json_of(folder / "config.json")
    write_whole(folder / "config.json", json.dumps(config | {"num_nextn_predict_layers": 2}))
    first = json.loads(ran(f"check {folder} --json", status=1))["findings"][0]
    says = f"must pass the check before it is served; got {first['where']}: "
    for part in (says, first["cure"]):
        refused(f"serve {folder} --dry-run", says=part, status=1)


def test_a_block_with_norms_of_zero_is_not_served(tmp_path):
    folder = shutil.copytree(GLM, tmp_path / "glm")
    poke(folder, "model.layers.3.enorm.weight", 0.0)
    refused(f"serve {folder} --dry-run", says="model.layers.3.enorm.weight: its largest", status=1)


@pytest.mark.full
def test_a_scale_that_is_wrong_is_not_served(tmp_path):
    """The twin of the values: an infinite global scale, which headers do not show."""
    folder = made_of("tiny-glm4-moe", tmp_path / "out", scheme="nvfp4a16-fp8")
    names = open_source(folder).entries
    name = next(name for name in names if name.endswith("weight_global_scale"))
    poke(folder, name, float("inf"))
    refused(f"serve {folder} --dry-run", says=name, status=1)


@pytest.mark.full
def test_the_commands():
    said = ran(f"serve {GLM} -k 3 --dry-run -- --max-model-len 2048")
    printed("serve_dry_run.txt", said.replace(str(GLM), "GLM"))
    told = json.loads(ran(f"serve {GLM} -k 0 --dry-run --json"))
    assert told["words"] == ["vllm", "serve", str(GLM)] and told["why"] == "as you say"
    image = ("--ipc=host", "vllm/vllm-openai:v0.32.0", "a/b")
    assert docker_words("a/b", 0, version="0.32.0+cpu")[-3:] == image


# --- which k --------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path) -> Path:
    """A copy of the shipped model with a check and a speed matrix in its report."""
    folder = shutil.copytree(GLM, tmp_path / "glm")
    for path in folder.iterdir():
        os.utime(path, (10**9, 10**9))  # long ago, so that hashes are kept
    evidence = report_folder(folder)
    identity = identify(folder, cache=evidence)
    bench = benches.bench_fact(with_source=False)
    own = bench.checkpoint.model_copy(update={"path": str(folder), "sha256": identity.sha256})
    bench = bench.model_copy(update={"checkpoint": own})
    write_result(evidence, "bench", bench, checkpoint=identity, vllm="0.32.0")
    refresh(evidence)
    return folder


@pytest.mark.full
def test_bench_recommends_it(measured):
    found = best_k(open_source(str(measured)), 1)
    assert found.k == 3 and found.measured_by == "keepmtp bench"
    assert found.why == "as bench recommends for 1 at once on NVIDIA H200 (140 GiB)"
    assert ran(f"serve {measured} --dry-run").startswith(f"# k=3: {found.why}\n")


def test_a_report_of_other_bytes_says_nothing(measured):
    """The twin: one byte of a small file."""
    write_whole(measured / "generation_config.json", "{}")
    found = best_k(open_source(str(measured)), 1)
    says = "one for each MTP layer; glm.report is not known to be of these bytes"
    assert found.k == 1 and found.why == says
    (report_folder(measured) / "report.json").write_text("{}")
    why = best_k(open_source(str(measured)), 1).why
    assert why.endswith("report.json cannot be read by this keepmtp")


def test_no_mtp_block_is_served_without_drafting():
    assert best_k(open_source(str(GLM)), 0).k == 0


# --- what is doubted ------------------------------------------------------------------------------


def drafts(number: int, *kept: int) -> Drafts:
    return Drafts(
        drafts=number,
        draft_tokens=number * len(kept),
        accepted_tokens=sum(kept),
        accepted_per_position=tuple(kept),
    )


def test_a_doubt_needs_drafts_and_a_large_difference():
    usual = (drafts(1000, 800, 600, 500), "keepmtp eval")
    assert doubt(drafts(199, 0, 0, 0), *usual) == "" and doubt(drafts(200, 80, 1, 0), *usual) == ""
    says = "only 39.5% of first drafted tokens are accepted, over 200 drafts; keepmtp eval measured"
    assert f"{says} 80.0%" in doubt(drafts(200, 79), *usual)
    assert doubt(drafts(200, 20), None, "") == "" and doubt(drafts(200, 19), None, "")
    says = "200 drafts, 60.0 % of their tokens accepted, 2.20 tokens a step; by position 80.0,"
    assert in_words(drafts(200, 160, 80)) == f"{says} 40.0 %"


def test_addresses():
    assert Address(host="0.0.0.0", port=80).url == "http://127.0.0.1:80"
    assert Address(host="::", port=80, is_tls=True).url == "https://[::1]:80"


def test_a_draft_with_errors_is_refused():
    """The command that shows them all names the draft too."""
    other = GLM.parent / "tiny-qwen3_5"
    words = f"serve {GLM} --draft {other} --dry-run"
    refused(words, status=1, says="config.json: family: is qwen3_5, and glm4_moe in the target")
    refused(words, status=1, says=f"more: `keepmtp check {GLM} --draft {other}`")


def test_an_attention_that_a_gpu_needs_is_in_the_line(tmp_path, capsys):
    """DeepSeek-V4.1 that is not in the release's form, on sm100."""
    needed = ("--attention-backend", "FLASHMLA_SPARSE_DSV41")
    source = open_source(write(tmp_path / "ours", GOOD["v41 bf16"]()))
    assert attention_words(source, None, ["B200"], ()) == needed
    b300 = replace(find_vllm(), gpus=(GPU(name="B300", capability="10.3", memory_gib=270.0),))
    assert attention_words(source, b300, (), ()) == needed
    assert attention_words(source, b300, ["H100"], ()) == ()
    assert attention_words(source, b300, (), ["--attention-backend=X"]) == ()
    assert not capsys.readouterr().err
    assert attention_words(source, None, (), ()) == ()
    assert "on sm100 add `-- --attention-backend FLASHMLA_SPARSE_DSV41`" in capsys.readouterr().err
    release = open_source(write(tmp_path / "release", GOOD["released dsv4.1-flash"]()))
    assert attention_words(release, b300, (), ()) == ()
