"""Hy3 (tencent/Hy3, tencent/Hy3-preview): routed experts, the MTP layer continues the decoder
layers.

Backbone names and shapes: transformers' save_pretrained. MTP names: attention, norms and glue of
layer 80 as listed from the headers of tencent/Hy3@716aa724 (a public survey of its KV cache); its
MLP as in every sparse layer, which gives that index' 47,138 names and 597,572,342,272 bytes
exactly.
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
)


def hy_v3(config: Config) -> Tensors:
    """Hy3: first layer dense, MTP layer sparse and without copies of embedding and head."""
    hidden, num_layers, inner = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["moe_intermediate_size"],
    )
    block = gqa(config, qk_norm=True) | norms("input_layernorm post_attention_layernorm", hidden)
    dense = block | gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse = block | under("mlp.", (
        linear("router.gate", config["num_experts"], hidden) | vectors(["expert_bias"], config["num_experts"], "F32")
        | experts("experts", config["num_experts"], hidden, inner)
        | gated_mlp("shared_mlp", hidden, inner * config["num_shared_experts"])
    ))  # fmt: skip
    tensors = embeddings(config)
    for layer in range(num_layers):
        tensors |= under(
            f"model.layers.{layer}.", dense if layer < config["first_k_dense_replace"] else sparse
        )
    mtp = (
        sparse
        | linear("eh_proj", hidden, 2 * hidden)
        | norms("enorm hnorm final_layernorm", hidden)
    )
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.layers.{num_layers + index}.", mtp)
    return tensors


LAYOUTS = {"hy_v3": hy_v3}
