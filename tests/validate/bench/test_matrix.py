"""What is asked for a speed matrix, and what is measured already is not measured again."""

import json
from pathlib import Path

import pytest
from benches import repetition
from keepmtp.checkpoints.files import held
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import KeepMTPError, RecipeError
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from keepmtp.validate.measure import bench as matrix
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.store import BenchFile, Measured, Sitting
from keepmtp.validate.measure.texts import read_prompts, texts
from stub_vllm import stub_vllm

GLM = Path(__file__).parents[3] / "models" / "tiny-glm4-moe"


@pytest.fixture
def vllm(monkeypatch, tmp_path) -> VLLM:
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path)))
    return find_vllm()


def plan(**changes) -> matrix.BenchPlan:
    asked = {"ks": (0, 1), "concurrency": (1, 4), "output_tokens": 64, "repeat": 2, "requests": 8}
    return matrix.BenchPlan(**(asked | {"prompts": read_prompts(None), "seed": 0} | changes))


def model(role) -> Model:
    return Model(role=role, source=open_source(GLM), identity=identify(GLM))


def measured(setup: Setup, asked: matrix.BenchPlan, role: str, rate: float) -> BenchFile:
    """The whole matrix, of so many tokens a second at k=0."""
    lines = matrix.open_matrix(model(role), asked, setup)
    lines.add(Sitting(sitting=1, as_served="native", reason="", seconds=1.0))
    for k in asked.ks:
        for place in asked.places(k):
            found = repetition(k, rate * (1 + k), number=place.number)
            lines.add(Measured(k=k, concurrency=place.concurrency, repetition=found))
    return lines


def test_source_and_checkpoint_are_read_from_what_is_there(vllm, tmp_path):
    asked, setup = plan(), Setup(vllm=vllm, out=tmp_path / "out")
    for role, rate in (("source", 100.0), ("checkpoint", 300.0)):
        measured(setup, asked, role, rate)
    fact = matrix.bench(model("checkpoint"), model("source"), asked, setup=setup)
    assert [each.role for each in fact.benched] == ["source", "checkpoint"]
    for benched, rate in zip(fact.benched, (100.0, 300.0), strict=True):
        cells = [(cell.concurrency, cell.k) for cell in benched.cells]
        assert cells == [(1, 0), (1, 1), (4, 0), (4, 1)]
        assert all(len(cell.repetitions) == 2 for cell in benched.cells)
        rates = [cell.tokens_per_second for cell in benched.cells]
        assert rates == pytest.approx([rate, 2 * rate] * 2)
        assert [row.k for row in benched.recommended] == [1, 1]
    fewer = matrix.bench(model("checkpoint"), None, plan(ks=(1,)), setup=setup)
    assert fewer.source is None and {cell.k for cell in fewer.checkpoint.cells} == {1}
    assert not (tmp_path / "out" / "logs").exists(), "no server was started"


def test_other_requests_are_another_matrix_and_a_further_k_is_none(vllm, tmp_path):
    setup = Setup(vllm=vllm, out=tmp_path / "out")
    kept = measured(setup, plan(), "checkpoint", 100.0)
    other = matrix.open_matrix(model("checkpoint"), plan(output_tokens=32), setup)
    assert not other.lines
    again = matrix.open_matrix(model("checkpoint"), plan(ks=(0, 1, 2, 3)), setup)
    assert again.lines == kept.lines


def test_one_run_at_a_time(vllm, tmp_path):
    setup = Setup(vllm=vllm, out=tmp_path / "out")
    says = "only one run may measure into a folder"
    with held(setup.out, "x"), pytest.raises(RecipeError, match=says):
        matrix.bench(model("checkpoint"), None, plan(), setup=setup)


def test_a_template_of_the_users_words_asks_messages():
    forms = [matrix.form_of(open_source(GLM), words) for words in ((), ("--chat-template=x",))]
    assert forms == ["completions", "chat"]


# --- prompts --------------------------------------------------------------------------------------

USER = {"role": "user", "content": "Why is the sky blue?"}
# As SPEED-Bench's prepare.py writes its rows, and as the Hub has them.
SPEED_BENCH = {"category": "coding", "messages": [USER, {"role": "user", "content": "Shorter."}]}
ON_THE_HUB = {"category": "coding", "sub_category": "", "turns": ["Why?", "Shorter."]}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("row", "message", "text"),
    [
        ({"prompt": "Go on:\u2028"}, "Go on:\u2028", "Go on:\u2028"),
        (SPEED_BENCH, *2 * [USER["content"]]),
        (ON_THE_HUB, "Why?", "Why?"),
        ({"question": "1 + 1?", "answer": "#### 2"}, "1 + 1?", "Question: 1 + 1?\nAnswer:"),
    ],
)
def test_forms(row, message, text, tmp_path):
    """Of a conversation the first message is asked: an answer must be the model's own."""
    prompts = read_prompts(written(tmp_path, "", row))
    assert texts(prompts, 1, seed=0, form="chat") == [message]
    assert texts(prompts, 1, seed=0, form="completions") == [text]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("not json", "must be JSON; got Expecting value"),
        ("[" * 100_000, "at most 64 levels deep"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ([1], r"must begin with a text of the user; got \[1\]"),
        ({"text": "x"}, "must begin with a text of the user"),
        ({"messages": [{"role": "user"}]}, "must begin with a text of the user"),
        ({"messages": [{"role": "system", "content": "Be brief."}, USER]}, "a text of the user"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a text of the user"),
        ({"prompt": "  "}, "the prompt itself; got "),
        ({"turns": [PLACEHOLDER]}, r"got FULL BENCHMARK.*prepare\.py"),
    ],
)
def test_a_line_of_another_form_is_named(row, says, tmp_path):
    with pytest.raises(KeepMTPError, match=rf"prompts\.jsonl:2: .*{says}"):
        read_prompts(written(tmp_path, {"prompt": "good"}, row))


def test_a_file_of_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n\nTwo.\n")
    assert [item.text for item in read_prompts(tmp_path / "a.txt").items] == ["One.", "Two."]
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "test-00000.parquet").write_bytes(b"PAR1\xff")
    for name, says in (
        ("none.jsonl", "No such file"),
        ("test-00000.parquet", "UTF-8"),
        ("empty.jsonl", "empty"),
    ):
        with pytest.raises(KeepMTPError, match=says):
            read_prompts(tmp_path / name)


def test_a_load_has_enough_requests_in_an_order_of_the_seed(tmp_path):
    assert len(read_prompts(None).items) == 400
    assert [plan(requests=0).num_requests(each) for each in (1, 8, 32)] == [16, 32, 128]
    few = read_prompts(written(tmp_path, *({"prompt": str(number)} for number in range(5))))
    sent = texts(few, 12, seed=0, form="chat")
    assert sorted(sent[:5]) == list("01234"), "each once before any is asked again"
    assert sent[5:10] == sent[:5]
    assert texts(few, 5, seed=0, form="chat") == sent[:5] != texts(few, 5, seed=1, form="chat")
