"""`keepmtp serve` with a stub for vLLM: what is refused before, and what the process becomes.

tests/vllm/test_separate_draft.py has the real server.
"""

import os
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
import stations
from checkpoint_files import write
from commands import GLM, free_port, ran, refused, started
from good import outputs_of, plan_of_recipe
from good_checkpoints import GOOD
from keepmtp.checkpoints.files import remove_left, write_whole
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.plan_tables import next_steps
from keepmtp.cli.serving import attention_words, print_command
from keepmtp.quantize.needs.cards import GPU
from keepmtp.recipes.runtimes.vllm import NEWEST
from keepmtp.validate.facts.results import report_folder, write_result
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.cures import switched_on
from keepmtp.validate.report.best_k import BestK, best_k
from keepmtp.validate.report.report import refresh
from processes import MARK, marked, until
from stub_vllm import stub_vllm
from written_values import fill, poke


class Served:
    """keepmtp serve with a stub."""

    def __init__(self, folder: Path, **stub: float) -> None:
        python = stub_vllm(folder, start=0.3, **stub)
        port = free_port()
        self.mark = uuid4().hex
        ours = {"VLLM_PYTHON": str(python), "VLLM_API_KEY": "mine", MARK: self.mark}
        ours |= {"TMPDIR": str(folder), "HF_TOKEN": "secret"}
        self.url = f"http://127.0.0.1:{port}"
        command = f"serve {GLM} --port {port} -k 1"
        self.process = started(command, env=os.environ | ours, cwd=folder)

    def ask(self) -> "Served":
        """Once it is healthy."""
        body = {"model": str(GLM), "prompt": "x"}

        def answers() -> bool:
            with suppress(httpx.TransportError):
                httpx.post(f"{self.url}/v1/completions", json=body).raise_for_status()
                return True
            return False

        until(answers, seconds=120, by=self.process)
        return self

    def end(self, number: signal.Signals | None) -> str:
        if number is not None:
            self.process.send_signal(number)
        self.process.wait(timeout=60)
        for left in marked(self.mark):
            os.kill(left, signal.SIGKILL)  # the stub's own workers
        out, err = self.process.communicate()
        return out + err


def test_it_becomes_the_server(tmp_path):
    """One process: vLLM's, with its key, no other secret, and a folder of plugins that is there as
    long as it is.
    """
    served = Served(tmp_path).ask()
    ours = Path(f"/proc/{served.process.pid}")
    words = (ours / "cmdline").read_text().split("\0")
    assert words[words.index("serve") + 1] == str(GLM)
    variables = dict(word.split("=", 1) for word in (ours / "environ").read_text().split("\0")[:-1])
    assert variables["VLLM_API_KEY"] == "mine" and "HF_TOKEN" not in variables
    assert variables["HF_HUB_OFFLINE"] == "1"
    plugins = Path(variables["PYTHONPATH"].split(":")[0])
    remove_left("keepmtp-server-", tmp_path)
    assert plugins.is_dir(), "no other run takes it for one that was left"
    said = served.end(signal.SIGTERM)
    assert served.process.returncode == -signal.SIGTERM
    remove_left("keepmtp-server-", tmp_path)
    assert not plugins.exists()
    lines = said.splitlines()
    assert "(EngineCore pid=1) starting" in lines, "the server's own log"
    assert "k=1: one for each MTP layer" in said or "k=1: as you say" in said
    says = f'vllm serve {GLM} --speculative-config \'{{"method":"mtp"'
    assert any(line.startswith(says) for line in lines)


@pytest.mark.full
def test_its_exit_status_is_the_servers(tmp_path):
    served = Served(tmp_path, ends=1.0, status=7)
    assert "ValueError: the stub ends by itself" in served.end(None)
    assert served.process.returncode == 7


# --- before it starts -----------------------------------------------------------------------------


