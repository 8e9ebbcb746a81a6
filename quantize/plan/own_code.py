"""What must be run for a plan and cannot be: the checkpoint's own Python without trust, or its MTP
block.

In: a plan. Out: a refusal, or the words for a plan that leaves code out.

Easy to get wrong: a recipe may come from a stranger too. `model_code: checkpoint` says that a
recipe needs the code; only `--trust-remote-code` says that the user has read it.
"""

from ...recipes.errors import RecipeError
from .plan import Plan

FLAG = "--trust-remote-code"


def refuse_untrusted_code(plan: Plan) -> None:
    """Refuse a recipe that runs the checkpoint's own Python without the flag of the command line.

    Raises:
        RecipeError: names the files.
    """
    calibration = plan.recipe.calibration
    if calibration is None or calibration.model_code != "checkpoint" or plan.trust_remote_code:
        return
    cure = "Copy the release's Python into the checkpoint"
    if plan.source.code:
        cure = f"Read {', '.join(plan.source.code)} of {plan.source.where}, then add {FLAG}"
    raise RecipeError(
        plan.recipe.name,
        f"a recipe that runs the checkpoint's own Python needs {FLAG}",
        got="calibration.model_code: checkpoint without it",
        cure=cure,
    )


def refuse_no_draft(plan: Plan) -> None:
    """Refuse to calibrate or to measure an MTP block that cannot be run here. The family says which
    can.

    Raises:
        RecipeError: says why it cannot be run.
    """
    family = plan.view.family
    if family.draft is None and (plan.may_calibrate_mtp or plan.recipe.measures_mtp):
        raise RecipeError(
            plan.recipe.name,
            "an MTP block that is calibrated or chosen must be one that can be run",
            got=f"{family.model_type}: {family.no_draft}",
            cure="Give `mtp` a word that needs no data: bf16, source, FP8_DYNAMIC or W4A16",
        )


def code_left_out(plan: Plan) -> str:
    """What an output lacks without the checkpoint's own Python: a sentence, empty where nothing is
    left out.
    """
    if plan.trust_remote_code or not plan.source.code:
        return ""
    code = ", ".join(plan.source.code)
    return f"not carried: {code}, the checkpoint's own Python. Carry it: {FLAG}"
