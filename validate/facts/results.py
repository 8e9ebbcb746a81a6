"""The result files of one checkpoint: what each station measured, with the bytes it measured it on.

In: a station's values and the checkpoint's identity. Out: `check.json`, `serve.json`, `eval.json`,
`lossless.json`, `bench.json` and `closeness.json` in the evidence folder, `NAME.report` next to the
checkpoint NAME.
`report.py` reads them and makes report.json of them.

    station, schema         check or one of `MEASURED`; the version of its form
    keepmtp, vllm, made_at  what measured, and when (UTC)
    checkpoint              `Identity`: the bytes, file by file
    target                  of a draft of its own: what it was checked or served with
    data                    `CheckData`, `ServeCheck`, `EvaluationFact`, `BenchFact`, ...
    seal                    SHA-256 of all of that; an edited file is refused, and measured again

Easy to get wrong: a result says nothing about a checkpoint whose bytes have changed since. The
identity is taken before the measurement, and the same file holds both.
"""

import hashlib
import json
import os
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from ... import __version__
from ...checkpoints.fact import Fact
from ...checkpoints.files import refuse_strange, write_whole
from ...checkpoints.identity import Identity
from ...checkpoints.json_file import read_bytes_of
from ...quantize.calibrate.mtp.facts import CalibrationFact
from ...recipes.errors import CheckpointError, first_fault
from ...recipes.frozen import without
from ...recipes.runtimes.vllm import NEWEST
from .benched import BenchFact
from .closeness import ClosenessFact
from .dry_load import DryLoad, newest
from .evaluated import EvaluationFact
from .findings import CheckpointFacts, Finding, errors_of
from .lossless import LosslessFact
from .served import OfDraft, ResultFact, ServeCheck, StationFact, TargetFact


def now() -> str:
    """The time, as a result says when it was made."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class CheckData(ResultFact):
    """The static check and the dry loads; `absent` says why dry or calibration is empty,
    where that is known; `values_read`, how much of the tensors was read, by its level; in no
    file. Of a draft of its own, with `target`, and what is found of both.
    """

    station = "check"
    part = "check"
    command = "check {} --record"
    form = 3
    dropped = frozenset({"sizes"})

    path: str
    facts: CheckpointFacts
    findings: tuple[Finding, ...]
    values_read: str = Field(default="", exclude=True)
    dry: tuple[DryLoad, ...] = ()
    calibration: CalibrationFact | None = None
    absent: Mapping[str, str] = Field(default_factory=dict)
    target: OfDraft = None

    @property
    def judged_by(self) -> str:
        """The newest vLLM that loaded it; without a dry load the one whose behaviour the rules
        describe.
        """
        if not self.dry:
            return NEWEST
        return newest(self.dry)[0].vllm

    @property
    def ok(self) -> bool:
        """No errors but those of dry loads that keepmtp's cures of vLLM mend; warnings do not
        count.
        """
        errors = errors_of(self.findings)
        if all(load.ok or load.cures for load in self.dry):
            errors = [error for error in errors if error.origin != "dry"]
        return not errors


Data = TypeVar("Data", bound=Fact)


class Result(Fact, Generic[Data]):
    """One result file; see the module's docstring."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    station: str
    version: int = Field(alias="schema")
    keepmtp: str
    vllm: str
    made_at: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$")]
    checkpoint: Identity
    target: OfDraft = None
    data: Data
    seal: str = ""


MEASURED: tuple[type[StationFact], ...] = (
    EvaluationFact,
    ServeCheck,
    LosslessFact,
    ClosenessFact,
    BenchFact,
)
"""What is measured with servers, in the order in which it is shown."""
STATIONS: Mapping[str, type[ResultFact]] = {kind.station: kind for kind in (CheckData, *MEASURED)}
"""What the file of each station holds."""


def in_order(measured: Mapping[str, Any]) -> list[Any]:
    """What was measured, of these parts."""
    parts = [measured.get(kind.part) for kind in MEASURED]
    return [part for part in parts if part]


