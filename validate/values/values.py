"""`keepmtp check --values`: are the numbers in this checkpoint ones that a model can compute with?

In: a checkpoint's `RuntimeView`, and how much to read. Out: findings, and how much was read. The static check judges
config.json and headers; this reads bytes.

Easy to get wrong: a value that is odd is not always wrong. A finding is an error only where vLLM 0.32 computes
something else than the release does.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.identity import ReadingBar
from ...checkpoints.source import open_source
from ...recipes.errors import CheckpointError
from ...recipes.families import find_view
from ...recipes.family import HFName
from ..check.check import Checked
from ..check.findings import Finding, Objection, errors_first, grouped
from ..check.runtime_view import RuntimeView
from .against import compared
from .reading import Level, chosen, joined, summaries
from .rules import (
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
from .summary import Summary


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


def check_values(
    runtime: RuntimeView,
    level: Level,
    *,
    release: RuntimeView | None = None,
    reading: ReadingBar | None = None,
) -> Values:
    """Read the values of a local checkpoint and judge them.

    Args:
        runtime: the checkpoint.
        level: how much is read.
        release: what it was made from, local too; its weights are compared, all of them if `level` is "all".
        reading: shows the bytes that are read.

    Raises:
        CheckpointError: one of the two is a repository, or a file ends early.
    """
    for each in filter(None, (runtime, release)):
        _refuse_repository(each)
    entries = chosen(runtime, level)
    num_bytes = sum(run.num_bytes for run in joined(entries))
    with reading(num_bytes) if reading else nullcontext(lambda _bytes: None) as progress:
        read = summaries(runtime, entries, progress)
    found = list(objections(runtime, read))
    num_compared = 0
    if release is not None:
        for _, objection in compared(runtime, release, whole=level == "all"):
            num_compared += 1
            found += filter(None, [objection])
    findings = errors_first(grouped(found))
    return Values(findings, len(entries), sum(entry.num_bytes for entry in entries), num_compared)


def with_values(
    checked: Checked, level: Level, *, source: Path | None = None, reading: ReadingBar | None = None
) -> Checked:
    """What the static check found, and what the values say; as it is where there is no family to judge by.

    Args:
        checked: of one checkpoint.
        level: how much is read.
        source: folder of the release, to compare weights with.
        reading: shows the bytes that are read.

    Raises:
        CheckpointError: see `check_values`; a release of another family.
    """
    if checked.runtime is None:
        return checked
    release = None if source is None else _release(source, checked.runtime)
    found = check_values(checked.runtime, level, release=release, reading=reading)
    findings = errors_first((*checked.data.findings, *found.findings))
    return checked._replace(data=checked.data.model_copy(update={"findings": findings}))


def _release(folder: Path, runtime: RuntimeView) -> RuntimeView:
    source = open_source(folder, revision="local")
    view = find_view(source.config, source.where)
    if view.family is not runtime.view.family:
        rule = f"the release of a {runtime.view.family.model_type} checkpoint is of the same family"
        raise CheckpointError(folder, rule, got=view.family.model_type, cure="Give the release as --source")
    return RuntimeView(source=source, view=view)


def _refuse_repository(runtime: RuntimeView) -> None:
    if runtime.source.folder is None:
        raise CheckpointError(
            runtime.source.where,
            "values are read from a folder",
            got="a Hub repository",
            cure=f"Download it: hf download {runtime.source.where} --local-dir FOLDER",
        )


def objections(runtime: RuntimeView, read: Mapping[HFName, Summary]) -> Iterator[Objection]:
    """Everything that the rules object to."""
    tensors = tensors_read(runtime, read)
    yield from values_are_finite(tensors)
    yield from scales_are_positive(tensors)
    yield from block_scales_vary(tensors)
    yield from magnitudes_are_those_of_weights(runtime, read)
    yield from fused_scales_agree(runtime, read)
    yield from input_scales_are_measured(tensors)
    yield from weights_are_not_empty(tensors)
    yield from norms_are_those_of_a_model(runtime, tensors)
