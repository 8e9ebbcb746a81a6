"""The output folder without its shards: refusals, config.json, index, record, and the final name.

In: a plan. Out: small files, written whole or not at all. No weight is read and torch is not
needed, so a refusal costs nothing.

Easy to get wrong: only the same plan may continue from a killed run's shards. OUT.partial/.keepmtp
has the fingerprint of that plan and the hashes of its finished shards; it is removed when the
folder has its final name.
"""

import hashlib
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ... import __version__
from ...checkpoints.companions import inside
from ...checkpoints.files import (
    WORK,
    complete,
    final_path,
    held,
    is_held,
    partial_path,
    within,
    write_whole,
)
from ...checkpoints.identity import listed, refuse_changed, states_of
from ...checkpoints.record import RECIPE, RECORD, Record, read_record
from ...checkpoints.source import INDEX, MTP_FILES, Source, file_sizes, mtp_file_sizes
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.model_file import find_path
from ...recipes.schema import AUTO, Recipe
from ..config.written import config_of, files_of
from ..needs.room import calibration_folder, refuse_full_disk
from ..plan.plan import Plan

# Calibrated values depend on their versions.
_ONE_RUN = "only one run may write an output"
_CALIBRATING = ("llmcompressor", "compressed-tensors", "transformers")


def _stamp(partial: Path) -> Path:
    return partial / WORK / "plan.sha256"


def refuse_output(plan: Plan, out: Path, *, calibration: str | None = "") -> None:
    """Refuse an output folder in which the run could not end, before a byte is written.

    Args:
        plan: what will be written.
        out: where.
        calibration: what `fingerprint` takes by that name; None while it is not known yet, so that
            an unfinished output is not compared.

    Raises:
        RecipeError: there is something, it is inside the source, its disk is too small or cannot be
            written, or its unfinished part is another run's.
    """
    config_of(plan)  # `format: modelopt` has no entry for some modules
    refuse_place(plan.source, out)
    refuse_full_disk(plan, out, with_calibration=calibration is None)
    if plan.source.folder is not None and calibration is not None:
        _refuse_another_plan(partial_path(out), fingerprint(plan, calibration))


@contextmanager
def claim(plan: Plan, out: Path, *, calibration: str = "") -> Iterator[Path]:
    """The partial folder, marked as this plan's and held against other runs for as long as the
    context lasts.

    Nothing in it is read or written before it is held: two runs that start at the same time would
    mix their plans. `calibration` is what `fingerprint` takes.

    Raises:
        RecipeError: another run holds it, or see `refuse_output`.
    """
    partial = partial_path(out)
    with held(partial, _ONE_RUN):
        try:
            refuse_place(plan.source, out)  # another run may have finished since this one looked
            wanted = fingerprint(plan, calibration)
            _refuse_another_plan(partial, wanted, is_ours=True)
        except RecipeError:
            with suppress(OSError):  # it may hold another run's work
                partial.rmdir()
            raise
        write_whole(_stamp(partial), wanted)
        yield partial


