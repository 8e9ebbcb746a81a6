"""Recipe files: which recipe a command line names, how a file is read, and which recipes ship with
keepmtp.

In: a model's name, a recipe's full name, a file, or the Hub id of a model that has a recipe. Out: a
`Recipe`, and its text for the checkpoint's recipe.yaml.

A file is a flat recipe or a model file (`model_file`). A variant of a model file is expanded to a
flat recipe before it is validated, and the checkpoint carries that flat recipe.

Easy to get wrong: `--scheme` names a variant first, and a scheme only where the file has no such
variant. On the command line, case does not count and `-` is `_`; in a file they do.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cache
from pathlib import Path

from .blocks import KEEP_WORDS
from .conventions import FORMATS
from .errors import RecipeError, did_you_mean, folded
from .frozen import Json, frozen
from .model_file import CALIBRATIONS, calibrations, flat_recipes, flat_text, model_files
from .schema import AUTO, TUNED, Calibration, Recipe, read_as, validated
from .schemes import SCHEMES, meant_scheme
from .yaml_file import load_shipped, read_yaml

DEFAULT_CALIBRATION = "mix-256x2048"
"""The named block that is taken where batches are needed and nothing says which."""
_POLICIES = (*KEEP_WORDS, AUTO, TUNED, *SCHEMES)


@frozen
class RecipeFile:
    """A recipe file, parsed; a recipe is validated when it is asked for."""

    # Where the file is.
    path: Path
    # The variant that is meant where none is named.
    default: str
    # The flat mapping of each variant.
    flat: Mapping[str, Json]
    # The file's own text if it is a flat recipe, else None.
    text: str | None
    # Its own named blocks.
    calibrations: Mapping[str, Json] = field(default_factory=dict)

    def recipe(self, variant: str) -> Recipe:
        """The recipe of one variant.

        Raises:
            RecipeError: a missing key, or a value outside its range; names file, variant and key.
        """
        where: object = self.path
        if self.text is None:
            where = f"{self.path}: variants.{variant}"
        return validated(self.flat[variant], where)

    def recipe_text(self, variant: str) -> str:
        """The text of one variant's flat recipe: of a flat file, the file itself."""
        return self.text or flat_text(self.flat[variant])


def read_file(path: Path) -> RecipeFile:
    """Parse a recipe file of either form.

    Raises:
        RecipeError: not YAML, or not a recipe's keys; names file and key.
    """
    raw, text = read_yaml(path)
    if "variants" in raw:  # a flat recipe has none
        return RecipeFile(
            path=path,
            default=raw.get("default", ""),
            flat=flat_recipes(raw, path),
            text=None,
            calibrations=raw.get(CALIBRATIONS, {}),
        )
    variant = validated(raw, path).variant
    return RecipeFile(path=path, default=variant, flat={variant: raw}, text=text)


def find_recipe(
    model: str, *, scheme: str | None = None, mtp: str | None = None, calibration: str | None = None
) -> tuple[Recipe, str]:
    """The recipe a command line names, and its text in the flat form.

    Args:
        model: a recipe file, a recipe's full name, a model's name (then its default recipe), or its
            Hub id.
        scheme: another variant of the model, or a scheme for every quantized group.
        mtp: policy for the MTP block instead of the recipe's.
        calibration: a named block instead of the recipe's.

    Raises:
        RecipeError: no such model, variant, scheme or block; the message lists what there is.
    """
    file, variant = named_file(model)
    return choose(file, variant, scheme=scheme, mtp=mtp, calibration=calibration)


def named_file(model: str) -> tuple[RecipeFile, str]:
    """The recipe file that MODEL names, and the variant that is meant without --scheme.

    Raises:
        RecipeError: there is none.
    """
    if is_file_name(model):
        if not Path(model).is_file():
            raise RecipeError(
                "MODEL", "a recipe file must exist", got=Path(model), cure="See `keepmtp ls models`"
            )
        file = read_file(Path(model))
        return file, file.default
    shipped = _lookup(model)
    if shipped is not None:
        return shipped
    rule = "must be a model's name, a recipe's full name or a recipe file"
    cure = "See `keepmtp ls`"
    if Path(model).is_dir():
        cure = f"`keepmtp init {shlex.quote(model)} --out NEW.yaml` writes one for a checkpoint"
    cure = did_you_mean(model, _names_near(model), otherwise=cure)
    raise RecipeError("MODEL", rule, got=repr(model), cure=cure)


def is_file_name(model: str) -> bool:
    """Whether MODEL names a recipe file."""
    return model.endswith((".yaml", ".yml"))


def is_recipe_name(model: str) -> bool:
    """Whether MODEL names a recipe, by a file or by one of keepmtp's names."""
    return is_file_name(model) or _lookup(model) is not None


