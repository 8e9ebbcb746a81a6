"""The folder of a new checkpoint: whole or not there, one run's at a time, continued by the same
run alone.

In: the source, OUT, and a text that says what the run makes: its stamp. Out: OUT.partial, held and
stamped, which gets its name when it is whole; links to what stays.

Easy to get wrong: a hard link is a second name of the same file. Who writes into a file of OUT
writes into the source.
"""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ..recipes.errors import CheckpointError, RecipeError
from .companions import inside
from .files import (
    WORK,
    fresh,
    held,
    link,
    partial_path,
    refuse_strange,
    remove,
    sync,
    within,
    write_whole,
)
from .identity import listed
from .record import RECORD
from .source import Source, refuse_changed_files

STAMP = f"{WORK}/plan.sha256"
"""Below a folder: what is made in it."""
_ONE_RUN = "only one run may write an output"


def refuse_place(source: Source, out: Path) -> None:
    """Refuse a path that cannot become an output made from `source`, whatever the disk has room
    for.
    """
    found = ""
    faults = list[tuple[str, str]]()
    if out.exists() and not out.is_dir():
        found = "a file"
    elif out.is_mount():
        found = "the root of a disk"
    elif (out / RECORD).is_file():
        found = "a finished checkpoint"
    elif out.is_dir() and any(out.iterdir()):
        found = "a folder with files in it"
    if found:
        faults.append(("an existing output is never overwritten", found))
    real = Path(os.path.realpath(out))
    for folder in (source.folder, *(other.folder for other in source.others.values())):
        if folder is not None and real.is_relative_to(os.path.realpath(folder)):
            faults.append(("the output must lie outside the source", f"a folder in {folder}"))
    parent = out.absolute().parent
    while not (parent.exists() or parent.is_symlink()):
        parent = parent.parent
    if not parent.is_dir():
        faults.append(("must be in a folder", f"{parent}, a file"))
    if not os.access(parent, os.W_OK | os.X_OK):
        got = f"{parent}, which you cannot write to"
        faults.append(("must be in a folder that can be written to", got))
    for rule, got in faults:
        raise RecipeError(out, rule, got=got, cure="Choose another OUT")
    for path in (out, partial_path(out)):
        refuse_strange(path, below=True)


@contextmanager
def claimed(source: Source, out: Path, stamp: str) -> Iterator[Path]:
    """The partial folder, stamped and held against other runs for as long as the context lasts.

    Args:
        source: what the output is made from.
        out: the output.
        stamp: what is made; the same run has the same.

    Raises:
        RecipeError: another run holds it, or see `refuse_place` and `refuse_another`.
    """
    partial = partial_path(out)
    # Nothing in it is read or written before it is held: two runs that start at the same time would
    # mix their plans.
    with held(partial, _ONE_RUN):
        try:
            refuse_place(source, out)  # another run may have finished since this one looked
            refuse_another(partial, stamp, is_ours=True)
        except RecipeError:
            with suppress(OSError):  # it may hold another run's work
                partial.rmdir()
            raise
        write_whole(partial / STAMP, stamp)
        yield partial


def stamp_of(folder: Path) -> str:
    """What is made in a folder, as its run says; "" where none does."""
    path = folder / STAMP
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def refuse_another(partial: Path, stamp: str, *, is_ours: bool = False) -> None:
    """Refuse an unfinished output of another run; `is_ours` where this run holds it."""
    if not partial.is_dir():
        return
    found = stamp_of(partial)
    if found == stamp or not (found or {path.name for path in partial.iterdir()} - {WORK}):
        return
    if not is_ours:
        with held(partial, _ONE_RUN):  # or it is at work
            pass
    raise RecipeError(
        partial,
        "an unfinished output can only be resumed with the same recipe, source, calibration data "
        "and keepmtp version",
        got="another plan",
        cure="Remove it, or choose another OUT",
    )


def gather(
    source: Source,
    partial: Path,
    *,
    links: Iterable[str],
    copies: Iterable[str] = (),
    files: Mapping[str, str],
    new: Iterable[str],
    cure: str,
) -> None:
    """Make a folder with new shards whole: with what stays of the source, and small files.

    Args:
        source: as it was opened.
        partial: from `claimed`.
        links: names of the source's files.
        copies: more of them, which whoever edits the output may write to.
        files: the text of each small file. The time of the last says when all of it was there.
        new: names of the other files.
        cure: what to do where the source has changed.

    Raises:
        CheckpointError: the source was written to since it was opened, or the folder has a file of
            something else.
    """
    states = refuse_changed_files(source, source.states, cure=cure)
    for name in links:
        assert source.folder is not None
        old = source.folder / name
        path = within(partial, name)
        refuse_strange(path)
        # Another link in the place of a killed run's would be another state of the source.
        if not (path.exists() and path.samefile(old)):
            link(old, fresh(path))
    states = refuse_changed_files(source, states, cure=cure)
    for name in copies:
        assert source.folder is not None
        shutil.copyfile(inside(source.folder, name), fresh(within(partial, name)))
    for root, _, _ in os.walk(partial):
        sync(Path(root))
    for name, text in files.items():
        write_whole(within(partial, name), text)
    _refuse_strays(partial, {*links, *copies, *files, *new})
    refuse_changed_files(source, states, cure=cure)


def _refuse_strays(partial: Path, own: Collection[str]) -> None:
    """Refuse files that no part of this run wrote: they would be served and published with the
    output.
    """
    strays = list[str]()
    for path in sorted(partial.rglob("*")):
        name = path.relative_to(partial).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        if not is_folder and name not in own and not name.startswith(f"{WORK}/"):
            strays.append(name)
    if strays:
        raise CheckpointError(
            partial,
            "an output must hold nothing but what this run wrote",
            got=listed(strays),
            cure="Move these files away, and run the same command again",
        )


def tidy(out: Path, *, keeps_stamp: bool = False) -> None:
    """Remove what only an unfinished output needs."""
    work = out / WORK
    if not work.is_dir():
        return
    refuse_strange(work, below=keeps_stamp)
    if keeps_stamp:
        for path in work.iterdir():
            if path != out / STAMP:
                remove(path)
    else:
        shutil.rmtree(work, ignore_errors=True)
