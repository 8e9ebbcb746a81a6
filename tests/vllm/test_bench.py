"""`keepmtp bench` with real vLLM servers on the CPU and vLLM's own benchmark: killed between two
cells, and continued.

Two servers are all there are: one for each k. A stub takes a server's place where one must fail or
die.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

import pytest
from commands import GLM, KEEPMTP, ROOT
from data_files import json_of
from keepmtp.validate.measure.store import Measured, read_lines
from keepmtp.validate.report.report import verify
from processes import MARK, none_left, until
from real_vllm import NEEDS_VLLM, UNIPROC, VLLM_PYTHON
from stub_vllm import stub_vllm
from wheel import stranger

# Two loads, two repetitions.
LOADS = "-k 0..1 --concurrency 1,2 --requests 6 --output-tokens 24 --repeat 2 --json --"
WORDS = " ".join([LOADS, *UNIPROC])
A_SERVERS = 4
TEMPLATE = "Question: {{ messages[-1]['content'] }}\nAnswer:"

pytestmark = NEEDS_VLLM


def started(
    folder: Path, words: str = WORDS, python: Path = VLLM_PYTHON, mark: str = "none"
) -> subprocess.Popen[str]:
    environment = stranger(OMP_NUM_THREADS="1", VLLM_PYTHON=str(python), **{MARK: mark})
    return subprocess.Popen(
        [KEEPMTP, "bench", str(folder), *words.split()],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def lines_in(evidence: Path, k: int = 0) -> Path:
    return next(evidence.glob(f"bench.checkpoint.k{k}.*.jsonl"), evidence / "none")


def num_measured(path: Path) -> int:
    if not path.is_file():
        return 0
    return path.read_bytes().count(b'"repetition"')


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """The evidence folder of a run that was killed after the last repetition of k=0."""
    folder = tmp_path_factory.mktemp("bench") / "glm"
    mark = uuid4().hex
    shutil.copytree(GLM, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    evidence = folder.with_name("glm.report")
    run = started(folder, mark=mark)
    until(lambda: num_measured(lines_in(evidence)) >= A_SERVERS, seconds=500, pause=0.1, by=run)
    run.kill()
    run.communicate()
    none_left(mark)
    assert not (evidence / "bench.json").exists(), "no figure of half a matrix"
    return evidence


@pytest.fixture(scope="module")
def found(killed) -> dict:
    """The same command once more, after a part of a line was left; what it prints."""
    lines = lines_in(killed)
    kept = lines.read_bytes()
    with open(lines, "ab") as file:
        file.write(b'{"concurr')
    run = started(killed.with_suffix(""))
    said, complained = run.communicate(timeout=500)
    assert run.returncode == 0, said[-2000:] + complained[-3000:]
    assert lines.read_bytes().startswith(kept), "what was measured stays as it was"
    steps = [line for line in complained.splitlines() if line.startswith("checkpoint")]
    assert f"repetition {A_SERVERS} of {A_SERVERS}" in steps[-1]
    assert not any("k=0" in step for step in steps)
    return json.loads(said)["bench"]


@pytest.mark.full
def test_a_run_that_was_killed_measures_only_what_is_missing(killed, found):
    for k in (0, 1):
        assert len(read_lines(lines_in(killed, k), Measured).lines) == A_SERVERS
    assert found["checkpoint"]["as_served"] == "native" and found["checkpoint"]["form"] == "chat"
    assert json_of(killed / "bench.json")["data"] == found
    report = verify(killed)
    assert report.bench is not None and report.bench.checkpoint.recommended


@pytest.mark.full
def test_each_cell_has_the_figures_of_the_same_work(found):
    cells = {(cell["k"], cell["concurrency"]): cell for cell in found["checkpoint"]["cells"]}
    assert list(cells) == [(0, 1), (1, 1), (0, 2), (1, 2)]
    for (k, _), cell in cells.items():
        for each in cell["repetitions"]:
            assert each["requests"] == 6 and 6 < each["output_tokens"] <= 6 * 24
            assert each["tokens_per_second"] == each["output_tokens"] / each["seconds"] > 0
            assert each["first_token_ms"] > 0 and each["per_token_ms"] > 0
            assert (each["drafts"] > 0) == (each["draft_tokens"] > 0) == (k == 1)
            assert 16 < each["input_tokens"] / 6 < 64
    for load in (1, 2):
        # Greedy, and the same requests: k=1 writes what k=0 writes, but for a token where two were
        # nearly equal.
        plain, drafted = (cells[k, load]["repetitions"][0]["output_tokens"] for k in (0, 1))
        assert abs(plain - drafted) <= 0.1 * plain
    drafts = cells[1, 1]["drafts"]
    assert drafts["acceptance"] > 0.8 and drafts["mean_accepted_length"] > 1.8


@pytest.mark.full
def test_drafts_are_those_that_vllms_benchmark_counts(killed, found):
    printed = (killed / "logs" / "bench.checkpoint.k1.client.log").read_text()
    counts = [int(count) for count in re.findall(r"Draft tokens: +(\d+)", printed)]
    drafted = [counts[at] for at in (1, 3, 4, 5)]  # without the warm-ups
    measured = read_lines(lines_in(killed, 1), Measured).lines.values()
    ours = sorted(measured, key=lambda one: (one.repetition.number, one.concurrency))
    assert drafted == [one.repetition.draft_tokens for one in ours]


# --- a server that fails --------------------------------------------------------------------------


@pytest.mark.full
def test_a_request_that_fails_is_a_sentence_and_no_figure(tmp_path):
    """The stub does not stream, so vLLM's benchmark gets no token from it."""
    words = f"-k 0 --concurrency 1 --requests 2 --repeat 1 --out {tmp_path}/out"
    run = started(GLM, words, python=stub_vllm(tmp_path, real=VLLM_PYTHON))
    complained = run.communicate(timeout=200)[1]
    assert run.returncode == 1, complained
    says = "got 1 of 1 requests failed: Never received a valid chunk"
    assert says in " ".join(complained.split())
    assert not (tmp_path / "out" / "bench.json").exists()
    assert not num_measured(lines_in(tmp_path / "out")), "the next run measures it again"
