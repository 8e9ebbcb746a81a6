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
from ...checkpoints.source import Source
from ...quantize.needs.cards import CARDS
from ...recipes.errors import CheckpointError
from ...recipes.frozen import frozen
from ..measure.room import least_gpus

_CARDS = ("4090", "L40S", "H100", "H200", "B200")
_MOST_GPUS = 8


@frozen
class ModuleGroup:
    """Quantized modules of one kind.

    Attributes:
        part: backbone or mtp.
        modules: their group in the recipe's words.
        schemes: of their weights.
    """

    part: str
    modules: str
    schemes: tuple[str, ...]


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
    """Every module group of a checkpoint that has a scheme, backbone first.

    Raises:
        RecipeError: no family table for its model type.
    """
    runtime = RuntimeView.of(checkpoint)
    asked = {*record.recipe.backbone.values()}
    if isinstance(record.recipe.mtp, str):
        asked.add(record.recipe.mtp)
    else:
        asked.update(record.recipe.mtp.values())
    schemes = defaultdict[tuple[str, str], set[str]](set)
    for module, weight in runtime.weights.items():
        scheme = weight.scheme or weight.form
        if weight.form == "mxfp4":
            # One layout serves three, which differ in what vLLM does with it.
            named = [word for word in ("MXFP4", "MXFP4A16") if word in asked]
            scheme = next(iter(named), "MXFP4A8")
        if scheme == "plain":
            continue
        place = runtime.placed.get(module)
        group = ("backbone", "unknown")
        if place:
            group = place.part, place.role
        schemes[group].add(scheme)
    rows = []
    for (part, modules), found in sorted(schemes.items()):
        rows.append(ModuleGroup(part=part, modules=modules, schemes=tuple(sorted(found))))
    return tuple(rows)


def gpus_of(sizes: Sequence[int], num_bytes: int) -> tuple[tuple[int, str], ...]:
    """(number, card): on how few so many bytes of weights fit, with room for a KV
    cache; `sizes` are those at which they load. They are counted, and nobody tried it.
    """
    gpus = []
    for name in _CARDS:
        number = least_gpus(sizes, num_bytes, CARDS[name] * 10**9)
        if number and number <= _MOST_GPUS:
            gpus.append((number, name))
            if number == 1:
                break  # a larger one holds it as well
    return tuple(gpus)
