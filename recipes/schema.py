"""A recipe: the whole of what a person decides about one quantized checkpoint, as a flat YAML file.

In: `recipes/models/<model>.<variant>.yaml` or any file of that form. Out: a frozen `Recipe`. Whatever changes numbers
has no default: a recipe that does not say what happens to a module group is refused, not filled in.

Easy to get wrong: `source` means "as the released checkpoint stores it", which for an FP8 release is FP8, not BF16.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from .errors import RecipeError
from .family import QUANTIZABLE_ROLES
from .listing import recipe_files
from .protocol import Evaluation, Gates
from .schemes import REWRITES, SCHEMES

KEEP_WORDS = ("source", "bf16")
"""`source`: stored as released. `bf16`: dequantized if the release is quantized, else as released."""
AUTO = "auto"
"""For the MTP block only: the cheapest of the candidates that keeps enough acceptance, measured during the run."""
_EXAMPLE = "glm-4.7.nvfp4-fp8"


def _known_decision(word: str, *, besides: tuple[str, ...] = ()) -> str:
    known = {each.lower(): each for each in (*KEEP_WORDS, *SCHEMES, *besides)}
    if word in known.values():
        return word
    nearest = known[difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.0)[0]]
    rule = f"must be one of {', '.join(known.values())}"
    raise RecipeError("", rule, got=repr(word), cure=f"Did you mean {nearest}?")


def _known_policy(word: str) -> str:
    return _known_decision(word, besides=(AUTO,))


def _known_role(word: str) -> str:
    if word in QUANTIZABLE_ROLES:
        return word
    nearest = difflib.get_close_matches(word, QUANTIZABLE_ROLES, n=1, cutoff=0.0)[0]
    groups = ", ".join(QUANTIZABLE_ROLES)
    rule = f"must be one of the module groups {groups}"
    raise RecipeError("", rule, got=repr(word), cure=f"Did you mean {nearest}?")


Decision = Annotated[str, AfterValidator(_known_decision)]
Group = Annotated[str, AfterValidator(_known_role)]
# The tags pick one branch by the value's type, so that an error is about what was written, not about the other branch.
_BY_TYPE = Discriminator(lambda value: "groups" if isinstance(value, dict) else "word")
_ByGroup = Annotated[dict[Group, Decision], Tag("groups")]
Candidate = Annotated[Annotated[Decision, Tag("word")] | _ByGroup, _BY_TYPE]
MtpPolicy = Annotated[Annotated[str, AfterValidator(_known_policy), Tag("word")] | _ByGroup, _BY_TYPE]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Override(_Frozen):
    """Exception to the group's scheme: modules by name on disk, or by `re:` and a regex of the whole name."""

    modules: str
    scheme: Decision


_Count = Annotated[int, Field(gt=0)]
_Text = Annotated[str, Field(min_length=1)]


class Calibration(_Frozen):
    """Everything a calibrated run needs to be repeated.

    Attributes:
        algorithm: minmax observes activations only; the others also rewrite the weights of the schemes in
            `schemes.REWRITES`. What they do not rewrite is rounded to nearest.
        dataset: Hub id, a local .jsonl, .json or .parquet file, or a folder with a copy of a Hub dataset.
        dataset_revision: Hub revision; "local" for files and folders.
        subset: the configuration of a dataset that has several; null for its default.
        split: of the dataset; "train" for a single file.
        column: texts, or conversations as lists of {role, content}, which go through the model's chat template.
        prompt_column: texts that users wrote, put directly before those of `column`: part of what is calibrated on, but
            acceptance counts only what a model writes. Null where a text is not an answer.
        samples: sequences to calibrate on.
        held_out: further sequences, from rows not calibrated on, to measure acceptance and perplexity on.
        sequence_length: tokens in each; rows are packed end to end, so none is padding.
        batch_size: sequences run at once, on each rank.
        seed: order in which rows are drawn.
        model_code: `checkpoint` lets Python that the checkpoint ships build the model and encode conversations.
        decorated_forward: what to do with a model whose forward is wrapped in no_grad or inference_mode.
    """

    algorithm: Literal["minmax", "gptq", "awq", "smoothquant"]
    dataset: _Text
    dataset_revision: _Text
    subset: _Text | None = None
    split: _Text
    column: _Text
    prompt_column: _Text | None = None
    samples: _Count
    held_out: _Count
    # The last position has no next token to judge: one token alone gives neither perplexity nor acceptance.
    sequence_length: Annotated[int, Field(gt=1)]
    batch_size: _Count
    seed: Annotated[int, Field(ge=0)]
    model_code: Literal["transformers", "checkpoint"] = "transformers"
    decorated_forward: Literal["refuse", "unwrap"] = "refuse"


