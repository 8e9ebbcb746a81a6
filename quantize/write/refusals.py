"""What stops a run before a byte is written or downloaded.

In: a plan and an output folder. Out: nothing, or a refusal in one sentence. torch is not needed.

Easy to get wrong: a refusal must be known from the plan alone. A run over a large checkpoint takes
hours, and what can be refused at its start is refused there.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from ...recipes.errors import RecipeError
from ...recipes.extras import require_extra
from ...recipes.schemes import SWEEPS
from ..plan.own_code import refuse_no_draft, refuse_untrusted_code
from ..plan.plan import Plan
from ..plan.texts_here import refuse_texts
from ..run.processes import place_of_process, refuse_processes
from .output import is_finished, refuse_output


def refuse(plan: Plan, out: Path) -> bool:
    """Refuse a run that cannot succeed here. Returns whether it has succeeded before.

    Args:
        plan: what will be done.
        out: where.

    Raises:
        RecipeError: the output folder cannot be used; or the checkpoint's own Python is needed and
            not trusted; or the MTP block must be run and cannot be; or its text cannot be used; or
            a package that packs or calibrates is not installed; or there are more processes than
            sequences.
    """
    is_done = is_finished(plan, out)
    if not is_done:
        calibration = ""
        if plan.needs_batches:
            calibration = None  # the batches are not read yet
        refuse_output(plan, out, calibration=calibration)
    for refuse_plan in _OF_A_PLAN:
        refuse_plan(plan)
    if plan.recipe.calibration is not None and plan.needs_batches:
        refuse_processes(plan.recipe.calibration, place_of_process().size, plan.recipe.name)
    # Last: what no package cures is refused before one is named.
    _refuse_missing_extra(plan)
    return is_done


def _refuse_missing_extra(plan: Plan) -> None:
    if plan.needs_batches:
        extra = "calibrate"
        if plan.recipe.calibration is not None and plan.recipe.calibration.algorithm in SWEEPS:
            extra = "modelopt"
        require_extra(f"calibration for {plan.recipe.name}", extra)
    require_extra("packing weights", "quantize")


_OF_A_PLAN = (refuse_untrusted_code, refuse_no_draft, refuse_texts)


def refusals(plan: Plan) -> list[str]:
    """Every sentence that would stop this plan, whatever its output folder and the packages that
    are there.
    """
    return _raised(plan, _OF_A_PLAN)


def not_installed(plan: Plan) -> list[str]:
    """What would stop it for want of a package."""
    return _raised(plan, [_refuse_missing_extra])


def _raised(plan: Plan, rules: Iterable[Callable[[Plan], None]]) -> list[str]:
    found = []
    for refuse_plan in rules:
        try:
            refuse_plan(plan)
        except RecipeError as error:
            found.append(str(error))
    return found
