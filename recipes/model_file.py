"""A model file: all recipes of one model, one line for each variant. Which of them ship with
keepmtp.

In: the YAML mapping of `recipes/models/<model>.yaml`, or of a file of that form. Out: the flat
mapping of each variant, as `schema.Recipe` reads it, and its text. For example:

    groups: [attention, dense_mlp, shared_experts, experts]
    default: nvfp4a16-fp8
    usual: {rest: FP8_DYNAMIC, mtp: bf16}
    variants:
      nvfp4-fp8: {experts: NVFP4, calibration: mix-256x2048}
      nvfp4a16-fp8:

`groups` names the module groups that the model has. `usual` has the words of all variants, which a
variant's own replace; one without words has those of its name in `recipes/variants.yaml`. `rest`
gives one word to all groups that the variant does not name; `backbone: auto` is `rest: auto`, as in
a flat recipe. `calibration` is the name of a block in the file's own `calibrations` or in
`recipes/calibrations.yaml`, a block, or null. `summary` is made of the variant's words where it is
left out. Each of `BLOCKS` may be a key of the file, for all variants, or of one variant.

Easy to get wrong: a block in a variant replaces the file's block of the same name; the two are not
merged. The file's `mtp_auto` is only for the variants with `mtp: auto`; where there is none, these
get what `--mtp auto` tries.
`backbone: auto` leaves the backbone to a search, and `mtp: auto` then its block too: the file's
`budget` and `backbone_auto` are only for the variants that search.
`mtp_tuned` is only for those with `mtp: tuned`, and must be there.
`keepmtp ls` must answer at once, so nothing here loads pydantic: the values are checked by
`find.read_file` and `schema.validated` before a recipe is used.
"""

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from .errors import RecipeError, cure_of_key, did_you_mean
from .family import QUANTIZABLE_ROLES, TABLE_ROLES
from .frozen import Json, Raw, without
from .yaml_file import load_shipped

BLOCKS = (
    "mtp_auto",
    "mtp_tuned",
    "overrides",
    "keep",
    "mtp_source",
    "from",
    "format",
    "keeps_config",
    "kv_cache",
    "requantize",
    "evaluation",
    "gates",
)
CALIBRATIONS = "calibrations"
"""The key of a file's own named blocks."""
_OF_A_SEARCH = ("budget", "backbone_auto")
_OF_A_WORD = ("mtp_auto", "mtp_tuned", *_OF_A_SEARCH)
_OF_THE_MODEL = ("model", "family", "source", "revision", "groups", "default", "variants")
_OF_A_VARIANT = ("mtp", "calibration")
_USUAL = "usual"
_KINDS = (
    (_USUAL, dict, "a mapping of words"),
    (CALIBRATIONS, dict, "a mapping of names"),
    ("groups", list, "a list"),
    ("variants", dict, "a mapping of names"),
)
_HERE = Path(__file__).parent
_MODELS = _HERE / "models"
# the folder of the small models that keepmtp ships, and the start of their names in recipes
_SHIPPED = "models"
_HOME = _HERE.parent  # the checkout, or the installed package


