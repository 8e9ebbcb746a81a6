"""report.json from what the stations found, and the one sentence it comes to.

In: the values of the stations that ran (static check, sizes from headers, dry load, calibration, real server). Out: a
`FullReport` (report_schema.py), written as report.json.

Easy to get wrong: a part that did not run is not a part that passed. Whatever is empty has a sentence in `absent`, and
the verdict names what was not tried.
"""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from .. import __version__
from ..quantize.source import Source, small_file
from ..recipes.errors import CheckpointError, KeepMTPError, refuse
from ..recipes.families import find_family
from .acceptance import ServeReport
from .dry import Side, Verdict
from .evidence import Evidence
from .findings import Finding, Report
from .report_schema import (
    CalibrationFact,
    CheckpointFacts,
    DryLoad,
    FindingFact,
    FullReport,
    GroupSize,
    KernelUse,
    LoadedModel,
    LoadFailure,
    Serve,
    ServedFact,
    VerdictFact,
)
from .rules_dry import DEFECT, RULE, findings

JSON_FILE = "report.json"
RECORD = "keepmtp.json"
DRY_RULES = (RULE, DEFECT, "no-kernel")
"""Rules whose findings come from a dry load."""
NOT_RUN = {
    "sizes": "No sizes: the headers were not measured.",
    "dry": "No dry load was run: whether vLLM's own classes take these tensors was not tried. "
           "`keepmtp check CHECKPOINT --gpu sm100` tries it, without a GPU.",
    "calibration": "No calibration: nobody looked for the checkpoint's own record.",
    "serve": "No server was run: acceptance and speed are unknown. `keepmtp serve-check CHECKPOINT` measures them.",
}  # fmt: skip


def assemble(
    check: Report, *, vllm: str, evidence: Evidence | None = None, sizes: Iterable[GroupSize] = (),
    calibration: CalibrationFact | None = None, serve: ServeReport | None = None,
    absent: Mapping[str, str] | None = None, made_at: datetime | None = None,
) -> FullReport:  # fmt: skip
    """One report from the stations that ran.

    Args:
        check: the static check's, with the dry loads that were made.
        vllm: the version that judged; without a dry load or server the one whose behaviour the rules describe.
        evidence: the static check's, to tell which dry load each finding belongs to; None for an unknown family.
        sizes: from `sizes_by_group`.
        calibration: from `calibration_of`.
        serve: as `keepmtp serve-check` returns it.
        absent: why a station did not run (sizes, dry, calibration, serve), where its caller knows better than the
            general sentence.
        made_at: default now.
    """
    found = [
        FindingFact(
            origin="dry" if finding.rule in DRY_RULES else "static", severity=finding.severity, where=finding.where,
            says=finding.says, cure=finding.cure, rule=finding.rule, count=finding.count,
        )
        for finding in check.findings
    ]  # fmt: skip
    dry = tuple(_dry_load(verdict, findings(verdict, evidence, version=vllm)) for verdict in check.dry)
    sizes, served = tuple(sizes), None if serve is None else Serve.model_validate(serve.as_dict())
    parts = {"sizes": sizes, "dry": dry, "calibration": calibration, "serve": served}
    return FullReport(
        keepmtp=__version__, vllm=vllm, made_at=(made_at or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        path=check.path, verdict=_verdict(found, dry, served, vllm), facts=CheckpointFacts(**asdict(check.facts)),
        findings=tuple(found), sizes=sizes, dry=dry, calibration=calibration, serve=served,
        absent={name: (absent or {}).get(name, NOT_RUN[name]) for name, part in parts.items() if not part},
    )  # fmt: skip


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
            part=part, group=group, num_tensors=len(after.get((part, group), ())),
            num_bytes=sum(after.get((part, group), ())),
            num_bytes_before=None if before is None else sum(before.get((part, group), ())),
        )
        for part, group in after.keys() | (before or {}).keys()
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (row.part, -max(row.num_bytes, row.num_bytes_before or 0), row.group)))


def calibration_of(checkpoint: Source) -> tuple[CalibrationFact | None, str]:
    """What a checkpoint's keepmtp.json says of its calibration, or why there is nothing to show."""
    try:
        path = small_file(checkpoint, RECORD)
        if path is None:
            return None, f"Not known: the checkpoint has no {RECORD}."
        told = json.loads(path.read_bytes())
        if "calibration" not in told:
            return None, "None: every value was computed from the weights alone, without batches."
        return calibration_fact(told["calibration"], told["recipe"]["calibration"]), ""
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (KeepMTPError, OSError) as error:
        why = str(error)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = repr(error)
    return None, f"Not read: {RECORD} is not as this keepmtp writes it ({why})."


