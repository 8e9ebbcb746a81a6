"""Calibration text: datasets' rows, tokenized and cut into sequences of one length, the same ones
every time.

In: a recipe's calibration block and the source checkpoint, for its tokenizer and config. Out: token
ids to calibrate on, token ids held out to measure on, which of these a model writes, and the
provenance that proves which they are.

Easy to get wrong: a sequence is of one dataset alone. Those of several datasets are laid evenly
among each other, so that no batch and no process has one kind of text only.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.source import Source
from ....recipes.errors import CheckpointError, KeepMTPError, RecipeError
from ....recipes.schema import Calibration, TextsOfMix
from .dataset_rows import one_line, open_split, rows_of, shuffled
from .tokenize import UNENCODABLE, Answered, DataRow, Encoders, encoders


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """What a calibrated run computes with.

    Attributes:
        ids: [samples, sequence_length] int64, CPU, no padding.
        held_out_ids: [held_out, sequence_length], of rows that are not in `ids`.
        held_out_written: bool, of the same shape: tokens that a model writes, not its user, in the
            row that a sequence begins with; None where no row says which they are.
        provenance: dataset, its resolved revision, numbers of rows and tokens, and SHA-256 sums of
            the row numbers and of both sets' ids (int64, little-endian), which are equal exactly
            when the ids are.
    """

    ids: Tensor
    held_out_ids: Tensor
    held_out_written: Tensor | None = None
    provenance: Mapping[str, Any]


def calibration_data(calibration: Calibration, source: Source) -> CalibrationData:
    """Read, draw, tokenize and cut.

    Rows follow one another, each as the tokenizer or the chat template begins and ends it, and are
    cut every `sequence_length` tokens, which may be within a row. Each held-out sequence begins
    with a row of its own, as a server's text does. Held-out text skips rows with the same tokens as
    a calibration row. Blank rows are skipped too; the provenance counts them.

    Several datasets give sequences by their shares, each as if it were alone.

    Args:
        calibration: a recipe's block.
        source: its files must be on this machine.

    Raises:
        RecipeError: the dataset, its split, its column or a row of it cannot be used, it is too
            short, or `sequence_length` is longer than the model takes.
        CheckpointError: there is no usable tokenizer next to the weights, or it has ids the model
            has no embedding for.
    """
    longest = _text_config(source).get("max_position_embeddings")
    if longest is not None and calibration.sequence_length > longest:
        rule = f"must be at most the model's max_position_embeddings, {longest}"
        raise RecipeError(
            "calibration.sequence_length", rule, got=calibration.sequence_length, cure="Lower it"
        )
    encoding = encoders(source, may_run_code=calibration.model_code == "checkpoint")
    mix, length = calibration.mix, calibration.sequence_length
    shares = [texts.share for texts in mix]
    numbers = zip(
        mix,
        portions(calibration.samples, shares),
        portions(calibration.held_out, shares),
        strict=True,
    )
    drawn = [
        _draw(texts, calibration, encoding, num_used=used, num_held=held)
        for texts, used, held in numbers
    ]
    ids = _laid_among([_sequences(each.used, length) for each in drawn])
    held_out_ids = _laid_among([_sequences(each.held, length) for each in drawn])
    written = _written([each.held for each in drawn], encoding, length)
    provenance = _provenance(calibration, drawn) | {
        "tokens": ids.numel(),
        "held_out_tokens": held_out_ids.numel(),
        "ids_sha256": ids_sha256(ids.flatten().tolist()),
        "held_out_ids_sha256": ids_sha256(held_out_ids.flatten().tolist()),
    }
    if written is not None:
        provenance["held_out_written_tokens"] = int(written.sum())
    return CalibrationData(
        ids=ids, held_out_ids=held_out_ids, held_out_written=written, provenance=provenance
    )


def _provenance(calibration: Calibration, drawn: "Sequence[_Drawn]") -> dict[str, Any]:
    """What was read: the first dataset by name, the others as a list, and the numbers of all of
    them.
    """
    first, *others = [each.read for each in drawn]
    rows = [number for each in drawn for number in (*each.used.numbers, *each.held.numbers)]
    found = {
        "dataset": first.dataset,
        "dataset_revision": first.dataset_revision,
        "subset": first.subset or "",
        "split": first.split,
        "column": first.column,
        "prompt_column": first.prompt_column or "",
        "seed": calibration.seed,
        "rows": sum(len(each.used.numbers) for each in drawn),
        "held_out_rows": sum(len(each.held.numbers) for each in drawn),
        "blank_rows": sum(each.used.num_blank + each.held.num_blank for each in drawn),
        "row_numbers_sha256": ids_sha256(rows),
    }
    return (
        found | {"also": [texts.model_dump(mode="json") for texts in others]} if others else found
    )


# --- one dataset
# --------------------------------------------------------------------------------------------------


def portions(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers with this sum, as near to the shares as can be; the largest remainders get what
    is left.
    """
    exact = [total * share for share in shares]
    found = [int(each) for each in exact]
    by_rest = sorted(range(len(shares)), key=lambda index: (found[index] - exact[index], index))
    for index in by_rest[: total - sum(found)]:
        found[index] += 1
    return found


