"""Measure a tiny checkpoint as it lies on disk: does the target solve held-out problems, does the
MTP block draft them?

    python models/train/measure.py models/tiny-glm4-moe

In: a checkpoint folder. Out: JSON with the accuracy of the target's greedy answers and, for draft
positions 1 to 3, how often the MTP block's top-1 token is the target's own greedy token. The target
is loaded with transformers' own class, both run in BF16.

The easy thing to get wrong is what a draft is compared with: the target's own greedy text, right or
wrong, never the reference solution. A wrong target that its draft follows perfectly has agreement
1.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import tiny_glm4_moe
import tiny_qwen3_5
import torch
from drafting import MTPBlock, draft_hidden, step_targets
from problems import HELD_OUT_SEED, PAD_ID, Problem, distinct_problems, read_answer
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

NUM_STEPS = 3
MAX_NEW_TOKENS = 96
BATCH_SIZE = 50

_FAMILIES: dict[str, ModuleType] = {"glm4_moe": tiny_glm4_moe, "qwen3_5_text": tiny_qwen3_5}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of one checkpoint; lists are by draft position, 1 first.

    `agreement` gives each draft position the true earlier tokens; `accepted` also asks that the
    earlier drafts of the same slot agree, which is what vLLM's per-position acceptance counts.
    """

    num_held_out_problems: int
    held_out_seed: int
    answer_accuracy: float
    num_drafted_tokens: list[int]
    agreement: list[float]
    accepted: list[float]
    agreement_answer_tokens: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Generated:
    """One greedy text: prompt and completion ids, and where the completion begins."""

    ids: list[int]
    num_prompt_tokens: int


def measure(folder: Path, *, num_problems: int) -> Measured:
    """Load the checkpoint from disk and compute its figures.

    Raises: ValueError if the target or the MTP block is not complete on disk.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = load_target(folder)
    mtp = _FAMILIES[target.config.model_type].mtp_from_disk(load_tensors(folder), target.config)
    items = distinct_problems(num_problems, held_out=True, seed=HELD_OUT_SEED)
    with torch.inference_mode():
        generated = _generate(target, tokenizer, items)
        texts = [
            tokenizer.decode(g.ids[g.num_prompt_tokens :], skip_special_tokens=True)
            for g in generated
        ]
        num_right = sum(
            read_answer(text) == str(item.answer) for text, item in zip(texts, items, strict=True)
        )
        marker_id = tokenizer.encode("\n####")[-1]
        counts = sum(
            _count_agreement(
                target, mtp, rows=generated[start : start + BATCH_SIZE], marker_id=marker_id
            )
            for start in range(0, len(generated), BATCH_SIZE)
        )
    drafted, agreed, accepted, drafted_answer, agreed_answer = counts
    return Measured(
        num_held_out_problems=num_problems,
        held_out_seed=HELD_OUT_SEED,
        answer_accuracy=num_right / num_problems,
        num_drafted_tokens=drafted.tolist(),
        agreement=_rates(agreed, drafted),
        accepted=_rates(accepted, drafted),
        agreement_answer_tokens=_rates(agreed_answer, drafted_answer),
    )


def load_target(folder: Path) -> PreTrainedModel:
    """transformers' own class in BF16; no tensor may be missing on disk."""
    target, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ValueError(
            f"{folder}: every tensor of the target must be on disk; got missing "
            f"{info['missing_keys']}"
        )
    return target.eval()


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint, by their names on disk."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def _generate(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, items: list[Problem]
) -> list[_Generated]:
    """Greedy texts in the order of `items`; prompts of one length are batched, so that nothing
    needs padding.
    """
    by_length: dict[int, list[tuple[int, list[int]]]] = defaultdict(list)
    for position, item in enumerate(items):
        prompt = tokenizer.encode(item.prompt)
        by_length[len(prompt)].append((position, prompt))
    found: dict[int, _Generated] = {}
    for length, rows in by_length.items():
        prompts = torch.tensor([prompt for _, prompt in rows])
        output = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        for (position, _), ids in zip(rows, output.tolist(), strict=True):
            end = next((i for i in range(length, len(ids)) if ids[i] == PAD_ID), len(ids))
            found[position] = _Generated(ids=ids[:end], num_prompt_tokens=length)
    return [found[position] for position in range(len(items))]


def _count_agreement(
    target: PreTrainedModel, mtp: MTPBlock, *, rows: list[_Generated], marker_id: int
) -> Tensor:
    """[5, NUM_STEPS] counts: drafted, agreed, accepted; drafted and agreed among tokens after
    `####`.
    """
    length = max(len(row.ids) for row in rows)
    ids_BT = torch.tensor([row.ids + [PAD_ID] * (length - len(row.ids)) for row in rows])
    starts_B = torch.tensor([row.num_prompt_tokens for row in rows])
    is_text_BT = ids_BT != PAD_ID
    is_answer_BT = is_text_BT & ((ids_BT == marker_id).cumsum(dim=1) > 0) & (ids_BT != marker_id)
    # vLLM drafts first once the prompt is read and the first new token is known: slot = last prompt
    # token.
    is_slot_BT = torch.arange(length)[None] >= starts_B[:, None] - 1
    hidden_BTH = target.model(ids_BT, use_cache=False).last_hidden_state
    heads = draft_hidden(
        mtp, target.model.embed_tokens, ids_BT=ids_BT, hidden_BTH=hidden_BTH, num_steps=NUM_STEPS
    )
    columns, accepted_BT = [], torch.ones_like(is_text_BT)
    for step, head_BTH in enumerate(heads, start=1):
        agrees_BT = target.lm_head(head_BTH).argmax(dim=-1) == step_targets(ids_BT, step)
        accepted_BT = accepted_BT & agrees_BT
        drafted_BT = is_slot_BT & step_targets(is_text_BT.long(), step).bool()
        answer_BT = is_slot_BT & step_targets(is_answer_BT.long(), step).bool()
        counted = (
            drafted_BT,
            drafted_BT & agrees_BT,
            drafted_BT & accepted_BT,
            answer_BT,
            answer_BT & agrees_BT,
        )
        columns.append(torch.stack([flags.sum() for flags in counted]))
    return torch.stack(columns, dim=1)


def _rates(part: Tensor, whole: Tensor) -> list[float]:
    return [round(rate, 4) for rate in (part / whole).tolist()]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=400, help="held-out problems (default 400)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(asdict(measure(args.folder, num_problems=args.problems)), indent=2))


if __name__ == "__main__":
    _main()