class MtpAuto(_Frozen):
    """How `mtp: auto` chooses.

    Attributes:
        min_acceptance: part of the released model's acceptance to be kept on held-out text.
        candidates: policies in the order they are tried; the one of fewest bytes that keeps enough is taken.
    """

    min_acceptance: Annotated[float, Field(gt=0, le=1)]
    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _each_once(self) -> "MtpAuto":
        for index, candidate in enumerate(self.candidates):
            if candidate in self.candidates[:index]:
                raise RecipeError("", "candidates must differ", got=f"{candidate!r} twice", cure="Remove one")
        return self


def _experts_apart(rest: str, experts: str) -> dict[str, str]:
    return {group: experts if group == "experts" else rest for group in QUANTIZABLE_ROLES}


DEFAULT_AUTO = MtpAuto(
    min_acceptance=0.97,
    candidates=(
        "source",
        "bf16",
        "FP8_DYNAMIC",
        _experts_apart("bf16", "NVFP4"),
        _experts_apart("FP8_DYNAMIC", "NVFP4"),
        "W4A16",
        "NVFP4A16",
        "NVFP4",
    ),
)
"""What `--mtp auto` tries where the recipe does not say."""


def candidates_for(candidates: Iterable[str | Mapping[str, str]], groups: Collection[str]) -> tuple[Candidate, ...]:
    """The candidates that are different policies for an MTP block with these module groups, in order.

    A list serves every family: groups that the block lacks are left out of a mapping, and one that then says the same
    for all of them is that word.
    """
    found: list[Candidate] = []
    for candidate in candidates:
        if not isinstance(candidate, str):
            narrowed = {group: word for group, word in candidate.items() if group in groups}
            whole = set(narrowed.values()) if set(groups) <= set(narrowed) else set()
            candidate = whole.pop() if len(whole) == 1 else narrowed
        if candidate and candidate not in found:
            found.append(candidate)
    return tuple(found)


