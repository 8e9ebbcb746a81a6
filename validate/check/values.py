"""`keepmtp check --values`: are the numbers in this checkpoint ones that a model can compute with?

In: a checkpoint's `RuntimeView`, and how much to read. Out: findings, and how much was read. The static check judges
config.json and headers; this reads bytes.

Easy to get wrong: a value that is odd is not always wrong. A finding is an error only where vLLM 0.32 computes
something else than the release does.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from ...checkpoints.identity import ReadingBar
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import open_source
from ...recipes.errors import CheckpointError
from ...recipes.families import find_view
from ...recipes.family import HFName
from ..facts.findings import Finding, Objection, errors_first, grouped
from .against import Pair, bands_of, compared, pairs
from .check import Checked
from .reading import Level, chosen, gap_of, is_remote, joined, num_requests, summaries
from .rules_values import (
    block_scales_vary,
    fused_scales_agree,
    input_scales_are_measured,
    magnitudes_are_those_of_weights,
    norms_are_those_of_a_model,
    scales_are_positive,
    tensors_read,
    values_are_finite,
    weights_are_not_empty,
)
from .runtime_view import RuntimeView
from .untrained import glue, matrices_are_not_chance, norms_have_learned, sizes_are_those_of_the_backbone
from .values_summary import Summary


class Values(NamedTuple):
    """What the value check found.

    Attributes:
        findings: errors first.
        num_tensors, num_bytes: what was read.
        num_compared: weights that were compared with the release's.
    """

    findings: tuple[Finding, ...]
    num_tensors: int
    num_bytes: int
    num_compared: int = 0


class Fetch(NamedTuple):
    """What is about to be read of one repository on the Hub."""

    where: str
    num_tensors: int
    num_bytes: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Who is called while values are read.

    Attributes:
        reading: with the number of bytes, when reading begins.
        fetching: with what will be asked of each repository, before the first request.
    """

    reading: ReadingBar | None = None
    fetching: Callable[[Fetch], None] = lambda _fetch: None


UNWATCHED = Watch()


def check_values(
    runtime: RuntimeView, level: Level, *, release: RuntimeView | None = None, watch: Watch = UNWATCHED
) -> Values:
    """Read the values of a checkpoint and judge them.

    Args:
        runtime: the checkpoint, in a folder or on the Hub.
        level: how much is read.
        release: what it was made from; its weights are compared, all of them if `level` is "all".
        watch: who is called meanwhile.

    Raises:
        CheckpointError: a file ends early; the Hub does not send it; no weight of the release has a name of this one.
    """
    entries = chosen(runtime, level)
    found = [] if release is None else _pairs(runtime, release, whole=level == "all")
    again = [entry for weight in glue(runtime) for entry in weight.parts.values()] if level != "scalars" else []
    for fetch in _fetches(runtime, release, entries, found, again):
        watch.fetching(fetch)
    num_bytes = sum(run.num_bytes for run in joined(entries, gap=gap_of(runtime.source)))
    num_bytes += sum(entry.num_bytes for pair in found for side in pair.entries for entry in side)
    with watch.reading(num_bytes) if watch.reading else nullcontext(lambda _bytes: None) as progress:
        objected = list(objections(runtime, summaries(runtime, entries, progress)))
        if level != "scalars":
            objected += matrices_are_not_chance(runtime)
        if release is not None:
            objected += [each for _, each in compared(runtime, release, found, progress) if each is not None]
    findings = errors_first(grouped(objected))
    return Values(findings, len(entries), sum(entry.num_bytes for entry in entries), len(found))


def with_values(checked: Checked, level: Level, *, source: str | None = None, watch: Watch = UNWATCHED) -> Checked:
    """What the static check found, and what the values say; as it is where there is no family to judge by.

    Args:
        checked: of one checkpoint.
        level: how much is read.
        source: the release, a folder or a Hub id, to compare weights with.
        watch: who is called meanwhile.

    Raises:
        CheckpointError: see `check_values`; a release of another family.
    """
    if checked.runtime is None:
        return checked
    release = None if source is None else _release(source, checked.runtime)
    found = check_values(checked.runtime, level, release=release, watch=watch)
    findings = errors_first((*checked.data.findings, *found.findings))
    return checked._replace(data=checked.data.model_copy(update={"findings": findings}))


def _release(where: str, runtime: RuntimeView) -> RuntimeView:
    source = open_source(where)
    view = find_view(source.config, source.where, source.entries)
    if view.family is not runtime.view.family:
        rule = f"the release of a {runtime.view.family.model_type} checkpoint is of the same family"
        raise CheckpointError(where, rule, got=view.family.model_type, cure="Give the release as --source")
    return RuntimeView(source=source, view=view)


def _pairs(runtime: RuntimeView, release: RuntimeView, *, whole: bool) -> list[Pair]:
    found = pairs(runtime, release, whole=whole)
    if not found:
        rule = f"the release must have weights by the names of {runtime.source.where}, in a form that can be read"
        raise CheckpointError(release.source.where, rule, got="none", cure="Give the release as --source")
    return found


def _fetches(
    runtime: RuntimeView, release: RuntimeView | None, entries: list[Entry], found: list[Pair], again: list[Entry]
) -> Iterator[Fetch]:
    """What is asked of each of the two, where it is a repository; `again` is read a second time, as matrices."""
    runs = list(joined(entries, gap=gap_of(runtime.source)))
    compared_bytes = [[entry.num_bytes for pair in found for entry in pair.entries[side]] for side in (0, 1)]
    asked = [sum(len(pair.entries[side]) * len(list(bands_of(pair))) for pair in found) for side in (0, 1)]
    if is_remote(runtime.source):
        own, num_bytes = compared_bytes[0], sum(run.num_bytes for run in runs)
        own += [entry.num_bytes for entry in again]
        num_tensors, requests = len(entries) + len(own), num_requests(runs) + asked[0] + len(again)
        yield Fetch(runtime.source.where, num_tensors, num_bytes + sum(own), requests)
    if release is not None and is_remote(release.source):
        theirs = compared_bytes[1]
        yield Fetch(release.source.where, len(theirs), sum(theirs), asked[1])


def objections(runtime: RuntimeView, read: Mapping[HFName, Summary]) -> Iterator[Objection]:
    """Everything that the rules object to."""
    tensors = tensors_read(runtime, read)
    yield from values_are_finite(runtime, tensors)
    yield from scales_are_positive(runtime, tensors)
    yield from block_scales_vary(tensors)
    yield from magnitudes_are_those_of_weights(runtime, read)
    yield from fused_scales_agree(runtime, read)
    yield from input_scales_are_measured(tensors)
    yield from weights_are_not_empty(runtime, tensors)
    yield from norms_are_those_of_a_model(runtime, tensors)
    yield from norms_have_learned(runtime, read)
    yield from sizes_are_those_of_the_backbone(runtime, read)
