"""`keepmtp eval` before a server is started: what it refuses; and afterwards: what it says."""

import io
import shutil
from pathlib import Path

import measured
import pytest
from commands import GLM, assert_shows
from data_files import cases, put_json
from evaluations import Answers, evaluation, several
from keepmtp.cli import session
from keepmtp.cli.main import app
from keepmtp.cli.measured import shown
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.protocol import Evaluation, Gates
from keepmtp.validate.measure import tasks
from keepmtp.validate.report.gates import judge
from real_vllm import CPU
from reports import UNTRIED
from rich.console import Console
from typer.testing import CliRunner


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Path:
    """A checkpoint without a record, and no server that could be started."""
    monkeypatch.setattr(session, "measured", lambda *_, **__: pytest.fail("a server was started"))
    return Path(shutil.copytree(GLM, tmp_path / "made"))


def record(checkpoint: Path, **recipe) -> None:
    """What keepmtp writes beside a checkpoint, as far as it matters here."""
    files = {path.name: path.stat().st_size for path in GLM.glob("*.safetensors")}
    made_from = {"name": "tiny-glm4-moe", "revision": "local", "files": files}
    told = measured.recorded(made_from=made_from, **{"source": "models/tiny-glm4-moe", **recipe})
    put_json(checkpoint / "keepmtp.json", told)


def refusal(*words: object) -> str:
    """Of a checkpoint and options: a text is a command line as it is typed."""
    result = CliRunner().invoke(app, ["eval", *" ".join(map(str, words)).split()])
    assert isinstance(result.exception, KeepMTPError), result.output + repr(result.exception)
    message = str(result.exception)
    assert "; got " in message and message.endswith((".", "?")) and "\n" not in message, message
    return message


@cases
def test_a_record_with_a_protocol_that_is_none(checkpoint, evaluation):
    record(checkpoint, evaluation=evaluation)
    assert "keepmtp.json: recipe.evaluation must be as a recipe has it" in refusal(checkpoint)


@pytest.fixture
def asked(monkeypatch) -> list[Evaluation]:
    """The protocols whose questions are looked for; then nothing more is done."""
    seen = []

    def noted(protocol: Evaluation) -> None:
        seen.append(protocol)

    def stop(*_, **__):
        raise KeepMTPError("", "here", got="far enough", cure="Stop")

    monkeypatch.setattr("keepmtp.validate.measure.lm_eval_task.questions", noted)
    monkeypatch.setattr(tasks, "refuse_model", lambda *_: None)
    monkeypatch.setattr(tasks, "Tasks", stop)
    monkeypatch.setattr("keepmtp.cli.session.chosen_vllm", stop)
    return seen


def test_the_recorded_protocol_and_what_the_command_line_changes(checkpoint, asked):
    own = Evaluation(dataset="models/held_out.jsonl", shots=0, k=2, max_tokens=96)
    record(checkpoint, evaluation=own.model_dump(), gates={"max_drop": 0.1})
    for words in (
        "",
        "--limit 50 -k 1 --max-tokens 64",
        "--dataset hub --task gsm8k_platinum",
        "--task ifeval",
    ):
        refusal(checkpoint, "--source", GLM, words)
    changed = {"limit": 50, "k": 1, "max_tokens": 64}
    other = {"dataset": None, "task": "gsm8k_platinum"}
    assert asked == [
        own,
        own.model_copy(update=changed),
        own.model_copy(update=other),
        Evaluation(task="ifeval", k=2),  # another task is asked as that task is
    ]


def test_each_task_of_the_recipe_is_asked_or_the_one_that_is_named(checkpoint, asked):
    first = Evaluation(dataset="models/held_out.jsonl", shots=0, k=2)
    second = Evaluation(task="gsm8k_platinum", shots=5, k=2, max_tokens=96)
    record(checkpoint, evaluation=[first.model_dump(), second.model_dump()])
    for words in ("", "--task gsm8k_platinum --limit 9", "-k 1"):
        refusal(checkpoint, f"--source {GLM} {words}")
    assert asked[:3] == [first, second, second.model_copy(update={"limit": 9})]
    assert [one.k for one in asked[3:]] == [1, 1]
    says = (
        "--dataset: belongs to one task, and the recipe lists several; got gsm8k, gsm8k_platinum."
    )
    assert says in refusal(checkpoint, f"--source {GLM} --dataset hub")
    record(checkpoint, evaluation=[first.model_dump(), first.model_dump()])
    says = "recipe.evaluation must be as a recipe has it; got groups: must name each task once."
    assert says in refusal(checkpoint)


