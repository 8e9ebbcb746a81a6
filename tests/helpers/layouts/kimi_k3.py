"""Kimi-K3: delta attention with a full-rank gate, gated latent attention, latent experts in MXFP4,
a vision tower.

Names, dtypes and shapes of the backbone: header listings of moonshotai/Kimi-K3 (layers 0 and 11;
A_log padded to 128 heads), of its vision tower and projector those of other converters of the same
files. The release has no MTP layer (`num_nextn_predict_layers` is 0), so this is a checkpoint as
vLLM 0.32.0 and rtp-llm's KimiK3MtpWeight would take one: `model.layers.{N}` with enorm, hnorm,
eh_proj and shared_head.norm, no copies of embedding and head. The quantization config is nested in
text_config as in the release; its entries are written after sglang's tests of it.
"""

import math

from tensors import Config, Published, Tensors, embeddings, gated_mlp, linear, norms, under, vectors


def _layers(count: int) -> Config:
    """Three layers of delta attention, one of latent attention, and so on; the last is latent.
    Counted from 1.
    """
    latent = [layer for layer in range(1, count + 1) if layer % 4 == 0 or layer == count]
    return {
        "num_hidden_layers": count,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, count + 1) if layer not in latent], "full_attn_layers": latent,
            "num_heads": 96 if count > 4 else 16, "head_dim": 128, "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0, "use_full_rank_gate": True,
        },
    }  # fmt: skip


_MXFP4 = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "format": "mxfp4-pack-quantized", "input_activations": None,
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
                        "dynamic": False, "scale_dtype": "torch.uint8"},
        },
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*routed_expert_(down|up)_proj$", "re:.*_res_proj$",
               "re:.*block_sparse_moe\\.gate$", "re:.*mlp\\.(gate|up|gate_up|down)_proj$", "re:.*lm_head$",
               "re:.*\\.head$", "re:.*eh_proj$", "re:vision_tower.*", "re:mm_projector.*"],
}  # fmt: skip
MODELS: dict[str, Config] = {
    "kimi-k3-mtp": {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "torch_dtype": "bfloat16",
        "media_placeholder_token_id": 163605, "tie_word_embeddings": False,
        "text_config": _layers(93) | {
            "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 33792,
            "num_attention_heads": 96, "num_key_value_heads": 96, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
            "mla_use_output_gate": True, "attn_res_block_size": 12, "num_experts": 896, "num_experts_per_token": 16,
            "num_shared_experts": 2, "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584,
            "latent_moe_use_norm": True, "first_k_dense_replace": 1, "moe_layer_freq": 1, "use_grouped_topk": True,
            "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True, "routed_scaling_factor": 1.0,
            "moe_router_activation_func": "sigmoid", "hidden_act": "situ", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5,
            "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "quantization_config": _MXFP4,
        },
        "vision_config": {
            "model_type": "kimi_k3_vision", "patch_size": 14, "init_pos_emb_height": 64, "init_pos_emb_width": 64,
            "vt_hidden_size": 1024, "vt_intermediate_size": 4096, "vt_num_attention_heads": 12,
            "vt_num_hidden_layers": 27, "qkv_hidden_size": 1536, "mm_projector_type": "patchmergerv2",
            "merge_kernel_size": [2, 2],
        },
    },
}  # fmt: skip
TINY: dict[str, Config] = {
    "kimi_k3": {
        # Experts of less than 256 columns a rank are padded by vLLM's class.
        "text_config": _layers(4) | {
            "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 16,
            "num_key_value_heads": 16, "q_lora_rank": 256, "attn_res_block_size": 2, "num_experts": 4,
            "num_experts_per_token": 2, "moe_intermediate_size": 1024, "routed_expert_hidden_size": 128,
            "max_position_embeddings": 4096,
        },
        "vision_config": {"init_pos_emb_height": 4, "init_pos_emb_width": 4, "vt_hidden_size": 128,
                          "vt_intermediate_size": 256, "vt_num_attention_heads": 4, "vt_num_hidden_layers": 1,
                          "qkv_hidden_size": 256},
    },
}  # fmt: skip
PUBLISHED = {
    "kimi-k3-mtp": Published(
        draft_stem="model.layers.4.", unsaved=True,
        asks="self_attn.fused_qkv_a_g_proj self_attn.q_b_proj self_attn.kv_b_proj self_attn.o_proj "
             "block_sparse_moe.shared_experts.gate_up_proj " "block_sparse_moe.shared_experts.down_proj "
             "block_sparse_moe.routed_expert_down_proj block_sparse_moe.routed_expert_up_proj",
        unasked="eh_proj block_sparse_moe.gate",
    ),
}  # fmt: skip


