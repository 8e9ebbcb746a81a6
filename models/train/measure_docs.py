"""Measure tiny-docs as it lies on disk: how well the target foresees held-out documentation, and
what a server accepts.

    python models/train/measure_docs.py models/tiny-docs

In: a checkpoint folder. Out: JSON with the target's perplexity and, for 1 to 3 drafted tokens a
step, the share of drafts that a server accepts at each position, with the interval of the first.
Both run in BF16.

The easy thing to get wrong is where a draft counts: only where the text is the target's own choice,
as `keepmtp.quantize.calibrate.mtp.acceptance` says, whose counts these are. Slots of one text go
right or wrong together, so the interval is that of the mean over sequences, not over slots.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import python_docs
import torch
import torch.nn.functional as F
from drafting import draft_hidden
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance, server_counts
from measure import NUM_STEPS, load_target, load_tensors
from tiny_docs import mtp_from_disk
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

HELD_OUT = Path(__file__).parents[1] / "docs_held_out.jsonl"
BATCH_SIZE = 16
NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDocs:
    """Figures of one checkpoint on the held-out side.

    Attributes:
        num_sequences, sequence_length: texts, each with the first tokens of one passage.
        perplexity: of the target, per token.
        num_slots: where a server would draft.
        accepted: by tokens drafted a step, then by position; as vLLM counts.
        accepted_interval: 95 %, of the one token that is drafted where one is.
    """

    num_sequences: int
    sequence_length: int
    perplexity: float
    num_slots: int
    accepted: dict[str, list[float]]
    accepted_interval: list[float]


def measure(folder: Path) -> MeasuredDocs:
    """Load the checkpoint from disk and compute its figures.

    Raises: ValueError if the target or the MTP block is not complete on disk.
    """
    target = load_target(folder)
    mtp = mtp_from_disk(load_tensors(folder), target.config)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids_NT = held_out_ids(tokenizer)
    counts, loss = [], 0.0
    with torch.inference_mode():
        for ids_BT in ids_NT.split(BATCH_SIZE):
            hidden_BTH = target.model(ids_BT, use_cache=False).last_hidden_state
            logits_BTV = target.lm_head(hidden_BTH).float()
            loss += F.cross_entropy(
                logits_BTV[:, :-1].transpose(1, 2), ids_BT[:, 1:], reduction="sum"
            ).item()
            heads = draft_hidden(
                mtp,
                target.model.embed_tokens,
                ids_BT=ids_BT,
                hidden_BTH=hidden_BTH,
                num_steps=NUM_STEPS,
            )
            drafts_KBT = torch.stack([target.lm_head(head_BTH).argmax(-1) for head_BTH in heads])
            for row, ids_T in enumerate(ids_BT):
                choices_T, drafts_KT = logits_BTV[row].argmax(-1), drafts_KBT[:, row]
                counts.append(
                    server_counts(
                        ids_T, choices_T, drafts_KT, ends={python_docs.EOS_ID}, written=None
                    )
                )
    found = Acceptance(torch.stack(counts))
    return MeasuredDocs(
        num_sequences=len(ids_NT),
        sequence_length=python_docs.SEQUENCE_LENGTH,
        perplexity=round(math.exp(loss / ids_NT[:, 1:].numel()), 3),
        num_slots=found.num_slots,
        accepted={
            str(k): [round(rate, 4) for rate in found.by_position(k)]
            for k in range(1, NUM_STEPS + 1)
        },
        accepted_interval=_interval(found),
    )


def held_out_ids(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """[N, SEQUENCE_LENGTH] int64: the first tokens of each held-out passage that is long enough."""
    texts = [json.loads(line)["text"] for line in HELD_OUT.read_text().splitlines()]
    rows = [tokenizer.encode(text)[: python_docs.SEQUENCE_LENGTH] for text in texts]
    return torch.tensor([row for row in rows if len(row) == python_docs.SEQUENCE_LENGTH])


def _interval(found: Acceptance) -> list[float]:
    """The 95 % interval of a ratio of sums over sequences, with one token a step."""
    _, reached_N, accepted_N = found.counts[:, :, 0, 0].unbind(dim=1)
    rate = accepted_N.sum() / reached_N.sum()
    spread_N = accepted_N - rate * reached_N
    reach = NORMAL_95 * spread_N.square().sum().sqrt() / reached_N.sum()
    return [round((rate - reach).item(), 4), round((rate + reach).item(), 4)]


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(asdict(measure(args.folder)), indent=2))


if __name__ == "__main__":
    _main()
