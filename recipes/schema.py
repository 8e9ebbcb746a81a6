"""A recipe: the whole of what a person decides about one quantized checkpoint, as a flat YAML file.

In: `recipes/models/<model>.<variant>.yaml` or any file of that form. Out: a frozen `Recipe`. Whatever changes numbers
has no default: a recipe that does not say what happens to a module group is refused, not filled in.

Easy to get wrong: `source` means "as the released checkpoint stores it", which for an FP8 release is FP8, not BF16.
"""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from .errors import RecipeError, refuse
from .family import QUANTIZABLE_ROLES
from .schemes import SCHEMES

MODELS = Path(__file__).parent / "models"
KEEP_WORDS = ("source", "bf16")
"""`source`: stored as released. `bf16`: dequantized if the release is quantized, else as released."""


def _known_decision(word: str) -> str:
    if word in KEEP_WORDS or word in SCHEMES:
        return word
    known = {each.lower(): each for each in (*KEEP_WORDS, *SCHEMES)}
    nearest = known[difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.0)[0]]
    raise ValueError(f"must be one of {', '.join(known.values())}; got {word!r}. Did you mean {nearest}?")


def _known_role(word: str) -> str:
    if word in QUANTIZABLE_ROLES:
        return word
    nearest = difflib.get_close_matches(word, QUANTIZABLE_ROLES, n=1, cutoff=0.0)[0]
    groups = ", ".join(QUANTIZABLE_ROLES)
    raise ValueError(f"must be one of the module groups {groups}; got {word!r}. Did you mean {nearest}?")


Decision = Annotated[str, AfterValidator(_known_decision)]
Group = Annotated[str, AfterValidator(_known_role)]
# The tags pick one branch by the value's type, so that an error is about what was written, not about the other branch.
MtpPolicy = Annotated[
    Annotated[Decision, Tag("word")] | Annotated[dict[Group, Decision], Tag("groups")],
    Discriminator(lambda value: "groups" if isinstance(value, dict) else "word"),
]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Override(_Frozen):
    """Exception to the group's scheme: modules by name on disk, or by `re:` and a regex of the whole name."""

    modules: str
    scheme: Decision


class Calibration(_Frozen):
    """Everything a calibrated run needs to be repeated."""

    algorithm: Literal["minmax", "gptq", "awq", "smoothquant"]
    dataset: str
    dataset_revision: str
    split: str
    samples: Annotated[int, Field(gt=0)]
    sequence_length: Annotated[int, Field(gt=0)]
    seed: int


class Recipe(_Frozen):
    """One checkpoint to be made.

    Attributes:
        model: name people type, shared by a model's recipes.
        variant: what distinguishes this recipe, also the middle of its file name.
        default: whether the bare model name means this recipe.
        summary: one line for `keepmtp ls models`.
        family: model_type of the family table.
        source: Hub id or local folder of the released checkpoint.
        revision: Hub revision; "local" for folders.
        backbone: module group -> scheme, `source` or `bf16`; every group that the model has must be named.
        mtp: the same for the MTP block: one word for all of it, or a mapping by group.
        overrides: exceptions, first match wins; each must match something.
        keep: names (or `re:` regexes) of tensors outside the family table to carry over as they are.
        calibration: how batches are chosen; null for data-free recipes.
    """

    model: str
    variant: str
    default: bool
    summary: str
    family: str
    source: str
    revision: str
    backbone: dict[Group, Decision]
    mtp: MtpPolicy
    calibration: Calibration | None
    overrides: tuple[Override, ...] = ()
    keep: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`<model>.<variant>`, the recipe file's stem."""
        return f"{self.model}.{self.variant}"

    def decisions(self) -> set[str]:
        """Every word this recipe uses for a scheme."""
        mtp = self.mtp.values() if isinstance(self.mtp, dict) else (self.mtp,)
        return {*self.backbone.values(), *mtp, *(override.scheme for override in self.overrides)}

    def calibrated_schemes(self) -> list[str]:
        """The schemes of this recipe that need batches, or all quantized ones where an algorithm rewrites weights."""
        schemes = sorted(self.decisions() & SCHEMES.keys())
        if self.calibration and self.calibration.algorithm != "minmax":
            return schemes
        return [name for name in schemes if SCHEMES[name].needs_calibration]

    @model_validator(mode="after")
    def _calibration_is_needed_and_given(self) -> "Recipe":
        needing = [name for name in sorted(self.decisions() & SCHEMES.keys()) if SCHEMES[name].needs_calibration]
        if needing and self.calibration is None:
            alternative = SCHEMES[needing[0]].data_free
            raise ValueError(
                f"calibration must be given for {needing[0]}; got null. Name a dataset, or use {alternative}, "
                "which needs none"
            )
        if self.calibration and not needing and self.calibration.algorithm == "minmax":
            raise ValueError("calibration must be null where no scheme needs it; got a dataset. Remove it")
        return self

    def with_choices(self, *, scheme: str | None, mtp: str | None) -> "Recipe":
        """This recipe with a command line's `--scheme` in every quantized group, and its `--mtp`."""
        changed: dict[str, Any] = self.model_dump()
        if scheme is not None:
            changed["backbone"] = {
                group: scheme if word in SCHEMES else word for group, word in self.backbone.items()
            }
            changed["variant"] = scheme.lower().replace("_", "-")
            if scheme in SCHEMES and not SCHEMES[scheme].needs_calibration:
                changed["calibration"] = None
        if mtp is not None:
            changed["mtp"] = mtp
            changed["variant"] += f"-mtp-{mtp.lower().replace('_', '-')}"
        return _validated(changed, f"--scheme {scheme} --mtp {mtp}")


