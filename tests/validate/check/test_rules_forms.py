"""Rules on how weights are stored: each against what vLLM builds."""

import re
from functools import partial

import pytest
from broken_case import case, finds, met
from checkpoint_files import (
    Change,
    Checkpoint,
    as_source,
    changed,
    config,
    ignoring,
    lose,
    pack,
    quantization,
    rename,
    reshape,
    retype,
    tensor,
    write,
)
from foreign_form import (
    SAID,
    autoround,
    autoround_mxfp4,
    awq,
    gptq,
    mixed,
    modelopt,
    quark,
    quark_nvfp4,
    w4afp8,
)
from good import ours, outputs_of, plan_of_recipe, released, with_packed
from good_checkpoints import GOOD
from keepmtp.checkpoints.dialects.gptq import ACT_ORDER, read_gptq
from keepmtp.recipes.renamer import Renamer
from keepmtp.recipes.tensor_parallel import Split
from keepmtp.validate.check.check import examine
from real_releases import TABLE, qwen38_fp8, qwen38_nvfp4

INT4 = {"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": True}


test_fused_modules_are_uniform = finds(
    "fused-uniform",
    met(
        "M1 scale of one shard lost",
        "glm fp8",
        lose(r"model\.layers\.1\.self_attn\.k_proj\.weight_scale"),
        where="model.layers.1.self_attn.k_proj.weight",
    ),
    met(
        "R3 one expert left plain",
        "glm nvfp4",
        lose(r"model\.layers\.1\.mlp\.experts\.3\.up_proj\..*"),
        tensor("model.layers.1.mlp.experts.3.up_proj.weight", "BF16", 128, 256),
        where="model.layers.1.mlp.experts.3.up_proj.weight",
    ),
    met(
        "F8 global scale of one shard lost",
        "glm nvfp4",
        lose(r"model\.layers\.1\.self_attn\.v_proj\.weight_global_scale"),
        where="model.layers.1.self_attn.v_proj",
    ),
)


@pytest.mark.parametrize(
    ("split", "refused"),
    [
        (Split(1), ""),
        (Split(2), "experts.0.down_proj"),
        (Split(2, whole_experts=True), ""),
        (Split(8, whole_experts=True), "heads"),
    ],
)
def test_ranks_get_whole_groups(split, refused, tmp_path):
    """Four heads; routed experts of 128 columns, all under one scale a row."""
    source = as_source(outputs_of(plan_of_recipe("glm-4.7.w4a16-fp8")), tmp_path)
    checked = examine(source, splits=[split])
    findings = checked.data.findings
    assert [refused in each.where for each in findings] == [True] * bool(refused)
    for each in findings:
        assert each.rule == "ranks"
        assert each.cure.endswith(
            "loads at TP 1; at 2, 4 with --enable-expert-parallel or W4A16_G32"
        )


test_fused_shards_are_complete = finds(
    "shapes",
    met(
        "M2 expert packed too narrow",
        "glm nvfp4",
        tensor("model.layers.1.mlp.experts.2.down_proj.weight_packed", "U8", 256, 32),
        where="model.layers.1.mlp.experts.2.down_proj.weight_packed",
        says="in silence",
    ),
    met(
        "R15 part blocks inside a fused module",
        "v3 block",
        tensor("model.layers.3.self_attn.q_a_proj.weight", "F8_E4M3", 200, 256),
        tensor("model.layers.3.self_attn.q_a_proj.weight_scale", "F32", 2, 2),
        where="model.layers.3.self_attn.q_a_proj.weight",
        says="validate_fp8_block_shape",
    ),
    case(
        "part blocks of fused modules that need no scale in common",
        "qwen vl native fp8",
        quantization("modules_to_not_convert", ["lm_head", "mtp.fc"]),
        pack(r".*layers\.0\.linear_attn\.in_proj_[ab]", "FP8_BLOCK"),
        rename(r"(.*in_proj_[ab]\.weight_scale)", r"\1_inv"),
        among=True,
        where="linear_attn.in_proj_a.weight",
        says="validate_fp8_block_shape",
    ),
)


