"""Rules on shapes, each with its twin: one tensor of another shape."""

import pytest
import releases
from broken_case import case, finds
from checked import check
from checkpoint_files import Checkpoint, as_source, config, reshape, tensor
from good import released
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.validate.facts.findings import errors_of

test_sides_are_those_of_config = finds(
    "shapes",
    case(
        "a stage of DSpark of another width",
        "dspark bf16",
        reshape(r"mtp\.1\.(attn_norm|ffn_norm)\.weight", "n -> 256"),
        reshape(r"mtp\.1\.ffn\.gate\.weight", "e n -> e 256"),
        where="mtp.1.attn_norm.weight",
        says="[256] where config.json says hidden_size=512",
    ),
    case(
        "a convolution of the only layer of its kind",
        "released nemotron-3-super",
        reshape(r"backbone\.layers\.0\.mixer\.conv1d\.weight", "n 1 k -> 1536 1 k"),
        where="backbone.layers.0.mixer.conv1d.weight",
        says="config.json says mamba_num_heads mamba_head_dim + 2 n_groups ssm_state_size=3072",
    ),
    case(
        "heads of the only layer of its kind",
        "released nemotron-3-super",
        reshape(r"backbone\.layers\.0\.mixer\.A_log", "n -> 8"),
        where="backbone.layers.0.mixer.A_log",
    ),
    case(
        "an MTP block of another model, all of it packed but its norms",
        "v3 block",
        reshape(r"model\.layers\.3\.input_layernorm\.weight", "n -> 128"),
        where="model.layers.3.input_layernorm.weight",
    ),
    case(
        "a packed matrix of another width",
        "v3 block",
        tensor("model.layers.3.self_attn.o_proj.weight", "F8_E4M3", 128, 512),
        tensor("model.layers.3.self_attn.o_proj.weight_scale", "F32", 1, 4),
        where="model.layers.3.self_attn.o_proj.weight",
    ),
    case(
        "a sum of sides, in a block that no decoder layer is like",
        "released longcat-flash-chat",
        reshape(r"model\.mtp\.layers\.0\.self_attn\.kv_a_proj_with_mqa\.weight", "n k -> 288 k"),
        where="model.mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight",
        says="kv_lora_rank + qk_rope_head_dim=576",
    ),
    case(
        "heads of an attention that is not the decoder layers'",
        "released minimax-m3",
        reshape(r".*\.mtp\.layers\.0\..*\.k_proj\.weight", "n k -> 256 k"),
        where="language_model.model.mtp.layers.0.transformer_layer.self_attn.k_proj.weight",
        says="num_key_value_heads head_dim=512",
    ),
    case(
        "heads that config.json counts otherwise",
        "glm fp8",
        config("num_attention_heads", 2),
        where="model.layers.0.self_attn.o_proj.weight",
        says="num_attention_heads head_dim=256",
        among=True,
    ),
    case(
        "heads of another width",
        "glm fp8",
        config("head_dim", 32),
        where="model.layers.0.self_attn.q_norm.weight",
        says="head_dim=32",
        among=True,
    ),
    case(
        "the only dense layer, gate",
        "released glm-4.7",
        reshape(r"model\.layers\.0\.mlp\.gate_proj\.weight", "n k -> 64 k"),
        where="model.layers.0.mlp.gate_proj.weight",
    ),
    case(
        "the only dense layer, down",
        "released glm-4.7",
        reshape(r"model\.layers\.0\.mlp\.down_proj\.weight", "n k -> k n"),
        where="model.layers.0.mlp.down_proj.weight",
        says="config.json says hidden_size=256",
        among=True,
    ),
    case(
        "latent attention of another width",
        "v3 nvfp4",
        config("kv_lora_rank", 256),
        where="self_attn.kv_a_proj_with_mqa",
        says="kv_lora_rank + qk_rope_head_dim=320",
        among=True,
    ),
    case(
        "delta nets with other heads",
        "released qwen3.5-397b",
        config("text_config/linear_num_key_heads", 8),
        where="linear_attn",
        says="2 linear_num_key_heads linear_key_head_dim",
        among=True,
    ),
    case(
        "a number that counts nothing",
        "released deepseek-r1",
        config("n_shared_experts", 0),
        where="mlp.shared_experts",
        says="n_shared_experts moe_intermediate_size=0",
        among=True,
    ),
    case(
        "experts that are all half as wide",
        "glm fp8",
        reshape(r".*\.experts\.\d+\.(gate|up)_proj\.weight(_scale)?", "n k -> 64 k"),
        reshape(r".*\.experts\.\d+\.down_proj\.weight", "n k -> n 64"),
        where="experts.0.gate_proj.weight",
        says="config.json says moe_intermediate_size=128",
        among=True,
    ),
    case(
        "the hyper-connections of a head",
        "dsv4 bf16",
        reshape(r"mtp\.0\.hc_head_fn", "n k -> 2 k"),
        where="mtp.0.hc_head_fn",
        says="hc_mult=4",
    ),
    case(
        "a parameter without a module",
        "released inkling",
        reshape(r"model\.mtp\..*rel_logits_proj\.proj", "n k -> k n"),
        where="model.mtp.layers.0.transformer_block.attn.rel_logits_proj.proj",
        says="d_rel=16",
    ),
)


@pytest.mark.parametrize("model", releases.MODELS)
def test_a_release_has_the_sides_of_its_config(model, tmp_path):
    """As wide as it is: sides that are alike in a tiny one are told apart."""
    given, tensors = releases.thin_layout(model)
    source = as_source(Checkpoint(config=given, tensors=dict(tensors)), tmp_path)
    assert "shapes" not in {error.rule for error in errors_of(check(source).findings)}


@pytest.mark.parametrize("model", releases.MODELS)
def test_misshaped_glue_of_every_family(model, tmp_path):
    """What joins the draft to its target: vLLM raises where it is transposed, or lost rows."""
    whole = RuntimeView.of(as_source(released(model), tmp_path))
    glue = list[str]()
    for module, place in whole.placed.items():
        if place.role == "glue" and place.part == "mtp" and place.row.sides:
            glue.append(whole.weights[module].weight.name)
    assert glue
    for name in glue:
        rows, columns = released(model).tensors[name][1]
        for shape in {(columns, rows), (rows // 2, columns)} - {(rows, columns)}:
            broken = released(model)
            broken.tensors[name] = (broken.tensors[name][0], shape)
            # Where a scale fits the weight no more, another rule says it.
            findings = errors_of(check(as_source(broken, tmp_path)).findings)
            assert name.removesuffix("weight") in findings[0].where
            assert len({finding.where for finding in findings}) <= 2


test_likes_are_alike = finds(
    "shapes",
    case(
        "a projection lost half of its rows",
        "released glm-5",
        reshape(r"model\.layers\.1\.self_attn\.indexer\.wk\.weight", "n k -> 64 k"),
        where="model.layers.1.self_attn.indexer.wk.weight",
        says="other layers have",
    ),
    case(
        "a bias of the draft",
        "released glm-4.7",
        reshape(r"model\.layers\.3\.self_attn\.q_proj\.bias", "n -> 128"),
        where="model.layers.3.self_attn.q_proj.bias",
    ),
    case(
        "a latent projection transposed",
        "released deepseek-r1",
        reshape(r"model\.layers\.1\.self_attn\.q_a_layernorm\.weight", "n -> 2 n"),
        where="model.layers.1.self_attn.q_a_layernorm.weight",
    ),
)
