"""`keepmtp where`: the folder that `keepmtp quantize` with the same words has written. The make
targets ask it.

In: a model and choices. Out: the folder, or a refusal that lists what is there.

Easy to get wrong: nothing is guessed. With two variants in out/, the bare name means the default
one, or nothing.
"""

import glob
import sys
from pathlib import Path

from .options import ModelOptions

_NEXT_TO_IT = (".partial", ".report", ".card", ".hub", ".calibration")  # of a checkpoint


def where(choices: ModelOptions) -> None:
    """Print the folder that `keepmtp quantize` with the same words has written; the make targets
    ask this.
    """
    from ..checkpoints.record import RECORD
    from ..recipes.errors import RecipeError, printable

    name, recipe = _names(choices)
    wanted = Path("out") / recipe
    if recipe and (wanted / "config.json").is_file():
        sys.stdout.write(f"{printable(str(wanted))}\n")
        return
    there = sorted(str(path.parent) for path in Path("out").glob(f"{glob.escape(name)}.*/{RECORD}"))
    there = [path for path in there if not path.endswith(_NEXT_TO_IT)]
    rule = (
        f"{wanted} must be there" if recipe else "SCHEME must be given where MODEL is a checkpoint"
    )
    got, cure = f"no out/{name}.*", "Run make quantize, or name a folder by OUT"
    if there:
        got, cure = f"only {', '.join(there)}", "Name one by SCHEME or OUT"
    raise RecipeError(f"MODEL {choices.model}", rule, got=got, cure=cure)


def _names(choices: ModelOptions) -> tuple[str, str]:
    """The model's part of the folder's name, and the whole; "" where no scheme says which variant
    is meant.
    """
    from ..quantize.plan.checkpoint_as_model import model_name, model_word
    from ..recipes.errors import folded
    from ..recipes.find import find_recipe

    word, scheme, mtp = model_word(choices.model), choices.scheme, choices.mtp
    if word.is_recipe:
        recipe, _ = find_recipe(word.name, scheme=scheme, mtp=mtp, calibration=choices.calibration)
        return recipe.model, recipe.name
    name = model_name(word.name)
    if scheme is None:
        return name, ""
    return name, f"{name}.{folded(scheme)}" + (f"-mtp-{folded(mtp)}" if mtp else "")