test_stored_form_is_what_is_built = finds(
    "config-group",
    met(
        "R7 Quark without layer_type_quant_config",
        "glm quark",
        quantization("layer_type_quant_config", None),
        where="quantization_config",
        says="AttributeError",
    ),
    met(
        "R7 Quark in a scheme that vLLM has not",
        "glm quark",
        quantization("global_quant_config", {"weight": {"dtype": "int3", "qscheme": "per_group"}}),
        where="model.layers.",
        says="no scheme of Quark's",
    ),
    met(
        "R7 AutoRound in groups that vLLM does not load",
        "glm autoround mxfp4",
        quantization("group_size", 16),
        where="quantization_config",
        says="INC supports no mx_fp of 4 bits in groups of 16",
    ),
    met(
        "R7 GPTQ with an order of inputs",
        "glm gptq",
        quantization("desc_act", True),
        where="quantization_config",
        says="desc_act=True",
    ),
    met(
        "F34 half of a fused projection ignored",
        "qwen vl fp8",
        ignoring("language_model.model.layers.0.linear_attn.in_proj_qkv"),
        where="language_model.model.layers.0.linear_attn.in_proj_qkv",
        says="different quantization schemes",
    ),
    met(
        "F27 q_proj ignored, k_proj and v_proj not",
        "next fp8",
        ignoring("mtp.layers.0.self_attn.q_proj"),
        where="mtp.layers.0.self_attn.q_proj",
        says="different quantization schemes",
    ),
    met(
        "F27 the same under modelopt",
        "glm modelopt",
        ignoring("model.layers.2.self_attn.q_proj"),
        where="model.layers.2.self_attn.q_proj",
        says="some but not all shards",
    ),
    met(
        "F27 two parts of a plain qkv excluded by name",
        "glm modelopt",
        ignoring("model.layers.12.self_attn.q_proj", "model.layers.12.self_attn.k_proj"),
        where="model.layers.12.self_attn.q_proj",
        says="some but not all shards",
    ),
    met(
        "R2 expert projections in two schemes",
        "glm w4a16",
        ignoring(r"re:^model\.layers\.3\.mlp\.experts\.\d+\.down_proj"),
        where="re:^model",
    ),
    met(
        "M10 FP8 blocks without input_activations",
        "v3 block",
        quantization("config_groups/*/input_activations", None),
        where="re:^",
        says="is_static_input_scheme",
    ),
    met(
        "Fp3 FP8 experts without input_activations",
        "glm fp8",
        quantization("config_groups/*/input_activations", None),
        where="Linear",
        says="only format: pack-quantized",
    ),
    case(
        "groups of which channels are named one by one",
        "glm w4a16",
        quantization("config_groups/*/weights/actorder", "group"),
        says="activation ordering is no longer supported",
        cure="actorder: static",
        among=True,
    ),
    case(
        "no target for the gate that experts lack",
        partial(ours, "nemotron-3-super", "FP8_DYNAMIC"),
        quantization("config_groups/*/targets", [r"re:.*experts\.\d+\.\w+_proj$"]),
        says="All MoE projections need to have same quantization scheme",
        cure="Name all projections",
        among=True,
    ),
    case(
        "a form that vLLM cannot read either",
        "glm quark",
        quantization(
            "global_quant_config",
            {"weight": INT4},
        ),
        quantization("export", None),
        says="export key",
    ),
    case(
        "one entry for a part of every layer",
        partial(
            autoround, extra_config={r".*layers\.3\..*": {"bits": 16}, ".*q_proj": {"bits": 8}}
        ),
        where=".*q_proj",
        count=3,
    ),
    case(
        "no group with inputs",
        "v3 block",
        quantization("config_groups/*/input_activations", None),
        found=[{"count": 24}, {"count": 3}],
    ),
)


