"""Held-out text that the released model writes: as transformers' own model, kept, and left where no
room is.
"""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from commands import GLM
from gpu_runs import in_a_child
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.calibrate.mtp import own_text
from keepmtp.quantize.calibrate.mtp.facts import DataFact
from keepmtp.quantize.calibrate.mtp.own_text import prompt_of, with_own_text
from keepmtp.quantize.plan.plan import Plan
from passes import ROOT, greedy_answers, plan_over
from pretended_gpu import pretended_gpu
from transformers import AutoTokenizer, PreTrainedModel

pytestmark = pytest.mark.usefixtures("in_f32")

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


def test_the_model_answers_the_prompts_of_the_dataset_once(asked, tmp_path, monkeypatch):
    name, plan, data = asked
    found = with_own_text(plan, data, tmp_path, device=CPU)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / name)
    for row, (ids, written) in enumerate(
        zip(found.held_out_ids, found.held_out_written, strict=True)
    ):
        prompt = prompt_of(data, row)
        first = len(prompt)
        assert not data.held_out_written[row, :first].any() and data.held_out_written[row, first]
        (answer,) = greedy_answers(ROOT / "models" / name, [tokenizer.decode(prompt)])
        own = ids[written].tolist()
        end = first + int(written.sum())
        assert own == answer[: len(own)] and len(own) > 20 and written[first:end].all()
        assert torch.equal(ids[:first], prompt)
        assert torch.equal(ids[end:], data.held_out_ids[row, end:])
    fact = DataFact.model_validate(found.provenance)
    num_written = int(found.held_out_written.sum())
    assert (fact.held_out_by, fact.held_out_written_tokens) == ("model", num_written)
    assert fact.ids_sha256 == data.provenance["ids_sha256"]
    monkeypatch.setattr(own_text, "_write", Mock(side_effect=AssertionError("a second time")))
    again = with_own_text(plan, data, tmp_path, device=CPU)
    assert torch.equal(again.held_out_ids, found.held_out_ids)
    assert again.provenance == found.provenance


def test_a_model_that_cannot_write_leaves_the_datasets_text(asked, tmp_path, monkeypatch):
    """For want of memory, or in its class; and a resumed run with more memory measures on the same
    text.
    """
    _, plan, data = asked
    with monkeypatch.context() as patch:
        patch.setattr(own_text, "free_host_bytes", Mock(return_value=1_000_000))
        assert with_own_text(plan, data, tmp_path / "small", device=CPU) is data
        patch.undo()
        patch.setattr(PreTrainedModel, "can_generate", Mock(return_value=False))
        assert with_own_text(plan, data, tmp_path / "mute", device=CPU) is data
    for folder in ("small", "mute"):
        assert with_own_text(plan, data, tmp_path / folder, device=CPU) is data


def test_a_gpu_that_is_too_small_gives_layers_to_the_host(tmp_path):
    """And computes the same text with their weights, one module's at a time."""
    mixes, is_same, share = in_a_child(small_gpu_run, tmp_path)
    assert not mixes and is_same
    assert 0.5 < share < 1


def small_gpu_run(folder: Path) -> tuple[list[str], bool, float]:
    """What was refused, whether the text is the CPU's, and the part of the memory that was used."""
    plan = plan_over(GLM, "tiny-glm4-moe.nvfp4")
    calibration = plan.recipe.calibration.model_copy(update={"samples": 2, "held_out": 2})
    data = calibration_data(calibration, plan.source)
    own = with_own_text(plan, data, folder / "cpu", device=CPU)
    with pretended_gpu() as gpu:
        gpu.memory_bytes = 3_000_000
        theirs = with_own_text(plan, data, folder / "gpu", device=gpu.device)
    is_same = theirs.provenance == own.provenance != data.provenance
    return gpu.mixes, is_same, gpu.peak_bytes / gpu.memory_bytes


def test_a_text_without_marked_answers_is_continued(asked):
    """Its first quarter is the prompt."""
    data = replace(asked[2], held_out_written=None)
    assert len(prompt_of(data, 0)) == data.held_out_ids.shape[1] // 4
