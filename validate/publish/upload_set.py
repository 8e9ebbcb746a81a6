"""The files that `keepmtp publish` may send: those of a green report and of its card, or a refusal.

In: a checkpoint folder with its evidence (NAME.report) and card (NAME.card). Out: a `Parcel`: name in the repository ->
file here, bytes, hash.

Easy to get wrong: the list comes from the report, never from the files that a folder holds. A file's time of change
proves nothing, so every byte is read again before it is sent.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...checkpoints.identity import ReadingBar, file_sha256, identify, refuse_other_bytes
from ...recipes.errors import CheckpointError, GateError
from ..report import report
from ..report.results import report_folder
from ..report.schema import FullReport
from . import card


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file to send; `name` is its path in the repository, `path` on this machine."""

    name: str
    path: Path
    num_bytes: int
    sha256: str

    def git_hash(self) -> str:
        """Git's hash of these bytes; the Hub gives no other hash of a small file."""
        digest = hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False)
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What may be sent: these files and no other."""

    folder: Path
    report: FullReport
    files: Mapping[str, LocalFile]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return total_bytes(self.files.values())


def prepare(folder: Path, *, watch: ReadingBar | None = None) -> Parcel:
    """The files that would be sent, or a refusal.

    A file with the same size and time of change as before is not read until `read_again`.

    Args:
        folder: the checkpoint.
        watch: a progress bar, where bytes have to be read.

    Raises:
        CheckpointError: no checkpoint, report or card; one of them was altered; or the bytes are not the report's.
        GateError: the report is red, or has no judgement.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(folder, "what is published is a checkpoint", got="no config.json", cure="Check PATH")
    evidence = report_folder(folder)
    if not (evidence / report.JSON_FILE).is_file():
        raise CheckpointError(
            evidence,
            "must hold the checkpoint's report",
            got=f"no {report.JSON_FILE}",
            cure=f"Run `keepmtp check {folder} --record`, serve-check, eval and card",
        )
    told = report.verify(evidence)
    _refuse_red(told, evidence)
    card.refuse_none(card.card_folder(folder), folder)  # before every byte is read
    if told.identity is None:
        raise CheckpointError(
            evidence / report.JSON_FILE,
            "must say which bytes it is about",
            got="no identity",
            cure=f"Run `keepmtp check {folder} --record`",
        )
    refuse_other_bytes(folder, told.identity, identify(folder, cache=evidence, watch=watch))
    files = {
        name: LocalFile(name=name, path=folder / name, num_bytes=fact.num_bytes, sha256=fact.sha256)
        for name, fact in told.identity.files.items()
    }
    for local in _card_files(folder):
        if local.name in files:
            raise CheckpointError(
                folder / local.name,
                "the card has a file of this name",
                got="one of the checkpoint's",
                cure="Move it away and check again",
            )
        files[local.name] = local
    return Parcel(folder=folder, report=told, files=dict(sorted(files.items())))


def read_again(parcel: Parcel, *, watch: ReadingBar | None = None) -> None:
    """Read every byte of the checkpoint, whether its files' times of change differ or not.

    Raises:
        CheckpointError: names the files that are not what was measured.
    """
    assert parcel.report.identity is not None, "prepare() refuses without"
    found = identify(parcel.folder, cache=report_folder(parcel.folder), fresh=True, watch=watch)
    refuse_other_bytes(parcel.folder, parcel.report.identity, found)


def total_bytes(files: Iterable[LocalFile]) -> int:
    """Of these files."""
    return sum(local.num_bytes for local in files)


def _refuse_red(told: FullReport, evidence: Path) -> None:
    where, cure = evidence / report.JSON_FILE, f"Run `keepmtp gate {evidence.with_suffix('')}` for the whole story"
    rule = "only a checkpoint that passes is published"
    if told.judgement is None:
        raise GateError(where, rule, got="no judgement", cure=cure)
    if told.judgement.verdict != "pass":
        why = next(reason.says for reason in told.judgement.reasons if reason.verdict == told.judgement.verdict)
        raise GateError(where, rule, got=f"{told.judgement.verdict} ({why.rstrip('.')})", cure=cure)
    if not told.verdict.ok:
        raise GateError(where, rule, got=f"{told.verdict.label.lower()} ({told.verdict.says.rstrip('.')})", cure=cure)


def _card_files(folder: Path) -> Iterator[LocalFile]:
    place = card.verify(folder)
    for path in sorted(place.rglob("*")):
        if path.is_file():
            name = path.relative_to(place).as_posix()
            yield LocalFile(name=name, path=path, num_bytes=path.stat().st_size, sha256=file_sha256(path))
