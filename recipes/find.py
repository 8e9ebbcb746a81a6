"""Recipe files: which recipe a command line names, how a file is read, and which recipes ship with keepmtp.

In: a model's name, a recipe's full name, or a file. Out: a `Recipe`, and its text for the checkpoint's recipe.yaml.

A file is a flat recipe or a model file (`model_file`). A variant of a model file is expanded to a flat recipe before it
is validated, and the checkpoint carries that flat recipe.

Easy to get wrong: `--scheme` names a variant first, and a scheme only where the file has no such variant.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import RecipeError
from .listing import model_files
from .model_file import flat_recipes, flat_text, is_model_file, load_shipped
from .schema import AUTO, Recipe, validated
from .schemes import SCHEMES

_EXAMPLE = "glm-4.7.nvfp4-fp8"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFile:
    """A recipe file, parsed; a recipe is validated when it is asked for.

    Attributes:
        path: the file.
        default: the variant that is meant where none is named.
        flat: the flat mapping of each variant.
        text: the file's own text if it is a flat recipe, else None.
    """

    path: Path
    default: str
    flat: Mapping[str, dict[str, Any]]
    text: str | None

    def recipe(self, variant: str) -> Recipe:
        """The recipe of one variant.

        Raises:
            RecipeError: a missing key, or a value outside its range; names file, variant and key.
        """
        where = f"{self.path}: variants.{variant}" if self.text is None else self.path
        return validated(self.flat[variant], where)

    def recipe_text(self, variant: str) -> str:
        """The text of one variant's flat recipe: of a flat file, the file itself."""
        return flat_text(self.flat[variant]) if self.text is None else self.text


def read_file(path: Path) -> RecipeFile:
    """Parse a recipe file of either form.

    Raises:
        RecipeError: not YAML, or not a recipe's keys; names file and key.
    """
    text = path.read_text()
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        got = " ".join(str(error).split())
        raise RecipeError(path, "a recipe is a YAML mapping", got=got, cure="Mend it") from error
    if not isinstance(raw, dict):
        raise RecipeError(path, "a recipe is a YAML mapping", got=type(raw).__name__, cure="See recipes/models/")
    if is_model_file(raw):
        return RecipeFile(path=path, default=raw.get("default", ""), flat=flat_recipes(raw, path), text=None)
    variant = validated(raw, path).variant
    return RecipeFile(path=path, default=variant, flat={variant: raw}, text=text)


def read_recipe(path: Path) -> Recipe:
    """Parse and validate a flat recipe, or the default recipe of a model file.

    Raises:
        RecipeError: not YAML, an unknown key, a missing one, or a value outside its range; names file and key.
    """
    file = read_file(path)
    return file.recipe(file.default)


def find_recipe(model: str, *, scheme: str | None = None, mtp: str | None = None) -> tuple[Recipe, str]:
    """The recipe a command line names, and its text in the flat form.

    Args:
        model: a recipe file, a recipe's full name, or a model's name (then its default recipe).
        scheme: another variant of the model, or a scheme for every quantized group.
        mtp: policy for the MTP block instead of the recipe's.

    Raises:
        RecipeError: no such model, variant or scheme; the message lists what there is.
    """
    path, named = (Path(model), None) if model.endswith((".yaml", ".yml")) else _shipped(model)
    if not path.is_file():
        raise RecipeError("MODEL", "a recipe file must exist", got=path, cure="See `keepmtp ls models`")
    file = read_file(path)
    variant = scheme if scheme is not None and scheme in file.flat else named or file.default
    recipe, text = file.recipe(variant), file.recipe_text(variant)
    override = None if scheme in (None, variant) else scheme
    if override is not None and override not in SCHEMES:
        raise RecipeError(
            "--scheme",
            f"must be a variant of {recipe.model} ({', '.join(file.flat)}) or a scheme ({', '.join(SCHEMES)})",
            got=repr(scheme),
            cure="See `keepmtp ls`",
        )
    if override is not None or mtp is not None:
        _refuse_batches_without_a_dataset(recipe, override, mtp)
        recipe = recipe.with_choices(scheme=override, mtp=mtp)
    return recipe, text


def shipped_recipes() -> list[Recipe]:
    """Every recipe that ships with keepmtp."""
    return [recipe for path in model_files() for recipe in _recipes_of(path.stem)]


def data_free_alternative(recipe: Recipe) -> str:
    """What to give as `--scheme` for the nearest recipe of the same model that needs no batches."""
    wanted = {
        group: SCHEMES[word].data_free or word if word in SCHEMES else word for group, word in recipe.backbone.items()
    }
    others = [other for other in _recipes_of(recipe.model) if other.calibration is None]
    if others:
        return max(others, key=lambda other: len(other.backbone.items() & wanted.items())).variant
    return next((SCHEMES[name].data_free for name in recipe.calibrated_schemes() if SCHEMES[name].data_free), "W4A16")


def _refuse_batches_without_a_dataset(recipe: Recipe, scheme: str | None, mtp: str | None) -> None:
    """A choice that needs batches, on a recipe that names none: say which recipe does."""
    needing = [SCHEMES[word] for word in (scheme or "", mtp or "") if word in SCHEMES]
    needing = [each for each in needing if each.needs_calibration]
    if recipe.calibration is not None or (not needing and mtp != AUTO):
        return
    siblings = [other.name for other in _recipes_of(recipe.model) if other.calibration is not None]
    start = (
        f"Start from {siblings[0]}, which has a dataset"
        if siblings
        else f"Copy the recipe's file and add a calibration block like that of {_EXAMPLE}"
    )
    other = f"or use {needing[0].data_free}, without data" if needing else "or choose a policy yourself"
    what = needing[0].name if needing else "mtp: auto"
    raise RecipeError(
        recipe.name, f"calibration must be given for {what}", got="a recipe without data", cure=f"{start}, {other}"
    )


@cache
def _recipes_of(model: str) -> tuple[Recipe, ...]:
    """The shipped recipes of a model, in the order of its file; none for a model that does not ship."""
    path = _shipped_files().get(model)
    if path is None:
        return ()
    flat = flat_recipes(load_shipped(path), path)
    return tuple(validated(raw, f"{path}: variants.{variant}") for variant, raw in flat.items())


def _shipped_files() -> dict[str, Path]:
    return {path.stem: path for path in model_files()}


def _shipped(name: str) -> tuple[Path, str | None]:
    """The file of a model's name or of a recipe's full name, and the variant if the name says one."""
    files = _shipped_files()
    if name in files:
        return files[name], None
    for model, path in files.items():
        variant = name.removeprefix(f"{model}.")
        if variant != name and variant in flat_recipes(load_shipped(path), path):
            return path, variant
    nearest = difflib.get_close_matches(name, sorted(files), n=1, cutoff=0.0)[0]
    raise RecipeError(
        "MODEL",
        f"must be a recipe file or one of {', '.join(sorted(files))}",
        got=repr(name),
        cure=f"Did you mean {nearest}?",
    )
