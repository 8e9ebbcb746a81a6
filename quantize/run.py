"""The whole program on one screen: recipe -> family -> source -> plan -> pack and write -> check.

In: what a command line says. Out: a checkpoint under its final name, or a refusal before a byte is written.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from ..recipes.errors import GateError
from ..recipes.schema import Recipe, find_recipe
from ..validate.static import Report, check
from .output import claim, publish, refuse_output
from .plan import Plan, make_plan, refuse_calibration
from .source import download, open_source


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A finished run."""

    plan: Plan
    out: Path
    report: Report


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
    return make_plan(recipe, opened), text


def quantize(
    plan: Plan, recipe_text: str, *, out: Path, threads: int | None = None,
    watch: Callable[[int], AbstractContextManager[Callable[[int], None]]] | None = None,
) -> Result:  # fmt: skip
    """Carry out a plan: download if need be, pack, write, check, and give the folder its name.

    Args:
        plan: from `plan_for`; over a Hub repository it is made again once the files are here.
        recipe_text: written beside the weights.
        out: the output folder; `<out>.partial` until it is whole and has passed the static check.
        threads: shards written side by side; default one a core.
        watch: given the number of source bytes, a context whose value is told about bytes done.

    Raises:
        RecipeError, CheckpointError: before a byte is written.
        GateError: the written checkpoint does not pass its own static check; it stays under its partial name.
    """
    from .writer import write  # torch is imported here, when there is work for it

    refuse(plan, out)
    local = download(plan.source)
    if local is not plan.source:
        plan = make_plan(plan.recipe, local, shard_bytes=plan.shard_bytes)
        refuse(plan, out)
    total = sum(plan.entries[name].num_bytes for tensor in plan.tensors if tensor.outputs for name in tensor.inputs)
    with claim(plan, out) as partial:
        with watch(total) if watch else nullcontext() as progress:
            write(plan, partial, recipe_text=recipe_text, threads=threads or _num_cores(), progress=progress)
        report = check(partial, source=local)
        if not report.ok:
            first = report.findings[0]
            raise GateError(
                f"{partial}: the written checkpoint must pass its own check; got {first.where} {first.says}. "
                f"{first.cure}."
            )
        publish(partial, out)
    return Result(plan=plan, out=out, report=replace(report, path=str(out)))


def refuse(plan: Plan, out: Path) -> None:
    """Everything that would make a run pointless, before a byte is written or downloaded.

    Raises:
        RecipeError: the plan needs batches, or the output folder cannot be used.
    """
    refuse_calibration(plan)
    refuse_output(plan, out)


def _num_cores() -> int:
    """Cores this process may use, which a container or a batch system may have cut down."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_out(recipe: Recipe) -> Path:
    """`out/<model>.<variant>`, where `make quantize` writes unless told otherwise."""
    return Path("out") / recipe.name