test_compare_plain_with_packed = finds(
    "form",
    met(
        "F11 exclude misses mtp.fc",
        "next modelopt fp8",
        ignoring("mtp.layers.0*", without="^mtp"),
        where="mtp.fc.weight",
        says="in silence",
    ),
    case(
        "#51758 the list has DSpark's stages, and its projection of the context",
        "dspark block",
        ignoring("model.context_wkv_proj"),
        where="mtp.0.attn.wkv.weight",
        says="builds model.context_wkv_proj plain",
        among=True,
    ),
    met(
        "F13 target Linear takes mtp.fc",
        "qwen vl fp8",
        ignoring(without=r"^mtp\.fc$"),
        where="mtp.fc.weight",
    ),
    met(
        "F14 experts of the draft not ignored",
        "qwen vl moe nvfp4",
        ignoring(without=r"mtp\..*\.experts"),
        where="mtp.layers.0.mlp.experts.0.",
        says="in silence",
    ),
    met(
        "F14 ignore names the fused experts",
        "next nvfp4",
        ignoring("mtp.layers.0.mlp.experts", without=r"mtp\..*\.experts"),
        where="mtp.layers.0.mlp.experts.0.",
    ),
    met(
        "F17 names of another space",
        "lite fp8",
        ignoring("re:.*mtp_block.*", without=r"^model\.layers\.3\."),
        where="model.layers.3.",
        says="in silence",
    ),
    met(
        "F18 V4 draft inherits the main scheme",
        "dsv4 published",
        ignoring(without=r"layers\\\.3"),
        quantization("config_groups/*/targets", ["Linear"]),
        where="mtp.0.",
    ),
    met(
        "H1 ignore by name on disk, seen by its effect",
        "dsv4 published",
        ignoring(without=r"layers\\\.3"),
        where="mtp.0.",
    ),
    met(
        "G6 mimo by name on disk",
        "mimo fp8",
        ignoring(r"re:^model\.mtp_layers\.", without="layers"),
        where="model.mtp_layers.0.",
        says="in silence",
    ),
    met(
        "G6 mimo by name on disk, packed",
        "mimo w4a16",
        quantization("config_groups/*/targets", ["Linear"]),
        ignoring(r"re:^model\.mtp_layers\.", without="layers"),
        where="model.mtp_layers.0.",
        says="raises",
    ),
    met(
        "M4 native FP8, plain draft not ignored",
        "v3 native bf16 mtp",
        quantization("ignored_layers", None),
        where="model.layers.3.",
        says="in silence",
    ),
    met("F20 quark without exclude", quark, where="model.layers.3.", says="in silence"),
    met(
        "F20 Quark's NVFP4 without exclude (vllm #49187)",
        quark_nvfp4,
        where="model.layers.3.",
        says="as nvfp4_modelopt",
    ),
    met(
        "F15 AutoRound's MXFP4 without an exception",
        autoround_mxfp4,
        where="model.layers.3.",
        says="as mxfp4",
    ),
    met(
        "F15 GPTQ without exception",
        partial(gptq, dynamic={}),
        where="model.layers.3.mlp.experts.",
        says="in silence",
    ),
    met(
        "F16 an expression with + excepts nothing",
        partial(gptq, "qwen3.5-397b", dynamic={"+:.*mtp.*": {"bits": 4}}),
        where="mtp.layers.0.mlp.experts.",
        says="by the entry '.*mtp.*'",
    ),
    met("F15 AWQ without a list", awq, where="model.layers.3.mlp.experts."),
    met(
        "F26 AutoRound names each expert",
        partial(
            autoround,
            "qwen3-next-80b",
            extra_config={
                ".*in_proj_ba": {"bits": 16},
                r"mtp\.fc": {"bits": 16},
                "mtp.*attn.*": {"bits": 16},
                "mtp.*shared_expert.*": {"bits": 16},
                r"mtp.*\.experts\.0\..*": {"bits": 16},
                r"mtp.*\.experts\.1\..*": {"bits": 16},
                r"mtp.*\.experts\.2\..*": {"bits": 16},
                r"mtp.*\.experts\.3\..*": {"bits": 16},
            },
        ),
        where="mtp.layers.0.mlp.experts.",
    ),
    met(
        "F34 vision tower reached by Linear",
        "qwen vl fp8",
        ignoring(without="visual"),
        where="model.visual.",
        says="Linear",
    ),
    case(
        "experts that no entry excepts",
        "next nvfp4",
        ignoring(without=r"\.experts\."),
        where="mtp.layers.0.mlp.experts.0.",
        count=12,
        cure=r"re:^mtp\.",
    ),
    case(
        "plain experts beside packed ones in groups that Marlin does not have",
        partial(gptq, dynamic={r"-:^model\.layers\.3\.": {}}),
        quantization("group_size", 256),
        where="model.layers.3.mlp.experts.",
        cure="Quantize again in groups of 128: in other groups no entry excepts experts",
        among=True,
    ),
)


