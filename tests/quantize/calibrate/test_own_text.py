"""Held-out text that the released model writes: as transformers' own model, kept, and left where no
room is.
"""

from dataclasses import replace

import pytest
import torch
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.calibrate.mtp import own_text
from keepmtp.quantize.calibrate.mtp.facts import DataFact
from keepmtp.quantize.calibrate.mtp.own_text import with_own_text
from keepmtp.quantize.plan.plan import Plan
from passes import END, ROOT, greedy_answers, plan_over
from transformers import AutoTokenizer, PreTrainedModel

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=("tiny-glm4-moe", "tiny-qwen3_5"))
def asked(request) -> tuple[str, Plan, CalibrationData]:
    """A model, a plan, and its data with few held-out sequences, whose answers the model would not
    give.
    """
    plan = plan_over(ROOT / "models" / request.param, f"{request.param}.nvfp4")
    calibration = plan.recipe.calibration.model_copy(update={"samples": 2, "held_out": 4})
    data = calibration_data(calibration, plan.source)
    odd = data.held_out_ids.where(~data.held_out_written, 7)
    return request.param, plan, replace(data, held_out_ids=odd)


def test_the_model_answers_the_prompts_of_the_dataset(asked, tmp_path):
    name, plan, data = asked
    found = with_own_text(plan, data, tmp_path, device=CPU)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / name)
    for row, (ids, written) in enumerate(
        zip(found.held_out_ids, found.held_out_written, strict=True)
    ):
        first = int(written.int().argmax())
        assert first == int(data.held_out_written[row].int().argmax()), (
            "the prompt is the dataset's"
        )
        assert torch.equal(ids[:first], data.held_out_ids[row, :first])
        (answer,) = greedy_answers(ROOT / "models" / name, [tokenizer.decode(ids[:first])])
        own = ids[written].tolist()
        assert own == answer[: len(own)] and len(own) > 20
        end = first + len(own)
        assert torch.equal(ids[end:], data.held_out_ids[row, end:]) and not written[end:].any()
    fact = DataFact.model_validate(found.provenance)
    assert fact.held_out_by == "model" and fact.held_out_written_tokens == int(
        found.held_out_written.sum()
    )
    assert fact.ids_sha256 == data.provenance["ids_sha256"]
    assert not torch.equal(found.held_out_ids, data.held_out_ids)


def test_the_text_is_written_once(asked, tmp_path, monkeypatch):
    _, plan, data = asked
    first = with_own_text(plan, data, tmp_path, device=CPU)
    monkeypatch.setattr(own_text, "_write", lambda *_: pytest.fail("a second time"))
    again = with_own_text(plan, data, tmp_path, device=CPU)
    assert (
        torch.equal(again.held_out_ids, first.held_out_ids) and again.provenance == first.provenance
    )


def test_a_model_that_memory_does_not_hold_leaves_the_datasets_text(asked, tmp_path, monkeypatch):
    """And a resumed run with more memory measures on the same text."""
    _, plan, data = asked
    with monkeypatch.context() as patch:
        patch.setattr(own_text, "free_host_bytes", lambda: 1_000_000)
        patch.setattr(own_text, "_write", lambda *_: pytest.fail("it does not fit"))
        assert with_own_text(plan, data, tmp_path, device=CPU) is data
    assert with_own_text(plan, data, tmp_path, device=CPU) is data


def test_a_class_that_cannot_write_leaves_the_datasets_text(asked, tmp_path, monkeypatch):
    _, plan, data = asked
    monkeypatch.setattr(PreTrainedModel, "can_generate", classmethod(lambda _: False))
    assert with_own_text(plan, data, tmp_path, device=CPU) is data


def test_a_text_without_marked_answers_is_continued(asked):
    """Its first quarter is the prompt."""
    _, _, data = asked
    unmarked = CalibrationData(ids=data.ids, held_out_ids=data.held_out_ids, provenance={})
    prompts = [own_text.prompt_of(unmarked, row) for row in range(4)]
    assert [len(prompt) for prompt in prompts] == [data.held_out_ids.shape[1] // 4] * 4
    assert END not in prompts[0]
