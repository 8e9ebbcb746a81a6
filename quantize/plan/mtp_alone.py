"""The plan of an MTP block alone, for a checkpoint that lacks it.

In: the headers of a release, the config.json of the checkpoint that gets the block, and one word
for it. Out: a `Plan` with the tensors of the block and no others. Decisions, packing and shards are
those of a whole checkpoint.

Easy to get wrong: which config.json. Tensors come from the release, but vLLM names modules by the
config.json of the checkpoint that it serves. Both must call the same tensors the MTP block.
"""

from ...checkpoints.source import Source, view_of
from ...recipes.errors import CheckpointError, RecipeError
from ...recipes.family_view import FamilyView
from ...recipes.schema import AUTO, validated
from ...recipes.schemes import SCHEMES
from .decide import Decisions, added_aliases
from .plan import (
    Plan,
    decided,
    plan_order,
    refuse_missing_mtp,
    refuse_unservable,
    with_separate_mtp,
)


def plan_mtp_alone(source: Source, view: FamilyView, word: str, *, as_released: bool) -> Plan:
    """Decide what becomes of each tensor of a release's MTP block.

    Args:
        source: the release's headers.
        view: the names of the checkpoint that gets the block.
        word: `source`, `bf16` or a scheme that needs no data.
        as_released: every tensor keeps its bytes and its name, scales too.

    Raises:
        RecipeError: another word, or a scheme that a module of the block cannot take.
        CheckpointError: the release has no whole MTP block, or the two name it differently.
    """
    released = view_of(source)
    entries = with_separate_mtp(source, released)
    refuse_missing_mtp(released, source, entries)
    block = [entry for name, entry in entries.items() if released.is_mtp(name)]
    for entry in block:
        if not view.is_mtp(entry.name):
            raise CheckpointError(
                source.where,
                f"both must call {entry.name} a tensor of the MTP block",
                got="another name in the checkpoint",
                cure="Name the release that the checkpoint was made from",
            )
    if word == AUTO:
        raise RecipeError(
            "--mtp",
            "fix measures nothing",
            got=word,
            cure="Say source, bf16 or a scheme; `keepmtp quantize` measures",
        )
    if word in SCHEMES and SCHEMES[word].needs_calibration:
        raise RecipeError(
            "--mtp",
            f"{word} has input scales that only batches give, and fix runs none",
            got=word,
            cure=f"Use {SCHEMES[word].data_free}, which needs no data, or bf16",
        )
    raw = {
        "model": "block",
        "variant": "mtp",
        "default": False,
        "summary": "",
        "family": view.family.model_type,
        "source": source.where,
        "revision": source.revision,
        "backbone": {},
        "mtp": word,
        "calibration": None,
        "keeps_config": as_released,
    }
    recipe = validated(raw, "--mtp")
    tensors = decided(Decisions(recipe, source, view), block)
    tensors += added_aliases(view, entries)
    refuse_unservable(recipe, tensors)
    tensors.sort(key=plan_order)
    # Tools that download a model's files expect `model-` in front of their names.
    return Plan(
        recipe=recipe, source=source, view=view, tensors=tuple(tensors), file_stem="model-mtp"
    )
