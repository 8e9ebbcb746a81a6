"""GLM-OCR as zai-org publishes it.

Names of decoder and vision layers: transformers' save_pretrained (GlmOcrForConditionalGeneration).
The MTP layer: the release's 16 tensors of `model.language_model.layers.16` with their shapes, as a
CoreML port's notes list them (the same prefix is quoted from the release in vllm PR 49869). Sizes:
from those shapes and transformers' defaults.
"""

from tensors import (
    Config,
    Tensors,
    embeddings,
    gated_mlp,
    gqa,
    linear,
    norms,
    under,
    vectors,
)


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
