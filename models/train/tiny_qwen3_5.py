"""tiny-qwen3_5: a small dense Qwen3_5ForCausalLM (gated delta net and full attention) with one
`mtp.*` block.

In: nothing but sizes. Out: transformers' own text model, the MTP block with vLLM 0.32's semantics
(qwen3_5_mtp.py), and the tensors under the names Qwen publishes.

The easy things to get wrong: the token comes first in `fc(cat[norm(token), norm(hidden)])`; nothing
is masked at position 0; what is fed back for the next draft is the output AFTER `mtp.norm`; and the
norm weights are zero-centred, so a fresh norm is all zeros and a converter that "fixes" them to
ones breaks the model.
"""

from collections.abc import Callable

import torch
from texts import BOS_ID, EOS_ID, PAD_ID
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

_LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention"]


def build_config() -> Qwen3_5TextConfig:
    """Sizes: every linear is a multiple of 128 wide both ways, except `in_proj_a` and `in_proj_b`
    (one row a head).

    No `mrope_section`: the model is text only, and vLLM's CPU drafter has no M-RoPE path.
    """
    return Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=len(_LAYER_TYPES),
        layer_types=_LAYER_TYPES,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        dtype="bfloat16",
    )


class Qwen3_5MTP(nn.Module):
    """The MTP block, for keepmtp's own `draft_steps`; its attribute names are the published ones,
    `embed_tokens` and `lm_head` are the target's.
    """

    kind = "full_attention"
    window = None

    def __init__(self, config: Qwen3_5TextConfig):
        super().__init__()
        full_attention = config.layer_types.index("full_attention")
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, full_attention)])
        self.norm = Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Qwen3_5TextRotaryEmbedding(config)

    def forward(
        self,
        embeds_BTH: Tensor,
        hidden_BTH: Tensor,
        positions_T: Tensor,
        mask_TS: Tensor,
        cache: DynamicCache,
    ) -> tuple[Tensor, Tensor]:
        """One draft step. The head multiplies the fed-back state itself: `mtp.norm` is inside the
        recursion.
        """
        tokens_BTH = self.pre_fc_norm_embedding(embeds_BTH)
        states_BTH = self.pre_fc_norm_hidden(hidden_BTH)
        mixed_BTH = self.fc(torch.cat([tokens_BTH, states_BTH], dim=-1))
        # The rotary module wants one row of positions per M-RoPE axis; for text the three are
        # equal.
        positions_3BT = positions_T.expand(3, mixed_BTH.shape[0], -1)
        output_BTH = self.layers[0](
            mixed_BTH,
            attention_mask=mask_TS[None, None],
            position_embeddings=self.rotary(mixed_BTH, positions_3BT),
            past_key_values=cache,
        )
        normed_BTH = self.norm(output_BTH)
        return normed_BTH, normed_BTH


TARGET, MTP = Qwen3_5ForCausalLM, Qwen3_5MTP


def balance(_target: Qwen3_5ForCausalLM, _mtp: Qwen3_5MTP) -> Callable[[], None]:
    """What training calls after each optimizer step: nothing, a dense model has no experts to
    balance.
    """
    return lambda: None


def to_disk(target: Qwen3_5ForCausalLM, mtp: Qwen3_5MTP) -> dict[str, Tensor]:
    """All tensors of the checkpoint under their published names, BF16."""
    state = dict(target.state_dict()) | {
        f"mtp.{key}": tensor for key, tensor in mtp.state_dict().items()
    }
    return {name: tensor.detach().to(torch.bfloat16).clone() for name, tensor in state.items()}
