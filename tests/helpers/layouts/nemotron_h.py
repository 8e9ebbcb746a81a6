"""NVIDIA-Nemotron-3-Super-120B-A12B-BF16 as nvidia publishes it.

Names of backbone and MTP block: the tensor list of the release that paramcalc's generator reads
(scripts/generate-presets-from-model.js, buildNemotronEntry: every module of `mtp.layers.0` and
`mtp.layers.1` by name, 512 experts), the backbone also as transformers' save_pretrained writes it.
Config: quoted whole in several projects.
"""

from tensors import Config, Published, Tensors, embeddings, linear, norms, under, vectors

NEMOTRON_SUPER: Config = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4096,
    "num_hidden_layers": 88,
    "hybrid_override_pattern":
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False,
    "intermediate_size": 2688, "mlp_bias": False, "mlp_hidden_act": "relu2", "mamba_num_heads": 128,
    "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "expand": 2,
    "use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False, "mamba_hidden_act": "silu",
    "mamba_ssm_cache_dtype": "float32", "n_routed_experts": 512, "n_shared_experts": 1, "num_experts_per_tok": 22,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 5.0, "moe_latent_size": 1024,
    "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "moe_shared_expert_overlap": False,
    "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "max_position_embeddings": 262144, "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip

MODELS: dict[str, Config] = {"nemotron-3-super": NEMOTRON_SUPER}
TINY: dict[str, Config] = {
    "nemotron_h": {
        "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 4, "hybrid_override_pattern": "ME*E",
        "num_attention_heads": 4, "intermediate_size": 512, "mamba_num_heads": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_latent_size": 256, "moe_intermediate_size": 512,
        "moe_shared_expert_intermediate_size": 512, "max_position_embeddings": 4096,
    },
}  # fmt: skip


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
PUBLISHED = {
    "nemotron-3-super": Published(
        draft_stem="mtp.layers.0.",
        asks="eh_proj mixer.qkv_proj mixer.o_proj mtp.layers.1.mixer.experts " "mtp.layers.1.mixer.shared_experts.up_proj "
        "mtp.layers.1.mixer.shared_experts.down_proj mtp.layers.1.mixer.fc1_latent_proj "
        "mtp.layers.1.mixer.fc2_latent_proj",
        unasked="mtp.layers.1.mixer.gate", num_mtp_layers=2, num_mtp_weights=1040, billions=124,
    ),
}  # fmt: skip
