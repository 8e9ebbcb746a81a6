"""report.json: made from the result files of one checkpoint, and checked against them.

In: what the stations left in the evidence folder (results.py), or their values. Out: a `FullReport`
(schema.py), written as report.json.

Easy to get wrong: nothing is measured here, not even the time. The same result files give the same
report to the byte, so a number that was changed in one of them, or in report.json, is a difference
with a name. And a part that did not run did not pass: the sentence names what was not tried, and
compares no figure.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from ... import __version__
from ...checkpoints.files import refuse_strange, write_whole
from ...checkpoints.identity import Identity, file_sha256, identify, measured_anew
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.record import RECORD
from ...checkpoints.source import open_source
from ...recipes.errors import CheckpointError, first_fault
from ...recipes.protocol import Gates
from ...recipes.runtimes.vllm import NEWEST, is_known
from ..check.check import examine
from ..check.pair import of_draft
from ..facts.findings import errors_of
from ..facts.results import (
    STATIONS,
    CheckData,
    Result,
    checkpoint_folder,
    command,
    file_of,
    read_result,
    report_folder,
)
from ..facts.schema import FullReport, JudgementFact
from ..facts.served import TargetFact, is_same
from .check_data import record_static
from .gates import decided_in, judge

JSON_FILE = "report.json"


def assemble(
    check: CheckData,
    *,
    vllm: str,
    made_at: str,
    keepmtp: str = __version__,
    judgement: JudgementFact | None = None,
    identity: Identity | None = None,
    results: Mapping[str, str] = MappingProxyType({}),
    **measured: Any,
) -> FullReport:
    """One report from what the stations found.

    Args:
        check: the static check's, with the dry loads that were made.
        vllm: the version that judged; without a dry load or server the one whose behaviour the
            rules describe.
        made_at: UTC, in words.
        keepmtp: version that measured.
        judgement: by the recipe's gates; None: by those of no recipe.
        identity: the bytes; None where nothing was recorded.
        results: SHA-256 of the result files by name.
        measured: by the part of report.json what each station gave.
    """
    return FullReport(
        **dict(check),
        **measured,
        keepmtp=keepmtp,
        vllm=vllm,
        made_at=made_at,
        judgement=judgement or judge(check=check, **measured),
        identity=identity,
        results=results,
    )


def from_results(folder: Path) -> FullReport:
    """The report that the result files of an evidence folder make.

    Raises:
        CheckpointError: no check.json, a result of other bytes than the others, a file that cannot
            be read or was edited, or a file of answers that is not the one that was counted.
    """
    results: dict[str, Result[Any]] = {}
    for station in STATIONS:
        result = read_result(folder, station)
        if result:
            results[station] = result
    if "check" not in results:
        raise CheckpointError(
            folder,
            "a report starts with the static check",
            got="no check.json",
            cure=f"Run `{command('check', folder)}`",
        )
    check = results["check"]
    measured = {}
    sums = {}
    newest = check
    vllm = check.vllm
    for station, result in results.items():
        _refuse_other(folder, result, check.checkpoint, check.data.target)
        sums[f"{station}.json"] = file_sha256(file_of(folder, station))
        if result.made_at > newest.made_at:
            newest = result
        if station != "check":
            # Without a dry load the first server says which vLLM it was.
            if not measured and not check.data.dry:
                vllm = result.vllm
            measured[result.data.part] = result.data
    # A file of answers, or of compared windows, must be the one that was counted.
    for station, result in results.items():
        for fact in getattr(result.data, "evidence", ()):
            path = folder / fact.samples
            got = _sum_of(path)
            if got != fact.samples_sha256:
                raise CheckpointError(
                    path,
                    f"must be the file that was counted, {fact.samples_sha256}",
                    got=got,
                    cure=f"Run `{command(station, folder)}` again",
                )
    gates, tasks = _recipes(folder, check.checkpoint)
    return assemble(
        check.data,
        vllm=vllm,
        made_at=newest.made_at,
        keepmtp=newest.keepmtp,
        judgement=judge(gates=gates, check=check.data, listed_tasks=tasks, **measured),
        identity=check.checkpoint,
        results=sums,
        **measured,
    )


def refresh(folder: Path) -> FullReport:
    """Make report.json from the result files.

    A checkpoint that was measured without having been checked gets its check.json first, from its
    headers.

    Raises:
        CheckpointError: as `from_results`.
    """
    if not file_of(folder, "check").is_file():
        checkpoint = checkpoint_folder(folder)
        record_static(folder, open_source(checkpoint), identify(checkpoint, cache=folder))
    full = from_results(folder)
    refuse_strange(folder)
    write(folder, full)
    return full


def verify(folder: Path) -> FullReport:
    """The report of an evidence folder, if it is what its result files make.

    Raises:
        CheckpointError: as `from_results`; or report.json is another, and the message names the
            part.
    """
    path = folder / JSON_FILE
    read_json(path)
    full = from_results(folder)
    # The file itself, not what was read of it: computed figures are not read.
    written = json.loads(path.read_bytes())
    wanted = full.model_dump(mode="json", by_alias=True)
    for part, value in wanted.items():
        if written.get(part) != value:
            raise CheckpointError(
                f"{path}: {part}",
                "must be as the result files make it",
                got="something else",
                cure=f"Run `{command('check', folder)}` again",
            )
    return full


def of_checkpoint(checkpoint: Path) -> FullReport:
    """The report of a checkpoint, as `verify`, once its headers are judged again.

    Raises:
        CheckpointError: as `verify`; or no checkpoint, none that was measured, or its headers have
            an error, or facts, that the results do not have.
    """
    if not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            checkpoint,
            "what is judged or published is a checkpoint",
            got="no config.json",
            cure="Name its folder",
        )
    folder = report_folder(checkpoint)
    if not (folder / JSON_FILE).is_file():
        raise CheckpointError(
            folder,
            "must hold the checkpoint's report",
            got=f"no {JSON_FILE}",
            cure=f"Run {measured_anew(checkpoint)}",
        )
    full = verify(folder)
    # Whoever seals results anew can say anything of the headers, so they are judged again. A
    # version that keepmtp does not know has no rules of its own.
    version = NEWEST
    if full.dry and is_known(full.vllm):
        version = full.vllm
    checked = examine(checkpoint, vllm=version)
    found = checked.data
    rule = ""
    got = ""
    for name, value in found.facts:
        reported = getattr(full.facts, name)
        if reported != value:
            rule = f"must have the headers' {name}, {value}"
            got = reported
    errors = errors_of(found.findings)
    if full.target is not None:  # that it is a draft alone is no error then
        errors = errors_of(of_draft(checked, None))
    if errors and not errors_of(full.findings):
        rule = "must have the error of the headers"
        got = f"none of {errors[0].where}, which is {errors[0].says}"
    if rule:
        where = file_of(folder, "check")
        cure = f"Run `{command('check', folder, full.target)}` again"
        raise CheckpointError(where, rule, got=got, cure=cure)
    return full


def refuse_stale(
    folder: Path,
    identity: Identity,
    *,
    but: Sequence[str],
    target: TargetFact | None = None,
) -> None:
    """Refuse, before the work, to measure where there are results of other bytes, or with another
    target; the parts of `but` are measured now.

    Raises:
        CheckpointError: naming the file and both numbers.
    """
    for station, kind in STATIONS.items():
        if kind.part in but:
            continue
        result = read_result(folder, station)
        if result:
            _refuse_other(folder, result, identity, target)


def write(folder: Path, report: FullReport) -> Path:
    """Write report.json; returns its path."""
    return write_whole(folder / JSON_FILE, text_of(report))


def text_of(report: FullReport) -> str:
    """The text of report.json. Equal reports give equal ones."""
    content = report.model_dump(mode="json", by_alias=True)
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def read_json(path: Path) -> FullReport:
    """A report.json read back.

    Raises:
        CheckpointError: no such file, no JSON, another version, or a field that version 12 does not
            have.
    """
    raw = read_bytes_of(path, path, cure=f"Name a {JSON_FILE} that `keepmtp check --record` wrote")
    try:
        return FullReport.model_validate_json(raw)
    except ValidationError as error:
        raise CheckpointError(
            path,
            f"a report is a {JSON_FILE} of version 12",
            got=first_fault(error),
            cure="Run the check again with this keepmtp",
        ) from error


def _refuse_other(
    folder: Path, result: Result[Any], identity: Identity, target: TargetFact | None
) -> None:
    mine = result.checkpoint.sha256
    station = result.station
    rule = f"must be measured on the same bytes as the others, {identity.sha256}"
    got: object = mine
    if mine == identity.sha256:
        if is_same(result.target, target):
            return
        rule = f"must be measured with the same target as the others, {target}"
        got = result.target
    raise CheckpointError(
        file_of(folder, station),
        rule,
        got=got,
        cure="Remove it, and measure again with "
        f"`{command(station, folder, target or result.target)}`",
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
    got = _sum_of(path)
    if got != recorded.sha256:
        raise CheckpointError(
            path, f"must be the file that was measured, {recorded.sha256}", got=got, cure=cure
        )
    gates, evaluations = decided_in(path, cure=cure)
    return gates, tuple([evaluation.task for evaluation in evaluations])


def _sum_of(path: Path) -> str:
    if not path.is_file():
        return "no such file"
    return file_sha256(path)
