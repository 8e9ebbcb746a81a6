"""Calibration text: a dataset's rows, tokenized and cut into sequences of one length, the same ones every time.

In: a recipe's calibration block and the source checkpoint, for its tokenizer and config. Out: token ids to calibrate
on, token ids held out to measure on, which of these a model writes, and the provenance that proves which they are.

Easy to get wrong: what looks shuffled need not be repeatable. The order drawn here depends on the seed and the rows'
numbers alone, not on how a dataset is cut into files, nor on a library's version.
"""

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from huggingface_hub.errors import HfHubHTTPError
from pyarrow import ArrowException
from torch import Tensor

from ...checkpoints.commits import dataset_commit
from ...checkpoints.source import Source
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.schema import Calibration
from ...recipes.shipped import find_path
from .tokenize import UNENCODABLE, Answered, DataRow, Encoders, encoders

SHUFFLED_ROWS = 10_000
"""Rows are drawn in a seeded order from this many first ones of the split, then from as many next ones, and so on, so
that a Hub dataset is read only as far as needed. One that is sorted by topic should be shuffled beforehand."""
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_UNREADABLE = (DatasetsError, ArrowException, HfHubHTTPError, HTTPError, OSError, ValueError, TypeError, RuntimeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationData:
    """What a calibrated run computes with.

    Attributes:
        ids: [samples, sequence_length] int64, CPU, no padding.
        held_out_ids: [held_out, sequence_length], of rows that are not in `ids`.
        held_out_written: bool, of the same shape: tokens that a model writes, not its user, in the row that a sequence
            begins with; None where no row says which they are.
        provenance: dataset, its resolved revision, numbers of rows and tokens, and SHA-256 sums of the row numbers and
            of both sets' ids (int64, little-endian), which are equal exactly when the ids are.
    """

    ids: Tensor
    held_out_ids: Tensor
    held_out_written: Tensor | None = None
    provenance: Mapping[str, str | int]


def calibration_data(calibration: Calibration, source: Source) -> CalibrationData:
    """Read, draw, tokenize and cut.

    Rows follow one another, each as the tokenizer or the chat template begins and ends it, and are cut every
    `sequence_length` tokens, which may be within a row. Each held-out sequence begins with a row of its own, as a
    server's text does. Held-out text skips rows with the same tokens as a calibration row. Blank rows are skipped too;
    the provenance counts them.

    Args:
        calibration: a recipe's block.
        source: its files must be on this machine.

    Raises:
        RecipeError: the dataset, its split, its column or a row of it cannot be used, it is too short, or
            `sequence_length` is longer than the model takes.
        CheckpointError: there is no usable tokenizer next to the weights, or it has ids the model has no embedding for.
    """
    where = f"calibration.dataset {calibration.dataset}"
    _refuse_long_sequences(calibration, source)
    encoding = encoders(source, may_run_code=calibration.model_code == "checkpoint")
    dataset, revision = _open_split(calibration, where)
    rows = _shuffled(_column(dataset, calibration, where), calibration.seed)
    encoded = _encoded(rows, encoding, where=where, vocab_size=_text_config(source).get("vocab_size"))
    length, samples, held_out = calibration.sequence_length, calibration.samples, calibration.held_out
    used = _take(encoded, samples * length)
    held = _take(encoded, held_out * length, without=used.sums, restart=length)
    found = len(used.ids) // length + len(held.ids) // length
    if found < samples + held_out:
        read, blank = len(used.numbers) + len(held.numbers), used.num_blank + held.num_blank
        raise RecipeError(
            where,
            f"must hold {samples} + {held_out} sequences of {length} tokens (samples + held_out)",
            got=f"{found}, from {read} different rows and {blank} blank ones",
            cure="Lower samples, held_out or sequence_length, or name a longer dataset",
        )
    ids, held_out_ids = (torch.tensor(part.ids).view(-1, length) for part in (used, held))
    provenance: dict[str, str | int] = {
        "dataset": calibration.dataset,
        "dataset_revision": revision,
        "subset": calibration.subset or "",
        "split": calibration.split,
        "column": calibration.column,
        "prompt_column": calibration.prompt_column or "",
        "seed": calibration.seed,
        "rows": len(used.numbers),
        "held_out_rows": len(held.numbers),
        "blank_rows": used.num_blank + held.num_blank,
        "tokens": ids.numel(),
        "held_out_tokens": held_out_ids.numel(),
        "row_numbers_sha256": ids_sha256([*used.numbers, *held.numbers]),
        "ids_sha256": ids_sha256(used.ids),
        "held_out_ids_sha256": ids_sha256(held.ids),
    }
    written = _written(held, encoding, length)
    if written is not None:
        provenance["held_out_written_tokens"] = int(written.sum())
    return CalibrationData(ids=ids, held_out_ids=held_out_ids, held_out_written=written, provenance=provenance)


# --- the dataset ------------------------------------------------------------------------------------------------------


def _open_split(calibration: Calibration, where: str) -> tuple[IterableDataset, str]:
    """The split as a stream, and the revision it is of: a Hub commit, or "local"."""
    name = calibration.dataset
    path = find_path(name)
    is_file_name = Path(name).suffix in _READERS
    if path is None and (is_file_name or calibration.dataset_revision == "local" or name.count("/") > 1):
        raise RecipeError(
            where,
            f"must be a Hub id with its dataset_revision, or a folder or {', '.join(_READERS)} file",
            got="no such file or folder",
            cure="Check the path, which is relative to the current folder",
        )
    if path is not None and path.is_file() and not is_file_name:
        got = path.suffix or "no suffix"
        raise RecipeError(where, f"a file must be one of {', '.join(_READERS)}", got=got, cure="Convert it")
    revision = "local" if path is not None else dataset_commit(name, calibration.dataset_revision, where)
    try:
        if path is not None and path.is_file():
            splits = load_dataset(_READERS[path.suffix], data_files=str(path), streaming=True)
        elif path is not None:
            splits = load_dataset(str(path), calibration.subset, streaming=True)
        else:
            splits = load_dataset(name, calibration.subset, revision=revision, streaming=True)
    except StopIteration as error:  # datasets 5.2 looks for the columns of a JSON file's first row
        raise RecipeError(where, "must hold rows", got="none", cure="Name another file") from error
    except _UNREADABLE as error:
        cure = "Give calibration.subset if it names several here, or else Parquet or JSON files"
        raise RecipeError(where, "must be a dataset that can be read", got=_one_line(error), cure=cure) from error
    if calibration.split not in splits:
        rule = f"split must be one of {', '.join(map(str, splits))}"
        raise RecipeError(where, rule, got=repr(calibration.split), cure="Correct calibration.split")
    return splits[calibration.split], revision


def _column(dataset: IterableDataset, calibration: Calibration, where: str) -> Iterator[tuple[int, DataRow]]:
    """Row numbers and the values of the column: a text or a conversation, maybe empty."""
    columns = {"column": calibration.column}
    if calibration.prompt_column:
        columns["prompt_column"] = calibration.prompt_column
    if {*columns.values()} <= {*(dataset.column_names or ())}:
        dataset = dataset.select_columns([*columns.values()])  # Parquet is stored by column: others are not even read
    for number, row in enumerate(_readable(dataset, where)):
        for key, name in columns.items():
            if name not in row:
                rule = f"{key} must be one of {', '.join(row)}"
                raise RecipeError(where, rule, got=repr(name), cure=f"Correct calibration.{key}")
        yield number, _value(row, calibration, f"{where}: row {number}")


def _readable(dataset: IterableDataset, where: str) -> Iterator[Mapping[str, Any]]:
    """The rows; what the libraries raise while they read one becomes a refusal."""
    rows, number = iter(dataset), 0
    while True:
        try:
            row = next(rows, None)
        except _UNREADABLE as error:
            cure = "Mend the file, or download it again"
            raise RecipeError(where, f"row {number} must be readable", got=_one_line(error), cure=cure) from error
        if row is None:
            return
        yield row
        number += 1


def _value(row: Mapping[str, Any], calibration: Calibration, where: str) -> DataRow:
    value = row[calibration.column]
    is_conversation = isinstance(value, list) and all(_is_turn(turn) for turn in value)
    if not (isinstance(value, str) or is_conversation):
        rule = f"column {calibration.column} must hold a text or a list of {{role, content}}"
        raise RecipeError(where, rule, got=_short(value), cure="Name another column, or mend the row")
    return value if calibration.prompt_column is None else _answered(row, calibration, where)


def _answered(row: Mapping[str, Any], calibration: Calibration, where: str) -> Answered:
    assert calibration.prompt_column is not None
    for column in (calibration.prompt_column, calibration.column):
        if not isinstance(row[column], str):
            rule = f"column {column} must hold a text where there is a prompt_column"
            cure = "Name another column, or leave out calibration.prompt_column for conversations"
            raise RecipeError(where, rule, got=_short(row[column]), cure=cure)
    return Answered(row[calibration.prompt_column], row[calibration.column])


def _is_turn(turn: Any) -> bool:
    return isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def _shuffled(rows: Iterator[tuple[int, Any]], seed: int) -> Iterator[tuple[int, Any]]:
    # A fixed algorithm in Python's standard library; numpy and torch keep theirs the same only within a version.
    order = random.Random(seed)  # noqa: S311
    while window := list(islice(rows, SHUFFLED_ROWS)):
        order.shuffle(window)
        yield from window


# --- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Consecutive rows with their token ids, their numbers and sums, and all ids one after another."""

    rows: list[tuple[DataRow, list[int]]]
    numbers: list[int]
    sums: list[str]
    ids: list[int]
    num_blank: int


def _encoded(
    rows: Iterable[tuple[int, DataRow]], encoding: Encoders, *, where: str, vocab_size: int | None
) -> Iterator[tuple[int, DataRow, list[int]]]:
    """Row numbers, rows and token ids; none for a blank row."""
    for number, row in rows:
        if _is_blank(row):
            yield number, row, []
            continue
        encode = encoding.of(row)
        try:
            ids = encode()
        except UNENCODABLE as error:
            rule, cure = "must suit the model's chat format", "Mend the row, or name a column of texts"
            raise RecipeError(f"{where}: row {number}", rule, got=_one_line(error), cure=cure) from error
        if vocab_size is not None and max(ids, default=0) >= vocab_size:
            rule = f"the tokenizer's ids must be below the model's vocab_size, {vocab_size}"
            got = f"{max(ids)} in row {number}"
            raise CheckpointError(encoding.source.where, rule, got=got, cure="Use the release's own tokenizer")
        yield number, row, ids


def _is_blank(row: DataRow) -> bool:
    """A text of spaces alone, or a conversation without turns."""
    return not "".join(row).strip() if isinstance(row, str | Answered) else not row


def _take(
    rows: Iterator[tuple[int, DataRow, list[int]]], num_tokens: int, *, without: Collection[str] = (), restart: int = 0
) -> _Part:
    """The next rows until they have so many tokens, cut to that number; fewer only if the rows run out.

    Args:
        rows: numbers, rows and token ids; those that are taken are used up.
        num_tokens: how many tokens to take.
        without: sums of rows to pass over, because another part has them.
        restart: length of a sequence. If given, each sequence begins with a row of its own, and the rest of the row
            before it is left out.
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


def _written(part: _Part, encoding: Encoders, length: int) -> Tensor | None:
    """[sequences, length] bool; None where no row says which of its tokens a model writes.

    Only the row that a sequence begins with counts: a server would not have other rows before it.
    """
    found = [encoding.written(row, ids) for row, ids in part.rows]
    if all(each is None for each in found):
        return None
    each_token: list[bool] = []
    for written, (_, ids) in zip(found, part.rows, strict=True):
        place = len(each_token) % length
        if written is None or place:  # nothing says who wrote this row, or another row is before it
            written = [False] * len(ids)
        each_token += written[: length - place]
    return torch.tensor(each_token[: len(part.ids)]).view(-1, length)


def _text_config(source: Source) -> Mapping[str, Any]:
    return source.config.get("text_config") or source.config


def _refuse_long_sequences(calibration: Calibration, source: Source) -> None:
    longest = _text_config(source).get("max_position_embeddings")
    if longest is not None and calibration.sequence_length > longest:
        rule = f"must be at most the model's max_position_embeddings, {longest}"
        raise RecipeError("calibration.sequence_length", rule, got=calibration.sequence_length, cure="Lower it")


def ids_sha256(numbers: Sequence[int]) -> str:
    """SHA-256 of numbers as int64, little-endian."""
    return hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in numbers)).hexdigest()


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__).rstrip(".")[:300]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
