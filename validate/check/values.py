"""`keepmtp check --values`: are the numbers in this checkpoint ones that a model can compute with?

In: a checkpoint's `RuntimeView`, and how much to read. Out: findings, and how much was read. The
static check judges config.json and headers; this reads bytes.

Easy to get wrong: a value that is odd is not always wrong. A finding is an error only where vLLM
computes something else than the release does.
"""

from typing import NamedTuple

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.safetensors_file import total_bytes
from ...checkpoints.source import open_source
from ...recipes.errors import CheckpointError
from ...recipes.frozen import Bar, unwatched
from ..facts.findings import Finding, errors_first, grouped
from .against import Pair, compared, pairs
from .check import Checked
from .reading import Level, chosen, joined, summaries
from .rules_values import objections


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
    num_compared: int


def check_values(
    runtime: RuntimeView,
    level: Level,
    *,
    release: RuntimeView | None = None,
    reading: Bar | None = None,
) -> Values:
    """Read the values of a checkpoint and judge them.

    Args:
        runtime: the checkpoint, in a folder or on the Hub.
        level: how much is read.
        release: what it was made from; its weights are compared, all of them if `level` is "all".
        reading: shows the bytes that are read.

    Raises:
        CheckpointError: a file ends early; the Hub does not send it; no weight of the release has a
            name of this one.
    """
    entries = chosen(runtime, level)
    found = list[Pair]()
    if release is not None:
        found = pairs(runtime, release, whole=level == "all")
        if not found:
            rule = (
                f"the release must have weights by the names of {runtime.source.where}, in a form "
                "that can be read"
            )
            raise CheckpointError(
                release.source.where, rule, got="none", cure="Give the release as --source"
            )
    num_bytes = total_bytes((*joined(runtime.source, entries), *found))
    with (reading or unwatched)(num_bytes) as progress:
        objected = list(objections(runtime, summaries(runtime, entries, progress)))
        if release is not None:
            objected += compared(runtime, release, found, progress)
    findings = errors_first(grouped(objected))
    return Values(findings, len(entries), total_bytes(entries), len(found))


def with_values(
    checked: Checked,
    level: Level,
    *,
    source: str | None = None,
    reading: Bar | None = None,
) -> Checked:
    """What the static check found, and what the values say; as it is where there is no family to
    judge by.

    Args:
        checked: of one checkpoint.
        level: how much is read.
        source: the release, a folder or a Hub id, to compare weights with.
        reading: shows the bytes that are read.

    Raises:
        CheckpointError: see `check_values`; a release of another family.
    """
    if checked.runtime is None:
        return checked
    release = None
    if source is not None:
        release = RuntimeView.of(open_source(source))
        own = checked.runtime.view.family
        other = release.view.family
        if own is not other:
            rule = f"the release of a {own.model_type} checkpoint is of the same family"
            raise CheckpointError(
                source, rule, got=other.model_type, cure="Give the release as --source"
            )
    found = check_values(checked.runtime, level, release=release, reading=reading)
    findings = errors_first((*checked.data.findings, *found.findings))
    return checked._replace(data=checked.data.model_copy(update={"findings": findings}))
