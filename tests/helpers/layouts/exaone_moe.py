"""K-EXAONE (LGAI-EXAONE/K-EXAONE-236B-A23B): routed experts, sliding and full attention, MTP as
`mtp.*`.

Backbone names and shapes: transformers' save_pretrained. MTP names: `mtp.layers.0.*` with `mtp.fc`,
`mtp.norm` and two `mtp.pre_fc_norm_*` shared by all layers, as the makers' converter reads them
(nuxlear in ggml-org/llama.cpp #18543); below `mtp.layers.0` those of a dense decoder layer, from
vLLM's own loader. Sizes: the model card.
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

PATTERN = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
K_EXAONE: Config = {
    "architectures": ["ExaoneMoeForCausalLM"], "model_type": "exaone_moe", "vocab_size": 153600, "hidden_size": 6144,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1,
    "first_k_dense_replace": 1, "mlp_layer_types": ["dense", *["sparse"] * 47], "layer_types": PATTERN * 12,
    "sliding_window": 128, "sliding_window_pattern": "LLLG", "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "hidden_act": "silu", "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def exaone_moe(config: Config) -> Tensors:
    """K-EXAONE: first layer dense, MTP layer dense."""
    hidden, num_experts, inner = (
        config["hidden_size"],
        config["num_experts"],
        config["moe_intermediate_size"],
    )
    block = gqa(config, qk_norm=True) | norms("input_layernorm post_attention_layernorm", hidden)
    dense = block | gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse = block | under("mlp.", (
        linear("gate", num_experts, hidden) | vectors(["e_score_correction_bias"], num_experts, "F32")
        | experts("experts", num_experts, hidden, inner)
        | gated_mlp("shared_experts", hidden, inner * config["num_shared_experts"])
    ))  # fmt: skip
    tensors = embeddings(config)
    for layer in range(config["num_hidden_layers"]):
        tensors |= under(
            f"model.layers.{layer}.", dense if layer < config["first_k_dense_replace"] else sparse
        )
    mtp = linear("fc", hidden, 2 * hidden) | norms(
        "norm pre_fc_norm_embedding pre_fc_norm_hidden", hidden
    )
    for index in range(config["num_nextn_predict_layers"]):
        mtp |= under(f"layers.{index}.", dense)
    return tensors | under("mtp.", mtp)


MODELS = {"k-exaone-236b": K_EXAONE}
TINY: dict[str, Config] = {
    "exaone_moe": {
        "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4,
        "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "layer_types": PATTERN,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
LAYOUTS = {"exaone_moe": exaone_moe}
PUBLISHED = {
    "k-exaone-236b": Published(
        draft_stem="mtp.layers.0.",
        asks="mtp.fc self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj",
        billions=237,
    ),
}  # fmt: skip
