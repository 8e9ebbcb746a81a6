"""Finished backbone passes over tiny checkpoints, and text that these models wrote, for tests of
what comes behind; and functions that are looked at while they do what they did.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import ROOT
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_before_measuring, plan_for
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data
from keepmtp.quantize.calibrate.layers.backbone import Backbone, calibrate_backbone
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance, target
from keepmtp.quantize.calibrate.mtp.mtp_policy import PolicyResults
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

END = 2
ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))


def prompts(count: int) -> list[str]:
    """Questions of the shipped problems; the last ones, which seeded draws for calibration rarely
    reach first.
    """
    lines = (ROOT / "models" / "problems.jsonl").read_text().splitlines()
    return [json.loads(line)["prompt"] for line in lines[-count:]]


def greedy_answers(folder: Path, asked: Sequence[str]) -> list[list[int]]:
    """What transformers' own class answers, the end included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in asked:
        ids = tokenizer.encode(prompt, return_tensors="pt")
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False
        )
        answers.append(written[0, ids.shape[1] :].tolist())
    return answers


def laid_out(
    folder: Path, asked: Sequence[str], answers: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Prompts with their answers as rows [N, S], and which of the tokens a model wrote."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = [tokenizer.encode(prompt) for prompt in asked]
    length = max(len(q) + len(a) for q, a in zip(questions, answers, strict=True))
    ids = torch.full((len(asked), length), END)
    written = torch.zeros(len(asked), length, dtype=torch.bool)
    for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        whole = [*question, *answer]
        ids[row, : len(whole)] = torch.tensor(whole)
        written[row, len(question) : len(whole)] = True
    return ids, written


def plan_over(folder: Path, recipe: str | Recipe) -> Plan:
    """A plan over a local checkpoint."""
    return plan_before_measuring(
        find_recipe(recipe)[0] if isinstance(recipe, str) else recipe, open_source(folder)
    )


def prepared(recipe: Path, source: Path | None = None) -> tuple[Plan, CalibrationData]:
    """The plan of a calibrated recipe file, and its data."""
    plan, _ = plan_for(str(recipe), source=source and str(source))
    return plan, calibration_data(plan.calibration, plan.source)


def as_calibrated(plan: Plan) -> Plan:
    """The same plan with a calibration block, under which nothing is rewritten."""
    calibration = find_recipe("tiny-glm4-moe.nvfp4")[0].calibration
    return replace(plan, recipe=plan.recipe.model_copy(update={"calibration": calibration}))


def finished(
    plan: Plan,
    folder: Path,
    *,
    held_out: Tensor | None = None,
    written: Tensor | None = None,
    samples: int = 16,
) -> Backbone:
    """A backbone pass by the plan's recipe over few samples, with other held-out text if there is
    any.
    """
    calibration = plan.recipe.calibration.model_copy(update={"samples": samples})
    data = calibration_data(calibration, plan.source)
    if held_out is not None:
        data = replace(data, held_out_ids=held_out, held_out_written=written, held_out_kinds=())
    return calibrate_backbone(plan, data, folder, device=ALONE.device, ranks=ALONE)


def answered(plan: Plan, folder: Path, *, count: int, samples: int = 16) -> Backbone:
    """A pass whose held-out text is what the plan's source answers to `count` questions."""
    asked = prompts(count)
    held_out, written = laid_out(
        plan.source.folder, asked, greedy_answers(plan.source.folder, asked)
    )
    return finished(plan, folder, held_out=held_out, written=written, samples=samples)


def fresh(backbone: Backbone, folder: Path) -> Backbone:
    """The same finished pass in a folder of its own, without anything that an MTP pass left."""
    shutil.copytree(backbone.folder, folder, ignore=shutil.ignore_patterns("mtp", "mtp-*"))
    return replace(backbone, folder=folder)


def reading(backbone: Backbone, written: Tensor | None) -> Backbone:
    """The same pass with other tokens of its held-out text counted as the model's."""
    return replace(backbone, data=replace(backbone.data, held_out_written=written))


def even(rate: float, *, slots: int, rows: int = 16) -> Acceptance:
    """So many slots in so many sequences, the same share accepted in each."""
    counts = torch.tensor([1.0, 1.0, rate], dtype=torch.float64) * slots / rows
    return Acceptance(counts.expand(rows, 3)[:, :, None, None].clone())


def results_of(plan: Plan, backbone: Backbone) -> PolicyResults:
    """The results of policies over a pass."""
    source = target(backbone, "source")
    return PolicyResults(
        plan=plan, source=source, served=target(backbone, "served", reference=source)
    )


def calls_of(patch: pytest.MonkeyPatch, owner: Any, name: str) -> list[tuple[tuple, Any]]:
    """Arguments and result of each call from now on, of a function in a module or a class."""
    calls: list[tuple[tuple, Any]] = []
    original = getattr(owner, name)

    def spied(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append((args, result))
        return result

    patch.setattr(owner, name, spied)
    return calls
