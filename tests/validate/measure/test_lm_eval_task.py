"""Every task on rows in its dataset's own form: what lm-eval itself would ask and score, from the
same answers; and which datasets are refused.
"""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import stdev
from typing import Any

import datasets
import datasets.config
import lm_eval.tasks
import nltk
import pytest
import task_rows
from data_files import table
from hub import Fault, serving
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.protocol import Evaluation
from keepmtp.recipes.tasks import TASKS
from keepmtp.validate.facts.paired import one_sided, paired
from keepmtp.validate.measure.lm_eval_task import Questions, Recorded, questions, scores
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from task_rows import TASK_ROWS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SEED = 1234
ROWS = [
    {
        "question": f"Tom has {n} coins and finds {n + 1} more. How many?",
        "answer": f"It is that.\n#### {2 * n + 1}",
    }
    for n in range(12)
]

# lm-eval's folder of each task, and its name there.
REFERENCES = {task: TASKS[task].file.rpartition("/")[::2] for task in TASK_ROWS}
DRAWN = {"gpqa_diamond"}  # whose choices are in a drawn order


@pytest.fixture(scope="module", autouse=True)
def punkt(tmp_path_factory) -> Iterator[None]:
    """NLTK's data for telling sentences apart, with no word in it."""
    folder = tmp_path_factory.mktemp("nltk")
    english = folder / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (english / name).touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [str(folder)])
        yield


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def asked(
    task: str,
    folder: Path,
    rows: list[Any] | None = None,
    **protocol: Any,
) -> Questions:
    path = write(folder / f"{task}.jsonl", TASK_ROWS[task]["rows"] if rows is None else rows)
    fixed = {"dataset": str(path), "shots": 1 if task == "mmlu_pro" else 0, "repeats": 1}
    return questions(Evaluation(task=task, **(fixed | protocol)))


def answers(found: Questions) -> list[str]:
    return [task_rows.answer(found.protocol.task, item.prompt) for item in found.items]


class Answering(Recorded):
    """lm-eval's view of a model that gives the same answers."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: dict[str, list[str]] = {}

    def generate_until(self, requests: list) -> list[str]:
        texts = []
        for request in requests:
            name = request.task_name
            task = next(task for task, (_, own) in REFERENCES.items() if name.startswith(own))
            self.prompts.setdefault(task, []).append(request.args[0])
            texts.append(task_rows.answer(task, request.args[0]))
        return texts


@pytest.fixture(scope="module")
def lm_evals(tmp_path_factory, punkt) -> dict[str, tuple[dict, list[str]]]:
    """simple_evaluate() by the tasks' own names; only its downloads are replaced, by the files.
    Result and prompts.
    """
    folder, model, found = tmp_path_factory.mktemp("reference"), Answering(), {}
    own = datasets.load_dataset

    def from_file(path: str, **_: Any) -> Any:
        task = next(task for task, row in TASKS.items() if row.hub == path)
        file = str(write(folder / f"{task}.jsonl", TASK_ROWS[task]["rows"]))
        return own(
            "json",
            data_files=dict.fromkeys(("train", "validation", "test"), file),
            cache_dir=str(folder / "cache"),
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.api.task.datasets.load_dataset", from_file)
        patch.setattr(logging.getLogger("lm_eval"), "level", logging.ERROR)
        homes = {home for home, _ in REFERENCES.values()}
        manager = TaskManager(
            include_path=[str(Path(lm_eval.tasks.__path__[0]) / home) for home in homes],
            include_defaults=False,
        )
        for api in ("completions", "chat"):
            names = {
                task: own
                for task, (_, own) in REFERENCES.items()
                if Evaluation(task=task).api == api
            }
            results = simple_evaluate(
                model,
                tasks=list(names.values()),
                num_fewshot=0,
                apply_chat_template=api == "chat",
                fewshot_as_multiturn=True,
                bootstrap_iters=10,
                random_seed=SEED,
                task_manager=manager,
            )
            found |= {
                task: (results["results"][name], model.prompts[task])
                for task, name in names.items()
            }
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("task", REFERENCES)
def test_prompts_and_scores_are_what_lm_eval_gives(task, tmp_path, lm_evals):
    found = asked(task, tmp_path, shots=0)
    facts, right = scores(found, answers(found))
    result, prompts = lm_evals[task]
    if task == "mmlu_pro":  # a file of ours has its shots, too
        prompts = [prompt for prompt in prompts if "are shown in" not in prompt]
    assert task in DRAWN or [item.prompt for item in found.items] == prompts
    assert [fact.filter for fact in facts] == list(right) == list(TASKS[task].scores)
    if task != "mmlu_pro":
        for fact, (metric, name) in zip(facts, TASKS[task].scores.values(), strict=True):
            assert fact.value == pytest.approx(result[f"{metric},{name}"], abs=1e-12)
            assert fact.stderr == pytest.approx(result[f"{metric}_stderr,{name}"], abs=1e-12)
        assert right[TASKS[task].headline] == [True, False, False, True], "right, wrong, cut, right"


def test_the_subjects_of_mmlu_pro_are_one_task(tmp_path, lm_evals):
    """Weighed by their questions, as lm-eval's group is."""
    rows = [row | {"cot_content": ""} for row in TASK_ROWS["mmlu_pro"]["rows"]]
    found = asked("mmlu_pro", tmp_path, rows, shots=0)
    facts, right = scores(found, answers(found))
    wanted = lm_evals["mmlu_pro"][0]["exact_match,custom-extract"]
    assert facts[0].value == pytest.approx(wanted, abs=1e-12)
    assert len(right["custom-extract"]) == 3 * 14 and set(right["custom-extract"]) == {True, False}


