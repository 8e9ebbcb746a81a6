"""Every task on rows in its dataset's own form: what lm-eval itself would ask and score, from the
same answers.
"""

import json
import logging
import re
import sys
from contextlib import suppress
from pathlib import Path
from statistics import stdev
from typing import Any

import datasets
import lm_eval.tasks
import nltk
import pytest
import task_rows
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.protocol import Evaluation
from keepmtp.recipes.tasks import TASKS
from keepmtp.validate.facts.paired import one_sided, paired
from keepmtp.validate.measure.lm_eval_task import Questions, questions, scores
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from task_rows import TASK_ROWS

ROOT = Path(__file__).parent.parent.parent.parent
SEED = 1234

# lm-eval's own name of the task, and the splits of its dataset that hold the questions and the
# shots.
REFERENCES = {
    "gsm8k": ("gsm8k", {"test", "train"}),
    "mmlu_pro": ("mmlu_pro", {"test", "validation"}),
    "ifeval": ("ifeval", {"train"}),
    "humaneval": ("humaneval_instruct", {"test"}),
    "gpqa_diamond": ("gpqa_diamond_cot_zeroshot", {"train"}),
    "math500": ("minerva_math500", {"test"}),
    "aime24": ("aime24", {"train"}),
    "aime25": ("aime25", {"test"}),
}
DRAWN = {"gpqa_diamond"}  # whose choices are in a drawn order


def punkt_in(folder: Path) -> Path:
    """NLTK's data for telling sentences apart, with no word in it."""
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (english / name).write_text("")
    return folder


@pytest.fixture(autouse=True)
def punkt(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(punkt_in(tmp_path_factory.mktemp("nltk")))])


def write(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(task: str, folder: Path, **protocol: Any) -> Questions:
    path = write(folder / f"{task}.jsonl", TASK_ROWS[task].rows)
    fixed = {"dataset": str(path), "shots": 1 if task == "mmlu_pro" else 0, "repeats": 1}
    return questions(Evaluation(task=task, **(fixed | protocol)), runs_code=True)


def answers(found: Questions) -> dict[int, str]:
    return {item.number: task_rows.answer(found.protocol.task, item.prompt) for item in found.items}


class Answering(LM):
    """lm-eval's view of a model that gives the same answers."""

    tokenizer_name = ""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, list[str]] = {}

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return json.dumps(chat_history)

    def generate_until(self, requests: list) -> list[str]:
        texts = []
        for request in requests:
            name = request.task_name
            task = next(task for task, (own, _) in REFERENCES.items() if name.startswith(own))
            self.prompts.setdefault(task, []).append(request.args[0])
            texts.append(task_rows.answer(task, request.args[0]))
        return texts

    def loglikelihood(self, requests: list) -> list:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


class _Trusting:
    """What `evaluate.load("code_eval")` would fetch from the Hub, without its safeguards: these
    programs are ours.
    """

    def compute(
        self, references: list[str], predictions: list[list[str]], k: list[int]
    ) -> tuple[dict, None]:
        right = []
        for test, (program,) in zip(references, predictions, strict=True):
            with suppress(AssertionError):
                exec(f"{program}\n{test}", {})
                right.append(True)
        return {"pass@1": len(right) / len(references)}, None


