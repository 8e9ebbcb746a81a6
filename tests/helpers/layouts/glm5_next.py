"""GLM-5.3-Flash: delta attention, sparse latent attention without rotation, hyper-connections,
experts, a vision tower.

Names and shapes of the backbone and the vision tower are those of transformers 5.17's
save_pretrained; the tower's 347 tensors are the release's number. The MTP layer is
`model.language_model.layers.45` as converters of the release list
it: 25 tensors beside the routed experts, no hyper-connections, no copies of embedding and head.
This is the BF16 release, zai-org/GLM-5.3-Flash-BF16; zai-org/GLM-5.3-Flash has the same names with
block FP8.
"""

from tensors import (
    Config,
    Tensors,
    embeddings,
    gated_mlp,
    linear,
    mla,
    norms,
    table,
    under,
)  # fmt: skip


def glm5_next(config: Config) -> Tensors:
    """Three delta layers to a sparse one; the MTP layer is sparse and has one residual stream."""
    text = config["text_config"]
    hidden, count = text["hidden_size"], text["num_hidden_layers"]
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    dense, sparse = (
        gated_mlp("mlp", hidden, text["intermediate_size"]),
        table("glm5_next.experts", text),
    )
    delta, latent = (
        table("glm5_next.delta_attention", text),
        mla(text, "bf16") | table("glm5_next.pool", text),
    )
    tensors = embeddings(
        text, "model.language_model.embed_tokens", "lm_head", "model.language_model.norm"
    )
    for layer in range(count):
        block = (
            delta if text["layer_types"][layer] == "linear_attention" else latent
        ) | layer_norms
        block |= dense if text["mlp_layer_types"][layer] == "dense" else sparse
        for part in ("attn", "ffn"):
            block |= _hyper_connection(part, text)
        tensors |= under(f"model.language_model.layers.{layer}.", block)
    mtp = latent | sparse | layer_norms
    mtp |= linear("eh_proj", hidden, 2 * hidden) | norms("enorm hnorm shared_head.norm", hidden)
    for index in range(text["num_nextn_predict_layers"]):
        tensors |= under(f"model.language_model.layers.{count + index}.", mtp)
    return tensors | table("glm5_next.vision_tower", config["vision_config"])


def _hyper_connection(part: str, text: Config) -> Tensors:
    streams = text["hc_mult"]
    rows = (2 + streams) * streams
    return {
        f"hc_{part}_fn": ("F32", (rows, streams * text["hidden_size"])),
        f"hc_{part}_base": ("F32", (rows,)),
        f"hc_{part}_scale": ("F32", (3,)),
    }


LAYOUTS = {"glm5_next": glm5_next}
