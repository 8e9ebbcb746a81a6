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
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from datasets import IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from httpx import HTTPError
from pyarrow import ArrowException
from torch import Tensor

from ....checkpoints.hub import dataset_commit
from ....checkpoints.safetensors_file import open_regular
from ....checkpoints.source import Source
from ....recipes.errors import CheckpointError, RecipeError
from ....recipes.frozen import Raw, frozen
from ....recipes.schema import Calibration, Texts
from ...plan.texts_here import READERS, SHORTER, file_of, refuse_columns
from .tokenize import Answered, DataRow, Encoders, one_line

# Rows are drawn in a seeded order from this many first ones of the split, then from as many next
# ones, and so on, so that a Hub dataset is read only as far as needed. One that is sorted by topic
# should be shuffled beforehand.
SHUFFLED_ROWS = 10_000
_START_BYTES = 4096
_EncodedRow = tuple[int, DataRow, list[int]]  # its number, it, and its token ids
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
        found: dict[str, list[int]] = {}
        kinds = self.held_out_kinds or ("",) * len(self.held_out_ids)
        for row, kind in enumerate(kinds):
            found.setdefault(kind, []).append(row)
        return found


def calibration_data(
    calibration: Calibration, source: Source, guard: Sequence[Texts] = ()
) -> CalibrationData:
    """Read, draw, tokenize and cut.

    Rows follow one another, each as the tokenizer or the chat template begins and ends it, and are
    cut every `sequence_length` tokens, which may be within a row. Each held-out sequence begins
    with a row of its own, as a server's text does. Held-out text skips rows with the same tokens as
    a calibration row. Blank rows are skipped too; the provenance counts them.

    Several datasets give sequences by their shares, each as if it were alone.

    Args:
        calibration: a recipe's block.
        source: its files must be on this machine.
        guard: datasets of held-out text alone: each gives as many sequences more as are held out,
            of rows that none is calibrated on.

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
    with Encoders(source, may_run_code=calibration.model_code == "checkpoint") as encoding:
        drawn: list[_Drawn] = []
        for texts, own_used, own_held in zip(mix, num_used, num_held, strict=True):
            drawn.append(_draw(calibration, encoding, texts, own_used, own_held))
        calibrated_on: set[str] = set()
        for own in drawn:
            calibrated_on |= own.used.sums
        for texts in guard:
            drawn.append(
                _draw(calibration, encoding, texts, 0, calibration.held_out, calibrated_on)
            )
    parts: list[_Part] = []
    kinds: list[list[int]] = []  # the number of its dataset, for each held-out token
    for number, own in enumerate(drawn):
        parts += [own.used, own.held]
        kinds.append([number] * len(own.held.ids))
    row_numbers: list[int] = []
    for part in parts:
        row_numbers += part.numbers
    ids = _laid_among([own.used.ids for own in drawn[: len(mix)]], length)
    held_out_ids = _laid_among([own.held.ids for own in drawn], length)
    first = drawn[0].texts
    provenance = {
        "dataset": first.dataset,
        "dataset_revision": first.dataset_revision,
        "subset": first.subset or "",
        "split": first.split,
        "column": first.column,
        "prompt_column": first.prompt_column or "",
        "seed": calibration.seed,
        "rows": sum(len(own.used.numbers) for own in drawn),
        "held_out_rows": sum(len(own.held.numbers) for own in drawn),
        "blank_rows": sum(part.num_blank for part in parts),
        "row_numbers_sha256": ids_sha256(row_numbers),
        "tokens": ids.numel(),
        "held_out_tokens": held_out_ids.numel(),
        "ids_sha256": ids_sha256(ids.flatten().tolist()),
        "held_out_ids_sha256": ids_sha256(held_out_ids.flatten().tolist()),
    }
    read = [own.texts.model_dump(mode="json") for own in drawn]
    if len(mix) > 1:
        provenance["also"] = read[1 : len(mix)]
    if guard:
        provenance["guard"] = read[len(mix) :]
    written = None
    if any(own.held.says_who_wrote for own in drawn):
        written = _laid_among([own.held.written for own in drawn], length)
        provenance["held_out_written_tokens"] = int(written.sum())
    titles = []
    for number in _laid_among(kinds, length)[:, 0].tolist():
        titles.append(drawn[number].texts.title)
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
    whole: list[int] = []
    missing: list[tuple[float, int]] = []  # the most negative first; of equal ones the first
    for index, share in enumerate(shares):
        whole.append(int(total * share))
        missing.append((whole[index] - total * share, index))
    missing.sort()
    for _, index in missing[: total - sum(whole)]:
        whole[index] += 1
    return whole


@dataclass(slots=True)
class _Part:
    """Consecutive rows: their token ids one after another, and their numbers.

    Attributes:
        ids: of all rows.
        sums: of the rows' token ids; not for held-out text.
        written: which of these tokens a model writes; not for text to calibrate on.
        says_who_wrote: whether any row said so.
    """

    ids: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    num_blank: int = 0
    sums: set[str] = field(default_factory=set)
    written: list[bool] = field(default_factory=list)
    says_who_wrote: bool = False


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Rows of one dataset.

    Attributes:
        texts: the dataset, at the revision that was read.
        used: to calibrate on.
        held: to measure on.
    """

    texts: Texts
    used: _Part
    held: _Part


