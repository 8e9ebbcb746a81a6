"""Every task on rows in its dataset's own form: what lm-eval itself would ask and score, from the same answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import nltk
import pytest
import task_rows
from keepmtp.recipes.protocol import Evaluation
from keepmtp.recipes.tasks import TASKS
from keepmtp.validate.evaluation.lm_eval_task import Questions, questions, scores
from lm_eval.api.model import LM
from lm_eval.evaluator import simple_evaluate
from task_rows import TASK_ROWS

# lm-eval's own name of the task, and the splits of its dataset that hold the questions and the shots.
REFERENCES = {
    "gsm8k": ("gsm8k", {"test", "train"}),
    "ifeval": ("ifeval", {"train"}),
    "gpqa_diamond": ("gpqa_diamond_cot_zeroshot", {"train"}),
    "math500": ("minerva_math500", {"test"}),
    "aime24": ("aime24", {"train"}),
    "aime25": ("aime25", {"test"}),
}


@pytest.fixture(autouse=True)
def punkt(tmp_path_factory, monkeypatch) -> Iterator[None]:
    """NLTK's data for telling sentences apart, with no word in it."""
    folder = tmp_path_factory.mktemp("nltk", numbered=True)
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (english / name).write_text("")
    monkeypatch.setattr(nltk.data, "path", [str(folder)])
    yield
    nltk.data.clear_cache()


def write(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(task: str, folder: Path, **protocol: Any) -> Questions:
    path = write(folder / f"{task}.jsonl", TASK_ROWS[task].rows)
    fixed = {"dataset": str(path), "shots": TASK_ROWS[task].shots, "repeats": 1}
    return questions(Evaluation(task=task, **(fixed | protocol)), runs_code=True)


def answers(found: Questions) -> dict[int, str]:
    return {item.number: task_rows.answer(found.protocol.task, item.prompt) for item in found.items}


class Answering(LM):
    """lm-eval's view of a model that gives the same answers."""

    def __init__(self, task: str) -> None:
        super().__init__()
        self.task = task
        self.prompts: list[str] = []

    tokenizer_name = ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return json.dumps(chat_history)

    def generate_until(self, requests: list) -> list[str]:
        self.prompts = [request.args[0] for request in requests]
        return [task_rows.answer(self.task, prompt) for prompt in self.prompts]

    def loglikelihood(self, requests: list) -> list:
        raise NotImplementedError

    loglikelihood_rolling = loglikelihood


def reference(task: str, path: Path, protocol: Evaluation, monkeypatch) -> tuple[dict, dict, Answering]:
    """simple_evaluate() of the task's own name; only its download is replaced, by the file."""
    name, splits = REFERENCES[task]
    own = datasets.load_dataset
    monkeypatch.setattr(
        "lm_eval.api.task.datasets.load_dataset",
        lambda **_: own("json", data_files=dict.fromkeys(splits, str(path)), cache_dir=path.parent / "cache"),
    )
    model = Answering(task)
    found: Any = simple_evaluate(
        model,
        tasks=[name],
        num_fewshot=protocol.shots,
        apply_chat_template=protocol.api == "chat",
        fewshot_as_multiturn=True,
        bootstrap_iters=10,
        fewshot_random_seed=protocol.seed,
        random_seed=protocol.seed,
    )
    return found["results"][name], found["samples"][name], model


@pytest.mark.parametrize("task", REFERENCES)
def test_prompts_and_scores_are_what_lm_eval_gives(task, tmp_path, monkeypatch):
    found = asked(task, tmp_path)
    facts, right = scores(found, answers(found))
    result, _, model = reference(task, tmp_path / f"{task}.jsonl", found.protocol, monkeypatch)
    if task not in ("gsm8k", "gpqa_diamond"):  # whose shots, and choices, are drawn
        assert [item.prompt for item in found.items] == model.prompts
    assert [fact.filter for fact in facts] == list(right) == list(TASKS[task].scores)
    for fact, (metric, name) in zip(facts, TASKS[task].scores.values(), strict=True):
        assert fact.value == pytest.approx(result[f"{metric},{name}"], abs=1e-12)
        assert fact.stderr == pytest.approx(result[f"{metric}_stderr,{name}"], abs=1e-12)
    assert right[TASKS[task].headline] == (True, False, False, True), "right, wrong, cut, right"
