"""What is measured already is not measured again: no server is started for a matrix that is
there.
"""

from pathlib import Path

import pytest
from benches import repetition
from keepmtp.checkpoints.files import held
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.facts.benched import Repetition
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from keepmtp.validate.measure import bench as matrix
from keepmtp.validate.measure.bench_lines import MatrixPlace, Measured
from keepmtp.validate.measure.bench_prompts import read
from keepmtp.validate.measure.harness import Model, Setup
from stub_vllm import stub_vllm

GLM = Path(__file__).parents[3] / "models" / "tiny-glm4-moe"


@pytest.fixture
def vllm(monkeypatch, tmp_path) -> VLLM:
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path)))
    return find_vllm()


def plan(**changes) -> matrix.BenchPlan:
    asked = {
        "ks": (0, 1),
        "concurrency": (1, 4),
        "contexts": (0, 512),
        "output_tokens": 64,
        "repeat": 2,
        "rounds": 1,
    }
    return matrix.BenchPlan(**(asked | {"prompts": read(None), "requests": 8, "seed": 0} | changes))


def model(role, folder: Path = GLM) -> Model:
    return Model(role=role, source=open_source(folder), identity=identify(folder))


def places(asked: matrix.BenchPlan) -> list[MatrixPlace]:
    return [place for server in asked.servers for place in server]


def measured(place, rate: float) -> Measured:
    k, concurrency, context, number = place
    kept: Repetition = repetition(k, rate, number=number)
    reason = {"as_served": "native", "reason": ""}
    return Measured(k=k, concurrency=concurrency, context=context, repetition=kept, **reason)


def test_source_and_checkpoint_are_read_from_what_is_there(vllm, tmp_path):
    asked, setup = plan(), Setup(vllm=vllm, out=tmp_path / "out")
    for role, rate in (("source", 100.0), ("checkpoint", 300.0)):
        lines = matrix.open_matrix(model(role), asked, setup)
        for place in places(asked):
            lines.add(measured(place, rate * (1 + place[0])))
    fact = matrix.bench(model("checkpoint"), model("source"), asked, setup=setup)
    assert fact.source is not None and [each.role for each in fact.benched] == [
        "source",
        "checkpoint",
    ]
    for benched, rate in ((fact.source, 100.0), (fact.checkpoint, 300.0)):
        assert [(cell.k, *cell.load) for cell in benched.cells] == [
            (k, concurrency, context)
            for context in (0, 512)
            for concurrency in (1, 4)
            for k in (0, 1)
        ]
        assert all(len(cell.repetitions) == 2 for cell in benched.cells)
        assert [cell.tokens_per_second for cell in benched.cells] == pytest.approx(
            [rate, 2 * rate] * 4
        )
        assert [row.k for row in benched.recommended] == [1] * 4
    fewer = matrix.bench(model("checkpoint"), None, plan(ks=(1,)), setup=setup)
    assert fewer.source is None and {cell.k for cell in fewer.checkpoint.cells} == {1}
    assert not (tmp_path / "out" / "logs").exists(), "no server was started"


def test_other_requests_are_another_matrix(vllm, tmp_path):
    """And the old one is taken back when it is asked again."""
    first, said = plan(), list[str]()
    setup = Setup(vllm=vllm, out=tmp_path / "out", say=said.append)
    kept = matrix.open_matrix(model("checkpoint"), first, setup)
    kept.add(measured(places(first)[0], 100.0))
    other = matrix.open_matrix(model("checkpoint"), plan(output_tokens=32), setup)
    assert not other.lines and "is kept in bench.checkpoint." in said[0]
    again = matrix.open_matrix(model("checkpoint"), plan(ks=(0, 1, 2, 3)), setup)
    assert again.lines == kept.lines, "a further k is no other matrix"


def test_one_run_at_a_time(vllm, tmp_path):
    setup = Setup(vllm=vllm, out=tmp_path / "out")
    with (
        held(setup.out, "x"),
        pytest.raises(RecipeError, match="only one run may measure into a folder"),
    ):
        matrix.bench(model("checkpoint"), None, plan(), setup=setup)


def test_a_template_of_the_users_words_asks_messages():
    opened = open_source(GLM)
    assert (
        matrix.form_of(opened, ()) == "completions"
        and matrix.form_of(opened, ("--chat-template=x",)) == "chat"
    )


def test_a_load_has_enough_requests():
    asked = plan(requests=0)
    assert [asked.num_requests((concurrency, 0)) for concurrency in (1, 8, 32)] == [16, 32, 128]
