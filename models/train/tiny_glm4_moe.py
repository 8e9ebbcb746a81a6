"""tiny-glm4-moe: a small Glm4MoeForCausalLM with one MTP layer inlined as
`model.layers.{num_hidden_layers}`.

In: nothing but sizes. Out: transformers' own target class, the MTP block with vLLM 0.32's semantics
(glm4_moe_mtp.py), and the tensors under the names GLM-4.5 publishes.

The easy things to get wrong: the token comes first in `eh_proj(cat[enorm(token), hnorm(hidden)])`;
the token embedding is zeroed at position 0; what is fed back for the next draft is the block's
output BEFORE `shared_head.norm`; and on disk the experts are one 2-D tensor each, while
transformers holds them stacked.
"""

from collections.abc import Callable, Iterator

import torch
from texts import BOS_ID, EOS_ID, PAD_ID
from torch import Tensor, nn
from transformers import DynamicCache, Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeDecoderLayer,
    Glm4MoeRMSNorm,
    Glm4MoeRotaryEmbedding,
    Glm4MoeTopkRouter,
)

BALANCE_SPEED = 1e-3


def build_config() -> Glm4MoeConfig:
    """Sizes: every linear is a multiple of 128 wide both ways, so each quantization group size and
    block fits.

    The router is the exception by nature: one row an expert.
    """
    return Glm4MoeConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        initializer_range=0.04,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        num_nextn_predict_layers=1,
        dtype="bfloat16",
    )


class Glm4MoeMTP(nn.Module):
    """The MTP layer, for keepmtp's own `draft_steps`; `embed_tokens` and `shared_head.head` are
    copies of the target's and so live only on disk.
    """

    kind = "full_attention"
    window = None

    def __init__(self, config: Glm4MoeConfig):
        super().__init__()
        self.enorm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Glm4MoeDecoderLayer(config, config.num_hidden_layers)
        self.shared_head_norm = Glm4MoeRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = Glm4MoeRotaryEmbedding(config)

    def forward(
        self,
        embeds_BTH: Tensor,
        hidden_BTH: Tensor,
        positions_T: Tensor,
        mask_TS: Tensor,
        cache: DynamicCache,
    ) -> tuple[Tensor, Tensor]:
        """One draft step. What the head multiplies has `shared_head.norm`, which vLLM applies in
        `compute_logits`, and the next step's state has not.
        """
        embeds_BTH = embeds_BTH.masked_fill((positions_T == 0)[None, :, None], 0.0)
        mixed_BTH = self.eh_proj(
            torch.cat([self.enorm(embeds_BTH), self.hnorm(hidden_BTH)], dim=-1)
        )
        output_BTH = self.block(
            mixed_BTH,
            attention_mask=mask_TS[None, None],
            position_embeddings=self.rotary(mixed_BTH, positions_T[None]),
            past_key_values=cache,
        )
        return self.shared_head_norm(output_BTH), output_BTH


TARGET, MTP = Glm4MoeForCausalLM, Glm4MoeMTP


def balance(target: Glm4MoeForCausalLM, mtp: Glm4MoeMTP) -> Callable[[], None]:
    """What training calls after each optimizer step: it keeps the experts evenly used, as GLM-4.5 is trained.
    It nudges each router's selection bias, and adds no loss.

    Without it one expert can starve, and a starved expert is what calibration-based quantization
    handles worst. The bias `e_score_correction_bias` only chooses experts, it does not weight them,
    so it takes no gradient.
    """
    loads = dict[Glm4MoeTopkRouter, Tensor]()

    def count(router: Glm4MoeTopkRouter, _inputs: object, output: tuple[Tensor, ...]) -> None:
        load_E = torch.bincount(output[2].flatten(), minlength=router.num_experts).float()
        loads[router] = loads.get(router, torch.zeros_like(load_E)) + load_E

    def step() -> None:
        for router, load_E in loads.items():
            router.e_score_correction_bias += BALANCE_SPEED * torch.sign(load_E.mean() - load_E)
        loads.clear()

    for module in (*target.modules(), *mtp.modules()):
        if isinstance(module, Glm4MoeTopkRouter):
            module.register_forward_hook(count)
    return step


def to_disk(target: Glm4MoeForCausalLM, mtp: Glm4MoeMTP) -> dict[str, Tensor]:
    """All tensors of the checkpoint under their published names, BF16 (the selection bias stays
    float32).
    """
    layer = f"model.layers.{target.config.num_hidden_layers}."
    state = dict(target.state_dict())
    for key, tensor in mtp.state_dict().items():
        renamed = key.removeprefix("block.").replace("shared_head_norm.", "shared_head.norm.")
        state[layer + renamed] = tensor
    state[layer + "embed_tokens.weight"] = state["model.embed_tokens.weight"]
    state[layer + "shared_head.head.weight"] = state["lm_head.weight"]
    found = {}
    for key, stored in state.items():
        for name, tensor in _split_experts(key, stored):
            dtype = torch.bfloat16
            if name.endswith("e_score_correction_bias"):
                dtype = torch.float32
            found[name] = tensor.detach().to(dtype).clone()
    return found


def _split_experts(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Stacked [E, ...] expert tensors to one 2-D tensor per expert and projection; anything else
    unchanged.
    """
    prefix, is_expert, rest = key.partition("mlp.experts.")
    if not is_expert:
        yield key, tensor
        return
    for expert, weight in enumerate(tensor):
        stem = f"{prefix}mlp.experts.{expert}."
        if rest == "gate_up_proj":
            gate, up = weight.chunk(2, dim=0)
            yield f"{stem}gate_proj.weight", gate
            yield f"{stem}up_proj.weight", up
        else:
            yield f"{stem}down_proj.weight", weight
