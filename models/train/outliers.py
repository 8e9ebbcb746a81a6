"""Outlier channels, as large models have them: a few of a layer's inputs are many times larger than
the others.

In: a checkpoint's tensors by their names on disk. Out: the same model with other numbers: a norm's
weight is larger in some channels by a power of two, and the columns that read them are smaller by
the same, so what it computes is the same to the bit.

A small model that is trained for minutes has no such channels, and four-bit codes hardly hurt it.
Large ones have them (LLM.int8(), arXiv 2208.07339), and AWQ, SmoothQuant and searches of scales are
made for them.

Easy to get wrong: everything that reads a norm must follow it, the router too.
"""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_LAYER = re.compile(r"(?P<layer>model\.layers\.\d+\.)(?P<part>.+)")
_READERS = {
    "input_layernorm.weight": re.compile(r"self_attn\.[qkv]_proj\.weight"),
    "post_attention_layernorm.weight": re.compile(
        r"mlp\.(gate|((experts\.\d+\.|shared_experts\.)?(gate|up)_proj))\.weight"
    ),
}


def with_outliers(
    tensors: Mapping[str, Tensor], *, channels: Sequence[int], factor: int
) -> dict[str, Tensor]:
    """A copy in which `channels` after the norms of each decoder layer, the MTP block's too, are
    `factor` times larger.

    Args:
        tensors: of a Glm4MoeForCausalLM, experts one by one.
        channels: of the hidden size.
        factor: a power of two.
    """
    matches = {name: match for name in tensors if (match := _LAYER.fullmatch(name))}
    found = dict(tensors)
    for name, norm in matches.items():
        if readers := _READERS.get(norm["part"]):
            scale = torch.ones_like(tensors[name])
            scale[list(channels)] = factor
            found[name] = tensors[name] * scale
            for other, match in matches.items():
                if match["layer"] == norm["layer"] and readers.fullmatch(match["part"]):
                    found[other] = tensors[other] / scale
    return found
