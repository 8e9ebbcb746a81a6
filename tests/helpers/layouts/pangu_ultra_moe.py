"""openPangu-Ultra-MoE-718B-V1.1, as vLLM's list of models names it
(openpangu/openPangu-Ultra-MoE-718B-V1.1).

No index of the release was found. Decoder layer: DeepSeek-V3's names plus the sandwich norms
`pre_mlp_layernorm` and `post_mlp_layernorm`, under which vLLM's and omni-infer's classes load them
without renaming. MTP layer: DeepSeek-V3's names, copies of embedding and head included, as
omni-infer's test of PanguUltraMoEMTP feeds them, glue and `shared_head.norm` by vLLM's own list
(openpangu_mtp.py). Sizes: the defaults of Huawei's OpenPanguMoEConfig, under the keys that vLLM
reads.
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
)

PANGU_ULTRA: Config = {
    "auto_map": {"AutoConfig": "configuration_openpangu_moe.PanguUltraMoEConfig"},
    "architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe", "vocab_size": 153600,
    "hidden_size": 7680, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "attention_bias": False,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "sandwich_norm": True, "hidden_act": "silu", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 25600000.0, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip

MODELS: dict[str, Config] = {"openpangu-ultra": PANGU_ULTRA}
TINY: dict[str, Config] = {
    "pangu_ultra_moe": {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": 256, "n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def pangu_ultra_moe(config: Config) -> Tensors:
    """DeepSeek-V3's layout with two norms more a layer and a router without bias."""
    hidden, num_layers, vocab = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["vocab_size"],
    )
    inner, count = config["moe_intermediate_size"], config["n_routed_experts"]
    block = mla(config, "bf16")
    block |= norms(
        "input_layernorm post_attention_layernorm pre_mlp_layernorm post_mlp_layernorm", hidden
    )
    sparse = block | under("mlp.", (
        linear("gate", count, hidden) | experts("experts", count, hidden, inner)
        | gated_mlp("shared_experts", hidden, inner * config["n_shared_experts"])
    ))  # fmt: skip
    dense = block | gated_mlp("mlp", hidden, config["intermediate_size"])
    mtp = (
        sparse
        | linear("eh_proj", hidden, 2 * hidden)
        | norms("enorm hnorm shared_head.norm", hidden)
    )
    mtp |= linear("embed_tokens", vocab, hidden) | linear("shared_head.head", vocab, hidden)
    tensors = embeddings(config)
    for layer in range(num_layers):
        tensors |= under(
            f"model.layers.{layer}.", dense if layer < config["first_k_dense_replace"] else sparse
        )
    return tensors | under(f"model.layers.{num_layers}.", mtp)


LAYOUTS = {"pangu_ultra_moe": pangu_ultra_moe}
MLA = "self_attn.fused_qkv_a_proj self_attn.q_b_proj self_attn.kv_b_proj self_attn.o_proj"
EXPERTS = "mlp.experts mlp.shared_experts.gate_up_proj mlp.shared_experts.down_proj"
PUBLISHED = {
    "openpangu-ultra": Published(
        draft_stem="model.layers.3.", asks=f"shared_head.head {MLA} {EXPERTS}",
        unasked="eh_proj mlp.gate embed_tokens", unsaved=True,
    ),
}  # fmt: skip
