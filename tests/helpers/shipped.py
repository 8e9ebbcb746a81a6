"""Every recipe that ships with keepmtp, and the checkpoints that they make."""

from pathlib import Path

from keepmtp import api
from keepmtp.recipes.find import named_file
from keepmtp.recipes.model_file import model_files
from keepmtp.recipes.schema import Recipe


def shipped_recipes() -> list[Recipe]:
    files = [named_file(path.stem)[0] for path in model_files()]
    return [file.recipe(variant) for file in files for variant in file.flat]


def made_of(recipe: str, out: Path, **choices: str) -> Path:
    """The checkpoint that a recipe makes, by a plan with these choices."""
    return api.quantize(api.plan(recipe, **choices), out).out
