"""ERNIE 4.5 (baidu/ERNIE-4.5-21B-A3B-PT): routed experts, tied head, one dense MTP layer.

Backbone names and shapes: transformers' save_pretrained. The twelve MTP names: arcee-ai/mergekit,
which lists them for this release (mergekit/architecture/moe_defs.py), and the released index as
quoted in e4b #529. The config: vLLM's and FastDeploy's fixtures of the release; the router in
float32 as transformers keeps it.
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
)


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


LAYOUTS = {"ernie4_5_moe": ernie4_5_moe}
