"""A draft of its own: the MTP block as a checkpoint that a server loads with its target.

In: a recipe with a word for the block, and the headers of the target. Out: the recipe of a draft,
which has no group of the backbone, so that a plan leaves it out; and the draft as it would be
opened, to be judged before a byte is written.

Easy to get wrong: what a server takes from the draft's files. vLLM 0.32 and 0.33 give it the
target's embedding and head once it is loaded (v1/worker/gpu/spec_decode/eagle/utils.py:
load_eagle_model). With several pipeline stages the embedding is its own, and unfilled where no file
has it. A head that a draft keeps is one of the block's tensors.
"""

from dataclasses import replace

from ...checkpoints.dialects.fp8 import has_blocks
from ...checkpoints.dialects.runtime_view import RuntimeView
from ...checkpoints.source import Source
from ...recipes.blocks import words_of
from ...recipes.conventions import FORMATS
from ...recipes.errors import RecipeError, folded
from ...recipes.frozen import Json
from ...recipes.schema import AUTO, TUNED, Recipe, validated
from ...recipes.schemes import SCHEMES
from .configs import files_of
from .edited_configs import as_written
from .plan import Plan

_NO_BATCHES = "a draft alone has no backbone that could give it batches"


def recipe_of_draft(recipe: Recipe, target: RuntimeView) -> Recipe:
    """The recipe of a block alone, in the dialect of its target where keepmtp writes that one.

    Raises:
        RecipeError: a word for the block that needs batches, which only a backbone gives.
    """
    words = words_of(recipe.mtp)
    for word in words:
        needs_batches = word in (AUTO, TUNED)
        instead = "bf16, source or a scheme that needs no data"
        if word in SCHEMES and SCHEMES[word].needs_calibration:
            needs_batches = True
            instead = SCHEMES[word].data_free
        if needs_batches:
            raise RecipeError(
                "--mtp",
                _NO_BATCHES,
                got=word,
                cure=f"Use {instead}",
            )
    variant = "draft"
    if isinstance(recipe.mtp, str):
        variant = f"draft-{folded(recipe.mtp)}"
    changed: Json = dict.fromkeys(
        ("calibration", "kv_cache", "budget", "backbone_auto", "mtp_auto", "mtp_tuned")
    )
    changed |= {"variant": variant, "backbone": {}, "overrides": (), "keep": ()}
    changed["keeps_config"] = False
    changed["summary"] = f"the MTP block alone, {' and '.join(sorted(words))}"
    if target.dialect.name in FORMATS:
        changed["format"] = target.dialect.name
    elif has_blocks(target.dialect):
        changed["format"] = "fp8"
    return validated(recipe.model_dump() | changed, "--draft-for")


def draft_as_written(plan: Plan) -> Source:
    """The draft's headers and configs, as they will be."""
    config = files_of(plan)["config.json"]
    return replace(as_written(plan), where="the draft", config=config)
