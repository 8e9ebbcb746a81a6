"""`keepmtp init` and `where`: a recipe's file, and the folder that its run has written.

In: a recipe's name or file, or a checkpoint of a known family. Out: a recipe to edit, or the name
of a folder.

Easy to get wrong: unedited, the file of `init` makes the same bytes as `keepmtp quantize` with the
checkpoint as MODEL. And `where` guesses nothing: with two variants in out/, the bare name means the
default one, or nothing.
"""

import glob
import sys
from pathlib import Path

from ..recipes.errors import RecipeError, folded, printable
from .options import ModelArgument, ModelOptions, MtpSourceOption

_NEXT_TO_IT = (".partial", ".report", ".card", ".hub", ".calibration")  # of a checkpoint


def init(
    model: ModelArgument, out: Path = Path("recipe.yaml"), mtp_source: MtpSourceOption = None
) -> None:
    """Write a recipe to edit: for a folder or Hub id of a known family, or a copy of a model's own.

    `keepmtp quantize recipe.yaml` takes it as it is. Comments explain its keys.

    Example: `keepmtp init /data/my-fine-tune --out my-fine-tune.yaml`

    Args:
        out: The file to write.
    """
    from ..checkpoints.files import write_whole

    if out.exists():
        raise RecipeError(
            "--out", "an existing file is never overwritten", got=out, cure="Choose another --out"
        )
    if not out.absolute().parent.is_dir():
        raise RecipeError(
            "--out", "the folder of the file must exist", got=out, cure="Make it, or choose another"
        )
    text = _text(model, out, mtp_source)
    write_whole(out, text)
    sys.stdout.write(f"{printable(str(out))}\n")


def _text(model: str, out: Path, mtp_source: str | None) -> str:
    from ..quantize.plan.checkpoint_as_model import family_mapping, fitting, model_word, opened
    from ..recipes.family_wide import text_of
    from ..recipes.find import named_file

    word = model_word(model)
    if word.is_recipe:
        if mtp_source is not None:
            rule = "belongs to a checkpoint without a block; a model's recipe is copied"
            raise RecipeError(
                "--mtp-source", rule, got=mtp_source, cure="Edit mtp_source in the copy"
            )
        file, _ = named_file(word.name)
        return file.path.read_text()
    source = opened(word, mtp_source)
    raw = family_mapping(source)
    if source.mtp_source is not None:
        raw["mtp_source"] = {"source": mtp_source, "revision": source.mtp_source.revision}
    variants = list(fitting(source, raw))
    if not variants:
        rule, cure = (
            "a variant of its family must fit",
            "Copy a recipe of the family and edit it: `keepmtp ls models`",
        )
        raise RecipeError(
            source.where, rule, got=f"none of {', '.join(raw['variants'])}", cure=cure
        )
    return text_of(raw | {"default": variants[0]}, variants, file=str(out))


def where(choices: ModelOptions) -> None:
    """Print the folder that `keepmtp quantize` with the same words has written; the make targets
    ask this.
    """
    from ..checkpoints.record import RECORD
    from ..quantize.plan.checkpoint_as_model import model_name, model_word
    from ..recipes.find import find_recipe

    word, scheme, mtp = model_word(choices.model), choices.scheme, choices.mtp
    if word.is_recipe:
        recipe, _ = find_recipe(word.name, scheme=scheme, mtp=mtp, calibration=choices.calibration)
        model, name = recipe.model, recipe.name
    else:
        model = model_name(word.name)
        name = scheme and f"{model}.{folded(scheme)}" + (f"-mtp-{folded(mtp)}" if mtp else "")
    wanted = Path("out", name or "")
    if name and (wanted / "config.json").is_file():
        sys.stdout.write(f"{printable(str(wanted))}\n")
        return
    there = sorted(
        str(path.parent) for path in Path("out").glob(f"{glob.escape(model)}.*/{RECORD}")
    )
    there = [path for path in there if not path.endswith(_NEXT_TO_IT)]
    rule = f"{wanted} must be there" if name else "SCHEME must be given where MODEL is a checkpoint"
    got, cure = f"no out/{model}.*", "Run make quantize, or name a folder by OUT"
    if there:
        got, cure = f"only {', '.join(there)}", "Name one by SCHEME or OUT"
    raise RecipeError(f"MODEL {choices.model}", rule, got=got, cure=cure)
