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

from tensors import Config, Tensors, embeddings, gated_mlp, linear, norms, under, vectors


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
