"""MiMo-V2-Flash (XiaomiMiMo/MiMo-V2-Flash): FP8 in blocks, sinks on sliding layers, three dense MTP
layers.

Backbone names and shapes: transformers' save_pretrained. MTP names: NVIDIA-NeMo/Megatron-Bridge,
which converts this release (models/mimo_v2_flash/mimo_v2_flash_bridge.py) and counts its layers
from the names; which of them are FP8: the header of MiMo-V2.5's model_mtp.safetensors, the same
block with q, k and v in one tensor. The config: the bridge's fixture, its two layer lists at full
length by transformers' configuration_mimo_v2_flash.py.
"""

from tensors import (
    Config,
    Tensors,
    embeddings,
    experts,
    gated_mlp,
    linear,
    norms,
    under,
    vectors,
)

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


LAYOUTS = {"mimo_v2_flash": mimo_v2_flash}
