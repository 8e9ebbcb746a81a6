"""NVIDIA-Nemotron-3-Super-120B-A12B-BF16 as nvidia publishes it.

Names of backbone and MTP block: the tensor list of the release that paramcalc's generator reads
(scripts/generate-presets-from-model.js, buildNemotronEntry: every module of `mtp.layers.0` and
`mtp.layers.1` by name, 512 experts), the backbone also as transformers' save_pretrained writes it.
Config: quoted whole in several projects.
"""

from tensors import Config, Tensors, embeddings, linear, norms, under, vectors


def nemotron_h(config: Config) -> Tensors:
    """One mixer a layer, by the letters of the pattern; the MTP layer likewise, glue first and norm
    last.
    """
    hidden, last = config["hidden_size"], len(config["mtp_hybrid_override_pattern"]) - 1
    mixers = {"M": _mamba(config), "*": _attention(config), "E": _experts(config)}
    layers = {
        kind: under("mixer.", mixer) | norms("norm", hidden) for kind, mixer in mixers.items()
    }
    tensors = embeddings(config, "backbone.embeddings", "lm_head", "backbone.norm_f")
    for index, kind in enumerate(config["hybrid_override_pattern"]):
        tensors |= under(f"backbone.layers.{index}.", layers[kind])
    for index, kind in enumerate(config["mtp_hybrid_override_pattern"]):
        first = (
            linear("eh_proj", hidden, 2 * hidden) | norms("enorm hnorm", hidden)
            if index == 0
            else {}
        )
        end = norms("final_layernorm", hidden) if index == last else {}
        tensors |= under(f"mtp.layers.{index}.", layers[kind] | first | end)
    return tensors


def _mamba(config: Config) -> Tensors:
    hidden, heads = config["hidden_size"], config["mamba_num_heads"]
    inner, groups = (
        heads * config["mamba_head_dim"],
        2 * config["n_groups"] * config["ssm_state_size"],
    )
    return (
        linear("in_proj", 2 * inner + groups + heads, hidden) | linear("out_proj", hidden, inner)
        | {"conv1d.weight": ("BF16", (inner + groups, 1, config["conv_kernel"]))}
        | vectors(["conv1d.bias"], inner + groups) | vectors(["A_log", "D", "dt_bias"], heads) | norms("norm", inner)
    )  # fmt: skip


def _attention(config: Config) -> Tensors:
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return (
        linear("q_proj", q, hidden) | linear("k_proj", kv, hidden) | linear("v_proj", kv, hidden)
        | linear("o_proj", hidden, q)
    )  # fmt: skip


def _experts(config: Config) -> Tensors:
    hidden, latent, count = (
        config["hidden_size"],
        config["moe_latent_size"],
        config["n_routed_experts"],
    )
    inner, shared = config["moe_intermediate_size"], config["moe_shared_expert_intermediate_size"]
    tensors = linear("gate", count, hidden) | vectors(
        ["gate.e_score_correction_bias"], count, "F32"
    )
    tensors |= linear("fc1_latent_proj", latent, hidden) | linear("fc2_latent_proj", hidden, latent)
    tensors |= linear("shared_experts.up_proj", shared, hidden) | linear(
        "shared_experts.down_proj", hidden, shared
    )
    for e in range(count):
        tensors |= linear(f"experts.{e}.up_proj", inner, latent) | linear(
            f"experts.{e}.down_proj", latent, inner
        )
    return tensors


LAYOUTS = {"nemotron_h": nemotron_h}
