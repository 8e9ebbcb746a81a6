"""What repeats a run, and what is in its checkpoint: options for recipe.yaml, and every module group by stored form.

In: the folder of a checkpoint that keepmtp wrote, and its record. Out: the options, and a row for each module group.

Easy to get wrong: a recipe says what somebody wanted. The rows are read from the headers, which say what is there.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...checkpoints.json_file import read_bytes_of
from ...checkpoints.record import RECIPE, Record
from ...checkpoints.source import Source
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.families import find_view
from ...recipes.find import read_recipe
from ...recipes.schema import AUTO, Recipe
from ...recipes.schemes import SCHEMES
from ..check.runtime_view import RuntimeView

# What judges a checkpoint, and what `mtp: auto` replaces by its choice: neither is a decision about its bytes.
_NOT_OF_THE_BYTES = frozenset({"summary", "evaluation", "gates"})
_CHOSEN = frozenset({"mtp", "mtp_auto", "calibration"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroup:
    """Modules of one kind.

    Attributes:
        part: backbone or mtp.
        modules: their group in the recipe's words.
        schemes: of their weights; none where all are plain.
        plain: dtypes of the weights, biases and states that are not quantized.
        decision: the recipe's word for the group; "" where it has none.
        reasons: of the family table, for what no recipe quantizes.
    """

    part: str
    modules: str
    schemes: tuple[str, ...]
    plain: tuple[str, ...]
    decision: str
    reasons: tuple[str, ...]


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


def choices(folder: Path, record: Record) -> tuple[str, ...] | None:
    """The `--scheme` and `--mtp` that make the recorded recipe of recipe.yaml; None where no such words do."""
    try:
        recipe = read_recipe(folder / RECIPE)
    except RecipeError:
        return None
    made = record.recipe
    schemes = [None, *sorted(set(made.backbone.values()) & SCHEMES.keys())]
    policies = [None, made.mtp, AUTO] if isinstance(made.mtp, str) else [None, AUTO]
    for scheme in schemes:
        for mtp in policies:
            if _makes(recipe, scheme, mtp, made.whole):
                words = (("--scheme", scheme), ("--mtp", mtp))
                return tuple(word for name, value in words if value for word in (name, value))
    return None


def other_decision(recipe: Recipe, made: Mapping[str, Any]) -> str | None:
    """The first key of `recipe` that the recipe of a record has otherwise; None where both make the same bytes.

    Summary, evaluation and gates change no byte, and what `mtp: auto` has chosen is one of its own outcomes.
    """
    passed_over = _NOT_OF_THE_BYTES | (_CHOSEN if recipe.mtp == AUTO else frozenset())
    told = recipe.model_dump(mode="json", exclude=set(passed_over))
    return next((key for key, value in told.items() if made.get(key) != value), None)


def groups_of(checkpoint: Source, record: Record) -> tuple[ModuleGroup, ...]:
    """Every module group of a checkpoint, backbone first, quantized ones before the others.

    Raises:
        RecipeError: no family table for its model type.
    """
    view = find_view(checkpoint.config, checkpoint.where, checkpoint.entries)
    found: dict[tuple[str, str], list[tuple[str, str, str]]] = defaultdict(list)
    for key, *stored in _stored(RuntimeView(source=checkpoint, view=view), record):
        found[key].append((stored[0], stored[1], stored[2]))
    rows = [
        ModuleGroup(
            part=part,
            modules=modules,
            schemes=_unique(scheme for scheme, _, _ in stored),
            plain=_unique(dtype for _, dtype, _ in stored),
            reasons=_unique(reason for _, _, reason in stored),
            decision=_decision(record, part, modules),
        )
        for (part, modules), stored in found.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.part, not row.schemes, row.modules)))


def _stored(runtime: RuntimeView, record: Record) -> Iterator[tuple[tuple[str, str], str, str, str]]:
    """((part, group), scheme or "", dtype or "" where it has a scheme, why it is kept): each weight and parameter."""
    mtp = record.recipe.mtp
    words = {*record.recipe.backbone.values(), *([mtp] if isinstance(mtp, str) else mtp.values())}
    # One layout serves three schemes, which differ in what vLLM does with activations.
    mx = next((word for word in ("MXFP4", "MXFP4A16") if word in words), "MXFP4A8")
    for module, weight in runtime.weights.items():
        place = runtime.placed.get(module)
        key = ("backbone", "unknown") if place is None else (place.part, place.role)
        scheme = mx if weight.form == "mxfp4" else weight.scheme or ("" if weight.form == "plain" else weight.form)
        yield key, scheme, "" if scheme else weight.weight.dtype, place.row.why_kept if place and not scheme else ""
    for entry in runtime.others:
        place = runtime.placed.get(entry.name)
        key = ("backbone", "unknown") if place is None else (place.part, place.role)
        bias = "a bias, not a matrix" if place and place.leaf == "bias" else ""
        yield key, "", entry.dtype, (place.row.why_kept or bias) if place else ""


def _decision(record: Record, part: str, modules: str) -> str:
    policy = record.recipe.backbone if part == "backbone" else record.recipe.mtp
    if isinstance(policy, str):
        return policy if modules in record.recipe.backbone else ""
    return policy.get(modules, "")


def _makes(recipe: Recipe, scheme: str | None, mtp: str | None, wanted: Mapping[str, Any]) -> bool:
    try:
        made = recipe.with_choices(scheme=scheme, mtp=mtp) if scheme or mtp else recipe
    except RecipeError:
        return False
    return other_decision(made, wanted) is None


def _unique(words: Iterator[str]) -> tuple[str, ...]:
    return tuple(sorted(set(filter(None, words))))
