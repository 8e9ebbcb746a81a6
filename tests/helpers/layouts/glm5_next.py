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
    experts,
    gated_mlp,
    linear,
    mla,
    norms,
    under,
    vectors,
)  # fmt: skip


def glm5_next(config: Config) -> Tensors:
    """Three delta layers to a sparse one; the MTP layer is sparse and has one residual stream."""
    text = config["text_config"]
    hidden, count = text["hidden_size"], text["num_hidden_layers"]
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    dense, sparse = gated_mlp("mlp", hidden, text["intermediate_size"]), _experts(text)
    delta, latent = _delta_attention(text), mla(text, "bf16") | _pool(text)
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
    return tensors | _vision_tower(config["vision_config"])


def _delta_attention(text: Config) -> Tensors:
    hidden, kda = text["hidden_size"], text["linear_attn_config"]
    heads, head = kda["num_heads"], kda["head_dim"]
    width = heads * head
    tensors = linear("o_proj", hidden, width) | linear("b_proj", heads, hidden)
    for name in "qkv":
        tensors |= linear(f"{name}_proj", width, hidden)
        tensors[f"{name}_conv1d.weight"] = ("BF16", (width, 1, kda["short_conv_kernel_size"]))
    for name in "fg":
        tensors |= linear(f"{name}_a_proj", head, hidden) | linear(f"{name}_b_proj", width, head)
    tensors |= (
        vectors(["A_log"], heads, "F32")
        | vectors(["dt_bias"], width, "F32")
        | norms("o_norm", head)
    )
    return under("self_attn.", tensors)


def _pool(text: Config) -> Tensors:
    return under("self_attn.indexer.", {
        "index_kpool_compress_ape": ("BF16", (text["index_kpool"], text["index_head_dim"])),
        "index_kpool_compress_gate": ("BF16", (text["index_head_dim"], text["hidden_size"])),
    })  # fmt: skip


def _experts(text: Config) -> Tensors:
    hidden, inner, count = (
        text["hidden_size"],
        text["moe_intermediate_size"],
        text["n_routed_experts"],
    )
    return under("mlp.", (
        linear("gate", count, hidden) | vectors(["gate.e_score_correction_bias"], count, "F32")
        | experts("experts", count, hidden, inner)
        | gated_mlp("shared_experts", hidden, inner * text["n_shared_experts"])
    ))  # fmt: skip


def _hyper_connection(part: str, text: Config) -> Tensors:
    streams = text["hc_mult"]
    rows = (2 + streams) * streams
    return {
        f"hc_{part}_fn": ("F32", (rows, streams * text["hidden_size"])),
        f"hc_{part}_base": ("F32", (rows,)),
        f"hc_{part}_scale": ("F32", (3,)),
    }


def _vision_tower(vision: Config) -> Tensors:
    hidden, inner, patch, out = (vision[key] for key in ("hidden_size", "intermediate_size", "patch_size",
                                                         "out_hidden_size"))  # fmt: skip
    merge = vision["spatial_merge_size"]
    patches = (hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    block = (
        linear("attn.qkv", 3 * hidden, hidden, bias=True) | linear("attn.proj", hidden, hidden, bias=True)
        | norms("attn.q_norm attn.k_norm", hidden // vision["num_heads"]) | norms("norm1 norm2", hidden)
        | linear("mlp.gate_proj", inner, hidden, bias=True) | linear("mlp.up_proj", inner, hidden, bias=True)
        | linear("mlp.down_proj", hidden, inner, bias=True)
    )  # fmt: skip
    tensors: Tensors = {"patch_embed.proj.weight": ("BF16", patches)}
    tensors |= vectors(["patch_embed.proj.bias"], hidden) | norms("post_layernorm", hidden)
    tensors |= {"downsample.weight": ("BF16", (out, hidden, merge, merge))} | vectors(
        ["downsample.bias"], out
    )
    tensors |= linear("merger.proj", out, out) | gated_mlp(
        "merger", out, vision["projection_intermediate_size"]
    )
    tensors |= vectors((f"merger.post_projection_norm.{leaf}" for leaf in ("weight", "bias")), out)
    for layer in range(vision["depth"]):
        tensors |= under(f"blocks.{layer}.", block)
    return under("model.visual.", tensors)


LAYOUTS = {"glm5_next": glm5_next}
