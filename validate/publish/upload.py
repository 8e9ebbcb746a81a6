"""Sends a checkpoint and its card to the Hub, compares what arrived, and only then lets it be seen.

In: a checkpoint folder with its evidence (NAME.report) and card (NAME.card), and a repository's
name. Out: a `Parcel`, the files of a green report and of its card, or a refusal; and the commit
that holds exactly these files, by their hashes.

Easy to get wrong: the list comes from the report, never from the files that a folder holds, and a
report can name any file. And a repository that exists may be somebody else's: a file that differs
is replaced only on request, nothing is deleted, and a run that continues after a cut must recognize
its own files.
"""

import hashlib
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Literal

from huggingface_hub.utils.sha import git_hash

from ...checkpoints.companions import companions_among
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.files import held, own_files
from ...checkpoints.hub_client import HubError
from ...checkpoints.identity import (
    Identity,
    identify,
    listed,
    measured_anew,
    refuse_other_bytes,
)
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.source import is_repo_id, open_source
from ...recipes.errors import CheckpointError, GateError, RecipeError, counted
from ...recipes.frozen import Bar, frozen
from ..facts.findings import errors_of
from ..facts.results import report_folder
from ..facts.schema import FullReport
from ..report import card, report
from .hub import AGAIN, Blob, Hub, Remote


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
    files: Mapping[str, LocalFile]

    def num_bytes(self, names: Iterable[str]) -> int:
        """Of these files."""
        return sum(self.files[name].num_bytes for name in names)


