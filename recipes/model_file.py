"""A model file: all recipes of one model, one line for each variant. Which of them ship with
keepmtp.

In: the YAML mapping of `recipes/models/<model>.yaml`, or of a file of that form. Out: the flat
mapping of each variant, as `schema.Recipe` reads it, and its text. For example:

    groups: [attention, dense_mlp, shared_experts, experts]
    default: nvfp4a16-fp8
    variants:
      nvfp4-fp8: {experts: NVFP4, rest: FP8_DYNAMIC, mtp: bf16, calibration: ultrachat-256x2048,
      summary: ...}

`groups` names the module groups that the model has. `rest` gives one word to all groups that the
variant does not name. `calibration` is the name of a block in `recipes/calibrations.yaml`, a block,
or null. Each of `BLOCKS` may be a key of the file, for all variants, or of one variant.

Easy to get wrong: a block in a variant replaces the file's block of the same name; the two are not
merged. The file's `mtp_auto` is only for the variants with `mtp: auto`; where there is none, these
get what `--mtp auto` tries.
`rest: auto` leaves the backbone to a search, and `mtp: auto` then its block too: the file's
`budget` and `backbone_auto` are only for the variants that search.
`mtp_tuned` is only for those with `mtp: tuned`, and must be there.
`keepmtp ls` must answer at once, so nothing here loads pydantic: the values are checked by
`find.read_file` and `schema.validated` before a recipe is used.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import RecipeError, did_you_mean
from .family import QUANTIZABLE_ROLES
from .yaml_file import load_shipped

BLOCKS = (
    "mtp_auto",
    "mtp_tuned",
    "overrides",
    "keep",
    "mtp_source",
    "format",
    "kv_cache",
    "search",
    "evaluation",
    "gates",
)
_OF_A_SEARCH = ("budget", "backbone_auto")
_OF_THE_MODEL = ("model", "family", "source", "revision", "groups", "default", "variants")
_OF_A_VARIANT = ("summary", "mtp", "calibration")
_AUTO, _TUNED, _LOCAL = "auto", "tuned", "local"
_HERE = Path(__file__).parent
_MODELS = _HERE / "models"
# the folder of the small models that keepmtp ships, and the start of their names in recipes
_SHIPPED = "models"
_HOME = _HERE.parent  # the checkout, or the installed package


def _experts_apart(rest: str, experts: str) -> dict[str, str]:
    return {group: experts if group == "experts" else rest for group in QUANTIZABLE_ROLES}


USUAL_AUTO: Mapping[str, Any] = {
    "min_acceptance": 0.97,
    "candidates": [
        "source",
        "bf16",
        "FP8_DYNAMIC",
        _experts_apart("bf16", "NVFP4"),
        _experts_apart("FP8_DYNAMIC", "NVFP4"),
        "W4A16",
        "NVFP4A16",
        "NVFP4",
    ],
}
"""What `mtp: auto` tries where a file has no `mtp_auto`; listings read it without pydantic."""


def model_files() -> list[Path]:
    """The model files that ship with keepmtp; the stem is the model's name."""
    return sorted(_MODELS.glob("*.yaml"))


def shipped_path(name: str) -> Path | None:
    """The folder of a model that ships with keepmtp; None if none has this name."""
    folder = _HOME / _SHIPPED / name
    return folder if (folder / "config.json").is_file() and Path(name).name == name else None


def find_path(name: str | Path) -> Path | None:
    """The file or folder in the current folder, else among the shipped models; None if it is in
    neither.
    """
    path = Path(name)
    places = (path, _HOME / path) if path.parts[:1] == (_SHIPPED,) else (path,)
    return next((place for place in places if place.exists()), None)


def is_model_file(raw: Mapping[str, Any]) -> bool:
    """Whether a YAML mapping is a model file; a flat recipe is not."""
    return "variants" in raw


@cache
def calibrations() -> Mapping[str, Mapping[str, Any]]:
    """The named calibration blocks."""
    return load_shipped(_HERE / "calibrations.yaml")


