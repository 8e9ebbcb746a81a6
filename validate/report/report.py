"""report.json: made from the result files of one checkpoint, and checked against them.

In: what the stations left in the evidence folder (results.py), or their values. Out: a `FullReport` (schema.py),
written as report.json.

Easy to get wrong: nothing is measured here, not even the time. The same result files give the same report to the byte,
so a number that was changed in one of them, or in report.json, is a difference with a name.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
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
from ..facts.results import STATIONS, CheckData, Result, Station, checkpoint_folder, command, file_of, read_result
from ..facts.schema import FullReport, JudgementFact
from ..facts.served import ServeCheck
from .check_data import record_static
from .gates import judge, limits_in, protocols_in
from .headline import verdict_of
from .html import HTML_FILE, write_html
from .recount import refuse_unproved
from .recount_closeness import refuse_unproved_closeness
from .rederived import (
    refuse_contradicted_bench,
    refuse_contradicted_check,
    refuse_contradicted_drafts,
    refuse_contradicted_serve,
)

JSON_FILE = "report.json"
NOT_RUN = {
    "sizes": "No sizes: the headers were not measured.",
    "dry": "No dry load was run: whether vLLM's own classes take these tensors was not tried. "
    "`keepmtp check CHECKPOINT --gpu sm100` tries it, without a GPU.",
    "calibration": "No calibration: nobody looked for the checkpoint's own record.",
    "serve": "No server was run: acceptance and speed are unknown. `keepmtp serve-check CHECKPOINT` measures them.",
    "evaluation": "GSM8K was not asked: what quantization costs in right answers is unknown. `keepmtp eval CHECKPOINT` "
    "measures it.",
    "identity": "Not taken: this report is not bound to the checkpoint's bytes. `keepmtp check CHECKPOINT --record` "
    "binds it.",
}
_MAX_WORDS = 120
# Which station's file a part of the report is from.
_STATION_OF: Mapping[str, Station] = {
    **dict.fromkeys(("path", "facts", "findings", "sizes", "dry", "calibration"), "check"),
    "serve": "serve",
    "evaluation": "gsm8k",
    "bench": "bench",
    "closeness": "closeness",
}


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
        vllm: the version that judged; without a dry load or server the one whose behaviour the rules describe.
        made_at: UTC, in words.
        keepmtp: version that measured.
        serve, evaluation, bench, closeness: of real servers.
        judgement: the recipe's gates.
        identity: the bytes; None where nothing was recorded.
        results: SHA-256 of the result files by name.
    """
    parts = {
        "sizes": check.sizes,
        "dry": check.dry,
        "calibration": check.calibration,
        "serve": serve,
        "evaluation": evaluation,
        "identity": identity,
    }
    return FullReport(
        keepmtp=keepmtp,
        vllm=vllm,
        made_at=made_at,
        path=check.path,
        facts=check.facts,
        findings=check.findings,
        sizes=check.sizes,
        dry=check.dry,
        calibration=check.calibration,
        serve=serve,
        evaluation=evaluation,
        bench=bench,
        closeness=closeness,
        judgement=judgement,
        identity=identity,
        results=results or {},
        verdict=verdict_of(check, vllm=vllm, serve=serve, evaluation=evaluation, bench=bench, judgement=judgement),
        absent={name: check.absent.get(name, NOT_RUN[name]) for name, part in parts.items() if not part},
    )