def prepare(
    folder: Path,
    *,
    repo: str = "",
    watch: Bar | None = None,
    reading: Bar | None = None,
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
    # As the report makes them, which is what the card's folder has; it may have something else
    # later.
    of_card = card.verified_files(folder, repository=repo)
    refuse_other_bytes(folder, identity, identify(folder, cache=report_folder(folder), watch=watch))
    # Every scale, every weight that is not packed and the whole MTP block; whatever report.json
    # says of them.
    runtime = RuntimeView.of(open_source(folder))
    for worst in errors_of(check_values(runtime, "unpacked", reading=reading)):
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
    for name, content in of_card.items():
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
    return Parcel(folder=folder, report=verified, files=dict(sorted(files.items())))


def ready_report(folder: Path) -> tuple[FullReport, Identity]:
    """The report of a checkpoint that may be sent, as far as small files say, and the bytes that it
    is about.

    Raises:
        CheckpointError, GateError: as `prepare`.
    """
    # What a link leads to may be private, or another file a minute later.
    for path in sorted(own_files(folder)):
        if path.is_symlink():
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
    unknown = companions_among(identity.files).left
    if unknown:  # a report can name any file
        raise CheckpointError(
            folder,
            "only known files of a checkpoint are published",
            got=listed(unknown),
            cure=f"Move it away, and measure again: {measured_anew(folder)}",
        )
    return verified, identity


def _refuse_red(verified: FullReport, evidence: Path) -> None:
    judgement = verified.judgement
    if judgement.verdict == "pass":
        return
    place = shlex.quote(str(evidence.with_suffix("")))
    raise GateError(
        evidence / report.JSON_FILE,
        "only a checkpoint that passes is published",
        got=f"{judgement.title} ({judgement.says.rstrip('.')})",
        cure=f"Run `keepmtp eval {place} --only gates` for the whole story",
    )


FileState = Literal["new", "same", "differs", "other"]
"""Of a file of the parcel, or of another one that the repository holds, which stays."""
# The Hub writes this file into every new repository, and after that by itself.
HUBS_OWN = (".gitattributes",)
_ONE_RUN = "only one run may publish a checkpoint"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


@frozen
class Delivery:
    """What is sent, and what the repository holds before.

    Attributes:
        before: None where there is no repository, or nobody has asked.
        base: the repository's commit on which what has changed is proposed; "" where its main
            branch gets it.
        states: of the files of both; none where nobody has asked.
    """

    parcel: Parcel
    repo: str
    before: Remote | None = None
    base: str = ""
    states: Mapping[str, FileState] = field(default_factory=dict)

    def named(self, *states: FileState) -> list[str]:
        """The files in one of these states."""
        return named(self.states, *states)

    @property
    def missing(self) -> list[str]:
        """The files that the repository lacks, or has otherwise."""
        return self.named("new", "differs")

    def contents(self) -> dict[str, Path | bytes]:
        """The files that are missing there, by path: where they are here, or what is in them."""
        contents: dict[str, Path | bytes] = {}
        for name in self.missing:
            local = self.parcel.files[name]
            contents[name] = local.path.resolve()
            if local.content is not None:
                contents[name] = local.content
        return contents


@frozen
class Published:
    """What a repository holds now; `num_bytes` are of the files that it lacked before.

    Attributes:
        commit: that was compared and checked.
        pull_request: the page of a request, where it is only proposed.
    """

    commit: str
    is_private: bool
    num_bytes: int
    pull_request: str = ""


def check_name(repo: str) -> None:
    """Refuse a name that no repository of the Hub can have, before anything is read.

    Raises:
        RecipeError: not ORG/NAME, or characters that the Hub does not take.
    """
    if not is_repo_id(repo) or not repo.isascii():
        raise RecipeError(
            "--repo",
            "must be ORG/NAME with letters, digits, and single - _ . between them",
            got=repr(repo),
            cure="Name it as on the Hub",
        )


def commit_to_change(folder: Path, repo: str, *, update: bool, public: bool = False) -> str:
    """The commit of a repository that the checkpoint in a folder was made from; "" where it was
    made from something else, or what the repository holds now is to be changed.

    Raises:
        RecipeError: a request cannot make the repository public.
    """
    source = card.recorded(folder).source
    if update or source.name.lower() != repo.lower() or source.revision == "local":
        return ""
    if public:
        cure = "Leave it out, or add --update"
        rule = "is for a repository of your own"
        raise RecipeError("--public", rule, got=f"a pull request to {repo}", cure=cure)
    return source.revision


def deliver(
    parcel: Parcel, repo: str, before: Remote | None, *, made_from: str, update: bool
) -> Delivery:
    """What is sent to a repository that holds this now.

    Args:
        parcel: from `prepare`.
        repo: its name.
        before: what it holds; None if there is no repository.
        made_from: its commit that the checkpoint was made from, if the files are to be proposed.
        update: files that differ may be replaced, and others be there.

    Raises:
        RecipeError: the repository holds other files, or other bytes under our names. Or it has
            moved on since the checkpoint was made from it, would keep weights of before, or nothing
            would change.
    """
    states = _compare(parcel, before)
    delivery = Delivery(parcel=parcel, repo=repo, before=before, base=made_from, states=states)
    if made_from:
        if before is not None:
            _refuse_to_propose(delivery, before)
        return delivery
    strange = [f"another {name}" for name in delivery.named("differs")] + delivery.named("other")
    if strange and not update:
        raise RecipeError(
            repo,
            "must be empty or hold this checkpoint",
            got=listed(strange),
            cure="Take another --repo, or add --update: its history keeps what is replaced, and "
            "nothing is deleted",
        )
    _refuse_other_weights(delivery, cure="Delete them there first")
    # Everybody reads it, so its owner lets the main branch have what was checked.
    if before and not before.is_private and delivery.missing:
        return replace(delivery, base=before.commit)
    return delivery


def named(states: Mapping[str, FileState], *wanted: FileState) -> list[str]:
    """The files in one of these states."""
    return [name for name, state in states.items() if state in wanted]


def propose(delivery: Delivery, hub: Hub) -> Published:
    """Offer what has changed to a repository that others read, as one commit of a pull request, and
    compare what arrived. An open request of the same files is not made again.

    Raises:
        GateError: what the request holds is not what was sent.
        HubError: the Hub refuses, or does not answer.
    """
    parcel = delivery.parcel
    repo = delivery.repo
    before = delivery.before or _must_be_there(hub, repo)
    variant = card.recorded(parcel.folder).recipe.variant
    files = counted(len(delivery.missing), "file")
    message = f"{variant}: {files}, by keepmtp {parcel.report.keepmtp}"
    num_bytes = 0
    commit, page = _proposed(parcel, hub, repo, message)
    if not page:
        num_bytes = parcel.num_bytes(delivery.missing)
        with held(parcel.folder.resolve(), _ONE_RUN):
            files = delivery.contents()
            parent = delivery.base
            commit, page = hub.send(repo, files, parent=parent, message=message, is_request=True)
    _verify(delivery, _must_be_there(hub, repo, commit))
    return Published(
        commit=commit, is_private=before.is_private, num_bytes=num_bytes, pull_request=page
    )


def _proposed(parcel: Parcel, hub: Hub, repo: str, title: str) -> tuple[str, str]:
    """Commit and page of an open request that has this title and all files of the parcel; empty
    where there is none.
    """
    for branch, page in hub.requests(repo, title):
        there = hub.look(repo, revision=branch)
        if there is not None and not named(_compare(parcel, there), "new", "differs"):
            return there.commit, page
    return "", ""


def _refuse_to_propose(delivery: Delivery, there: Remote) -> None:
    if not delivery.missing:  # its owner may have taken it
        raise RecipeError(
            there.repo, "must lack something", got="every byte", cure="Nothing is left to do"
        )
    if there.commit != delivery.base:
        raise RecipeError(
            there.repo,
            f"must be at commit {delivery.base}, which the checkpoint was made from",
            got=f"commit {there.commit}",
            cure="Make the checkpoint again from what it holds now",
        )
    # Once they are deleted, the repository has moved on.
    _refuse_other_weights(delivery, cure="Publish it to a repository of its own")


def _refuse_other_weights(delivery: Delivery, *, cure: str) -> None:
    strange = [name for name in delivery.named("other") if name.endswith(_WEIGHTS)]
    if strange:
        raise RecipeError(
            delivery.repo,
            "must hold no weights of another checkpoint: a server would read them",
            got=listed(strange),
            cure=cure,
        )


def publish(delivery: Delivery, hub: Hub, *, public: bool = False) -> Published:
    """Send the files that are missing, compare and check them there, and then make the repository
    public.

    Args:
        delivery: from `deliver`. If there is no repository, it is made, and private.
        hub: signed in.
        public: let everybody read it in the end.

    Raises:
        RecipeError: everybody may read a new one.
        GateError: what it holds is not what was sent.
        HubError: the Hub refuses, or does not answer, or somebody else writes to it.
    """
    repo = delivery.repo
    parcel = delivery.parcel
    before = delivery.before
    if before is None:
        hub.create(repo)
        before = _must_be_there(hub, repo)
        if not before.is_private:
            rule = "must be private until it is checked"
            raise RecipeError(repo, rule, got="a public one", cure="Make it private")
        delivery = deliver(parcel, repo, before, made_from="", update=False)
    missing = delivery.missing
    message = f"Upload {parcel.folder.resolve().name} with keepmtp {parcel.report.keepmtp}"
    commit = before.commit
    if missing:
        with held(parcel.folder.resolve(), _ONE_RUN):
            commit, _ = hub.send(repo, delivery.contents(), parent=commit, message=message)
    there = _must_be_there(hub, repo, "main")
    # A file's time of change proves nothing: what the Hub has received is compared with the
    # report's hashes before anybody else can read it. Bytes with these hashes are those that were
    # loaded and served, so nothing is loaded there once more.
    try:
        _refuse_other_head(there, commit, cure=AGAIN)
        _verify(delivery, there)
    except (GateError, HubError) as error:
        raise error.with_cure(f"{error.cure.rstrip('.')}. It stays private") from error
    if public and there.is_private:
        _make_public(hub, there)
    return Published(
        commit=there.commit,
        is_private=there.is_private and not public,
        num_bytes=parcel.num_bytes(missing),
    )


def _must_be_there(hub: Hub, repo: str, revision: str | None = None) -> Remote:
    """A repository, which was made or written to just now."""
    remote = hub.look(repo, revision=revision)
    if remote is None:
        raise HubError(
            repo,
            "must be there, as the Hub has said",
            got="none",
            cure="Look at its page on the Hub",
        )
    return remote


def _refuse_other_head(now: Remote, commit: str, *, cure: str) -> None:
    """Refuse a branch whose newest commit is not the one that was made or checked."""
    if now.commit != commit:
        raise HubError(
            now.repo,
            "nobody else may write to it meanwhile",
            got=f"commit {now.commit} after {commit}",
            cure=cure,
        )


def _make_public(hub: Hub, checked: Remote) -> None:
    """Let everybody read a repository; private again, if it is another one by then."""
    hub.set_visibility(checked.repo, is_private=False)
    cure = "It is private again. Look at what was written, and run the same command again"
    try:
        now = _must_be_there(hub, checked.repo)
        _refuse_other_head(now, checked.commit, cure=cure)
    except HubError:
        hub.set_visibility(checked.repo, is_private=True)
        raise
    if now.is_private:
        raise HubError(
            checked.repo, "must be public, as the Hub has said", got="a private one", cure=AGAIN
        )


def _verify(delivery: Delivery, remote: Remote) -> None:
    """Compare a commit with the parcel, file by file: sizes, SHA-256 of large files, git's hash of
    small ones. The Hub computes both hashes from what it received.

    Raises:
        GateError: names the files that are missing, differ, or should not be there.
    """
    found = _compare(delivery.parcel, remote)
    wrong = [f"{name} is not there" for name in named(found, "new")]
    wrong += [f"{name} has another size or hash there" for name in named(found, "differs")]
    strange = set(named(found, "other")) - set(delivery.named("other"))
    wrong += [f"{name} is there, which was not sent" for name in sorted(strange)]
    if wrong:
        raise GateError(
            f"{remote.repo} at {remote.commit}",
            "must hold the bytes that were sent",
            got=listed(wrong),
            cure="Run the same command with --update to send them again",
        )


def _compare(parcel: Parcel, remote: Remote | None) -> dict[str, FileState]:
    """Compare a parcel with what the repository holds (None: there is no repository), by the files
    of both.
    """
    states: dict[str, FileState] = dict.fromkeys(parcel.files, "new")
    if remote is None:
        return states
    for name, blob in remote.files.items():
        if name in parcel.files:
            states[name] = "differs"
            if _is_same(parcel.files[name], blob):
                states[name] = "same"
        elif name not in HUBS_OWN:
            states[name] = "other"
    return states


def _is_same(local: LocalFile, there: Blob) -> bool:
    """Whether a file there is what was measured."""
    if there.size != local.num_bytes:
        return False
    if there.lfs is not None:
        return there.lfs.sha256 == local.sha256
    content = local.content
    if content is None:
        content = read_bytes_of(local.path, local.path)
    # Git's hash says only that the Hub has what is here now, and the report only what was here
    # then.
    is_measured = hashlib.sha256(content).hexdigest() == local.sha256
    return is_measured and git_hash(content) == there.blob_id