def flat_recipes(raw: Mapping[str, Any], where: object) -> dict[str, dict[str, Any]]:
    """The flat recipe of each variant, by the variant's name.

    Args:
        raw: the mapping of a model file.
        where: the file, for refusals.

    Raises:
        RecipeError: an unknown key, group, variant or calibration, or a missing one. The values are
            checked by `schema.validated`.
    """
    _refuse_unknown(where, raw, (*_OF_THE_MODEL, *BLOCKS, *_OF_A_SEARCH), "a model file")
    _refuse_missing(where, raw, _OF_THE_MODEL)
    groups, variants = _groups(raw["groups"], where), raw["variants"]
    if not isinstance(variants, Mapping) or not variants:
        raise RecipeError(
            f"{where}: variants",
            "must be a mapping of names",
            got=repr(variants),
            cure="Name one variant or more",
        )
    if raw["default"] not in list(variants):
        raise _unknown(f"{where}: default", "must be a variant", raw["default"], variants)
    flat = {name: _flat(raw, name, groups, f"{where}: variants.{name}") for name in variants}
    for word in (_AUTO, _TUNED):
        if (key := f"mtp_{word}") in raw and not any(key in recipe for recipe in flat.values()):
            rule = f"{key} must be left out where mtp is not {word}"
            raise RecipeError(where, rule, got=f"no variant with mtp: {word}", cure="Remove it")
    return flat


def flat_text(recipe: Mapping[str, Any]) -> str:
    """A flat recipe as YAML: every key on its own line, mappings inside a list on one line."""
    return yaml.dump(
        _mappings_of_lists_inline(recipe), Dumper=_Dumper, sort_keys=False, width=10_000
    )


def _flat(raw: Mapping[str, Any], name: str, groups: Collection[str], where: str) -> dict[str, Any]:
    variant = raw["variants"][name]
    if not isinstance(variant, Mapping):
        raise RecipeError(
            where,
            "a variant is a mapping",
            got=repr(variant),
            cure="Write {group: scheme, mtp: ...}",
        )
    _refuse_unknown(
        where, variant, (*_OF_A_VARIANT, *BLOCKS, *_OF_A_SEARCH, *groups, "rest"), "a variant"
    )
    _refuse_missing(where, variant, _OF_A_VARIANT)
    flat = {
        "model": raw["model"],
        "variant": name,
        "default": name == raw["default"],
        "summary": variant["summary"],
        "family": raw["family"],
        "source": raw["source"],
        "revision": raw["revision"],
        "backbone": _backbone(variant, groups, where),
        "mtp": variant["mtp"],
    }
    blocks = _blocks(raw) | _blocks(variant)
    auto = blocks.pop("mtp_auto", None)
    is_searched = _AUTO in flat["backbone"].values()
    searching = {key: raw[key] for key in _OF_A_SEARCH if key in raw and is_searched}
    searching |= {key: variant[key] for key in _OF_A_SEARCH if key in variant}
    if variant["mtp"] == _AUTO and not is_searched:
        flat["mtp_auto"] = auto or USUAL_AUTO
    elif "mtp_auto" in variant:
        flat["mtp_auto"] = auto
    tuned = blocks.pop("mtp_tuned", None)
    if tuned is not None and (variant["mtp"] == _TUNED or "mtp_tuned" in variant):
        flat["mtp_tuned"] = tuned
    return flat | searching | {"calibration": _calibration(variant["calibration"], where)} | blocks


def _blocks(holder: Mapping[str, Any]) -> dict[str, Any]:
    return {key: holder[key] for key in BLOCKS if key in holder}


def _groups(groups: object, where: object) -> list[str]:
    if not isinstance(groups, list):
        cure = f"Name the model's groups among {', '.join(QUANTIZABLE_ROLES)}"
        raise RecipeError(f"{where}: groups", "must be a list", got=repr(groups), cure=cure)
    for group in groups:
        if group not in QUANTIZABLE_ROLES:
            rule = f"must be one of the module groups {', '.join(QUANTIZABLE_ROLES)}"
            raise _unknown(f"{where}: groups", rule, group, QUANTIZABLE_ROLES)
    return groups


def _backbone(variant: Mapping[str, Any], groups: Collection[str], where: str) -> dict[str, Any]:
    unnamed = [group for group in groups if group not in variant]
    if unnamed and "rest" not in variant:
        rule = f"must say what happens to {unnamed[0]}"
        raise RecipeError(where, rule, got="nothing", cure="Give it a word, or give rest")
    if "rest" in variant and not unnamed:
        rule = "rest must be left out where every group is named"
        raise RecipeError(where, rule, got=f"rest: {variant['rest']}", cure="Remove it")
    return {group: variant[group] if group in variant else variant["rest"] for group in groups}


def _calibration(named: object, where: str) -> object:
    if not isinstance(named, str):
        return named
    if named not in calibrations():
        rule = f"must be null, a block, or one of {', '.join(calibrations())}"
        raise _unknown(f"{where}: calibration", rule, named, calibrations())
    return calibrations()[named]


