"""`keepmtp check --values`: are the numbers in this checkpoint ones that a model can compute with?

In: a checkpoint's `RuntimeView`, and how much to read; or a plan, and the unfinished output that
was written by it. Out: findings, or a refusal that names the tensor and the element; an output
keeps its partial name then. The static check judges config.json and headers; this reads bytes.

Easy to get wrong: a value that is odd is not always wrong. A finding is an error only where vLLM
computes something else than the release does. And a tensor of our own that was copied is as the
source has it, so the source is what must be mended. A packed weight is made of weights that were
finite, or it is refused where it is packed; so its bytes are not read here again.
"""

from pathlib import Path

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.files import final_path
from ...checkpoints.safetensors_file import total_bytes
from ...checkpoints.source import open_source
from ...quantize.needs.room import calibration_folder
from ...quantize.plan.plan import Plan
from ...recipes.errors import CheckpointError, GateError
from ...recipes.frozen import Bar, unwatched
from ..facts.findings import Finding, errors_first, errors_of, grouped
from ..facts.results import CheckData
from .against import Pairs, compared, not_compared, pairs
from .check import Checked
from .reading import Level, chosen, joined, summaries
from .rules_values import objections

_RELEASE = "Give the release as --source"


def check_values(
    runtime: RuntimeView,
    level: Level,
    *,
    release: RuntimeView | None = None,
    reading: Bar | None = None,
) -> tuple[Finding, ...]:
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
    paired = Pairs([], {})
    if release is not None:
        paired = pairs(runtime, release, whole=level == "all")
        if not paired.found:
            rule = (
                f"the release must have weights by the names of {runtime.source.where}, in a form "
                "that can be read"
            )
            raise CheckpointError(release.source.where, rule, got="none", cure=_RELEASE)
    num_bytes = total_bytes((*joined(runtime.source, entries), *paired.found))
    with (reading or unwatched)(num_bytes) as progress:
        objected = [*objections(runtime, summaries(runtime, entries, progress))]
        if release is not None:
            objected += compared(runtime, release, paired.found, progress)
            objected += not_compared(paired)
    return errors_first(grouped(objected))


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
        own, other = [each.view.family.model_type for each in (checked.runtime, release)]
        if own != other:
            rule = f"the release of a {own} checkpoint is of the same family"
            raise CheckpointError(source, rule, got=other, cure=_RELEASE)
    found = check_values(checked.runtime, level, release=release, reading=reading)
    return checked.with_findings(*checked.data.findings, *found, values_read=level)


def refuse_broken_values(
    plan: Plan, partial: Path, checked: Checked, *, reading: Bar | None
) -> CheckData:
    """Read every scale, every weight that is not packed and the whole MTP block of an output.

    Args:
        plan: what was written.
        partial: the unfinished output.
        checked: its static check.
        reading: shows the bytes that are read.

    Returns: the check, with all findings, also those of the static check; none is an error.

    Raises:
        GateError: a value is one that no model can compute with.
    """
    data = with_values(checked, "unpacked", reading=reading).data
    for worst in errors_of(data.findings):
        cure = worst.cure
        for tensor in plan.tensors:
            if worst.where in [output.name for output in tensor.outputs]:
                entry = plan.entries[tensor.inputs[0]]
                cure = f"{entry.name} of the source gives it: download {entry.file} again"
                if tensor.calibrated or tensor.tuned:
                    folder = calibration_folder(final_path(partial))
                    cure = f"{worst.cure}: remove {partial} and {folder}"
                cure += ", and run the same command again"
        rule = "the written checkpoint must hold values that a model can compute with"
        raise GateError(partial, rule, got=f"{worst.where} {worst.says}", cure=cure)
    return data
