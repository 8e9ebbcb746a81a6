"""Hy4: gated latent attention with a shared sparse index, hyper-connections, stacked experts, MTP
as `mtp_layers.0`.

Names and sizes: transformers 5.17's conversion table from the published names
(conversion_mapping.py, "hy_v4"), which loads this layout without a missing or an unexpected tensor,
and rtp-llm's loader of the release (models/hy_v4.py, backbone and MTP block: `hc_*` only in the
backbone, the MTP block closed by final_layernorm). Only every fourth layer has an indexer of its
own; the MTP layer always has one (vLLM 0.32.0, models/hy_v4/nvidia/attention.py).
"""

from tensors import (
    Config,
    Published,
    Tensors,
    embeddings,
    gated_mlp,
    linear,
    mla,
    norms,
    under,
    vectors,
)


def _indexed(layers: int) -> Config:
    return {
        "num_hidden_layers": layers, "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "layer_types": ["deepseek_sparse_attention"] * layers,
        "indexer_types": ["full" if layer == 0 or layer % 4 == 1 else "shared" for layer in range(layers)],
    }  # fmt: skip


MODELS: dict[str, Config] = {
    "hy4-preview": _indexed(78) | {
        "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "vocab_size": 120832, "hidden_size": 6144,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 64,
        "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.827, "swiglu_limit": 10.0, "index_topk": 2048, "index_head_dim": 128,
        "index_n_heads": 32, "enable_ihc": True, "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6, "gated_mla": True,
        "gating_type": "elementwise", "learnable_sink": True, "enable_lm_head_fp32": True, "attention_bias": False,
        "hidden_act": "silu", "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000}, "num_nextn_predict_layers": 1,
        "pad_token_id": 120002, "bos_token_id": 120000, "eos_token_id": 120025, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
}  # fmt: skip
TINY: dict[str, Config] = {
    "hy_v4": _indexed(3) | {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 256, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "max_position_embeddings": 4096, "pad_token_id": 2, "bos_token_id": 0,
        "eos_token_id": 1,
    },
}  # fmt: skip
PUBLISHED = {
    "hy4-preview": Published(
        draft_stem="model.layers.3.", billions=770, unsaved=True,
        asks="self_attn.fused_qkv_a_proj self_attn.q_b_proj self_attn.kv_b_proj self_attn.o_proj "
             "self_attn.linear_gate self_attn.indexer.wq_b mlp.shared_experts.gate_up_proj "
             "mlp.shared_experts.down_proj",
        unasked="eh_proj mlp.gate self_attn.indexer.wk self_attn.indexer.weights_proj",
    ),
}  # fmt: skip


def hy_v4(config: Config) -> Tensors:
    """Layers with two hyper-connections each, and an MTP layer without them."""
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    inner = config["moe_intermediate_size"]
    own = _attention(config)
    shared = {name: spec for name, spec in own.items() if ".indexer." not in name}
    dense = gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse = under("mlp.", (
        {"gate.weight": ("F32", (experts, hidden))} | vectors(["gate.e_score_correction_bias"], experts, "F32")
        | {"experts.gate_up_proj": ("BF16", (experts, 2 * inner, hidden)),
           "experts.down_proj": ("BF16", (experts, hidden, inner))}
        | gated_mlp("shared_experts", hidden, inner * config["n_shared_experts"])
    ))  # fmt: skip
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    tensors = embeddings(config) | under(
        "model.hc_head.", _hyper_connection(config, "hc_head_", rows=1)
    )
    for layer in range(config["num_hidden_layers"]):
        block = (own if config["indexer_types"][layer] == "full" else shared) | layer_norms
        block |= dense if config["mlp_layer_types"][layer] == "dense" else sparse
        for part in ("attn", "mlp"):
            block |= under(f"hc_{part}_layer.hc_pre.", _hyper_connection(config, "hc_", rows=2))
        tensors |= under(f"model.layers.{layer}.", block)
    mtp = own | sparse | layer_norms | linear("eh_proj", hidden, 2 * hidden) | norms(
        "enorm hnorm final_layernorm", hidden)  # fmt: skip
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.mtp_layers.{index}.", mtp)
    return tensors


def _attention(config: Config) -> Tensors:
    heads = config["num_attention_heads"]
    return (
        mla(config, "bf16") | linear("self_attn.linear_gate", heads * config["v_head_dim"], config["hidden_size"])
        | vectors(["self_attn.learnable_sink_param"], heads, "F32")
    )  # fmt: skip


def _hyper_connection(config: Config, stem: str, *, rows: int) -> Tensors:
    streams = config["hc_mult"]
    return {
        f"{stem}fn": ("F32", (rows * streams, streams * config["hidden_size"])),
        f"{stem}base": ("F32", (rows * streams,)),
        f"{stem}scale": ("F32", (rows,)),
    }


LAYOUTS = {"hy_v4": hy_v4}
