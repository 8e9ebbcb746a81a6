"""The output folder without its shards: refusals, config.json, index, record, and the final name.

In: a plan. Out: small files, written whole or not at all. No weight is read and torch is not
needed, so a refusal costs nothing.

Easy to get wrong: only the same plan may continue from a killed run's shards.
"""

import hashlib
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ... import __version__
from ...checkpoints.companions import inside
from ...checkpoints.files import (
    WORK,
    complete,
    final_path,
    fresh,
    held,
    is_held,
    link,
    partial_path,
    refuse_strange,
    within,
    write_whole,
)
from ...checkpoints.identity import listed, states_of
from ...checkpoints.record import RECIPE, RECORD, Record, RecordedSource, read_record
from ...checkpoints.source import (
    INDEX,
    MTP_FILES,
    Source,
    donor_files,
    file_sizes,
    refuse_changed_files,
    sizes_from,
)
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.frozen import Json, Raw
from ...recipes.model_file import find_path
from ...recipes.schema import AUTO, Recipe
from ..needs.room import calibration_folder, refuse_full_disk
from ..plan.configs import config_of, files_of
from ..plan.plan import Plan

_ONE_RUN = "only one run may write an output"


def _stamp(partial: Path) -> Path:
    # The fingerprint of the plan is kept with the hashes of its finished shards. Both go when the
    # folder has its final name.
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
    refuse_strange(calibration_folder(out), below=True)
    refuse_full_disk(plan, out, with_calibration=calibration is None)
    if plan.source.folder is not None and calibration is not None:
        _refuse_another_plan(partial_path(out), fingerprint(plan, calibration))


@contextmanager
def claim(plan: Plan, out: Path, *, calibration: str = "") -> Iterator[Path]:
    """The partial folder, marked as this plan's and held against other runs for as long as the
    context lasts. `calibration` is what `fingerprint` takes.

    Raises:
        RecipeError: another run holds it, or see `refuse_output`.
    """
    partial = partial_path(out)
    # Nothing in it is read or written before it is held: two runs that start at the same time would
    # mix their plans.
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


def finish(plan: Plan, partial: Path, *, recipe_text: str, calibration: Raw | None = None) -> None:
    """Write all files but the shards: config.json, index, tokenizer and other files, recipe,
    record.

    Raises:
        CheckpointError: the source was written to since it was opened, or the folder has a file of
            something else.
    """
    weight_map = dict[str, str]()
    own = set[str]()  # every file that this run writes
    for shard in plan.shards:
        own.add(shard.file)
        for output in shard.outputs:
            weight_map[output.name] = shard.file
    index = {
        "metadata": {"total_size": plan.num_bytes_after},
        "weight_map": dict(sorted(weight_map.items())),
    }
    texts = {INDEX: json.dumps(index, indent=2) + "\n", RECIPE: recipe_text}
    for name, content in files_of(plan).items():
        texts[name] = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    texts[RECORD] = record_of(plan, calibration).text()
    for name, text in texts.items():
        write_whole(partial / name, text)
    source = plan.source
    assert source.folder is not None
    cure = "Run the same command again: it compares what is written, and writes anew what differs"
    if plan.needs_calibration:
        kept = calibration_folder(final_path(partial))
        cure = f"Remove {partial} and {kept}, and run the same command again"
    states = refuse_changed_files(source, source.states, cure=cure)
    for shard in plan.linked:
        old = source.folder / shard.file
        new = partial / shard.file
        refuse_strange(new)
        # A killed run's link stays: another one in its place would be another state of the source.
        if not (new.exists() and new.samefile(old)):
            link(old, fresh(new))
    for name in plan.companions:
        shutil.copyfile(inside(source.folder, name), fresh(within(partial, name)))
    own.update(texts, plan.companions)
    strays = list[str]()
    for path in sorted(partial.rglob("*")):
        name = path.relative_to(partial).as_posix()
        is_folder = path.is_dir() and not path.is_symlink()
        # What no part of this run wrote would be served and published with the output.
        if not is_folder and name not in own and not name.startswith(f"{WORK}/"):
            strays.append(name)
    if strays:
        raise CheckpointError(
            partial,
            "an output must hold nothing but what this run wrote",
            got=listed(strays),
            cure="Move these files away, and run the same command again",
        )
    refuse_changed_files(source, states, cure=cure)


