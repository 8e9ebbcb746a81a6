"""MiniMax-M3: block-sparse attention with an indexer, routed experts, a vision tower, MTP as
`model.mtp.layers.0`.

Names of the backbone and the vision tower: transformers 5.17's conversion table from the published
names (conversion_mapping.py, "minimax_m3_vl"), which loads this layout without a missing or an
unexpected tensor. Names of the MTP block: rtp-llm's loader of the released block
(models/minimax_m3_mtp.py: one module, `transformer_layer.` around a decoder layer, eh_proj in BF16)
and vLLM 0.32.0's own. Router and its bias are float32 (vLLM's model.py).
"""

from tensors import (
    Config,
    Tensors,
    embeddings,
    gated_mlp,
    gqa,
    linear,
    norms,
    table,
    under,
)  # fmt: skip


def minimax_m3(config: Config) -> Tensors:
    """Three dense layers of full attention, then indexed attention and experts, as the MTP block
    has them.
    """
    text, vision = config["text_config"], config["vision_config"]
    hidden = text["hidden_size"]
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    dense = (
        gqa(text, qk_norm=True)
        | gated_mlp("mlp", hidden, text["dense_intermediate_size"])
        | layer_norms
    )
    sparse = (
        gqa(text, qk_norm=True)
        | table("minimax_m3.indexer", text)
        | table("minimax_m3.experts", text)
        | layer_norms
    )
    tensors = embeddings(text, "model.embed_tokens", "lm_head", "model.norm")
    for layer in range(text["num_hidden_layers"]):
        tensors |= under(
            f"model.layers.{layer}.", sparse if text["moe_layer_freq"][layer] else dense
        )
    mtp = linear("eh_proj", hidden, 2 * hidden) | norms("enorm hnorm final_layernorm", hidden)
    mtp |= under("transformer_layer.", sparse)
    for index in range(text["num_mtp_modules"]):
        tensors |= under(f"model.mtp.layers.{index}.", mtp)
    return under("language_model.", tensors) | table(
        "minimax_m3.vision_tower", vision, projector=config["projector_hidden_size"], out=hidden
    )


LAYOUTS = {"minimax_m3_vl": minimax_m3}
