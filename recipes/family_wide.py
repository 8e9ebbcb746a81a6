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

from collections.abc import Mapping, Sequence
from functools import cache

from .family import QUANTIZABLE_ROLES
from .family_view import FamilyView
from .find import DEFAULT_CALIBRATION
from .frozen import Json, Raw
from .model_file import calibrations, flat_recipes, model_files
from .schemes import SCHEMES
from .yaml_file import load_shipped, on_one_line

# of a family without a shipped recipe
_USUAL: Raw = {"backbone": {}, "mtp": "bf16", "calibration": None}

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
# backbone: auto, with budget and backbone_auto, in place of the groups lets a search choose.
# calibration is null, or the text that the model is run on: a block, or the name of a shipped one.
variants:
"""
_TAIL = """\
# What may be added, here for all variants or in one of them:
# keep: ['re:.*\\.unknown_buffer']            # tensors that are copied as they are
# overrides:                                 # modules that get another word than their group
#   - {modules: 're:model\\.layers\\.0\\..*', scheme: bf16}
# gates: {max_drop: 0.02, min_acceptance: 0.97}
# evaluation: {k: 3, concurrency: 8}
# format: modelopt
# keeps_config: true                         # of a finished checkpoint, but for what changes
# kv_cache: FP8
# requantize: true
# mtp_source: {source: ORG/NAME, revision: main}
# from: {experts: ORG/NAME}                  # groups that are another build's
# mtp_auto: {min_acceptance: 0.97, candidates: [bf16, NVFP4]}
# mtp_tuned: {mtp: NVFP4, steps: 200, ...}   # for mtp: tuned
# budget: 96GiB                              # for groups that are auto
# backbone_auto: {candidates: [NVFP4, FP8_DYNAMIC, bf16]}
# calibrations:                              # only here: text of your own
#   mine: {algorithm: minmax, dataset: my.jsonl, dataset_revision: local, split: train,
#     column: text, samples: 256, held_out: 16, sequence_length: 2048, batch_size: 1, seed: 42}
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


def model_mapping(view: FamilyView, *, model: str, source: str, revision: str) -> Json:
    """The mapping of a model file for one checkpoint.

    Args:
        view: the family's names for it, and its tensors.
        model: the name that its outputs get.
        source: its folder or Hub id.
        revision: of a Hub id; "local" for a folder.

    Returns: the keys of a shipped file. Not every variant need fit: a width may be wrong for a
    scheme.
    """
    is_draft = not view.groups["backbone"]  # a draft of its own
    chosen = view.groups["backbone"] or view.groups["mtp"]
    groups = [role for role in QUANTIZABLE_ROLES if role in chosen]
    is_plain = "quantization_config" not in {*view.config, *view.text_config}
    shipped = shipped_variants(view.family.model_type)
    variants: Json = {}
    for name in dict.fromkeys([*COMMON, *shipped]):
        variant = _variant(name, groups, shipped, is_plain=is_plain, is_draft=is_draft)
        if variant is not None:
            variants[name] = variant
    if is_draft:  # its groups are those of the block
        groups = []
    return {
        "model": model,
        "family": view.family.model_type,
        "source": source,
        "revision": revision,
        "groups": groups,
        "default": next(iter(variants)),
        "variants": variants,
    }


@cache
def shipped_variants(family: str) -> Mapping[str, Raw]:
    """The flat recipes of a family by variant, the first file's first; not those of the models that
    keepmtp ships.
    """
    variants: dict[str, Raw] = {}
    for path in model_files():
        raw = load_shipped(path)
        if raw["family"] == family and raw["revision"] != "local":
            for name, flat in flat_recipes(raw, path).items():
                variants.setdefault(name, flat)
    return variants


def _variant(
    name: str,
    groups: Sequence[str],
    shipped: Mapping[str, Raw],
    *,
    is_plain: bool,
    is_draft: bool,
) -> Json | None:
    """One line of the model file; None where the variant says
    nothing about this checkpoint's heavy group.
    """
    heavy = next((group for group in ("experts", "dense_mlp", *groups) if group in groups), "")
    own = shipped.get(name)
    if own is not None and heavy not in own["backbone"] and not is_draft:
        own = None
    if own is None and name not in COMMON:
        return None
    base = own or shipped.get("nvfp4a16-fp8") or next(iter(shipped.values()), _USUAL)
    others = [word for group, word in base["backbone"].items() if group != "experts"]
    usual = next((word for word in others if word != "bf16"), "FP8_DYNAMIC")
    scheme, rest = COMMON.get(name, ("", ""))
    words: dict[str, str] = {}
    for group in groups:
        word = base["backbone"].get(group) or usual
        if own is None and group == heavy:
            word = scheme
        elif own is None and rest and word != "bf16":
            word = rest
        if is_plain and word == "source":
            if group == heavy:
                return None
            word = "FP8_BLOCK"
        words[group] = word
    # A recipe with batches may rewrite weights, also where no scheme needs them.
    needs_batches = own is not None and own["calibration"] is not None
    schemes = [SCHEMES[word] for word in words.values() if word in SCHEMES]
    needs_batches |= any(scheme.needs_calibration for scheme in schemes)
    backbone = words
    mtp = base["mtp"]
    if is_draft:
        backbone = {}
        mtp = words
    block: object = None
    if needs_batches:
        block = base["calibration"] or DEFAULT_CALIBRATION
        block = next((name for name, known in calibrations().items() if known == block), block)
    return {**backbone, "mtp": mtp, "calibration": block}


# --- its text -------------------------------------------------------------------------------------


def text_of(raw: Raw, variants: Sequence[str], *, file: str) -> str:
    """The text.

    Args:
        raw: the mapping of a model file.
        variants: those of its variants that are written.
        file: the name of the file, for the commands in its head.
    """
    text = f"{_HEAD.format(file=file)}\n"
    for key, comment in _COMMENTS.items():
        if key in raw:
            text += f"{key}: {on_one_line(raw[key])}  # {comment}\n"
    text += f"\n{_VARIANTS}"
    for name in variants:
        text += f"  {name}:\n"
        for key, value in raw["variants"][name].items():
            text += f"    {key}: {on_one_line(value)}\n"
    return f"{text}\n{_TAIL}"
