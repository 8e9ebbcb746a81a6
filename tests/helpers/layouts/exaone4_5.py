"""EXAONE 4.5 (LGAI-EXAONE/EXAONE-4.5-33B): dense, vision-language, MTP as `mtp.*`.

Names and shapes outside the MTP block, the tower's too: transformers' save_pretrained. MTP names:
those of K-EXAONE (ggml-org/llama.cpp #21733 gives both one converter), with the norms of this
model's decoder layer, as vLLM's loader takes them. The config: NVIDIA/TensorRT-LLM's fixture of the
release.
"""

from tensors import Config, Published, Tensors, embeddings, gated_mlp, gqa, linear, norms, under

PATTERN = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
EXAONE_33B: Config = {
    "architectures": ["Exaone4_5_ForConditionalGeneration"], "model_type": "exaone4_5", "vocab_size": 153600,
    "image_token_id": 67, "video_token_id": 68, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "exaone4_5_text", "vocab_size": 153600, "hidden_size": 5120, "intermediate_size": 27392,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "sliding_window": 4096, "sliding_window_pattern": "LLLG", "layer_types": PATTERN * 16, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "high_freq_factor": 4.0,
                            "low_freq_factor": 1.0, "original_max_position_embeddings": 8192},
    },
    "vision_config": {
        "model_type": "exaone4_5_vision", "depth": 28, "hidden_size": 2048, "intermediate_size": 5120, "num_heads": 32,
        "num_key_value_heads": 8, "in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 112, "fullatt_block_indexes": [6, 13, 20, 27], "out_hidden_size": 5120, "hidden_act": "silu",
    },
}  # fmt: skip


def exaone4_5(config: Config) -> Tensors:
    """EXAONE 4.5: norms after attention and MLP; the MTP layer is a decoder layer."""
    text = config["text_config"]
    hidden, stem = text["hidden_size"], "model.language_model."
    block = (
        gqa(text, qk_norm=True) | gated_mlp("mlp", hidden, text["intermediate_size"])
        | norms("post_attention_layernorm post_feedforward_layernorm", hidden)
    )  # fmt: skip
    tensors = embeddings(text, f"{stem}embed_tokens", "lm_head", f"{stem}norm") | _vision_tower(
        config["vision_config"]
    )
    for layer in range(text["num_hidden_layers"]):
        tensors |= under(f"{stem}layers.{layer}.", block)
    mtp = linear("fc", hidden, 2 * hidden) | norms(
        "norm pre_fc_norm_embedding pre_fc_norm_hidden", hidden
    )
    for index in range(config["num_nextn_predict_layers"]):
        mtp |= under(f"layers.{index}.", block)
    return tensors | under("mtp.", mtp)


def _vision_tower(vision: Config) -> Tensors:
    hidden, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    heads = vision["num_heads"] + 2 * vision["num_key_value_heads"]
    patches = (hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    tensors = (
        {"patch_embed.proj.weight": ("BF16", patches)} | norms("merger.ln_q", hidden)
        | linear("merger.mlp.0", merged, merged, bias=True)
        | linear("merger.mlp.2", vision["out_hidden_size"], merged, bias=True)
    )  # fmt: skip
    block = (
        linear("attn.qkv", heads * hidden // vision["num_heads"], hidden, bias=True)
        | linear("attn.proj", hidden, hidden, bias=True) | linear("mlp.gate_proj", inner, hidden, bias=True)
        | linear("mlp.up_proj", inner, hidden, bias=True) | linear("mlp.down_proj", hidden, inner, bias=True)
        | norms("norm1 norm2", hidden)
    )  # fmt: skip
    for layer in range(vision["depth"]):
        tensors |= under(f"blocks.{layer}.", block)
    return under("model.visual.", tensors)


MODELS = {"exaone-4.5-33b": EXAONE_33B}
TINY: dict[str, Config] = {
    "exaone4_5": {
        "vocab_size": 512,
        "text_config": {
            "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": PATTERN,
            "max_position_embeddings": 4096,
        },
        "vision_config": {
            "depth": 1, "hidden_size": 512, "intermediate_size": 512, "num_heads": 8, "num_key_value_heads": 4,
            "fullatt_block_indexes": [0], "out_hidden_size": 512,
        },
    },
}  # fmt: skip
LAYOUTS = {"exaone4_5": exaone4_5}
PUBLISHED = {
    "exaone-4.5-33b": Published(
        draft_stem="mtp.layers.0.",
        asks="mtp.fc self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj",
        billions=34,
    ),
}  # fmt: skip
