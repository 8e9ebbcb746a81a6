"""MiMo-V2-Flash (XiaomiMiMo/MiMo-V2-Flash): FP8 in blocks, sinks on sliding layers, three dense MTP
layers.

Backbone names and shapes: transformers' save_pretrained. MTP names: NVIDIA-NeMo/Megatron-Bridge,
which converts this release (models/mimo_v2_flash/mimo_v2_flash_bridge.py) and counts its layers
from the names; which of them are FP8: the header of MiMo-V2.5's model_mtp.safetensors, the same
block with q, k and v in one tensor. The config: the bridge's fixture, its two layer lists at full
length by transformers' configuration_mimo_v2_flash.py.
"""

from tensors import (
    FP8_128,
    Config,
    Published,
    Tensors,
    embeddings,
    experts,
    gated_mlp,
    linear,
    norms,
    under,
    vectors,
)

FLASH: Config = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 152576,
    "hidden_size": 4096, "intermediate_size": 16384, "moe_intermediate_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7], "moe_layer_freq": [0, *[1] * 47],
    "n_routed_experts": 256, "n_shared_experts": None, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "attention_value_scale": 0.707,
    "attention_bias": False, "sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128,
    "hidden_act": "silu", "max_position_embeddings": 262144, "layernorm_epsilon": 1e-5, "rope_theta": 5000000,
    "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": FP8_128 | {"ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(48)]},
}  # fmt: skip
NUM_MTP_LAYERS = 3


def mimo_v2_flash(config: Config) -> Tensors:
    """MiMo-V2-Flash: first layer dense; MTP layers dense, with sliding attention."""
    hidden, inner, num_experts = (
        config["hidden_size"],
        config["moe_intermediate_size"],
        config["n_routed_experts"],
    )
    dense = gated_mlp("mlp", hidden, config["intermediate_size"], "fp8_scale_inv")
    sparse = under("mlp.", (
        linear("gate", num_experts, hidden) | vectors(["gate.e_score_correction_bias"], num_experts, "F32")
        | experts("experts", num_experts, hidden, inner, "fp8_scale_inv")
    ))  # fmt: skip
    tensors = embeddings(config)
    for layer in range(config["num_hidden_layers"]):
        attention = _attention(config, is_sliding=config["hybrid_layer_pattern"][layer] == 1)
        mlp = sparse if config["moe_layer_freq"][layer] else dense
        layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
        tensors |= under(f"model.layers.{layer}.", attention | mlp | layer_norms)
    mtp = _attention(config, is_sliding=True) | dense | linear("eh_proj", hidden, 2 * hidden)
    mtp |= norms("enorm hnorm input_layernorm pre_mlp_layernorm final_layernorm", hidden)
    for index in range(NUM_MTP_LAYERS):
        tensors |= under(f"model.mtp.layers.{index}.", mtp)
    return tensors


def _attention(config: Config, *, is_sliding: bool) -> Tensors:
    sizes = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    heads, groups, head, value = (config[f"swa_{size}" if is_sliding else size] for size in sizes)
    hidden = config["hidden_size"]
    return under("self_attn.", (
        linear("q_proj", heads * head, hidden, "fp8_scale_inv")
        | linear("k_proj", groups * head, hidden, "fp8_scale_inv")
        | linear("v_proj", groups * value, hidden, "fp8_scale_inv") | linear("o_proj", hidden, heads * value)
        | (vectors(["attention_sink_bias"], heads) if is_sliding else {})
    ))  # fmt: skip


MODELS = {"mimo-v2-flash": FLASH}
TINY: dict[str, Config] = {
    "mimo_v2_flash": {
        "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 8, "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1],
        "n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
        "quantization_config": {"ignored_layers": [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]},
    },
}  # fmt: skip
LAYOUTS = {"mimo_v2_flash": mimo_v2_flash}
PUBLISHED = {
    "mimo-v2-flash": Published(
        draft_stem="model.mtp.layers.0.", asks="self_attn.qkv_proj mlp.gate_up_proj mlp.down_proj",
        unasked="self_attn.o_proj eh_proj", num_mtp_layers=NUM_MTP_LAYERS, num_mtp_weights=42, billions=309,
    ),
}  # fmt: skip
