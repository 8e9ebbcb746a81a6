"""`keepmtp check --values`: are the numbers in this checkpoint ones that a model can compute with?

In: a checkpoint's `RuntimeView`, and how much to read. Out: findings, and how much was read. The
static check judges config.json and headers; this reads bytes.

Easy to get wrong: a value that is odd is not always wrong. A finding is an error only where vLLM
0.32 computes something else than the release does.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

from ...checkpoints.identity import ReadingBar
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import Source, open_source
from ...recipes.errors import CheckpointError
from ..facts.findings import Finding, errors_first, grouped
from .against import compared, pairs
from .check import Checked
from .reading import Level, Stretch, chosen, is_remote, joined, summaries
from .rules_values import glue, matrices_are_not_chance, objections
from .runtime_view import RuntimeView


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
    runtime: RuntimeView,
    level: Level,
    *,
    release: RuntimeView | None = None,
    watch: Watch = UNWATCHED,
) -> Values:
    """Read the values of a checkpoint and judge them.

    Args:
        runtime: the checkpoint, in a folder or on the Hub.
        level: how much is read.
        release: what it was made from; its weights are compared, all of them if `level` is "all".
        watch: who is called meanwhile.

    Raises:
        CheckpointError: a file ends early; the Hub does not send it; no weight of the release has a
            name of this one.
    """
    entries = chosen(runtime, level)
    found = [] if release is None else pairs(runtime, release, whole=level == "all")
    if release is not None and not found:
        rule = (
            f"the release must have weights by the names of {runtime.source.where}, in a form "
            "that can be read"
        )
        raise CheckpointError(
            release.source.where, rule, got="none", cure="Give the release as --source"
        )
    stretches = joined(runtime.source, entries)
    own = [entry for pair in found for entry in pair.weight.parts.values()]
    theirs = [entry for pair in found for entry in pair.theirs.parts.values()]
    num_bytes = sum(part.num_bytes for part in (*stretches, *own, *theirs))
    if level != "scalars":  # these matrices are read a second time
        own += [entry for weight in glue(runtime) for entry in weight.parts.values()]
    if is_remote(runtime.source):
        watch.fetching(_fetch(runtime.source, stretches, own))
    if release is not None and is_remote(release.source):
        watch.fetching(_fetch(release.source, [], theirs))
    with (
        watch.reading(num_bytes) if watch.reading else nullcontext(lambda _bytes: None) as progress
    ):
        objected = list(objections(runtime, summaries(runtime, entries, progress)))
        if level != "scalars":
            objected += matrices_are_not_chance(runtime)
        if release is not None:
            objected += compared(runtime, release, found, progress)
    findings = errors_first(grouped(objected))
    return Values(findings, len(entries), sum(entry.num_bytes for entry in entries), len(found))


def with_values(
    checked: Checked, level: Level, *, source: str | None = None, watch: Watch = UNWATCHED
) -> Checked:
    """What the static check found, and what the values say; as it is where there is no family to
    judge by.

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
    release = None
    if source is not None:
        release = RuntimeView.of(open_source(source))
        own, other = checked.runtime.view.family, release.view.family
        if own is not other:
            rule = f"the release of a {own.model_type} checkpoint is of the same family"
            raise CheckpointError(
                source, rule, got=other.model_type, cure="Give the release as --source"
            )
    found = check_values(checked.runtime, level, release=release, watch=watch)
    findings = errors_first((*checked.data.findings, *found.findings))
    return checked._replace(data=checked.data.model_copy(update={"findings": findings}))


def _fetch(source: Source, stretches: list[Stretch], whole: list[Entry]) -> Fetch:
    """What is asked of a repository: neighbours together, and whole tensors with a request each."""
    num_tensors = sum(len(stretch.entries) for stretch in stretches) + len(whole)
    num_bytes = sum(part.num_bytes for part in (*stretches, *whole))
    return Fetch(
        source.where,
        num_tensors,
        num_bytes,
        sum(each.num_requests for each in stretches) + len(whole),
    )