def recipe_files() -> list[Path]:
    """The recipes that ship with keepmtp."""
    return sorted(MODELS.glob("*.yaml"))


def read_recipe(path: Path) -> Recipe:
    """Parse and validate one recipe file.

    Raises:
        RecipeError: not YAML, an unknown key, a missing one, or a value outside its range; names file and key.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        got = " ".join(str(error).split())
        raise RecipeError(refuse(path, "a recipe is a YAML mapping", got, "Mend it")) from error
    if not isinstance(raw, dict):
        raise RecipeError(refuse(path, "a recipe is a YAML mapping", type(raw).__name__, "See recipes/models/"))
    return _validated(raw, path)


def find_recipe(model: str, *, scheme: str | None = None, mtp: str | None = None) -> tuple[Recipe, str]:
    """The recipe a command line names, and the text of its file.

    Args:
        model: a recipe file, a recipe's full name, or a model's name (then its default recipe).
        scheme: another variant of the model, or a scheme for every quantized group.
        mtp: policy for the MTP block instead of the recipe's.

    Raises:
        RecipeError: no such model, variant or scheme; the message lists what there is.
    """
    path = Path(model) if model.endswith((".yaml", ".yml")) else _shipped(model, scheme)
    if not path.is_file():
        raise RecipeError(refuse("MODEL", "a recipe file must exist", path, "See `keepmtp ls models`"))
    recipe = read_recipe(path)
    override = None if scheme in (None, recipe.variant) else scheme
    if override is not None and override not in SCHEMES:
        variants = [file.name.split(".yaml")[0][len(recipe.model) + 1 :] for file in _variants(recipe.model)]
        raise RecipeError(
            refuse("--scheme", f"must be a variant of {recipe.model} ({', '.join(variants)}) or a scheme "
                   f"({', '.join(SCHEMES)})", repr(scheme), "See `keepmtp ls`")
        )  # fmt: skip
    if override is not None or mtp is not None:
        recipe = recipe.with_choices(scheme=override, mtp=mtp)
    return recipe, path.read_text()


def data_free_alternative(recipe: Recipe) -> str:
    """What to give as `--scheme` for the nearest recipe of the same model that needs no batches."""
    wanted = {
        group: SCHEMES[word].data_free or word if word in SCHEMES else word for group, word in recipe.backbone.items()
    }
    others = [other for path in _variants(recipe.model) if not (other := read_recipe(path)).calibrated_schemes()]
    if others:
        return max(others, key=lambda other: len(other.backbone.items() & wanted.items())).variant
    return next((SCHEMES[name].data_free for name in recipe.calibrated_schemes() if SCHEMES[name].data_free), "W4A16")


def _variants(model: str) -> list[Path]:
    return [path for path in recipe_files() if read_recipe(path).model == model]


def _shipped(model: str, scheme: str | None) -> Path:
    recipes = {path: read_recipe(path) for path in recipe_files()}
    named = {recipe.name: path for path, recipe in recipes.items()}
    model_of = {name: recipes[path].model for name, path in named.items()}
    if (other := f"{model_of.get(model, model)}.{scheme}") in named:
        return named[other]
    if model in named:
        return named[model]
    for path, recipe in recipes.items():
        if model == recipe.model and recipe.default:
            return path
    models = sorted({recipe.model for recipe in recipes.values()})
    nearest = difflib.get_close_matches(model, models, n=1, cutoff=0.0)[0]
    raise RecipeError(
        refuse("MODEL", f"must be a recipe file or one of {', '.join(models)}", repr(model), f"Did you mean {nearest}?")
    )


def _validated(raw: dict[str, Any], where: object) -> Recipe:
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        # A misspelled key shows up as unknown and as missing; the first says more.
        first = min(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
        key = ".".join(str(part) for part in first["loc"] if part not in ("word", "groups", "[key]")) or "recipe"
        if first["type"] == "extra_forbidden":
            *parents, last = (str(part) for part in first["loc"])
            parts = {"calibration": Calibration, "overrides": Override}
            known = (parts[parents[0]] if parents else Recipe).model_fields
            nearest = difflib.get_close_matches(last, known, n=1, cutoff=0.0)[0]
            message = refuse(where, f"{key} is not a key of a recipe", repr(first["input"]), f"Did you mean {nearest}?")
        elif first["type"] == "missing":
            message = refuse(where, f"{key} must be given", "nothing", "Nothing that changes numbers has a default")
        elif first["type"] == "value_error":
            said = first["msg"].removeprefix("Value error, ")
            message = f"{where}: {key}: {said}" + ("" if said.endswith(("?", ".")) else ".")
        else:
            message = refuse(where, f"{key}: {first['msg']}", repr(first["input"]), "Correct it")
        raise RecipeError(message) from error
