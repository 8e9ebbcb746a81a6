"""The output folder without its shards: refusals, config.json, index, record, and the final name.

In: a plan. Out: small files, written whole or not at all. No weight is read and torch is not
needed, so a refusal costs nothing.

Easy to get wrong: only the same plan may continue from a killed run's shards.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from filecmp import cmpfiles
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ... import __version__
from ...checkpoints.files import (
    WORK,
    complete,
    final_path,
    held,
    partial_path,
    refuse_strange,
)
from ...checkpoints.identity import states_of
from ...checkpoints.output import (
    claimed,
    gather,
    refuse_another,
    refuse_place,
    tidy,
)
from ...checkpoints.proposal import in_form_of, index_like
from ...checkpoints.record import RECIPE, RECORD, Record, RecordedSource, read_record
from ...checkpoints.source import (
    INDEX,
    Source,
    donor_files,
    file_sizes,
    small_bytes,
    small_object,
)
from ...recipes.errors import CheckpointError
from ...recipes.frozen import Json, Raw
from ...recipes.model_file import find_path
from ...recipes.schema import AUTO, Recipe
from ...recipes.schemes import SWEEPS
from ..needs.room import calibration_folder, refuse_full_disk
from ..plan.configs import config_of, files_of
from ..plan.plan import Plan
from ..run.processes import place_of_process

_log = logging.getLogger(__name__)


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
        refuse_another(partial_path(out), fingerprint(plan, calibration))


def claim(plan: Plan, out: Path, *, calibration: str = "") -> AbstractContextManager[Path]:
    """The partial folder, held as this plan's; see `claimed`. `calibration` is what `fingerprint`
    takes.
    """
    return claimed(plan.source, out, fingerprint(plan, calibration))


def finish(plan: Plan, partial: Path, *, recipe_text: str, calibration: Raw | None = None) -> None:
    """Write all files but the shards: config.json, index, tokenizer and other files, recipe,
    record.

    Raises:
        CheckpointError: the source was written to since it was opened, or the folder has a file of
            something else.
    """
    weight_map = dict[str, str]()
    for shard in plan.shards:
        for output in shard.outputs:
            weight_map[output.name] = shard.file
    source = plan.source
    old: Json = {}
    if plan.recipe.keeps_config:
        old = small_object(source, INDEX) or {}
    index = index_like(old, weight_map, plan.num_bytes_after)
    texts = {INDEX: json.dumps(index, indent=2) + "\n", RECIPE: recipe_text}
    for name, content in files_of(plan).items():
        before = None
        if plan.recipe.keeps_config:
            before = small_bytes(source, name)
        texts[name] = in_form_of(before, content).decode()
    texts[RECORD] = record_of(plan, calibration).text()
    cure = "Run the same command again: it compares what is written, and writes anew what differs"
    if plan.needs_calibration:
        kept = calibration_folder(final_path(partial))
        cure = f"Remove {partial} and {kept}, and run the same command again"
    gather(
        source,
        partial,
        links=[shard.file for shard in plan.linked],
        copies=plan.companions,
        files=texts,
        new=weight_map.values(),
        cure=cure,
    )


def publish(partial: Path, out: Path, *, keep_calibration: bool = True) -> None:
    """Give a whole checkpoint its final name, and remove what only an unfinished one needs."""
    assert partial == partial_path(out)
    complete(out)
    tidied(out, keep_calibration=keep_calibration)


def tidied(out: Path, *, keep_calibration: bool) -> None:
    """Remove what a finished output does not need."""
    if (out / WORK).is_dir() and not keep_calibration:
        shutil.rmtree(calibration_folder(out), ignore_errors=True)
    tidy(out)


# --- what is there --------------------------------------------------------------------------------


def is_finished(plan: Plan, out: Path) -> bool:
    """Whether an output is there that this plan would make: by the same recipe, source and
    versions.

    A source folder counts as the same if none of its files was written to since the output was
    made.
    """
    if out.is_symlink():
        return False
    try:
        record = read_record(out / RECORD)
    except CheckpointError:  # there is none, or a stranger's
        return False
    passed_over = {"evaluation", "gates"}
    if plan.recipe.mtp == AUTO:  # what it chose is one of its own outcomes
        passed_over |= {"mtp", "mtp_auto"}
    if plan.recipe.is_searched:
        passed_over |= {"backbone", "overrides", "budget", "backbone_auto", "summary"}
        found = (record.calibration or {}).get("search")
        if not isinstance(found, dict) or found.get("asked") != asked(plan.recipe):
            return False
    wanted = record_of(plan, record.calibration)
    for key, value in wanted.recipe.whole.items():
        if key not in passed_over and record.recipe.whole.get(key) != value:
            return False
    if (record.keepmtp, record.versions) != (wanted.keepmtp, wanted.versions):
        return False
    # The same plan carries the checkpoint's own code only if it is trusted now, too.
    for name in (*plan.companions, *plan.source.code):
        if (out / name).is_file() != (name in plan.companions):
            return False
    there = [shard for shard in plan.shards if (out / shard.file).is_file()]
    if len(there) != len(plan.written) + len(plan.linked):
        return False
    donors = record.donors or {}
    for group, donor in (wanted.donors or {}).items():
        if not _is_same(donor, donors.get(group)):
            return False
    return _is_same(wanted.source, record.source) and _is_older(plan, out / RECORD)


def asked(recipe: Recipe) -> str:
    """A sum over all that a recipe leaves to a search, and what it chooses by."""
    fields = {"backbone", "mtp", "overrides", "budget", "backbone_auto"}
    parts = recipe.model_dump(mode="json", include=fields)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _is_same(wanted: RecordedSource, found: RecordedSource | None) -> bool:
    """Whether two records are of one source. A Hub's commit never changes, and a folder may."""
    if found is not None and not wanted.files:
        found = found.model_copy(update={"files": {}})
    return wanted == found


