"""ERNIE 4.5 (baidu/ERNIE-4.5-21B-A3B-PT): routed experts, tied head, one dense MTP layer.

Backbone names and shapes: transformers' save_pretrained. The twelve MTP names: arcee-ai/mergekit,
which lists them for this release (mergekit/architecture/moe_defs.py), and the released index as
quoted in e4b #529. The config: vLLM's and FastDeploy's fixtures of the release; the router in
float32 as transformers keeps it.
"""

from tensors import (
    Config,
    Published,
    Tensors,
    embeddings,
    experts,
    gated_mlp,
    gqa,
    linear,
    norms,
    under,
)

ERNIE_21B: Config = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "vocab_size": 103424,
    "hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 28,
    "num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_num_shared_experts": 2,
    "moe_k": 6, "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "use_bias": False,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def ernie4_5_moe(config: Config) -> Tensors:
    """ERNIE 4.5: MTP as `model.mtp_block.0` with glue and norms beside it; the head is the
    embedding.
    """
    hidden, num_experts, inner = (
        config["hidden_size"],
        config["moe_num_experts"],
        config["moe_intermediate_size"],
    )
    attention = gqa(config | {"head_dim": hidden // config["num_attention_heads"]})
    block = attention | norms("input_layernorm post_attention_layernorm", hidden)
    dense = block | gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse = block | under("mlp.", (
        {"gate.weight": ("F32", (num_experts, hidden))}
        | {"moe_statics.e_score_correction_bias": ("F32", (1, num_experts))}
        | experts("experts", num_experts, hidden, inner)
        | gated_mlp("shared_experts", hidden, inner * config["moe_num_shared_experts"])
    ))  # fmt: skip
    tensors = {name: spec for name, spec in embeddings(config).items() if name != "lm_head.weight"}
    for layer in range(config["num_hidden_layers"]):
        tensors |= under(
            f"model.layers.{layer}.", sparse if layer >= config["moe_layer_start_index"] else dense
        )
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.mtp_block.{index}.", dense)
        tensors |= linear(f"model.mtp_linear_proj.{index}", hidden, 2 * hidden)
        tensors |= norms(f"model.mtp_emb_norm.{index} model.mtp_hidden_norm.{index}", hidden)
    return tensors


MODELS = {"ernie-4.5-21b": ERNIE_21B}
TINY: dict[str, Config] = {
    "ernie4_5_moe": {
        "vocab_size": 512, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2,
        "moe_layer_end_index": 2, "max_position_embeddings": 4096,
    },
}  # fmt: skip
LAYOUTS = {"ernie4_5_moe": ernie4_5_moe}
PUBLISHED = {
    "ernie-4.5-21b": Published(
        draft_stem="model.layers.3.", asks="self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj",
        unasked="model.mtp_linear_proj.0", whole=("model.mtp_",), num_mtp_weights=12, billions=21.8,
    ),
}  # fmt: skip
