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
    gqa,
    linear,
    norms,
    table,
    under,
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
    return tensors | under("model.visual.", table("glm_ocr.vision", config["vision_config"]))


LAYOUTS = {"glm_ocr": glm_ocr}