def from_results(folder: Path) -> FullReport:
    """The report that the result files of an evidence folder make.

    Raises:
        CheckpointError: no check.json, a result of other bytes than the others, a file that cannot be read or was
            edited, or a figure that the headers, the counters or the answers do not give.
    """
    check, serve, gsm8k = read_result(folder, "check"), read_result(folder, "serve"), read_result(folder, "gsm8k")
    bench, closeness = read_result(folder, "bench"), read_result(folder, "closeness")
    if check is None:
        raise CheckpointError(
            folder,
            "a report starts with the static check",
            got="no check.json",
            cure=f"Run `{command('check', folder)}`",
        )
    found: list[Result[Any]] = [result for result in (check, serve, gsm8k, bench, closeness) if result]
    for result in found[1:]:
        _refuse_other(folder, result, check.checkpoint)
    _refuse_contradicted(folder, found)
    newest = max(found, key=lambda result: result.made_at)
    served, answers = serve.data if serve else None, gsm8k.data if gsm8k else None
    judge_of = check if check.data.dry else serve or gsm8k or bench or closeness or check
    gates, tasks = _recipes(folder, check.checkpoint)
    wanted = answers.judged_filter(gates.filter) if answers else ""
    if answers and wanted not in {score.filter for score in answers.checkpoint.scores}:
        rule, cure = f"must have the score of {wanted}, which the recipe judges", command("gsm8k", folder)
        raise CheckpointError(file_of(folder, "gsm8k"), rule, got="no such score", cure=f"Run `{cure}` again")
    measured, near = bench.data if bench else None, closeness.data if closeness else None
    judgement = judge(
        gates=gates,
        check=check.data,
        serve=served,
        evaluation=answers,
        bench=measured,
        closeness=near,
        listed_tasks=tasks,
    )
    files = [file_of(folder, result.station) for result in found]
    return assemble(
        check.data,
        vllm=judge_of.vllm,
        made_at=newest.made_at,
        keepmtp=newest.keepmtp,
        serve=served,
        evaluation=answers,
        bench=measured,
        closeness=near,
        judgement=judgement,
        identity=check.checkpoint,
        results={file.name: file_sha256(file) for file in files},
    )


def refresh(folder: Path, *, measured: Station | None = None) -> FullReport:
    """Make report.json from the result files, and report.html where the `report` extra is installed.

    A checkpoint that was measured without having been checked gets its check.json first, from its headers.

    Args:
        folder: evidence folder.
        measured: the station that has just written its file. What the older report was made from must be there
            otherwise: a red result that somebody replaced or removed does not become a green report.

    Raises:
        CheckpointError: as `from_results`; or a result of the older report is not there, or is no newer one.
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
        CheckpointError: a result file that changed after report.json was made from it, answers that do not give the
            score, or a field of report.json that the result files do not give; the message names it.
    """
    path = folder / JSON_FILE
    claimed = read_json(path)
    again = f"Run `keepmtp report {shlex.quote(str(folder))}`"
    for station in STATIONS:
        name = file_of(folder, station).name
        if name not in claimed.results and file_of(folder, station).is_file():
            got = "a report without it"
            raise CheckpointError(path, f"must be made from every result, {name} too", got=got, cure=again)
        _refuse_another_file(folder, station, claimed, is_new_good=False)
    full = from_results(folder)
    # The file itself, not what was read of it: computed figures are not read.
    for field, got, wanted in _differences(json.loads(path.read_bytes()), _plain(full)):
        station = _STATION_OF.get(field.partition(".")[0])
        whose = f"as {file_of(folder, station).name} has it" if station else "what the results come to"
        wanted, got = _around_the_difference(str(wanted), str(got))
        raise CheckpointError(f"{path}: {field}", f"must be {whose}, {wanted}", got=got, cure=again)
    return full


def refuse_stale(folder: Path, identity: Identity, *, but: tuple[Station, ...]) -> None:
    """Refuse, before the work, to measure where there are results of other bytes; those of `but` are measured now.

    Raises:
        CheckpointError: naming the file and both numbers.
    """
    for station in STATIONS:
        if station not in but and (result := read_result(folder, station)):
            _refuse_other(folder, result, identity)


def write(folder: Path, report: FullReport) -> Path:
    """Write report.json, and report.html where the `report` extra is installed; returns the one to look at."""
    path = write_json(folder, report)
    if missing("report"):
        (folder / HTML_FILE).unlink(missing_ok=True)  # it would show an older report
        return path
    return write_html(folder, report)


def write_json(folder: Path, report: FullReport) -> Path:
    """Write report.json into `folder`, which is made if need be; returns the file's path."""
    text = json.dumps(_plain(report), indent=2, ensure_ascii=False) + "\n"
    return write_whole(folder / JSON_FILE, text)


