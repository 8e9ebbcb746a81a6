"""LongCat-Flash-Chat as meituan-longcat publishes it.

Names outside the MTP block: transformers' save_pretrained (LongcatFlashForCausalLM). The MTP block:
the 17 tensors under `model.mtp.` that Atlas lists with their shapes for the sibling
LongCat-Flash-Lite (Avarok-Cybersecurity/atlas PR 746), the names that SGLang's
longcat_flash_nextn.py and vLLM's longcat_flash_mtp.py translate. Sizes: the defaults of
transformers' LongcatFlashConfig, which are those of the release.
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
    vectors,
)

LONGCAT_FLASH: Config = {
    "architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "vocab_size": 131072,
    "hidden_size": 6144, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "num_layers": 28,
    "num_attention_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "attention_bias": False, "attention_method": "MLA",
    "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "n_routed_experts": 512, "moe_topk": 12,
    "routed_scaling_factor": 6.0, "router_bias": False, "zero_expert_num": 256, "zero_expert_type": "identity",
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip

MODELS: dict[str, Config] = {"longcat-flash-chat": LONGCAT_FLASH}
TINY: dict[str, Config] = {
    "longcat_flash": {
        "vocab_size": 512, "hidden_size": 256, "ffn_hidden_size": 512, "expert_ffn_hidden_size": 512, "num_layers": 2,
        "num_attention_heads": 16, "q_lora_rank": 256, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip


def longcat_flash(config: Config) -> Tensors:
    """Decoder layers with every module twice but the experts; one dense MTP layer with its own
    embedding.
    """
    hidden, ffn, vocab = config["hidden_size"], config["ffn_hidden_size"], config["vocab_size"]
    attention = mla(config, "bf16")
    router_rows = config["n_routed_experts"] + config["zero_expert_num"]
    block = under("mlp.", (
        linear("router.classifier", router_rows, hidden)
        | vectors(["router.e_score_correction_bias"], router_rows, "F32")
        | experts("experts", config["n_routed_experts"], hidden, config["expert_ffn_hidden_size"])
    ))  # fmt: skip
    for index in (0, 1):
        block |= {
            name.replace("self_attn", f"self_attn.{index}"): spec
            for name, spec in attention.items()
        }
        block |= gated_mlp(f"mlps.{index}", hidden, ffn)
        block |= norms(f"input_layernorm.{index} post_attention_layernorm.{index}", hidden)
    tensors = embeddings(config)
    for layer in range(config["num_layers"]):
        tensors |= under(f"model.layers.{layer}.", block)
    mtp = (
        attention
        | gated_mlp("transformer_layer.mlp", hidden, ffn)
        | linear("eh_proj", hidden, 2 * hidden)
    )
    mtp |= norms("enorm.m hnorm.m input_layernorm post_attention_layernorm", hidden)
    tensors |= under("model.mtp.", linear("embed_tokens", vocab, hidden) | norms("norm", hidden))
    return tensors | under("model.mtp.layers.0.", mtp)


LAYOUTS = {"longcat_flash": longcat_flash}
MLA = "self_attn.fused_qkv_a_proj self_attn.q_b_proj self_attn.kv_b_proj self_attn.o_proj"
PUBLISHED = {
    "longcat-flash-chat": Published(
        draft_stem="model.layers.4.", asks=f"eh_proj {MLA} mlp.gate_up_proj mlp.down_proj",
        unasked="model.embed_tokens", whole=("eh_proj", "model.embed_tokens"), num_mtp_weights=17, billions=562,
    ),
}  # fmt: skip
