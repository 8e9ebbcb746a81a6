"""The whole program on one screen: from a recipe to a checkpoint that vLLM serves with MTP.

    recipe     recipes/find.py                        what a person decides, found by its name
    family     recipes/families/                      what modules are called, on disk and in vLLM
    source     checkpoints/source.py                  config.json and headers, local or on the Hub
    plan       quantize/plan/plan.py                  one decision a tensor, from headers alone
    calibrate  quantize/calibrate/layers/backbone.py  statistics, one decoder layer at a time
    MTP pass   quantize/calibrate/mtp/mtp_pass.py     the MTP block, on the backbone's states
    write      quantize/write/writer.py               packed shards in <out>.partial
    check      validate/check/check.py                the static check
    values     validate/check/values.py               scales and the MTP block; then the final name

In: what a command line says. Out: a checkpoint under its final name, or a refusal before a byte is
written.

Easy to get wrong: under torchrun every process runs this, and only the first one does what is done
once.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from .checkpoints.dialects.runtime_view import RuntimeView
from .checkpoints.donors import with_donors
from .checkpoints.files import partial_path
from .checkpoints.mtp_source import has_mtp, with_mtp_of
from .checkpoints.record import RECIPE, RECORD, read_record
from .checkpoints.source import Source, download, open_source, uncollected
from .quantize.needs.needs import machine_of, refuse_too_large
from .quantize.needs.room import calibration_folder
from .quantize.plan.changes_alone import (
    changes_alone,
    new_alone,
    read_for_changes,
    with_changes,
)
from .quantize.plan.checkpoint_as_model import model_word, recipe_of_checkpoint
from .quantize.plan.choices import choices_of, found_text, refuse_budget
from .quantize.plan.draft_alone import draft_as_written, recipe_of_draft
from .quantize.plan.plan import Plan, make_plan
from .quantize.run.progress import SILENT, RunProgress
from .quantize.write.output import claim, publish, refuse_output, tidied
from .quantize.write.refusals import refuse
from .recipes.errors import GateError, RecipeError
from .recipes.find import find_recipe
from .recipes.frozen import Advance, Json, frozen, nowhere
from .recipes.model_file import find_path, flat_text
from .recipes.schema import AUTO, Recipe, validated
from .validate.check.check import Checked, examine
from .validate.check.pair import of_draft
from .validate.facts.results import CheckData
from .validate.facts.vllm_env import gpus_here

if TYPE_CHECKING:  # these import torch and llm-compressor, which planning does not need
    from .quantize.calibrate.run import CalibrationRun
    from .quantize.run.ranks import Ranks


@frozen
class FinishedRun:
    """A finished run."""

    # What was written. Its MTP policy is the one that `mtp: auto` chose.
    plan: Plan
    # The checkpoint's folder.
    out: Path
    # What its check found.
    report: CheckData
    # What the batches gave; None for a run without batches, or one that was there.
    calibration: "CalibrationRun | None" = None
    # An earlier run had finished it.
    was_there: bool = False


@uncollected()
def plan_for(
    model: str,
    *,
    source: str | None = None,
    mtp_source: str | None = None,
    requantize: bool = False,
    changes: Sequence[str] | None = None,
    draft_for: str | None = None,
    changed_only: bool = False,
    trust_remote_code: bool = False,
    **choices: Any,
) -> tuple[Plan, str]:
    """Return the plan that a command line asks for, from headers alone, and the text of its recipe.

    Args:
        model: a recipe by its name or file, or a checkpoint by its folder, its Hub id or the
            address of its page.
        source: another checkpoint than the recipe's.
        mtp_source: another place of the MTP block than the recipe's, for a release that has none.
        requantize: what a tool has quantized may be rounded again.
        changes: `GROUP=VALUE`, for groups of a checkpoint that does not stay as it is.
        draft_for: a finished checkpoint; the MTP block alone becomes a draft for it.
        changed_only: of a repository, only the files that change are read and written.
        trust_remote_code: the checkpoint's own Python may run.
        choices: scheme, mtp and calibration; see `find_recipe`.

    Raises:
        RecipeError, CheckpointError: see `find_recipe`, `open_source` and `make_plan`.
    """
    word = model_word(model)
    if draft_for is not None:
        changes, choices = _of_block_alone(changes, choices, is_recipe=word.is_recipe)
    if word.is_recipe:
        if changes:
            rule = "changes groups of a checkpoint"
            cure = "Name the checkpoint as MODEL, or edit a copy of the recipe"
            raise RecipeError("--set", rule, got=f"{word.name}, a recipe", cure=cure)
        recipe, text = _named(word.name, mtp_source, requantize=requantize, **choices)
        opened = _source_of(recipe, source, word.revision, is_mtp_named=mtp_source is not None)
    else:
        if source is not None:
            rule = "must be left out where MODEL is itself a checkpoint"
            cure = "Remove it, or name a recipe as MODEL"
            raise RecipeError("--source", rule, got=source, cure=cure)
        recipe, text, opened = recipe_of_checkpoint(
            word, mtp_source=mtp_source, requantize=requantize, changes=changes, **choices
        )
    if draft_for is not None:
        made = _plan_of_draft(recipe, opened, draft_for)
        return replace(made, trust_remote_code=trust_remote_code), found_text(made.recipe)
    made = plan_before_measuring(recipe, opened)
    made = replace(made, trust_remote_code=trust_remote_code)
    if made.is_draft_alone:
        rule = "a recipe without groups of the backbone must name who drafts with its block"
        cure = "Add --draft-for TARGET, or name the groups"
        if RuntimeView.of(opened).strange_layers:
            cure = f"Run `keepmtp fix {opened.where}`: its layers have names of another class"
        raise RecipeError(recipe.name, rule, got="backbone: {}", cure=cure)
    if changed_only:
        made = changes_alone(made)
    return made, text


def _of_block_alone(
    changes: Sequence[str] | None, choices: dict[str, str | None], *, is_recipe: bool
) -> tuple[Sequence[str] | None, dict[str, str | None]]:
    """What is said of a block that is wanted alone; of a checkpoint, as changes of the whole."""
    if calibration := choices.get("calibration"):
        got = f"--calibration {calibration}"
        cure = "Leave --calibration out"
        raise RecipeError("--draft-for", "reads no text", got=got, cure=cure)
    if is_recipe:
        return changes, choices
    rule = "has a word for the block alone, by --mtp"
    if changes:
        raise RecipeError("--draft-for", rule, got=f"--set {changes[0]}", cure="Leave --set out")
    if scheme := choices.get("scheme"):
        cure = f"Write --mtp {scheme}"
        raise RecipeError("--draft-for", rule, got=f"--scheme {scheme}", cure=cure)
    return [f"mtp={choices.get('mtp') or 'source'}"], {**choices, "mtp": None}


def _source_of(
    recipe: Recipe, named: str | None, page: str | None, *, is_mtp_named: bool
) -> Source:
    """The checkpoint of a recipe, or another one that is named, with the MTP block and the groups
    that the recipe takes from elsewhere.
    """
    where = named or recipe.source
    # The recipe's revision belongs to the recipe's source. Another repository has a history of its
    # own.
    revision = "main"
    if where == recipe.source:
        revision = page or recipe.revision
    opened = open_source(where, revision=revision)
    block = recipe.mtp_source
    # A block of its own comes before one that the command line has not named.
    if block is not None and (is_mtp_named or not has_mtp(opened)):
        opened = with_mtp_of(opened, open_source(block.source, revision=block.revision))
    donors = {}
    for group, place in (recipe.donors or {}).items():
        donors[group] = open_source(place.source, revision=place.revision)
    return with_donors(opened, donors)


def _plan_of_draft(recipe: Recipe, source: Source, draft_for: str) -> Plan:
    """The plan of the MTP block alone, as a draft for a finished checkpoint."""
    target = open_source(draft_for)
    recipe = recipe_of_draft(recipe, RuntimeView.of(target))
    made = replace(make_plan(recipe, source), target=target)
    _passed(examine(draft_as_written(made), source=source), made, "the draft that would be written")
    return made


def _named(
    name: str, mtp_source: str | None, *, requantize: bool, **choices: str | None
) -> tuple[Recipe, str]:
    """A recipe and its text, with what else a command line decides: the text makes the checkpoint
    again.
    """
    recipe, text = find_recipe(name, **choices)
    changed: Json = {}
    if requantize:
        changed["requantize"] = True
    known = recipe.mtp_source
    if mtp_source is not None and (known is None or known.source != mtp_source):
        revision = "main"
        if find_path(mtp_source) is not None:
            revision = "local"
        changed["mtp_source"] = {"source": mtp_source, "revision": revision}
    if not changed:
        return recipe, text
    recipe = validated(recipe.model_dump() | changed, "the command line")
    return recipe, flat_text(yaml.safe_load(text) | changed)


def quantize(
    plan: Plan,
    recipe_text: str,
    *,
    out: Path,
    threads: int | None = None,
    keep_calibration: bool = False,
    progress: RunProgress = SILENT,
) -> FinishedRun:
    """Carry out a plan: download, calibrate, write, check, and give the folder its final name.

    Args:
        plan: from `plan_for`.
        recipe_text: is written into the checkpoint, unless a search finds another one.
        out: the output folder; one that an earlier run with this plan has finished is kept. It is
            called `<out>.partial` until it is whole and has passed its check, of headers and of
            values. Until then, `<out>.calibration` holds what calibration wrote.
        threads: how many shards are written at the same time; default one a core.
        keep_calibration: keep `<out>.calibration`, for another run with another MTP policy.
        progress: who is called while the run goes on.

    Raises:
        RecipeError, CheckpointError: before a byte is written.
        GateError: no MTP policy of `mtp: auto` is good enough; or the checkpoint does not pass its
            own check, and keeps its partial name.
    """
    is_done = refuse(plan, out)
    progress.accepted()
    if is_done:
        return _found_finished(plan, out, keep_calibration=keep_calibration)
    from .quantize.run.ranks import joined  # imports torch, so only when there is work for it
    from .quantize.write.writer import write

    plan = _readable(plan, out, progress)
    num_cores = len(os.sched_getaffinity(0))  # a container may have fewer than the machine
    with joined() as ranks:
        run = _calibrated(plan, out, ranks, progress)
        if run is not None:
            plan = run.plan
            recipe_text = run.recipe_text or recipe_text
        with _claimed(plan, out, run, ranks) as partial:
            with _packing_bar(plan, ranks, progress) as packed:
                write(
                    plan,
                    partial,
                    recipe_text=recipe_text,
                    threads=threads or num_cores,
                    progress=packed,
                    statistics=run and run.statistics,
                    calibration=run and run.summary,
                    ranks=ranks,
                )
            report = _checked(partial, plan, reads=ranks.is_first, progress=progress)
            ranks.wait()
            if ranks.is_first:
                publish(partial, out, keep_calibration=keep_calibration)
        ranks.wait()
    return FinishedRun(
        plan=plan, out=out, report=report.model_copy(update={"path": str(out)}), calibration=run
    )


def plan_before_measuring(recipe: Recipe, source: Source) -> Plan:
    """Call `make_plan`. While `auto` has not chosen yet, plan BF16 and keep the word auto.

    Raises:
        RecipeError, CheckpointError: see `make_plan`; or nothing fits the recipe's budget.
    """
    if recipe.is_searched:
        choices = choices_of(recipe, source)
        refuse_budget(choices)
        return replace(choices.base, recipe=choices.recipe)
    return replace(make_plan(recipe.before_measuring, source), recipe=recipe)


def _found_finished(plan: Plan, out: Path, *, keep_calibration: bool) -> FinishedRun:
    """A run that an earlier one has finished. What that one had no time to remove is removed."""
    tidied(out, keep_calibration=keep_calibration)
    with suppress(OSError):
        partial_path(out).rmdir()  # empty, or another run's
    recipe = plan.recipe
    if recipe.is_searched:
        recipe, _ = find_recipe(str(out / RECIPE))
    elif recipe.mtp == AUTO:
        recipe = recipe.resolved(read_record(out / RECORD).recipe.whole["mtp"])
    if recipe is not plan.recipe:
        plan = plan.again(recipe)
    report = _checked(out, plan).model_copy(update={"path": str(out)})
    return FinishedRun(plan=plan, out=out, report=report, was_there=True)


def _readable(plan: Plan, out: Path, progress: RunProgress) -> Plan:
    """The plan over files on this disk, whose integers are what headers and config say, with the
    dtypes that values need.
    """
    from .quantize.pack.unit import refuse_other_integers, with_dtypes

    plan = _downloaded(plan, out, progress)
    refuse_other_integers(plan)
    return with_dtypes(plan)


def _downloaded(plan: Plan, out: Path, progress: RunProgress) -> Plan:
    """The plan over files on this disk; what does not fit this machine or a donor's norms, and what
    transformers cannot build, is refused before it is downloaded.
    """
    refuse_too_large(plan, machine_of(here=gpus_here()))
    if plan.source.donors:
        from .checkpoints.values import refuse_other_norms

        refuse_other_norms(plan.source)
    if plan.source.folder is None and plan.needs_batches:
        from .quantize.calibrate.model.skeleton import backbone_refusal

        refusal = backbone_refusal(plan)
        if refusal is not None:
            raise refusal
    read = plan.source
    if plan.changed_only:
        read = read_for_changes(plan)
    fetch = progress.download or download
    local = fetch(read)
    if local is read:
        return plan
    here = replace(plan.source, folder=local.folder, states=local.states)
    plan = replace(plan, source=here)
    # What was downloaded may have taken the room of the output.
    refuse_output(plan, out, calibration=None if plan.needs_batches else "")
    return plan


def _calibrated(
    plan: Plan, out: Path, ranks: "Ranks", progress: RunProgress
) -> "CalibrationRun | None":
    if not plan.needs_batches:
        return None
    from .quantize.calibrate.run import calibrate

    return calibrate(plan, calibration_folder(out), ranks=ranks, progress=progress.calibration)


@contextmanager
def _claimed(plan: Plan, out: Path, run: "CalibrationRun | None", ranks: "Ranks") -> Iterator[Path]:
    """The partial folder. The first process holds it against other runs, for all processes of this
    one.
    """
    claimed: AbstractContextManager[Path] = nullcontext(partial_path(out))
    if ranks.is_first:
        salt = ""  # of a plan without batches
        if run is not None:
            salt = run.salt
        claimed = claim(plan, out, calibration=salt)
    with claimed as partial:
        ranks.wait()
        yield partial


def _packing_bar(
    plan: Plan, ranks: "Ranks", progress: RunProgress
) -> AbstractContextManager[Advance]:
    """The bar of the first process, over all source bytes that are read; the others have none."""
    if not ranks.is_first:
        return nullcontext(nowhere)
    written = [tensor for tensor in plan.tensors if tensor.outputs]
    return progress.packing(plan.num_bytes_read(written))


def _checked(
    folder: Path, plan: Plan, *, reads: bool = False, progress: RunProgress = SILENT
) -> CheckData:
    """The static check, and that of the values where this process reads them."""
    opened = with_changes(plan, folder) if plan.changed_only else folder
    checked = _passed(examine(opened, source=plan.source), plan, folder)
    if not reads:
        return checked.data
    if plan.changed_only and checked.runtime is not None:
        new = new_alone(plan, checked.readable(), folder)
        checked = checked._replace(runtime=RuntimeView(source=new, view=checked.runtime.view))
    from .validate.check.values import refuse_broken_values  # imports torch

    return refuse_broken_values(plan, folder, checked, reading=progress.values)


def _passed(checked: Checked, plan: Plan, where: object) -> Checked:
    """The static check of an output; of a draft alone, with its target.

    Raises:
        GateError: an error.
    """
    if checked.runtime is not None and plan.is_draft_alone:
        target = plan.target and RuntimeView.of(plan.target)
        checked = checked.with_findings(*of_draft(checked, target))
    if not checked.data.ok:
        first = checked.data.findings[0]
        raise GateError(
            where,
            "the written checkpoint must pass its own check",
            got=f"{first.where} {first.says}",
            cure=first.cure,
        )
    return checked
