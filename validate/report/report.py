"""report.json: made from the result files of one checkpoint, and checked against them.

In: what the stations left in the evidence folder (results.py), or their values. Out: a `FullReport`
(schema.py), written as report.json.

Easy to get wrong: nothing is measured here, not even the time. The same result files give the same
report to the byte, so a number that was changed in one of them, or in report.json, is a difference
with a name.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ... import __version__
from ...checkpoints.files import write_whole
from ...checkpoints.identity import Identity, file_sha256, identify
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.record import RECORD
from ...checkpoints.source import open_source
from ...recipes.errors import CheckpointError, first_fault
from ...recipes.extras import missing
from ...recipes.protocol import Gates
from ..facts.benched import BenchFact
from ..facts.closeness import ClosenessFact
from ..facts.evaluated import EvaluationFact
from ..facts.results import (
    STATIONS,
    CheckData,
    Result,
    Station,
    checkpoint_folder,
    command,
    file_of,
    read_result,
)
from ..facts.schema import FullReport, JudgementFact
from ..facts.served import ServeCheck
from .check_data import record_static
from .gates import decided_in, judge
from .headline import verdict_of
from .html import HTML_FILE, write_html
from .rederived import refuse_contradicted

JSON_FILE = "report.json"
NOT_RUN = {
    "sizes": "No sizes: the headers were not measured.",
    "dry": "No dry load was run: whether vLLM's own classes take these tensors was not tried. "
    "`keepmtp check CHECKPOINT --gpu sm100` tries it, without a GPU.",
    "calibration": "No calibration: nobody looked for the checkpoint's own record.",
    "serve": (
        "No server was run: acceptance and speed are unknown. `keepmtp serve-check CHECKPOINT` "
        "measures them."
    ),
    "evaluation": (
        "GSM8K was not asked: what quantization costs in right answers is unknown. `keepmtp eval "
        "CHECKPOINT` measures it."
    ),
    "identity": (
        "Not taken: this report is not bound to the checkpoint's bytes. `keepmtp check CHECKPOINT "
        "--record` binds it."
    ),
}
_MOST_LETTERS = 120


def assemble(
    check: CheckData,
    *,
    vllm: str,
    made_at: str,
    keepmtp: str = __version__,
    serve: ServeCheck | None = None,
    evaluation: EvaluationFact | None = None,
    bench: BenchFact | None = None,
    closeness: ClosenessFact | None = None,
    judgement: JudgementFact | None = None,
    identity: Identity | None = None,
    results: Mapping[str, str] | None = None,
) -> FullReport:
    """One report from what the stations found.

    Args:
        check: the static check's, with the dry loads that were made.
        vllm: the version that judged; without a dry load or server the one whose behaviour the
            rules describe.
        made_at: UTC, in words.
        keepmtp: version that measured.
        serve, evaluation, bench, closeness: of real servers.
        judgement: the recipe's gates.
        identity: the bytes; None where nothing was recorded.
        results: SHA-256 of the result files by name.
    """
    verdict = verdict_of(
        check, vllm=vllm, serve=serve, evaluation=evaluation, bench=bench, judgement=judgement
    )
    parts: dict[str, Any] = dict(check) | {
        "serve": serve,
        "evaluation": evaluation,
        "identity": identity,
    }
    parts["absent"] = {
        name: check.absent.get(name, says) for name, says in NOT_RUN.items() if not parts[name]
    }
    return FullReport(
        **parts,
        keepmtp=keepmtp,
        vllm=vllm,
        made_at=made_at,
        bench=bench,
        closeness=closeness,
        judgement=judgement,
        results=results or {},
        verdict=verdict,
    )


def from_results(folder: Path) -> FullReport:
    """The report that the result files of an evidence folder make.

    Raises:
        CheckpointError: no check.json, a result of other bytes than the others, a file that cannot
            be read or was edited, or a figure that the headers, the counters or the answers do not
            give.
    """
    read: dict[Station, Result[Any] | None] = {
        station: read_result(folder, station) for station in STATIONS
    }
    check = read["check"]
    if check is None:
        cure = f"Run `{command('check', folder)}`"
        raise CheckpointError(
            folder, "a report starts with the static check", got="no check.json", cure=cure
        )
    found: dict[Station, Result[Any]] = {
        station: result for station, result in read.items() if result
    }
    for station, result in found.items():
        _refuse_other(folder, result, check.checkpoint)
        refuse_contradicted(folder, station, result.data, check.checkpoint.sha256)
    gates, tasks = _recipes(folder, check.checkpoint)
    names: dict[str, Station] = {
        "serve": "serve",
        "evaluation": "gsm8k",
        "bench": "bench",
        "closeness": "closeness",
    }
    measured: dict[str, Any] = {
        part: found[name].data if name in found else None for part, name in names.items()
    }
    answers = measured["evaluation"]
    wanted = answers.judged_filter(gates.filter) if answers else ""
    if answers and wanted not in {score.filter for score in answers.checkpoint.scores}:
        rule, cure = (
            f"must have the score of {wanted}, which the recipe judges",
            command("gsm8k", folder),
        )
        raise CheckpointError(
            file_of(folder, "gsm8k"), rule, got="no such score", cure=f"Run `{cure}` again"
        )
    newest = max(found.values(), key=lambda result: result.made_at)
    others = [result for station, result in found.items() if station != "check"]
    judge_of = others[0] if others and not check.data.dry else check
    files = [file_of(folder, station) for station in found]
    return assemble(
        check.data,
        vllm=judge_of.vllm,
        made_at=newest.made_at,
        keepmtp=newest.keepmtp,
        judgement=judge(gates=gates, check=check.data, listed_tasks=tasks, **measured),
        identity=check.checkpoint,
        results={file.name: file_sha256(file) for file in files},
        **measured,
    )


def refresh(folder: Path, *, measured: Station | None = None) -> FullReport:
    """Make report.json from the result files, and report.html where the `report` extra is
    installed.

    A checkpoint that was measured without having been checked gets its check.json first, from its
    headers.

    Args:
        folder: evidence folder.
        measured: the station that has just written its file. What the older report was made from
            must be there
            otherwise: a red result that somebody replaced or removed does not become a green
                report.

    Raises:
        CheckpointError: as `from_results`; or a result of the older report is not there, or is no
            newer one.
    """
    _refuse_replaced(folder, measured)
    if not file_of(folder, "check").is_file():
        checkpoint = checkpoint_folder(folder)
        record_static(folder, open_source(checkpoint), identify(checkpoint, cache=folder))
    full = from_results(folder)
    write(folder, full)
    return full


def verify(folder: Path) -> FullReport:
    """The report of an evidence folder, if every number in it is what was measured.

    Raises:
        CheckpointError: a result file that changed after report.json was made from it, answers that
            do not give the score, or a field of report.json that the result files do not give; the
            message names it.
    """
    path = folder / JSON_FILE
    claimed = read_json(path)
    again = f"Run `keepmtp report {shlex.quote(str(folder))}`"
    for station in STATIONS:
        name = file_of(folder, station).name
        if name not in claimed.results and file_of(folder, station).is_file():
            got = "a report without it"
            raise CheckpointError(
                path, f"must be made from every result, {name} too", got=got, cure=again
            )
        _refuse_another_file(folder, station, claimed, is_new_good=False)
    full = from_results(folder)
    # The file itself, not what was read of it: computed figures are not read.
    written, wanted = dict(_flat(json.loads(path.read_bytes()))), dict(_flat(_plain(full)))
    for field in [*wanted, *written]:
        here, there = (
            str(values.get(field, "nothing"))[:_MOST_LETTERS] for values in (wanted, written)
        )
        if wanted.get(field, "nothing") != written.get(field, "nothing"):
            rule = f"must be as the result files make it, {here}"
            raise CheckpointError(f"{path}: {field}", rule, got=there, cure=again)
    return full


def refuse_stale(folder: Path, identity: Identity, *, but: tuple[Station, ...]) -> None:
    """Refuse, before the work, to measure where there are results of other bytes; those of `but`
    are measured now.

    Raises:
        CheckpointError: naming the file and both numbers.
    """
    for station in STATIONS:
        if station not in but and (result := read_result(folder, station)):
            _refuse_other(folder, result, identity)


def write(folder: Path, report: FullReport) -> Path:
    """Write report.json, and report.html where the `report` extra is installed; returns the one to
    look at.
    """
    path = write_json(folder, report)
    if missing("report"):
        (folder / HTML_FILE).unlink(missing_ok=True)  # it would show an older report
        return path
    return write_html(folder, report)


def write_json(folder: Path, report: FullReport) -> Path:
    """Write report.json into `folder`, which is made if need be; returns the file's path."""
    return write_whole(folder / JSON_FILE, text_of(report))


