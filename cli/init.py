"""`keepmtp init`: a recipe to edit.

In: a model or a checkpoint. Out: a recipe's file.
"""

from pathlib import Path
from typing import Annotated

import typer

from ..recipes.errors import RecipeError
from .options import ModelArgument, MtpSourceOption
from .tables import show


def init(
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("recipe.yaml"),
    mtp_source: MtpSourceOption = None,
) -> None:
    """Write a recipe to edit: for a folder or Hub id of a known family, or a copy of a model's own.

    `keepmtp quantize recipe.yaml` takes it as it is. Comments explain its keys.

    \b
    Example: `keepmtp init /data/my-fine-tune --out my-fine-tune.yaml`
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
    write_whole(out, _text(model, out, mtp_source))
    show([str(out)])


def _text(model: str, out: Path, mtp_source: str | None) -> str:
    from ..quantize.plan.checkpoint_as_model import (
        family_mapping,
        fitting,
        model_word,
        opened,
        refuse_unfit,
    )
    from ..recipes.family_wide import text_of
    from ..recipes.find import named_file

    word = model_word(model)
    if word.is_recipe:
        if mtp_source is not None:
            raise RecipeError(
                "--mtp-source",
                "belongs to a checkpoint without a block; a model's recipe is copied",
                got=mtp_source,
                cure="Edit mtp_source in the copy",
            )
        file, _ = named_file(word.name)
        return file.path.read_text()
    source = opened(word, mtp_source)
    raw = family_mapping(source)
    # Unedited, the file makes the same bytes as `keepmtp quantize` with the checkpoint as MODEL.
    variants = [fit.variant for fit in fitting(source, raw)]
    if not variants:
        refuse_unfit(source, raw, raw["default"])  # which says why
        raise RecipeError(
            source.where,
            "a variant of its family must fit",
            got=f"none of {', '.join(raw['variants'])}",
            cure="Copy a recipe of the family and edit it: `keepmtp ls models`",
        )
    return text_of(raw | {"default": variants[0]}, variants, file=str(out))
