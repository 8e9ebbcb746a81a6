"""lm-evaluation-harness at both ends: what it asks, how it reads answers, and which datasets are
refused.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hub import Fault, serving
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.protocol import Evaluation
from keepmtp.recipes.tasks import TASKS
from keepmtp.validate.measure.lm_eval_task import Questions, questions, scores

ROWS = [
    {
        "question": f"Tom has {n} coins and finds {n + 1} more. How many?",
        "answer": f"It is that.\n#### {2 * n + 1}",
    }
    for n in range(12)
]


def write(path: Path, rows: list) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "rows.jsonl", ROWS)


def asked(file: Path, **protocol) -> Questions:
    return questions(Evaluation(**{"dataset": str(file), "shots": 0, **protocol}))


def refusal(file: Path, **protocol) -> str:
    with pytest.raises(KeepMTPError) as caught:
        asked(file, **protocol)
    message = str(caught.value)
    assert "; got " in message and message.endswith("."), message
    return message


def test_prompts_are_lm_evals(file):
    found = asked(file)
    assert [item.number for item in found.items] == list(range(12))
    assert found.items[3].prompt == f"Question: {ROWS[3]['question']}\nAnswer:"
    assert found.items[3].stop == ("Question:", "</s>", "<|im_end|>")
    assert len({item.sha256 for item in found.items}) == 12


def test_shots_come_from_other_rows_by_the_seed(file):
    one, same, other = (asked(file, shots=8, seed=seed) for seed in (1, 1, 2))
    prompts = [[item.prompt for item in each.items] for each in (one, same, other)]
    assert prompts[0] == prompts[1] != prompts[2]
    for item, row in zip(one.items, ROWS, strict=True):
        assert item.prompt.count("Question: ") == 9 and item.prompt.count("#### ") == 8
        assert item.prompt.count(row["question"]) == 1, "no question is its own example"
    assert one.dataset_sha256 == other.dataset_sha256


def test_a_limit_asks_the_first_the_same_way(file):
    whole, first = asked(file, shots=3), asked(file, shots=3, limit=4)
    assert first.items == whole.items[:4] and first.dataset_sha256 != whole.dataset_sha256


@pytest.mark.parametrize("task", ["gsm8k", "gsm8k_platinum"])
@pytest.mark.parametrize("protocol", [{}, {"shots": 4}, {"shots": 4, "api": "chat"}, {"limit": 6}])
def test_scores_are_lm_evals(file, task, protocol, capfd):
    """Right; right for one filter only; wrong; nothing."""
    found = asked(file, task=task, **protocol)
    texts = {n: f" so it is {2 * n + 1}.\n#### {2 * n + 1}" for n in range(len(found.items))}
    texts |= {1: " the answer is 3", 2: "#### 77", 3: ""}
    facts, right = scores(found, texts)
    assert list(right) == ["strict-match", "flexible-extract"] == [fact.filter for fact in facts]
    wrong = {"strict-match": {1, 2, 3}, "flexible-extract": {2, 3}}
    for fact in facts:
        assert {n for n, ok in enumerate(right[fact.filter]) if not ok} == wrong[fact.filter]
        share = sum(right[fact.filter]) / len(found.items)
        assert fact.value == pytest.approx(share) and fact.stderr == pytest.approx(
            (share * (1 - share) / (len(found.items) - 1)) ** 0.5
        )
    again, _ = scores(found, texts)
    assert again == facts, "the shots are drawn anew, and are the same"
    printed = capfd.readouterr()
    assert printed.out == printed.err == "", "lm-eval's bars and warnings"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "How many?"}, ":2: must have the field answer; got question."),
        (
            {"problem": "How many?", "answer": "#### 1"},
            ":2: must have the field question; got problem, answer.",
        ),
        (
            {"question": "How many?", "answer": 12},
            ':2: answer must end with "#### " and a number; got 12.',
        ),
        ({"question": " ", "answer": "#### 1"}, ":2: question must be a text; got ' '."),
        (
            {"question": "How many?", "answer": "12"},
            ":2: answer must end with \"#### \" and a number; got '12'.",
        ),
        (
            {"question": "How many?", "answer": "#### 12 "},
            ':2: answer must end with "#### " and a number',
        ),
        (
            {"question": "How many?", "answer": "#### twelve"},
            ':2: answer must end with "#### " and a number',
        ),
        (["How many?", "#### 1"], ":2: must be an object with question and answer"),
        ('{"question": "How', ":2: must be JSON; got Unterminated string"),
        ('{"question": ' + "[" * 9999, ":2: values must be at most 64 levels deep"),
        ('{"question": ' + "[" * 99 + "]" * 99 + "}", ":2: values must be at most 64 levels deep"),
        (
            {"question": "\ud800", "answer": "#### 1"},
            ":2: every character must be one that UTF-8 can write",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, says):
    path = write(tmp_path / "rows.jsonl", [ROWS[0], row, ROWS[1]])
    assert f"{path}{says}" in refusal(path)


@pytest.mark.parametrize("answer", ["#### 1,200", "#### -3", "a\n#### $5.50", "#### 7."])
def test_answers_that_gsm8k_has(tmp_path, answer):
    path = write(tmp_path / "rows.jsonl", [ROWS[0], {"question": "How many?", "answer": answer}])
    found = asked(path)
    _, right = scores(found, {0: "#### 1", 1: f" so it is\n{answer.rpartition(chr(10))[2]}"})
    assert right["flexible-extract"] == (True, True)


def test_a_dataset_that_cannot_be_used(tmp_path, file):
    assert "must be a file; got no such file" in refusal(tmp_path / "none.jsonl")
    assert "must hold questions; got none" in refusal(write(tmp_path / "empty.jsonl", []))
    assert "must be asked two questions or more" in refusal(write(tmp_path / "one.jsonl", ROWS[:1]))
    message = refusal(file, shots=12)
    assert (
        "evaluation.shots: gsm8k has 11 examples at most; got 12. Use --shots 11, or a longer "
        "dataset"
    ) in message
    assert asked(file, shots=11).items


# --- from the Hub ---------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch, hub_at):
    """org/data on loopback as the task's own dataset, with a train and a test split."""
    import datasets.config

    folder = tmp_path / "data"
    (folder / "main").mkdir(parents=True)
    write(folder / "main" / "test.jsonl", ROWS[:4])
    write(folder / "main" / "train.jsonl", ROWS[4:])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: "
        "main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    for task in ("gsm8k", "gsm8k_platinum"):
        monkeypatch.setitem(TASKS, task, replace(TASKS[task], hub="org/data"))
    with serving(tmp_path / "hub") as served:
        hub_at(served.endpoint)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", served.endpoint)
        files = served.endpoint + "/datasets/{repo_id}/resolve/{revision}/{path}"
        monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", files)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        served.mirror("datasets/org/data", folder)
        yield served