class Recipe(_Frozen):
    """One checkpoint to be made.

    Attributes:
        model: name people type, shared by a model's recipes.
        variant: what distinguishes this recipe, also the middle of its file name.
        default: whether the bare model name means this recipe.
        summary: one line for `keepmtp ls MODEL`.
        family: model_type of the family table.
        source: Hub id or local folder of the released checkpoint.
        revision: Hub revision; "local" for folders.
        backbone: module group -> scheme, `source` or `bf16`; every group that the model has must be named.
        mtp: the same for the MTP block: one word for all of it, a mapping by group, or `auto`.
        mtp_auto: how `auto` chooses; given with it and only then.
        overrides: exceptions, first match wins; each must match something.
        keep: names (or `re:` regexes) of tensors outside the family table to carry over as they are.
        calibration: how batches are chosen; null for data-free recipes.
        evaluation: how the result is scored; what it leaves out is as in `protocol.Evaluation`.
        gates: what the result must keep of its source; what it leaves out is as in `protocol.Gates`.
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
    mtp_auto: MtpAuto | None = None
    overrides: tuple[Override, ...] = ()
    keep: tuple[str, ...] = ()
    evaluation: Evaluation = Evaluation()
    gates: Gates = Gates()

    @property
    def name(self) -> str:
        """`<model>.<variant>`, the recipe file's stem."""
        return f"{self.model}.{self.variant}"

    def decisions(self) -> set[str]:
        """Every word this recipe uses for a scheme, or may use where `mtp: auto` has yet to choose."""
        policies = self.mtp_auto.candidates if self.mtp_auto else (self.mtp,)
        mtp = {word for policy in policies for word in (policy.values() if isinstance(policy, dict) else (policy,))}
        return {*self.backbone.values(), *mtp, *(override.scheme for override in self.overrides)}

    def calibrated_schemes(self) -> list[str]:
        """The schemes of this recipe whose tensors depend on data: by static scales, or by rewritten weights."""
        rewritten = REWRITES[self.calibration.algorithm] if self.calibration else frozenset()
        schemes = sorted(self.decisions() & SCHEMES.keys())
        return [name for name in schemes if name in rewritten or SCHEMES[name].needs_calibration]

    @model_validator(mode="after")
    def _auto_is_explained(self) -> "Recipe":
        if (self.mtp == AUTO) != (self.mtp_auto is not None):
            rule = "must be given where mtp is auto" if self.mtp == AUTO else "must be left out where mtp is not auto"
            got = "nothing" if self.mtp_auto is None else f"mtp: {self.mtp}"
            raise RecipeError("", f"mtp_auto {rule}", got=got, cure="It holds min_acceptance and candidates")
        return self

    @model_validator(mode="after")
    def _calibration_is_needed_and_given(self) -> "Recipe":
        words = sorted(self.decisions() & SCHEMES.keys())
        if self.calibration is None:
            if self.mtp == AUTO:
                cure = "Name a dataset to measure acceptance on, or choose a policy yourself"
                raise RecipeError("", "calibration must be given for mtp: auto", got="null", cure=cure)
            if needing := self.calibrated_schemes():
                cure = f"Name a dataset, or use {SCHEMES[needing[0]].data_free}, which needs none"
                raise RecipeError("", f"calibration must be given for {needing[0]}", got="null", cure=cure)
            return self
        algorithm = self.calibration.algorithm
        if algorithm != "minmax" and not REWRITES[algorithm] & set(words):
            rule = (
                f"calibration.algorithm {algorithm} rewrites weights of {', '.join(sorted(REWRITES[algorithm]))} only"
            )
            got = ", ".join(words) or "no scheme"
            raise RecipeError("", rule, got=got, cure="Use one of these schemes, or another algorithm")
        if not self._uses_batches():
            rule = "calibration must be null where no scheme needs it"
            raise RecipeError("", rule, got="a dataset", cure="Remove it")
        return self

    def resolved(self, mtp: str | dict[str, str]) -> "Recipe":
        """This recipe once `mtp: auto` has chosen.

        Not validated again: the calibration block may by then serve nothing but the choice.
        """
        return self.model_copy(update={"mtp": mtp, "mtp_auto": None})

    def with_choices(self, *, scheme: str | None, mtp: str | None) -> "Recipe":
        """This recipe with a command line's `--scheme` in every quantized group, and its `--mtp`.

        A scheme by its name is rounded to nearest: algorithms that rewrite weights are a recipe's choice. Calibration
        is dropped when nothing chosen needs it.
        """
        changed: dict[str, Any] = {}
        variant = self.variant
        if scheme is not None:
            variant = scheme.lower().replace("_", "-")
            changed["backbone"] = {group: scheme if word in SCHEMES else word for group, word in self.backbone.items()}
            if self.calibration:
                changed["calibration"] = self.calibration.model_copy(update={"algorithm": "minmax"})
        if mtp is not None:
            variant += f"-mtp-{mtp.lower().replace('_', '-')}"
            changed |= {"mtp": mtp, "mtp_auto": (self.mtp_auto or DEFAULT_AUTO) if mtp == AUTO else None}
        made = self.model_copy(update=changed | {"variant": variant})
        if not made._uses_batches():
            made = made.model_copy(update={"calibration": None})
        return _validated(made.model_dump(), f"--scheme {scheme} --mtp {mtp}")

    def _uses_batches(self) -> bool:
        return self.mtp == AUTO or bool(self.calibrated_schemes())


