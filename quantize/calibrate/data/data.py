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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from pyarrow import ArrowException
from torch import Tensor

from ....checkpoints.hub import dataset_commit
from ....checkpoints.safetensors_file import open_regular
from ....checkpoints.source import Source
from ....recipes.blocks import Calibration, Texts
from ....recipes.errors import CheckpointError, RecipeError
from ....recipes.frozen import Json, Raw, frozen
from ...plan.texts_here import READERS, SHORTER, file_of, refuse_columns
from .tokenize import Answered, DataRow, Encoders, one_line

# Rows are drawn in a seeded order from this many first ones of the split, then from as many next
# ones, and so on, so that a Hub dataset is read only as far as needed. One that is sorted by topic
# should be shuffled beforehand.
SHUFFLED_ROWS = 10_000
_START_BYTES = 4096
_UNREADABLE = (
    DatasetsError,
    ArrowException,
    HTTPError,
    OSError,
    ValueError,
    TypeError,
    RuntimeError,
)


@frozen
class CalibrationData:
    """What a calibrated run computes with.

    Attributes:
        ids: [samples, sequence_length] int64, CPU, no padding.
        held_out_ids: [held_out, sequence_length], of rows that are not in `ids`.
        held_out_written: bool, of the same shape: tokens that a model writes, not its user, in the
            row that a sequence begins with; None where no row says which they are.
        held_out_kinds: of each held-out sequence, the dataset that it is of.
        provenance: dataset, its resolved revision, numbers of rows and tokens, and SHA-256 sums of
            the row numbers and of both sets' ids (int64, little-endian), which are equal exactly
            when the ids are.
    """

    ids: Tensor
    held_out_ids: Tensor
    held_out_written: Tensor | None = None
    held_out_kinds: tuple[str, ...] = ()
    provenance: Raw

    @property
    def rows_of_kinds(self) -> dict[str, list[int]]:
        """Kind of held-out text -> its sequences; one kind where nothing says which they are."""
        found = {}
        kinds = self.held_out_kinds or ("",) * len(self.held_out_ids)
        for row, kind in enumerate(kinds):
            found.setdefault(kind, []).append(row)
        return found


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
        RecipeError: the dataset, its split, its column or a row of it cannot be used, or it is too
            short.
        CheckpointError: there is no usable tokenizer next to the weights, or it has ids the model
            has no embedding for.
    """
    length = calibration.sequence_length
    mix = calibration.mix
    shares = [texts.share for texts in mix]
    num_used = portions(calibration.samples, shares)
    num_held = portions(calibration.held_out, shares)
    drawn = []
    with Encoders(source, may_run_code=calibration.model_code == "checkpoint") as encoding:
        for texts, own_used, own_held in zip(mix, num_used, num_held, strict=True):
            drawn.append(_draw(calibration, encoding, texts, own_used, own_held))
    numbers = []
    kinds = []  # the number of its dataset, for each held-out token
    for kind, own in enumerate(drawn):
        numbers += own.numbers + own.held_numbers
        kinds.append([kind] * len(own.held_ids))
    ids = _laid_among([own.ids for own in drawn], length)
    held_out_ids = _laid_among([own.held_ids for own in drawn], length)
    first = drawn[0].texts
    provenance: Json = {
        "dataset": first.dataset,
        "dataset_revision": first.dataset_revision,
        "subset": first.subset or "",
        "split": first.split,
        "column": first.column,
        "prompt_column": first.prompt_column or "",
        "seed": calibration.seed,
        "rows": sum(len(own.numbers) for own in drawn),
        "held_out_rows": sum(len(own.held_numbers) for own in drawn),
        "blank_rows": sum(own.num_blank for own in drawn),
        "row_numbers_sha256": ids_sha256(numbers),
        "tokens": ids.numel(),
        "held_out_tokens": held_out_ids.numel(),
        "ids_sha256": ids_sha256(ids),
        "held_out_ids_sha256": ids_sha256(held_out_ids),
    }
    if len(mix) > 1:
        provenance["also"] = [own.texts.model_dump(mode="json") for own in drawn[1:]]
    written = None
    if any(own.says_who_wrote for own in drawn):
        written = _laid_among([own.written for own in drawn], length)
        provenance["held_out_written_tokens"] = int(written.sum())
    titles = [drawn[kind].texts.title for kind in _laid_among(kinds, length)[:, 0]]
    return CalibrationData(
        ids=ids,
        held_out_ids=held_out_ids,
        held_out_written=written,
        held_out_kinds=tuple(titles),
        provenance=provenance,
    )


# --- one dataset ----------------------------------------------------------------------------------


def portions(total: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers with this sum, as near to the shares as can be; the largest remainders get what
    is left.
    """
    whole = []
    missing = []  # the most negative first; of equal ones the first
    for index, share in enumerate(shares):
        whole.append(int(total * share))
        missing.append((whole[index] - total * share, index))
    missing.sort()
    for _, index in missing[: total - sum(whole)]:
        whole[index] += 1
    return whole