def publish(partial: Path, out: Path, *, keep_calibration: bool = True) -> None:
    """Give a whole checkpoint its final name, and remove what only an unfinished one needs."""
    assert partial == partial_path(out)
    complete(out)
    tidy(out, keep_calibration=keep_calibration)


def tidy(out: Path, *, keep_calibration: bool) -> None:
    """Remove what a finished output does not need."""
    if not (out / WORK).is_dir():
        return
    refuse_strange(out / WORK)
    if not keep_calibration:
        shutil.rmtree(calibration_folder(out), ignore_errors=True)
    # This folder is the last to go: while it is there, a later run knows that it must tidy.
    shutil.rmtree(out / WORK, ignore_errors=True)


# --- what is there --------------------------------------------------------------------------------


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
        found = (record.calibration or {}).get("search")
        if not isinstance(found, dict) or found.get("asked") != asked(plan.recipe):
            return False
    source = plan.source
    recipe = plan.recipe.model_dump(mode="json", exclude=passed_over)
    for key, value in recipe.items():
        if record.recipe.whole.get(key) != value:
            return False
    if record.keepmtp != __version__ or record.versions != _versions(plan, record.calibration):
        return False
    # The same plan carries the checkpoint's own code only if it is trusted now, too.
    for name in (*plan.companions, *source.code):
        if (out / name).is_file() != (name in plan.companions):
            return False
    there = [shard for shard in plan.shards if (out / shard.file).is_file()]
    if len(there) != len(plan.written) + len(plan.linked):
        return False
    return (
        _is_same(source, record.source, file_sizes(source))
        and _is_same(source.mtp_source, record.mtp_source, sizes_from(source, MTP_FILES))
        and all(
            _is_same(
                donor, (record.donors or {}).get(group), sizes_from(source, donor_files(group))
            )
            for group, donor in source.donors.items()
        )
        and _is_older(plan, (out / RECORD).stat().st_mtime_ns)
    )


def asked(recipe: Recipe) -> str:
    """A sum over all that a recipe leaves to a search, and what it chooses by."""
    fields = {"backbone", "mtp", "overrides", "budget", "backbone_auto"}
    parts = recipe.model_dump(mode="json", include=fields)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _is_same(
    source: Source | None, record: RecordedSource | None, files: Mapping[str, int]
) -> bool:
    """Whether a record is of this source."""
    if source is None or record is None:
        return source is record
    is_named = (record.name, record.revision) == (_name_of(source), source.revision)
    # A Hub's commit never changes, and a folder may.
    return is_named and (source.folder is None or record.files == files)


def _is_older(plan: Plan, made_ns: int) -> bool:
    """Whether no file of a source folder, or of a dataset here, was written to since."""
    if plan.source.folder is None:
        return True
    states = list(plan.source.states.values())
    if plan.recipe.calibration is not None:
        for texts in plan.recipe.calibration.mix:
            dataset = find_path(texts.dataset)
            if dataset is None:  # of the Hub: the recipe has its revision
                continue
            for path in (dataset, *dataset.rglob("*")):
                if path.is_file():
                    states += states_of(path.parent, [path.name]).values()
    newest = 0
    for state in states:
        newest = max(newest, state.mtime_ns)
        if not plan.keeps_shards:  # a link changes the ctime
            newest = max(newest, state.ctime_ns)
    return newest < made_ns


def _name_of(source: Source) -> str:
    """In a record: no path of the machine that made it."""
    if source.revision == "local":
        return Path(source.where).name
    return source.where