def _draw(
    calibration: Calibration,
    encoding: Encoders,
    texts: Texts,
    num_used: int,
    num_held: int,
    elsewhere: Collection[str] | None = None,
) -> _Drawn:
    """So many sequences of one dataset; of a guard with the sums of rows that are calibrated on
    `elsewhere`.
    """
    where = f"calibration.dataset {texts.dataset}"
    if elsewhere is not None:
        where = f"mtp_tuned.guard {texts.dataset}"
    length = calibration.sequence_length
    dataset, revision = open_split(texts, where)
    rows = _encoded(shuffled(rows_of(dataset, texts, where), calibration.seed), encoding, where)
    used = _Part()
    held = _Part()
    while len(used.ids) < num_used * length:
        found = _next_row(rows, used)
        if found is None:
            break
        number, _, ids = found
        used.numbers.append(number)
        used.sums.add(ids_sha256(ids))
        used.ids += ids
    del used.ids[num_used * length :]
    known = used.sums.union(elsewhere or ())
    while len(held.ids) < num_held * length:
        found = _next_row(rows, held)
        if found is None:
            break
        number, row, ids = found
        if ids_sha256(ids) in known:
            continue
        held.numbers.append(number)
        # Each sequence begins with a row of its own: what is too long for it is left out.
        place = len(held.ids) % length
        own = ids[: length - place]
        held.ids += own
        written = None
        if place == 0:
            written = encoding.written(row, ids, f"{where}: row {number}")
        if written is None:
            # Only the row that begins counts: a server would not have other rows before it.
            held.written += [False] * len(own)
        else:
            held.says_who_wrote = True
            held.written += written[: len(own)]
    if elsewhere is not None and not held.says_who_wrote:
        held.written = [True] * len(held.ids)  # as where no dataset says it
    num_found = len(used.ids) // length + len(held.ids) // length
    if num_found < num_used + num_held:
        read = len(used.numbers) + len(held.numbers)
        blank = used.num_blank + held.num_blank
        wanted = f"{num_used} + {num_held} sequences of {length} tokens (samples + held_out)"
        if elsewhere is not None:
            wanted = f"{num_held} sequences of {length} tokens of rows that are not trained on"
        raise RecipeError(
            where,
            f"must hold {wanted}",
            got=f"{num_found}, from {read} different rows and {blank} blank ones",
            cure=SHORTER,
        )
    return _Drawn(texts.model_copy(update={"dataset_revision": revision}), used, held)


def _next_row(rows: Iterator[_EncodedRow], part: _Part) -> _EncodedRow | None:
    """The next row that has tokens, if there is one; `part` counts those without."""
    for row in rows:
        *_, ids = row
        if ids:
            return row
        part.num_blank += 1
    return None


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
) -> Iterator[_EncodedRow]:
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


def ids_sha256(numbers: Sequence[int]) -> str:
    """SHA-256 of numbers as int64, little-endian."""
    total = hashlib.sha256()
    for number in numbers:
        total.update(number.to_bytes(8, "little"))
    return total.hexdigest()
