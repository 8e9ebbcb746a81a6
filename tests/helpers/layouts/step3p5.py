"""Step-3.5-Flash and Step-3.7-Flash as stepfun-ai publishes them.

Names of decoder and MTP layers: Megatron-Bridge's mapping (models/stepfun/step35_bridge.py, with
`model.layers.45.transformer.shared_head.output.weight` bf16 [128896, 4096] quoted from the release
in its PR 5364) and the index that vllm-ascend's weight test spells out: 17 tensors in each of the
layers 45, 46 and 47, attention as in the decoder layers, a dense MLP. Experts are stacked:
`moe.gate_proj.weight` [E, I, K]. Sizes: the release's config as aiconfigurator, sglang-jax and
architecture-encyclopedia quote it. Step-3.7-Flash: the same language model (TensorRT-LLM's
modeling_step3p7.py names its MTP tensors the same way) beside a vision tower, both by the layout
that transformers' convert_step3p7 script quotes from the release.
"""

from tensors import Config, Tensors, embeddings, gated_mlp, linear, norms, under, vectors


def step3p7(config: Config) -> Tensors:
    """Step-3.5's names beside a perception encoder, whose fused `in_proj_weight` is a parameter
    without a module.
    """
    vision, hidden = config["vision_config"], config["text_config"]["hidden_size"]
    width, patch, side = (
        vision["width"],
        vision["patch_size"],
        vision["image_size"] // vision["patch_size"],
    )
    inner = int(vision["mlp_ratio"] * width)
    both = [f"{name}.{leaf}" for name in ("ln_1", "ln_2") for leaf in ("weight", "bias")]
    block = (
        {"attn.in_proj_weight": ("BF16", (3 * width, width))} | vectors(["attn.in_proj_bias"], 3 * width)
        | linear("attn.out_proj", width, width, bias=True) | vectors([*both, "ls_1.gamma", "ls_2.gamma"], width)
        | linear("mlp.c_fc", inner, width, bias=True) | linear("mlp.c_proj", width, inner, bias=True)
    )  # fmt: skip
    tower: Tensors = (
        {
            "conv1.weight": ("BF16", (width, 3, patch, patch)),
            "positional_embedding": ("BF16", (side * side, width)),
            "vit_downsampler1.weight": ("BF16", (2 * width, width, 3, 3)),
            "vit_downsampler2.weight": ("BF16", (4 * width, 2 * width, 3, 3)),
        }
        | vectors(["vit_downsampler1.bias"], 2 * width)
        | vectors(["vit_downsampler2.bias"], 4 * width)
    )
    tower |= vectors(["ln_pre.weight", "ln_pre.bias"], width)
    for layer in range(vision["layers"]):
        tower |= under(f"transformer.resblocks.{layer}.", block)
    return (
        step3p5(config["text_config"]) | under("vision_model.", tower)
        | linear("vit_large_projector", hidden, 4 * width)
    )  # fmt: skip


def step3p5(config: Config) -> Tensors:
    """Three MTP layers behind the decoder layers; heads by layer type; experts of a layer stacked
    in three tensors.
    """
    hidden, num_layers, inner = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config["moe_intermediate_size"],
    )
    count = config["moe_num_experts"]
    moe = under("moe.", (
        linear("gate", count, hidden) | vectors(["router_bias"], count, "F32")
        | {f"{name}_proj.weight": ("BF16", (count, inner, hidden)) for name in ("gate", "up")}
        | {"down_proj.weight": ("BF16", (count, hidden, inner))}
    )) | gated_mlp("share_expert", hidden, config["share_expert_dim"])  # fmt: skip
    dense = gated_mlp("mlp", hidden, config["intermediate_size"])
    sparse_layers = {int(layer) for layer in config["moe_layers_enum"].split(",")}
    tensors = embeddings(config)
    for layer in range(num_layers):
        tensors |= under(
            f"model.layers.{layer}.",
            _block(config, layer) | (moe if layer in sparse_layers else dense),
        )
    for layer in range(num_layers, num_layers + config["num_nextn_predict_layers"]):
        mtp = (
            _block(config, layer)
            | dense
            | norms("enorm hnorm transformer.shared_head.norm", hidden)
        )
        mtp |= linear("eh_proj", hidden, 2 * hidden) | linear(
            "transformer.shared_head.output", config["vocab_size"], hidden
        )
        tensors |= under(f"model.layers.{layer}.", mtp)
    return tensors


def _block(config: Config, layer: int) -> Tensors:
    hidden, other = config["hidden_size"], config["attention_other_setting"]
    is_other = config["layer_types"][layer] == other["attention_type"]
    sizes = other if is_other else config
    heads, groups, head = (
        sizes["num_attention_heads"],
        sizes["num_attention_groups"],
        sizes["head_dim"],
    )
    return under("self_attn.", (
        linear("q_proj", heads * head, hidden) | linear("k_proj", groups * head, hidden)
        | linear("v_proj", groups * head, hidden) | linear("o_proj", hidden, heads * head)
        | linear("g_proj", heads, hidden) | norms("q_norm k_norm", head)
    )) | norms("input_layernorm post_attention_layernorm", hidden)  # fmt: skip


LAYOUTS = {"step3p5": step3p5, "step3p7": step3p7}
