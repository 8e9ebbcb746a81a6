"""Computes the figures of closeness again from the windows on disk, and refuses a result that they do not give.

In: a `ClosenessFact` and its `closeness.jsonl` in the same folder. Out: nothing, or a refusal that names a figure.

Easy to get wrong: the hash of the file proves only that it is the named file. So every figure that follows from its
lines is computed from them again.
"""

from collections.abc import Iterator
from pathlib import Path

from ...checkpoints.identity import file_sha256
from ...recipes.errors import CheckpointError
from ..facts.closeness import ClosenessFact, SourceSitting
from ..facts.results import command, file_of
from ..measure.compared import ComparedFile, figures, perplexities, read_compared

Refigured = Iterator[tuple[str, object, object]]
"""Name, as the report has it, as the windows give it."""

_TOLERANCE = 1e-9


def refuse_unproved_closeness(folder: Path, fact: ClosenessFact) -> None:
    """Refuse a result whose figures do not follow from its file of windows.

    Raises:
        CheckpointError: another file, windows of other bytes, or a figure that they do not give.
    """
    cure = f"Run `{command('closeness', folder)}` again"
    path = folder / fact.samples
    if Path(fact.samples).name != fact.samples:
        rule = "its windows are in the same folder"
        raise CheckpointError(file_of(folder, "closeness"), rule, got=fact.samples, cure=cure)
    got = file_sha256(path) if path.is_file() else "no such file"
    if got != fact.samples_sha256:
        raise CheckpointError(path, f"must be the windows that were counted, {fact.samples_sha256}", got=got, cure=cure)
    compared = read_compared(path)
    if compared.missing:
        rule, got = "must hold every window", f"{len(compared.missing)} missing"
        raise CheckpointError(path, rule, got=got, cure=cure)
    for name, claimed, counted in _figures(fact, compared):
        if claimed != counted and not _is_close(claimed, counted):
            place = f"{file_of(folder, 'closeness')}: {name}"
            raise CheckpointError(place, f"must be what the windows give, {counted}", got=claimed, cure=cure)


def _figures(fact: ClosenessFact, compared: ComparedFile) -> Refigured:
    asked = compared.header.asked
    for name in ("text_sha256", "window", "top", "vocabulary"):
        yield name, getattr(fact, name), getattr(asked, name)
    yield "source.sha256", fact.source.sha256, asked.source_sha256
    yield "checkpoint.sha256", fact.checkpoint.sha256, compared.header.checkpoint_sha256
    for name, counted in figures(compared).items():
        yield name, getattr(fact, name), counted
    before, after = perplexities(compared)
    yield "source.perplexity", fact.source.perplexity, before
    yield "checkpoint.perplexity", fact.checkpoint.perplexity, after
    sittings = [SourceSitting(**each.model_dump(exclude={"sitting"})) for each in compared.sittings.values()]
    yield "checkpoint.servers", fact.checkpoint.servers, tuple(sittings)


def _is_close(claimed: object, counted: object) -> bool:
    if not isinstance(claimed, float) or not isinstance(counted, float):
        return False
    return abs(claimed - counted) <= _TOLERANCE * max(1.0, abs(counted))
