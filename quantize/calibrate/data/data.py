"""Calibration text: datasets' rows, tokenized and cut into sequences of one length, the same ones
every time.

In: a recipe's calibration block and the source checkpoint, for its tokenizer and config. Out: token
ids to calibrate on, token ids held out to measure on, which of these a model writes, and the
provenance that proves which they are.

Easy to get wrong: a sequence is of one dataset alone. Those of several datasets are laid evenly
among each other, so that no batch and no process has one kind of text only.
"""

import hashlib
import random
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from huggingface_hub.errors import HfHubHTTPError
from pyarrow import ArrowException
from torch import Tensor

from ....checkpoints.hub import dataset_commit
from ....checkpoints.safetensors_file import open_regular
from ....checkpoints.source import Source
from ....recipes.errors import CheckpointError, KeepMTPError, RecipeError
from ....recipes.model_file import find_path
from ....recipes.schema import Calibration, Texts, TextsOfMix
from .tokenize import UNENCODABLE, Answered, DataRow, Encoders, encoders, one_line

SHUFFLED_ROWS = 10_000
"""Rows are drawn in a seeded order from this many first ones of the split, then from as many next
ones, and so on, so that a Hub dataset is read only as far as needed. One that is sorted by topic
should be shuffled beforehand."""
_START_BYTES = 4096
_READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_UNREADABLE = (
    DatasetsError,
    ArrowException,
    HfHubHTTPError,
    HTTPError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
)


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
    length, mix = calibration.sequence_length, calibration.mix
    shares = [texts.share for texts in mix]
    num_used, num_held = (portions(n, shares) for n in (calibration.samples, calibration.held_out))
    drawn = [
        _draw(texts, calibration, encoding, used, held)
        for texts, used, held in zip(mix, num_used, num_held, strict=True)
    ]
    ids = _laid_among([torch.tensor(each.used.ids).view(-1, length) for each in drawn])
    held_out_ids = _laid_among([torch.tensor(each.held.ids).view(-1, length) for each in drawn])
    parts = [part for each in drawn for part in (each.used, each.held)]
    first, *others = [each.texts for each in drawn]
    provenance = {
        "dataset": first.dataset,
        "dataset_revision": first.dataset_revision,
        "subset": first.subset or "",
        "split": first.split,
        "column": first.column,
        "prompt_column": first.prompt_column or "",
        "seed": calibration.seed,
        "rows": sum(len(each.used.numbers) for each in drawn),
        "held_out_rows": sum(len(each.held.numbers) for each in drawn),
        "blank_rows": sum(part.num_blank for part in parts),
        "row_numbers_sha256": ids_sha256([n for part in parts for n in part.numbers]),
        "tokens": ids.numel(),
        "held_out_tokens": held_out_ids.numel(),
        "ids_sha256": ids_sha256(ids.flatten().tolist()),
        "held_out_ids_sha256": ids_sha256(held_out_ids.flatten().tolist()),
    }
    if others:
        provenance["also"] = [texts.model_dump(mode="json") for texts in others]
    written = None
    if any(each.held.says_who_wrote for each in drawn):
        written = _laid_among([torch.tensor(each.held.written).view(-1, length) for each in drawn])
        provenance["held_out_written_tokens"] = int(written.sum())
    return CalibrationData(
        ids=ids, held_out_ids=held_out_ids, held_out_written=written, provenance=provenance
    )


# --- one dataset ----------------------------------------------------------------------------------


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


@dataclass(slots=True, kw_only=True)
class _Part:
    """Consecutive rows: their token ids one after another, their numbers and sums.

    Attributes:
        ids: of all rows.
        written: which of these tokens a model writes; not for text to calibrate on.
        says_who_wrote: whether any row said so.
    """

    ids: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sums: set[str] = field(default_factory=set)
    num_blank: int = 0
    written: list[bool] = field(default_factory=list)
    says_who_wrote: bool = False


class _Drawn(NamedTuple):
    """What one dataset gives: rows to calibrate on, and rows to measure on."""

    texts: TextsOfMix
    used: _Part
    held: _Part