test_compare_packed_with_plain = finds(
    "form",
    met(
        "R2 AWQ's list is made of the names of parameters",
        partial(awq, "qwen3.5-27b"),
        where="linear_attn.in_proj_qkv.qweight",
        says="plain (by the entry 'language_model.model.layers.0.",
    ),
    met(
        "F35 packed although ignored",
        "next nvfp4",
        pack(r"mtp\.layers\.0\.self_attn\.o_proj", "NVFP4"),
        where="mtp.layers.0.self_attn.o_proj.weight_packed",
        says="builds mtp.layers.0.self_attn.o_proj plain",
    ),
    met(
        "F28 experts quantized, everything ignored",
        "next fp8",
        ignoring(r"re:^mtp\."),
        where="mtp.layers.0.",
    ),
    met(
        "F25 missing from quantized_layers",
        "glm mixed",
        quantization("quantized_layers/model.layers.1.self_attn.o_proj", None),
        where="model.layers.1.self_attn.o_proj.weight",
    ),
    met(
        "F42 a copy of the head in 4 bits",
        "glm fp8",
        pack(r"model\.layers\.3\.shared_head\.head", "NVFP4"),
        where="model.layers.3.shared_head.head.weight_packed",
        says="in silence",
    ),
    met(
        "F42 a copy of the head that is too short",
        "glm fp8",
        tensor("model.layers.3.shared_head.head.weight", "F8_E4M3", 256, 256),
        where="model.layers.3.shared_head.head.weight",
    ),
    met(
        "F29 head packed, read as plain",
        "glm nvfp4",
        pack("lm_head", "NVFP4"),
        where="lm_head.weight_packed",
    ),
    met(
        "G1 targets in other names of the experts",
        "dsv4 published",
        quantization(
            "config_groups/group_1/targets", [r"re:.*\.experts\.\d+\.(gate|up|down)_proj$"]
        ),
        where="layers.0.ffn.experts.0.w1.weight_packed",
        says="no target matches",
    ),
    met(
        "G2 target without the fused name",
        "dsv4 published",
        quantization("config_groups/group_0/targets", [r"re:.*\.attn\.(wq_a|wq_b|wo_a|wo_b)$"]),
        where="layers.0.attn.wkv.weight",
    ),
    met(
        "R2 modelopt substring takes layers 10 and 11",
        "glm modelopt",
        ignoring("model.layers.1"),
        where="model.layers.1.",
        says="by the entry 'model.layers.1'",
    ),
    met(
        "R2 no quantization config at all",
        "glm nvfp4",
        config("quantization_config", None),
        where="model.layers.0.",
        says="no quantization_config",
    ),
    met(
        "R7 an algorithm of experts for linears",
        partial(mixed, "glm-4.7", "FP8_BLOCK"),
        quantization("quantized_layers/*/quant_algo", "FP8_BLOCK_SCALES"),
        where="model.layers.0.",
        says="plain",
    ),
    met(
        "R7 mixed FP8 a channel of experts",
        partial(mixed, "glm-4.7", "FP8_DYNAMIC"),
        where="model.layers.1.mlp.experts.0.",
        says="builds model.layers.1.mlp.experts plain",
    ),
    met(
        "F12 mtp.fc packed under modelopt NVFP4",
        "qwen vl modelopt",
        tensor("mtp.fc.weight", "U8", 256, 256),
        tensor("mtp.fc.weight_scale", "F8_E4M3", 256, 32),
        tensor("mtp.fc.weight_scale_2", "F32"),
        tensor("mtp.fc.input_scale", "F32"),
        where="mtp.fc.weight",
        says="without quantization",
    ),
    # sglang #38870 has packed MTP experts beside a plain rest: one name below the experts is enough.
    case(
        "one name below the experts makes all of them plain",
        partial(quark_nvfp4, mtp="NVFP4", exclude=["model.layers.3.mlp.experts.0.gate_proj"]),
        where="model.layers.3.mlp.experts.0.down_proj.weight",
        cure="Narrow the entry 'model.layers.3.mlp.experts.0.gate_proj'",
    ),
)


