"""dots3-note: sparse and sliding-window latent attention, headwise gates, experts; a dense MTP
layer, own embedding.

Names, sizes and the MTP layer's 18 tensors (sliding attention, a dense MLP) beside
`model.mtp.embed_tokens`: what vllm.cpp wrote down of the config and index of
dots-studio/dots3-note-prev, and vLLM 0.32.0's loader of them (models/dots3_note/nvidia).
transformers 5.17 has no class. The towers (`vision_encoder.*`, `audio_encoder.*`) are left out, and
with them their configs.
"""

from tensors import (
    Config,
    Published,
    Tensors,
    embeddings,
    experts,
    gated_mlp,
    linear,
    mla,
    norms,
    under,
    vectors,
)


def _layers(count: int) -> Config:
    full = {0, *range(1, count, 4)}
    kinds = ["full_attention" if layer in full else "sliding_attention" for layer in range(count)]
    return {"num_hidden_layers": count, "layer_types": kinds}


MODELS: dict[str, Config] = {
    "dots3-note-prev": _layers(46) | {
        "architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note", "vocab_size": 152064,
        "hidden_size": 5120, "intermediate_size": 13824, "moe_intermediate_size": 1536, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 1024,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "swa_num_attention_heads": 64, "swa_num_key_value_heads": 64, "swa_q_lora_rank": 1024,
        "swa_kv_lora_rank": 1024, "swa_qk_nope_head_dim": 192, "swa_qk_rope_head_dim": 64, "swa_v_head_dim": 128,
        "swa_rope_theta": 50000.0, "sliding_window_size": 513, "sliding_window": 513,
        "attention_gate_type": "headwise", "swa_attention_gate_type": "headwise", "apply_mla_qkv_lora_rescale": True,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "attention_bias": False, "hidden_act": "silu",
        "max_position_embeddings": 524288, "rope_theta": 80000000.0, "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 1, "mtp_layer_types": ["sliding_attention"], "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
TINY: dict[str, Config] = {
    "dots3_note": _layers(3) | {
        "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_attention_heads": 16, "num_key_value_heads": 16, "swa_num_attention_heads": 16,
        "swa_num_key_value_heads": 16, "q_lora_rank": 256, "swa_q_lora_rank": 256, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 4096,
    },
}  # fmt: skip
PUBLISHED = {
    "dots3-note-prev": Published(
        draft_stem="model.layers.3.", whole=("model.",), num_mtp_weights=19, billions=280, unsaved=True,
        asks="eh_proj self_attn.fused_qkv_a_proj self_attn.q_b_proj self_attn.kv_b_proj " "self_attn.o_proj "
             "self_attn.g_proj mlp.gate_up_proj mlp.down_proj",
        unasked="model.embed_tokens",
    ),
}  # fmt: skip


def dots3_note(config: Config) -> Tensors:
    """The first two layers are sparse, then one in four; all others slide."""
    hidden = config["hidden_size"]
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    own = {
        key.removeprefix("swa_"): value for key, value in config.items() if key.startswith("swa_")
    }
    no_index = {key: value for key, value in config.items() if not key.startswith("index_")}
    full, sliding = _gated(config), _gated(no_index | own)
    dense = gated_mlp("mlp", hidden, config["intermediate_size"])
    inner, count = config["moe_intermediate_size"], config["n_routed_experts"]
    sparse = under("mlp.", (
        linear("gate", count, hidden) | vectors(["gate.e_score_correction_bias"], count, "F32")
        | experts("experts", count, hidden, inner)
        | gated_mlp("shared_experts", hidden, inner * config["n_shared_experts"])
    ))  # fmt: skip
    tensors = embeddings(config)
    for layer in range(config["num_hidden_layers"]):
        block = (
            full if config["layer_types"][layer] == "full_attention" else sliding
        ) | layer_norms
        block |= dense if layer < config["first_k_dense_replace"] else sparse
        tensors |= under(f"model.layers.{layer}.", block)
    mtp = sliding | dense | layer_norms
    mtp |= linear("eh_proj", hidden, 2 * hidden) | norms("enorm hnorm shared_head.norm", hidden)
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.layers.{config['num_hidden_layers'] + index}.", mtp)
    return tensors | linear("model.mtp.embed_tokens", config["vocab_size"], hidden)


def _gated(config: Config) -> Tensors:
    heads = config["num_attention_heads"]
    return mla(config, "bf16") | under("self_attn.", (
        linear("g_proj", heads, config["hidden_size"]) | norms("k_rope_only_layernorm", config["qk_rope_head_dim"])
    ))  # fmt: skip


LAYOUTS = {"dots3_note": dots3_note}
