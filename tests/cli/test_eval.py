"""`keepmtp eval` before a server is started: what it refuses; and afterwards: what it says."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import measured
import pytest
from commands import ROOT, keepmtp_without
from evaluations import Answers, evaluation, several
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.eval import shown as parts
from keepmtp.cli.main import app
from keepmtp.recipes.errors import KeepMTPError, RecipeError
from keepmtp.recipes.protocol import Evaluation, Gates
from keepmtp.validate.facts.evaluated import EvaluationFact
from keepmtp.validate.measure import tasks
from keepmtp.validate.report.gates import judge
from rich.console import Console
from typer.testing import CliRunner
from vllms import CPU

GLM = ROOT / "models" / "tiny-glm4-moe"
RECIPE = "--recipe tiny-glm4-moe"


@pytest.fixture
def checkpoint(tmp_path, monkeypatch) -> Path:
    """A checkpoint without a record, and no server that could be started."""

    def start(*_, **__):
        raise AssertionError("a server would have been started")

    monkeypatch.setattr(tasks, "evaluate", start)
    return Path(shutil.copytree(GLM, tmp_path / "made"))


def record(checkpoint: Path, **recipe) -> None:
    """What keepmtp writes beside a checkpoint, as far as it matters here."""
    files = {path.name: path.stat().st_size for path in GLM.glob("*.safetensors")}
    made_from = {"name": "tiny-glm4-moe", "revision": "local", "files": files}
    told = measured.recorded(made_from=made_from, **{"source": "models/tiny-glm4-moe", **recipe})
    (checkpoint / "keepmtp.json").write_text(json.dumps(told))


def refusal(*words: object) -> str:
    """Of a checkpoint and options: a text is a command line as it is typed."""
    typed = [part for word in words for part in str(word).split()]
    result = CliRunner().invoke(app, ["eval", *typed])
    assert isinstance(result.exception, KeepMTPError), result.output + repr(result.exception)
    message = str(result.exception)
    assert "; got " in message and message.endswith((".", "?")) and "\n" not in message, message
    return message


def test_no_source(checkpoint):
    message = refusal(checkpoint, RECIPE)
    assert (
        "the source to compare with must be known; got no keepmtp.json. Name it with --source"
        in message
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "--api chat",
            "needs a chat template for evaluation.api chat; got none beside the weights.",
        ),
        (
            "--dataset none.jsonl",
            "evaluation.dataset none.jsonl: must be a file; got no such file",
        ),
        (
            "--dataset openai/gsm8k",
            (
                "--dataset: must be a .jsonl or .parquet file, or left out for the task's "
                "own "
                "on the Hub; got 'open"
            ),
        ),
        (
            "--shots 400",
            "evaluation.shots: gsm8k has 399 examples at most; got 400. Use --shots 399",
        ),
        ("-- --hf-token=hf_abc", "so none may be a secret; got --hf-token. Leave it out"),
        ("other", "takes one at a time; got also other"),
    ],
)
def test_what_no_server_could_answer(checkpoint, words, says):
    assert says in refusal(checkpoint, RECIPE, "--source", GLM, words)


@pytest.mark.parametrize(
    ("model", "build", "is_refused"),
    [("qwen3_5", "cpu", True), ("qwen3_5", "cuda", False), ("glm4-moe", "cpu", False)],
)
def test_prefix_caching_that_no_cpu_can_combine_with_drafting(model, build, is_refused):
    """Qwen3.5 has layers with linear attention, and vLLM no kernel on a CPU that puts their state
    back.
    """
    source = open_source(str(GLM.with_name(f"tiny-{model}")))
    vllm = replace(CPU, build=build)
    tasks.refuse_prefix_caching(source, Evaluation(), vllm)
    try:
        tasks.refuse_prefix_caching(source, Evaluation(prefix_caching=True), vllm)
    except RecipeError as refused:
        assert (
            is_refused
            and "tiny-qwen3_5: on a CPU vLLM 0.32 cannot combine prefix caching with"
            in str(refused)
        )
    else:
        assert not is_refused


def test_another_model_is_no_source(checkpoint):
    """Of another family, or of other sizes: whatever is lost against it, quantizing did not lose
    it.
    """
    qwen = GLM.with_name("tiny-qwen3_5")
    message = refusal(checkpoint, RECIPE, "--source", qwen)
    assert (
        f"{qwen}: must be what {checkpoint} was made from, whose family is glm4_moe; got qwen3_5"
        in message
    )
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    assert (
        f"{GLM}: must be what {checkpoint} was made from, whose vocab_size is 64; got 512."
        in refusal(checkpoint, RECIPE, "--source", GLM)
    )


def test_a_checkpoint_is_not_its_own_source(checkpoint):
    """Nothing would be lost, and a copy is no better."""
    for source in (checkpoint, GLM):
        message = refusal(checkpoint, RECIPE, "--source", source)
        assert (
            f"made from, not the checkpoint itself; got the same bytes in {source}. Name it with "
            "--source"
        ) in message


def test_the_source_needs_a_template_too(checkpoint):
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    assert f"{GLM}: needs a chat template" in refusal(
        checkpoint, RECIPE, f"--source {GLM} --api chat"
    )


def test_a_row_without_an_answer(checkpoint, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "1 + 2?"}\n'
    )
    message = refusal(checkpoint, f"--source {GLM} --dataset {tmp_path}/rows.jsonl --shots 0")
    assert "rows.jsonl:2: must have the field answer; got question." in message


def test_a_checkpoint_without_a_draft(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    assert "MTP" in refusal(checkpoint, RECIPE, "--source", GLM)


@pytest.mark.parametrize("evaluation", [{"shots": -1}, {"shot": 1}, 7])
def test_a_record_with_a_protocol_that_is_none(checkpoint, evaluation):
    record(checkpoint, evaluation=evaluation)
    assert "keepmtp.json: recipe.evaluation must be as a recipe has it" in refusal(checkpoint)


def test_without_lm_eval(tmp_path):
    done = keepmtp_without(("lm-eval",), "eval", str(GLM), cwd=tmp_path)
    assert done.returncode == 2 and "-m pip install 'keepmtp[evaluate]'." in done.stderr, (
        done.stderr
    )


def test_the_recorded_protocol_and_what_the_command_line_changes(checkpoint, monkeypatch):
    """The server that would have been asked gets the recipe's protocol, with the words given
    here.
    """
    seen = []

    def noted(protocol: Evaluation, *, runs_code: bool):
        seen.append(protocol)
        assert runs_code == (protocol.task == "humaneval")
        raise KeepMTPError("", "here", got="far enough", cure="Stop")

    monkeypatch.setattr("keepmtp.validate.measure.lm_eval_task.questions", noted)
    own = Evaluation(dataset="models/held_out.jsonl", shots=0, k=2, max_tokens=96)
    record(checkpoint, evaluation=own.model_dump(), gates={"max_drop": 0.1})
    refusal(checkpoint)
    refusal(
        checkpoint,
        "--limit 50 -k 1 --concurrency 4 --seed 7 --max-tokens 64 --shots 2",
    )
    refusal(checkpoint, "--dataset hub --task gsm8k_platinum --api chat")
    refusal(checkpoint, "--task humaneval --run-model-code")
    changed = {"limit": 50, "k": 1, "concurrency": 4, "seed": 7, "max_tokens": 64, "shots": 2}
    assert seen[:2] == [own, own.model_copy(update=changed)]
    assert seen[2] == own.model_copy(
        update={"dataset": None, "task": "gsm8k_platinum", "api": "chat"}
    )
    assert seen[3] == Evaluation(task="humaneval", k=2), "another task is asked as that task is"


@pytest.mark.parametrize(("fence", "is_said"), [((), True), (("bwrap",), False)])
def test_programs_that_nothing_contains_are_announced(fence, is_said, checkpoint, monkeypatch):
    """And only where some are run: GSM8K has none."""

    def stop(protocol: Evaluation, *, runs_code: bool):
        raise KeepMTPError("", "here", got="far enough", cure="Stop")

    monkeypatch.setattr("keepmtp.validate.measure.lm_eval_task.questions", stop)
    monkeypatch.setattr("keepmtp.validate.measure.model_code.fence", lambda: fence)
    for task, runs in (("humaneval", is_said), ("gsm8k", False)):
        words = ["eval", str(checkpoint), "--source", str(GLM), "--task", task, "--run-model-code"]
        done = CliRunner().invoke(app, words)
        assert ("with your rights, files and network" in " ".join(done.stderr.split())) == runs, (
            done.output
        )


def test_each_task_of_the_recipe_is_asked_or_the_one_that_is_named(checkpoint, monkeypatch):
    seen = []

    def noted(protocol: Evaluation, **_):
        seen.append(protocol)
        return None

    def stop(*_):
        raise KeepMTPError("", "here", got="far enough", cure="Stop")

    monkeypatch.setattr("keepmtp.validate.measure.lm_eval_task.questions", noted)
    monkeypatch.setattr(tasks, "refuse_model", stop)
    first = Evaluation(dataset="models/held_out.jsonl", shots=0, k=2)
    second = Evaluation(task="gsm8k_platinum", shots=5, k=2, max_tokens=96)
    record(checkpoint, evaluation=[first.model_dump(), second.model_dump()])
    refusal(checkpoint, "--source", GLM)
    refusal(checkpoint, f"--source {GLM} --task gsm8k_platinum --limit 9")
    refusal(checkpoint, f"--source {GLM} -k 1")
    assert seen[:2] == [first, second]
    assert seen[2] == second.model_copy(update={"limit": 9})
    assert [one.k for one in seen[3:]] == [1, 1]
    message = refusal(checkpoint, f"--source {GLM} --dataset hub")
    assert (
        "--dataset: belongs to one task, and the recipe lists several; got gsm8k, gsm8k_platinum."
        in message
    )
    record(checkpoint, evaluation=[first.model_dump(), first.model_dump()])
    assert (
        "recipe.evaluation must be as a recipe has it; got groups: must name each task once."
        in refusal(checkpoint)
    )


def test_the_table_of_several_tasks_has_their_recoveries_and_the_mean():
    fact = several(
        ("gsm8k_platinum", Answers(both=600, only_source=60, only_checkpoint=10, neither=330))
    )
    text = shown(fact)
    assert "…" not in text
    words = " ".join(text.split())
    assert "eval out/tiny.nvfp4: gsm8k_platinum" in words
    assert "68.99 % 68.92 % ± 1.27 99.89 % (98.93 to 100.85) 0.23 % / 0.23 %" in words, words
    assert " 66.00 % 61.00 % ± 1.54 92.42 % (" in words and " mean - - 96.16 % (" in words


def shown(fact: EvaluationFact) -> str:
    file = io.StringIO()
    judged = judge(gates=Gates(), check=None, serve=None, evaluation=fact)
    Console(file=file, width=80).print(*parts(fact, judged), sep="\n")
    return file.getvalue()


def test_the_table_says_what_was_measured_and_how():
    fact = evaluation(
        Answers(both=900, only_source=30, only_checkpoint=9, neither=380), switched=(40, 2)
    )
    text = shown(fact)
    assert "…" not in text, "nothing is cut at 80 columns"
    words = " ".join(text.split())
    share = 930 / 1319
    score = f"{100 * share:.2f} % ± 1.26"
    assert f"source {score} {score} 1,319 0.23 % (3) 0 " in words and "93.0 81.0 64.0 3.38" in words
    assert f"{100 * 947 / 1319:.2f} % ± 1.24" in words
    assert "beyond chance." in words
    assert "flexible-extract -1.59 ± 0.48 -2.52 to -0.66 900 30 9 380" in words, words
    assert "gsm8k " in words and "regression" in words
    assert (
        " by lm-eval 0.4.13 on openai/gsm8k, 8 shots, completions, at most 1024 tokens, greedy"
        in words
    )
