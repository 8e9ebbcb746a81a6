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
    experts,
    gated_mlp,
    gqa,
    linear,
    norms,
    under,
    vectors,
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
    sparse = gqa(text, qk_norm=True) | _indexer(text) | _experts(text) | layer_norms
    tensors = embeddings(text, "model.embed_tokens", "lm_head", "model.norm")
    for layer in range(text["num_hidden_layers"]):
        tensors |= under(
            f"model.layers.{layer}.", sparse if text["moe_layer_freq"][layer] else dense
        )
    mtp = linear("eh_proj", hidden, 2 * hidden) | norms("enorm hnorm final_layernorm", hidden)
    mtp |= under("transformer_layer.", sparse)
    for index in range(text["num_mtp_modules"]):
        tensors |= under(f"model.mtp.layers.{index}.", mtp)
    return under("language_model.", tensors) | _vision_tower(
        vision, config["projector_hidden_size"], hidden
    )


def _indexer(text: Config) -> Tensors:
    sparse = text["sparse_attention_config"]
    hidden, head = text["hidden_size"], sparse["sparse_index_dim"]
    return under("self_attn.", (
        linear("index_q_proj", sparse["sparse_num_index_heads"] * head, hidden) | linear("index_k_proj", head, hidden)
        | norms("index_q_norm index_k_norm", head)
    ))  # fmt: skip


def _experts(text: Config) -> Tensors:
    hidden, inner, count = text["hidden_size"], text["intermediate_size"], text["num_local_experts"]
    return under("block_sparse_moe.", (
        {"gate.weight": ("F32", (count, hidden))} | vectors(["e_score_correction_bias"], count, "F32")
        | experts("experts", count, hidden, inner, names="w1 w3 w2")
        | gated_mlp("shared_experts", hidden, text["shared_intermediate_size"])
    ))  # fmt: skip


def _vision_tower(vision: Config, projector: int, out: int) -> Tensors:
    hidden, patch, compression = (
        vision["hidden_size"],
        vision["patch_size"],
        vision["img_token_compression_config"],
    )
    merged = projector * compression["spatial_merge_size"] ** 2
    patches = (hidden, vision["num_channels"], compression["temporal_patch_size"], patch, patch)
    block = under("self_attn.", {
        name: spec for part in ("q_proj", "k_proj", "v_proj", "out_proj")
        for name, spec in linear(part, hidden, hidden, bias=True).items()
    })  # fmt: skip
    block |= linear("mlp.fc1", vision["intermediate_size"], hidden, bias=True)
    block |= linear("mlp.fc2", hidden, vision["intermediate_size"], bias=True)
    block |= vectors(
        (f"layer_norm{i}.{leaf}" for i in (1, 2) for leaf in ("weight", "bias")), hidden
    )
    tower: Tensors = {"embeddings.patch_embedding.weight": ("BF16", patches)}
    tower |= vectors(["pre_layrnorm.weight", "pre_layrnorm.bias"], hidden)
    for layer in range(vision["num_hidden_layers"]):
        tower |= under(f"encoder.layers.{layer}.", block)
    return (
        under("vision_tower.vision_model.", tower)
        | linear("multi_modal_projector.linear_1", projector, hidden, bias=True)
        | linear("multi_modal_projector.linear_2", out, projector, bias=True)
        | linear("patch_merge_mlp.linear_1", projector, merged, bias=True)
        | linear("patch_merge_mlp.linear_2", out, projector, bias=True)
    )


LAYOUTS = {"minimax_m3_vl": minimax_m3}