def calibration_fact(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> CalibrationFact:
    """The report's part from a run's own summary (`quantize/calibration.py`) and its recipe's calibration block.

    Raises:
        ValidationError: it is not what version 2 has.
    """
    chosen = {key: settings[key] for key in ("algorithm", "sequence_length")}
    return CalibrationFact.model_validate({**summary, **chosen})


def write_json(folder: Path, report: FullReport) -> Path:
    """Write report.json into `folder`, which is made if need be; returns the file's path."""
    text = json.dumps(report.model_dump(mode="json", by_alias=True), indent=2, ensure_ascii=False) + "\n"
    return write_whole(folder / JSON_FILE, text)


def write_whole(path: Path, text: str) -> Path:
    """Write a text file so that a reader sees the old one or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
    return path


def read_json(path: Path) -> FullReport:
    """A report.json read back.

    Raises:
        CheckpointError: no such file, no JSON, another version, or a field that version 2 does not have.
    """
    try:
        return FullReport.model_validate_json(path.read_bytes())
    except OSError as error:
        got, cure = error.strerror or str(error), f"Name a {JSON_FILE} that `keepmtp check --html` wrote"
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        got, cure = f"{place}: {first['msg']}", "Run the check again with this keepmtp"
    raise CheckpointError(refuse(path, f"a report is a {JSON_FILE} of version 2", got, cure))


def places(loads: Iterable[DryLoad]) -> str:
    """`sm90 and sm100 at TP 1 and 4`, or `sm90 at TP 1 and sm120 at TP 4` where the TP sizes differ."""
    by_gpu: dict[str, list[int]] = defaultdict(list)
    for load in loads:
        if load.tp not in by_gpu[load.gpu]:
            by_gpu[load.gpu].append(load.tp)
    together: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for gpu, sizes in by_gpu.items():
        together[tuple(sizes)].append(gpu)
    return _listed([f"{_listed(gpus)} at TP {_listed(sizes)}" for sizes, gpus in together.items()])


def _dry_load(verdict: Verdict, found: Sequence[Finding]) -> DryLoad:
    num_errors = sum(finding.severity == "error" for finding in found)
    failure = None if verdict.failure is None else LoadFailure(**asdict(verdict.failure))
    return DryLoad(
        gpu=verdict.gpu, tp=verdict.tp, k=verdict.num_drafts, ok=not num_errors, num_errors=num_errors, failure=failure,
        target=_loaded(verdict.target), draft=_loaded(verdict.draft), runner=verdict.runner,
        seconds=round(sum(verdict.seconds.values()), 2), peak_mib=verdict.peak_mib,
    )  # fmt: skip


def _loaded(side: Side) -> LoadedModel:
    return LoadedModel(
        cls=side.cls, num_params=side.num_params, num_written=side.num_written, shared=side.shared,
        kernels=tuple(KernelUse(**asdict(kernel)) for kernel in side.kernels),
    )  # fmt: skip


def _measured(source: Source) -> dict[tuple[str, str], list[int]]:
    view = find_family(source.config, source.where).view(source.config)
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for entry in source.entries.values():
        place = view.place(entry.name)
        groups[("backbone", "unknown") if place is None else (place.part, place.role)].append(entry.num_bytes)
    return groups


def _verdict(found: Sequence[FindingFact], dry: Sequence[DryLoad], serve: Serve | None, vllm: str) -> VerdictFact:
    """The worst that is known, or else how far it was tried."""
    errors = [fact for fact in found if fact.severity == "error"]
    failed = [load for load in dry if load.failure]
    if failed:
        told = tuple(f"on {load.gpu} at TP {load.tp}: " for load in failed)
        words = f"{told[0]}vLLM {vllm} raises {failed[0].failure.type if failed[0].failure else ''}"
        says = next((fact.says for fact in errors if fact.says.startswith(told)), words)
        return _not_ready(f"On {places(failed)} {says.partition(': ')[2]}")
    if errors:
        more = f" ({len(errors) - 1} more error{'s' * (len(errors) > 2)} below)" if errors[1:] else ""
        says = f"{errors[0].where}: {errors[0].says}{more}"
        return _not_ready(f"vLLM {vllm} would not run this checkpoint as it was meant: {says}")
    gate = next((gate for gate in serve.gates if gate.verdict == "failed"), None) if serve else None
    if gate:
        return _not_ready(f"Served by vLLM {vllm}, it fails on {gate.name}: {gate.says.partition('; ')[0]}")
    warnings = sum(fact.severity == "warning" for fact in found)
    tried = (
        f"vLLM {vllm}'s own classes load this checkpoint and its MTP draft on {places(dry)}" if dry
        else f"Nothing in config.json and the headers is in vLLM {vllm}'s way"
    )  # fmt: skip
    also = f", with {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    rest = _measured_words(serve) if serve else "no server was run" if dry else "it was neither dry-loaded nor served"
    drafts = serve is not None and any(gate.name == "acceptance" and gate.verdict == "passed" for gate in serve.gates)
    label = "Loads and drafts" if drafts else "Served" if serve else "Loads" if dry else "No fault found"
    return VerdictFact(ok=True, label=label, says=f"{tried}{also}; {rest}.")


def _measured_words(serve: Serve) -> str:
    model = serve.checkpoint
    runs = [run for run in model.drafting if run.acceptance is not None]
    if not runs:
        return "a server ran, but not with method=mtp"
    run = max(runs, key=lambda run: run.speed_up or 0.0)
    source = serve.source.run(run.k) if serve.source else None
    against = f" (source: {source.acceptance:.1%})" if source and source.acceptance is not None else ""
    faster = f" and decodes {run.speed_up:.2f} times as fast as without MTP" if run.speed_up else ""
    return f"{_as_served(model)} with k={run.k}, it accepts {run.acceptance:.1%} of drafted tokens{against}{faster}"


def _as_served(model: ServedFact) -> str:
    """How a model was served, as words that start a clause."""
    return "served natively" if model.as_served == "native" else "served as a BF16 copy of the same weights"


def _not_ready(says: str) -> VerdictFact:
    return VerdictFact(ok=False, label="Not ready", says=says if says.endswith(".") else f"{says}.")


def _listed(words: Iterable[object]) -> str:
    *most, last = [str(word) for word in words]
    return f"{', '.join(most)} and {last}" if most else last