def _is_older(plan: Plan, record: Path) -> bool:
    """Whether no file of a source folder, or of a dataset here, was written to since."""
    if plan.source.folder is None:
        return True
    made_ns = record.stat().st_mtime_ns
    states = list(plan.source.states.values())
    if plan.recipe.calibration is not None:
        for texts in plan.recipe.calibration.mix:
            dataset = find_path(texts.dataset)
            if dataset is None:  # of the Hub: the recipe has its revision
                continue
            for path in (dataset, *dataset.rglob("*")):
                if path.is_file():
                    states += states_of(path.parent, [path.name]).values()
    if any(state.mtime_ns >= made_ns for state in states):
        return False
    # A link changes the ctime as it comes and as it goes, and so does `cp -p`.
    newer = [state for state in states if state.ctime_ns >= made_ns]
    # Of several processes, each would.
    if not newer or plan.needs_batches or place_of_process().size > 1:
        return plan.keeps_shards or all(state.num_links > 1 for state in newer)
    is_same = _is_same_again(plan, record.parent)
    if is_same:
        os.utime(record)  # once is enough
    return is_same


def _is_same_again(plan: Plan, out: Path) -> bool:
    """Whether a data-free plan gives, now, the files that are there: it is carried out again."""
    from .writer import write_shards

    _log.warning("%s: made again and compared: newer ctime", out)
    again = out / WORK / "again"  # a killed run's goes with the rest of that folder
    refuse_strange(again, below=True)
    with held(again, "only one run may make it"):
        try:
            refuse_full_disk(plan, again, with_calibration=False)
            write_shards(plan, again, threads=os.cpu_count() or 1)
            finish(plan, again, recipe_text="")
            names = {shard.file for shard in plan.shards}.union(files_of(plan), plan.companions)
            return not any(cmpfiles(out, again, names, shallow=False)[1:])
        finally:
            tidy(out)


def _name_of(source: Source) -> str:
    """In a record: no path of the machine that made it."""
    if source.revision == "local":
        return Path(source.where).name
    return source.where


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
        others[start] = [other.revision, file_sizes(source, start)]
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
    donors = {}
    for group, donor in source.donors.items():
        donors[group] = _recorded(donor, file_sizes(source, donor_files(group)))
    fates = Counter[str]()
    for tensor in plan.tensors:
        fates[tensor.fate] += 1
    return Record.model_validate(
        {
            "keepmtp": __version__,
            "recipe": plan.recipe.model_dump(mode="json"),
            "source": _recorded(source, file_sizes(source)),
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
        if calibration.algorithm in SWEEPS:
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