def finish(
    plan: Plan, partial: Path, *, recipe_text: str, calibration: Mapping[str, Any] | None = None
) -> None:
    """Write all files but the shards: config.json, index, tokenizer and other files, recipe,
    record.

    Raises:
        CheckpointError: the source was written to since it was opened, or the folder has a file of
            something else.
    """
    configs = files_of(plan)
    for name, content in configs.items():
        write_whole(partial / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    weight_map = {output.name: shard.file for shard in plan.shards for output in shard.outputs}
    index = {
        "metadata": {"total_size": plan.num_bytes_after},
        "weight_map": dict(sorted(weight_map.items())),
    }
    write_whole(partial / INDEX, json.dumps(index, indent=2) + "\n")
    assert plan.source.folder is not None
    for name in plan.companions:
        shutil.copyfile(inside(plan.source.folder, name), within(partial, name))
    write_whole(partial / RECIPE, recipe_text)
    write_whole(partial / RECORD, record_of(plan, calibration).text())
    _refuse_strays(plan, partial, configs)
    cure = (
        "Run the same command again: it compares what is written with the source, and writes "
        "anew what differs"
    )
    if plan.needs_calibration:
        cure = (
            f"Remove {partial} and {calibration_folder(final_path(partial))}, and run the same "
            "command again"
        )
    _refuse_changed(plan.source, cure)


def _refuse_changed(source: Source, cure: str) -> None:
    """Refuse a source that was written to since it was opened, and likewise a separate MTP
    source.
    """
    assert source.folder is not None
    own = {name: state for name, state in source.states.items() if not name.startswith(MTP_FILES)}
    refuse_changed(source.folder, own, cure=cure)
    if (other := source.mtp_source) is not None and other.folder is not None:
        stamps = {name: other.states[name] for name in source.mtp_files}
        refuse_changed(other.folder, stamps, cure=cure)


def publish(partial: Path, out: Path, *, keep_calibration: bool = True) -> None:
    """Give a whole checkpoint its final name, and remove what only an unfinished one needs."""
    assert partial == partial_path(out)
    complete(out)
    tidy(out, keep_calibration=keep_calibration)


def tidy(out: Path, *, keep_calibration: bool) -> None:
    """Remove what a finished output does not need. The folder of hashes is last: it shows a later
    run what to do.
    """
    if not (out / WORK).is_dir():
        return
    if not keep_calibration:
        shutil.rmtree(calibration_folder(out), ignore_errors=True)
    shutil.rmtree(out / WORK, ignore_errors=True)


def is_finished(plan: Plan, out: Path) -> bool:
    """Whether an output is there that this plan would make: by the same recipe, source and
    versions.

    A source folder counts as the same if none of its files was written to since the output was
    made.
    """
    if out.is_symlink() or not (out / RECORD).is_file():
        return False
    try:
        record = read_record(out / RECORD)
    except CheckpointError:
        return False
    passed_over = {"evaluation", "gates"}
    if plan.recipe.mtp == AUTO:  # what it chose is one of its own outcomes
        passed_over |= {"mtp", "mtp_auto"}
    if plan.recipe.is_searched:
        passed_over |= {"backbone", "overrides", "budget", "backbone_auto", "summary"}
    recipe = plan.recipe.model_dump(mode="json", exclude=passed_over)
    return (
        all(record.recipe.whole.get(key) == value for key, value in recipe.items())
        and (not plan.recipe.is_searched or _searched_for(record) == asked(plan.recipe))
        and record.keepmtp == __version__
        and record.versions
        == {"python": platform.python_version(), **_versions(*record.versions.keys() - {"python"})}
        and all(
            (out / name).is_file() == (name in plan.companions)
            for name in (*plan.companions, *plan.source.code)
        )
        and _is_same_source(plan, record, (out / RECORD).stat().st_mtime_ns)
    )


def asked(recipe: Recipe) -> str:
    """A sum over all that a recipe leaves to a search, and what it chooses by."""
    fields = {"backbone", "mtp", "overrides", "budget", "backbone_auto"}
    parts = recipe.model_dump(mode="json", include=fields)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _searched_for(record: Record) -> object:
    """The sum of what a record's plan was searched for."""
    found = (record.calibration or {}).get("search")
    return found.get("asked") if isinstance(found, dict) else None


def _is_same_source(plan: Plan, record: Record, made_ns: int) -> bool:
    """Whether a record's source is this plan's, and no file was written to since. A Hub's commit
    never changes.
    """
    source, calibration = plan.source, plan.recipe.calibration
    if (record.source.name, record.source.revision) != (_name_of(source), source.revision):
        return False
    other, theirs = source.mtp_source, record.mtp_source
    if (other and (_name_of(other), other.revision)) != (theirs and (theirs.name, theirs.revision)):
        return False
    if theirs and other and other.folder is not None and theirs.files != mtp_file_sizes(source):
        return False
    if source.folder is None:
        return True
    states = list(source.states.values())
    for dataset in filter(
        None, (find_path(texts.dataset) for texts in (calibration.mix if calibration else ()))
    ):
        files = (
            [dataset]
            if dataset.is_file()
            else [path for path in dataset.rglob("*") if path.is_file()]
        )
        states += states_of(
            dataset.parent, (str(path.relative_to(dataset.parent)) for path in files)
        ).values()
    is_older = all(max(state.mtime_ns, state.ctime_ns) < made_ns for state in states)
    return is_older and record.source.files == file_sizes(source)


def _name_of(source: Source) -> str:
    """In a record: no path of the machine that made it."""
    return source.where if source.revision != "local" else Path(source.where).name


def is_empty(out: Path) -> bool:
    """Whether it is an empty folder, which an output can replace."""
    return out.is_dir() and not (out.is_symlink() or out.is_mount() or any(out.iterdir()))


def refuse_place(source: Source, out: Path) -> None:
    """Refuse a path that cannot become an output made from `source`, whatever the disk has room
    for.
    """
    if got := _found_at(out):
        rule, cure = "an existing output is never overwritten", "Choose another OUT"
        if got == _MOUNT:
            rule, cure = "an output gets its name when it is whole", "Choose a folder inside it"
        raise RecipeError(out, rule, got=got, cure=cure)
    folder = source.folder
    if folder is not None and Path(os.path.realpath(out)).is_relative_to(os.path.realpath(folder)):
        raise RecipeError(
            out,
            "the output must lie outside the source",
            got=f"a folder in {folder}",
            cure="Choose another OUT",
        )
    parent = next(path for path in out.absolute().parents if path.exists() or path.is_symlink())
    if not parent.is_dir():
        raise RecipeError(
            out, "must be in a folder", got=f"{parent}, a file", cure="Choose another OUT"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        got = f"{parent}, which you cannot write to"
        raise RecipeError(
            out, "must be in a folder that can be written to", got=got, cure="Choose another OUT"
        )


_MOUNT = "the root of a disk"


def _found_at(out: Path) -> str:
    """What has the output's name already; "" for nothing, or for an empty folder."""
    if out.is_symlink():
        return "a link"
    if not out.exists() or is_empty(out):
        return ""
    if not out.is_dir():
        return "a file"
    if out.is_mount():
        return _MOUNT
    if (out / RECORD).is_file():
        return "a finished checkpoint"
    return "a folder with files in it"


def _refuse_another_plan(partial: Path, wanted: str, *, is_ours: bool = False) -> None:
    """Refuse an unfinished output of another plan; `is_ours` where this run holds it."""
    if not partial.is_dir():
        return
    stamp = _stamp(partial)
    found = stamp.read_text() if stamp.is_file() else None
    is_new = found is None and all(path.name == WORK for path in partial.iterdir())
    if found == wanted or is_new:
        return
    if not is_ours and is_held(partial):
        raise RecipeError(
            partial, _ONE_RUN, got="another run at work", cure="Wait for it, or choose another OUT"
        )
    raise RecipeError(
        partial,
        "an unfinished output can only be resumed with the same recipe, source, calibration data "
        "and keepmtp version",
        got="another plan",
        cure="Remove it, or choose another OUT",
    )


def _refuse_strays(plan: Plan, partial: Path, configs: Iterable[str]) -> None:
    """Refuse files that no part of this run wrote: they would be served and published with the
    output.
    """
    own = {
        *configs,
        INDEX,
        RECIPE,
        RECORD,
        *plan.companions,
        *(shard.file for shard in plan.shards),
    }
    files = (
        path.relative_to(partial)
        for path in partial.rglob("*")
        if not path.is_dir() or path.is_symlink()
    )
    strays = sorted(
        path.as_posix() for path in files if path.parts[0] != WORK and path.as_posix() not in own
    )
    if strays:
        raise CheckpointError(
            partial,
            "an output must hold nothing but what this run wrote",
            got=listed(strays),
            cure="Move these files away, and run the same command again",
        )


def fingerprint(plan: Plan, calibration: str = "") -> str:
    """SHA-256 over what decides the output's bytes besides the source's: recipe, decisions,
    headers, versions.

    The source's bytes are compared shard by shard (`finished.py`).

    Args:
        plan: over a local source.
        calibration: identifies the batches, such as the hash of their ids; counts only where the
            plan needs batches.
    """
    assert plan.source.folder is not None
    digest = hashlib.sha256()
    recipe = plan.recipe.model_dump(
        mode="json", exclude={"evaluation", "gates"}
    )  # they change no byte of a shard
    versions = [__version__, _versions("torch")]
    for part in (
        recipe,
        files_of(plan)["config.json"],
        file_sizes(plan.source),
        plan.companions,
        versions,
    ):
        digest.update(json.dumps(part).encode() + b"\0")
    if plan.source.mtp_source is not None:
        digest.update(
            json.dumps([plan.source.mtp_source.revision, mtp_file_sizes(plan.source)]).encode()
            + b"\0"
        )
    for tensor in plan.tensors:
        digest.update(f"{tensor.name} {tensor.fate} {tensor.scheme} {tensor.outputs}\n".encode())
    if plan.needs_calibration:
        digest.update(json.dumps([calibration, _versions(*_calibrating(plan))]).encode())
    return digest.hexdigest()


def record_of(plan: Plan, calibration: Mapping[str, Any] | None = None) -> Record:
    """What makes this checkpoint, without dates: the same input gives the same record."""
    packages = ("torch", "numpy", *(_calibrating(plan) if calibration else ()))
    source = plan.source
    return Record.model_validate(
        {
            "keepmtp": __version__,
            "recipe": plan.recipe.model_dump(mode="json"),
            "source": _recorded(source, file_sizes(source)),
            "mtp_source": _recorded(source.mtp_source, mtp_file_sizes(source))
            if source.mtp_source
            else None,
            "calibration": dict(calibration) if calibration else None,
            "tensors": dict(Counter(tensor.fate for tensor in plan.tensors)),
            "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
            "versions": {"python": platform.python_version(), **_versions(*packages)},
        }
    )


def _calibrating(plan: Plan) -> tuple[str, ...]:
    """The packages that calibrate."""
    calibration = plan.recipe.calibration
    is_modelopt = calibration is not None and calibration.backend == "modelopt"
    learns = calibration is not None and calibration.algorithm == "autoround"
    return (*_CALIBRATING, *("nvidia-modelopt",) * is_modelopt, *("auto-round",) * learns)


def _recorded(source: Source, files: Mapping[str, int]) -> dict[str, Any]:
    """What a record says of a checkpoint that was read."""
    return {"name": _name_of(source), "revision": source.revision, "files": files}


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
