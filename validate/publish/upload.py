"""Sends a checkpoint and its card to the Hub, and compares what arrived.

In: a `Parcel` (upload_set.py) and a repository's name. Out: the commit that holds exactly these files, by their hashes.

Easy to get wrong: a repository that exists may be somebody else's. A file that differs is replaced only on request,
nothing is deleted, and a run that continues after a cut must recognize its own files.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub.hf_api import RepoFile

from ...checkpoints.files import held
from ...checkpoints.hub_client import PATIENCE, HubError
from ...checkpoints.hub_names import page_of
from ...checkpoints.identity import ReadingBar, listed
from ...recipes.errors import GateError, RecipeError
from .hub import AGAIN, Hub, Remote
from .taken import Taken
from .upload_set import LocalFile, Parcel, total_bytes

FileState = Literal["new", "same", "differs"]
# The Hub writes this file into every new repository, and after that by itself.
HUBS_OWN = (".gitattributes",)
_NAME = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A parcel compared with a repository; `others` are files there that are not of the parcel, and stay."""

    states: Mapping[str, FileState]
    others: tuple[str, ...]

    def named(self, state: FileState) -> list[str]:
        """The parcel's files in that state."""
        return [name for name, found in self.states.items() if found == state]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A commit that holds the parcel; `num_bytes` are of the files that it lacked before."""

    commit: str
    num_bytes: int
    kept: tuple[str, ...]
    others: tuple[str, ...]


def check_name(repo: str) -> None:
    """Refuse a name that no repository of the Hub can have, before anything is read.

    Raises:
        RecipeError: not ORG/NAME, characters that the Hub does not take, or the name of a folder here.
    """
    parts = repo.split("/")
    if (
        len(parts) != 2
        or not all(_NAME.fullmatch(part) and len(part) <= 96 for part in parts)
        or ".." in repo
        or "--" in repo
        or parts[1].endswith(".git")
    ):
        raise RecipeError(
            "--repo",
            "must be ORG/NAME with letters, digits, and single - _ . between them",
            got=repr(repo),
            cure=f"Name it {page[0]}" if (page := page_of(repo)) else "Name it as on the Hub",
        )
    if Path(repo).is_dir():
        raise RecipeError(
            "--repo",
            "must not be a folder here, which would be checked in its place",
            got=repo,
            cure="Run this from another folder",
        )


def compare(parcel: Parcel, remote: Remote | None) -> Comparison:
    """Compare a parcel with what the repository holds (None: there is no repository)."""
    there = {} if remote is None else remote.files
    states: dict[str, FileState] = {
        name: "new" if name not in there else "same" if _is_same(parcel, name, there[name]) else "differs"
        for name in parcel.files
    }
    others = tuple(sorted(name for name in there if name not in parcel.files and name not in HUBS_OWN))
    return Comparison(states=states, others=others)


def refuse_overwriting(repo: str, found: Comparison) -> None:
    """Refuse a repository with files that are not ours.

    Raises:
        RecipeError: the repository holds other files, or other bytes under our names.
    """
    strange = [f"another {name}" for name in found.named("differs")] + list(found.others)
    if strange:
        cure = "Take another --repo, or add --update: its history keeps what is replaced, and nothing is deleted"
        raise RecipeError(repo, "must be empty or hold this checkpoint", got=listed(strange), cure=cure)


def send(
    parcel: Parcel, hub: Hub, repo: str, *, update: bool, may_be_public: bool, watch: ReadingBar | None = None
) -> Sent:
    """Send the parcel; files that the repository has already are not sent again.

    Args:
        parcel: from `take`.
        hub: signed in.
        repo: if there is none, it is made, and private.
        update: replace files that differ.
        may_be_public: the repository was a public one before.
        watch: a progress bar for the bytes of the shards.

    Raises:
        RecipeError: it holds something else, or everybody may read it.
        CheckpointError: a shard changes while it is sent.
        HubError: the Hub refuses, or does not answer.
    """
    if hub.look(repo) is None:
        hub.create(repo)
    remote = must_be_there(hub, repo)
    if not remote.is_private and not may_be_public:
        raise RecipeError(repo, "must be private until it is checked", got="a public one", cure="Make it private")
    found = compare(parcel, remote)
    if not update:
        refuse_overwriting(repo, found)
    missing = [parcel.taken[name] for name in parcel.files if found.states[name] != "same"]
    commit = remote.commit
    if missing:
        with held(parcel.folder, "only one run may publish a checkpoint"):
            commit = _upload(parcel, hub, remote, missing, watch)
    num_bytes = total_bytes(taken.local for taken in missing)
    return Sent(commit=commit, num_bytes=num_bytes, kept=tuple(found.named("same")), others=found.others)


def must_be_there(hub: Hub, repo: str, *, revision: str | None = None) -> Remote:
    """A repository, which was made or written to just now.

    Raises:
        HubError: the Hub says that there is none.
    """
    if (remote := hub.look(repo, revision=revision)) is None:
        raise HubError(repo, "must be there, as the Hub has said", got="none", cure="Look at its page on the Hub")
    return remote


def refuse_other_head(hub: Hub, sent: Remote) -> Remote:
    """The repository as it is now, if its newest commit is the one that was checked.

    Raises:
        HubError: somebody else has written to it.
    """
    now = must_be_there(hub, sent.repo)
    if now.commit != sent.commit:
        raise _other_head(sent, now, "Look at what was written, and run the same command again")
    return now


def make_public(hub: Hub, sent: Remote) -> None:
    """Let everybody read a repository that was checked.

    Raises:
        HubError: it is another one by then, and private again; or the Hub leaves it private.
    """
    hub.set_visibility(sent.repo, is_private=False)
    now = must_be_there(hub, sent.repo)
    if now.commit != sent.commit:
        hub.set_visibility(sent.repo, is_private=True)
        raise _other_head(sent, now, "It is private again. Look at what was written, and run the same command again")
    if now.is_private:
        raise HubError(sent.repo, "must be public, as the Hub has said", got="a private one", cure=AGAIN)


def _other_head(sent: Remote, now: Remote, cure: str) -> HubError:
    got = f"commit {now.commit} after {sent.commit}"
    return HubError(sent.repo, "nobody else may write to it meanwhile", got=got, cure=cure)


def _upload(parcel: Parcel, hub: Hub, remote: Remote, missing: Sequence[Taken], watch: ReadingBar | None) -> str:
    """One commit with the missing files; returns its name."""
    furthest = {taken.local.name: 0 for taken in missing}
    shards = total_bytes(taken.local for taken in missing if taken.content is None)
    message = f"Upload {parcel.folder.resolve().name} with keepmtp {parcel.report.keepmtp}"
    with nullcontext(lambda _: None) if watch is None else watch(shards) as advance:

        def reached(name: str, at: int) -> None:  # what is sent again does not count twice
            if at > furthest[name]:
                advance(at - furthest[name])
                furthest[name], PATIENCE.silences = at, 0

        return hub.upload(
            remote.repo,
            lambda: [taken.operation(reached) for taken in missing],
            parent=remote.commit,
            message=message,
        )


def verify(parcel: Parcel, remote: Remote, *, others: Sequence[str] = ()) -> None:
    """Compare a commit with the parcel, file by file: sizes, SHA-256 of large files, git's hash of small ones.

    The Hub computes both hashes from what it received.

    Args:
        others: files that were there before, and may be.

    Raises:
        GateError: names the files that are missing, differ, or should not be there.
    """
    found = compare(parcel, remote)
    wrong = [
        f"{name} is {'not there' if state == 'new' else _difference(parcel.files[name], remote.files[name])}"
        for name, state in found.states.items()
        if state != "same"
    ]
    wrong += [f"{name} is there, which was not sent" for name in found.others if name not in others]
    if wrong:
        where = f"{remote.repo} at {remote.commit}"
        raise GateError(
            where,
            "must hold the bytes that were sent",
            got=listed(wrong),
            cure="Run the same command with --update to send them again",
        )


def _is_same(parcel: Parcel, name: str, there: RepoFile) -> bool:
    """The Hub has the SHA-256 of a large file, and git's hash of a small one. For the latter the local file is read."""
    local = parcel.files[name]
    if there.lfs is not None:
        return (there.lfs.size, there.lfs.sha256) == (local.num_bytes, local.sha256)
    return there.size == local.num_bytes and there.blob_id == parcel.git_hash(name)


def _difference(local: LocalFile, there: RepoFile) -> str:
    if there.size != local.num_bytes:
        return f"{there.size} bytes there and {local.num_bytes} here"
    return f"of another {'SHA-256' if there.lfs else 'git hash'} there than here"