USUAL_AUTO: Raw = {
    "min_acceptance": 0.97,
    "candidates": [
        "source",
        "bf16",
        "FP8_DYNAMIC",
        {**dict.fromkeys(QUANTIZABLE_ROLES, "bf16"), "experts": "NVFP4"},
        {**dict.fromkeys(QUANTIZABLE_ROLES, "FP8_DYNAMIC"), "experts": "NVFP4"},
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
    if (folder / "config.json").is_file() and Path(name).name == name:
        return folder
    return None


def find_path(name: str | Path) -> Path | None:
    """The file or folder in the current folder, else among the shipped models; None if neither."""
    path = Path(name)
    if path.exists():
        return path
    shipped = _HOME / path
    if path.parts[:1] == (_SHIPPED,) and shipped.exists():
        return shipped
    return None


@cache
def calibrations() -> Mapping[str, Raw]:
    """The named calibration blocks."""
    return load_shipped(_HERE / "calibrations.yaml")


@cache
def _usual_variants() -> Mapping[str, Raw]:
    """What a variant says that has a name alone."""
    return load_shipped(_HERE / "variants.yaml")


def flat_recipes(raw: Raw, where: object) -> dict[str, Json]:
    """The flat recipe of each variant, by the variant's name.

    Args:
        raw: the mapping of a model file.
        where: the file, for refusals.

    Raises:
        RecipeError: an unknown key, group, variant or calibration, or a missing one. The values are
            checked by `schema.validated`.
    """
    for key in ("backbone", "summary", *_OF_A_VARIANT):
        if key in raw:
            raise RecipeError(
                where,
                f"{key} is a key of a variant",
                got=f"{key}: {raw[key]} for all of them",
                cure="Move it into one of the variants",
            )
    allowed = (*BLOCKS, *_OF_A_SEARCH, CALIBRATIONS, _USUAL)
    _refuse_keys(where, raw, _OF_THE_MODEL, allowed, "a model file")
    for key, kind, words in _KINDS:
        if not isinstance(raw.get(key, kind()), kind):
            raise RecipeError(
                f"{where}: {key}", f"must be {words}", got=repr(raw[key]), cure="Write it so"
            )
    variants = raw["variants"]
    for group in raw["groups"]:
        rule = f"must be one of the module groups {', '.join(QUANTIZABLE_ROLES)}"
        _refuse_unknown(f"{where}: groups", rule, group, QUANTIZABLE_ROLES)
    _refuse_unknown(f"{where}: default", "must be a variant", raw["default"], variants)
    flat = {name: _flat(raw, name, f"{where}: variants.{name}") for name in variants}
    used = set[str]().union(*flat.values())
    for word in ("auto", "tuned"):
        key = f"mtp_{word}"
        if key in raw and key not in used:
            raise RecipeError(
                where,
                f"{key} must be left out where mtp is not {word}",
                got=f"no variant with mtp: {word}",
                cure="Remove it",
            )
    return flat


def flat_text(recipe: Raw) -> str:
    """A flat recipe as YAML: a line for each key, and for each mapping inside a list."""
    return yaml.dump(recipe, Dumper=_Dumper, sort_keys=False, width=10_000)


class _Dumper(yaml.SafeDumper):
    """Indents the items of a list, with mappings on one line, and writes no anchors."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        node = super().represent_sequence(tag, sequence, flow_style)
        for item in node.value:
            if isinstance(item, yaml.MappingNode):
                item.flow_style = True
        return node


def _flat(raw: Raw, name: str, where: str) -> Json:
    variant = raw["variants"][name]
    groups = raw["groups"]
    if variant is None:
        variant = _usual_variants().get(name)
    if not isinstance(variant, Mapping):
        raise RecipeError(
            where,
            "a variant is a mapping",
            got=repr(variant),
            cure="Write {group: scheme, mtp: ...}",
        )
    if "backbone" in variant:  # as a flat recipe has it: one word for every group, or a mapping
        named = variant["backbone"]
        if not isinstance(named, Mapping):
            named = {"rest": named}
        variant = {**named, **without(variant, "backbone")}
    variant = {**raw.get(_USUAL, {}), **variant}
    allowed = ("summary", *BLOCKS, *_OF_A_SEARCH, *groups, *TABLE_ROLES, "rest")
    _refuse_keys(where, variant, _OF_A_VARIANT, allowed, "a variant")
    calibration = variant["calibration"]
    if isinstance(calibration, str):
        known = {**calibrations(), **raw.get(CALIBRATIONS, {})}
        rule = f"must be null, a block, or one of {', '.join(known)}"
        _refuse_unknown(f"{where}: calibration", rule, calibration, known)
        calibration = known[calibration]
    # A group without a word is refused where the recipe meets its model.
    words: Json = {**dict.fromkeys(groups, variant.get("rest")), **variant}
    backbone = {group: words[group] for group in groups if words[group] is not None}
    backbone |= {group: variant[group] for group in TABLE_ROLES if group in variant}
    summary = variant.get("summary")
    if summary is None:
        summary = summary_of(backbone, variant["mtp"], is_calibrated=calibration is not None)
        if "kv_cache" in variant:
            summary += f", {variant['kv_cache']} KV cache"
        algorithm = "minmax"
        if isinstance(calibration, Mapping):
            algorithm = calibration.get("algorithm")
        if algorithm != "minmax":
            summary += f", by {algorithm}"
    flat = {
        "model": raw["model"],
        "variant": name,
        "default": name == raw["default"],
        "summary": summary,
        "family": raw["family"],
        "source": raw["source"],
        "revision": raw["revision"],
        "backbone": backbone,
        "mtp": variant["mtp"],
    }
    is_searched = "auto" in backbone.values()
    # Which blocks of the file are for this variant: they belong to one of its words.
    of_words = list[str]()
    if is_searched:
        of_words += _OF_A_SEARCH
    elif variant["mtp"] == "auto":
        of_words.append("mtp_auto")
        flat["mtp_auto"] = USUAL_AUTO
    if variant["mtp"] == "tuned":
        of_words.append("mtp_tuned")
    for key in _OF_A_WORD:
        if key in variant:
            flat[key] = variant[key]
        elif key in of_words and key in raw:
            flat[key] = raw[key]
    flat["calibration"] = calibration
    for holder in (raw, variant):
        for key in BLOCKS:
            if key in holder and key not in _OF_A_WORD:
                flat[key] = holder[key]
    return flat


def _refuse_keys(
    where: object,
    raw: Raw,
    needed: Collection[str],
    allowed: Collection[str],
    what: str,
) -> None:
    """Refuse a key that is neither needed nor allowed, and one that is needed and missing."""
    for key, value in raw.items():
        if key not in (*needed, *allowed):
            raise RecipeError(
                where,
                f"{key} is not a key of {what}",
                got=repr(value),
                cure=cure_of_key(key, (*needed, *allowed)),
            )
    for key in needed:
        if key not in raw:
            raise RecipeError(
                where,
                f"{key} must be given",
                got="nothing",
                cure="Add it: nothing that changes numbers has a default",
            )


def _refuse_unknown(where: str, rule: str, word: object, known: Collection[str]) -> None:
    if word not in list(known):
        raise RecipeError(
            where,
            rule,
            got=repr(word),
            cure=did_you_mean(word, known, otherwise="Name one of them"),
        )


def summary_of(
    backbone: Mapping[str, str], mtp: str | Mapping[str, str], *, is_calibrated: bool
) -> str:
    """The summary of a recipe with these words; the word of most groups comes last."""
    summary = f"MTP block {_said(mtp)}"
    if backbone:
        summary = f"{_said(backbone)}, {summary}"
    if not is_calibrated:
        summary += "; no calibration"
    return summary


def _said(words: str | Mapping[str, str]) -> str:
    if not isinstance(words, Mapping):
        return _spelled(words)
    groups: dict[str, list[str]] = {}
    for group, word in words.items():
        groups.setdefault(_spelled(word), []).append(group.replace("_", " "))
    if len(groups) == 1:
        return next(iter(groups))
    *few, (usual, most) = sorted(groups.items(), key=lambda item: len(item[1]))
    said = [f"{word} {' and '.join(names)}" for word, names in few]
    where = "elsewhere"
    if len(most) == 1:
        where = most[0]
    return ", ".join((*said, f"{usual} {where}"))


def _spelled(word: str) -> str:
    if word == "bf16":
        return "BF16"
    return str(word)


# --- listings -------------------------------------------------------------------------------------

BATCHES = {True: "needed", False: "-"}
"""What a listing says of batches."""
_LISTED = ("model", "variant", "default", "family", "source")


def listed() -> list[Json]:
    """A row for every shipped recipe that can be run, by model, the default variant first."""
    rows: list[Json] = []
    for path in model_files():
        for recipe in flat_recipes(load_shipped(path), path).values():
            # The files that a recipe names must be on this machine; the Hub is not asked.
            calibration = recipe["calibration"] or {}
            places = [(recipe["revision"], recipe["source"])]
            places.append((calibration.get("dataset_revision"), calibration.get("dataset", "")))
            local = [name for revision, name in places if revision == "local"]
            if None in map(find_path, local):
                continue
            row: Json = {key: recipe[key] for key in _LISTED}
            row["recipe"] = f"{recipe['model']}.{recipe['variant']}"
            row["batches"] = BATCHES[recipe["calibration"] is not None]
            row["what"] = recipe["summary"]
            rows.append(row)
    return sorted(rows, key=lambda row: (row["model"], not row["default"], row["variant"]))