def test_the_tasks_own_dataset_is_read_from_the_hub(hub):
    found = questions(Evaluation(shots=3))
    assert len(found.items) == 4 and all(
        item.prompt.count("Question: ") == 4 for item in found.items
    )
    shown = [item.prompt.rpartition("Question: ")[0] for item in found.items]
    assert not any(row["question"] in text for row in ROWS[:4] for text in shown), (
        "from the train split"
    )
    facts, _ = scores(found, {n: f"#### {2 * n + 1}" for n in range(4)})
    assert {fact.value for fact in facts} == {1.0}


def test_platinum_draws_its_shots_from_the_questions(hub):
    found = questions(Evaluation(task="gsm8k_platinum", shots=3))
    assert len(found.items) == 4 and all(
        item.prompt.count(ROWS[item.number]["question"]) == 1 for item in found.items
    )


def test_a_hub_dataset_without_the_fields(hub):
    rows = json.dumps({"question": "How many?", "solution": "1"}) + "\n"
    hub.commit(
        "datasets/org/data",
        {f"main/{split}.jsonl": 4 * rows.encode() for split in ("train", "test")},
    )
    with pytest.raises(
        KeepMTPError,
        match="org/data test row 0: must have the field answer; got question, solution",
    ):
        questions(Evaluation(shots=3))


def test_a_gated_dataset_says_what_to_do(hub):
    """The Hub's own answer to who has not accepted the terms."""
    words = {
        "X-Error-Code": "GatedRepo",
        "X-Error-Message": "Access to dataset org/data is restricted.",
    }
    hub.faults.append(Fault(to="/datasets/org/data", status=403, times=99, headers=words))
    with pytest.raises(KeepMTPError) as caught:
        questions(Evaluation(shots=3))
    message = str(caught.value)
    assert message.startswith("org/data: must be a dataset that can be read; got ")
    assert "Accept its terms on the Hub and set HF_TOKEN" in message
    assert "name a file with the fields question and answer" in message


def test_an_absent_dataset_says_what_to_do(hub, monkeypatch):
    monkeypatch.setitem(TASKS, "gsm8k", replace(TASKS["gsm8k"], hub="org/none"))
    with pytest.raises(KeepMTPError) as caught:
        questions(Evaluation(shots=3))
    message = str(caught.value)
    assert message.startswith("org/none: must be a dataset that can be read; got ")
    assert "Correct evaluation.dataset_revision, or name a file" in message
