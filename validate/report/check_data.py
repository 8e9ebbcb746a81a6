"""What `check.json` holds: the static check and dry loads in the report's terms, sizes from headers, the calibration.

In: a `Report` of the check, and the opened checkpoint. Out: a `CheckData` (results.py).

Easy to get wrong: which station a finding is from is told by its rule, and a dry load is good only if none of them is
its own: vLLM may have raised nothing and hold something else than the files.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...checkpoints.identity import Identity
from ...checkpoints.record import RECORD, read_record
from ...checkpoints.source import Source, small_file
from ...recipes.errors import KeepMTPError, RecipeError, first_fault
from ...recipes.families import find_view
from ..check.check import examine
from ..check.findings import Finding, Report
from ..check.runtime_view import Evidence
from ..dryload.loader import Side, Verdict
from ..dryload.verdict_findings import DEFECT, RULE, findings
from ..serving.vllm_env import TESTED
from .calibrated import CalibrationFact
from .results import CheckData, read_result, write_result
from .schema import (
    CheckpointFacts,
    DryLoad,
    FindingFact,
    GroupSize,
    KernelUse,
    LoadedModel,
    LoadFailure,
)

DRY_RULES = (RULE, DEFECT, "no-kernel")
"""Rules whose findings come from a dry load."""


def check_data(
    check: Report,
    *,
    vllm: str,
    evidence: Evidence | None = None,
    opened: Source | None = None,
    source: Source | None = None,
) -> CheckData:
    """A check with everything that headers and the checkpoint's own record say.

    Args:
        check: the static check's report, with the dry loads that were made.
        vllm: the version that judged.
        evidence, opened: from `static.examine`; None where the family is unknown, or nothing could be read.
        source: what it was made from, for sizes before and after.
    """
    found = tuple(
        FindingFact(
            origin="dry" if finding.rule in DRY_RULES else "static",
            severity=finding.severity,
            where=finding.where,
            says=finding.says,
            cure=finding.cure,
            rule=finding.rule,
            count=finding.count,
        )
        for finding in check.findings
    )
    dry = tuple(_dry_load(verdict, findings(verdict, evidence, version=vllm)) for verdict in check.dry)
    sizes, calibration, absent = _from_files(opened, source)
    return CheckData(
        path=check.path,
        facts=CheckpointFacts(**asdict(check.facts)),
        findings=found,
        sizes=sizes,
        dry=dry,
        calibration=calibration,
        absent=absent,
    )


def record_static(folder: Path, checkpoint: Source, identity: Identity, *, source: Source | None = None) -> None:
    """Write check.json from the static check, unless there is one of the same bytes, which may hold dry loads."""
    found = read_result(folder, "check")
    if found is not None and found.checkpoint.sha256 == identity.sha256:
        return
    report, opened, evidence = examine(checkpoint.where, source=source)
    data = check_data(report, vllm=TESTED[0], evidence=evidence, opened=opened, source=source)
    write_result(folder, "check", data, checkpoint=identity, vllm=TESTED[0])


def sizes_by_group(checkpoint: Source, source: Source | None = None) -> tuple[GroupSize, ...]:
    """Bytes by part and module group, from headers, the largest first; `source` is what the checkpoint was made from.

    Tensors without a place in the family table are the group "unknown" of the backbone.

    Raises:
        RecipeError: no family table for the model type.
    """
    after = _measured(checkpoint)
    before = None if source is None else _measured(source)
    rows = [
        GroupSize(
            part=part,
            group=group,
            num_tensors=len(after.get((part, group), ())),
            num_bytes=sum(after.get((part, group), ())),
            num_bytes_before=None if before is None else sum(before.get((part, group), ())),
        )
        for part, group in after.keys() | (before or {}).keys()
    ]
    return tuple(sorted(rows, key=lambda row: (row.part, -max(row.num_bytes, row.num_bytes_before or 0), row.group)))


def calibration_of(checkpoint: Source) -> tuple[CalibrationFact | None, str]:
    """What a checkpoint's keepmtp.json says of its calibration, or why there is nothing to show."""
    try:
        path = small_file(checkpoint, RECORD)
        if path is None:
            return None, f"Not known: the checkpoint has no {RECORD}."
        record = read_record(path, where=RECORD)
        if record.calibration is None:
            return None, "None: every value was computed from the weights alone, without batches."
        return calibration_fact(record.calibration, record.recipe.whole["calibration"]), ""
    except ValidationError as error:
        why = first_fault(error)
    except (KeepMTPError, OSError) as error:
        why = str(error)
    except (KeyError, TypeError) as error:
        why = repr(error)
    return None, f"Not read: {RECORD} is not as this keepmtp writes it ({why})."


def calibration_fact(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> CalibrationFact:
    """The report's part from a run's own summary (`quantize/calibrate/run.py`) and its recipe's calibration block.

    Raises:
        ValidationError: it is not what report.json has.
    """
    chosen = {key: settings[key] for key in ("algorithm", "sequence_length")}
    return CalibrationFact.model_validate({**summary, **chosen})


def _from_files(
    opened: Source | None, source: Source | None
) -> tuple[tuple[GroupSize, ...], CalibrationFact | None, dict[str, str]]:
    """Sizes and calibration, and why one of them is empty."""
    if opened is None:
        return (
            (),
            None,
            {
                "sizes": "No sizes: the checkpoint's headers could not be read.",
                "calibration": "Not known: the checkpoint could not be read.",
            },
        )
    calibration, why = calibration_of(opened)
    absent = {"calibration": why} if why else {}
    try:
        return sizes_by_group(opened, source), calibration, absent
    except RecipeError as unknown:
        return (), calibration, absent | {"sizes": f"No sizes: {unknown}"}


def _dry_load(verdict: Verdict, found: Sequence[Finding]) -> DryLoad:
    num_errors = sum(finding.severity == "error" for finding in found)
    failure = None if verdict.failure is None else LoadFailure(**asdict(verdict.failure))
    return DryLoad(
        gpu=verdict.gpu,
        tp=verdict.tp,
        k=verdict.num_drafts,
        ok=not num_errors,
        num_errors=num_errors,
        failure=failure,
        target=_loaded(verdict.target),
        draft=_loaded(verdict.draft),
        runner=verdict.runner,
        seconds=round(sum(verdict.seconds.values()), 2),
        peak_mib=verdict.peak_mib,
    )


def _loaded(side: Side) -> LoadedModel:
    return LoadedModel(
        cls=side.cls,
        num_params=side.num_params,
        num_written=side.num_written,
        shared=side.shared,
        kernels=tuple(KernelUse(**asdict(kernel)) for kernel in side.kernels),
    )


def _measured(source: Source) -> dict[tuple[str, str], list[int]]:
    view = find_view(source.config, source.where)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for entry in source.entries.values():
        place = view.place(entry.name)
        groups[("backbone", "unknown") if place is None else (place.part, place.role)].append(entry.num_bytes)
    return groups
