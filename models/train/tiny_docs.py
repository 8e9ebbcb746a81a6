"""What is its own in tiny-docs: first weights, and outlier channels as large models have them, where
a few of a layer's inputs are many times larger than the others.

In: what `tiny_glm4_moe` gives. Out: the same. Its tensors compute the same to the bit: a norm's
weight is larger in some channels by a power of two, and the columns that read them are smaller by
the same.

A small model that is trained for minutes has no such channels, and four-bit codes hardly hurt it.
Large ones have them (LLM.int8(), arXiv 2208.07339), and AWQ, SmoothQuant and searches of scales are
made for them.

Easy to get wrong: everything that reads a norm must follow it, the router too.
"""

import re

import torch
from torch import Tensor, nn
from transformers import Glm4MoeForCausalLM

EMBEDDING_STD = 0.5
OUTLIER_FACTOR = 16
_READERS = {
    "input_layernorm.weight": re.compile(r"self_attn\.[qkv]_proj\.weight"),
    "post_attention_layernorm.weight": re.compile(
        r"mlp\.(gate|((experts\.\d+\.|shared_experts\.)?(gate|up)_proj))\.weight"
    ),
}


def add_nothing_at_first(target: Glm4MoeForCausalLM) -> None:
    """Make each layer add nothing, so that no token is lost in the noise of fresh layers."""
    for name, parameter in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            nn.init.zeros_(parameter)
    nn.init.normal_(target.model.embed_tokens.weight, std=EMBEDDING_STD)


def with_outliers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy in which one of 32 channels after the norms of each decoder layer, the MTP block's
    too, is larger.
    """
    found = dict(tensors)
    for name, weight in tensors.items():
        layer, part = _parted(name)
        if part not in _READERS:
            continue
        scale = torch.ones_like(weight)
        scale[8::32] = OUTLIER_FACTOR
        found[name] = weight * scale
        for other in tensors:
            other_layer, reader = _parted(other)
            if other_layer == layer and _READERS[part].fullmatch(reader):
                found[other] = tensors[other] / scale
    return found


def _parted(name: str) -> tuple[str, str]:
    """The decoder layer's path, and the tensor's in it."""
    parts = name.split(".")
    return ".".join(parts[:3]), ".".join(parts[3:])