def kimi_k3(config: Config) -> Tensors:
    """Layer 0 is dense; attention residuals stand in every backbone layer, not in the MTP layer."""
    text = config["text_config"]
    hidden, count = text["hidden_size"], text["num_hidden_layers"]
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    residuals = (
        norms("self_attention_res_norm mlp_res_norm", hidden)
        | linear("self_attention_res_proj", 1, hidden) | linear("mlp_res_proj", 1, hidden)
    )  # fmt: skip
    dense, sparse = gated_mlp("mlp", hidden, text["intermediate_size"]), _latent_experts(text)
    delta, latent = _delta_attention(text), _latent_attention(text)
    kda = text["linear_attn_config"]["kda_layers"]
    tensors = (
        embeddings(text)
        | norms("model.output_attn_res_norm", hidden)
        | linear("model.output_attn_res_proj", 1, hidden)
    )
    for layer in range(count):
        block = (delta if layer + 1 in kda else latent) | layer_norms | residuals
        block |= sparse if layer >= text["first_k_dense_replace"] else dense
        tensors |= under(f"model.layers.{layer}.", block)
    mtp = latent | sparse | layer_norms
    mtp |= linear("eh_proj", hidden, 2 * hidden) | norms("enorm hnorm shared_head.norm", hidden)
    for index in range(text["num_nextn_predict_layers"]):
        tensors |= under(f"model.layers.{count + index}.", mtp)
    return under("language_model.", tensors) | _vision_tower(config["vision_config"], hidden)


def _delta_attention(text: Config) -> Tensors:
    hidden, kda = text["hidden_size"], text["linear_attn_config"]
    heads, head = kda["num_heads"], kda["head_dim"]
    width = heads * head
    tensors: Tensors = {}
    for name in "qkvg":
        tensors |= linear(f"{name}_proj", width, hidden)
    for name in "qkv":
        tensors[f"{name}_conv1d.weight"] = ("F32", (width, 1, kda["short_conv_kernel_size"]))
    return under("self_attn.", (
        tensors | linear("b_proj", heads, hidden) | linear("f_a_proj", head, hidden) | linear("f_b_proj", width, head)
        | vectors(["A_log"], 128 * math.ceil(heads / 128), "F32") | vectors(["dt_bias"], width, "F32")
        | vectors(["o_norm.weight"], head, "F32") | linear("o_proj", hidden, width)
    ))  # fmt: skip


def _latent_attention(text: Config) -> Tensors:
    hidden, heads, rope = text["hidden_size"], text["num_attention_heads"], text["qk_rope_head_dim"]
    nope, value, q_rank, kv_rank = (
        text[key] for key in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
    )
    return under("self_attn.", (
        linear("q_a_proj", q_rank, hidden) | norms("q_a_layernorm", q_rank)
        | linear("q_b_proj", heads * (nope + rope), q_rank) | linear("kv_a_proj_with_mqa", kv_rank + rope, hidden)
        | norms("kv_a_layernorm", kv_rank) | linear("kv_b_proj", heads * (nope + value), kv_rank)
        | linear("g_proj", heads * value, hidden) | linear("o_proj", hidden, heads * value)
    ))  # fmt: skip


def _latent_experts(text: Config) -> Tensors:
    hidden, latent, inner = (
        text["hidden_size"],
        text["routed_expert_hidden_size"],
        text["moe_intermediate_size"],
    )
    tensors = (
        linear("gate", text["num_experts"], hidden)
        | vectors(["gate.e_score_correction_bias"], text["num_experts"], "F32")
        | linear("routed_expert_down_proj", latent, hidden) | linear("routed_expert_up_proj", hidden, latent)
        | norms("routed_expert_norm", latent)
        | gated_mlp("shared_experts", hidden, inner * text["num_shared_experts"])
    )  # fmt: skip
    for expert in range(text["num_experts"]):
        for name, n, k in (("w1", inner, latent), ("w3", inner, latent), ("w2", latent, inner)):
            tensors[f"experts.{expert}.{name}.weight_packed"] = ("U8", (n, k // 2))
            tensors[f"experts.{expert}.{name}.weight_scale"] = ("U8", (n, k // 32))
    return under("block_sparse_moe.", tensors)


def _vision_tower(vision: Config, out: int) -> Tensors:
    hidden, patch, qkv = vision["vt_hidden_size"], vision["patch_size"], vision["qkv_hidden_size"]
    inner, merged = vision["vt_intermediate_size"], hidden * math.prod(vision["merge_kernel_size"])
    tower: Tensors = {
        "patch_embed.proj.weight": ("BF16", (hidden, 3, patch, patch)),
        "patch_embed.pos_emb.weight": (
            "BF16", (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden)),
    }  # fmt: skip
    block = (
        linear("wqkv", 3 * qkv, hidden) | linear("wo", hidden, qkv) | linear("mlp.fc0", inner, hidden)
        | linear("mlp.fc1", hidden, inner) | norms("norm0 norm1", hidden)
    )  # fmt: skip
    for layer in range(vision["vt_num_hidden_layers"]):
        tower |= under(f"encoder.blocks.{layer}.", block)
    return (
        under("vision_tower.", tower | norms("encoder.final_layernorm", hidden))
        | linear("mm_projector.proj.0", merged, merged) | linear("mm_projector.proj.2", out, merged)
        | norms("mm_projector.post_norm", out)
    )  # fmt: skip


LAYOUTS = {"kimi_k3": kimi_k3}
