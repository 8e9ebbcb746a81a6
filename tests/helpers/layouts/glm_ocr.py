"""GLM-OCR as zai-org publishes it.

Names of decoder and vision layers: transformers' save_pretrained (GlmOcrForConditionalGeneration).
The MTP layer: the release's 16 tensors of `model.language_model.layers.16` with their shapes, as a
CoreML port's notes list them (the same prefix is quoted from the release in vllm PR 49869). Sizes:
from those shapes and transformers' defaults.
"""

from tensors import (
    Config,
    Published,
    Tensors,
    embeddings,
    gated_mlp,
    gqa,
    linear,
    norms,
    under,
    vectors,
)

GLM_OCR: Config = {
    "architectures": ["GlmOcrForConditionalGeneration"], "model_type": "glm_ocr", "image_token_id": 59280,
    "video_token_id": 59281, "image_start_token_id": 59256, "image_end_token_id": 59257, "video_start_token_id": 59258,
    "video_end_token_id": 59259, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "glm_ocr_text", "vocab_size": 59392, "hidden_size": 1536, "intermediate_size": 4608,
        "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
                            "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False, "dtype": "bfloat16",
    },
    "vision_config": {
        "model_type": "glm_ocr_vision", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16,
        "in_channels": 3, "image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "out_hidden_size": 1536, "hidden_act": "silu", "attention_bias": True, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip

MODELS: dict[str, Config] = {"glm-ocr": GLM_OCR}
TINY: dict[str, Config] = {
    "glm_ocr": {
        # The vision merger is as wide inside as the text model's MLP: three times the hidden size.
        "text_config": {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
        "vision_config": {"depth": 1, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4,
                          "out_hidden_size": 512},
    },
}  # fmt: skip


def glm_ocr(config: Config) -> Tensors:
    """Decoder layers with sandwich norms and a fused gate_up_proj; an MTP layer with copies of
    embedding and head.
    """
    text, stem = config["text_config"], "model.language_model."
    hidden, inner, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    block = (
        gqa(text) | linear("mlp.gate_up_proj", 2 * inner, hidden) | linear("mlp.down_proj", hidden, inner)
        | norms("input_layernorm post_attention_layernorm post_self_attn_layernorm post_mlp_layernorm", hidden)
    )  # fmt: skip
    mtp = (
        block
        | linear("eh_proj", hidden, 2 * hidden)
        | norms("enorm hnorm shared_head.norm", hidden)
    )
    mtp |= linear("embed_tokens", vocab, hidden) | linear("shared_head.head", vocab, hidden)
    tensors = embeddings(text, f"{stem}embed_tokens", "lm_head", f"{stem}norm")
    for layer in range(text["num_hidden_layers"]):
        tensors |= under(f"{stem}layers.{layer}.", block)
    tensors |= under(f"{stem}layers.{text['num_hidden_layers']}.", mtp)
    return tensors | under("model.visual.", _vision(config["vision_config"]))


def _vision(vision: Config) -> Tensors:
    hidden, inner, out, patch = (
        vision[key] for key in ("hidden_size", "intermediate_size", "out_hidden_size", "patch_size")
    )
    merge = vision["spatial_merge_size"]
    block = under("attn.", (
        linear("qkv", 3 * hidden, hidden, bias=True) | linear("proj", hidden, hidden, bias=True)
        | norms("q_norm k_norm", hidden // vision["num_heads"])
    )) | under("mlp.", (
        linear("gate_proj", inner, hidden, bias=True) | linear("up_proj", inner, hidden, bias=True)
        | linear("down_proj", hidden, inner, bias=True)
    )) | norms("norm1 norm2", hidden)  # fmt: skip
    tensors: Tensors = {
        "patch_embed.proj.weight": (
            "BF16",
            (hidden, 3, vision["temporal_patch_size"], patch, patch),
        )
    }
    tensors |= vectors(["patch_embed.proj.bias"], hidden)
    for layer in range(vision["depth"]):
        tensors |= under(f"blocks.{layer}.", block)
    tensors |= {"downsample.weight": ("BF16", (out, hidden, merge, merge))} | vectors(
        ["downsample.bias"], out
    )
    tensors |= norms("post_layernorm", hidden) | linear("merger.proj", out, out)
    tensors |= vectors(
        ["merger.post_projection_norm.weight", "merger.post_projection_norm.bias"], out
    )
    return tensors | gated_mlp("merger", out, out * vision["in_channels"])


LAYOUTS = {"glm_ocr": glm_ocr}
PUBLISHED = {
    "glm-ocr": Published(
        draft_stem="model.layers.3.",
        asks="head self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj", unasked="eh_proj embed_tokens",
        num_mtp_weights=16,
    ),
}  # fmt: skip
