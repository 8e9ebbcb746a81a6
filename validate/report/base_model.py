"""The base model that a card may name: what was read, what was compared, or what the author states.

In: a checkpoint's record, its evidence folder, the source's folder where it is here, and `--base-model`. Out: a
`BaseModel`: the Hub id and a sentence that says how it is known.

Easy to get wrong: a recipe names a release, and its user quantizes a fine-tune of it. Configuration and headers of both
are equal. So a local folder is that release only if every safetensors file has the hash that the Hub gives; the
comparison is kept in the evidence folder as base_model.json.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile
from pydantic import ValidationError

from ...checkpoints.fact import Fact
from ...checkpoints.files import write_whole
from ...checkpoints.hub import hub_errors
from ...checkpoints.hub_names import is_repo_id
from ...checkpoints.identity import ReadingBar, identify
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.record import Record
from ...checkpoints.source import Source, file_sizes, open_source
from ...recipes.errors import CheckpointError, RecipeError, first_fault
from ...recipes.shipped import shipped_path

NONE = "none"
FILE = "base_model.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """What a card says of its base model.

    Attributes:
        name: Hub id; "" where there is none.
        is_proven: that repository was read, or compared with what was read.
        says: how it is known, in a sentence.
    """

    name: str
    is_proven: bool
    says: str


NO_BASE_MODEL = BaseModel(name="", is_proven=False, says="The author names no base model on the Hub.")


class EqualRelease(Fact):
    """base_model.json: a local source that has the bytes of a release; `files` are the source's, as in the record."""

    name: str
    commit: str
    num_tensors: int
    files: Mapping[str, int]


def base_model_of(record: Record, evidence: Path, named: str | None) -> BaseModel | None:
    """What is known without asking anybody; None where it is not known.

    Args:
        record: of the checkpoint.
        evidence: its folder of results.
        named: by the author; `none`: there is no base model on the Hub.
    """
    read = _read_from_the_hub(record)
    if read and named in (None, read.name):
        return read
    compared = _kept(record, evidence)
    if compared and named in (None, compared.name):
        return compared
    if (
        named in (None, NONE)
        and record.source.revision == "local"
        and _is_shipped(record.source.name, record.source.files)
    ):
        says = f"`{record.source.name}` is a small model that comes with keepmtp; it has no repository on the Hub."
        return BaseModel(name="", is_proven=False, says=says)
    if named == NONE:
        return NO_BASE_MODEL
    if named:
        source = f"the repository `{read.name}`" if read else f"the local folder `{record.source.name}`"
        says = f"Stated by the author. What was read is {source}; keepmtp did not compare it with `{named}`."
        return BaseModel(name=named, is_proven=False, says=says)
    return None


def find_base_model(
    checkpoint: Path, record: Record, evidence: Path, source: Path | None, *, watch: ReadingBar | None = None
) -> BaseModel:
    """The base model of a checkpoint whose author names none: known, or the recipe's release if the bytes are equal.

    Raises:
        CheckpointError: it is neither.
    """
    known = base_model_of(record, evidence, None)
    if known:
        return known
    candidate = candidate_of(record.recipe.source, record.recipe.revision)
    why = f"the local folder {record.source.name}"
    if candidate and source is not None:
        opened = open_source(source)
        if file_sizes(opened) != dict(record.source.files):
            raise unknown(checkpoint, f"{why}, whose files are no longer those that were quantized")
        try:
            found = _compared(opened, candidate, record.recipe.revision, evidence, watch)
        except CheckpointError as error:
            raise unknown(checkpoint, f"{why}, not compared with {candidate}: {error.rule}, {error.got}") from error
        if isinstance(found, EqualRelease):
            write_whole(evidence / FILE, found.model_dump_json(indent=2) + "\n")
            return _of(found)
        why = f"{why}, which is not {candidate}: {found}"
    raise unknown(checkpoint, why)


def refuse_unknown(source: Source, candidate: str, revision: str) -> None:
    """Refuse, before hours of work, a local source that a card could name no base model for.

    Args:
        source: what will be quantized.
        candidate, revision: the recipe's own source.

    Raises:
        CheckpointError: it is a local folder, no shipped model, and not like the recipe's release.
    """
    if source.mtp_source is not None and source.folder is not None:  # a block of another repository is no part of it
        source = open_source(source.folder)
    if source.revision != "local" or _is_shipped(Path(source.where).name, file_sizes(source)):
        return
    why, repo = f"the local folder {source.where}", candidate_of(candidate, revision)
    if not repo:
        raise unknown(source.where, why)
    try:
        unlike = _unlike(source, open_source(repo, revision=revision))
    except CheckpointError as error:
        raise unknown(source.where, f"{why}, not compared with {repo}: {error.rule}, {error.got}") from error
    if unlike:
        raise unknown(source.where, f"{why}, which is not {repo}: {unlike}")