def is_empty(out: Path) -> bool:
    """Whether it is an empty folder, which an output can replace."""
    if out.is_symlink() or out.is_mount() or not out.is_dir():
        return False
    return not any(out.iterdir())


def refuse_place(source: Source, out: Path) -> None:
    """Refuse a path that cannot become an output made from `source`, whatever the disk has room
    for.
    """
    found = ""
    faults = list[tuple[str, str]]()
    if out.is_symlink():
        found = "a link"
    elif out.exists() and not out.is_dir():
        found = "a file"
    elif out.is_mount():
        found = "the root of a disk"
    elif (out / RECORD).is_file():
        found = "a finished checkpoint"
    elif out.is_dir() and not is_empty(out):
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


def _refuse_another_plan(partial: Path, wanted: str, *, is_ours: bool = False) -> None:
    """Refuse an unfinished output of another plan; `is_ours` where this run holds it."""
    if not partial.is_dir():
        return
    stamp = _stamp(partial)
    if stamp.is_file():
        if stamp.read_text() == wanted:
            return
    elif {path.name for path in partial.iterdir()} <= {WORK}:
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


# --- what made it ---------------------------------------------------------------------------------


def fingerprint(plan: Plan, calibration: str = "") -> str:
    """SHA-256 over what decides the output's bytes besides the source's: recipe, decisions,
    headers, versions.

    The source's bytes are compared shard by shard (`writer.py`).

    Args:
        plan: over a local source.
        calibration: identifies the batches, such as the hash of their ids; counts only where the
            plan needs batches.
    """
    source = plan.source
    needs = bool(plan.needs_calibration)
    if not needs:
        calibration = ""
    others = {}
    for start, other in source.others.items():
        others[start] = [other.revision, sizes_from(source, start)]
    parts = {
        "recipe": plan.recipe.model_dump(
            mode="json", exclude={"evaluation", "gates"}
        ),  # they change no byte
        "config": files_of(plan)["config.json"],
        "source": file_sizes(source),
        "others": others,
        "files": plan.companions,
        "calibration": calibration,
        "versions": [__version__, _versions(plan, needs)],
    }
    digest = hashlib.sha256(json.dumps(parts).encode())
    for tensor in plan.tensors:
        # The dtype of a scale may follow from the source's values.
        outputs = [(output.name, output.shape) for output in tensor.outputs]
        digest.update(f"{tensor.name} {tensor.fate} {tensor.scheme} {outputs}\n".encode())
    return digest.hexdigest()


def record_of(plan: Plan, calibration: Raw | None) -> Record:
    """What makes this checkpoint, without dates: the same input gives the same record."""
    source = plan.source
    mtp_source = None
    if source.mtp_source is not None:
        mtp_source = _recorded(source.mtp_source, sizes_from(source, MTP_FILES))
    donors = {}
    for group, donor in source.donors.items():
        donors[group] = _recorded(donor, sizes_from(source, donor_files(group)))
    fates = Counter[str]()
    for tensor in plan.tensors:
        fates[tensor.fate] += 1
    return Record.model_validate(
        {
            "keepmtp": __version__,
            "recipe": plan.recipe.model_dump(mode="json"),
            "source": _recorded(source, file_sizes(source)),
            "mtp_source": mtp_source,
            "donors": donors or None,
            "calibration": dict(calibration or {}) or None,
            "tensors": dict(fates),
            "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
            "versions": _versions(plan, calibration),
        }
    )


def _recorded(source: Source, files: Mapping[str, int]) -> Json:
    return {"name": _name_of(source), "revision": source.revision, "files": files}


def _versions(plan: Plan, is_calibrated: object) -> dict[str, str]:
    """Of Python, and of the packages that compute."""
    packages = ["torch", "numpy"]
    calibration = plan.recipe.calibration
    if is_calibrated and calibration is not None:
        packages += ["llmcompressor", "compressed-tensors", "transformers"]
        if calibration.backend == "modelopt":
            packages.append("nvidia-modelopt")
        if calibration.algorithm == "autoround":
            packages.append("auto-round")
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