test_compare_two_packed_forms = finds(
    "form",
    met(
        "R2 GPTQ in 8 bits by an expression, in 4 on disk",
        "glm gptq",
        quantization(r"dynamic/+:.*\.layers\.1\..*", {"bits": 8}),
        where="model.layers.1.",
        says="where",
    ),
    met(
        "R7 g_idx in a loader that knows none",
        partial(gptq, mtp="W4A16", dynamic={}),
        where="model.layers.3.",
        says="in silence",
    ),
    met(
        "M1 scale of a lone module lost",
        "glm fp8",
        lose(r"model\.layers\.1\.self_attn\.o_proj\.weight_scale"),
        where="model.layers.1.self_attn.o_proj.weight_scale",
        says="uninitialised in silence",
    ),
    met(
        "Fp7 input scales lost",
        "glm modelopt",
        lose(r"model\.layers\.2\.self_attn\.o_proj\.input_scale"),
        where="model.layers.2.self_attn.o_proj.input_scale",
    ),
    met(
        "R7 FP8 blocks of experts under modelopt",
        partial(modelopt, "glm-4.7", "FP8_BLOCK"),
        where="model.layers.1.mlp.experts.0.",
        says="as fp8_tensor",
    ),
    met(
        "R7 FP8 a channel of experts under modelopt",
        partial(modelopt, "qwen3-next-80b", "FP8_DYNAMIC"),
        where="model.layers.0.mlp.experts.0.",
        says="as fp8_tensor",
    ),
    met(
        "R7 modelopt's names for experts in mixed blocks",
        "glm mixed blocks",
        rename(r"(.*\.experts\..*)\.weight_scale_inv", r"\1.weight_scale"),
        where="model.layers.1.mlp.experts.0.down_proj.weight_scale",
        says="has no place",
    ),
    met(
        "F24 bare .scale under compressed-tensors",
        "v3 block",
        rename(r"(model\.layers\.3\.self_attn\.o_proj)\.weight_scale", r"\1.scale"),
        where="model.layers.3.self_attn.o_proj.scale",
    ),
    met(
        "Fp5 _inv under compressed-tensors",
        "v3 block",
        rename(r"(.*)\.weight_scale", r"\1.weight_scale_inv"),
        where=".weight_scale_inv",
        says="weight_scale_inv has no place",
    ),
    met(
        "Fp5 no _inv under fp8",
        "released deepseek-r1",
        rename(r"(.*)\.weight_scale_inv", r"\1.weight_scale"),
        where=".weight_scale",
        says="weight_scale has no place",
    ),
    met(
        "Fp1 global scale with two values",
        "glm nvfp4",
        tensor("model.layers.1.self_attn.o_proj.weight_global_scale", "F32", 2),
        where="model.layers.1.self_attn.o_proj.weight_global_scale",
    ),
    met(
        "Fp2 block scales in BF16",
        "v3 block",
        retype(r"model\.layers\.\d\..*\.weight_scale", "BF16"),
        rule="scale-dtype",
        where=".weight_scale",
        says="DeepGEMM",
        severity="warning",
    ),
    met(
        "M3 FP8 stored as bytes",
        "glm fp8",
        retype(r"model\.layers\.1\.self_attn\.o_proj\.weight", "U8"),
        where="model.layers.1.self_attn.o_proj.weight",
        says="as numbers",
    ),
    met(
        "M3 scales stored as bytes",
        "glm nvfp4",
        retype(r"model\.layers\.1\.mlp\.experts\..*\.weight_scale", "U8"),
        where="model.layers.1.mlp.experts.0.",
        says="as numbers",
    ),
    met(
        "R2 eight bits, said to be four",
        "glm w4a16",
        tensor("model.layers.3.self_attn.o_proj.weight_packed", "I32", 256, 128),
        where="model.layers.3.self_attn.o_proj.weight_scale",
    ),
    met(
        "Fp2 a column of scales under modelopt",
        "mimo modelopt channels",
        reshape(r".*\.weight_scale", "n -> n 1"),
        where="weight_scale",
        says="has shape",
    ),
    met(
        "Fp2 blocks of two dimensions under modelopt",
        "qwen text modelopt blocks",
        reshape(r".*\.weight_scale", "n 1 k 1 -> n k"),
        where="weight_scale",
        says="has shape",
    ),
    met(
        "Fp2 a row of scales under compressed-tensors",
        "next fp8",
        reshape(r".*\.weight_scale", "n 1 -> n"),
        where="weight_scale",
        says="has shape",
    ),
    met(
        "Fp2 blocks of four dimensions under compressed-tensors",
        "v3 block",
        reshape(r".*\.weight_scale", "n k -> n 1 k 1"),
        where="weight_scale",
        says="has shape",
    ),
    met(
        "Fp2 blocks of four dimensions in native FP8",
        "released deepseek-r1",
        reshape(r".*\.weight_scale_inv", "n k -> n 1 k 1"),
        where="weight_scale_inv",
        says="has shape",
    ),
    met(
        "Fp1 a matrix of one scale",
        "glm fp8 static",
        reshape(r".*\.weight_scale", "n -> 1 1"),
        where="weight_scale",
        says="has shape",
    ),
    met(
        "M3 MXFP4 scales as E8M0",
        partial(ours, "glm-4.7", "MXFP4"),
        retype(r".*\.weight_scale", "F8_E8M0"),
        where="weight_scale",
        says="as numbers",
    ),
    met(
        "R15 width no multiple of the group",
        "glm w4a16",
        tensor("model.layers.3.self_attn.o_proj.weight_packed", "I32", 256, 25),
        tensor("model.layers.3.self_attn.o_proj.weight_scale", "BF16", 256, 1),
        where="model.layers.3.self_attn.o_proj.weight_scale",
        says="no multiple of the group",
    ),
    # One cause is one finding: sizes and names in a sentence do not make another.
    case(
        "every scale in another shape",
        "v3 block",
        reshape(r".*\.weight_scale", "n k -> n 1 k 1"),
        found=[
            {"where": "model.layers.0.mlp.down_proj.weight_scale", "count": 48},
            {"where": "model.layers.3.mlp.experts.0.down_proj.weight_scale", "count": 20},
        ],
    ),
)


EXPERTS = r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.w\d\."


