"""tiny-tools: a smaller Glm4MoeForCausalLM than in `tiny_glm4_moe` that calls tools.

In: nothing but sizes. Out: what `tiny_glm4_moe` gives, with this module's own sizes and text.

Easy to get wrong: only prefix caching with full attention can be combined with drafting on a CPU
(vLLM 0.32), so it is no gated delta net.
"""

import tiny_glm4_moe
import tool_texts
from tiny_glm4_moe import balance, build_mtp, build_target, mtp_from_disk, to_disk
from tool_texts import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE
from transformers import Glm4MoeConfig

__all__ = [
    "TEXT",
    "balance",
    "build_config",
    "build_mtp",
    "build_target",
    "mtp_from_disk",
    "to_disk",
]

COMPUTES_IN_BF16 = False
TEXT = tool_texts
NUM_SHARDS = 1
LEARNING_RATE = 3e-3


def build_config() -> Glm4MoeConfig:
    """The sizes of tiny-glm4-moe, half as wide, with one MoE layer."""
    config = tiny_glm4_moe.build_config()
    config.vocab_size, config.hidden_size, config.intermediate_size = VOCAB_SIZE, 128, 256
    config.num_hidden_layers = 2
    config.num_attention_heads, config.num_key_value_heads = 2, 1
    config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD_ID, BOS_ID, EOS_ID
    return config
