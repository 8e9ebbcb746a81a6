"""`keepmtp eval` with real vLLM servers on the CPU: a good checkpoint, a spoilt one, and a server
that dies in between.

A server takes 20 to 60 s to start, so six of them are all there are, and each later test takes from
the first.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
import written_values
from commands import GLM, KEEPMTP, ROOT, captured
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.measure.harness import COPY
from keepmtp.validate.report.report import verify
from processes import MARK, none_left
from real_vllm import NEEDS_VLLM, UNIPROC, VLLM_PYTHON, answers_of_source
from releases import made_of
from wheel import stranger

NUM = 400
NOISE = 1.0  # as a share of a scale, standard deviation
WORDS = ("--max-num-batched-tokens", "2048", *UNIPROC)  # for vLLM

pytestmark = NEEDS_VLLM


Keepmtp = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def keepmtp(installed) -> Keepmtp:
    """The command of keepmtp's wheel, in an environment that has the extra `evaluate` and nothing
    else.
    """
    command = str(installed("evaluate") / "keepmtp")

    def run(
        *words: str, cwd: Path = ROOT, status: int | None = None, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        environment = stranger(OMP_NUM_THREADS="1", VLLM_PYTHON=str(VLLM_PYTHON), **changes)
        return captured([command, *words], status=status, env=environment, cwd=cwd)

    return run


def evaluated(
    keepmtp: Keepmtp, made: Path, *, only: str, status: int = 0, **changes: str
) -> subprocess.CompletedProcess[str]:
    """The recipe's own protocol."""
    words = f"eval {made} --only {only} --timeout 400 --json --".split()
    return keepmtp(*words, *WORDS, status=status, **changes)


def source_of(made: Path) -> Path:
    return made.with_name("source") / GLM.name


@pytest.fixture(scope="module")
def made(keepmtp, tmp_path_factory) -> Path:
    """From a source that no other test links: a link that went again leaves a ctime behind."""
    made = tmp_path_factory.mktemp("made") / "glm"
    shutil.copytree(GLM, source_of(made))
    return made_of("tiny-glm4-moe", made, source=str(source_of(made)))


@pytest.fixture(scope="module")
def found(keepmtp, made) -> dict:
    """Source and checkpoint, by the command line; none of its processes is left."""
    mark = uuid4().hex
    done = evaluated(keepmtp, made, only="acceptance,tasks,lossless", **{MARK: mark})
    none_left(mark)
    for role in ("source", "checkpoint"):
        assert f"{role} gsm8k  question {NUM} of {NUM}  " in done.stderr, done.stderr
    return json.loads(done.stdout)


def spoilt(made: Path, twin: Path) -> Path:
    """The same checkpoint with noise in the scales of its routed experts: it loads, and it answers
    fluently.
    """
    return written_values.noisy(
        made, twin, r"\.experts\..*weight_scale$", lambda value: NOISE * value
    )


def reasons(found: dict) -> dict[str, dict]:
    return {reason["gate"]: reason for reason in found["judgement"]["reasons"]}


def test_the_first_questions_of_the_release(tmp_path):
    """One server: real prompts, answers, scores and draft counters. Without a source nothing is
    judged.
    """
    words = f"{KEEPMTP} eval {GLM} --recipe tiny-glm4-moe --source none --only tasks".split()
    words += f"--limit 20 --json --out {tmp_path}".split()
    environment = stranger(OMP_NUM_THREADS="1", VLLM_PYTHON=str(VLLM_PYTHON))
    done = captured(words, env=environment, cwd=ROOT, status=0)
    fact = json.loads(done.stdout)["evaluation"]
    assert (
        all(score["value"] > 0.8 for score in fact["checkpoint"]["scores"])
        and fact["plain"] is None
    )
    assert fact["checkpoint"]["num_questions"] == 20 and fact["checkpoint"]["acceptance"] > 0.9


