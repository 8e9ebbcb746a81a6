"""What repeats a run, and what is in its checkpoint: its recipe, and every module group by stored
form.

In: the folder of a checkpoint that keepmtp wrote, and its record. Out: where a recipe decides
otherwise than the run, a row for each module group, and how few GPUs hold them.

Easy to get wrong: a recipe says what somebody wanted. The rows are read from the headers, which say
what is there.
"""

from pathlib import Path
from typing import NamedTuple

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.record import RECIPE, Record
from ...checkpoints.source import Source, small_file, small_object
from ...quantize.needs.cards import CARDS
from ...recipes.errors import CheckpointError
from ...recipes.family import HFName
from ...recipes.frozen import Raw, frozen
from ...recipes.schema import AUTO, Recipe
from ..measure.room import least_gpus

# What judges a checkpoint, and what `mtp: auto` replaces by its choice: neither is a decision about
# its bytes.
_NOT_OF_THE_BYTES = frozenset({"summary", "evaluation", "gates"})
_CHOSEN = frozenset({"mtp", "mtp_auto", "calibration"})
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_CARDS = ("4090", "L40S", "H100", "H200", "B200")
_MOST_GPUS = 8


@frozen
class ModuleGroup:
    """Modules of one kind.

    Attributes:
        part: backbone or mtp.
        modules: their group in the recipe's words.
        schemes: of their weights; none where all are plain.
        plain: dtypes of the weights, biases and states that are not quantized.
        why: the recipe's word for the group, and the reasons of the family table for what no recipe
            quantizes.
    """

    part: str
    modules: str
    schemes: tuple[str, ...]
    plain: tuple[str, ...]
    why: str


def recipe_text(folder: Path) -> str:
    """A checkpoint's recipe.yaml, as it is.

    Raises:
        CheckpointError: there is none, or it is not text.
    """
    path = folder / RECIPE
    try:
        return read_bytes_of(path, path).decode()
    except (CheckpointError, UnicodeDecodeError) as error:
        raise CheckpointError(
            path,
            "a checkpoint of keepmtp's holds its recipe",
            got=str(error),
            cure="Restore the file, or quantize again",
        ) from error


def other_decision(recipe: Recipe, made: Raw) -> str | None:
    """The first key of `recipe` that the recipe of a record has otherwise; None where both make the
    same bytes.

    Summary, evaluation and gates change no byte, and what `mtp: auto` has chosen is one of its own
    outcomes.
    """
    passed_over = set(_NOT_OF_THE_BYTES)
    if recipe.mtp == AUTO:
        passed_over |= _CHOSEN
    for key, value in recipe.model_dump(mode="json", exclude=passed_over).items():
        if made.get(key) != value:
            return key
    return None


def groups_of(checkpoint: Source, record: Record) -> tuple[ModuleGroup, ...]:
    """Every module group of a checkpoint, backbone first, quantized ones before the others.

    Raises:
        RecipeError: no family table for its model type.
    """
    runtime = RuntimeView.of(checkpoint)
    policies = {"backbone": record.recipe.backbone, "mtp": record.recipe.mtp}
    if isinstance(record.recipe.mtp, str):
        policies["mtp"] = dict.fromkeys(record.recipe.backbone, record.recipe.mtp)
    asked = {*policies["backbone"].values(), *policies["mtp"].values()}
    found: dict[tuple[str, str], _Stored] = {}
    for entry in runtime.others:
        _add(found, runtime, entry.name, scheme="", dtype=entry.dtype)
    for module, weight in runtime.weights.items():
        scheme = weight.scheme
        if weight.form == "mxfp4":
            # One layout serves three, which differ in what vLLM does with it.
            scheme = "MXFP4A8"
            for word in ("MXFP4A16", "MXFP4"):
                if word in asked:
                    scheme = word
        elif not scheme and weight.form != "plain":
            scheme = weight.form
        _add(found, runtime, module, scheme=scheme, dtype=weight.weight.dtype)
    rows = []
    for (part, modules), stored in found.items():
        reasons = sorted(stored.reasons)
        if modules in policies[part]:
            reasons.insert(0, f"recipe: {policies[part][modules]}")
        row = ModuleGroup(
            part=part,
            modules=modules,
            schemes=tuple(sorted(stored.schemes)),
            plain=tuple(sorted(stored.plain)),
            why="; ".join(reasons),
        )
        rows.append((part, not row.schemes, modules, row))
    return tuple([row for *_, row in sorted(rows)])


class _Stored(NamedTuple):
    """What is found of one group, each word once."""

    schemes: set[str]
    plain: set[str]
    reasons: set[str]


def _add(
    found: dict[tuple[str, str], _Stored],
    runtime: RuntimeView,
    name: HFName,
    *,
    scheme: str | None,
    dtype: str,
) -> None:
    """Put one module or tensor to its group."""
    place = runtime.placed.get(name)
    key = ("backbone", "unknown")
    if place:
        key = place.part, place.role
    stored = found.setdefault(key, _Stored(set(), set(), set()))
    if scheme:
        stored.schemes.add(scheme)
        return
    stored.plain.add(dtype)
    if place and place.row.why_kept:
        stored.reasons.add(place.row.why_kept)
    elif place and place.leaf == "bias":
        stored.reasons.add("a bias, not a matrix")


def is_chat(checkpoint: Source) -> bool:
    """Whether it has a chat template."""
    tokenizer = small_object(checkpoint, "tokenizer_config.json")
    if tokenizer and tokenizer.get("chat_template"):
        return True
    return any(small_file(checkpoint, name) for name in _TEMPLATES)


def gpus_of(checkpoint: Source, num_bytes: int | None = None) -> tuple[tuple[int, str, int], ...]:
    """(number, card, its memory in GB): on how few the weights fit, with room for a KV cache.

    They are counted from bytes, `num_bytes` where they will be others, and nobody tried it.
    """
    gpus = []
    for name in _CARDS:
        number = least_gpus(checkpoint, CARDS[name] * 10**9, num_bytes)
        if number and number <= _MOST_GPUS:
            gpus.append((number, name, CARDS[name]))
            if number == 1:
                break  # a larger one holds it as well
    return tuple(gpus)
