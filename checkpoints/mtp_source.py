"""A release without an MTP block, joined with the MTP block of another repository or folder.

In: two opened checkpoints. Out: one `Source`: the release's, with the MTP tensors of the other one
under the release's names, and the count of MTP layers that is there. The other one is its donor, so
whoever plans, reads or writes sees one checkpoint.

Easy to get wrong: config.json of the release may count MTP layers that were never published
(MiniMax-M3 says seven). So the count is that of the tensors. Only the files with MTP tensors are
stamped and recorded.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..recipes.errors import CheckpointError
from ..recipes.family import Family, HFName
from ..recipes.family_view import FamilyView
from ..recipes.frozen import Raw
from .safetensors_file import Entry
from .source import Source, donor_files, view_of

_ABOUT_MTP = re.compile(r"mtp|nextn|n_predict", re.IGNORECASE)
_KEPT = ("hidden_size", "vocab_size", "num_attention_heads", "head_dim")


def with_mtp_of(source: Source, other: Source) -> Source:
    """The release with the MTP block of another checkpoint.

    Args:
        source: has no MTP tensor.
        other: a standalone MTP block, or another release of the same model.

    Raises:
        RecipeError: no family table for the release.
        CheckpointError: the release has an MTP block, the other one has none, or it is another
            model's.
    """
    view = view_of(source)
    own = _first_mtp(source, view)
    if own:
        raise CheckpointError(
            source.where,
            "mtp_source is for a release without an MTP block of its own",
            got=own,
            cure="Leave mtp_source and --mtp-source away",
        )
    renamed = {}
    for entry in (*other.entries.values(), *other.unindexed.values()):
        name = entry.name
        for theirs, ours in view.family.mtp_source_prefixes:
            if name.startswith(theirs):
                name = HFName(ours + name.removeprefix(theirs))
                break
        if view.is_mtp(name):
            renamed[name] = replace(entry, name=name)
    if not renamed:
        family = view.family.model_type
        raise CheckpointError(
            other.where,
            f"an MTP source must have tensors of {family}'s MTP block, {view.mtp_stem(0)}*",
            got="none",
            cure="Name another with --mtp-source",
        )
    _refuse_other_model(source, other)
    # config.json with the count of MTP layers that are there.
    count: Any = max(view.mtp_layers_of(renamed), default=0) // view.num_mtp_parts + 1
    outer, _, inner = view.mtp_count_key.partition(".")
    if inner:
        count = {**view.text_config.get(outer, {}), inner: count}
    config = {**view.text_config, outer: count}
    if view.text_config is not source.config:
        config = {**source.config, "text_config": config}
        config.pop(outer, None)
    # A block alone has a config.json of another class.
    said = config | {"quantization_config": other.config.get("quantization_config")}
    other = replace(other, config=said, entries=renamed, unindexed={})
    return with_tensors_of(replace(source, config=config), other, "mtp", renamed)


def with_tensors_of(
    source: Source, donor: Source, group: str, tensors: Mapping[HFName, Entry]
) -> Source:
    """The checkpoint with these tensors of a donor, which are its group."""
    start = donor_files(group)
    taken = {name: replace(entry, file=start + entry.file) for name, entry in tensors.items()}
    states = {start + name: state for name, state in donor.states.items()}
    files = states.keys() & {entry.file for entry in taken.values()}  # of a repository none
    return replace(
        source,
        entries={**source.entries, **taken},
        states={**source.states, **{file: states[file] for file in files}},
        donors={**source.donors, group: donor},
    )


def mtp_keys(ours: Raw, theirs: Raw, family: Family) -> Iterator[tuple[tuple[str, ...], Any, str]]:
    """The keys with which a config.json counts and describes the MTP layers of another checkpoint:
    where they are, their values, and why.

    It may have the language model's keys at top level where the other one nests them.
    """
    holders: list[tuple[tuple[str, ...], Raw, Raw]] = [((), ours, theirs)]
    inner = theirs.get("text_config")
    if inner is not None:
        own = ours.get("text_config")
        if own is not None:
            holders.append((("text_config",), own, inner))
        else:
            holders.append(((), ours, inner))
    counts = {key.partition(".")[0] for key in (*family.mtp_count_keys, *family.mtp_parts_keys)}
    for place, held, given in holders:
        for key, value in given.items():
            if key in ("text_config", "quantization_config"):
                continue
            # The release's lists of one value a layer have the MTP layers at their end, and a tool
            # that drops the block cuts them.
            now = held.get(key)
            if key in counts or _ABOUT_MTP.search(key):
                yield (*place, key), value, "the release describes its MTP block so"
            elif now and type(now) is type(value) is list and value[: len(now)] == now:
                yield (*place, key), value, "the release has a value for each layer, MTP layers too"


def has_mtp(source: Source) -> bool:
    """Whether a checkpoint has MTP tensors of its own.

    Raises:
        RecipeError: no family table for it.
    """
    return bool(_first_mtp(source, view_of(source)))


def _first_mtp(source: Source, view: FamilyView) -> str:
    return next(filter(view.is_mtp, (*source.entries, *source.unindexed)), "")


def _refuse_other_model(source: Source, other: Source) -> None:
    """By config.json, both must have the same sizes."""
    for key in _KEPT:
        ours = source.text_config.get(key)
        given = other.text_config.get(key)
        if None not in (ours, given) and ours != given:
            raise CheckpointError(
                f"{other.where}/config.json",
                f"{key} must be {ours}, that of {source.where}",
                got=given,
                cure="Name another MTP source",
            )
