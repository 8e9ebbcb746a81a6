"""A released checkpoint seen through its headers: a local folder or a Hub repository, no weight read.

In: a folder or a Hub id. Out: a `Source`: config.json, and for every tensor its file, dtype, shape and byte range.
`read` then reads one tensor's bytes at a time.

Easy to get wrong: an MTP block may be in a file that the index does not list (`mtp.safetensors`), and a file may be
shorter than its header says. Both are found here, before anything is planned.
"""

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any

from httpx import HTTPError
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    NotASafetensorsRepoError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)

from ..recipes.errors import CheckpointError, NoCheckpointError
from ..recipes.family import HFName
from ..recipes.shipped import find_path
from .companions import INDEX, REWRITTEN, Companions, companions_among, companions_in, inside
from .safetensors_file import Entry, fill, read_header

SINGLE = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint's config and headers.

    Attributes:
        where: what the user named: a path or a Hub id.
        revision: the Hub commit, or "local".
        folder: the folder of its files; None for a Hub repository that has not been downloaded.
        config: config.json as it is.
        entries: the tensors that a loader following the index would see.
        unindexed: tensors of safetensors files that the index does not list.
        companions: tokenizer and other files to carry over, relative paths.
        code: its own Python, which is carried only if the user trusts it.
        left: the names of all other files, which are never carried.
    """

    where: str
    revision: str
    folder: Path | None
    config: Mapping[str, Any]
    entries: Mapping[HFName, Entry]
    unindexed: Mapping[HFName, Entry]
    companions: tuple[str, ...]
    code: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


def open_source(where: str | Path, *, revision: str = "main") -> Source:
    """Read the headers of a local folder or, by range requests, of a Hub repository.

    Args:
        where: a folder or a Hub id.
        revision: of a Hub repository; "local" where only a folder will do.

    Raises:
        CheckpointError: nothing there, no config.json, an index naming a missing file, a truncated or corrupt shard.
    """
    found = find_path(where)
    if found is not None and found.is_dir():
        return _open_folder(found, str(where))
    folder = Path(where)
    if revision == "local" or folder.is_file() or folder.is_absolute() or str(where).count("/") != 1:
        raise NoCheckpointError(
            where, "a source is a folder with config.json or a Hub id ORG/NAME", got="neither", cure="Check SOURCE"
        )
    return _open_hub(str(where), revision)


def download(source: Source, *, to: Path | None = None) -> Source:
    """The same source with its files on this machine (the Hub's cache, or `to`), with the Hub's progress bars."""
    if source.folder is not None:
        return source
    wanted = ["*.safetensors", *REWRITTEN, *map(escape, (*source.companions, *source.code))]
    with _hub_errors(source.where, source.revision):
        folder = snapshot_download(source.where, revision=source.revision, local_dir=to, allow_patterns=wanted)
    return replace(_open_folder(Path(folder), source.where), revision=source.revision)


def small_file(source: Source, name: str) -> Path | None:
    """A file of the checkpoint that is no shard, downloaded if the source is a repository; None if there is none."""
    if source.folder is not None:
        path = source.folder / name
        return path if path.is_file() else None
    with _hub_errors(source.where, source.revision):
        try:
            return Path(HfApi().hf_hub_download(source.where, name, revision=source.revision))
        except EntryNotFoundError:
            return None


def read(source: Source, entry: Entry, into: memoryview, *, offset: int = 0) -> None:
    """Fill `into` with one tensor's bytes from `offset` on; see `safetensors_file.fill`."""
    assert source.folder is not None, "download() first"
    with open(source.folder / entry.file, "rb", buffering=0) as file:
        fill(into, file, entry, where=f"{source.where}/{entry.file}", offset=offset)


def _open_folder(folder: Path, where: str) -> Source:
    if (folder / "config.json").is_symlink():  # an output's config.json has all of its values
        inside(folder, "config.json")
    config = _parse_config(folder / "config.json", where)
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index_path = folder / INDEX
    weight_map = _parse_index(index_path.read_bytes(), f"{where}/{INDEX}") if index_path.is_file() else None
    indexed = _indexed_files(weight_map, present, where)
    headers = {file: read_header(folder / file, f"{where}/{file}").entries for file in {*indexed, *present}}
    return _assemble(where, "local", folder, config, weight_map, indexed, headers, companions_in(folder))


def _open_hub(repo: str, revision: str) -> Source:
    api = HfApi()
    with _hub_errors(repo, revision):
        info = api.model_info(repo, revision=revision)
        files = sorted(sibling.rfilename for sibling in info.siblings or ())
        commit = info.sha or revision
        config_path = api.hf_hub_download(repo, "config.json", revision=commit)
        config = _parse_config(Path(config_path), repo)
        weight_map = None
        if INDEX in files:
            index_path = Path(api.hf_hub_download(repo, INDEX, revision=commit))
            weight_map = _parse_index(index_path.read_bytes(), f"{repo}/{INDEX}")
        present = [file for file in files if file.endswith(".safetensors") and "/" not in file]
        indexed = _indexed_files(weight_map, present, repo)

        def header(file: str) -> dict[HFName, Entry]:
            parsed = api.parse_safetensors_file_metadata(repo, file, revision=commit)
            # The parser leaves out where the data starts: only sizes and shapes matter until the file is downloaded.
            return {
                HFName(name): Entry(
                    name=HFName(name),
                    file=file,
                    dtype=tensor.dtype,
                    shape=tuple(tensor.shape),
                    start=tensor.data_offsets[0],
                    num_bytes=tensor.data_offsets[1] - tensor.data_offsets[0],
                )
                for name, tensor in parsed.tensors.items()
            }

        with ThreadPoolExecutor(max_workers=16) as pool:
            headers = dict(zip(present, pool.map(header, present), strict=True))
    return _assemble(repo, commit, None, config, weight_map, indexed, headers, companions_among(files))


def _assemble(
    where: str,
    revision: str,
    folder: Path | None,
    config: Mapping[str, Any],
    weight_map: Mapping[str, str] | None,
    indexed: tuple[str, ...],
    headers: Mapping[str, Mapping[HFName, Entry]],
    companions: Companions,
) -> Source:
    entries: dict[HFName, Entry] = {}
    unindexed: dict[HFName, Entry] = {}
    for file in sorted(headers):
        for name, entry in headers[file].items():
            # vLLM and transformers read whole files named by the index, so the file decides, not the index's line.
            target = entries if file in indexed else unindexed
            if name in entries and target is entries:
                raise CheckpointError(
                    f"{where}/{file}",
                    f"{name} must be in one file only",
                    got=f"also in {entries[name].file}",
                    cure="Remove one of the two",
                )
            target[name] = entry
    for name, file in (weight_map or {}).items():
        if HFName(name) not in headers[file]:
            raise CheckpointError(
                f"{where}/{file}",
                f"must hold {name}, which the index lists there",
                got="no such tensor",
                cure="Download the shard again",
            )
    return Source(
        where=where,
        revision=revision,
        folder=folder,
        config=config,
        entries=entries,
        unindexed={name: entry for name, entry in unindexed.items() if name not in entries},
        companions=companions.carried,
        code=companions.code,
        left=companions.left,
    )


def _indexed_files(weight_map: Mapping[str, str] | None, present: list[str], where: str) -> tuple[str, ...]:
    if weight_map is not None:
        files = sorted(set(weight_map.values()))
        for file in files:
            if file not in present:
                raise CheckpointError(
                    f"{where}/{INDEX}",
                    "every file of the index must exist",
                    got=f"{file} is missing",
                    cure="Download it, or mend the index",
                )
        return tuple(files)
    if SINGLE in present:
        return (SINGLE,)
    if len(present) == 1:
        return (present[0],)
    raise CheckpointError(
        where, f"must have {SINGLE} or {INDEX}", got=f"{len(present)} safetensors files", cure="Check the download"
    )


def _parse_config(path: Path, where: str) -> Mapping[str, Any]:
    if not path.is_file():
        raise NoCheckpointError(where, "a checkpoint has a config.json", got="none", cure="Check SOURCE")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(path, "must be JSON", got=str(error), cure="Download it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(path, "must be a JSON object", got=type(config).__name__, cure="Download it again")
    return config


def _parse_index(raw: bytes, where: str) -> Mapping[str, str]:
    try:
        return dict(json.loads(raw)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(where, "must have a weight_map", got=repr(error), cure="Download it again") from error


@contextmanager
def _hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Turns the Hub's exceptions into one sentence."""

    def refusal(error: Exception, rule: str, cure: str) -> CheckpointError:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        is_there = isinstance(error, NotASafetensorsRepoError | SafetensorsParsingError)
        return (CheckpointError if is_there else NoCheckpointError)(repo, rule, got=first_line, cure=cure)

    try:
        yield
    except CheckpointError:
        raise
    except HFValidationError as error:
        rule = "a source is a folder with config.json or a Hub id ORG/NAME"
        raise NoCheckpointError(repo, rule, got="neither", cure="Check the path or the name") from error
    except GatedRepoError as error:
        cure = "Ask for access on its page and run `hf auth login`"
        raise refusal(error, "the Hub repository must not be gated for you", cure) from error
    except RepositoryNotFoundError as error:
        cure = "Check the name, or run `hf auth login` if it is private"
        raise refusal(error, "must be a folder or a public Hub repository", cure) from error
    except RevisionNotFoundError as error:
        raise refusal(error, "the revision must exist", f"Check revision {revision}") from error
    except EntryNotFoundError as error:
        raise refusal(error, "a checkpoint has a config.json", "Check the repository") from error
    except (NotASafetensorsRepoError, SafetensorsParsingError) as error:
        raise refusal(error, "files must be safetensors", "Convert them first") from error
    except OfflineModeIsEnabled as error:
        raise refusal(error, "the Hub must be reachable", "Unset HF_HUB_OFFLINE or give a folder") from error
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise refusal(error, "the Hub must be reachable", "Check the network, or give a folder as SOURCE") from error


def file_sizes(source: Source) -> dict[str, int]:
    """Size of every safetensors file, part of what a resumed run compares."""
    assert source.folder is not None
    names = sorted({entry.file for entry in (*source.entries.values(), *source.unindexed.values())})
    return {name: os.stat(source.folder / name).st_size for name in names}