def _draw(
    texts: TextsOfMix, calibration: Calibration, encoding: Encoders, num_used: int, num_held: int
) -> _Drawn:
    """So many sequences of one dataset, at the revision that was read."""
    where, length = f"calibration.dataset {texts.dataset}", calibration.sequence_length
    dataset, revision = open_split(texts, where)
    rows = _encoded(shuffled(rows_of(dataset, texts, where), calibration.seed), encoding, where)
    used, held = _Part(), _Part()
    for row in _distinct(rows, used, num_used * length, set()):
        used.ids += row.ids
    for row in _distinct(rows, held, num_held * length, used.sums):
        # Each sequence begins with a row of its own: what is too long for it is left out. Only that
        # row counts as written: a server would not have other rows before it.
        place = len(held.ids) % length
        own = row.ids[: length - place]
        written = None if place else encoding.written(row.row, row.ids)
        held.ids += own
        held.written += [False] * len(own) if written is None else written[: len(own)]
        held.says_who_wrote |= written is not None
    found = len(used.ids) // length + len(held.ids) // length
    if found < num_used + num_held:
        read, blank = len(used.numbers) + len(held.numbers), used.num_blank + held.num_blank
        part = "its share of " if calibration.also else ""
        raise RecipeError(
            where,
            f"must hold {num_used} + {num_held} sequences of {length} tokens "
            f"({part}samples + held_out)",
            got=f"{found}, from {read} different rows and {blank} blank ones",
            cure="Lower samples, held_out or sequence_length, or name a longer dataset",
        )
    for part, num_sequences in ((used, num_used), (held, num_held)):
        del part.ids[num_sequences * length :], part.written[num_sequences * length :]
    return _Drawn(texts.model_copy(update={"dataset_revision": revision}), used, held)


def _laid_among(parts: Sequence[Tensor]) -> Tensor:
    """The sequences of several datasets, each dataset's evenly over the whole."""
    places = []
    for number, part in enumerate(parts):
        for turn, sequence in enumerate(part):
            places.append(((turn + 0.5) / len(part), number, sequence))
    places.sort(key=lambda place: place[:2])
    return torch.stack([sequence for *_, sequence in places])


class _Row(NamedTuple):
    """A row of a dataset with its token ids; none for a blank one."""

    number: int
    row: DataRow
    ids: list[int]


def _encoded(rows: Iterable[tuple[int, DataRow]], encoding: Encoders, where: str) -> Iterator[_Row]:
    vocab_size = _text_config(encoding.source).get("vocab_size")
    for number, row in rows:
        # A text of spaces alone, or a conversation without turns.
        if not ("".join(row).strip() if isinstance(row, str | Answered) else row):
            yield _Row(number, row, [])
            continue
        try:
            ids = encoding.encode(row)
        except KeepMTPError:
            raise
        except UNENCODABLE as error:
            rule, cure = "must suit the model's chat format", "Mend the row, or name a column"
            got = one_line(error) or type(error).__name__
            raise RecipeError(f"{where}: row {number}", rule, got=got, cure=cure) from error
        if vocab_size is not None and max(ids, default=0) >= vocab_size:
            rule = f"the tokenizer's ids must be below the model's vocab_size, {vocab_size}"
            got, cure = f"{max(ids)} in row {number}", "Use the release's own tokenizer"
            raise CheckpointError(encoding.source.where, rule, got=got, cure=cure)
        yield _Row(number, row, ids)


def _distinct(
    rows: Iterator[_Row], part: _Part, num_tokens: int, others: Collection[str]
) -> Iterator[_Row]:
    """The next rows until the part has so many tokens; fewer only if the rows run out.

    Args:
        rows: those that are taken are used up.
        part: their numbers and sums go there; the caller adds the tokens.
        num_tokens: how many to take.
        others: sums of rows to pass over, because another part has them.
    """
    while len(part.ids) < num_tokens and (row := next(rows, None)) is not None:
        sum_of_row = ids_sha256(row.ids)
        part.num_blank += not row.ids
        if row.ids and sum_of_row not in others:
            part.numbers.append(row.number)
            part.sums.add(sum_of_row)
            yield row


# --- rows -----------------------------------------------------------------------------------------


