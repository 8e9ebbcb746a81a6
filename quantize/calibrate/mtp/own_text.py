"""Held-out text that the model itself writes, where memory holds the whole model.

In: a plan over a local source, and the batches that a dataset gave. Out: the same batches, with
held-out sequences in which the released model has answered. Each keeps its prompt: what stands
before its first token that a model writes, or its first quarter. Then comes what the model writes
at temperature 0, and then the rest of the old sequence.

A server drafts after its own text, and there every slot counts. In a dataset's text only those
slots count where the model would have written the same, which are the easy ones.

Easy to get wrong: a resumed run must measure on the same text. What was written stays in the
calibration's folder, also that the dataset's text was used because memory did not hold the model.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from llmcompressor.utils.helpers import disable_hf_kernels, eval_context
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig

from ....recipes.family import HFName
from ...needs.free_memory import free_host_bytes
from ...plan.plan import Plan
from ...run.statistics import read_metadata, write_statistics
from ..data.data import CalibrationData, ids_sha256
from ..model.skeleton import Skeleton
from .acceptance import end_ids

MOST_NEW_TOKENS = 512
"""A model writes no more than these in a sequence: token by token, without a server."""
_AT_A_TIME = 16
"""Sequences that are written together: token by token, the calls of a model cost more than what
they compute.
"""
_ROOM = 1.2
"""Times the weights: keys and values of these sequences, and the allocator's blocks."""


def with_own_text(
    plan: Plan, data: CalibrationData, folder: Path, *, device: torch.device
) -> CalibrationData:
    """The batches with held-out text that the released model wrote, if its weights fit the device.

    Args:
        plan: over a local source; its recipe says `held_out_by: model`.
        data: what the dataset gave.
        folder: of this run; the text is kept there.
        device: that has to hold the whole model.
    """
    path = folder / f"own-text-{_key(plan, data)}.safetensors"
    if not path.is_file():
        made = _written_by(plan, data, device) if _fits(plan, device) else None
        tensors = (
            {HFName("ids"): made[0], HFName("written"): made[1]}
            if made
            else {HFName("none"): torch.zeros(1)}
        )
        write_statistics(path, tensors, {"by": "model" if made else "dataset"})
    if read_metadata(path)["by"] == "dataset":
        return data
    found = load_file(path)
    provenance = {
        **data.provenance,
        "held_out_by": "model",
        "held_out_ids_sha256": ids_sha256(found["ids"].flatten().tolist()),
        "held_out_written_tokens": int(found["written"].sum()),
    }
    return replace(
        data, held_out_ids=found["ids"], held_out_written=found["written"], provenance=provenance
    )


def _key(plan: Plan, data: CalibrationData) -> str:
    """Of what decides the text: the weights, the prompts, and how long an answer may be."""
    files = {name: state.model_dump() for name, state in plan.source.states.items()}
    parts = (files, data.provenance, MOST_NEW_TOKENS)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _fits(plan: Plan, device: torch.device) -> bool:
    num_values = sum(
        prod(tensor.shape)
        for tensor in plan.tensors
        if tensor.part == "backbone"
        and tensor.fate not in ("drop", "add")
        and tensor.role != "vision"
    )
    free = free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    return 2 * num_values * _ROOM < free


def _written_by(
    plan: Plan, data: CalibrationData, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """[held_out, S] token ids, and which of them the model wrote; None for a class that cannot
    write.
    """
    ids, written = data.held_out_ids.clone(), torch.zeros_like(data.held_out_ids, dtype=torch.bool)
    skeleton, ends = Skeleton(plan, device=device), end_ids(plan)
    if not skeleton.model.can_generate():  # a checkpoint's own class may be without
        return None
    prompts = [_prompt(data, row) for row in range(len(ids))]
    with skeleton.whole() as model, torch.no_grad(), eval_context(model), disable_hf_kernels(model):
        for start in range(0, len(prompts), _AT_A_TIME):
            batch = prompts[start : start + _AT_A_TIME]
            for place, answer in enumerate(_answers(model, batch, ids.shape[1], ends)):
                span = slice(len(batch[place]), len(batch[place]) + len(answer))
                ids[start + place, span], written[start + place, span] = answer, True
    return ids, written


def _prompt(data: CalibrationData, row: int) -> Tensor:
    """One token at least, and room for one at least."""
    length = data.held_out_ids.shape[1]
    first = length // 4
    if data.held_out_written is not None and data.held_out_written[row].any():
        first = int(data.held_out_written[row].int().argmax())
    return data.held_out_ids[row, : min(max(first, 1), length - 1)]


def _answers(
    model: Any, prompts: Sequence[Tensor], length: int, ends: frozenset[int]
) -> Iterator[Tensor]:
    """What the model writes at temperature 0 after each prompt, its end included; prompts are
    padded on the left.
    """
    lengths, pad = [len(prompt) for prompt in prompts], min(ends, default=0)
    ids = torch.full((len(prompts), max(lengths)), pad)
    mask = torch.zeros_like(ids)
    for place, prompt in enumerate(prompts):
        ids[place, -len(prompt) :], mask[place, -len(prompt) :] = prompt, 1
    room = min(MOST_NEW_TOKENS, length - min(lengths))
    settings: Mapping[str, Any] = (
        {"eos_token_id": sorted(ends), "pad_token_id": pad} if ends else {}
    )
    config = GenerationConfig(max_new_tokens=room, do_sample=False, use_cache=True, **settings)
    device = model.get_input_embeddings().weight.device
    found = model.generate(
        ids.to(device), attention_mask=mask.to(device), generation_config=config
    ).cpu()
    for prompt, answer in zip(prompts, found[:, max(lengths) :], strict=True):
        answer = answer[: min(MOST_NEW_TOKENS, length - len(prompt))]
        is_end = torch.isin(answer, torch.tensor(sorted(ends), dtype=answer.dtype))
        yield answer[: int(is_end.int().argmax()) + 1] if is_end.any() else answer
