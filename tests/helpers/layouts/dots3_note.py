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