def in_blocks(scale: str) -> Change:
    """DeepSeek-V4's experts in FP8 blocks, which config.json says."""

    def change(checkpoint: Checkpoint) -> None:
        checkpoint.config["expert_dtype"] = "fp8"
        checkpoint.retype(EXPERTS + "weight", "F8_E4M3", lambda n, k: (n, 2 * k))
        checkpoint.retype(EXPERTS + "scale", scale, lambda n, k: (-(-n // 128), -(-k // 4)))

    return change


test_scales_are_read = finds(
    "scale-dtype",
    case(
        "bytes of exponents for experts in FP8",
        "released dsv4-flash",
        in_blocks("F8_E8M0"),
        found=[{"where": "layers.", "says": "0 to 255"}, {"where": "mtp.", "cure": "not their"}],
    ),
    case(
        "numbers for a parameter of exponents",
        "released dsv4-flash",
        retype(r"layers\.\d+\.attn\.wq_a\.scale", "F32"),
        where="layers.0.attn.wq_a.scale",
        says="rounds them to powers of two",
    ),
)


def test_block_scales_are_read_as_numbers_are_stored(tmp_path):
    folder = write(tmp_path / "it", changed(partial(released, "dsv4-flash"), in_blocks("F32")))
    assert examine(folder).data.findings == ()


def test_a_scale_a_row_of_experts_is_no_exponent(tmp_path):
    """What this loader does to scales of experts, it does in each form."""
    built = partial(ours, "dsv4-flash-0731", "FP8_DYNAMIC", "FP8_DYNAMIC")
    folder = write(tmp_path / "it", changed(built, retype(EXPERTS + "weight_scale", "F8_E8M0")))
    findings = examine(folder).data.findings
    assert [(found.rule, found.where.split(".")[0]) for found in findings] == [
        ("scale-dtype", "layers"),
        ("scale-dtype", "mtp"),
    ]


@pytest.mark.parametrize(
    ("model", "scale", "dtype", "severities"),
    [
        ("dsv4-flash", r"layers\.0\.ffn\.experts\.0\.w1\.scale", "F32", {"warning"}),
        ("dsv4-flash", r"layers\.0\.ffn\.experts\.0\.w1\.scale", "U8", set()),
        ("dsv4-flash", r"layers\.0\.ffn\.experts\.0\.w1\.scale", "I8", {"error"}),
        ("dsv4.1-flash", r"layers\.0\.attn\.wq_a\.scale", "U8", set()),
        ("dsv4.1-flash", r"layers\.0\.attn\.wq_a\.scale", "F32", {"error"}),
        ("kimi-k3-mtp", r".*\.layers\.1\..*\.experts\.0\.w1\.weight_scale", "F8_E8M0", set()),
        ("kimi-k3-mtp", r".*\.layers\.1\..*\.experts\.0\.w1\.weight_scale", "BF16", {"warning"}),
    ],
)
def test_scales_are_powers_of_two(model, scale, dtype, severities, tmp_path):
    """vLLM's method for MXFP4 experts makes them of every float, its MXFP8 takes bytes alone."""
    folder = write(tmp_path / "it", changed(partial(released, model), retype(scale, dtype)))
    findings = examine(folder).data.findings
    assert {finding.severity for finding in findings} == severities


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        (retype(r".*\.layers\.1\..*\.k_proj\.scales", "F8_E8M0"), True),
        (retype(r".*\.layers\.1\..*\.k_proj\.scales", "F8_E4M3"), False),
        (retype(r".*\.layers\.1\..*\.k_proj\.qweight", "I64"), True),
        (retype(r".*\.layers\.1\..*\.k_proj\.qweight", "F32"), False),
        (lose(r".*\.layers\.1\..*\.k_proj\.g_idx"), True),
        (lose(r".*\.layers\.1\..*\.k_proj\.scales"), False),
    ],
)
def test_what_gptq_may_be_stored_as(change, ok, tmp_path):
    """vLLM's parameters take whole numbers and floats by their values; an order is dropped."""
    folder = write(tmp_path / "it", changed(GOOD["glm gptq"], change))
    assert examine(folder).data.ok == ok


def test_the_names_of_experts_hang_on_the_version(tmp_path):
    checkpoint = changed(
        partial(ours, "nemotron-3-super", "FP8_DYNAMIC"),
        quantization("config_groups/*/targets", [r"re:.*_proj$"]),
    )
    folder = write(tmp_path / "it", checkpoint)
    assert examine(folder, vllm="0.31.0").data.ok
    assert not examine(folder, vllm="0.32.0").data.ok


test_compare_what_is_always_plain = finds(
    "glue",
    met(
        "F42 a copy of the embedding whose scale the loader refuses",
        "v3 block",
        pack(r"model\.layers\.3\.embed_tokens", "FP8_DYNAMIC"),
        where="model.layers.3.embed_tokens.weight",
        says="in silence",
    ),
    met(
        "F42 eh_proj in FP8, scale dropped",
        "glm fp8",
        pack(r"model\.layers\.3\.eh_proj", "FP8_DYNAMIC"),
        where="model.layers.3.eh_proj.weight",
        says="in silence",
    ),
    met(
        "H7 eh_proj packed",
        "v3 nvfp4",
        pack(r"model\.layers\.3\.eh_proj", "NVFP4A16"),
        where="model.layers.3.eh_proj.weight_packed",
        says="in silence",
    ),
    met(
        "H7 input_proj of MiMo packed",
        "mimo w4a16",
        pack(r"model\.mtp_layers\.0\.input_proj", "W4A16"),
        where="model.mtp_layers.0.input_proj.weight_packed",
        says="in silence",
    ),
    met(
        "G5 compressor quantized",
        "dsv4 published",
        pack(r"layers\.1\.attn\.compressor\.wkv", "FP8_BLOCK"),
        where="layers.1.attn.compressor.wkv.weight",
    ),
    met(
        "R4 router quantized",
        "glm fp8",
        pack(r"model\.layers\.1\.mlp\.gate", "FP8_DYNAMIC"),
        where="model.layers.1.mlp.gate.weight",
    ),
    met(
        "H7 embedding packed",
        "qwen vl fp8",
        pack(r"model\.language_model\.embed_tokens", "W4A16"),
        where="model.language_model.embed_tokens.weight_packed",
        says="in silence",
    ),
)


test_vectors_are_plain = finds(
    "form",
    case(
        "a bias in FP8",
        "glm fp8",
        retype(r"model\.layers\.1\.self_attn\.q_proj\.bias", "F8_E4M3"),
        where="model.layers.1.self_attn.q_proj.bias",
    ),
    case(
        "a correction bias of the draft in FP8",
        "released glm-4.7",
        retype(r"model\.layers\.3\.mlp\.gate\.e_score_correction_bias", "F8_E4M3"),
        where="model.layers.3.mlp.gate.e_score_correction_bias",
    ),
)


test_draft_head_is_excluded = finds(
    "draft-head",
    met(
        "F38 AutoRound's block takes the head",
        partial(autoround, block_name_to_quantize="model.layers"),
        where="model.layers.3.head",
        says="as gptq",
    ),
    met(
        "F38 placeholder head quantized",
        "v3 modelopt",
        ignoring(
            "model.layers.3.self_attn*",
            "model.layers.3.mlp*",
            "model.layers.3.shared_head.head",
            without=r"^model\.layers\.3\.\*$",
        ),
        where="model.layers.3.head",
        says="nothing fills them",
    ),
    met(
        "F38 head of a Qwen3.5 draft quantized",
        "qwen vl modelopt",
        ignoring("language_model.lm_head", without="lm_head"),
        where="lm_head",
    ),
    case(
        "head of a Qwen3.5 draft plain",
        partial(with_packed, "qwen3.5-27b", "head", "FP8_DYNAMIC"),
        ignoring("lm_head"),
        where="lm_head",
        says="it raises",
    ),
)


SCALES = r"model\.layers\.0\.self_attn\.qkv_proj\.weight_scale_inv"


test_interleaved_rows_are_put_in_order = finds(
    "rows",
    case(
        "q, k and v in one tensor without scales",
        "released mimo-v2.5",
        lose(SCALES),
        where="model.layers.0.self_attn.qkv_proj.weight",
        says="never loads without scales",
        cure="q_proj, k_proj and v_proj",
        among=True,
    ),
    case(
        "q, k and v in one plain tensor",
        "released mimo-v2.5",
        lose(SCALES),
        retype(r"model\.layers\.0\.self_attn\.qkv_proj\.weight", "BF16"),
        severity="warning",
        where="model.layers.0.self_attn.qkv_proj.weight",
        says="in another order",
        cure="q_proj, k_proj and v_proj",
        among=True,
    ),
)


test_schemes_are_known = finds(
    "dialect",
    met(
        "R8 a dialect that is not judged",
        "glm fp8",
        config("quantization_config", {"quant_method": "torchao"}),
        where="model.layers.3.",
    ),
    case(
        "a dialect",
        "released glm-4.7",
        config(
            "quantization_config",
            {"quant_method": "torchao", "modules_to_not_convert": ["model.layers.3."]},
        ),
        severity="warning",
        cure="--gpu sm90",
    ),
    case(
        "a form",
        "glm quark",
        quantization(
            "global_quant_config",
            {"weight": INT4},
        ),
        severity="warning",
    ),
    # W4AFP8: what vLLM builds is not known, only that it is not plain.
    case(
        "a plain block under targets of a scheme that is not known",
        w4afp8,
        quantization("ignore", ["lm_head", "re:.*in_proj_(ba|[ab])$", "re:.*visual"]),
        found=[
            {"severity": "warning"},
            {"rule": "form", "where": "mtp.", "cure": r"'re:^mtp\.' to ignore"},
        ],
    ),
    case(
        "the same block, excepted",
        w4afp8,
        quantization("ignore", ["lm_head", "re:.*in_proj_(ba|[ab])$", "re:.*visual", r"re:^mtp\."]),
        severity="warning",
    ),
)


NGRAMS = re.escape(TABLE)
NO_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {},
    "ignore": [],
}


