"""What repeats a run, and what is in its checkpoint: its recipe, and every module group by stored
form.

In: the folder of a checkpoint that keepmtp wrote, and its record. Out: where a recipe decides
otherwise than the run, a row for each module group, and how few GPUs hold them.

Easy to get wrong: a recipe says what somebody wanted. The rows are read from the headers, which say
what is there.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.record import RECIPE, Record
from ...checkpoints.source import Source, small_file, small_object
from ...quantize.needs.cards import CARDS
from ...recipes.errors import CheckpointError
from ...recipes.family import Family
from ...recipes.frozen import frozen
from ..measure.room import least_gpus

_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_CARDS = ("4090", "L40S", "H100", "H200", "B200")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MOST_GPUS = 8
_Group = tuple[str, str]


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


def groups_of(checkpoint: Source, record: Record) -> tuple[ModuleGroup, ...]:
    """Every module group of a checkpoint, backbone first, quantized ones before the others.

    Raises:
        RecipeError: no family table for its model type.
    """
    runtime = RuntimeView.of(checkpoint)
    policies = {"backbone": record.recipe.backbone, "mtp": record.recipe.mtp}
    if isinstance(record.recipe.mtp, str):
        groups = {*record.recipe.backbone}
        if not groups:  # a draft alone
            for module in runtime.weights:
                place = runtime.placed.get(module)
                if place and not place.row.why_kept:
                    groups.add(place.role)
        policies["mtp"] = dict.fromkeys(groups, record.recipe.mtp)
    asked = {*policies["backbone"].values(), *policies["mtp"].values()}
    stored = [(entry.name, "", entry.dtype) for entry in runtime.others]
    for module, weight in runtime.weights.items():
        scheme = weight.scheme or ""
        if weight.form == "mxfp4":
            # One layout serves three, which differ in what vLLM does with it.
            named = [word for word in ("MXFP4", "MXFP4A16") if word in asked]
            scheme = next(iter(named), "MXFP4A8")
        elif not scheme and weight.form != "plain":
            scheme = weight.form
        stored.append((module, scheme, weight.weight.dtype))
    schemes = defaultdict[_Group, set[str]](set)
    plain = defaultdict[_Group, set[str]](set)
    reasons = defaultdict[_Group, set[str]](set)
    for name, scheme, dtype in stored:
        place = runtime.placed.get(name)
        group = ("backbone", "unknown")
        if place:
            group = place.part, place.role
        if scheme:
            schemes[group].add(scheme)
            continue
        plain[group].add(dtype)
        if place and place.row.why_kept:
            reasons[group].add(place.row.why_kept)
        elif place and place.leaf == "bias":
            reasons[group].add("a bias, not a matrix")
    rows = []
    for part, modules in sorted(schemes.keys() | plain.keys()):
        group = part, modules
        why = sorted(reasons[group])
        if modules in policies[part]:
            why.insert(0, f"recipe: {policies[part][modules]}")
        row = ModuleGroup(
            part=part,
            modules=modules,
            schemes=tuple(sorted(schemes[group])),
            plain=tuple(sorted(plain[group])),
            why="; ".join(why),
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (row.part, not row.schemes)))


def is_chat(checkpoint: Source) -> bool:
    """Whether it has a chat template."""
    tokenizer = small_object(checkpoint, "tokenizer_config.json")
    if tokenizer and tokenizer.get("chat_template"):
        return True
    return any(small_file(checkpoint, name) for name in _TEMPLATES)


def parser_words(family: Family) -> str:
    """The words with which a server reads the family's tool calls and thoughts."""
    words = []
    if family.tool_parser:
        words += ["--enable-auto-tool-choice", "--tool-call-parser", family.tool_parser]
    if family.reasoning_parser:
        words += ["--reasoning-parser", family.reasoning_parser]
    if not words:
        return ""
    return f"`{' '.join(words)}`"


def sampling_of(checkpoint: Source) -> str:
    """How its generation_config.json samples, which vLLM does by itself."""
    config = small_object(checkpoint, "generation_config.json") or {}
    said = [f"{key} {config[key]}" for key in _SAMPLING if isinstance(config.get(key), int | float)]
    return ", ".join(said)


def gpus_of(sizes: Sequence[int], num_bytes: int) -> tuple[tuple[int, str, int], ...]:
    """(number, card, its memory in GB): on how few so many bytes of weights fit, with room for a KV
    cache; `sizes` are those at which they load. They are counted, and nobody tried it.
    """
    gpus = []
    for name in _CARDS:
        number = least_gpus(sizes, num_bytes, CARDS[name] * 10**9)
        if number and number <= _MOST_GPUS:
            gpus.append((number, name, CARDS[name]))
            if number == 1:
                break  # a larger one holds it as well
    return tuple(gpus)