def text_of(report: FullReport) -> str:
    """The text of report.json. Equal reports give equal ones."""
    return json.dumps(_plain(report), indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> FullReport:
    """A report.json read back.

    Raises:
        CheckpointError: no such file, no JSON, another version, or a field that version 6 does not
            have.
    """
    raw = read_bytes_of(
        path, path, cure=f"Name a {JSON_FILE} that `keepmtp check --html` or --record wrote"
    )
    try:
        return FullReport.model_validate_json(raw)
    except ValidationError as error:
        cure = "Run the check again with this keepmtp"
        rule = f"a report is a {JSON_FILE} of version 6"
        raise CheckpointError(path, rule, got=first_fault(error), cure=cure) from error


def _refuse_replaced(folder: Path, measured: Station | None) -> None:
    """Refuse to make report.json anew where a result that it was made from is not there, or no
    newer one.
    """
    if not (folder / JSON_FILE).is_file():
        return
    try:
        claimed = read_json(folder / JSON_FILE)
    except CheckpointError:
        return  # an altered report, or one of another version: nothing was made from it
    check = read_result(folder, "check")
    if check and claimed.identity and check.checkpoint.sha256 != claimed.identity.sha256:
        return  # the checkpoint was made anew, and measured anew
    for station in STATIONS:
        if station != measured:
            _refuse_another_file(folder, station, claimed, is_new_good=True)


def _refuse_another_file(
    folder: Path, station: Station, claimed: FullReport, *, is_new_good: bool
) -> None:
    """Refuse a result file that is not the one that a report was made from; a newer one is
    `is_new_good` or not.
    """
    path = file_of(folder, station)
    wanted = claimed.results.get(path.name)
    got = file_sha256(path) if path.is_file() else "no such file"
    if wanted is None or got == wanted:
        return
    found = read_result(folder, station)  # an edited file is refused here
    is_new = found is not None and found.made_at >= claimed.made_at
    if is_new and is_new_good:
        return
    cure = (
        f"Run `keepmtp report {shlex.quote(str(folder))}`"
        if is_new
        else f"Run `{command(station, folder)}` again"
    )
    raise CheckpointError(
        path, f"must be the file that {JSON_FILE} was made from, {wanted}", got=got, cure=cure
    )


def _refuse_other(folder: Path, result: Result[Any], identity: Identity) -> None:
    mine, station = result.checkpoint.sha256, result.station
    if mine != identity.sha256:
        raise CheckpointError(
            file_of(folder, station),
            f"must be measured on the same bytes as the others, {identity.sha256}",
            got=mine,
            cure=f"Remove it, and measure again with `{command(station, folder)}`",
        )


def _recipes(folder: Path, identity: Identity) -> tuple[Gates, tuple[str, ...]]:
    """The recipe's limits and tasks, from the checkpoint's own record, if that is still the one
    that was measured.
    """
    recorded = identity.files.get(RECORD)
    if recorded is None:
        return Gates(), ()
    path = checkpoint_folder(folder) / RECORD
    cure = f"Run `{command('check', folder)}` on a whole checkpoint"
    got = file_sha256(path) if path.is_file() else "no such file"
    if got != recorded.sha256:
        raise CheckpointError(
            path, f"must be the file that was measured, {recorded.sha256}", got=got, cure=cure
        )
    gates, evaluations = decided_in(path, cure=cure)
    return gates, tuple(one.task for one in evaluations)


def _plain(report: FullReport) -> dict[str, Any]:
    return report.model_dump(mode="json", by_alias=True)


def _flat(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """Every field with its value by dotted path."""
    if isinstance(value, dict) and value:
        pairs = value.items()
    elif isinstance(value, list) and value:
        pairs = enumerate(value)
    else:
        yield field, value
        return
    for key, inner in pairs:
        yield from _flat(inner, f"{field}.{key}".lstrip("."))
