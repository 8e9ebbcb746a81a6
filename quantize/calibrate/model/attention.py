"""Attention without its scores in memory, where a recipe says `attention: sdpa`.

In: a decoder layer or MTP block. Out: the same module, whose attention calls PyTorch's kernel.
Eager attention holds the scores of all heads, sequence_length x sequence_length of each, which grow
with the square of the length.

Easy to get wrong: llm-compressor sets the whole model's config to eager, and the mask is made by
that config. So the model keeps eager, which always makes a mask, and only the attention modules get
a config of their own.

Source: transformers 5.17 integrations/sdpa_attention.py, llm-compressor 0.14.0.1 utils/helpers.py
(`use_eager_attention`).
"""

from copy import deepcopy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ....recipes.errors import RecipeError
from ...plan.plan import Plan


def use_sdpa(module: nn.Module) -> None:
    """Let everything in a layer or block that computes attention do so by PyTorch's kernel."""
    copies: dict[int, Any] = {}
    for each in module.modules():
        config: Any = getattr(each, "config", None)
        if (
            isinstance(each, PreTrainedModel)
            or getattr(config, "_attn_implementation", "sdpa") == "sdpa"
        ):
            continue
        if id(config) not in copies:
            copies[id(config)] = deepcopy(config)
            copies[id(config)]._attn_implementation = "sdpa"
        each.config = copies[id(config)]


def refuse_without_sdpa(model: PreTrainedModel, plan: Plan) -> None:
    """Raises RecipeError for a class whose attention PyTorch's kernel does not compute, such as one
    with sinks.
    """
    calibration = plan.recipe.calibration
    if calibration is not None and calibration.attention == "sdpa" and not model._supports_sdpa:
        rule = (
            "calibration.attention: sdpa needs a class that computes by it, unlike "
            f"{type(model).__name__}"
        )
        cure = "Set attention: eager, or shorter sequences where its scores do not fit"
        raise RecipeError(plan.recipe.name, rule, got="sdpa", cure=cure)
