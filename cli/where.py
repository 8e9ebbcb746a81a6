"""`keepmtp where`: the folder that `keepmtp quantize` with the same words has written. The make targets ask it.

In: a model and choices. Out: the folder, or a refusal that lists what is there.

Easy to get wrong: nothing is guessed. With two variants in out/, the bare name means the default one, or nothing.
"""

import glob
import sys
from pathlib import Path

from .options import CalibrationOption, ModelArgument, MtpOption, SchemeOption

_NEXT_TO_IT = (".partial", ".report", ".card", ".hub", ".calibration")  # of a checkpoint


def where(
    model: ModelArgument,
    scheme: SchemeOption = None,
    mtp: MtpOption = None,
    calibration: CalibrationOption = None,
) -> None:
    """Print the folder that `keepmtp quantize` with the same words has written; the make targets ask this."""
    from ..checkpoints.record import RECORD
    from ..recipes.errors import RecipeError, printable

    name, recipe = _names(model, scheme, mtp, calibration)
    wanted = Path("out") / recipe if recipe else None
    if wanted is not None and (wanted / "config.json").is_file():
        sys.stdout.write(f"{printable(str(wanted))}\n")
        return
    there = sorted(str(path.parent) for path in Path("out").glob(f"{glob.escape(name)}.*/{RECORD}"))
    there = [path for path in there if not path.endswith(_NEXT_TO_IT)]
    raise RecipeError(
        f"MODEL {model}",
        f"{wanted} must be there" if wanted else "SCHEME must be given where MODEL is a checkpoint",
        got=f"only {', '.join(there)}" if there else f"no out/{name}.*",
        cure="Name one by SCHEME or OUT" if there else "Run make quantize, or name a folder by OUT",
    )


def _names(model: str, scheme: str | None, mtp: str | None, calibration: str | None) -> tuple[str, str]:
    """The model's part of the folder's name, and the whole; "" where no scheme says which variant is meant."""
    from ..quantize.plan.checkpoint_as_model import model_name, model_word
    from ..recipes.errors import folded
    from ..recipes.find import find_recipe

    word = model_word(model)
    if word.is_recipe:
        recipe, _ = find_recipe(word.name, scheme=scheme, mtp=mtp, calibration=calibration)
        return recipe.model, recipe.name
    name = model_name(word.name)
    return name, f"{name}.{folded(scheme)}" + (f"-mtp-{folded(mtp)}" if mtp else "") if scheme else ""
