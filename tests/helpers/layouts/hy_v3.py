"""Hy3 (tencent/Hy3, tencent/Hy3-preview): routed experts, the MTP layer continues the decoder
layers.

Backbone names and shapes: transformers' save_pretrained. MTP names: attention, norms and glue of
layer 80 as listed from the headers of tencent/Hy3@716aa724 (a public survey of its KV cache); its
MLP as in every sparse layer, which gives that index' 47,138 names and 597,572,342,272 bytes
exactly.
"""

from tensors import (
    Config,
    Published,
    Tensors,
    embeddings,
    experts,
    gated_mlp,
    gqa,
    linear,
    norms,
    under,
    vectors,
)

HY3: Config = {
    "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "vocab_size": 120832, "hidden_size": 4096,
    "intermediate_size": 13312, "moe_intermediate_size": 1536, "expert_hidden_dim": 1536, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "qk_norm": True, "num_experts": 192,
    "num_experts_per_tok": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "route_norm": True,
    "router_scaling_factor": 2.826, "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
    "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def hy_v3(config: Config) -> Tensors:
    """Hy3: first layer dense, MTP layer sparse and without copies of embedding and head."""
    hidden, num_layers, inner = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["moe_intermediate_size"],
    )
    block = gqa(config, qk_norm=True) | norms("input_layernorm post_attention_layernorm", hidden)
    dense = block | gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse = block | under("mlp.", (
        linear("router.gate", config["num_experts"], hidden) | vectors(["expert_bias"], config["num_experts"], "F32")
        | experts("experts", config["num_experts"], hidden, inner)
        | gated_mlp("shared_mlp", hidden, inner * config["num_shared_experts"])
    ))  # fmt: skip
    tensors = embeddings(config)
    for layer in range(num_layers):
        tensors |= under(
            f"model.layers.{layer}.", dense if layer < config["first_k_dense_replace"] else sparse
        )
    mtp = (
        sparse
        | linear("eh_proj", hidden, 2 * hidden)
        | norms("enorm hnorm final_layernorm", hidden)
    )
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.layers.{num_layers + index}.", mtp)
    return tensors


MODELS = {"hy3": HY3}
TINY: dict[str, Config] = {
    "hy_v3": {
        "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512,
        "expert_hidden_dim": 512, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
    },
}  # fmt: skip
LAYOUTS = {"hy_v3": hy_v3}
PUBLISHED = {
    "hy3": Published(
        draft_stem="model.layers.3.",
        asks="self_attn.qkv_proj self_attn.o_proj mlp.experts mlp.shared_mlp.gate_up_proj " "mlp.shared_mlp.down_proj",
        unasked="eh_proj mlp.gate", num_mtp_weights=593, billions=298.8,
    ),
}  # fmt: skip
