"""Tiny releases, recipes that differ from a shipped one, and whole runs of the writer."""

from pathlib import Path
from typing import Any, Literal

from drafts import weights_of
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.write.output import claim, publish, refuse_output
from keepmtp.quantize.write.writer import write
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from releases import source_layout, write_checkpoint
from torch import Tensor


def tiny(folder: Path, model: str, data: Literal["sparse", "random"] = "random") -> Path:
    """A tiny release in a folder, made once."""
    if not folder.is_dir():
        write_checkpoint(folder, *source_layout(model), data=data)
    return folder


def recipe_with(name: str, **changes: Any) -> Recipe:
    """A shipped recipe but for these words."""
    return Recipe.model_validate(find_recipe(name)[0].model_dump() | changes)


def written(
    plan: Plan, out: Path, *, recipe_text: str = "", threads: int = 2, **given: Any
) -> dict[str, Tensor]:
    """The tensors of a whole run of the writer; the folder has its final name."""
    refuse_output(plan, out)
    with claim(plan, out) as partial:
        write(plan, partial, recipe_text=recipe_text, threads=threads, **given)
        publish(partial, out)
    return weights_of(out)