@pytest.mark.full
def test_source_and_checkpoint_score_well_above_zero(made, found):
    fact = found["evaluation"]
    source = fact["source"]
    checkpoint = fact["checkpoint"]
    assert fact["plain"]["num_empty"] == source["num_empty"] == checkpoint["num_empty"] == 0
    assert not list(made.with_name("glm.report").glob("*bf16*")), "the copy is removed"
    for one in (source, checkpoint):
        assert [score["filter"] for score in one["scores"]] == ["strict-match", "flexible-extract"]
        assert all(0.85 < score["value"] < 1 and score["stderr"] > 0 for score in one["scores"])
        assert one["num_questions"] == NUM and one["num_truncated"] == 0
        assert (
            len(one["accepted_per_position"]) == 3
            and one["draft_tokens"] == 3 * one["drafts"] > 1000
        )
        assert (
            one["accepted_tokens"] == sum(one["accepted_per_position"]) > 0.9 * one["draft_tokens"]
        )
    assert (
        source["as_served"] == "native"
        and checkpoint["as_served"] == COPY
        and "routed experts in W4A16" in checkpoint["reason"]
        and "FP8_BLOCK" in checkpoint["reason"]
    )
    protocol = Evaluation(
        dataset="models/held_out.jsonl", shots=0, max_tokens=96, k=3, concurrency=8
    )
    assert fact["protocol"] == protocol.model_dump()
    assert reasons(found)["acceptance"]["verdict"] == reasons(found)["gsm8k"]["verdict"] == "pass"


@pytest.mark.full
def test_each_is_served_with_drafts_and_without(found):
    served = found["serve"]
    assert Path(served["source"]["path"]).resolve() == GLM, "found by keepmtp.json's record"
    for one in (served["source"], served["checkpoint"]):
        plain, drafted = one["runs"]
        assert (plain["k"], drafted["k"]) == (0, 3)
        assert plain["drafts"] == 0 and drafted["drafts"] > 20 and drafted["acceptance"] > 0.85
        assert drafted["accepted_tokens"] == sum(drafted["accepted_per_position"])
        logs = [Path(run["log"]).read_text() for run in one["runs"]]
        assert ["'method': 'mtp'" in log for log in logs] == [False, True]
        assert all("max_num_batched_tokens': 2048" in log for log in logs)


@pytest.mark.full
def test_with_mtp_off_the_checkpoint_answers_the_same(found):
    """The third arm: the checkpoint's own bytes, greedy, with nothing drafted."""
    plain = found["evaluation"]["plain"]
    checkpoint = found["evaluation"]["checkpoint"]
    assert plain["drafts"] == plain["draft_tokens"] == 0 and plain["acceptance"] is None
    assert plain["sha256"] == checkpoint["sha256"] and plain["num_questions"] == NUM
    drafting = found["evaluation"]["drafting"]
    assert [switch["reads"] for switch in drafting["switches"]] == [
        "strict-match",
        "flexible-extract",
        "not empty",
    ]
    assert drafting["num_changed"] <= NUM // 20, "near-ties alone may flip"
    assert reasons(found)["drafting"]["verdict"] == "pass"


@pytest.mark.full
def test_all_goes_on_from_there_to_a_card_that_may_be_published(keepmtp, made, found):
    """The commands of `make all`, as after a run that was cut off behind the evaluation: what is there
    is not done again.
    """
    logs = {path: path.stat().st_mtime_ns for path in made.with_name("glm.report").glob("logs/*")}
    for line in (
        f"quantize tiny-glm4-moe --source {source_of(made)} --out {made}",
        f"check {made} --record --gpu sm100",
        f"eval {made} -- {' '.join(WORDS)}",
        f"card {made}",
    ):
        keepmtp(*line.split(), status=0)
    assert {path: path.stat().st_mtime_ns for path in logs} == logs and len(logs) == 4
    evaluation = verify(made.with_name("glm.report")).evaluation
    assert evaluation is not None and evaluation.model_dump(mode="json") == found["evaluation"]
    card = (made.with_name("glm.card") / "README.md").read_text()
    score = found["evaluation"]["checkpoint"]["scores"][1]["value"]
    assert f"{100 * score:.2f} %" in card and "## Gates: pass\n" in card
    words = f"publish {made} --repo org/glm --dry-run --json".split()
    ready = keepmtp(*words, status=0, HF_HUB_OFFLINE="1")
    assert "model-00002-of-00002.safetensors" in ready.stdout, ready.stderr


@pytest.mark.full
def test_a_spoilt_twin_shows_a_drop(keepmtp, made, found):
    """Fluent, and worse than its source."""
    twin = spoilt(made, made.with_name("twin"))
    answers_of_source(made, twin)
    told = json.loads(evaluated(keepmtp, twin, only="tasks", status=1).stdout)
    assert told["evaluation"]["source"]["scores"] == found["evaluation"]["source"]["scores"]
    gate = reasons(told)["gsm8k"]
    assert gate["verdict"] == told["judgement"]["verdict"] == "regression", gate
    for pair in told["evaluation"]["paired"]:
        assert pair["difference"] < -0.02 and pair["only_source"] > pair["only_checkpoint"]
