"""K-EXAONE (LGAI-EXAONE/K-EXAONE-236B-A23B): routed experts, sliding and full attention, MTP as
`mtp.*`.

Backbone names and shapes: transformers' save_pretrained. MTP names: `mtp.layers.0.*` with `mtp.fc`,
`mtp.norm` and two `mtp.pre_fc_norm_*` shared by all layers, as the makers' converter reads them
(nuxlear in ggml-org/llama.cpp #18543); below `mtp.layers.0` those of a dense decoder layer, from
vLLM's own loader. Sizes: the model card.
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


def exaone_moe(config: Config) -> Tensors:
    """K-EXAONE: first layer dense, MTP layer dense."""
    hidden, num_experts, inner = (
        config["hidden_size"],
        config["num_experts"],
        config["moe_intermediate_size"],
    )
    block = gqa(config, qk_norm=True) | norms("input_layernorm post_attention_layernorm", hidden)
    dense = block | gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse = block | under("mlp.", (
        linear("gate", num_experts, hidden) | vectors(["e_score_correction_bias"], num_experts, "F32")
        | experts("experts", num_experts, hidden, inner)
        | gated_mlp("shared_experts", hidden, inner * config["num_shared_experts"])
    ))  # fmt: skip
    tensors = embeddings(config)
    for layer in range(config["num_hidden_layers"]):
        tensors |= under(
            f"model.layers.{layer}.", dense if layer < config["first_k_dense_replace"] else sparse
        )
    mtp = linear("fc", hidden, 2 * hidden) | norms(
        "norm pre_fc_norm_embedding pre_fc_norm_hidden", hidden
    )
    for index in range(config["num_nextn_predict_layers"]):
        mtp |= under(f"layers.{index}.", dense)
    return tensors | under("mtp.", mtp)


LAYOUTS = {"exaone_moe": exaone_moe}