def test_a_subject_has_its_own_shots(tmp_path):
    found = asked("mmlu_pro", tmp_path)
    assert len(found.items) == 28 and len(found.tasks) == 14
    for number, item in enumerate(found.items):
        subject = task_rows.MMLU_PRO_SUBJECTS[number // 2]
        assert f"questions (with answers) about {subject.replace('_', ' ')}" in item.prompt
        assert item.prompt.count("are shown in") == 1 and f"shown in {subject}?" in item.prompt
    limited = asked("mmlu_pro", tmp_path, limit=16)
    assert len(limited.items) == 16 and len(limited.tasks) == 14, "in turn from each subject"
    assert {item.prompt for item in limited.items} < {item.prompt for item in found.items}


def test_runs_that_are_sampled_pair_by_question(tmp_path):
    found = asked("aime24", tmp_path, repeats=3)
    assert len(found.items) == 4 and found.num == 12
    texts = [rf"\boxed{{{row['Answer']}}}" for row in TASK_ROWS["aime24"]["rows"]] * 3
    texts[0] = texts[4] = texts[9] = ""
    facts, right = scores(found, texts)
    assert facts[0].value == pytest.approx(9 / 12) and sum(right["exact_match"]) == 9
    assert facts[0].stderr == pytest.approx(stdev([1 / 3, 2 / 3, 1, 1]) / 2), (
        "runs of a question are no further questions"
    )
    pair = paired("exact_match", right["exact_match"], (True,) * 12, runs=3)
    assert (pair.num, pair.only_source, pair.only_checkpoint) == (4, 0, 2)
    assert pair.difference == pytest.approx(3 / 12)
    low, high = one_sided(pair, 0.95)
    assert low < 3 / 12 < high


def test_the_documentation_lists_every_task_as_it_is_asked():
    text = (ROOT / "docs" / "eval.md").read_text()
    for task, row in TASKS.items():
        protocol = Evaluation(task=task)
        asked = [f"{protocol.shots} shots"] * bool(protocol.shots)
        asked += [{"chat": "chat", "completions": "text"}[protocol.api]]
        asked += [f"{protocol.max_tokens:,} tokens"]
        assert protocol.temperature in (0.0, 0.6)
        if protocol.temperature:
            asked += [f"{protocol.repeats} run{'s' * (protocol.repeats > 1)} sampled"]
        assert (
            f"| {task} | {row.file} | {row.hub} | {row.headline} | {', '.join(asked)} |\n" in text
        )


# --- gsm8k ----------------------------------------------------------------------------------------


def test_shots_come_from_other_rows_by_the_seed(tmp_path):
    one, same, other = (asked("gsm8k", tmp_path, ROWS, shots=8, seed=seed) for seed in (1, 1, 2))
    prompts = [[item.prompt for item in each.items] for each in (one, same, other)]
    assert prompts[0] == prompts[1] != prompts[2]
    for item, row in zip(one.items, ROWS, strict=True):
        assert item.prompt.count("Question: ") == 9 and item.prompt.count("#### ") == 8
        assert item.prompt.count(row["question"]) == 1, "no question is its own example"
    assert one.dataset_sha256 == other.dataset_sha256


def test_a_limit_asks_the_first_the_same_way(tmp_path):
    whole, first = (
        asked("gsm8k", tmp_path, ROWS, shots=3),
        asked("gsm8k", tmp_path, ROWS, shots=3, limit=4),
    )
    assert first.items == whole.items[:4] and first.dataset_sha256 != whole.dataset_sha256


@pytest.mark.parametrize("protocol", [{"shots": 4}, {"shots": 4, "api": "chat"}, {"limit": 6}])
def test_shots_and_limits_change_no_score(tmp_path, protocol, capfd):
    """Right; right for one filter only; wrong; nothing. The shots are drawn anew each time."""
    found = asked("gsm8k", tmp_path, ROWS, **protocol)
    texts = [f" so it is {2 * n + 1}.\n#### {2 * n + 1}" for n in range(len(found.items))]
    texts[1:4] = " the answer is 3", "#### 77", ""
    facts, right = scores(found, texts)
    wrong = {"strict-match": {1, 2, 3}, "flexible-extract": {2, 3}}
    assert wrong == {
        name: {n for n, ok in enumerate(values) if not ok} for name, values in right.items()
    }
    assert scores(found, texts)[0] == facts
    printed = capfd.readouterr()
    assert printed.out == printed.err == "", "lm-eval's bars and warnings"


# --- what is refused before a server is started ---------------------------------------------------


def refusal(task: str, folder: Path, *rows: list[Any], **protocol: Any) -> str:
    with pytest.raises(KeepMTPError) as caught:
        asked(task, folder, *rows, **protocol)
    message = str(caught.value)
    assert "; got " in message and message.endswith("."), message
    return message


def test_a_dataset_that_cannot_be_used(tmp_path):
    none = str(tmp_path / "none.jsonl")
    assert "must be a file; got no such file" in refusal("gsm8k", tmp_path, dataset=none)
    says = "rows.jsonl: must hold rows that lm-eval can ask and score; got "
    assert says.removeprefix("rows") in refusal("gsm8k", tmp_path, [])
    assert "must be asked two questions or more" in refusal("gsm8k", tmp_path, ROWS[:1])
    assert "Sample larger than population" in refusal("gsm8k", tmp_path, ROWS, shots=12)
    assert asked("gsm8k", tmp_path, ROWS, shots=11).items
    assert "samples requested exceeds the 4 that are" in refusal("math500", tmp_path, shots=5)
    assert "samples requested exceeds the 1 that are" in refusal("mmlu_pro", tmp_path, shots=2)
    message = refusal("aime24", tmp_path, shots=1)
    assert "evaluation.shots: lm-eval asks aime24 without examples; got 1." in message


@pytest.mark.parametrize("task, row, says", table("validate/measure/refused_rows"))
def test_a_row_that_lm_eval_cannot_use_is_named(task, row, says, tmp_path):
    """A line as it is, or fields of a good row."""
    first, *others = TASK_ROWS[task]["rows"]
    changed = row if isinstance(row, str) else first | row
    assert says in refusal(task, tmp_path, [changed, *others], shots=0)


def test_what_a_task_needs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    assert "needs NLTK's punkt_tab" in refusal("ifeval", tmp_path)
    for name in ("math_verify", "lm_eval.tasks.minerva_math.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "math_verify", None)
    message = refusal("math500", tmp_path)
    assert "task math500: needs keepmtp's `evaluate` extra; got `sympy`, `math_verify`" in message


def test_a_parquet_file_holds_the_same_rows(tmp_path):
    rows, path = TASK_ROWS["aime24"]["rows"], tmp_path / "rows.parquet"
    datasets.Dataset.from_list([dict(row) for row in rows]).to_parquet(path)
    found = questions(Evaluation(task="aime24", dataset=str(path)))
    assert found.dataset_sha256 == asked("aime24", tmp_path).dataset_sha256
    path.write_text("[1")
    with pytest.raises(KeepMTPError, match=rf"{path}: must hold rows .*; got ArrowInvalid: "):
        questions(Evaluation(task="aime24", dataset=str(path)))


# --- from the Hub ---------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch, hub_at):
    """The tasks' own datasets on loopback, with a train and a test split."""
    folder = tmp_path / "data"
    (folder / "main").mkdir(parents=True)
    write(folder / "main" / "test.jsonl", ROWS[:4])
    write(folder / "main" / "train.jsonl", ROWS[4:])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: "
        "main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )
    with serving(tmp_path / "hub") as served:
        hub_at(served.endpoint)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", served.endpoint)
        files = served.endpoint + "/datasets/{repo_id}/resolve/{revision}/{path}"
        monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", files)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        for task in ("gsm8k", "gsm8k_platinum"):
            served.mirror(f"datasets/{TASKS[task].hub}", folder)
        yield served


def test_the_tasks_own_dataset_is_read_from_the_hub(hub):
    found = questions(Evaluation(shots=3))
    assert len(found.items) == 4
    for item in found.items:
        shown = item.prompt.rpartition("Question: ")[0]
        assert shown.count("Question: ") == 3
        assert not any(row["question"] in shown for row in ROWS[:4]), "from the train split"
    facts, _ = scores(found, [f"#### {2 * n + 1}" for n in range(4)])
    assert {fact.value for fact in facts} == {1.0}


def test_platinum_draws_its_shots_from_the_questions(hub):
    found = questions(Evaluation(task="gsm8k_platinum", shots=3))
    assert len(found.items) == 4
    for item, row in zip(found.items, ROWS, strict=False):
        assert item.prompt.count(row["question"]) == 1


def test_a_gated_dataset_says_what_to_do(hub):
    """The Hub's own answer to who has not accepted the terms."""
    words = {
        "X-Error-Code": "GatedRepo",
        "X-Error-Message": "Access to dataset openai/gsm8k is restricted.",
    }
    hub.faults.append(Fault(to="/datasets/openai/gsm8k", status=403, times=99, headers=words))
    cure = "accept its terms there and set HF_TOKEN, or name a file"
    with pytest.raises(KeepMTPError, match=f"openai/gsm8k: must hold rows .*; got .*{cure}"):
        questions(Evaluation(shots=3))


def test_a_revision_that_is_not_there(hub):
    assert questions(Evaluation(shots=3, dataset_revision="main")).items
    with pytest.raises(KeepMTPError, match=r"openai/gsm8k: must hold rows .*; got .*no-such"):
        questions(Evaluation(shots=3, dataset_revision="no-such"))
