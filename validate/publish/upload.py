"""Sends a checkpoint and its card to the Hub, compares what arrived, and loads it from there.

In: a `Parcel` (upload_set.py) and a repository's name. Out: the commit that holds exactly these files. Hashes are
compared, and the check runs on it by range requests.

Easy to get wrong: a repository that exists may be somebody else's. A file that differs is replaced only on request,
nothing is deleted, and a run that continues after a cut must recognize its own files.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub.hf_api import RepoFile

from ...checkpoints.files import held
from ...checkpoints.identity import listed
from ...recipes.errors import CheckpointError, GateError, RecipeError, VLLMError
from ..check.check import Checked, examine
from ..dryload.check_on import check_on
from ..dryload.facts import GPU, GPUS
from ..serving.vllm_env import find_vllm
from .hub import Hub, HubError, Remote
from .upload_set import LocalFile, Parcel, total_bytes

FileState = Literal["new", "same", "differs"]
# The Hub writes this file into every new repository, and after that by itself.
HUBS_OWN = (".gitattributes",)
_NAME = re.compile(r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?", re.ASCII)
_GPU: GPU = "sm100"


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
            cure="Name it as on the Hub",
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
        name: "new" if name not in there else "same" if _is_same(local, there[name]) else "differs"
        for name, local in parcel.files.items()
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


def send(parcel: Parcel, hub: Hub, repo: str, *, update: bool, may_be_public: bool) -> Sent:
    """Send the parcel; files that the repository has already are not sent again.

    Args:
        parcel: from `prepare`.
        hub: signed in.
        repo: if there is none, it is made, and private.
        update: replace files that differ.
        may_be_public: the repository may be a public one already.

    Raises:
        RecipeError: it holds something else, or everybody may read it.
        HubError: the Hub refuses, or does not answer.
    """
    if hub.look(repo) is None:
        hub.create(repo)
    remote = hub.look(repo)
    if remote is None:
        raise HubError(repo, "must be there once it is made", got="nothing", cure="Look at its page on the Hub")
    if not remote.is_private and not may_be_public:
        raise RecipeError(repo, "must be private, or --public", got="a public repository", cure="Take another --repo")
    found = compare(parcel, remote)
    if not update:
        refuse_overwriting(repo, found)
    missing = [local for name, local in parcel.files.items() if found.states[name] != "same"]
    commit = remote.commit
    if missing:
        with held(parcel.folder, "only one run may publish a checkpoint"), _staged(parcel.folder, missing) as folder:
            what = f"Upload {parcel.folder.resolve().name} with keepmtp {parcel.report.keepmtp}"
            commit = hub.upload(repo, folder, parent=remote.commit, message=what)
    return Sent(commit=commit, num_bytes=total_bytes(missing), kept=tuple(found.named("same")), others=found.others)


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


def load_remote(
    remote: Remote,
    parcel: Parcel,
    *,
    gpu: GPU | None = None,
    watch: Callable[[str], None] = lambda doing: None,
) -> tuple[Checked, str]:
    """Check a repository by range requests, with vLLM's own loaders if there is a vLLM here.

    Args:
        remote: the commit that must be the repository's newest.
        parcel: what is there; its first dry load is repeated unless `gpu` is given.
        gpu: the GPU to pretend.
        watch: called with words about what is being done.

    Returns: what was found, and in words what was tried.

    Raises:
        HubError: somebody else wrote to the repository in the meantime.
    """
    first = next(iter(parcel.report.dry), None)
    tp, k = (first.tp, first.k) if first and gpu is None else (1, 1)
    asked = [gpu or (first.gpu if first else _GPU)]
    chosen: list[GPU] = [known for known in GPUS if known in asked]
    try:
        vllm = find_vllm()
    except VLLMError:
        checked, how = examine(remote.repo), "static check, no dry load: no vLLM here (see `keepmtp doctor`)"
    else:
        (checked,) = check_on([remote.repo], vllm=vllm, gpus=chosen, tps=[tp], num_drafts=k, progress=watch)
        how = f"dry load on {asked[0]} at TP {tp} with vLLM {vllm.version}"
    if checked.source is not None and checked.source.revision != remote.commit:
        raise HubError(
            remote.repo,
            "nobody else may write to it meanwhile",
            got=f"commit {checked.source.revision}",
            cure="Run the same command again",
        )
    return checked, how


def _is_same(local: LocalFile, there: RepoFile) -> bool:
    """The Hub has the SHA-256 of a large file, and git's hash of a small one. For the latter the local file is read."""
    if there.lfs is not None:
        return (there.lfs.size, there.lfs.sha256) == (local.num_bytes, local.sha256)
    return there.size == local.num_bytes and there.blob_id == local.git_hash()


def _difference(local: LocalFile, there: RepoFile) -> str:
    if there.size != local.num_bytes:
        return f"{there.size} bytes there and {local.num_bytes} here"
    return f"of another {'SHA-256' if there.lfs else 'git hash'} there than here"


@contextmanager
def _staged(folder: Path, files: Sequence[LocalFile]) -> Iterator[Path]:
    """A folder of links to exactly these files, for `upload_folder`; gone afterwards."""
    whole = folder.resolve()
    staging = whole.with_name(f"{whole.name}.hub")
    _clear(staging)
    for local in files:
        link = staging / local.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(local.path.resolve())
    try:
        yield staging
    finally:
        _clear(staging)


def _clear(staging: Path) -> None:
    """Remove what a killed run left: links, and folders of links."""
    if strange := [path for path in staging.rglob("*") if not path.is_symlink() and not path.is_dir()]:
        raise CheckpointError(staging, "must hold links of `keepmtp publish` only", got=strange[0].name, cure="Move it")
    if staging.exists():
        shutil.rmtree(staging)
