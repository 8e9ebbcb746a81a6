"""Kimi-K3: delta attention with a full-rank gate, gated latent attention, latent experts in MXFP4,
a vision tower.

Names, dtypes and shapes of the backbone: header listings of moonshotai/Kimi-K3 (layers 0 and 11;
A_log padded to 128 heads), of its vision tower and projector those of other converters of the same
files. The release has no MTP layer (`num_nextn_predict_layers` is 0), so this is a checkpoint as
vLLM 0.32.0 and rtp-llm's KimiK3MtpWeight would take one: `model.layers.{N}` with enorm, hnorm,
eh_proj and shared_head.norm, no copies of embedding and head. The quantization config is nested in
text_config as in the release; its entries are written after sglang's tests of it.
"""

from tensors import Config, Tensors, embeddings, gated_mlp, linear, norms, table, under


def kimi_k3(config: Config) -> Tensors:
    """Layer 0 is dense; attention residuals stand in every backbone layer, not in the MTP layer."""
    text = config["text_config"]
    hidden, count = text["hidden_size"], text["num_hidden_layers"]
    layer_norms = norms("input_layernorm post_attention_layernorm", hidden)
    residuals = (
        norms("self_attention_res_norm mlp_res_norm", hidden)
        | linear("self_attention_res_proj", 1, hidden) | linear("mlp_res_proj", 1, hidden)
    )  # fmt: skip
    dense, sparse = (
        gated_mlp("mlp", hidden, text["intermediate_size"]),
        table("kimi_k3.latent_experts", text),
    )
    delta, latent = table("kimi_k3.delta_attention", text), table("kimi_k3.latent_attention", text)
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
    return under("language_model.", tensors) | table(
        "kimi_k3.vision_tower", config["vision_config"], out=hidden
    )


LAYOUTS = {"kimi_k3": kimi_k3}