@dataclass(slots=True)
class _Drawn:
    """Rows of one dataset, one after another.

    Attributes:
        texts: the dataset, at the revision that was read.
        ids: of the rows to calibrate on.
        numbers: of these rows.
        sums: of the token ids of each.
        held_ids: of the rows to measure on.
        held_numbers: of these rows.
        written: which of their tokens a model writes.
        says_who_wrote: whether any row said so.
        num_blank: rows without tokens.
    """

    texts: Texts
    ids: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sums: set[str] = field(default_factory=set)
    held_ids: list[int] = field(default_factory=list)
    held_numbers: list[int] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)
    says_who_wrote: bool = False
    num_blank: int = 0


def _draw(
    calibration: Calibration,
    encoding: Encoders,
    texts: Texts,
    num_used: int,
    num_held: int,
) -> _Drawn:
    """So many sequences of one dataset."""
    where = f"calibration.dataset {texts.dataset}"
    length = calibration.sequence_length
    dataset, revision = open_split(texts, where)
    rows = _encoded(shuffled(rows_of(dataset, texts, where), calibration.seed), encoding, where)
    drawn = _Drawn(texts.model_copy(update={"dataset_revision": revision}))
    while len(drawn.ids) < num_used * length or len(drawn.held_ids) < num_held * length:
        is_used = len(drawn.ids) < num_used * length
        found = next(rows, None)
        if found is None:
            break
        number, row, ids = found
        digest = ids_sha256(ids)
        if not ids:
            drawn.num_blank += 1
        elif is_used:
            drawn.numbers.append(number)
            drawn.sums.add(digest)
            drawn.ids += ids
        elif digest not in drawn.sums:
            drawn.held_numbers.append(number)
            # Each sequence begins with a row of its own: what is too long for it is left out.
            place = len(drawn.held_ids) % length
            own = ids[: length - place]
            drawn.held_ids += own
            written = None
            if place == 0:
                written = encoding.written(row, ids, f"{where}: row {number}")
            # Only the row that begins counts: a server would not have other rows before it.
            drawn.written += (written or [False] * len(own))[: len(own)]
            drawn.says_who_wrote |= written is not None
    del drawn.ids[num_used * length :]
    num_found = len(drawn.ids) // length + len(drawn.held_ids) // length
    if num_found < num_used + num_held:
        num_read = len(drawn.numbers) + len(drawn.held_numbers)
        raise RecipeError(
            where,
            f"must hold {num_used} + {num_held} sequences of {length} tokens (samples + held_out)",
            got=f"{num_found}, from {num_read} different rows and {drawn.num_blank} blank ones",
            cure=SHORTER,
        )
    return drawn


