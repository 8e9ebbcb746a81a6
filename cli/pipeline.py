"""The whole program on one screen: recipe -> family -> source -> plan -> calibrate -> MTP pass -> pack, write -> check.

In: what a command line says. Out: a checkpoint under its final name, or a refusal before a byte is written. Under
torchrun every process runs this; the first does what is done once.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoints.files import partial_path
from ..checkpoints.source import Source, download, open_source
from ..quantize.output import claim, publish, refuse_output
from ..quantize.plan import Plan, make_plan
from ..recipes.errors import GateError, RecipeError
from ..recipes.extras import require_extra
from ..recipes.schema import AUTO, Recipe, data_free_alternative, find_recipe
from ..validate.check.check import Report, check

if TYPE_CHECKING:  # they bring torch and llm-compressor, which planning does without
    from ..quantize.calibrate.backbone import Watch
    from ..quantize.calibrate.ranks import Ranks
    from ..quantize.calibrate.run import CalibrationRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished run.

    Attributes:
        plan: what was written; with the MTP policy that `mtp: auto` chose.
        out: the checkpoint's folder.
        report: of its static check.
        calibration: what the batches said; None for a run without any.
    """

    plan: Plan
    out: Path
    report: Report
    calibration: "CalibrationRun | None" = None


def plan_for(
    model: str, *, source: str | None = None, scheme: str | None = None, mtp: str | None = None
) -> tuple[Plan, str]:
    """The plan a command line asks for, from headers alone, and the text of its recipe.

    Raises:
        RecipeError, CheckpointError: see `find_recipe`, `open_source` and `make_plan`.
    """
    recipe, text = find_recipe(model, scheme=scheme, mtp=mtp)
    where = source or recipe.source
    # A recipe's revision is one of its own source; somebody's copy has a history of its own.
    opened = open_source(where, revision=recipe.revision if where == recipe.source else "main")
    return plan_before_measuring(recipe, opened), text


def plan_before_measuring(recipe: Recipe, source: Source, **options: int) -> Plan:
    """`make_plan`; where `mtp: auto` has yet to choose, the plan of a BF16 block that still says auto."""
    if recipe.mtp != AUTO:
        return make_plan(recipe, source, **options)
    return replace(make_plan(recipe.resolved("bf16"), source, **options), recipe=recipe)


def quantize(
    plan: Plan,
    recipe_text: str,
    *,
    out: Path,
    threads: int | None = None,
    keep_calibration: bool = False,
    watch: Callable[[int], AbstractContextManager[Callable[[int], None]]] | None = None,
    watch_calibration: "Watch | None" = None,
) -> Result:
    """Carry out a plan: download if need be, calibrate if need be, pack, write, check, give the folder its name.

    Args:
        plan: from `plan_for`; over a Hub repository it is made again once the files are here.
        recipe_text: written beside the weights.
        out: the output folder; `<out>.partial` until it is whole and has passed the static check. What calibration
            leaves lies in `<out>.calibration` until then.
        threads: shards written side by side; default one a core.
        keep_calibration: leave that folder, for another run with another MTP policy.
        watch: given the number of source bytes, a context whose value is told about bytes done.
        watch_calibration: told after each step of calibration.

    Raises:
        RecipeError, CheckpointError: before a byte is written.
        GateError: no MTP policy of `mtp: auto` is good enough, or the written checkpoint does not pass its own static
            check; it stays under its partial name.
    """
    from ..quantize.calibrate.ranks import joined  # torch is imported here, when there is work for it
    from ..quantize.writer import write

    refuse(plan, out)
    local = download(plan.source)
    if local is not plan.source:
        plan = plan_before_measuring(plan.recipe, local, shard_bytes=plan.shard_bytes)
        refuse(plan, out)
    with joined() as ranks:
        found = _calibrate(plan, out, ranks, watch_calibration)
        if found:
            plan = found.plan
        refuse_output(plan, out, calibration=found.salt if found else "")
        total = sum(plan.entries[name].num_bytes for tensor in plan.tensors if tensor.outputs for name in tensor.inputs)
        with _claimed(plan, out, found, ranks) as partial:
            with watch(total) if watch and ranks.is_first else nullcontext() as progress:
                write(
                    plan,
                    partial,
                    recipe_text=recipe_text,
                    threads=threads or _num_cores(),
                    progress=progress,
                    statistics=found.statistics if found else None,
                    calibration=found.summary if found else None,
                    ranks=ranks,
                )
            report = check(partial, source=local)
            if not report.ok:
                first = report.findings[0]
                rule = "the written checkpoint must pass its own check"
                raise GateError(partial, rule, got=f"{first.where} {first.says}", cure=first.cure)
            ranks.wait()
            if ranks.is_first:
                publish(partial, out)
        if ranks.is_first and not keep_calibration:
            shutil.rmtree(calibration_folder(out), ignore_errors=True)
        ranks.wait()
    return Result(plan=plan, out=out, report=replace(report, path=str(out)), calibration=found)


