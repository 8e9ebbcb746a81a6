"""LongCat-Flash-Chat as meituan-longcat publishes it.

Names outside the MTP block: transformers' save_pretrained (LongcatFlashForCausalLM). The MTP block:
the 17 tensors under `model.mtp.` that Atlas lists with their shapes for the sibling
LongCat-Flash-Lite (Avarok-Cybersecurity/atlas PR 746), the names that SGLang's
longcat_flash_nextn.py and vLLM's longcat_flash_mtp.py translate. Sizes: the defaults of
transformers' LongcatFlashConfig, which are those of the release.
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