def _laid_among(parts: Iterable[Sequence[int]], length: int) -> Tensor:
    """The sequences of several datasets, each dataset's evenly over the whole."""
    places = []
    for number, part in enumerate(parts):
        sequences = torch.tensor(part).view(len(part) // length, length)
        for turn, sequence in enumerate(sequences):
            places.append(((turn + 0.5) / len(sequences), number, sequence))
    places.sort(key=itemgetter(0, 1))
    return torch.stack([sequence for *_, sequence in places])


def _encoded(
    rows: Iterable[tuple[int, DataRow]], encoding: Encoders, where: str
) -> Iterator[tuple[int, DataRow, list[int]]]:
    """Rows with their numbers and token ids; none for a blank one."""
    vocab_size = encoding.source.text_config.get("vocab_size")
    for number, row in rows:
        text = row
        if isinstance(row, str | Answered):
            text = "".join(row).strip()
        if not text:  # spaces alone, or a conversation without turns
            yield number, row, []
            continue
        ids = encoding.encode(row, f"{where}: row {number}")
        if vocab_size is not None and max(ids, default=0) >= vocab_size:
            raise CheckpointError(
                encoding.source.where,
                f"the tokenizer's ids must be below the model's vocab_size, {vocab_size}",
                got=f"{max(ids)} in row {number}",
                cure="Use the release's own tokenizer",
            )
        yield number, row, ids


# --- rows -----------------------------------------------------------------------------------------


def open_split(texts: Texts, where: str) -> tuple[IterableDataset, str]:
    """The split as a stream, and the revision it is of: a Hub commit, or "local"."""
    name = texts.dataset
    path = file_of(texts, where)
    reader = READERS.get(Path(name).suffix)
    if path is not None and path.is_file() and reader == "json":
        with open_regular(path, where) as file:
            start = file.read(_START_BYTES).removeprefix(BOM_UTF8).lstrip()[:4]
        if start and start[:1] not in b"{[":  # pyarrow 26 crashes on rows that are null
            raise RecipeError(
                where,
                "must begin with an object, or a list of them",
                got=start.decode("latin1"),
                cure="Mend the file",
            )
    given: tuple[Any, ...] = str(path or name), texts.subset
    revision = "local"
    options = {}
    if path is None:
        revision = options["revision"] = dataset_commit(name, texts.dataset_revision, where)
    elif path.is_file():
        given = (reader,)
        options = {"data_files": str(path)}
    try:
        splits = load_dataset(*given, streaming=True, **options)
    except (StopIteration, *_UNREADABLE) as error:  # the first, where it looks for a first row
        got = one_line(error) or "no rows"
        raise RecipeError(
            where,
            "must be a dataset that can be read",
            got=got,
            cure="Give calibration.subset if it names several here, or else Parquet or JSON files",
        ) from error
    if texts.split not in splits:
        raise RecipeError(
            where,
            f"split must be one of {', '.join(map(str, splits))}",
            got=repr(texts.split),
            cure="Correct calibration.split",
        )
    return splits[texts.split], revision


def rows_of(dataset: IterableDataset, texts: Texts, where: str) -> Iterator[tuple[int, DataRow]]:
    """Row numbers and the values of the column: a text or a conversation, maybe empty."""
    columns = [texts.column]
    if texts.prompt_column:
        columns.append(texts.prompt_column)
    if {*columns} <= {*(dataset.column_names or ())}:
        dataset = dataset.select_columns(columns)  # Parquet is stored by column
    rows = iter(dataset)
    for number in count():
        try:
            row = next(rows, None)
        except _UNREADABLE as error:
            raise RecipeError(
                where,
                f"row {number} must be readable",
                got=one_line(error),
                cure="Mend the file, or download it again",
            ) from error
        if row is None:
            return
        refuse_columns(texts, row, where)
        yield number, _value(row, texts, f"{where}: row {number}")


def _value(row: Raw, texts: Texts, where: str) -> DataRow:
    value = row[texts.column]
    prompt = row.get(texts.prompt_column or "")
    if texts.prompt_column is None:
        if isinstance(value, str) or (isinstance(value, list) and all(map(_is_turn, value))):
            return value
    elif isinstance(value, str) and isinstance(prompt, str):
        if not texts.chat:
            return Answered(prompt, value)
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": value}]
    raise RecipeError(
        where,
        f"column {texts.column} must hold a text, or without a prompt_column a list of "
        "{role, content}; and the prompt_column a text",
        got=one_line(repr([value, prompt]), 60),
        cure="Name another column, or mend the row",
    )


def _is_turn(turn: Any) -> bool:
    """A mapping whose role and content are texts."""
    if not isinstance(turn, Mapping):
        return False
    return isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)


def shuffled(rows: Iterator[tuple[int, DataRow]], seed: int) -> Iterator[tuple[int, DataRow]]:
    """The rows in an order that depends on the seed and their numbers alone."""
    # A fixed algorithm in Python's standard library; numpy and torch keep theirs the same only
    # within a version.
    order = random.Random(seed)  # noqa: S311
    while True:
        window = list(islice(rows, SHUFFLED_ROWS))
        if not window:
            return
        order.shuffle(window)
        yield from window


def ids_sha256(numbers: Sequence[int] | Tensor) -> str:
    """SHA-256 of numbers as int64, little-endian."""
    return hashlib.sha256(np.asarray(numbers, "<i8").tobytes()).hexdigest()