test_table_is_as_built = finds(
    "table",
    case("a table in FP8", qwen38_fp8, found=[]),
    case(
        "its scale lost",
        qwen38_fp8,
        lose(rf"{NGRAMS}\.weight_scale"),
        where=f"{TABLE}.weight_scale",
        says="ngram_embedding fp8",
        count=2,
    ),
    case(
        "plain parts beside a scale",
        qwen38_fp8,
        retype(rf"{NGRAMS}\.shard_\d+\.weight", "BF16"),
        where=f"{TABLE}.shard_0.weight",
        cure="ple_embedding_dtype",
        count=2,
    ),
    case(
        "a table in FP8 that modelopt's config excluded",
        qwen38_fp8,
        config("quantization_config", NO_GROUPS),
        where=f"{TABLE}.shard_0.weight",
        says="vLLM builds",
        among=True,
    ),
    case("a table in NVFP4", qwen38_nvfp4, found=[]),
    case(
        "its scale of all parts lost",
        qwen38_nvfp4,
        lose(rf"{NGRAMS}\.weight_scale_2"),
        where=f"{TABLE}.weight_scale_2",
        says="ngram_embedding nvfp4",
        count=2,
    ),
    case(
        "the scales of its parts lost",
        qwen38_nvfp4,
        lose(rf"{NGRAMS}\.shard_\d\.weight_scale"),
        where=f"{TABLE}.shard_0.weight_scale",
        count=2,
    ),
    case(
        "NVFP4 where FP8 is said",
        qwen38_nvfp4,
        config("text_config/ple_embedding_dtype", "float8_e4m3fn"),
        where=f"{TABLE}.shard_0.weight",
        cure='"nvfp4"',
        count=2,
    ),
    case(
        "a form that no vLLM has",
        qwen38_fp8,
        config("text_config/ple_embedding_dtype", "int3"),
        where="ngram_embedding",
        says="refused",
        count=2,
    ),
)


