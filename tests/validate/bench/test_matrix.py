"""What is measured already is not measured again: no server is started for a matrix that is there."""

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
from keepmtp.validate.measure.bench_lines import Measured
from keepmtp.validate.measure.bench_prompts import read
from stub_vllm import stub_vllm

GLM = Path(__file__).parents[3] / "models" / "tiny-glm4-moe"


@pytest.fixture
def vllm(monkeypatch, tmp_path) -> VLLM:
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path)))
    return find_vllm()


def plan(out: Path, **changes) -> matrix.BenchPlan:
    asked = {"ks": (0, 1), "concurrency": (1, 4), "contexts": (0, 512), "output_tokens": 64, "repeat": 2, "rounds": 1}
    return matrix.BenchPlan(prompts=read(None), requests=8, seed=0, out=out, **(asked | changes))


def model(role, folder: Path = GLM) -> matrix.BenchModel:
    opened = open_source(folder)
    form = matrix.form_of(opened, ())
    return matrix.BenchModel(role=role, source=opened, identity=identify(folder), form=form)


def measured(place, rate: float) -> Measured:
    k, concurrency, context, number = place
    kept: Repetition = repetition(k, rate, number=number)
    reason = {"as_served": "native", "reason": ""}
    return Measured(k=k, concurrency=concurrency, context=context, repetition=kept, **reason)


def test_source_and_checkpoint_are_read_from_what_is_there(vllm, tmp_path):
    asked = plan(tmp_path / "out")
    for role, rate in (("source", 100.0), ("checkpoint", 300.0)):
        run = matrix._Run(model(role), asked, vllm, None, None)
        for place in asked.places:
            run.lines.add(measured(place, rate * (1 + place[0])))
    fact = matrix.bench(model("checkpoint"), model("source"), asked, vllm=vllm)
    assert fact.source is not None and [each.role for each in fact.benched] == ["source", "checkpoint"]
    for benched, rate in ((fact.source, 100.0), (fact.checkpoint, 300.0)):
        assert [(cell.k, *cell.load) for cell in benched.cells] == [
            (k, concurrency, context) for context in (0, 512) for concurrency in (1, 4) for k in (0, 1)
        ]
        assert all(len(cell.repetitions) == 2 for cell in benched.cells)
        assert [cell.tokens_per_second for cell in benched.cells] == pytest.approx([rate, 2 * rate] * 4)
        assert [row.k for row in benched.recommended] == [1] * 4
    fewer = matrix.bench(model("checkpoint"), None, plan(tmp_path / "out", ks=(1,)), vllm=vllm)
    assert fewer.source is None and {cell.k for cell in fewer.checkpoint.cells} == {1}
    assert not (tmp_path / "out" / "logs").exists(), "no server was started"


def test_other_requests_are_another_matrix(vllm, tmp_path):
    """And the old one is taken back when it is asked again."""
    first, said = plan(tmp_path / "out"), list[str]()
    kept = matrix._Run(model("checkpoint"), first, vllm, said.append, None)
    kept.lines.add(measured(first.places[0], 100.0))
    other = matrix._Run(model("checkpoint"), plan(tmp_path / "out", output_tokens=32), vllm, said.append, None)
    assert not other.lines.measured and "are kept in bench.checkpoint." in said[0]
    again = matrix._Run(model("checkpoint"), plan(tmp_path / "out", ks=(0, 1, 2, 3)), vllm, said.append, None)
    assert again.lines.measured == kept.lines.measured, "a further k is no other matrix"


def test_one_run_at_a_time(vllm, tmp_path):
    asked = plan(tmp_path / "out")
    with held(asked.out, "x"), pytest.raises(RecipeError, match="only one run may measure into a folder"):
        matrix.bench(model("checkpoint"), None, asked, vllm=vllm)


def test_a_template_of_the_users_words_asks_messages():
    opened = open_source(GLM)
    assert matrix.form_of(opened, ()) == "completions" and matrix.form_of(opened, ("--chat-template=x",)) == "chat"
