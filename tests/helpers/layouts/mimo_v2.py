"""MiMo-V2.5 (XiaomiMiMo/MiMo-V2.5): MiMo-V2-Flash's layers, q, k and v in one FP8 tensor, a vision
and an audio tower.

The config: the release's, as a public report on the model quotes it whole. The MTP block: the
header of the release's model_mtp.safetensors, 48 tensors and 1189400448 bytes, which
x3haloed/mimo-prismwing writes down and checks. Rows and scales of qkv_proj in a full and in a
sliding layer: vllm-project/vllm #57508, which quotes [14848, 4096] with [116, 32]; [13568, 4096]
with 108 rows of scales from the layout that it describes. Routers are F32: with that, and 127 bytes
of header for a tensor, the release's 17 files have their 315040382024 bytes. Towers: the 364 names
and the shapes that two ports of the release bind exactly (vision), and the release's audio_config
(audio).
"""

from tensors import Config, Tensors, linear, norms, table, under, vectors

from .mimo_v2_flash import mimo_v2_flash


def mimo_v2(config: Config) -> Tensors:
    """MiMo-V2-Flash's tensors with q, k and v in one, and the towers."""
    tensors: Tensors = {}
    for name, spec in mimo_v2_flash(config).items():
        stem, _, leaf = name.partition("self_attn.q_proj.")
        if leaf == "weight":
            tensors |= under(f"{stem}self_attn.qkv_proj.", _fused(config, stem))
        elif not any(f"self_attn.{part}_proj." in name for part in "qkv"):
            tensors[name] = ("F32", spec[1]) if name.endswith(".mlp.gate.weight") else spec
    return (
        tensors | _vision(config["vision_config"]) | table("mimo_v2.audio", config["audio_config"])
    )


def _fused(config: Config, stem: str) -> Tensors:
    """Slices for `num_key_value_heads` ranks, one after the other, each with blocks of its own."""
    layer = stem.removeprefix("model.layers.").removesuffix(".")
    is_sliding = not layer.isdigit() or config["hybrid_layer_pattern"][int(layer)] == 1
    sizes = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    heads, groups, head, value = (config[f"swa_{size}" if is_sliding else size] for size in sizes)
    count, hidden = config["num_key_value_heads"], config["hidden_size"]
    rows = (heads * head + groups * (head + value)) // count
    scales = (count * -(-rows // 128), -(-hidden // 128))
    return {"weight": ("F8_E4M3", (count * rows, hidden)), "weight_scale_inv": ("F32", scales)}


def _vision(vision: Config) -> Tensors:
    hidden, inner, heads, patch = (
        vision[k] for k in ("hidden_size", "intermediate_size", "num_heads", "patch_size")
    )
    rows, merged = (
        (heads + 2 * vision["num_key_value_heads"]) * 64,
        hidden * vision["spatial_merge_size"] ** 2,
    )
    tensors: Tensors = {
        "patch_embed.proj.weight": (
            "BF16",
            (hidden, 3, vision["temporal_patch_size"], patch, patch),
        ),
        **norms("merger.ln_q", hidden),
        **linear("merger.mlp.0", merged, merged),
        **linear("merger.mlp.2", vision["out_hidden_size"], merged),
    }
    for index in range(vision["depth"]):
        block = (
            norms("norm1 norm2", hidden) | linear("attn.qkv", rows, hidden, bias=True)
            | linear("attn.proj", hidden, heads * 64, bias=True) | linear("mlp.gate_proj", inner, hidden, bias=True)
            | linear("mlp.up_proj", inner, hidden, bias=True) | linear("mlp.down_proj", hidden, inner, bias=True)
        )  # fmt: skip
        if index not in vision["fullatt_block_indexes"]:
            block |= vectors(["attn.sinks"], heads)
        tensors |= under(f"blocks.{index}.", block)
    return under("visual.", tensors)


LAYOUTS = {"mimo_v2": mimo_v2}