@pytest.fixture(scope="module")
def lm_evals(tmp_path_factory) -> dict[str, tuple[dict, list[str]]]:
    """simple_evaluate() by the tasks' own names; only its downloads are replaced, by the files.
    Result and prompts.
    """
    folder, model, found = tmp_path_factory.mktemp("reference"), Answering(), {}
    own = datasets.load_dataset

    def from_file(path: str, **_: Any) -> Any:
        task = next(task for task, row in TASKS.items() if row.hub == path)
        file = str(write(folder / f"{task}.jsonl", TASK_ROWS[task].rows))
        return own(
            "json",
            data_files=dict.fromkeys(REFERENCES[task][1], file),
            cache_dir=str(folder / "cache"),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.api.task.datasets.load_dataset", from_file)
        patch.setattr("evaluate.load", lambda _: _Trusting())
        patch.setattr(nltk.data, "path", [str(punkt_in(folder))])
        patch.setattr(logging.getLogger("lm_eval"), "level", logging.ERROR)
        sys.modules.pop("lm_eval.tasks.humaneval.utils", None)
        homes = {TASKS[task].lm_eval_file("chat").rpartition("/")[0] for task in REFERENCES}
        manager = TaskManager(
            include_path=[str(Path(lm_eval.tasks.__path__[0]) / home) for home in homes],
            include_defaults=False,
        )
        for api in ("completions", "chat"):
            names = {
                task: own
                for task, (own, _) in REFERENCES.items()
                if Evaluation(task=task).api == api
            }
            results: Any = simple_evaluate(
                model,
                tasks=list(names.values()),
                num_fewshot=0,
                apply_chat_template=api == "chat",
                fewshot_as_multiturn=True,
                bootstrap_iters=10,
                random_seed=SEED,
                task_manager=manager,
                confirm_run_unsafe_code=True,
            )
            found |= {
                task: (results["results"][name], model.prompts[task])
                for task, name in names.items()
            }
        sys.modules.pop("lm_eval.tasks.humaneval.utils", None)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("task", REFERENCES)
def test_prompts_and_scores_are_what_lm_eval_gives(task, tmp_path, lm_evals):
    found = asked(task, tmp_path, shots=0)
    facts, right = scores(found, answers(found))
    result, prompts = lm_evals[task]
    if task == "mmlu_pro":
        prompts = [
            prompt for prompt in prompts if "are shown in" not in prompt
        ]  # a file of ours has its shots, too
    assert task in DRAWN or [item.prompt for item in found.items] == prompts
    assert [fact.filter for fact in facts] == list(right) == list(TASKS[task].scores)
    if task != "mmlu_pro":
        for fact, (metric, name) in zip(facts, TASKS[task].scores.values(), strict=True):
            assert fact.value == pytest.approx(result[f"{metric},{name}"], abs=1e-12)
            assert fact.stderr == pytest.approx(result[f"{metric}_stderr,{name}"], abs=1e-12)
        assert right[TASKS[task].headline] == (True, False, False, True), "right, wrong, cut, right"


def test_the_subjects_of_mmlu_pro_are_one_task(tmp_path, lm_evals):
    """Weighed by their questions, as lm-eval's group is."""
    rows = [row | {"cot_content": ""} for row in TASK_ROWS["mmlu_pro"].rows]
    path = write(tmp_path / "all.jsonl", rows)
    found = questions(Evaluation(task="mmlu_pro", dataset=str(path), shots=0))
    facts, right = scores(found, answers(found))
    assert facts[0].value == pytest.approx(
        lm_evals["mmlu_pro"][0]["exact_match,custom-extract"], abs=1e-12
    )
    assert len(right["custom-extract"]) == 3 * 14 and set(right["custom-extract"]) == {True, False}


def test_a_subject_has_its_own_shots(tmp_path):
    found = asked("mmlu_pro", tmp_path)
    assert len(found.items) == 28 and len(found.tasks) == 14
    for item in found.items:
        subject = task_rows.MMLU_PRO_SUBJECTS[item.number // 2]
        assert item.prompt.startswith(
            f"The following are multiple choice questions (with answers) about {subject}".replace(
                "_", " "
            )
        )
        assert item.prompt.count("are shown in") == 1 and f"shown in {subject}?" in item.prompt
    limited = asked("mmlu_pro", tmp_path, limit=16)
    assert len(limited.items) == 16 and len(limited.tasks) == 14, "in turn from each subject"
    assert {item.prompt for item in limited.items} < {item.prompt for item in found.items}


def test_runs_that_are_sampled_pair_by_question(tmp_path):
    found = asked("aime24", tmp_path, repeats=3)
    assert [(item.run, item.number) for item in found.items[3:6]] == [(0, 3), (1, 4), (1, 5)]
    assert len(found.items) == 12 and found.num_asked == 4
    texts = {
        item.number: rf"\boxed{{{TASK_ROWS['aime24'].rows[item.number % 4]['Answer']}}}"
        for item in found.items
    }
    texts |= {0: "", 4: "", 9: ""}
    facts, right = scores(found, texts)
    assert facts[0].value == pytest.approx(9 / 12) and sum(right["exact_match"]) == 9
    assert facts[0].stderr == pytest.approx(stdev([1 / 3, 2 / 3, 1, 1]) / 2), (
        "runs of a question are no further questions"
    )
    pair = paired("exact_match", right["exact_match"], (True,) * 12, runs=3)
    assert (pair.both, pair.only_source, pair.only_checkpoint, pair.neither) == (2, 0, 2, 0)
    assert pair.difference == pytest.approx(3 / 12) and pair.low < 3 / 12 < pair.high
    low, high = one_sided(pair, 0.95)
    assert pair.low < low < 3 / 12 < high < pair.high


def test_a_continued_answer_ends_with_the_assistants_turn(tmp_path):
    """HumanEval's instruct form begins the answer; the server is asked to go on with it."""
    turns = asked("humaneval", tmp_path).items[0].sent
    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    assert turns[-1]["content"].startswith(
        "Here is the completed function:\n```python\ndef plus_0(a):"
    )
    text = asked("humaneval", tmp_path, api="completions").items[0]
    assert text.prompt.startswith("def plus_0(a):") and text.stop[:2] == ("\nclass", "\ndef")


def test_the_documentation_lists_every_task_as_it_is_asked():
    text = (ROOT / "docs" / "tasks.md").read_text()
    asks, _, rows = text.partition("| task | fields of a row |")
    for task, row in TASKS.items():
        line = next(line for line in asks.splitlines() if line.startswith(f"| {task} | "))
        protocol = Evaluation(task=task)
        sub_task = {"mmlu_pro": "SUBJECT"}.get(task, "")
        words = [row.lm_eval_file(protocol.api, sub_task), row.hub, row.headline]
        words += [
            {"chat": "chat", "completions": "text"}[protocol.api],
            f"{protocol.max_tokens:,} tokens",
        ]
        words += [f"{protocol.shots} shots"] if protocol.shots else []
        words += [f"{protocol.repeats} run"] if protocol.temperature else []
        assert [word for word in words if word not in line] == [], line
        assert protocol.temperature in (0.0, 0.6) and ("sampled" in line) == bool(
            protocol.temperature
        )
        fields = next(
            line
            for line in rows.splitlines()
            if task in re.findall(r"\w+", line.partition(" | ")[0])
        )
        assert [field for field in row.fields if field not in fields] == []


# --- what is refused before a server is started ---------------------------------------------------


def refusal(task: str, folder: Path, rows: Any = None, **protocol: Any) -> str:
    path = write(folder / "rows.jsonl", TASK_ROWS[task].rows if rows is None else rows)
    with pytest.raises(KeepMTPError) as caught:
        questions(Evaluation(task=task, **({"dataset": str(path)} | protocol)))
    assert "; got " in str(caught.value)
    return str(caught.value)


def test_code_runs_only_where_the_command_line_says_so(tmp_path):
    assert "no --run-model-code. Add --run-model-code" in refusal("humaneval", tmp_path)


@pytest.mark.parametrize(
    ("task", "field", "value", "says"),
    [
        (
            "mmlu_pro",
            "category",
            "alchemy",
            "category must be a sub-task of lm-eval's mmlu_pro; got 'alchemy'",
        ),
        ("mmlu_pro", "category", "../gsm8k", "category must be a sub-task of lm-eval's mmlu_pro"),
        ("mmlu_pro", "answer", "K", ":1: answer must be a letter from A to J; got 'K'"),
        (
            "ifeval",
            "instruction_id_list",
            ["no:such"],
            "question 1 of ifeval: must be one that lm-eval can score",
        ),
        ("gpqa_diamond", "Correct Answer", "", ":1: Correct Answer must be a text; got ''"),
        ("math500", "solution", "2", r":1: solution must have its answer in \boxed{...}; got '2'"),
        ("aime24", "Answer", 1.5, ":1: Answer must be a text or a whole number; got 1.5"),
        (
            "ifeval",
            "key",
            10**30,
            "each field must have one type in all rows, and numbers of 64 bits; got",
        ),
        (
            "aime24",
            "Answer",
            "x" * 9,
            "each field must have one type in all rows, and numbers of 64 bits; got",
        ),
        (
            "ifeval",
            "instruction_id_list",
            [],
            "instruction_id_list must be a list of texts; got []",
        ),
    ],
)
def test_a_row_that_lm_eval_cannot_use_is_named(task, field, value, says, tmp_path):
    first, *others = TASK_ROWS[task].rows
    assert says in refusal(task, tmp_path, [{**first, field: value}, *others], shots=0)


def test_shots_that_a_task_has_not(tmp_path):
    assert "evaluation.shots: math500 has 4 examples at most; got 5" in refusal(
        "math500", tmp_path, shots=5
    )
    assert "evaluation.shots: mmlu_pro has 1 examples of biology at most; got 2" in refusal(
        "mmlu_pro", tmp_path, shots=2
    )


def test_what_a_task_needs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert "needs NLTK's punkt_tab" in refusal("ifeval", tmp_path)
    for name in ("math_verify", "lm_eval.tasks.minerva_math.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    message = refusal("math500", tmp_path)
    assert "task math500: needs keepmtp's `evaluate` extra; got `sympy`, `math_verify`" in message


def test_a_parquet_file_holds_the_same_rows(tmp_path):
    rows, path = TASK_ROWS["aime24"].rows, tmp_path / "rows.parquet"
    datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(path)
    found = questions(Evaluation(task="aime24", dataset=str(path)))
    assert found.dataset_sha256 == asked("aime24", tmp_path).dataset_sha256
    path.write_text("[1")
    with pytest.raises(KeepMTPError, match=rf"{path}: must be a Parquet file; got "):
        questions(Evaluation(task="aime24", dataset=str(path)))
