"""Measure tiny-tools as it lies on disk: how much of its conversations it knows, and how much its MTP
block drafts.

    python models/train/measure_tools.py models/tiny-tools

In: a checkpoint folder. Out: JSON. Both run in BF16 on the expected texts, so this is no proof of what
a server writes: `keepmtp eval --task tool-calls` is.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import tiny_tools
import torch
from drafting import draft_hidden, step_targets
from measure import load_target, load_tensors
from tool_texts import encoded, make_batch, whole_conversations
from transformers import AutoTokenizer

NUM_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTools:
    """Share of an assistant's tokens whose first choice is right: the target's, then each draft
    position's.
    """

    num_conversations: int
    agreement: list[float]


def measure(folder: Path) -> MeasuredTools:
    """Load the checkpoint from disk and compute its figures.

    Raises: ValueError if the target or the MTP block is not complete on disk.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = load_target(folder)
    mtp = tiny_tools.mtp_from_disk(load_tensors(folder), target.config)
    batch = make_batch([encoded(tokenizer, messages) for messages in whole_conversations()])
    ids_BT = batch.ids_BT
    found = []
    with torch.inference_mode():
        hidden_BTH = target.model(ids_BT, use_cache=False).last_hidden_state
        heads = draft_hidden(
            mtp,
            target.model.embed_tokens,
            ids_BT=ids_BT,
            hidden_BTH=hidden_BTH,
            num_steps=NUM_STEPS,
        )
        for step, head_BTH in enumerate([hidden_BTH, *heads]):
            agrees_BT = target.lm_head(head_BTH).argmax(dim=-1) == step_targets(ids_BT, step)
            counts_BT = step_targets(batch.weight_BT, step) == 1.0
            found.append(round(agrees_BT[counts_BT].float().mean().item(), 4))
    return MeasuredTools(num_conversations=len(ids_BT), agreement=found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(json.dumps(asdict(measure(parser.parse_args().folder)), indent=2))