def report_folder(checkpoint: Path) -> Path:
    """The evidence folder of a checkpoint folder: `NAME.report` beside NAME."""
    whole = Path(os.path.realpath(checkpoint))  # `resolve` raises on a link to itself
    return whole.with_name(f"{whole.name}.report")


def results_of(path: Path) -> Path | None:
    """The folder of results that a person means by a checkpoint's folder or by NAME.report; None
    for a file.
    """
    if path.suffix != ".report" and (path.is_dir() or report_folder(path).is_dir()):
        return report_folder(path)
    if path.is_dir():
        return path
    return None


def checkpoint_folder(evidence: Path) -> Path:
    """The checkpoint of an evidence folder; the folder itself need not be there.

    Raises:
        CheckpointError: the name does not end in .report.
    """
    whole = Path(os.path.realpath(evidence))
    if whole.suffix != ".report":
        raise CheckpointError(
            evidence,
            "an evidence folder is NAME.report, beside the checkpoint NAME",
            got=whole.name,
            cure="Name the checkpoint's",
        )
    return whole.with_suffix("")


def command(station: str, folder: Path, target: TargetFact | None = None) -> str:
    """What a person types to measure again what an evidence folder holds, of a draft with its
    target.
    """
    name = "CHECKPOINT"
    if folder.suffix == ".report":
        name = str(folder.with_suffix(""))
    words = [name]
    if target is not None:
        words = [target.path, "--draft", name]
    return f"keepmtp {STATIONS[station].command.format(shlex.join(words))}"


def file_of(folder: Path, station: str) -> Path:
    """The file of a station's result in an evidence folder."""
    return folder / f"{station}.json"


def write_result(
    folder: Path,
    data: ResultFact,
    *,
    checkpoint: Identity,
    vllm: str,
    target: TargetFact | None = None,
    made_at: str = "",
) -> Path:
    """Write a station's result over an older one; returns the file's path.

    Args:
        folder: evidence folder, from `report_folder`; made if need be.
        data: what was measured.
        checkpoint: the bytes it was measured on, from `identity.identify`.
        vllm: the version that judged or served.
        target: of a draft of its own.
        made_at: default `now`.
    """
    refuse_strange(folder)
    result = Result[type(data)](
        station=data.station,
        schema=data.form,
        keepmtp=__version__,
        vllm=vllm,
        made_at=made_at or now(),
        checkpoint=checkpoint,
        target=target,
        data=data,
    )
    content = result.model_dump(mode="json", by_alias=True)
    sealed = content | {"seal": seal_of(content)}
    return write_whole(
        file_of(folder, data.station), json.dumps(sealed, indent=2, ensure_ascii=False) + "\n"
    )


def seal_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of a result file's content without its seal, whatever the layout of the file."""
    text = json.dumps(without(content, "seal"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_result(folder: Path, station: str) -> Result[Any] | None:
    """A station's result, or None if it left none.

    Raises:
        CheckpointError: no JSON, another version or station, a figure that could not have been
            measured, or a file that was edited since.
    """
    path = file_of(folder, station)
    kind = STATIONS[station]
    rule = f"must be a result of {station}, version {kind.form}"
    cure = f"Run `{command(station, folder)}` again"
    if not path.exists():
        return None
    text = read_bytes_of(path, path, cure=cure)
    try:
        result = Result[kind].model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(path, rule, got=first_fault(error), cure=cure) from error
    if (result.station, result.version) != (station, kind.form):
        got = f"one of {result.station}, version {result.version}"
        raise CheckpointError(path, rule, got=got, cure=cure)
    # A seal is no signature: it finds an edited number, and nobody who computes it anew. It is of
    # the file itself, not of what was read of it: computed figures are not read.
    seal = seal_of(json.loads(text))
    if seal != result.seal:
        rule = f"must be as its station wrote it, with the SHA-256 {result.seal or 'of its own'}"
        raise CheckpointError(path, rule, got=f"{seal}: it was edited", cure=cure)
    return result