@pytest.mark.full
def test_no_vllm():
    refused(f"serve {GLM}", says="VLLM_PYTHON", VLLM_PYTHON="/no/python")


@pytest.mark.parametrize(
    "tensor, value, says",
    [
        ("model.layers.3.enorm.weight", 0.0, "its largest"),
        ("model.layers.1.self_attn.o_proj.weight_global_scale", float("inf"), ""),
    ],
)
def test_a_value_that_breaks_the_model_is_not_served(tensor, value, says, tmp_path):
    """Headers do not show it."""
    folder = write(tmp_path / "glm", GOOD["glm nvfp4"]())
    fill(folder)
    poke(folder, tensor, value)
    refused(f"serve {folder} --dry-run", says=f"{tensor}: {says}", status=1)


def test_the_users_own_tensor_parallel_size_is_checked(tmp_path):
    """A rank would get half of a group."""
    folder = write(tmp_path / "half", outputs_of(plan_of_recipe("glm-4.7.w4a16-fp8")))
    refused(f"serve {folder} --dry-run -- -tp 2", says="cannot split it at TP 2", status=1)


def test_the_address_is_in_the_command(capsys):
    best = BestK(k=1, why="as you say")
    print_command(open_source(GLM), best, ("-tp", "2"), host="::1", port="81", as_json=False)
    (shell,) = capsys.readouterr().out.splitlines()[1:]
    assert shell.endswith(" --host ::1 --port 81 -tp 2")


@pytest.mark.parametrize("model, is_cured", [("step-3.5-flash", True), ("glm-4.7", False)])
def test_quantize_prints_a_line_that_works(model, is_cured, tmp_path, capsys):
    """Plain vLLM has a defect with Step-3.5's block, and a cure for it must be switched on."""
    plan = plan_of_recipe(model)
    folder = write(tmp_path / "made", outputs_of(plan))
    line = next_steps(plan, folder).plain.splitlines()[-1]
    assert line == f"  keepmtp serve {folder}"
    opened = open_source(folder)
    cures = switched_on(opened, NEWEST)
    assert bool(cures) == is_cured
    best = BestK(k=1, why="as you say")
    print_command(opened, best, (), cures, host="::1", port="81", as_json=False)
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith(f"env KEEPMTP_CURES={','.join(cures)} vllm serve") == is_cured


# --- which k --------------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path) -> Path:
    """A copy of the shipped model with a check and a speed matrix in its report."""
    folder = shutil.copytree(GLM, tmp_path / "glm")
    for path in folder.iterdir():
        os.utime(path, (10**9, 10**9))  # long ago, so that hashes are kept
    evidence = report_folder(folder)
    identity = identify(folder, cache=evidence)
    bench = stations.bench_fact(with_source=False)
    own = bench.checkpoint.model_copy(update={"path": str(folder), "sha256": identity.sha256})
    bench = bench.model_copy(update={"checkpoint": own})
    write_result(evidence, bench, checkpoint=identity, vllm="0.32.0")
    refresh(evidence)
    return folder


@pytest.mark.full
def test_bench_recommends_it(measured):
    found = best_k(open_source(str(measured)), 1)
    assert found.k == 3
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
    b300 = replace(find_vllm(), gpus=(GPU(name="B300", capability="10.3", memory_gib=270.0),))
    assert attention_words(source, b300, ()) == needed
    h100 = replace(b300, gpus=(GPU(name="H100", capability="9.0", memory_gib=80.0),))
    assert attention_words(source, h100, ()) == ()
    assert attention_words(source, b300, ["--attention-backend=X"]) == ()
    assert not capsys.readouterr().err
    assert attention_words(source, None, ()) == ()
    assert "on sm100 add `-- --attention-backend FLASHMLA_SPARSE_DSV41`" in capsys.readouterr().err
    release = open_source(write(tmp_path / "release", GOOD["released dsv4.1-flash"]()))
    assert attention_words(release, b300, ()) == ()
