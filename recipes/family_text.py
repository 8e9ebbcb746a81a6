"""The text of a model file for one checkpoint, with comments for the person who edits it.

In: the mapping of `family_wide.model_mapping`, and the variants that fit. Out: YAML, which reads back as the same
mapping.

Easy to get wrong: a value that a person typed, such as a folder's path, may be no plain YAML, so each is dumped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

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
# One word for each group: a scheme (`keepmtp ls schemes`), bf16, or source for the form that the release has.
# mtp is the word for the MTP block. auto would take the smallest form that keeps enough acceptance.
# calibration is null, or the text that the model is run on: a block, or the name of a block that ships with keepmtp.
variants:
"""
_TAIL = """\
# What may be added, here for all variants or in one of them:
# keep: ['re:.*\\.unknown_buffer']            # tensors that are copied as they are
# overrides:                                 # modules that get another word than their group
#   - {modules: 're:model\\.layers\\.0\\..*', scheme: bf16}
# gates: {max_drop: 0.02, min_acceptance: 0.97}
"""


def text_of(raw: Mapping[str, Any], variants: Sequence[str], *, file: str) -> str:
    """The text.

    Args:
        raw: the mapping of a model file.
        variants: those of its variants that are written.
        file: the name of the file, for the commands in its head.
    """
    keys = "".join(f"{key}: {_value(raw[key])}  # {comment}\n" for key, comment in _COMMENTS.items() if key in raw)
    lines = [f"  {name}:\n{_block(raw['variants'][name])}" for name in variants]
    return f"{_HEAD.format(file=file)}\n{keys}\n{_VARIANTS}{''.join(lines)}\n{_TAIL}"


def _value(value: object) -> str:
    """A value on one line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
    return text.removesuffix("...\n").strip()


def _block(variant: Mapping[str, Any]) -> str:
    return "".join(f"    {key}: {_value(value)}\n" for key, value in variant.items())
