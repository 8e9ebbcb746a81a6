"""The files that `keepmtp publish` may send: those of a green report and of its card, or a refusal.

In: a checkpoint folder with its evidence (NAME.report) and card (NAME.card). Out: a `Parcel`: name in the repository ->
file here, bytes, hash.

Easy to get wrong: the list comes from the report, never from the files that a folder holds, and a report can name any
file. So each name must be known as a checkpoint's, and no link is followed. A file's time of change proves nothing, so
every byte is read again before it is sent.
"""

import hashlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...checkpoints.companions import companions_among
from ...checkpoints.identity import ReadingBar, identify, listed, measured_anew, refuse_other_bytes
from ...checkpoints.source import open_source
from ...recipes.errors import CheckpointError, GateError
from ...recipes.families import find_view
from ..check.runtime_view import RuntimeView
from ..facts.results import report_folder
from ..facts.schema import FullReport
from ..report import card, report
from .taken import Taken, take_all


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file to send; `name` is its path in the repository, `path` on this machine.

    Attributes:
        content: of a file of the card, as the report makes it; None: the bytes are read from `path`.
    """

    name: str
    path: Path
    num_bytes: int
    sha256: str
    content: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What may be sent: these files and no other.

    Attributes:
        taken: the files as they were hashed, once `take` has read every byte.
    """

    folder: Path
    report: FullReport
    files: Mapping[str, LocalFile]
    taken: Mapping[str, Taken] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return total_bytes(self.files.values())

    def git_hash(self, name: str) -> str:
        """Git's hash of a small file; the Hub has no other hash of it."""
        return (self.taken.get(name) or take_all({name: self.files[name]})[name]).git_hash


def prepare(
    folder: Path, *, repo: str = "", watch: ReadingBar | None = None, reading: ReadingBar | None = None
) -> Parcel:
    """The files that would be sent, or a refusal.

    A file with the same size and time of change as before is not hashed until `take`. Values are read each time: `take`
    refuses a file that has become another one since.

    Args:
        folder: the checkpoint.
        repo: where it goes; the card's commands then name it.
        watch: a progress bar, where bytes have to be hashed.
        reading: a progress bar, for the values that are read.

    Raises:
        CheckpointError: no checkpoint, report or card; one of them was altered; or the bytes are not the report's.
        GateError: the report is red, or has no judgement; or a value is one that no model can compute with.
    """
    told = ready_report(folder)
    assert told.identity is not None
    refuse_other_bytes(folder, told.identity, identify(folder, cache=report_folder(folder), watch=watch))
    _refuse_broken_values(folder, reading)
    files = {
        name: LocalFile(name=name, path=folder / name, num_bytes=fact.num_bytes, sha256=fact.sha256)
        for name, fact in told.identity.files.items()
    }
    for local in _card_files(folder, repo):
        if local.name in files:
            raise CheckpointError(
                folder / local.name,
                "the card has a file of this name",
                got="one of the checkpoint's",
                cure="Move it away and check again",
            )
        files[local.name] = local
    return Parcel(folder=folder, report=told, files=dict(sorted(files.items())))


def ready_report(folder: Path) -> FullReport:
    """The report of a checkpoint that may be sent, as far as small files say.

    Raises:
        CheckpointError, GateError: as `prepare`.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(folder, "what is published is a checkpoint", got="no config.json", cure="Name its folder")
    _refuse_links(folder)
    card.refuse_no_record(folder)
    evidence = report_folder(folder)
    if not (evidence / report.JSON_FILE).is_file():
        raise CheckpointError(
            evidence,
            "must hold the checkpoint's report",
            got=f"no {report.JSON_FILE}",
            cure=f"Run {measured_anew(folder)}",
        )
    told = report.verify(evidence)
    _refuse_red(told, evidence)
    card.refuse_none(card.card_folder(folder), folder)  # before every byte is read
    if told.identity is None:
        raise CheckpointError(
            evidence / report.JSON_FILE,
            "must say which bytes it is about",
            got="no identity",
            cure=f"Run `keepmtp check {shlex.quote(str(folder))} --record`",
        )
    _refuse_unknown(folder, told.identity.files)
    return told


def take(parcel: Parcel, *, watch: ReadingBar | None = None) -> Parcel:
    """Read every byte, whether a file's time of change differs or not, and keep what is needed to send these bytes.

    Raises:
        CheckpointError: names a file that is not what was measured.
    """
    return replace(parcel, taken=take_all(parcel.files, watch=watch))


def total_bytes(files: Iterable[LocalFile]) -> int:
    """Of these files."""
    return sum(local.num_bytes for local in files)


def _refuse_red(told: FullReport, evidence: Path) -> None:
    where, cure = (
        evidence / report.JSON_FILE,
        f"Run `keepmtp gate {shlex.quote(str(evidence.with_suffix('')))}` for the whole story",
    )
    rule = "only a checkpoint that passes is published"
    if told.judgement is None:
        raise GateError(where, rule, got="no judgement", cure=cure)
    if told.judgement.verdict != "pass":
        why = next(reason.says for reason in told.judgement.reasons if reason.verdict == told.judgement.verdict)
        raise GateError(where, rule, got=f"{told.judgement.title} ({why.rstrip('.')})", cure=cure)
    if not told.verdict.ok:
        raise GateError(where, rule, got=f"{told.verdict.label.lower()} ({told.verdict.says.rstrip('.')})", cure=cure)


def _refuse_broken_values(folder: Path, reading: ReadingBar | None) -> None:
    """Read every scale, every weight that is not packed and the whole MTP block; whatever report.json says of them."""
    from ..check.values import Watch, check_values  # imports torch

    opened = open_source(folder)
    runtime = RuntimeView(source=opened, view=find_view(opened.config, opened.where, opened.entries))
    found = check_values(runtime, "unpacked", watch=Watch(reading)).findings
    worst = next((finding for finding in found if finding.severity == "error"), None)
    if worst is not None:
        rule = "what is published must hold values that a model can compute with"
        raise GateError(folder, rule, got=f"{worst.where} {worst.says}", cure=worst.cure)


def _card_files(folder: Path, repo: str) -> Iterator[LocalFile]:
    """The card's files as the report makes them, which is what the folder has; it may have something else later."""
    place = card.card_folder(folder)
    for name, content in sorted(card.verified_files(folder, repository=repo).items()):
        sha256 = hashlib.sha256(content).hexdigest()
        yield LocalFile(name=name, path=place / name, num_bytes=len(content), sha256=sha256, content=content)


def _refuse_links(folder: Path) -> None:
    """Refuse a link among the folder's files: what it leads to may be private, or another file a minute later.

    Raises:
        CheckpointError: names the first.
    """
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_symlink() and not is_hidden:
            got = f"a link to {os.readlink(path)}"
            raise CheckpointError(path, "only the folder's own files are published", got=got, cure="Put a copy there")


def _refuse_unknown(folder: Path, names: Iterable[str]) -> None:
    """Refuse files that no checkpoint has: one of them may be private.

    Raises:
        CheckpointError: a name that is not known.
    """
    if unknown := companions_among(names).left:
        cure = f"Move it away, and measure again: {measured_anew(folder)}"
        raise CheckpointError(folder, "only known files of a checkpoint are published", got=listed(unknown), cure=cure)
