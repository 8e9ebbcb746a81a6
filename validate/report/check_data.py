"""What `check.json` holds next to findings and dry loads: the calibration.

In: the `CheckData` of a check, and the opened checkpoint. Out: the same with the calibration
(results.py).

Easy to get wrong: a checkpoint of another tool has no record. The reason goes into `absent`.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from ...checkpoints.identity import Identity
from ...checkpoints.record import RECORD, read_record
from ...checkpoints.source import Source, small_file
from ...quantize.calibrate.mtp.facts import CalibrationFact
from ...recipes.errors import KeepMTPError, first_fault
from ...recipes.frozen import Raw
from ..check.check import Checked, examine
from ..check.pair import as_of_draft, with_draft
from ..facts.results import CheckData, read_result, write_result
from ..facts.served import TargetFact, is_same


def check_data(check: CheckData, opened: Source | None) -> CheckData:
    """A check with what the checkpoint's own record says.

    Args:
        check: the static check, with the dry loads that were made.
        opened: the checkpoint; None if nothing could be read.
    """
    calibration, why = calibration_of(opened)
    absent = {}
    if why:
        absent["calibration"] = why
    return check.model_copy(update={"calibration": calibration, "absent": absent})


def record_static(
    folder: Path,
    checkpoint: Source,
    identity: Identity,
    *,
    source: Source | None = None,
    target: TargetFact | None = None,
) -> None:
    """Write check.json from the static check, unless there is one of the same bytes, which may hold
    dry loads.
    """
    found = read_result(folder, "check")
    if (
        found is not None
        and found.checkpoint.sha256 == identity.sha256
        and is_same(found.data.target, target)
    ):
        return
    record_check(folder, static(checkpoint, source=source, target=target), identity)


def record_check(folder: Path, checked: Checked, identity: Identity) -> None:
    """Write check.json of what was found."""
    data = check_data(checked.data, checked.source)
    write_result(folder, data, checkpoint=identity, vllm=data.judged_by, target=data.target)


def static(
    checkpoint: Source, *, source: Source | None = None, target: TargetFact | None = None
) -> Checked:
    """The static check of a checkpoint; of a draft of its own, with its target."""
    checked = examine(checkpoint, source=source)
    if target is not None:
        checked = as_of_draft(with_draft(examine(target.path), checked), target)
    return checked


def calibration_of(checkpoint: Source | None) -> tuple[CalibrationFact | None, str]:
    """What a checkpoint's keepmtp.json says of its calibration, or why there is nothing to show."""
    if checkpoint is None:
        return None, "Not known: the checkpoint's headers could not be read."
    try:
        path = small_file(checkpoint, RECORD)
        if path is None:
            return None, f"Not known: the checkpoint has no {RECORD}."
        record = read_record(path, where=RECORD)
        if record.calibration is None:
            return None, "None: every value was computed from the weights alone, without batches."
        settings = record.recipe.whole.get("calibration")
        if not isinstance(settings, Mapping):
            settings = {}
        return calibration_fact(record.calibration, settings), ""
    except ValidationError as error:
        why = first_fault(error)
    except (KeepMTPError, OSError) as error:
        why = str(error)
    return None, f"Not read: {RECORD} is not as this keepmtp writes it ({why})."


def calibration_fact(summary: Raw, settings: Raw) -> CalibrationFact:
    """The report's part from a run's own summary (`quantize/calibrate/run.py`) and its recipe's
    calibration block.

    Raises:
        ValidationError: it is not what report.json has.
    """
    algorithm = settings.get("algorithm")
    length = settings.get("sequence_length")
    chosen = {"algorithm": algorithm, "sequence_length": length}
    return CalibrationFact.model_validate({**summary, **chosen})
