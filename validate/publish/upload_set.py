"""The files that `keepmtp publish` may send: those of a green report and of its card, or a refusal.

In: a checkpoint folder with its evidence (NAME.report) and card (NAME.card). Out: a `Parcel`: name
in the repository -> file here, bytes, hash.

Easy to get wrong: the list comes from the report, never from the files that a folder holds, and a
report can name any file. So each name must be known as a checkpoint's, and no link is followed. A
file's time of change proves nothing: what the Hub has received is compared with the report's hashes
before anybody else can read it (upload.py).
"""

import hashlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from ...checkpoints.companions import companions_among
from ...checkpoints.identity import (
    Identity,
    ReadingBar,
    identify,
    listed,
    measured_anew,
    refuse_other_bytes,
)
from ...checkpoints.source import open_source
from ...recipes.errors import CheckpointError, GateError
from ...recipes.frozen import frozen
from ..check.runtime_view import RuntimeView
from ..facts.results import report_folder
from ..facts.schema import FullReport
from ..report import card, report


@frozen
class LocalFile:
    """A file to send; `path` on this machine.

    Attributes:
        content: of a file of the card, as the report makes it; None: the bytes are read from
            `path`.
    """

    path: Path
    num_bytes: int
    sha256: str
    content: bytes | None = None


@frozen
class Parcel:
    """What may be sent: these files and no other, by their path in the repository."""

    folder: Path
    report: FullReport
    identity: Identity
    files: Mapping[str, LocalFile]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(local.num_bytes for local in self.files.values())


def prepare(
    folder: Path,
    *,
    repo: str = "",
    watch: ReadingBar | None = None,
    reading: ReadingBar | None = None,
) -> Parcel:
    """The files that would be sent, or a refusal.

    A file with the same size and time of change as before is not hashed again. Values are read each
    time.

    Args:
        folder: the checkpoint.
        repo: where it goes; the card's commands then name it.
        watch: a progress bar, where bytes have to be hashed.
        reading: a progress bar, for the values that are read.

    Raises:
        CheckpointError: no checkpoint, report or card; one of them was altered; or the bytes are
            not the report's.
        GateError: the report is red, or has no judgement; or a value is one that no model can
            compute with.
    """
    from ..check.values import check_values  # imports torch

    verified, identity = ready_report(folder)
    refuse_other_bytes(folder, identity, identify(folder, cache=report_folder(folder), watch=watch))
    # Every scale, every weight that is not packed and the whole MTP block; whatever report.json
    # says of them.
    runtime = RuntimeView.of(open_source(folder))
    for worst in check_values(runtime, "unpacked", reading=reading).findings:
        if worst.severity == "error":
            raise GateError(
                folder,
                "what is published must hold values that a model can compute with",
                got=f"{worst.where} {worst.says}",
                cure=worst.cure,
            )
    files: dict[str, LocalFile] = {}
    for name, fact in identity.files.items():
        files[name] = LocalFile(path=folder / name, num_bytes=fact.num_bytes, sha256=fact.sha256)
    place = card.card_folder(folder)
    # The card's files as the report makes them, which is what the folder has; it may have something
    # else later.
    for name, content in card.verified_files(folder, repository=repo).items():
        if name in files:
            raise CheckpointError(
                folder / name,
                "the card has a file of this name",
                got="one of the checkpoint's",
                cure="Move it away and check again",
            )
        files[name] = LocalFile(
            path=place / name,
            num_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            content=content,
        )
    return Parcel(
        folder=folder, report=verified, identity=identity, files=dict(sorted(files.items()))
    )


def ready_report(folder: Path) -> tuple[FullReport, Identity]:
    """The report of a checkpoint that may be sent, as far as small files say, and the bytes that it
    is about.

    Raises:
        CheckpointError, GateError: as `prepare`.
    """
    # What a link leads to may be private, or another file a minute later.
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_symlink() and not is_hidden:
            raise CheckpointError(
                path,
                "only the folder's own files are published",
                got=f"a link to {os.readlink(path)}",
                cure="Put a copy there",
            )
    if (folder / "config.json").is_file():  # without one there is no checkpoint to speak of
        card.recorded(folder)
    verified = report.of_checkpoint(folder)
    _refuse_red(verified, report_folder(folder))
    card.refuse_none(card.card_folder(folder), folder)
    identity = verified.identity
    assert identity is not None, "verify() has made it"
    if unknown := companions_among(identity.files).left:
        raise CheckpointError(
            folder,
            "only known files of a checkpoint are published",
            got=listed(unknown),
            cure=f"Move it away, and measure again: {measured_anew(folder)}",
        )
    return verified, identity


def _refuse_red(verified: FullReport, evidence: Path) -> None:
    judgement = verified.judgement
    got = verified.verdict.says.rstrip(".")
    assert judgement is not None, "verify() has made it"
    if judgement.verdict == "pass" and verified.verdict.ok:
        return
    for reason in judgement.reasons:
        if reason.verdict == judgement.verdict != "pass":
            got = f"{judgement.title} ({reason.says.rstrip('.')})"
            break
    where = evidence / report.JSON_FILE
    raise GateError(
        where,
        "only a checkpoint that passes is published",
        got=got,
        cure=f"Run `keepmtp gate {shlex.quote(str(evidence.with_suffix('')))}` for the whole story",
    )
