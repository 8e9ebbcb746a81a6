"""Ring-2.5-1T and Ling-3.0-flash as inclusionAI publishes them; both are model_type bailing_hybrid.

Ring 2.5: names from Ant's own conversions, AReaL's mcore/bailing_moe_bridge.py and awex's
converter; sizes from the BailingHybridConfig that InclusionAI proposed to transformers for this
checkpoint. Ling 3: names and counts from `BailingMoeV3ForCausalLM` as Ant's Megatron-Bridge port
(models/bailing/bailing_bridge.py) lists them, `model.layers.42` included, and rlx's parity script,
which makes a checkpoint in this naming; sizes from transformers' BailingHybridConfig for this
release. MTP layers: `eh_proj`, `enorm`, `hnorm` and `final_layernorm` by that list, the rest is a
latent-attention layer with experts, as both say; for Ring 2.5 by the same list and vLLM's loader
(bailing_moe_mtp.py).
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
    table,
    under,
    vectors,
)


def bailing_hybrid(config: Config) -> Tensors:
    """The last layer of each group has latent attention, like the MTP layer; the others are linear
    in two ways.
    """
    hidden, num_layers, is_v3 = (
        config["hidden_size"],
        config["num_hidden_layers"],
        "no_kda_lora" in config,
    )
    inner, count = config["moe_intermediate_size"], config["num_experts"]
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    latent, other = (
        _latent(config),
        table("bailing_hybrid.delta", config)
        if is_v3
        else table("bailing_hybrid.lightning", config),
    )
    dense = gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse = under("mlp.", (
        linear("gate", count, hidden) | vectors(["gate.expert_bias"], count, "F32")
        | experts("experts", count, hidden, inner)
        | gated_mlp("shared_experts", hidden, config["moe_shared_expert_intermediate_size"])
    ))  # fmt: skip
    tensors = embeddings(config, embed="model.word_embeddings")
    for layer in range(num_layers):
        attention = latent if (layer + 1) % config["layer_group_size"] == 0 else other
        mlp = dense if layer < config["first_k_dense_replace"] else sparse
        tensors |= under(
            f"model.layers.{layer}.", under("attention.", attention) | mlp | layer_norms
        )
    mtp = (
        under("attention.", latent)
        | sparse
        | layer_norms
        | norms("enorm hnorm final_layernorm", hidden)
    )
    mtp |= linear("eh_proj", hidden, 2 * hidden)
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.layers.{num_layers + index}.", mtp)
    return tensors


def _latent(config: Config) -> Tensors:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    whole = mla(config | {"q_lora_rank": config["q_lora_rank"] or 1}, "bf16")
    attention = {name.removeprefix("self_attn."): spec for name, spec in whole.items()}
    attention["dense.weight"] = attention.pop("o_proj.weight")
    if config["q_lora_rank"] is None:
        attention = {
            name: spec for name, spec in attention.items() if not name.startswith(("q_a_", "q_b_"))
        }
        attention |= linear(
            "q_proj", heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]), hidden
        )
    gate = "gated_attention_proj_granularity_type" in config
    return attention | (linear("g_proj", heads, hidden) if gate else {})


LAYOUTS = {"bailing_hybrid": bailing_hybrid}