def open_split(texts: Texts, where: str) -> tuple[IterableDataset, str]:
    """The split as a stream, and the revision it is of: a Hub commit, or "local"."""
    name, path = texts.dataset, find_path(texts.dataset)
    reader = _READERS.get(Path(name).suffix)
    is_of_the_hub = (
        path is None
        and reader is None
        and texts.dataset_revision != "local"
        and name.count("/") < 2
    )
    if not is_of_the_hub and (path is None or (reader is None and path.is_file())):
        raise RecipeError(
            where,
            "must be a Hub id with its dataset_revision, or a folder or "
            f"{', '.join(_READERS)} file",
            got="no such file or folder"
            if path is None
            else f"a file of another kind, {Path(name).suffix}",
            cure="Check the path, which is relative to the current folder, or convert the file",
        )
    if path is not None and path.is_file() and reader == "json":
        with open_regular(path, where) as file:
            start = file.read(_START_BYTES).removeprefix(BOM_UTF8).lstrip()[:4]
        if start and start[:1] not in b"{[":  # pyarrow 26 crashes on rows that are null
            got, rule = start.decode("latin1"), "must begin with an object, or a list of them"
            raise RecipeError(where, rule, got=got, cure="Mend the file")
    revision = "local"
    if path is None:
        revision = dataset_commit(name, texts.dataset_revision, where)
    try:
        if path is None:
            splits = load_dataset(name, texts.subset, revision=revision, streaming=True)
        elif path.is_file():
            splits = load_dataset(str(reader), data_files=str(path), streaming=True)
        else:
            splits = load_dataset(str(path), texts.subset, streaming=True)
    except (StopIteration, *_UNREADABLE) as error:  # the first, where it looks for a first row
        cure = "Give calibration.subset if it names several here, or else Parquet or JSON files"
        rule, got = "must be a dataset that can be read", one_line(error) or "no rows"
        raise RecipeError(where, rule, got=got, cure=cure) from error
    if texts.split not in splits:
        rule = f"split must be one of {', '.join(map(str, splits))}"
        raise RecipeError(where, rule, got=repr(texts.split), cure="Correct calibration.split")
    return splits[texts.split], revision


def rows_of(dataset: IterableDataset, texts: Texts, where: str) -> Iterator[tuple[int, DataRow]]:
    """Row numbers and the values of the column: a text or a conversation, maybe empty."""
    columns = [name for name in (texts.column, texts.prompt_column) if name]
    if {*columns} <= {*(dataset.column_names or ())}:
        dataset = dataset.select_columns(columns)  # Parquet is stored by column
    rows = iter(dataset)
    for number in count():
        try:
            row = next(rows, None)
        except _UNREADABLE as error:
            rule, cure = f"row {number} must be readable", "Mend the file, or download it again"
            raise RecipeError(where, rule, got=one_line(error), cure=cure) from error
        if row is None:
            return
        for name in columns:
            if name not in row:
                rule = f"a column must be one of {', '.join(row)}"
                raise RecipeError(where, rule, got=repr(name), cure="Correct calibration.column")
        yield number, _value(row, texts, f"{where}: row {number}")


def _value(row: Mapping[str, Any], texts: Texts, where: str) -> DataRow:
    value, prompt = row[texts.column], row.get(texts.prompt_column or "")
    if texts.prompt_column is None:
        is_list = isinstance(value, list)
        if isinstance(value, str) or (is_list and all(_is_turn(turn) for turn in value)):
            return value
        rule, got = f"column {texts.column} must hold a text or a list of {{role, content}}", value
    else:
        if isinstance(value, str) and isinstance(prompt, str):
            if not texts.chat:
                return Answered(prompt, value)
            return [{"role": "user", "content": prompt}, {"role": "assistant", "content": value}]
        rule = f"columns {texts.prompt_column} and {texts.column} must hold texts"
        got = [prompt, value]
    cure = "Name another column, or mend the row"
    raise RecipeError(where, rule, got=one_line(repr(got), 60), cure=cure)


def _is_turn(turn: Any) -> bool:
    return (
        isinstance(turn, Mapping)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
    )


def shuffled(rows: Iterator[tuple[int, DataRow]], seed: int) -> Iterator[tuple[int, DataRow]]:
    """The rows in an order that depends on the seed and their numbers alone."""
    # A fixed algorithm in Python's standard library; numpy and torch keep theirs the same only
    # within a version.
    order = random.Random(seed)  # noqa: S311
    while window := list(islice(rows, SHUFFLED_ROWS)):
        order.shuffle(window)
        yield from window


def _text_config(source: Source) -> Mapping[str, Any]:
    return source.config.get("text_config") or source.config


def ids_sha256(numbers: Sequence[int]) -> str:
    """SHA-256 of numbers as int64, little-endian."""
    return hashlib.sha256(b"".join(number.to_bytes(8, "little") for number in numbers)).hexdigest()
