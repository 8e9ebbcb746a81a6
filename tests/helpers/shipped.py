"""Every recipe that ships with keepmtp."""

from keepmtp.recipes.find import named_file
from keepmtp.recipes.model_file import model_files
from keepmtp.recipes.schema import Recipe


def shipped_recipes() -> list[Recipe]:
    files = [named_file(path.stem)[0] for path in model_files()]
    return [file.recipe(variant) for file in files for variant in file.flat]