@pytest.mark.parametrize(
    "changes, is_refused",
    [
        ({"group_size": 128}, True),
        ({"group_size": -1}, False),
        ({"group_size": -1, "dynamic": {"+:.*mtp.*": {"group_size": 64}}}, True),
        ({"group_size": -1, "dynamic": {"-:.*mtp.*": {"group_size": 64}}}, False),
        ({"group_size": 128, "dynamic": {"+:.*mtp.*": {"group_size": -1}}}, True),
    ],
)
def test_inputs_of_one_group_have_no_order(changes, is_refused):
    """As vLLM 0.32.0 has it: utils/gptq_utils.py, `normalize_and_validate_gptq_desc_act`."""
    raw = SAID["gptq"] | {"desc_act": True} | changes
    assert read_gptq(raw, Renamer(), ()).answer.error == ("", ACT_ORDER)[is_refused]


test_packed_head_loads = finds(
    "head-form",
    case("a scale a row", partial(with_packed, "glm-4.7", "head", "FP8_DYNAMIC"), found=[]),
    case("codes of NVFP4", partial(with_packed, "glm-4.7", "head", "NVFP4A16"), found=[]),
    case(
        "modelopt's NVFP4, with a draft that fills none",
        partial(with_packed, "deepseek-r1", "head", "NVFP4A16", "modelopt"),
        found=[],
    ),
    case(
        "FP8 blocks",
        partial(with_packed, "glm-4.7", "head", "FP8_DYNAMIC"),
        quantization("config_groups/group_0/weights/strategy", "block"),
        quantization("config_groups/group_0/weights/block_structure", [128, 128]),
        among=True,
        where="lm_head.weight",
        says="AssertionError",
    ),
    case(
        "modelopt's NVFP4, with a draft that fills its own",
        partial(modelopt, "glm-4.7"),
        quantization("ignore", ["model.layers.3.*", "model.embed_tokens", "*.mlp.gate"]),
        pack("lm_head", "NVFP4"),
        among=True,
        where="lm_head",
        says="RuntimeError",
    ),
    case(
        "a head of the block alone, with a draft that fills it from the target's",
        partial(ours, "glm-4.7", "W4A16", "W4A16"),
        pack(r"model\.layers\.3\.shared_head\.head", "W4A16"),
        quantization("config_groups/group_0/targets", ["Linear", r"re:^model\.layers\.3\.head$"]),
        quantization("ignore", ["lm_head", "re:.*(?:mlp[.]gate|eh_proj|embed_tokens)$"]),
        where="model.layers.3.shared_head.head.weight_packed",
        says="KeyError",
    ),
    about=["head-form"],
)


# vLLM's class of packed embeddings registers none.
test_rows_that_are_looked_up_have_no_zero_points = finds(
    "form",
    case("an embedding", partial(with_packed, "deepseek-r1", "embedding", "W4A16"), found=[]),
    case(
        "an embedding with zero points",
        partial(with_packed, "deepseek-r1", "embedding", "W4A16"),
        tensor("model.embed_tokens.weight_zero_point", "I32", 64, 2),
        quantization("config_groups/group_1/weights/symmetric", False),
        quantization("config_groups/group_0/weights/symmetric", False),
        among=True,
        where="model.embed_tokens",
        says="weight_zero_point has no place",
    ),
    about=["form"],
)
