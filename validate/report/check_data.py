"""What `check.json` holds next to findings and dry loads: sizes from headers, and the calibration.

In: the `CheckData` of a check, and the opened checkpoint. Out: the same with sizes and calibration
(results.py).

Easy to get wrong: a checkpoint without a family's table has no sizes, and one of another tool has
no record. The reason goes into `absent`.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from ...checkpoints.identity import Identity
from ...checkpoints.record import RECORD, read_record
from ...checkpoints.source import Source, small_file, view_of
from ...quantize.calibrate.mtp.facts import CalibrationFact
from ...recipes.errors import KeepMTPError, RecipeError, first_fault
from ...recipes.frozen import Raw
from ..check.check import Checked, examine
from ..check.pair import as_of_draft, with_draft
from ..facts.results import CheckData, GroupSize, read_result, write_result
from ..facts.served import TargetFact, is_same


def check_data(
    check: CheckData, *, opened: Source | None = None, source: Source | None = None
) -> CheckData:
    """A check with everything that headers and the checkpoint's own record say.

    Args:
        check: the static check, with the dry loads that were made.
        opened: the checkpoint; None if nothing could be read.
        source: what it was made from, for sizes before and after.
    """
    if opened is None:
        unread = "the checkpoint's headers could not be read."
        absent = {"sizes": f"No sizes: {unread}", "calibration": f"Not known: {unread}"}
        return check.model_copy(update={"absent": absent})
    calibration, why = calibration_of(opened)
    sizes = ()
    absent = {}
    if why:
        absent["calibration"] = why
    try:
        sizes = sizes_by_group(opened, source)
        if check.target is not None:  # what a draft leaves out of the source is its target's
            sizes = tuple([row for row in sizes if row.num_tensors])
    except RecipeError as unknown:
        absent["sizes"] = f"No sizes: {unknown}"
    return check.model_copy(update={"sizes": sizes, "calibration": calibration, "absent": absent})


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
    record_check(folder, static(checkpoint, source=source, target=target), identity, source)


def record_check(folder: Path, checked: Checked, identity: Identity, source: Source | None) -> None:
    """Write check.json of what was found; `source` is what the checkpoint was made from."""
    data = check_data(checked.data, opened=checked.source, source=source)
    write_result(folder, data, checkpoint=identity, vllm=data.judged_by)


def static(
    checkpoint: Source, *, source: Source | None = None, target: TargetFact | None = None
) -> Checked:
    """The static check of a checkpoint; of a draft of its own, with its target."""
    checked = examine(checkpoint, source=source)
    if target is not None:
        checked = as_of_draft(with_draft(examine(target.path), checked), target)
    return checked


def sizes_by_group(checkpoint: Source, source: Source | None = None) -> tuple[GroupSize, ...]:
    """Bytes by part and module group, from headers, the largest first; `source` is what the
    checkpoint was made from.

    Tensors without a place in the family table are the group "unknown" of the backbone.

    Raises:
        RecipeError: no family table for the model type.
    """
    after = _measured(checkpoint)
    before = defaultdict[tuple[str, str], list[int]](list)
    if source:
        before = _measured(source)
    rows = []
    for part, group in after.keys() | before.keys():
        now = sum(after[part, group])
        was = None
        if source:
            was = sum(before[part, group])
        row = GroupSize(
            part=part,
            group=group,
            num_tensors=len(after[part, group]),
            num_bytes=now,
            num_bytes_before=was,
        )
        rows.append((part, -max(now, was or 0), group, row))
    return tuple([row for *_, row in sorted(rows)])


def calibration_of(checkpoint: Source) -> tuple[CalibrationFact | None, str]:
    """What a checkpoint's keepmtp.json says of its calibration, or why there is nothing to show."""
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


def _measured(source: Source) -> defaultdict[tuple[str, str], list[int]]:
    """Bytes of each tensor, by part and group."""
    view = view_of(source)
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for entry in source.entries.values():
        place = view.place(entry.name)
        key = ("backbone", "unknown")
        if place:
            key = place.part, place.role
        groups[key].append(entry.num_bytes)
    return groups
