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
    Tensors,
    embeddings,
    experts,
    gated_mlp,
    linear,
    mla,
    norms,
    under,
)


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
