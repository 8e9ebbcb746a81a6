"""The values of our own output, read before it gets its name: a scale that is NaN loads without a
word.

In: a plan, and the unfinished output that was written by it. Out: findings, or a refusal that names
the tensor and the element; the output keeps its partial name then.

Easy to get wrong: a tensor that was copied is as the source has it, so the source is what must be
mended. A packed weight is made of weights that were finite, or it is refused where it is packed; so
its bytes are not read here again.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from ...checkpoints.files import final_path
from ...quantize.needs.room import calibration_folder
from ...quantize.plan.plan import Plan
from ...recipes.errors import GateError
from ..facts.findings import errors_of

if TYPE_CHECKING:
    from ...recipes.frozen import Bar
    from ..facts.findings import Finding
    from .check import Checked


def refuse_broken_values(
    plan: Plan, partial: Path, checked: "Checked", *, reading: "Bar | None"
) -> tuple["Finding", ...]:
    """Read every scale, every weight that is not packed and the whole MTP block of an output.

    Args:
        plan: what was written.
        partial: the unfinished output.
        checked: its static check.
        reading: shows the bytes that are read.

    Returns: all findings, also those of the static check; none is an error.

    Raises:
        GateError: a value is one that no model can compute with.
    """
    from .values import with_values  # imports torch

    findings = with_values(checked, "unpacked", reading=reading).data.findings
    worst = next(iter(errors_of(findings)), None)
    if worst is not None:
        rule = "the written checkpoint must hold values that a model can compute with"
        raise GateError(
            partial, rule, got=f"{worst.where} {worst.says}", cure=_cure(plan, partial, worst)
        )
    return findings


def _cure(plan: Plan, partial: Path, finding: "Finding") -> str:
    """What to do: where the tensor was calibrated that is done again, else its source is mended."""
    for tensor in plan.tensors:
        if finding.where not in [output.name for output in tensor.outputs]:
            continue
        if tensor.calibrated or tensor.tuned:
            folder = calibration_folder(final_path(partial))
            return f"{finding.cure}: remove {partial} and {folder}, and run the same command again"
        entry = plan.entries[tensor.inputs[0]]
        return (
            f"{entry.name} of the source gives it: download {entry.file} again, and run the same "
            "command again"
        )
    return finding.cure
