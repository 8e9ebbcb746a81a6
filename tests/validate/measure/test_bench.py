"""What is asked for a speed matrix, what is measured already, and which k it recommends."""

import json
from typing import Any

import pytest
from commands import GLM
from keepmtp.checkpoints.files import held
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.facts.benched import BenchCell, BenchFact
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from keepmtp.validate.measure import bench as matrix
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.store import LineFile, Measured, Sitting
from keepmtp.validate.measure.texts import read_prompts
from pydantic import ValidationError
from real_vllm import measure as found_by
from stations import FLASH, bench_fact, benched, cell, repetition
from stub_vllm import stub_vllm


@pytest.fixture
def vllm(monkeypatch, tmp_path) -> VLLM:
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path)))
    return find_vllm()


def plan(**changes) -> dict[str, Any]:
    asked = {"ks": (0, 1), "concurrency": (1, 4), "output_tokens": 64, "repeat": 2, "requests": 8}
    return asked | {"prompts": read_prompts(None), "seed": 0} | changes


def model(role) -> Model:
    return Model(role=role, source=open_source(GLM), identity=identify(GLM))


def station(setup: Setup, asked: dict[str, Any], source: Model | None = None) -> matrix.Bench:
    return matrix.Bench(setup=setup, source=source, checkpoint=model("checkpoint"), **asked)


def bench(setup: Setup, asked: dict[str, Any], source: Model | None = None) -> BenchFact:
    """What is found of the checkpoint, and of a source."""
    return found_by(station(setup, asked, source))


def files(setup: Setup, asked: dict[str, Any], role: str = "checkpoint") -> list[LineFile]:
    """One for each k."""
    return [work.file for work in station(setup, asked).works(model(role))]


def measured(setup: Setup, asked: dict[str, Any], role: str, rate: float) -> list[LineFile]:
    """The whole matrix, of so many tokens a second at k=0."""
    found = files(setup, asked, role)
    for k, lines in zip(asked["ks"], found, strict=True):
        lines.add(Sitting(sitting=1, as_served="native", reason=""))
        for concurrency, number in lines.wanted:
            one = repetition(k, rate * (1 + k), number=number)
            lines.add(Measured(concurrency=concurrency, repetition=one))
    return found


def test_source_and_checkpoint_are_read_from_what_is_there(vllm, tmp_path):
    asked, setup = plan(), Setup(vllm=vllm, out=tmp_path / "out")
    for role, rate in (("source", 100.0), ("checkpoint", 300.0)):
        measured(setup, asked, role, rate)
    fact = bench(setup, asked, model("source"))
    assert [each.role for each in fact.models] == ["source", "checkpoint"]
    for found, rate in zip(fact.models, (100.0, 300.0), strict=True):
        cells = [(cell.concurrency, cell.k) for cell in found.cells]
        assert cells == [(1, 0), (1, 1), (4, 0), (4, 1)]
        assert all(len(cell.repetitions) == 2 for cell in found.cells)
        rates = [cell.tokens_per_second for cell in found.cells]
        assert rates == pytest.approx([rate, 2 * rate] * 2)
        assert [row.k for row in found.recommended] == [1, 1]
    fewer = bench(setup, plan(ks=(1,)))
    assert fewer.source is None and {cell.k for cell in fewer.checkpoint.cells} == {1}
    assert not (tmp_path / "out" / "logs").exists(), "no server was started"


def test_other_requests_are_another_matrix_and_a_further_k_is_none(vllm, tmp_path):
    setup = Setup(vllm=vllm, out=tmp_path / "out")
    kept = measured(setup, plan(), "checkpoint", 100.0)
    assert not any(file.lines for file in files(setup, plan(output_tokens=32)))
    again = files(setup, plan(ks=(0, 1, 2, 3)))
    assert [file.lines for file in again] == [*[file.lines for file in kept], {}, {}]


def test_one_run_at_a_time(vllm, tmp_path):
    setup = Setup(vllm=vllm, out=tmp_path / "out")
    says = "only one run may measure into a folder"
    with held(setup.out, "x"), pytest.raises(RecipeError, match=says):
        bench(setup, plan())


def test_a_template_of_the_users_words_asks_messages(vllm, tmp_path):
    forms = []
    for words in ((), ("--chat-template=x",)):
        setup = Setup(vllm=vllm, out=tmp_path / "out", extra=words)
        forms += {
            json.loads(file.header.model_dump_json())["form"] for file in files(setup, plan())
        }
    assert forms == ["completions", "chat"]


def test_a_load_has_enough_requests(vllm, tmp_path):
    asked = station(Setup(vllm=vllm, out=tmp_path), plan(requests=0))
    assert [asked.num_requests(each) for each in (1, 8, 32)] == [16, 32, 128]


# --- which k is recommended -----------------------------------------------------------------------


def test_figures_are_computed_from_counts_and_never_read():
    fact = bench_fact()
    told = fact.model_dump(mode="json")
    best = told["checkpoint"]["cells"][3]
    assert best["tokens_per_second"] == pytest.approx(193.0)
    assert best["drafts"]["acceptance_per_position"] == [0.9, 0.81, 0.729]
    assert best["drafts"]["mean_accepted_length"] == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    best["tokens_per_second"] = 1e6
    assert BenchFact.model_validate(told) == fact


def test_the_publishers_matrix_recommends_three():
    """Four is slower again, and with eight at once none is faster than no drafting."""
    alone, many = benched().recommended
    assert (alone.k, many.k) == (3, 0)
    assert alone.speed_up == pytest.approx(193.0 / 105.9)
    assert "189.1 tokens a second, is faster than the fastest of k=2, 183.5" in alone.says
    assert many.says == "no larger k is faster than k=0 beyond the spread of the repetitions"


def test_a_larger_k_is_not_recommended_within_the_spread():
    """Twins: the same medians; only the spread of the repetitions differs."""
    assert benched(FLASH, spread=0.02).recommended[0].k == 3
    assert benched(FLASH, spread=0.05).recommended[0].k == 2, (
        "k=3 is 7 % faster, and the repetitions are 10 % apart"
    )


def test_one_repetition_recommends_nothing():
    one = benched().model_copy(update={"cells": (cell(0, [100.0]), cell(1, [200.0]))})
    (only,) = one.recommended
    assert only.k is None and "--repeat 3" in only.says


def test_one_k_alone_is_recommended():
    one = benched().model_copy(update={"cells": (cell(0, [9, 10, 11]),)})
    assert one.recommended[0].k == 0 and one.recommended[0].says == "no other k was measured"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"repetitions": []}, "at least 1 item"),
        ({"k": 0}, "repetition 0 drafted more than k=0"),
    ],
)
def test_what_no_server_can_have_done_is_refused(change, says):
    good = cell(1, [1.0, 2.0])
    with pytest.raises(ValidationError, match=says):
        BenchCell.model_validate(good.model_dump() | change)
    assert BenchCell.model_validate(good.model_dump()) == good