@cases
def test_lost_drafts_are_an_exit_status_though_the_score_is_kept(
    shares, status, checkpoint, monkeypatch, tmp_path
):
    fact = evaluation(checkpoint={"shares": shares})
    for name in ("tasks.refuse_model", "lm_eval_task.questions"):
        monkeypatch.setattr(f"keepmtp.validate.measure.{name}", lambda *_, **__: None)
    monkeypatch.setattr(session, "planned", lambda *_: [])
    monkeypatch.setattr(session, "measured", lambda *_: ({"evaluation": fact}, None))
    monkeypatch.setattr("keepmtp.cli.session.chosen_vllm", lambda: CPU)
    record(checkpoint)
    words = ["eval", str(checkpoint), "--source", str(GLM), "--out", str(tmp_path / "out")]
    words += ["--only", "tasks,lossless"]
    assert CliRunner().invoke(app, words).exit_code == status


ONE_TASK = (
    "eval out/tiny.nvfp4 source checkpoint checkpoint, MTP off "
    "gsm8k, strict-match, 1,319 questions 70.51 % ± 1.26 68.92 % ± 1.27 71.80 % ± 1.24 "
    "gsm8k, flexible-extract, 1,319 questions 70.51 % ± 1.26 68.92 % ± 1.27 71.80 % ± 1.24 "
    "gsm8k, cut, 1,319 questions 0.23 % (3) 0.23 % (3) 0.23 % (3) "
    "gsm8k, empty, 1,319 questions 0.00 % (0) 0.00 % (0) 0.00 % (0) "
    "accepted, k=3, gsm8k 79.33 % (78.93 to 79.73) of 120,000, length 3.38 79.33 % (78.93 to 79.73) "
    "of 120,000, length 3.38 - gsm8k on openai/gsm8k: task gsm8k, shots 8, api completions, "
    "max_tokens 1024, k 3, concurrency 32, seed 1234, repeats 1, temperature 0.0, top_p 1.0, "
    "prefix_caching False; lm-eval 0.4.13, vLLM 0.32.0 on CPU: Xeon, 2 cores.",
    "findings pass No error in config.json and the headers.",
    "right in the source alone 30, in the checkpoint alone 9",
    "drafting regression gsm8k: 42 of 1,319 greedy answers are another text with MTP on than off.",
)
SEVERAL = (
    "gsm8k, flexible-extract, 1,319 questions 68.99 % ± 1.27 68.92 % ± 1.27 -",
    "gsm8k_platinum, flexible-extract, 1,000 questions 66.00 % ± 1.50 61.00 % ± 1.54 -",
    "±: one standard error; in brackets the 95 % interval;",
)


@pytest.mark.parametrize(
    "fact, says",
    [
        (
            evaluation(
                Answers(both=900, only_source=30, only_checkpoint=9, neither=380), switched=(40, 2)
            ),
            ONE_TASK,
        ),
        (
            several(
                (
                    "gsm8k_platinum",
                    Answers(both=600, only_source=60, only_checkpoint=10, neither=330),
                )
            ),
            SEVERAL,
        ),
    ],
)
def test_the_table_says_what_was_measured_and_how(fact, says):
    """Of one task, with MTP off as well; of several, with theirs."""
    file = io.StringIO()
    judged = judge(gates=Gates(), check=UNTRIED, serve=None, evaluation=fact)
    Console(file=file, width=200).print(*shown({"evaluation": fact}, judged), sep="\n")
    assert_shows(file.getvalue(), *says)


def test_drafts_that_a_killed_server_did_not_count_are_no_missing_block():
    fact = evaluation(Answers(both=90, only_source=0, only_checkpoint=0, neither=10))
    none = dict.fromkeys(("drafts", "draft_tokens", "accepted_tokens"), 0)
    killed = fact.model_copy(update={"checkpoint": fact.checkpoint.model_copy(update=none)})
    said = [*killed.notes()]
    assert "The drafts of the checkpoint were not counted: its server was killed." in said
    assert not [one for one in said if "MTP block" in str(one)]
