"""A model file for a checkpoint that has no recipe: the variants that every family has, in the
words of its family.

In: a checkpoint's names. Out: the mapping of a model file (`model_file`), as a person would write
it; and its text, with comments for the person who edits it. A value that a person typed, such as a
folder's path, may be no plain YAML, so each is dumped.

A variant of a shipped recipe of the same family is taken as it is. The variants of `COMMON` that no
such recipe has are made from the family's first recipe: it says which groups stay plain, and what
becomes of the MTP block.

Easy to get wrong: a shipped recipe says `source` of a release in FP8. In a fine-tune that is stored
in BF16, this word would quantize nothing, so there it becomes FP8_BLOCK.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from .family import QUANTIZABLE_ROLES, HFName, Part
from .family_view import FamilyView
from .find import DEFAULT_CALIBRATION
from .model_file import calibrations, flat_recipes, model_files, summary_of
from .schemes import SCHEMES
from .yaml_file import load_shipped, on_one_line

_USUAL = "FP8_DYNAMIC"  # of a family without a shipped recipe

_COMMENTS = {
    "model": "outputs are called <model>.<variant>",
    "family": "from config.json",
    "source": "a folder or a Hub id",
    "revision": "a commit, branch or tag of the Hub; local for a folder",
    "mtp_source": "where the MTP block is",
    "groups": "the module groups of the model that a recipe chooses schemes for",
    "default": "the variant that is meant without --scheme",
}
_HEAD = """\
# A recipe, written by `keepmtp init`. The comments say what each key is.
#   keepmtp plan {file}                     what would become of every tensor
#   keepmtp quantize {file}                 the default variant
#   keepmtp quantize {file} --scheme NAME   another one
"""
_VARIANTS = """\
# One word for each group: a scheme (`keepmtp ls schemes`), bf16, or source for the released form.
# mtp is the word for the MTP block. auto would take the smallest form that keeps enough acceptance.
# calibration is null, or the text that the model is run on: a block, or the name of a shipped one.
variants:
"""
_TAIL = """\
# What may be added, here for all variants or in one of them:
# keep: ['re:.*\\.unknown_buffer']            # tensors that are copied as they are
# overrides:                                 # modules that get another word than their group
#   - {modules: 're:model\\.layers\\.0\\..*', scheme: bf16}
# gates: {max_drop: 0.02, min_acceptance: 0.97}
"""
COMMON: Mapping[str, tuple[str, str]] = {
    "nvfp4a16-fp8": ("NVFP4A16", ""),
    "w4a16-fp8": ("W4A16", ""),
    "fp8-dynamic": ("FP8_DYNAMIC", "FP8_DYNAMIC"),
    "nvfp4-fp8": ("NVFP4", ""),
}
"""Variant -> the scheme of the heavy group, and of the other quantized groups; "" leaves them in
the family's form.
"""


def model_mapping(
    view: FamilyView, names: Iterable[HFName], *, model: str, source: str, revision: str
) -> dict[str, Any]:
    """The mapping of a model file for one checkpoint.

    Args:
        view: the family's names for it.
        names: its tensors.
        model: the name that its outputs get.
        source: its folder or Hub id.
        revision: of a Hub id; "local" for a folder.

    Returns: the keys of a shipped file. Not every variant need fit: a width may be wrong for a
    scheme.
    """
    groups = _groups(view, names)
    is_plain = not any(
        "quantization_config" in holder for holder in (view.config, view.text_config)
    )
    shipped = shipped_variants(view.family.model_type)
    made = {
        name: _variant(name, groups, shipped, is_plain=is_plain)
        for name in dict.fromkeys([*COMMON, *shipped])
    }
    variants = {name: variant for name, variant in made.items() if variant is not None}
    return {
        "model": model,
        "family": view.family.model_type,
        "source": source,
        "revision": revision,
        "groups": groups["backbone"],
        "default": next(iter(variants)),
        "variants": variants,
    }


@cache
def shipped_variants(family: str) -> Mapping[str, Mapping[str, Any]]:
    """The flat recipes of a family by variant, the first file's first; not those of the models that
    keepmtp ships.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for path in model_files():
        raw = load_shipped(path)
        if raw["family"] == family and raw["revision"] != "local":
            for name, flat in flat_recipes(raw, path).items():
                found.setdefault(name, flat)
    return found