def refuse(plan: Plan, out: Path) -> None:
    """Everything that would make a run pointless, before a byte is written or downloaded.

    Raises:
        RecipeError: the output folder cannot be used, the MTP block cannot be run and must be, or what packs or
            calibrates is not installed.
    """
    refuse_output(plan, out, calibration=None if needs_calibration(plan) else "")
    refuse_no_draft(plan)
    refuse_missing_extra(plan)


def refuse_no_draft(plan: Plan) -> None:
    """An MTP block that batches are to decide must be one that can be run here; known from the family alone.

    Raises:
        RecipeError: says why it cannot be run.
    """
    family = plan.view.family
    is_measured = plan.recipe.mtp == AUTO or any(tensor.calibrated for tensor in plan.tensors if tensor.part == "mtp")
    if is_measured and family.draft is None:
        raise RecipeError(
            plan.recipe.name,
            "an MTP block that is calibrated or chosen must be one that can be run",
            got=f"{family.model_type}: {family.no_draft}",
            cure="Give `mtp` a word that needs no data: bf16, source, FP8_DYNAMIC or W4A16",
        )


def refuse_missing_extra(plan: Plan) -> None:
    """What packs, and what calibrates where the plan needs it, must be installed.

    Raises:
        RecipeError: names the packages, and a data-free variant of the recipe.
    """
    if needs_calibration(plan):
        otherwise = f"use --scheme {data_free_alternative(plan.recipe)}, which needs no batches"
        require_extra(f"calibration for {plan.recipe.name}", "calibrate", otherwise=otherwise)
    require_extra("packing weights", "quantize")


def refusals(plan: Plan) -> list[str]:
    """What would stop this plan here, whatever its output folder."""
    found = []
    for check_plan in (refuse_no_draft, refuse_missing_extra):
        try:
            check_plan(plan)
        except RecipeError as error:
            found.append(str(error))
    return found


def calibration_folder(out: Path) -> Path:
    """Where statistics and hidden states lie until the output is whole."""
    return out.with_name(f"{out.name}.calibration")


def needs_calibration(plan: Plan) -> bool:
    """Whether batches have to be seen: for a scheme, for an algorithm, or to measure candidates for the MTP block."""
    return bool(plan.needs_calibration) or plan.recipe.mtp == AUTO


def _calibrate(plan: Plan, out: Path, ranks: "Ranks", watch: "Watch | None") -> "CalibrationRun | None":
    if not needs_calibration(plan):
        return None
    from ..quantize.calibrate.run import calibrate

    return calibrate(plan, calibration_folder(out), ranks=ranks, watch=watch)


@contextmanager
def _claimed(plan: Plan, out: Path, found: "CalibrationRun | None", ranks: "Ranks") -> Iterator[Path]:
    """The partial folder; the first process holds it for all."""
    salt = found.salt if found else ""
    with claim(plan, out, calibration=salt) if ranks.is_first else nullcontext(partial_path(out)) as partial:
        ranks.wait()
        yield partial


def _num_cores() -> int:
    """Cores this process may use, which a container or a batch system may have cut down."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_out(recipe: Recipe) -> Path:
    """`out/<model>.<variant>`, where `make quantize` writes unless told otherwise."""
    return Path("out") / recipe.name