def candidate_of(source: str, revision: str) -> str:
    """The Hub id of a recipe's own source; "" where that is a folder."""
    return source if revision != "local" and is_repo_id(source) else ""


def unknown(where: object, got: str) -> CheckpointError:
    """The refusal that asks for the base model."""
    cure = "Name it with --base-model ORG/NAME, or say --base-model none"
    return CheckpointError(where, "a card names a base model that was read or is stated", got=got, cure=cure)


def refuse_no_id(named: str | None) -> None:
    """Refuse a base model that the Hub cannot have.

    Raises:
        RecipeError: neither an id nor `none`.
    """
    if named is not None and named != NONE and not is_repo_id(named):
        raise RecipeError(
            "--base-model", "must have the Hub's form", got=repr(named), cure="Choose with --base-model ORG/NAME"
        )


def _read_from_the_hub(record: Record) -> BaseModel | None:
    name, commit = record.source.name, record.source.revision
    if not _COMMIT.fullmatch(commit) or not is_repo_id(name):
        return None
    return BaseModel(name=name, is_proven=True, says=f"Read from the Hub at commit `{commit}`.")


def _kept(record: Record, evidence: Path) -> BaseModel | None:
    """A comparison that was made before, if it is about the files of this record."""
    path = evidence / FILE
    if not os.path.lexists(path):
        return None
    try:
        found = EqualRelease.model_validate_json(read_bytes_of(path, path))
    except ValidationError as error:
        raise CheckpointError(path, "must be a comparison", got=first_fault(error), cure="Remove it") from error
    is_same = dict(found.files) == dict(record.source.files) and record.source.revision == "local"
    return _of(found) if is_same and is_repo_id(found.name) else None


def _of(found: EqualRelease) -> BaseModel:
    says = (
        f"The source was a local folder with the same configuration, the same {found.num_tensors:,} tensors and the "
        f"same bytes of all {len(found.files):,} safetensors files as commit `{found.commit}`."
    )
    return BaseModel(name=found.name, is_proven=True, says=says)


def _is_shipped(name: str, files: Mapping[str, int]) -> bool:
    """Whether a folder is one of keepmtp's own models, by the sizes of its files."""
    own = shipped_path(name)
    return own is not None and {path.name: path.stat().st_size for path in own.glob("*.safetensors")} == dict(files)


def _compared(
    source: Source, candidate: str, revision: str, evidence: Path, watch: ReadingBar | None
) -> EqualRelease | str:
    """The comparison of a local folder with a release, or how they differ; bytes are read only if all else is equal."""
    remote = open_source(candidate, revision=revision)
    if unlike := _unlike(source, remote):
        return unlike
    theirs = _files(candidate, remote.revision)
    assert source.folder is not None
    ours, sizes = identify(source.folder, cache=evidence, watch=watch).files, file_sizes(source)
    for name in sizes:
        if not _has_bytes(theirs.get(name), source.folder / name, ours[name].sha256):
            return f"{name} has other bytes"
    return EqualRelease(
        name=candidate,
        commit=remote.revision,
        num_tensors=len(source.entries) + len(source.unindexed),
        files=sizes,
    )


def _unlike(ours: Source, theirs: Source) -> str:
    """How configuration or headers differ; "" if they do not."""
    if ours.config != theirs.config:
        keys = sorted(ours.config.keys() | theirs.config.keys())
        return f"{next(key for key in keys if ours.config.get(key) != theirs.config.get(key))} of config.json differs"
    mine, other = ({**source.entries, **source.unindexed} for source in (ours, theirs))
    for name in sorted(mine.keys() | other.keys()):
        one, two = mine.get(name), other.get(name)
        if one is None or two is None or (one.dtype, one.shape, one.file) != (two.dtype, two.shape, two.file):
            return f"the tensor {name} differs"
    return ""


def _files(repo: str, commit: str) -> dict[str, RepoFile]:
    """The files at a commit, with the hashes that the Hub gives."""
    with hub_errors(repo, commit):
        tree = HfApi().list_repo_tree(repo, recursive=True, revision=commit)
        return {file.path: file for file in tree if isinstance(file, RepoFile)}


def _has_bytes(remote: RepoFile | None, path: Path, sha256: str) -> bool:
    """Whether a local file is one of the Hub, by the hash that the Hub has of it: a small one has git's alone."""
    if remote is None:
        return False
    if remote.lfs:
        return remote.lfs.sha256 == sha256
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content), usedforsecurity=False).hexdigest() == remote.blob_id