def _groups(view: FamilyView, names: Iterable[HFName]) -> dict[Part, list[str]]:
    """The module groups that a recipe can choose schemes for, of backbone and MTP block."""
    found: dict[Part, set[str]] = {"backbone": set(), "mtp": set()}
    for name in names:
        place = view.place(name)
        if place is not None and not place.row.why_kept:
            found[place.part].add(place.role)
    return {
        part: [role for role in QUANTIZABLE_ROLES if role in roles] for part, roles in found.items()
    }


def _variant(
    name: str,
    groups: Mapping[Part, list[str]],
    shipped: Mapping[str, Mapping[str, Any]],
    *,
    is_plain: bool,
) -> dict[str, Any] | None:
    """One line of the model file; None where the variant says nothing about this checkpoint's heavy
    group.
    """
    chosen = groups["backbone"] or groups["mtp"]  # a draft of its own has no backbone
    heavy = next((group for group in ("experts", "dense_mlp", *chosen) if group in chosen), "")
    own = shipped.get(name)
    is_own = own is not None and (heavy in own["backbone"] or not groups["backbone"])
    if not is_own and name not in COMMON:
        return None
    base = (
        own
        if own is not None and is_own
        else shipped.get("nvfp4a16-fp8") or next(iter(shipped.values()), None)
    )
    words = {group: _word(group, base) for group in chosen}
    if not is_own:
        words = _with_common(words, heavy, *COMMON[name])
    if is_plain and words.get(heavy) == "source":
        return None
    words = {
        group: "FP8_BLOCK" if is_plain and word == "source" else word
        for group, word in words.items()
    }
    # Its algorithm rewrites weights, also where no scheme needs batches.
    is_rewritten = is_own and own is not None and own["calibration"] is not None
    return _line(words, base, is_draft=not groups["backbone"], is_rewritten=is_rewritten)


def _word(group: str, base: Mapping[str, Any] | None) -> str:
    """What the family's recipe says of a group; of a group that it does not name, what it says of
    most.
    """
    backbone: Mapping[str, str] = base["backbone"] if base else {}
    if group in backbone:
        return backbone[group]
    quantized = Counter(
        word for name, word in backbone.items() if word != "bf16" and name != "experts"
    )
    return quantized.most_common(1)[0][0] if quantized else _USUAL


def _with_common(words: Mapping[str, str], heavy: str, scheme: str, rest: str) -> dict[str, str]:
    return {
        group: scheme if group == heavy else rest if rest and word != "bf16" else word
        for group, word in words.items()
    }


def _line(
    words: dict[str, str], base: Mapping[str, Any] | None, *, is_draft: bool, is_rewritten: bool
) -> dict[str, Any]:
    """A variant in the form of a model file, with a summary that says each word."""
    mtp: Any = words if is_draft else base["mtp"] if base else "bf16"
    backbone = {} if is_draft else words
    needs_batches = is_rewritten or any(
        word in SCHEMES and SCHEMES[word].needs_calibration for word in words.values()
    )
    calibration = _calibration(base) if needs_batches else None
    summary = summary_of(backbone, mtp, is_calibrated=needs_batches)
    return {**backbone, "mtp": mtp, "calibration": calibration, "summary": summary}


def _calibration(base: Mapping[str, Any] | None) -> object:
    """The calibration of the family's recipe, by its name where it has one."""
    block = base["calibration"] if base else None
    named = next((name for name, known in calibrations().items() if known == block), None)
    return named or block or DEFAULT_CALIBRATION


# --- its text
# --------------------------------------------------------------------------------------------------


def text_of(raw: Mapping[str, Any], variants: Sequence[str], *, file: str) -> str:
    """The text.

    Args:
        raw: the mapping of a model file.
        variants: those of its variants that are written.
        file: the name of the file, for the commands in its head.
    """
    keys = [
        f"{key}: {on_one_line(raw[key])}  # {comment}\n"
        for key, comment in _COMMENTS.items()
        if key in raw
    ]
    lines: list[str] = []
    for name in variants:
        lines.append(f"  {name}:\n")
        lines += [
            f"    {key}: {on_one_line(value)}\n" for key, value in raw["variants"][name].items()
        ]
    return f"{_HEAD.format(file=file)}\n{''.join(keys)}\n{_VARIANTS}{''.join(lines)}\n{_TAIL}"
