"""tiny-docs: a Glm4MoeForCausalLM as in `tiny_glm4_moe` that reads Python's documentation, with
outlier channels.

In: nothing but sizes. Out: what `tiny_glm4_moe` gives, with this module's own sizes, text and fresh
weights.

Easy to get wrong: this model must be hard to quantize and hard to draft for. Text that nobody
foresees makes the draft differ from the target, and outlier channels make four-bit codes cost
something; without them no policy is better.
"""

import python_docs
import tiny_glm4_moe
from outliers import with_outliers
from python_docs import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE
from tiny_glm4_moe import Glm4MoeMTP, balance, build_mtp, mtp_from_disk
from torch import Tensor, nn
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

__all__ = [
    "TEXT",
    "balance",
    "build_config",
    "build_mtp",
    "build_target",
    "mtp_from_disk",
    "to_disk",
]

COMPUTES_IN_BF16 = True
TEXT = python_docs
NUM_SHARDS = 2
LEARNING_RATE = 3e-3
EMBEDDING_STD = 0.5
OUTLIER_FACTOR = 16


def build_config() -> Glm4MoeConfig:
    """The sizes of tiny-glm4-moe but for the dense layer and the vocabulary; multiples of 128 for
    the same reason.
    """
    config = tiny_glm4_moe.build_config()
    config.vocab_size, config.intermediate_size = VOCAB_SIZE, 512
    config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD_ID, BOS_ID, EOS_ID
    return config


def build_target(config: Glm4MoeConfig) -> Glm4MoeForCausalLM:
    """The target in float32; a layer adds nothing at first, so that no token is lost in the noise
    of fresh layers.
    """
    target = tiny_glm4_moe.build_target(config)
    for name, parameter in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            nn.init.zeros_(parameter)
    nn.init.normal_(target.model.embed_tokens.weight, std=EMBEDDING_STD)
    return target


def to_disk(target: Glm4MoeForCausalLM, mtp: Glm4MoeMTP) -> dict[str, Tensor]:
    """All tensors under their published names, with the outliers."""
    channels = range(8, target.config.hidden_size, 32)
    return with_outliers(
        tiny_glm4_moe.to_disk(target, mtp), channels=channels, factor=OUTLIER_FACTOR
    )