def _refuse_unknown(
    where: object, raw: Mapping[str, Any], known: Collection[str], what: str
) -> None:
    for key, value in raw.items():
        if key not in known:
            from .schema import cure_of_key  # which imports this file

            cure = cure_of_key(key, known)
            raise RecipeError(where, f"{key} is not a key of {what}", got=repr(value), cure=cure)


def _refuse_missing(where: object, raw: Mapping[str, Any], needed: Collection[str]) -> None:
    for key in needed:
        if key not in raw:
            cure = "Add it: nothing that changes numbers has a default"
            raise RecipeError(where, f"{key} must be given", got="nothing", cure=cure)


def _unknown(where: str, rule: str, got: object, known: Collection[str]) -> RecipeError:
    return RecipeError(
        where, rule, got=repr(got), cure=did_you_mean(got, known, otherwise="Name one of them")
    )


def summary_of(
    backbone: Mapping[str, str], mtp: str | Mapping[str, str], *, is_calibrated: bool
) -> str:
    """The summary of a recipe with these words; groups that have the same word stand together."""
    block = mtp if isinstance(mtp, str) else _said(mtp)
    parts = [*filter(None, [_said(backbone)]), f"MTP block {block}"]
    return ", ".join(parts) + ("" if is_calibrated else "; no calibration")


def _said(words: Mapping[str, str]) -> str:
    groups: dict[str, list[str]] = {}
    for group, word in words.items():
        groups.setdefault(word, []).append(group)
    return ", ".join(f"{word} {'/'.join(names)}" for word, names in groups.items())


# --- YAML
# --------------------------------------------------------------------------------------------------


class _Inline(dict[str, Any]):
    """A mapping that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """Indents the items of a list, and writes no anchors."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _on_one_line(dumper: yaml.SafeDumper, mapping: _Inline) -> yaml.Node:
    return dumper.represent_mapping("tag:yaml.org,2002:map", mapping, flow_style=True)


_Dumper.add_representer(_Inline, _on_one_line)


def _mappings_of_lists_inline(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _mappings_of_lists_inline(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_Inline(each) if isinstance(each, Mapping) else each for each in value]
    return value


# --- listings
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What a listing says of one recipe. The keys are those of `schema.Recipe`."""

    model: str
    variant: str
    is_default: bool
    summary: str
    family: str
    source: str
    needs_batches: bool
    knobs: str = ""
    """How it searches scales, and what it says to its algorithm: `gptq: actorder null, block_size
    64`.
    """

    @property
    def name(self) -> str:
        """`<model>.<variant>`, the recipe's full name."""
        return f"{self.model}.{self.variant}"


def listed() -> list[Listed]:
    """Every shipped recipe that can be run, by model, the default variant first."""
    flat = [
        recipe
        for path in model_files()
        for recipe in flat_recipes(load_shipped(path), path).values()
    ]
    rows = [
        Listed(
            model=recipe["model"],
            variant=recipe["variant"],
            is_default=recipe["default"],
            summary=recipe["summary"],
            family=recipe["family"],
            source=recipe["source"],
            needs_batches=recipe["calibration"] is not None,
            knobs=_knobs(recipe),
        )
        for recipe in flat
        if _is_here(recipe)
    ]
    return sorted(rows, key=lambda row: (row.model, not row.is_default, row.variant))


def _knobs(recipe: Mapping[str, Any]) -> str:
    """How a recipe searches scales, and the knobs of its algorithm, which are under the algorithm's
    name.
    """
    calibration = recipe["calibration"] or {}
    said = [f"search: {recipe['search']}"] if recipe.get("search") else []
    algorithm = calibration.get("algorithm")
    if calibration.get(algorithm):
        said.append(f"{algorithm}: {in_words(calibration[algorithm])}")
    return "; ".join(said)


def in_words(knobs: Mapping[str, Any]) -> str:
    """Knobs as they are in YAML: "actorder null, duo_scaling true"."""
    words = {None: "null", True: "true", False: "false"}
    said = {
        key: words[value] if value is None or isinstance(value, bool) else value
        for key, value in knobs.items()
    }
    return ", ".join(f"{key} {value}" for key, value in said.items())


def _is_here(recipe: Mapping[str, Any]) -> bool:
    """Whether the files that a recipe names are on this machine; what is on the Hub is not asked
    for.
    """
    calibration = recipe["calibration"] or {}
    if recipe["revision"] == _LOCAL and find_path(recipe["source"]) is None:
        return False
    return (
        calibration.get("dataset_revision") != _LOCAL
        or find_path(calibration["dataset"]) is not None
    )