def _draw(
    texts: TextsOfMix, calibration: Calibration, encoding: Encoders, *, num_used: int, num_held: int
) -> "_Drawn":
    """So many sequences of one dataset."""
    where, length = f"calibration.dataset {texts.dataset}", calibration.sequence_length
    dataset, revision = open_split(texts, where)
    rows = shuffled(rows_of(dataset, texts, where), calibration.seed)
    vocab_size = _text_config(encoding.source).get("vocab_size")
    encoded = _encoded(rows, encoding, where=where, vocab_size=vocab_size)
    used = _take(encoded, num_used * length)
    held = _take(encoded, num_held * length, without=used.sums, restart=length)
    found = len(used.ids) // length + len(held.ids) // length
    if found < num_used + num_held:
        read, blank = len(used.numbers) + len(held.numbers), used.num_blank + held.num_blank
        part = "its share of " if calibration.also else ""
        raise RecipeError(
            where,
            f"must hold {num_used} + {num_held} sequences of {length} tokens ({part}samples + "
            "held_out)",
            got=f"{found}, from {read} different rows and {blank} blank ones",
            cure="Lower samples, held_out or sequence_length, or name a longer dataset",
        )
    return _Drawn(texts=texts, revision=revision, used=used, held=held)


def _sequences(part: "_Part", length: int) -> Tensor:
    return torch.tensor(part.ids, dtype=torch.int64).view(-1, length)


def _laid_among(parts: Sequence[Tensor]) -> Tensor:
    """The sequences of several datasets, each dataset's evenly over the whole."""
    places = [
        ((turn + 0.5) / len(part), number, turn)
        for number, part in enumerate(parts)
        for turn in range(len(part))
    ]
    return torch.stack([parts[number][turn] for _, number, turn in sorted(places)])


# --- tokens
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Consecutive rows with their token ids, their numbers and sums, and all ids one after
    another.
    """

    rows: list[tuple[DataRow, list[int]]]
    numbers: list[int]
    sums: list[str]
    ids: list[int]
    num_blank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """What one dataset gives: rows to calibrate on, and rows to measure on; `revision` is what was
    read.
    """

    texts: TextsOfMix
    revision: str
    used: _Part
    held: _Part

    @property
    def read(self) -> TextsOfMix:
        """The dataset at the revision that was read."""
        return self.texts.model_copy(update={"dataset_revision": self.revision})


def _encoded(
    rows: Iterable[tuple[int, DataRow]], encoding: Encoders, *, where: str, vocab_size: int | None
) -> Iterator[tuple[int, DataRow, list[int]]]:
    """Row numbers, rows and token ids; none for a blank row."""
    for number, row in rows:
        # A text of spaces alone, or a conversation without turns.
        if not ("".join(row).strip() if isinstance(row, str | Answered) else row):
            yield number, row, []
            continue
        try:
            ids = encoding.encode(row)
        except KeepMTPError:
            raise
        except UNENCODABLE as error:
            rule, cure = (
                "must suit the model's chat format",
                "Mend the row, or name a column of texts",
            )
            raise RecipeError(
                f"{where}: row {number}", rule, got=one_line(error), cure=cure
            ) from error
        if vocab_size is not None and max(ids, default=0) >= vocab_size:
            rule = f"the tokenizer's ids must be below the model's vocab_size, {vocab_size}"
            got = f"{max(ids)} in row {number}"
            raise CheckpointError(
                encoding.source.where, rule, got=got, cure="Use the release's own tokenizer"
            )
        yield number, row, ids


def _take(
    rows: Iterator[tuple[int, DataRow, list[int]]],
    num_tokens: int,
    *,
    without: Collection[str] = (),
    restart: int = 0,
) -> _Part:
    """The next rows until they have so many tokens, cut to that number; fewer only if the rows run
    out.

    Args:
        rows: numbers, rows and token ids; those that are taken are used up.
        num_tokens: how many tokens to take.
        without: sums of rows to pass over, because another part has them.
        restart: length of a sequence. If given, each sequence begins with a row of its own, and the
            rest of the row before it is left out.
    """
    kept: list[tuple[DataRow, list[int]]] = []
    numbers: list[int] = []
    sums: list[str] = []
    ids: list[int] = []
    num_blank, seen = 0, set(without)
    while len(ids) < num_tokens and (drawn := next(rows, None)) is not None:
        number, row, of_row = drawn
        num_blank += not of_row
        if of_row and (sum_of_row := ids_sha256(of_row)) not in seen:
            kept.append((row, of_row))
            numbers.append(number)
            sums.append(sum_of_row)
            room = restart - len(ids) % restart if restart else len(of_row)
            ids.extend(of_row[:room])
    return _Part(rows=kept, numbers=numbers, sums=sums, ids=ids[:num_tokens], num_blank=num_blank)


def _written(parts: Sequence[_Part], encoding: Encoders, length: int) -> Tensor | None:
    """[held_out, S] bool; None where no row of any dataset says which of its tokens a model writes.

    Only the row that a sequence begins with counts: a server would not have other rows before it.
    """
    found, is_said = [], False
    for part in parts:
        each_token: list[bool] = []
        for row, ids in part.rows:
            written = encoding.written(row, ids)
            is_said |= written is not None
            place = len(each_token) % length
            if (
                written is None or place
            ):  # nothing says who wrote this row, or another row is before it
                written = [False] * len(ids)
            each_token += written[: length - place]
        found.append(torch.tensor(each_token[: len(part.ids)], dtype=torch.bool).view(-1, length))
    return _laid_among(found) if is_said else None


def _text_config(source: Source) -> Mapping[str, Any]:
    return source.config.get("text_config") or source.config


def ids_sha256(numbers: Sequence[int]) -> str:
    """SHA-256 of numbers as int64, little-endian."""
    return hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in numbers)).hexdigest()
