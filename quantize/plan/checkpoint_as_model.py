"""MODEL where it is no recipe but a checkpoint: a folder, a Hub id, or the address of its page.

In: the word on the command line. Out: the opened checkpoint, and the variants of its family as a
recipe file.

Easy to get wrong: `keepmtp plan glm-4.7` means the recipe also where the current folder has a
folder of this name. A recipe's name comes first, and `./glm-4.7` names the folder.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ...checkpoints.dialects.choose import UNQUANTIZED
from ...checkpoints.dialects.fp8 import Fp8
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.donors import with_donors
from ...checkpoints.mtp_source import with_mtp_of
from ...checkpoints.source import Source, open_source, page_of, view_of
from ...recipes.conventions import FORMATS
from ...recipes.errors import RecipeError, did_you_mean
from ...recipes.family import TABLE_ROLES
from ...recipes.family_wide import model_mapping
from ...recipes.find import RecipeFile, choose, is_recipe_name, unknown_model
from ...recipes.frozen import Json, frozen
from ...recipes.model_file import find_path, flat_recipes
from ...recipes.schema import Recipe
from ...recipes.tensor_parallel import sizes_of
from .choices import found_text
from .decide import served_view
from .own_code import refuse_no_draft
from .plan import Plan, make_plan

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)

_FROM = "from:"
_OF_THE_MODEL = ("model", "family", "source", "revision", "mtp_source", "requantize")
_NO_GROUPS = ("kv_cache", "format")  # no donor has their tensors
_PATH_STARTS = ("/", "./", "../", "~")
_CACHED = re.compile(r"models--[^/]+--([^/]+)/snapshots/[0-9a-f]{40}$")


@frozen
class Fit:
    """A variant that can be made of a checkpoint."""

    # The name of the variant.
    variant: str
    # The name of its calibration block, "its own"; "" without data.
    data: str
    # Bytes of the source's tensors.
    num_bytes_before: int
    # Bytes of the output's tensors.
    num_bytes: int
    # Tensor-parallel sizes at which vLLM loads it.
    tps: tuple[int, ...]


class NoSchemeError(RecipeError):
    """MODEL is a checkpoint, and nothing chooses among the variants that fit it; the cure names
    them.
    """

    source: Source
    fits: tuple[Fit, ...] = ()


@frozen
class ModelWord:
    """What MODEL means."""

    # A recipe's name or file, or a checkpoint's folder or Hub id.
    name: str
    # Whether it is a recipe.
    is_recipe: bool
    # The revision that the address of a page names; else None.
    revision: str | None = None


def model_word(model: str) -> ModelWord:
    """What MODEL on a command line means.

    Raises:
        RecipeError: neither a recipe nor a checkpoint.
    """
    page = page_of(model)
    if page is not None:
        name, revision = page
        return ModelWord(name=name, is_recipe=is_recipe_name(name), revision=revision)
    if is_recipe_name(model):
        return ModelWord(name=model, is_recipe=True)
    if model.startswith(_PATH_STARTS) or (model and find_path(model) is not None):
        return ModelWord(name=str(Path(model).expanduser()), is_recipe=False)
    if _HUB_ID.fullmatch(model):
        return ModelWord(name=model, is_recipe=False)
    raise unknown_model(model)


def recipe_of_checkpoint(
    word: ModelWord,
    *,
    scheme: str | None = None,
    mtp_source: str | None = None,
    requantize: bool = False,
    changes: Sequence[str] | None = None,
    mtp: str | None = None,
    calibration: str | None = None,
) -> tuple[Recipe, str, Source]:
    """The recipe that --scheme or --set chooses for a checkpoint, its text, and the opened
    checkpoint.

    Raises:
        RecipeError: no family, no --scheme and no --set, or one that there is not.
        CheckpointError: see `open_source`.
    """
    source = opened(word, mtp_source)
    raw = family_mapping(source)
    if requantize:
        raw["requantize"] = True
    if changes:
        recipe, source = changed_recipe(
            source, raw, changes, scheme=scheme, mtp=mtp, calibration=calibration
        )
        return recipe, found_text(recipe), source
    if scheme is None:
        where = f"{source.where} ({raw['family']})"
        rule = "--scheme must choose a variant where MODEL is a checkpoint"
        fits = tuple(fitting(source, raw))
        words = list[str]()
        for fit in fits:
            word_of_fit = fit.variant
            if fit.data:
                word_of_fit += " (calibrated)"
            words.append(word_of_fit)
        if not words:
            refuse_unfit(source, raw, raw["default"])  # which says why
            raise RecipeError(where, rule, got="none", cure="None fits: see `keepmtp ls schemes`")
        cure = f"These fit: {', '.join(words)}"
        if served_view(source, view_of(source)) is not None:
            cure += ". Or --set GROUP=VALUE changes one group, and all else stays"
        error = NoSchemeError(where, rule, got="none", cure=cure)
        error.source = source
        error.fits = fits
        raise error
    raw["default"] = next((fit.variant for fit in fitting(source, raw)), raw["default"])
    file = _recipe_file(source, raw)
    recipe, text = choose(file, file.default, scheme=scheme, mtp=mtp, calibration=calibration)
    return recipe, text, source


def changed_recipe(
    source: Source,
    raw: Json,
    changes: Sequence[str],
    *,
    scheme: str | None,
    mtp: str | None,
    calibration: str | None,
) -> tuple[Recipe, Source]:
    """The recipe with which a checkpoint stays as it is, but for the groups that --set names; and
    the checkpoint, with those that are from donors.

    Raises:
        RecipeError: a group that the checkpoint lacks, or is named twice.
    """
    words = dict[str, str]()
    if mtp is not None:
        words["mtp"] = mtp
    places = dict[str, str]()
    known = (*raw["groups"], *TABLE_ROLES, "mtp", *_NO_GROUPS)
    for change in changes:
        group, _, word = change.partition("=")
        rule = f"must be GROUP=VALUE, with a group of {source.where}: {', '.join(known)}"
        if group not in known or not word.removeprefix(_FROM):
            cure = f"Write {group}=VALUE, or {group}=from:DONOR"
            if group not in known:
                cure = did_you_mean(group, known, otherwise="Name one of them", cutoff=0.6)
            raise RecipeError("--set", rule, got=change, cure=cure)
        of_kind = words
        if word.startswith(_FROM):
            of_kind = places
        if of_kind is places and group in _NO_GROUPS:
            rule = f"{group} is a value, and no tensors that a donor has"
            raise RecipeError("--set", rule, got=change, cure=f"Write {group}=VALUE")
        if group in of_kind:
            raise RecipeError("--set", "names a group once", got=change, cure="Leave one out")
        of_kind[group] = word.removeprefix(_FROM)
    if scheme is not None:
        cure = "Name each group by --set, or leave --set out"
        raise RecipeError("--scheme", "is for the whole checkpoint", got="also --set", cure=cure)
    dialect = RuntimeView.of(source).dialect
    if not places and words == {"format": dialect.name}:
        rule = "format must be another one than the checkpoint's"
        got = f"{words['format']}, which it is in already"
        raise RecipeError("--set", rule, got=got, cure="There is nothing to do")
    source = with_donors(source, {group: open_source(place) for group, place in places.items()})
    donors = {}
    variant = "source"
    for group in places:
        donor = source.donors[group]
        donors[group] = {"source": donor.where, "revision": donor.revision}
        variant += f"-{group}-from-{model_name(donor.where)}"
    flat = {
        **{key: raw[key] for key in _OF_THE_MODEL if key in raw},
        "variant": variant[:100],
        "default": True,
        "summary": "",
        "backbone": dict.fromkeys(raw["groups"], "source"),
        "mtp": "source",
        "calibration": None,
        "from": donors or None,
    }
    flat["keeps_config"] = dialect.name != UNQUANTIZED.name
    if dialect.name in FORMATS:
        flat["format"] = dialect.name
    elif isinstance(dialect, Fp8):
        flat["format"] = "fp8"
    file = RecipeFile(path=Path(source.where), default="source", flat={"source": flat}, text=None)
    mtp = words.pop("mtp", None)
    recipe, _ = choose(file, "source", mtp=mtp, changes=words, calibration=calibration)
    return recipe, source


def opened(word: ModelWord, mtp_source: str | None) -> Source:
    """The checkpoint that MODEL names, with the MTP block of another place where one is named.

    Raises:
        CheckpointError: see `open_source` and `with_mtp_of`.
    """
    source = open_source(word.name, revision=word.revision or "main")
    if mtp_source is None:
        return source
    return with_mtp_of(source, open_source(mtp_source))


def family_mapping(source: Source) -> Json:
    """The model file of a checkpoint; its source is the commit that was read.

    Raises:
        RecipeError: config.json names no family of keepmtp.
    """
    raw = model_mapping(
        view_of(source),
        model=model_name(source.where),
        source=source.where,
        revision=source.revision,
    )
    other = source.donors.get("mtp")
    if other is not None:
        raw["mtp_source"] = {"source": other.where, "revision": other.revision}
    return raw


def fitting(source: Source, raw: Json) -> Iterator[Fit]:
    """The variants of a model file that can be made of this checkpoint."""
    for variant in raw["variants"]:
        try:
            plan = refuse_unfit(source, raw, variant)
        except RecipeError:
            continue
        data = raw["variants"][variant]["calibration"]
        if data is None:
            data = ""
        elif not isinstance(data, str):
            data = "its own"
        yield Fit(
            variant=variant,
            data=data,
            num_bytes_before=plan.num_bytes_before,
            num_bytes=plan.num_bytes_after,
            tps=sizes_of(plan.view.text_config, plan.cuts),
        )


def refuse_unfit(source: Source, raw: Json, variant: str) -> Plan:
    """The plan of a variant of a model file, if it can be made of this checkpoint.

    Raises:
        RecipeError, CheckpointError: see `make_plan` and `refuse_no_draft`.
    """
    recipe = _recipe_file(source, raw).recipe(variant)
    plan = make_plan(recipe.before_measuring, source)
    refuse_no_draft(plan)
    return plan


def _recipe_file(source: Source, raw: Json) -> RecipeFile:
    return RecipeFile(
        path=Path(source.where),
        default=raw["default"],
        flat=flat_recipes(raw, source.where),
        text=None,
    )


def model_name(where: str) -> str:
    """The name that outputs of a checkpoint get: its folder's, or the second part of its Hub id."""
    folder = Path(where)
    if folder.is_dir():
        folder = folder.resolve()
    name = folder.name
    cached = _CACHED.search(folder.as_posix())
    if cached is not None:
        name = cached[1]
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.") or "model"
