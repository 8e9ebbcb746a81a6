"""A released checkpoint seen through its headers: a local folder or a Hub repository, no weight
read.

In: a folder or a Hub id. Out: a `Source`: config.json, and for every tensor its file, dtype, shape
and byte range. `read` then reads one tensor's bytes at a time.

The Hub's client is loaded where a repository is read: it takes a quarter of a second.

Easy to get wrong: an MTP block may be in a file that the index does not list (`mtp.safetensors`),
and a file may be shorter than its header says. Both are found here, before anything is planned.
"""

import fnmatch
import gc
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from ..recipes.errors import CheckpointError, NoCheckpointError, counted
from ..recipes.families import find_view
from ..recipes.family import HFName
from ..recipes.family_view import FamilyView, language_config
from ..recipes.frozen import Json, Raw, frozen
from ..recipes.model_file import find_path
from .companions import INDEX, REWRITTEN, Companions, companions_among, companions_in, inside
from .identity import FileStamp, listed, states_of
from .json_file import object_of, read_bytes_of, read_config, read_index
from .safetensors_file import Entry, FileHeader, fill, read_header

SINGLE = "model.safetensors"
DONOR_FILES = "from/"
_NUMBERED = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d{1,9})\.safetensors")
_MOST_FILES = 100_000
# The address of a repository's page.
_PAGE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/([^/?#]+)[^?#]*)?/?(?:[?#].*)?"
)


@frozen
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
        donors: group -> the checkpoint that its tensors are from, where it is another one.
        replaced: the tensors that they take the place of.
        changed: small files of a checkpoint as it would be; None for one that is left out.
        has_index: False for several files that no index lists.
    """

    where: str
    revision: str
    folder: Path | None
    config: Raw
    entries: Mapping[HFName, Entry]
    unindexed: Mapping[HFName, Entry]
    companions: tuple[str, ...]
    code: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    states: Mapping[str, FileStamp] = field(default_factory=dict)
    donors: Mapping[str, "Source"] = field(default_factory=dict)
    replaced: Mapping[HFName, Entry] = field(default_factory=dict)
    changed: Mapping[str, bytes | None] = field(default_factory=dict)
    has_index: bool = True

    @property
    def others(self) -> "dict[str, Source]":
        """The other checkpoints that tensors are from, by what the names of their files begin with,
        here and in `states`.
        """
        return {donor_files(group): donor for group, donor in self.donors.items()}

    @property
    def text_config(self) -> Raw:
        """What config.json says of the language model."""
        return language_config(self.config)


def donor_files(group: str) -> str:
    """What the names of files begin with that a group is from."""
    return f"{DONOR_FILES}{group}/"


def origin_of(entry: Entry) -> str:
    """What the name of a tensor's file begins with where it is from another checkpoint, else ""."""
    start, slash, _ = entry.file.rpartition("/")
    return start + slash


@contextmanager
def uncollected() -> Iterator[None]:
    """Search for no cycles inside of this block, which reads the headers of a large checkpoint; on
    in the end if it was on before.

    A plan makes half a million small values that stay, and none of them is in a cycle; going
    through them again and again took a quarter of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@uncollected()
def open_source(where: str | Path, *, revision: str = "main") -> Source:
    """Read the headers of a local folder or, by range requests, of a Hub repository.

    Args:
        where: a folder or a Hub id.
        revision: of a Hub repository; "local" where only a folder will do.

    Raises:
        CheckpointError: nothing there, no config.json, an index naming a missing file, a truncated
            or corrupt shard.
    """
    rule = "a checkpoint is a folder with config.json or a Hub id ORG/NAME"
    cure = "Check its name"
    try:
        found = find_path(where) if str(where) else None
    except OSError as error:  # a name that is too long, a folder that may not be read
        got = error.strerror or repr(error)
        raise NoCheckpointError(where, rule, got=got, cure=cure) from error
    if found is not None and found.is_dir():
        return _open_folder(found, str(where))
    if found is not None:
        raise NoCheckpointError(
            where, rule, got="a file", cure="Name the folder of a checkpoint in safetensors files"
        )
    if page := page_of(str(where)):
        return _open_hub(page[0], page[1] or revision)
    if revision == "local" or not is_repo_id(str(where)):
        raise NoCheckpointError(where or "SOURCE", rule, got="no such folder", cure=cure)
    return _open_hub(str(where), revision)


def view_of(source: Source) -> FamilyView:
    """The names of a checkpoint.

    Raises:
        CheckpointError, RecipeError: see `families.find_family`.
    """
    return find_view(source.config, source.where, source.entries)


def page_of(address: str) -> tuple[str, str | None] | None:
    """The Hub id and the revision that the address of a repository's page names; None for any other
    word.
    """
    page = _PAGE.fullmatch(address)
    if page is None:
        return None
    return page[1], page[2]


def is_repo_id(name: str) -> bool:
    """Whether the Hub can have a repository ORG/NAME of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def download(source: Source, *, bars: type[Any] | None = None) -> Source:
    """The same source with the files of its tensors on this machine, in the Hub's cache.

    Args:
        source: a Hub repository; a folder is returned as it is. Of a donor nothing is downloaded:
            its tensors are read by ranges when they are wanted.
        bars: a class like tqdm; default the Hub's progress bars.
    """
    if source.folder is not None:
        return source
    from .hub import fetch_all

    tensors = (*source.entries.values(), *source.unindexed.values())
    files = {entry.file for entry in tensors if not origin_of(entry)}
    names = (*files, *source.companions, *source.code)
    patterns = (*map(escape, names), *REWRITTEN)
    folder = fetch_all(source.where, patterns, commit=source.revision, bars=bars)
    states = states_of(folder, (*names, "config.json", INDEX))
    return replace(source, folder=folder, states={**source.states, **states})


def small_file(source: Source, name: str) -> Path | None:
    """A file of the checkpoint that is no shard, downloaded if the source is a repository; None if
    there is none.
    """
    if source.folder is not None:
        path = source.folder / name
        if path.is_file():
            return path
        return None
    from .hub import fetch

    return fetch(source.where, name, commit=source.revision)


def small_bytes(source: Source, name: str) -> bytes | None:
    """The bytes of such a file; None if there is none.

    Raises:
        CheckpointError: see `json_file.read_bytes_of`.
    """
    if name in source.changed:
        return source.changed[name]
    path = small_file(source, name)
    if path is None:
        return None
    return read_bytes_of(path, f"{source.where}/{name}")


def small_object(source: Source, name: str) -> Json | None:
    """The object of a JSON file; None if there is none.

    Raises:
        CheckpointError: see `json_file.read_object`.
    """
    raw = small_bytes(source, name)
    if raw is None:
        return None
    return object_of(raw, f"{source.where}/{name}")


def read(source: Source, entry: Entry, into: memoryview, *, offset: int = 0) -> None:
    """Fill `into` with one tensor's bytes from `offset` on, and with those that follow it where
    `into` is longer.

    Raises:
        CheckpointError: the file ends early; see `hub.read_range` for a repository, which is read
            by ranges.
    """
    other = source.others.get(origin_of(entry))
    if other is not None:
        theirs = replace(entry, file=entry.file.rpartition("/")[2])
        read(other, theirs, into, offset=offset)
    elif source.folder is None:
        from .hub import read_range

        start = entry.start + offset
        read_range(source.where, entry.file, commit=source.revision, start=start, into=into)
    else:
        with open(source.folder / entry.file, "rb", buffering=0) as file:
            fill(into, file, entry, where=f"{source.where}/{entry.file}", offset=offset)


def file_sizes(source: Source, start: str = "") -> dict[str, int]:
    """Size of every safetensors file of a folder, part of what a resumed run compares; or of those
    of a donor that tensors are from.

    Args:
        source: the checkpoint.
        start: of a donor, see `Source.others`.
    """
    sizes = {}
    for name, state in sorted(source.states.items()):
        own = name.removeprefix(start)
        if name.startswith(start) and own.endswith(".safetensors") and "/" not in own:
            sizes[own] = state.num_bytes
    return sizes


def refuse_changed_files(
    source: Source, states: Mapping[str, FileStamp], *, cure: str
) -> dict[str, FileStamp]:
    """Refuse a checkpoint of which a file was written to since its files had these states, and
    those that it takes tensors from; returns the states now.

    A link changes the ctime of its file, so who makes links asks before and after.

    Raises:
        CheckpointError: names the file.
    """
    now = dict(states)
    for name, state in states.items():
        folder = source.folder
        own = name
        for start, other in source.others.items():
            if name.startswith(start):
                folder = other.folder
                own = name.removeprefix(start)
        if folder is None:
            continue
        found = states_of(folder, [own]).get(own)
        if found is None or not state.is_unwritten(found):
            raise CheckpointError(
                folder,
                "the source must not change during a run",
                got=f"another {own}",
                cure=cure,
            )
        now[name] = found
    return now


def _open_folder(folder: Path, where: str) -> Source:
    if (folder / "config.json").is_symlink():  # an output's config.json has all of its values
        inside(folder, "config.json")
    names = sorted(os.listdir(folder))
    companions = companions_in(folder)
    small = ("config.json", INDEX, *companions.carried, *companions.code)
    # Before anything is read: what changes from here on is found at the end.
    states = states_of(folder, (*small, *fnmatch.filter(names, "*.safetensors")))

    def header_of(file: str) -> FileHeader:
        return read_header(folder / file, f"{where}/{file}")

    opened = _opened(where, names, companions, folder.joinpath, partial(map, header_of))
    return replace(opened, folder=folder, states=states)


def _open_hub(repo: str, revision: str) -> Source:
    from .hub import fetch, files_of, read_remote_header

    commit, names = files_of(repo, revision)
    header_of = partial(read_remote_header, repo, commit=commit)
    with ThreadPoolExecutor(max_workers=16) as pool:
        small = partial(fetch, repo, commit=commit)
        headers_of = partial(pool.map, header_of)
        opened = _opened(repo, names, companions_among(names), small, headers_of)
    return replace(opened, revision=commit)


def _opened(
    where: str,
    names: Sequence[str],
    companions: Companions,
    small: Callable[[str], Path | None],
    headers_of: Callable[[Iterable[str]], Iterable[FileHeader]],
) -> Source:
    """What its headers say.

    Args:
        where: the checkpoint's name.
        names: of its files.
        companions: those among them.
        small: fetches one of them.
        headers_of: reads those of some files.
    """
    path = small("config.json") if "config.json" in names else None
    if path is None:
        raise _no_config(where, names)
    config = read_config(path, f"{where}/config.json")
    index = small(INDEX) if INDEX in names else None
    weight_map = read_index(index, f"{where}/{INDEX}") if index is not None else {}
    present = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    # vLLM and transformers read whole files named by the index, so the file decides, not the
    # index's line.
    indexed = sorted({*weight_map.values()})
    rule = "every file of the index must exist"
    if index is None:
        # vLLM reads all: 0.33.0 model_loader/weight_utils.py, filter_duplicate_safetensors_files.
        indexed = sorted({*present}.union(*map(_series_of, present)))
        rule = "every file of a numbered series must exist"
    if not indexed:
        raise CheckpointError(
            where,
            f"must have {SINGLE} or {INDEX}",
            got=counted(len(present), "safetensors file"),
            cure="Download all of its files; weights in .bin or GGUF files are not read",
        )
    for file in indexed:
        if file not in present:
            raise CheckpointError(
                f"{where}/{INDEX}",
                rule,
                got=f"{file} is missing",
                cure="Download it, or mend the index",
            )
    headers = dict(zip(present, headers_of(present), strict=True))
    if index is None and SINGLE in present:
        # A file with nothing else than the one is the same in another form.
        single = headers[SINGLE].entries.keys()
        more = [file for file in indexed if headers[file].entries.keys() - single]
        indexed = [SINGLE, *more]
    entries: dict[HFName, Entry] = {}
    unindexed: dict[HFName, Entry] = {}
    for file in indexed:
        for name, entry in headers[file].entries.items():
            if name in entries:
                raise CheckpointError(
                    f"{where}/{file}",
                    f"{name} must be in one file only",
                    got=f"also in {entries[name].file}",
                    cure="Remove one of the two",
                )
            entries[name] = entry
    for file in present:
        if file not in indexed:
            unindexed |= headers[file].entries
    for name in entries.keys() & unindexed.keys():
        del unindexed[name]
    for name, file in weight_map.items():
        if HFName(name) not in headers[file].entries:
            cure = "Download the shard again"
            if entries.keys() - weight_map.keys():
                cure = f"Remove {INDEX}, which is of other tensors"
            raise CheckpointError(
                f"{where}/{file}",
                f"must hold {name}, which the index lists there",
                got="no such tensor",
                cure=cure,
            )
    return Source(
        where=where,
        revision="local",
        folder=None,
        config=config,
        entries=entries,
        unindexed=unindexed,
        companions=companions.carried,
        code=companions.code,
        left=companions.left,
        has_index=index is not None or len(indexed) == 1,
    )


def _series_of(file: str) -> list[str]:
    """The files of a numbered series, by the name of one; none where it has no number."""
    match = _NUMBERED.fullmatch(file)
    series = list[str]()
    if match is not None:
        count = match["count"]
        for number in range(1, min(int(count), _MOST_FILES) + 1):
            series.append(f"{match['stem']}-{number:0{len(count)}}-of-{count}.safetensors")
    return series


def _no_config(where: str, names: Iterable[str]) -> NoCheckpointError:
    """The refusal of a place without config.json: what is there instead."""
    there = sorted(names)
    cure = "Name that of a whole model"
    if "adapter_config.json" in there:
        cure = "Merge the adapter into its base model first"
    elif fnmatch.filter(there, "*.gguf"):
        cure = "GGUF is not read: name the release in safetensors files that it was made from"
    got = listed(there) or "an empty folder"
    return NoCheckpointError(where, "a checkpoint has a config.json", got=got, cure=cure)
