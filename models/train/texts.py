"""What the texts of all shipped models share: their tokenizer, batches of rows, and files of rows.

In: texts, or rows of token ids with weights. Out: transformers' fast tokenizer, or a `Batch`.

Easy to get wrong: the ids 0, 1 and 2 are the special tokens', which the models' configs name.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Padded token ids and the loss weight of each token as a target."""

    ids_BT: Tensor
    weight_BT: Tensor


def padded(rows: Sequence[tuple[list[int], list[float]]]) -> Batch:
    """Token ids and weights of each row: ids_BT int64 and weight_BT float32, both [B, T], padded on
    the right with zeros.
    """
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.full((len(rows), length), PAD_ID)
    weight_BT = torch.zeros(len(rows), length)
    for row, (ids, weights) in enumerate(rows):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        weight_BT[row, : len(ids)] = torch.tensor(weights)
    return Batch(ids_BT=ids_BT, weight_BT=weight_BT)


def trained(
    texts: Iterable[str], *, vocab_size: int, digits_apart: bool = True
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` tokens. With digits apart numbers have no odd
    merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if digits_apart:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_files(rows: Callable[..., Iterable[Mapping[str, str]]]) -> None:
    """The program of a text: writes `rows(held_out=...)` of either side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="text that recipes calibrate on")
    parser.add_argument("--held-out", type=Path, help="what finished checkpoints are judged on")
    for name, path in vars(parser.parse_args()).items():
        if path:
            write_rows(path, rows(held_out=name == "held_out"))
