"""Inkling: attention with short convolutions and relative positions, stacked experts, eight dense
MTP blocks.

Names and shapes: transformers 5.17's conversion table from the published names
(conversion_mapping.py, "inkling_mm_model" and "MtpModel": `transformer_block.` around a decoder
layer, `chain_norm` behind all) applied to its classes; sizes are the defaults of its config, which
are those of thinkingmachines/Inkling. Eight MTP blocks and two leading dense layers are those of
Inkling-Small. The towers (`model.visual.*`, `model.audio.*`) are left out, and with them their
configs.
"""

from tensors import Config, Tensors, linear, norms, table, under


def inkling(config: Config) -> Tensors:
    """Five sliding layers to a full one; the MTP blocks are dense."""
    text, mtp = config["text_config"], config["mtp_config"]
    vocab, hidden = text["vocab_size"], text["hidden_size"]
    tensors = linear("model.llm.embed", vocab, hidden) | linear("model.llm.unembed", vocab, hidden)
    tensors |= norms("model.llm.embed_norm model.llm.norm", hidden)
    for layer in range(text["num_hidden_layers"]):
        block = _block(
            text, is_local=layer in text["local_layer_ids"], is_dense=layer < text["dense_mlp_idx"]
        )
        tensors |= under(f"model.llm.layers.{layer}.", block)
    for index in range(mtp["num_nextn_predict_layers"]):
        block = _block(text, is_local=index in mtp["local_layer_ids"], is_dense=True)
        glue = linear("input_proj", hidden, 2 * hidden) | norms("hidden_norm embed_norm", hidden)
        tensors |= under(f"model.mtp.layers.{index}.", under("transformer_block.", block) | glue)
    return tensors | norms("model.mtp.chain_norm", hidden)


def _block(text: Config, *, is_local: bool, is_dense: bool) -> Tensors:
    hidden, kernel = text["hidden_size"], text["sconv_kernel_size"]
    mlp = (
        table("inkling_mm_model.dense", text)
        if is_dense
        else table("inkling_mm_model.experts", text)
    )
    convolutions: Tensors = {
        f"{name}_sconv.weight": ("BF16", (hidden, 1, kernel)) for name in ("attn", "mlp")
    }
    return (
        _attention(text, "swa_" if is_local else "")
        | mlp
        | convolutions
        | norms("attn_norm mlp_norm", hidden)
    )


def _attention(text: Config, kind: str) -> Tensors:
    hidden, head, kernel = text["hidden_size"], text[f"{kind}head_dim"], text["sconv_kernel_size"]
    heads, groups = text[f"{kind}num_attention_heads"], text[f"{kind}num_key_value_heads"]
    extent = text["sliding_window_size"] if kind else text["rel_extent"]
    return under("attn.", (
        linear("wq_du", heads * head, hidden) | linear("wk_dv", groups * head, hidden)
        | linear("wv_dv", groups * head, hidden) | linear("wr_du", heads * text["d_rel"], hidden)
        | linear("wo_ud", hidden, heads * head) | norms("q_norm k_norm", head)
        | {f"{name}_sconv.weight": ("BF16", (groups * head, 1, kernel)) for name in "kv"}
        | {"rel_logits_proj.proj": ("BF16", (text["d_rel"], extent))}
    ))  # fmt: skip


LAYOUTS = {"inkling_mm_model": inkling}
