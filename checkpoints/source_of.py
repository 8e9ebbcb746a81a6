"""Finds what a checkpoint was made from: the source that the user names, or the folder in its
record.

In: an opened checkpoint with keepmtp.json. Out: the source, opened and not downloaded.

Easy to get wrong: the record has only the folder's name, and that folder may hold another release
by now. It is taken only if its files have the recorded sizes.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.model_file import find_path
from .record import RECORD, RecordedSource, read_record
from .source import Source, open_source, small_file, view_of

_MADE_FROM = "must be what {} was made from"
_RELEASE = "Name the release that it was made from"
# In config.json, and the same before and after quantizing.
_KEPT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "n_routed_experts",
    "num_experts",
)


def original_of(checkpoint: Source, named: str | None, *, cure: str) -> Source | None:
    """The source that a checkpoint is compared with, opened and not downloaded; None for `none`.

    Args:
        checkpoint: local, or named with its source.
        named: by the user; None takes the record's.
        cure: what to do if the record has none.

    Raises:
        RecipeError: it is not known, or the checkpoint cannot be made from it.
        CheckpointError: the record is not keepmtp's.
    """
    if named == "none":
        return None
    original = open_source(named or recorded_source(checkpoint, cure=cure))
    refuse_another_model(checkpoint, original)
    return original


def recorded_source(checkpoint: Source, *, cure: str) -> str:
    """The source that keepmtp.json names, where it is a folder here with the recorded files.

    Raises:
        RecipeError: no record, a Hub repository (a download is the user's decision), or no such
            folder; `cure` says what to do then.
        CheckpointError: the record is not keepmtp's.
    """
    rule = "the source to compare with must be known"
    path = small_file(checkpoint, RECORD)
    if path is None:
        raise RecipeError(checkpoint.where, rule, got=f"no {RECORD}", cure=cure)
    record = read_record(path, cure=cure)
    named = record.source
    folder = _folder_of(named, record.recipe.source, checkpoint)
    if folder is not None:
        return str(folder)
    raise RecipeError(
        path,
        rule,
        got=f"{named.name} ({named.revision}), which is no folder with the recorded files here",
        cure=cure,
    )


def recorded_mtp_source(checkpoint: Source) -> Source | None:
    """What the checkpoint's MTP block was read from, where its source had none; None where no
    record names it, or its folder is not here.

    Raises:
        CheckpointError: the record is not keepmtp's; or the Hub does not answer.
    """
    path = small_file(checkpoint, RECORD)
    record = path and read_record(path)
    named = ((record and record.donors) or {}).get("mtp")
    if not record or named is None:
        return None
    if named.revision != "local":
        return open_source(named.name, revision=named.revision)
    recipe = record.recipe.whole
    said = recipe.get("mtp_source") or recipe["from"]["mtp"]
    folder = _folder_of(named, said["source"], checkpoint)
    if folder is None:
        return None
    return open_source(folder)


def _folder_of(named: RecordedSource, said: str, checkpoint: Source) -> Path | None:
    """A folder that a record names and its recipe calls `said`, with the recorded files; None where
    it is not here, or a repository.
    """
    places = [Path(said), Path(named.name), Path("models") / named.name]
    if checkpoint.folder is not None:
        places.append(checkpoint.folder.parent / named.name)
    for place in places:
        folder = find_path(place)
        if folder is None or named.revision != "local":
            continue
        sizes = {path.name: path.stat().st_size for path in folder.glob("*")}
        if sizes.items() >= named.files.items():
            return folder
    return None


def folder_it_was_made_from(checkpoint: Path) -> Path | None:
    """The folder that the checkpoint's record names, if it is still here."""
    if not (checkpoint / "config.json").is_file():
        return None
    opened = open_source(checkpoint)
    try:
        return Path(recorded_source(opened, cure=""))
    except (RecipeError, CheckpointError):  # whoever needs no source refuses a stranger's record
        return None


def release_of(checkpoint: Source, native: Collection[str]) -> str:
    """The release that a tool has quantized this checkpoint from: by keepmtp.json, by config.json,
    or in words; "" for a release.

    Args:
        checkpoint: with weights that are quantized.
        native: each quant_method that releases are published with.

    Raises:
        CheckpointError: the record is not keepmtp's.
    """
    path = small_file(checkpoint, RECORD)
    if path is not None:
        return read_record(path).source.name
    key = "quantization_config"
    said = checkpoint.config.get(key) or checkpoint.text_config.get(key) or {}
    # modelopt leaves a release's quant_method, and adds its own key.
    if said.get("quant_method") in native and "quant_algo" not in said:
        return ""
    return str(checkpoint.config.get("_name_or_path") or "the release that it was made from")


def refuse_another_model(
    checkpoint: Source, source: Source, *, rule: str = _MADE_FROM, cure: str = _RELEASE
) -> None:
    """Refuse a release that a checkpoint was not made from, or a build of another model, by what
    quantizing never changes: a comparison with it would mean nothing.

    Raises:
        RecipeError: another family, or another size in config.json.
    """
    ours = view_of(checkpoint)
    theirs = view_of(source)
    sizes: list[tuple[str, Any, Any]] = [
        ("family", ours.family.model_type, theirs.family.model_type)
    ]
    for name in _KEPT:
        sizes.append((name, ours.text_config.get(name), theirs.text_config.get(name)))
    for name, value, other in sizes:
        if None not in (value, other) and value != other:
            raise RecipeError(
                source.where,
                f"{rule.format(checkpoint.where)}, whose {name} is {value}",
                got=other,
                cure=cure,
            )
