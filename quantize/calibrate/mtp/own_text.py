"""Held-out text that the model itself writes, where GPUs and host together hold the whole model.

In: a plan over a local source, and the batches that a dataset gave. Out: the same batches, with
held-out sequences in which the released model has answered. Each keeps its prompt: what stands
before its first token that a model writes, or its first quarter. Then comes what the model writes
at temperature 0, and then the rest of the old sequence.

A server drafts after its own text, and there every slot counts. In a dataset's text only those
slots count where the model would have written the same, which are the easy ones.
"""

from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from llmcompressor.utils.helpers import disable_hf_kernels, eval_context
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from ....recipes.family import HFName
from ...needs.memory import free_host_bytes
from ...plan.plan import Plan
from ...run.statistics import read_metadata, write_statistics
from ..data.claim import fingerprint
from ..data.data import CalibrationData, ids_sha256
from ..model.skeleton import Skeleton
from .acceptance import end_ids

# A model writes no more than these in a sequence: token by token, without a server.
MOST_NEW_TOKENS = 512
# Sequences that are written together: the calls of a model cost more than what they compute.
_AT_A_TIME = 16
# Times the weights: keys and values of these sequences, and the allocator's blocks.
_ROOM = 1.2


def with_own_text(
    plan: Plan, data: CalibrationData, folder: Path, *, device: torch.device
) -> CalibrationData:
    """The batches with held-out text that the released model wrote, if this machine holds it.

    Args:
        plan: over a local source; its recipe says `held_out_by: model`.
        data: what the dataset gave.
        folder: of this run; the text is kept there.
        device: that computes; what it cannot hold goes to other GPUs, and then to the host.
    """
    path = folder / f"own-text-{fingerprint(plan, data, 1)[:16]}.safetensors"
    if not path.is_file():
        by = "dataset"
        ids = data.held_out_ids.clone()
        written = torch.zeros_like(ids, dtype=torch.bool)
        places = _places(plan, device)
        if places:
            skeleton = Skeleton(plan, device=device)
            if skeleton.model.can_generate():  # a checkpoint's own class may be without
                by = "model"
                _write(skeleton, places, data, ids, written)
        # A resumed run must measure on the same text: also that the dataset's was used, because
        # memory did not hold the model, stays in the folder.
        write_statistics(path, {HFName("ids"): ids, HFName("written"): written}, {"by": by})
    if read_metadata(path)["by"] == "dataset":
        return data
    kept = load_file(path)
    own = {
        "held_out_by": "model",
        "held_out_ids_sha256": ids_sha256(kept["ids"]),
        "held_out_written_tokens": int(kept["written"].sum()),
    }
    return replace(
        data,
        held_out_ids=kept["ids"],
        held_out_written=kept["written"],
        provenance={**data.provenance, **own},
    )


def _places(plan: Plan, device: torch.device) -> list[torch.device]:
    """Where the weights of each decoder layer go: to the first of device, other GPUs and host that
    has room; none if one finds no room.
    """
    sizes = Counter[int | None]()
    for tensor in plan.tensors:
        is_there = tensor.part == "backbone" and tensor.fate not in ("drop", "add")
        if is_there and tensor.role != "vision":
            sizes[tensor.layer] += int(2 * prod(tensor.shape) * _ROOM)
    free = {}
    if device.type != "cpu":
        free[device], _ = torch.cuda.mem_get_info(device)
        for index in range(torch.cuda.device_count()):
            gpu = torch.device("cuda", index)
            if gpu != device:
                free[gpu], _ = torch.cuda.mem_get_info(gpu)
    free[torch.device("cpu")] = free_host_bytes()
    free[device] -= sizes.pop(None)  # what is around the layers
    if free[device] < 0:
        return []
    places = []
    for _, size in sorted(sizes.items()):
        for place, room in free.items():
            if room >= size:
                free[place] -= size
                places.append(place)
                break
        else:
            return []
    return places


def _write(
    skeleton: Skeleton,
    places: list[torch.device],
    data: CalibrationData,
    ids: Tensor,
    written: Tensor,
) -> None:
    """Put the model's answers into `ids` [held_out, S], and which tokens these are into
    `written`.
    """
    length = ids.shape[1]
    ends = sorted(end_ids(skeleton.plan))
    pad = min(ends, default=0)
    stops = {}
    if ends:
        stops = {"eos_token_id": ends, "pad_token_id": pad}
    sides: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
    with (
        skeleton.whole(places) as model,
        torch.no_grad(),
        eval_context(model),
        disable_hf_kernels(model),
    ):
        generate: Any = model.generate
        for rows in torch.arange(len(ids)).split(_AT_A_TIME):
            prompts = [prompt_of(data, row) for row in rows.tolist()]
            mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts], **sides)
            config = GenerationConfig(
                max_new_tokens=min(MOST_NEW_TOKENS, length - min(map(len, prompts))),
                do_sample=False,
                use_cache=True,
                **stops,
            )
            answers = generate(
                pad_sequence(prompts, padding_value=pad, **sides).to(skeleton.device),
                attention_mask=mask.to(skeleton.device),
                generation_config=config,
            )[:, mask.shape[1] :].cpu()
            for row, prompt, answer in zip(rows, prompts, answers, strict=True):
                first = len(prompt)
                is_end = torch.isin(answer, torch.tensor(ends, dtype=answer.dtype))
                # What is before the first end, and that.
                size = min(int((is_end.cumsum(0) == 0).sum()) + 1, len(answer), length - first)
                ids[row, first : first + size] = answer[:size]
                written[row, first : first + size] = True


def prompt_of(data: CalibrationData, row: int) -> Tensor:
    """One token at least, and room for one at least."""
    length = data.held_out_ids.shape[1]
    first = length // 4
    if data.held_out_written is not None and data.held_out_written[row].any():
        first = int(data.held_out_written[row].int().argmax())
    return data.held_out_ids[row, : min(max(first, 1), length - 1)]
