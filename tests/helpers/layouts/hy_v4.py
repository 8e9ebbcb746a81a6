"""Hy4: gated latent attention with a shared sparse index, hyper-connections, stacked experts, MTP
as `mtp_layers.0`.

Names and sizes: transformers 5.17's conversion table from the published names
(conversion_mapping.py, "hy_v4"), which loads this layout without a missing or an unexpected tensor,
and rtp-llm's loader of the release (models/hy_v4.py, backbone and MTP block: `hc_*` only in the
backbone, the MTP block closed by final_layernorm). Only every fourth layer has an indexer of its
own; the MTP layer always has one (vLLM 0.32.0, models/hy_v4/nvidia/attention.py).
"""

from tensors import (
    Config,
    Tensors,
    embeddings,
    gated_mlp,
    linear,
    mla,
    norms,
    under,
    vectors,
)


def hy_v4(config: Config) -> Tensors:
    """Layers with two hyper-connections each, and an MTP layer without them."""
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    inner = config["moe_intermediate_size"]
    own = _attention(config)
    shared = {name: spec for name, spec in own.items() if ".indexer." not in name}
    dense = gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse = under("mlp.", (
        {"gate.weight": ("F32", (experts, hidden))} | vectors(["gate.e_score_correction_bias"], experts, "F32")
        | {"experts.gate_up_proj": ("BF16", (experts, 2 * inner, hidden)),
           "experts.down_proj": ("BF16", (experts, hidden, inner))}
        | gated_mlp("shared_experts", hidden, inner * config["n_shared_experts"])
    ))  # fmt: skip
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    tensors = embeddings(config) | under(
        "model.hc_head.", _hyper_connection(config, "hc_head_", rows=1)
    )
    for layer in range(config["num_hidden_layers"]):
        block = (own if config["indexer_types"][layer] == "full" else shared) | layer_norms
        block |= dense if config["mlp_layer_types"][layer] == "dense" else sparse
        for part in ("attn", "mlp"):
            block |= under(f"hc_{part}_layer.hc_pre.", _hyper_connection(config, "hc_", rows=2))
        tensors |= under(f"model.layers.{layer}.", block)
    mtp = own | sparse | layer_norms | linear("eh_proj", hidden, 2 * hidden) | norms(
        "enorm hnorm final_layernorm", hidden)  # fmt: skip
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.mtp_layers.{index}.", mtp)
    return tensors


def _attention(config: Config) -> Tensors:
    heads = config["num_attention_heads"]
    return (
        mla(config, "bf16") | linear("self_attn.linear_gate", heads * config["v_head_dim"], config["hidden_size"])
        | vectors(["self_attn.learnable_sink_param"], heads, "F32")
    )  # fmt: skip


def _hyper_connection(config: Config, stem: str, *, rows: int) -> Tensors:
    streams = config["hc_mult"]
    return {
        f"{stem}fn": ("F32", (rows * streams, streams * config["hidden_size"])),
        f"{stem}base": ("F32", (rows * streams,)),
        f"{stem}scale": ("F32", (rows,)),
    }


LAYOUTS = {"hy_v4": hy_v4}