def read_recipe(path: Path) -> Recipe:
    """Parse and validate one recipe file.

    Raises:
        RecipeError: not YAML, an unknown key, a missing one, or a value outside its range; names file and key.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        got = " ".join(str(error).split())
        raise RecipeError(path, "a recipe is a YAML mapping", got=got, cure="Mend it") from error
    if not isinstance(raw, dict):
        raise RecipeError(path, "a recipe is a YAML mapping", got=type(raw).__name__, cure="See recipes/models/")
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
        raise RecipeError("MODEL", "a recipe file must exist", got=path, cure="See `keepmtp ls models`")
    recipe = read_recipe(path)
    override = None if scheme in (None, recipe.variant) else scheme
    if override is not None and override not in SCHEMES:
        variants = [file.name.split(".yaml")[0][len(recipe.model) + 1 :] for file in _variants(recipe.model)]
        raise RecipeError(
            "--scheme",
            f"must be a variant of {recipe.model} ({', '.join(variants)}) or a scheme ({', '.join(SCHEMES)})",
            got=repr(scheme),
            cure="See `keepmtp ls`",
        )
    if override is not None or mtp is not None:
        _refuse_batches_without_a_dataset(recipe, override, mtp)
        recipe = recipe.with_choices(scheme=override, mtp=mtp)
    return recipe, path.read_text()


def data_free_alternative(recipe: Recipe) -> str:
    """What to give as `--scheme` for the nearest recipe of the same model that needs no batches."""
    wanted = {
        group: SCHEMES[word].data_free or word if word in SCHEMES else word for group, word in recipe.backbone.items()
    }
    others = [other for path in _variants(recipe.model) if (other := read_recipe(path)).calibration is None]
    if others:
        return max(others, key=lambda other: len(other.backbone.items() & wanted.items())).variant
    return next((SCHEMES[name].data_free for name in recipe.calibrated_schemes() if SCHEMES[name].data_free), "W4A16")


def _refuse_batches_without_a_dataset(recipe: Recipe, scheme: str | None, mtp: str | None) -> None:
    """A choice that needs batches, on a recipe that names none: say which recipe does."""
    needing = [SCHEMES[word] for word in (scheme or "", mtp or "") if word in SCHEMES]
    needing = [each for each in needing if each.needs_calibration]
    if recipe.calibration is not None or (not needing and mtp != AUTO):
        return
    siblings = [other.name for path in _variants(recipe.model) if (other := read_recipe(path)).calibration is not None]
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
        "MODEL",
        f"must be a recipe file or one of {', '.join(models)}",
        got=repr(model),
        cure=f"Did you mean {nearest}?",
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
            parts = {
                "calibration": Calibration,
                "overrides": Override,
                "mtp_auto": MtpAuto,
                "evaluation": Evaluation,
                "gates": Gates,
            }
            known = (parts[parents[0]] if parents else Recipe).model_fields
            nearest = difflib.get_close_matches(last, known, n=1, cutoff=0.0)[0]
            rule, got, cure = f"{key} is not a key of a recipe", repr(first["input"]), f"Did you mean {nearest}?"
        elif first["type"] == "missing":
            rule, got = f"{key} must be given", "nothing"
            cure = "Nothing that changes numbers has a default"
        elif isinstance(fault := first.get("ctx", {}).get("error"), RecipeError):
            raise fault.at(f"{where}: {key}") from error
        else:
            rule, got, cure = f"{key}: {first['msg']}", repr(first["input"]), "Correct it"
        raise RecipeError(where, rule, got=got, cure=cure) from error