def choose(
    file: RecipeFile,
    named: str,
    *,
    scheme: str | None = None,
    mtp: str | None = None,
    calibration: str | None = None,
    changes: Mapping[str, str] | None = None,
) -> tuple[Recipe, str]:
    """One recipe of a file with what a command line changes, and the text of the variant that it
    began with.

    Raises:
        RecipeError: no such variant, scheme, policy or block, or a block that nothing needs.
    """
    variant = named
    override = None
    block = None
    own = None
    if scheme is not None:
        own = _spelled(scheme, file.flat)
    if own is not None:
        variant = own
    elif scheme is not None:
        override = _spelled(scheme, SCHEMES)
        if override is None:
            rule = (
                f"must be a variant of {file.flat[named]['model']} ({', '.join(file.flat)}) or a "
            )
            rule += f"scheme ({', '.join(SCHEMES)})"
            words = [*file.flat, *SCHEMES]
            cure = meant_scheme(scheme, words, otherwise="See `keepmtp ls schemes`")
            raise RecipeError("--scheme", rule, got=repr(scheme), cure=cure)
    if calibration is not None:
        blocks = {**calibrations(), **file.calibrations}
        known = _spelled(calibration, blocks)
        if known is None:
            cure = "A recipe has your own text under `calibrations`: `keepmtp init`"
            cure = did_you_mean(calibration, blocks, otherwise=cure)
            raise RecipeError(
                "--calibration",
                f"must be one of {', '.join(blocks)}",
                got=repr(calibration),
                cure=cure,
            )
        block = read_as(Calibration, blocks[known], f"{CALIBRATIONS}.{known}")
    recipe = file.recipe(variant)
    text = file.recipe_text(variant)
    if override is None and mtp is None and block is None and not changes:
        return recipe, text
    # Where batches are needed and the recipe has none: those of another variant, else the usual.
    usual = calibrations()[DEFAULT_CALIBRATION]
    own_blocks = [flat["calibration"] for flat in file.flat.values() if flat.get("calibration")]
    usual = next(iter(own_blocks), usual)
    if mtp is not None:
        mtp = _meant(mtp, _POLICIES)
    meant = dict[str, str]()
    for key, word in (changes or {}).items():
        meant[key] = _meant(word, (*_POLICIES, *FORMATS))
    changed = recipe.with_choices(
        scheme=override,
        mtp=mtp,
        changes=meant,
        calibration=block,
        batches=Calibration.model_validate({**usual, "algorithm": "minmax"}),
    )
    if block is not None and changed.calibration is None:
        raise RecipeError(
            "--calibration",
            "must be left out where no scheme needs batches",
            got=f"{calibration} for {changed.name}",
            cure="Remove it",
        )
    return changed, text


def unknown_model(name: str) -> RecipeError:
    """The refusal of a MODEL that is nothing keepmtp knows."""
    rule = "must be a model's name, a recipe file, a folder with config.json, or a Hub id ORG/NAME"
    cure = did_you_mean(name, _names_near(name), otherwise="See `keepmtp ls`")
    if "://" in name:
        cure = "Name the address of a repository's page"
    return RecipeError("MODEL", rule, got=repr(name), cure=cure)


def _spelled(word: str, known: Iterable[str]) -> str | None:
    """The known name that `word` is a spelling of: exactly, or but for case and `-` for `_`."""
    names = list(known)
    if word in names:
        return word
    for name in names:
        if folded(name) == folded(word):
            return name
    return None


def _meant(word: str, known: Iterable[str]) -> str:
    """That name, or the word itself, which is refused where it is used."""
    name = _spelled(word, known)
    if name is None:
        return word
    return name


def _names_near(name: str) -> list[str]:
    """The variants of the model that a name begins with; else all models."""
    models = list(_shipped_files())
    for model in models:
        if name.startswith(f"{model}."):
            return [f"{model}.{variant}" for variant in _shipped_file(model).flat]
    return models


@cache
def _shipped_files() -> Mapping[str, Path]:
    return {path.stem: path for path in model_files()}


@cache
def _shipped_file(model: str) -> RecipeFile:
    path = _shipped_files()[model]
    raw = load_shipped(path)
    return RecipeFile(path=path, default=raw["default"], flat=flat_recipes(raw, path), text=None)


def _lookup(name: str) -> tuple[RecipeFile, str] | None:
    """The shipped file of a model's name, of a recipe's full name or of a Hub id, and the variant
    that is meant.
    """
    if name in _shipped_files():
        file = _shipped_file(name)
        return file, file.default
    for model in _shipped_files():
        if not name.startswith(f"{model}.") and "/" not in name:
            continue
        file = _shipped_file(model)
        variant = name.removeprefix(f"{model}.")
        first = file.flat[file.default]
        if variant in file.flat:
            return file, variant
        if first["source"] == name and first["revision"] != "local":
            return file, file.default
    return None
