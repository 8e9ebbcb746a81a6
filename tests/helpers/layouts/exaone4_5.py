"""EXAONE 4.5 (LGAI-EXAONE/EXAONE-4.5-33B): dense, vision-language, MTP as `mtp.*`.

Names and shapes outside the MTP block, the tower's too: transformers' save_pretrained. MTP names:
those of K-EXAONE (ggml-org/llama.cpp #21733 gives both one converter), with the norms of this
model's decoder layer, as vLLM's loader takes them. The config: NVIDIA/TensorRT-LLM's fixture of the
release.
"""

from tensors import Config, Tensors, embeddings, gated_mlp, gqa, linear, norms, table, under


def exaone4_5(config: Config) -> Tensors:
    """EXAONE 4.5: norms after attention and MLP; the MTP layer is a decoder layer."""
    text = config["text_config"]
    hidden, stem = text["hidden_size"], "model.language_model."
    block = (
        gqa(text, qk_norm=True) | gated_mlp("mlp", hidden, text["intermediate_size"])
        | norms("post_attention_layernorm post_feedforward_layernorm", hidden)
    )  # fmt: skip
    tensors = embeddings(text, f"{stem}embed_tokens", "lm_head", f"{stem}norm") | table(
        "exaone4_5.vision_tower", config["vision_config"]
    )
    for layer in range(text["num_hidden_layers"]):
        tensors |= under(f"{stem}layers.{layer}.", block)
    mtp = linear("fc", hidden, 2 * hidden) | norms(
        "norm pre_fc_norm_embedding pre_fc_norm_hidden", hidden
    )
    for index in range(config["num_nextn_predict_layers"]):
        mtp |= under(f"layers.{index}.", block)
    return tensors | under("mtp.", mtp)


LAYOUTS = {"exaone4_5": exaone4_5}
