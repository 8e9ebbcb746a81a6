"""A released checkpoint seen through its headers: a local folder or a Hub repository, no weight
read.

In: a folder or a Hub id. Out: a `Source`: config.json, and for every tensor its file, dtype, shape
and byte range. `read` then reads one tensor's bytes at a time.

The Hub's client is loaded where a repository is read: it takes a quarter of a second.

Easy to get wrong: an MTP block may be in a file that the index does not list (`mtp.safetensors`),
and a file may be shorter than its header says. Both are found here, before anything is planned.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any

from ..recipes.errors import CheckpointError, NoCheckpointError
from ..recipes.family import HFName
from ..recipes.model_file import find_path, model_files
from .companions import INDEX, REWRITTEN, Companions, companions_among, companions_in, inside
from .hub_names import is_repo_id, page_of
from .json_file import read_bytes_of, read_config, read_index, read_object
from .safetensors_file import Entry, fill, read_header
from .unchanged import FileStamp, states_of

SINGLE = "model.safetensors"
MTP_FILES = "mtp_source/"
_GGUF = "Name the safetensors release that the GGUF file was made of"
_MAX_TENSORS = 1_000_000  # of a checkpoint; the largest that are known have less than half


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
        states: the files of a folder as they were when it was opened, by name.
        mtp_source: the checkpoint that the MTP tensors are from, where it is another one. The files
            of these tensors begin with `MTP_FILES`, here and in `states`.
        mtp_files: the files of `mtp_source` that hold them.
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
    states: Mapping[str, FileStamp] = field(default_factory=dict)
    mtp_source: "Source | None" = None
    mtp_files: tuple[str, ...] = ()


def open_source(where: str | Path, *, revision: str = "main") -> Source:
    """Read the headers of a local folder or, by range requests, of a Hub repository.

    Args:
        where: a folder or a Hub id.
        revision: of a Hub repository; "local" where only a folder will do.

    Raises:
        CheckpointError: nothing there, no config.json, an index naming a missing file, a truncated
            or corrupt shard.
    """
    found = _path_of(where)
    if found is not None and found.is_dir():
        return _open_folder(found, str(where))
    rule = "a checkpoint is a folder with config.json or a Hub id ORG/NAME"
    if found is not None:
        cure = "Name a checkpoint's folder, or ORG/NAME"
        if found.suffix.lower() == ".gguf":
            cure = _GGUF
        elif (found.parent / "config.json").is_file():
            cure = f"Name its folder, {found.parent}"
        raise NoCheckpointError(where, rule, got="a file", cure=cure)
    if page := page_of(str(where)):
        return _open_hub(page[0], page[1] or revision)
    if revision == "local" or not is_repo_id(str(where)):
        raise NoCheckpointError(
            where or "SOURCE", rule, got="no such folder", cure=_cure_of_word(str(where))
        )
    return _open_hub(str(where), revision)


def download(source: Source, *, to: Path | None = None, bars: type[Any] | None = None) -> Source:
    """The same source with its files on this machine (the Hub's cache, or `to`).

    Args:
        source: a Hub repository; a folder is returned as it is. Of a separate MTP source, only the
            files with its MTP tensors are downloaded.
        to: where the files go, instead of the Hub's cache.
        bars: a class like tqdm; default the Hub's progress bars.
    """
    if source.mtp_source is not None:
        own, other = download(replace(source, mtp_source=None), to=to, bars=bars), source.mtp_source
        held = other
        if other.folder is None:
            folder = _fetched(other, source.mtp_files, None, bars)
            held = replace(other, folder=folder, states=states_of(folder, source.mtp_files))
        if own.folder == source.folder and held is other:
            return source
        stamps = {f"{MTP_FILES}{name}": held.states[name] for name in source.mtp_files}
        return replace(source, folder=own.folder, states={**own.states, **stamps}, mtp_source=held)
    if source.folder is not None:
        return source
    folder = _fetched(
        source, (*source.companions, *source.code), to, bars, more=("*.safetensors", *REWRITTEN)
    )
    return replace(_open_folder(folder, source.where), revision=source.revision)


def _fetched(
    source: Source,
    names: tuple[str, ...],
    to: Path | None,
    bars: type[Any] | None,
    more: tuple[str, ...] = (),
) -> Path:
    """A folder with these files of a repository, and with those that fit the patterns `more`."""
    from .hub import fetch_all

    return fetch_all(
        source.where, [*more, *map(escape, names)], commit=source.revision, to=to, bars=bars
    )


def small_file(source: Source, name: str) -> Path | None:
    """A file of the checkpoint that is no shard, downloaded if the source is a repository; None if
    there is none.
    """
    if source.folder is not None:
        path = source.folder / name
        return path if path.is_file() else None
    from .hub import fetch

    return fetch(source.where, name, commit=source.revision)


def small_bytes(source: Source, name: str) -> bytes | None:
    """The bytes of such a file; None if there is none.

    Raises:
        CheckpointError: see `json_file.read_bytes_of`.
    """
    path = small_file(source, name)
    return None if path is None else read_bytes_of(path, f"{source.where}/{name}")


def small_object(source: Source, name: str) -> dict[str, Any] | None:
    """The object of a JSON file; None if there is none.

    Raises:
        CheckpointError: see `json_file.read_object`.
    """
    path = small_file(source, name)
    return None if path is None else read_object(path, f"{source.where}/{name}")


def read(source: Source, entry: Entry, into: memoryview, *, offset: int = 0) -> None:
    """Fill `into` with one tensor's bytes from `offset` on, and with those that follow it where
    `into` is longer.

    Raises:
        CheckpointError: the file ends early; see `hub.read_range` for a repository, which is read
            by ranges.
    """
    if source.mtp_source is not None and entry.file.startswith(MTP_FILES):
        theirs = replace(entry, file=entry.file.removeprefix(MTP_FILES))
        return read(source.mtp_source, theirs, into, offset=offset)
    if source.folder is None:
        from .hub import read_range

        read_range(
            source.where, entry.file, commit=source.revision, start=entry.start + offset, into=into
        )
        return
    with open(source.folder / entry.file, "rb", buffering=0) as file:
        fill(into, file, entry, where=f"{source.where}/{entry.file}", offset=offset)


def _open_folder(folder: Path, where: str) -> Source:
    if (folder / "config.json").is_symlink():  # an output's config.json has all of its values
        inside(folder, "config.json")
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    companions = companions_in(folder)
    # Before anything is read: what changes from here on is found at the end.
    states = states_of(
        folder, ("config.json", INDEX, *present, *companions.carried, *companions.code)
    )
    config = _config_of(folder / "config.json", where)
    index_path = folder / INDEX
    weight_map = read_index(index_path, f"{where}/{INDEX}") if os.path.lexists(index_path) else None
    indexed = _indexed_files(weight_map, present, where)
    headers = {
        file: read_header(folder / file, f"{where}/{file}").entries for file in {*indexed, *present}
    }
    opened = _assemble(where, "local", folder, config, weight_map, indexed, headers, companions)
    return replace(opened, states=states)


def _open_hub(repo: str, revision: str) -> Source:
    from .hub import fetch, files_of, read_remote_header

    commit, files = files_of(repo, revision)

    def small(name: str) -> Path:
        path = fetch(repo, name, commit=commit)
        if path is None:
            rule = "the Hub must have the files that it lists"
            raise NoCheckpointError(f"{repo}/{name}", rule, got="none", cure="Run it again")
        return path

    if "config.json" not in files:
        raise _no_config(repo, files)
    config = read_config(small("config.json"), f"{repo}/config.json")
    weight_map = read_index(small(INDEX), f"{repo}/{INDEX}") if INDEX in files else None
    present = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    indexed = _indexed_files(weight_map, present, repo)
    with ThreadPoolExecutor(max_workers=16) as pool:
        found = pool.map(
            lambda file: read_remote_header(repo, file, commit=commit).entries, present
        )
        headers = dict(zip(present, found, strict=True))
    return _assemble(
        repo, commit, None, config, weight_map, indexed, headers, companions_among(files)
    )


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
    if (count := sum(map(len, headers.values()))) > _MAX_TENSORS:
        rule = f"a checkpoint has at most {_MAX_TENSORS} tensors"
        raise CheckpointError(where, rule, got=count, cure="Check what wrote it")
    entries: dict[HFName, Entry] = {}
    unindexed: dict[HFName, Entry] = {}
    for file in sorted(headers):
        for name, entry in headers[file].items():
            # vLLM and transformers read whole files named by the index, so the file decides, not
            # the index's line.
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


def _indexed_files(
    weight_map: Mapping[str, str] | None, present: list[str], where: str
) -> tuple[str, ...]:
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
    cure = (
        f"Download {INDEX} too"
        if present
        else "Download its weights; those in .bin or GGUF files are not read"
    )
    raise CheckpointError(
        where, f"must have {SINGLE} or {INDEX}", got=f"{len(present)} safetensors files", cure=cure
    )


def _path_of(where: str | Path) -> Path | None:
    try:
        return find_path(where) if str(where) else None
    except OSError as error:  # a name that is too long, a folder that may not be read
        got = error.strerror or repr(error)
        raise NoCheckpointError(
            where, "a checkpoint must be readable", got=got, cure="Check its name"
        ) from error


def _config_of(path: Path, where: str) -> Mapping[str, Any]:
    if not os.path.lexists(path):
        raise _no_config(
            where, [*os.listdir(path.parent), *sorted(path.parent.glob("*/config.json"))]
        )
    return read_config(path, path)


def _no_config(where: str, found: Iterable[str | Path]) -> NoCheckpointError:
    """The refusal of a place without config.json: what these files are instead, and what to do with
    them.
    """
    names, got, cure = [str(name) for name in found], "none", "Check its name"
    if "adapter_config.json" in names:
        got, cure = (
            "an adapter",
            "Merge it into its base model (PEFT: merge_and_unload), and name that folder",
        )
    elif any(name.lower().endswith(".gguf") for name in names):
        got, cure = "a GGUF file", _GGUF
    elif inner := next((name for name in names if name.endswith("/config.json")), ""):
        cure = f"Name {Path(inner).parent}"
    elif any(name.endswith(".safetensors") for name in names):
        got, cure = "weights without it", "Copy config.json from the release that they were made of"
    elif any(name.startswith("tokenizer") for name in names):
        got, cure = (
            "a tokenizer alone",
            "Save the model into this folder too, or name the folder that has it",
        )
    elif not names:
        got, cure = "an empty folder", "Download the checkpoint into it, or name its Hub id"
    return NoCheckpointError(where, "a checkpoint has a config.json", got=got, cure=cure)


def _cure_of_word(word: str) -> str:
    """What a word that is no checkpoint may have meant."""
    if any(path.stem == word for path in model_files()):
        return (
            f"{word} is a model's name: run `keepmtp quantize {word}`, and name the folder that "
            "it writes"
        )
    return (
        "Name a folder, ORG/NAME or the address of its page" if "://" in word else "Check its name"
    )


def file_sizes(source: Source) -> dict[str, int]:
    """Size of every safetensors file, part of what a resumed run compares; those of a separate MTP
    source apart.
    """
    entries = (*source.entries.values(), *source.unindexed.values())
    return _sizes(source, {entry.file for entry in entries if not entry.file.startswith(MTP_FILES)})


def mtp_file_sizes(source: Source) -> dict[str, int]:
    """Size of each file of a separate MTP source that holds MTP tensors; none where there is no
    such source.
    """
    return _sizes(source.mtp_source, source.mtp_files) if source.mtp_source is not None else {}


def _sizes(source: Source, files: Iterable[str]) -> dict[str, int]:
    assert source.folder is not None
    return {name: os.stat(source.folder / name).st_size for name in sorted(files)}
