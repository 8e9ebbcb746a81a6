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
import subprocess
import time
from pathlib import Path
from uuid import uuid4

import benches
import httpx
import pytest
from commands import KEEPMTP, ROOT, keepmtp, refused
from keepmtp.checkpoints.files import write_whole
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import VLLMError
from keepmtp.validate.facts.results import report_folder, write_result
from keepmtp.validate.facts.served import Drafts
from keepmtp.validate.measure.foreground import (
    ENOUGH_DRAFTS,
    Address,
    Expected,
    doubt,
    in_words,
    refuse_taken,
)
from keepmtp.validate.measure.serve_line import docker_words
from keepmtp.validate.report.best_k import best_k
from keepmtp.validate.report.report import refresh
from stub_vllm import stub_vllm
from survivors import MARK, marked, none_left
from wheel import stranger

GLM = ROOT / "models" / "tiny-glm4-moe"


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def mark() -> str:
    return uuid4().hex


class Served:
    """keepmtp serve with a stub, asked so many times."""

    def __init__(self, tmp_path: Path, mark: str, port: int, *words: str, **stub: float) -> None:
        python = stub_vllm(tmp_path, start=0.3, **stub)
        self.url, self.mark = f"http://127.0.0.1:{port}", mark
        self.process = subprocess.Popen(
            [KEEPMTP, "serve", str(GLM), "--port", str(port), "--every", "1", *words],
            env=stranger(
                VLLM_PYTHON=str(python), VLLM_API_KEY="mine", TMPDIR=str(tmp_path), **{MARK: mark}
            ),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def wait(self) -> "Served":
        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline and self.process.poll() is None, (
                self.process.communicate()
            )
            try:
                httpx.get(f"{self.url}/health")
                return self
            except httpx.HTTPError:
                time.sleep(0.05)

    def ask(self, times: int) -> "Served":
        for _ in range(times):
            httpx.post(
                f"{self.url}/v1/completions", json={"model": str(GLM), "prompt": "x"}
            ).raise_for_status()
        return self

    def end(self, number: signal.Signals | None, *, after: float = 0.0) -> tuple[str, str]:
        time.sleep(after)
        if number is not None:
            self.process.send_signal(number)
        said = self.process.communicate(timeout=60)
        none_left(self.mark, seconds=10)
        assert "Traceback" not in said[1]
        return said


def test_it_serves_until_ctrl_c(tmp_path, mark, port):
    served = Served(tmp_path, mark, port, "-k", "1", accepted=8).wait().ask(3)
    time.sleep(2.5)  # two lines of acceptance are due; the second would be the same
    out, err = served.ask(1).end(signal.SIGINT)
    assert out == f"{GLM}: {re.search(r': (.* s) with', out)[1]} with k=1; " + (
        "40 drafts, 80.0 % of their tokens accepted, 1.80 tokens a step\n"
    )
    lines = err.splitlines()
    assert lines[0] == "k=1: as you say" or lines[0].startswith("k=1: one for each MTP layer")
    assert lines[1].startswith(f'vllm serve {GLM} --speculative-config \'{{"method":"mtp"')
    assert "(EngineCore pid=1) starting" in lines, "the server's own log"
    assert err.count("30 drafts") == 1 and f"serves {served.url} after" in err
    assert served.process.returncode == 143, "the stub ends by SIGTERM; its status is ours"


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_it(tmp_path, mark, port, number):
    served = Served(tmp_path, mark, port, "--json", "--log", str(tmp_path / "log")).wait().ask(2)
    out, err = served.end(number)
    assert "starting" in (tmp_path / "log").read_text() and "starting" not in err
    if number != signal.SIGKILL:
        told = json.loads(out)
        assert (told["drafts"], told["accepted_tokens"], told["k"], told["status"]) == (
            20,
            20,
            1,
            143,
        )
        assert told["is_stopped"] and told["is_healthy"] and told["doubt"] == ""


@pytest.mark.full
def test_before_it_is_healthy(tmp_path, mark, port):
    served = Served(tmp_path, mark, port)
    deadline = time.monotonic() + 60
    while not any("vllm.entrypoints.cli.main serve" in words for words in marked(mark).values()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    out, _ = served.end(signal.SIGTERM)
    assert "nothing was drafted" in out


@pytest.mark.full
def test_a_draft_of_garbage_is_said(tmp_path, mark, port):
    """Nothing accepted: said once while it runs, and at the end with what to do."""
    served = Served(tmp_path, mark, port, accepted=0).wait().ask(ENOUGH_DRAFTS // 10)
    out, err = served.end(signal.SIGTERM, after=1.5)
    says = f"only 0.0% of first drafted tokens are accepted, over {ENOUGH_DRAFTS} drafts"
    assert err.count(f"warning: {says}") == 2 and "0.0 % of their tokens accepted" in out
    assert f"`keepmtp check {GLM} --values` reads the draft's tensors" in err


@pytest.mark.full
def test_a_server_that_ends_by_itself(tmp_path, mark, port):
    served = Served(tmp_path, mark, port, "--log", str(tmp_path / "log"), ends=1.0).wait()
    _, err = served.end(None)
    assert served.process.returncode == 7
    assert (
        "must serve until it is stopped; got exit status 7" in err
        and "ValueError: the stub ends by itself" in err
    )


# --- before it starts -----------------------------------------------------------------------------


@pytest.mark.full
def test_no_vllm(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "no python"))
    refused(f"serve {GLM}", says="VLLM_PYTHON")


def test_an_address_that_is_taken(port):
    refuse_taken(Address(host="127.0.0.1", port=port))
    with pytest.raises(VLLMError, match="Name an address of this machine"):
        refuse_taken(Address(host="203.0.113.7", port=port))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(
            VLLMError, match=rf"127\.0\.0\.1:{port}: must be free .* Choose another --port"
        ):
            refuse_taken(Address(host="127.0.0.1", port=port))


@pytest.mark.full
def test_a_checkpoint_with_an_error_is_not_served(tmp_path):
    """The twin: layers that vLLM's draft counts and the files do not have."""
    folder = shutil.copytree(GLM, tmp_path / "glm")
    config = json.loads((folder / "config.json").read_text())
    write_whole(folder / "config.json", json.dumps(config | {"num_nextn_predict_layers": 2}))
    done = keepmtp(f"serve {folder} --dry-run")
    assert done.returncode == 1 and "must pass the check before it is served" in done.stderr, (
        done.stderr
    )
    first = json.loads(keepmtp(f"check {folder} --json").stdout)["findings"][0]
    assert first["where"] in done.stderr and first["cure"] in done.stderr


@pytest.mark.full
def test_a_scale_that_is_wrong_is_not_served(tmp_path):
    """The twin of the values: an infinite global scale, which headers do not show."""
    import torch
    from keepmtp.pipeline import plan_for, quantize
    from safetensors.torch import load_file, save_file

    plan, text = plan_for("tiny-glm4-moe", source=str(GLM), scheme="nvfp4a16-fp8")
    folder = quantize(plan, text, out=tmp_path / "out").out
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        name = next((name for name in tensors if name.endswith("weight_global_scale")), None)
        if name:
            tensors[name] = torch.full_like(tensors[name], float("inf"))
            shard.unlink()  # hard links of it stay as they are
            save_file(tensors, shard, metadata={"format": "pt"})
            break
    done = keepmtp(f"serve {folder} --dry-run")
    assert done.returncode == 1 and name and name in done.stderr, done.stderr


@pytest.mark.full
def test_the_commands(tmp_path):
    done = keepmtp(f"serve {GLM} -k 3 --dry-run -- --max-model-len 2048")
    assert done.returncode == 0, done.stderr
    line, docker = done.stdout.splitlines()[1:]
    config = """'{"method":"mtp","num_speculative_tokens":3}'"""
    assert line == f"vllm serve {GLM} --speculative-config {config} --max-model-len 2048"
    assert docker.startswith(
        f"docker run --gpus all -v {GLM}:/model:ro -p 8000:8000 --ipc=host vllm/vllm-openai:v0.32.0"
    )
    assert docker.endswith(
        f"/model --served-model-name tiny-glm4-moe --speculative-config {config} --max-model-len "
        "2048"
    )
    told = json.loads(keepmtp(f"serve {GLM} -k 0 --dry-run --json").stdout)
    assert told["words"] == ["vllm", "serve", str(GLM)] and told["why"] == "as you say"
    assert docker_words("a/b", 0, version="0.32.0+cpu")[-3:] == (
        "--ipc=host",
        "vllm/vllm-openai:v0.32.0",
        "a/b",
    )


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
    done = keepmtp(f"serve {measured} --dry-run")
    assert done.stdout.startswith(f"# k=3: {found.why}\n"), done.stderr


def test_a_report_of_other_bytes_says_nothing(measured):
    """The twin: one byte of a small file."""
    write_whole(measured / "generation_config.json", "{}")
    found = best_k(open_source(str(measured)), 1)
    assert (
        found.k == 1
        and found.why == "one for each MTP layer; glm.report is not known to be of these bytes"
    )
    (report_folder(measured) / "report.json").write_text("{}")
    assert best_k(open_source(str(measured)), 1).why.endswith(
        "report.json cannot be read by this keepmtp"
    )


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
    usual = Expected(drafts=drafts(1000, 800, 600, 500), measured_by="keepmtp eval")
    assert doubt(drafts(199, 0, 0, 0), usual) == "" and doubt(drafts(200, 80, 1, 0), usual) == ""
    assert (
        "only 39.5% of first drafted tokens are accepted, over 200 drafts; keepmtp eval measured "
        "80.0%"
    ) in doubt(drafts(200, 79), usual)
    assert doubt(drafts(200, 20), None) == "" and doubt(drafts(200, 19), None)
    assert in_words(drafts(200, 160, 80)) == (
        "200 drafts, 60.0 % of their tokens accepted, 2.20 tokens a step; by position 80.0, 40.0 %"
    )


def test_addresses():
    assert Address(host="0.0.0.0", port=80).url == "http://127.0.0.1:80"
    assert Address(host="::", port=80, is_tls=True).url == "https://[::1]:80"