def read_json(path: Path) -> FullReport:
    """A report.json read back.

    Raises:
        CheckpointError: no such file, no JSON, another version, or a field that version 6 does not have.
    """
    raw = read_bytes_of(path, path, cure=f"Name a {JSON_FILE} that `keepmtp check --html` or --record wrote")
    try:
        return FullReport.model_validate_json(raw)
    except ValidationError as error:
        cure = "Run the check again with this keepmtp"
        rule = f"a report is a {JSON_FILE} of version 6"
        raise CheckpointError(path, rule, got=first_fault(error), cure=cure) from error


def _refuse_contradicted(folder: Path, found: Iterable[Result[Any]]) -> None:
    """Refuse results that contradict the headers, themselves, or the answers on disk."""
    for result in found:
        if result.station == "check":
            refuse_contradicted_check(folder, result.data)
        elif result.station == "serve":
            refuse_contradicted_serve(folder, result.data)
        elif result.station == "gsm8k":
            for task in result.data.by_task:
                refuse_unproved(folder, task)
                for fact in task.arms:
                    k = 0 if fact.role == "plain" else task.protocol.k
                    refuse_contradicted_drafts(folder, fact.role, fact, k)
        elif result.station == "closeness":
            refuse_unproved_closeness(folder, result.data)
        else:
            refuse_contradicted_bench(folder, result.data, result.checkpoint)


def _refuse_replaced(folder: Path, measured: Station | None) -> None:
    """Refuse to make report.json anew where a result that it was made from is not there, or no newer one."""
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


def _refuse_another_file(folder: Path, station: Station, claimed: FullReport, *, is_new_good: bool) -> None:
    """Refuse a result file that is not the one that a report was made from; a newer one is `is_new_good` or not."""
    path = file_of(folder, station)
    wanted = claimed.results.get(path.name)
    got = file_sha256(path) if path.is_file() else "no such file"
    if wanted is None or got == wanted:
        return
    found = read_result(folder, station)  # an edited file is refused here
    is_new = found is not None and found.made_at >= claimed.made_at
    if is_new and is_new_good:
        return
    cure = f"Run `keepmtp report {shlex.quote(str(folder))}`" if is_new else f"Run `{command(station, folder)}` again"
    raise CheckpointError(path, f"must be the file that {JSON_FILE} was made from, {wanted}", got=got, cure=cure)


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
    """The recipe's limits and tasks, from the checkpoint's own record, if that is still the one that was measured."""
    recorded = identity.files.get(RECORD)
    if recorded is None:
        return Gates(), ()
    path = checkpoint_folder(folder) / RECORD
    cure = f"Run `{command('check', folder)}` on a whole checkpoint"
    got = file_sha256(path) if path.is_file() else "no such file"
    if got != recorded.sha256:
        raise CheckpointError(path, f"must be the file that was measured, {recorded.sha256}", got=got, cure=cure)
    return limits_in(path, cure=cure), tuple(one.task for one in protocols_in(path, cure=cure))


def _plain(report: FullReport) -> dict[str, Any]:
    return report.model_dump(mode="json", by_alias=True)


def _differences(claimed: Any, wanted: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Fields by dotted path whose values differ: (field, claimed, wanted), the deepest that can be named."""
    if isinstance(claimed, dict) and isinstance(wanted, dict):
        for key in [*wanted, *(key for key in claimed if key not in wanted)]:
            yield from _differences(
                claimed.get(key, "nothing"), wanted.get(key, "nothing"), f"{field}.{key}".lstrip(".")
            )
    elif isinstance(claimed, list) and isinstance(wanted, list) and len(claimed) == len(wanted):
        for number, pair in enumerate(zip(claimed, wanted, strict=True)):
            yield from _differences(*pair, f"{field}.{number}")
    elif claimed != wanted:
        yield field, claimed, wanted


def _around_the_difference(one: str, other: str) -> tuple[str, str]:
    """Two texts, of long ones the part in which they begin to differ."""
    same = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, same - _MAX_WORDS // 4) if max(len(one), len(other)) > _MAX_WORDS else 0
    cut = [text[start : start + _MAX_WORDS] for text in (one, other)]
    first, second = (
        f"{'...' * (start > 0)}{part}{'...' * (start + len(part) < len(text))}"
        for part, text in zip(cut, (one, other), strict=True)
    )
    return first, second
