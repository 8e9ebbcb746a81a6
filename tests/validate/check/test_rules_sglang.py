"""Rules on what SGLang does: each finding in its words."""

from functools import partial

import pytest
from broken_case import case, finds
from checkpoint_files import config, lose, quantization, write
from commands import keepmtp, ran
from foreign_form import modelopt, quark, w4afp8
from good import ours
from real_releases import TABLE, qwen38_fp8, qwen38_nvfp4

SGLANG = ["sglang"]
IGNORED = [
    "re:.*lm_head$",
    "re:.*in_proj_(ba|[ab])$",
    "mtp.layers.0.self_attn.q_proj",
    "mtp.layers.0.self_attn.v_proj",
    "mtp.layers.0.self_attn.o_proj",
    "mtp.layers.0.mlp.gate_proj",
    "mtp.layers.0.mlp.up_proj",
    "mtp.layers.0.mlp.down_proj",
]
# What a draft has that no target of the config matches; with the third, its attention.
NO_TARGET = (
    {
        "where": "model.decoder.mlp.experts",
        "runtime": "sglang",
        "says": "Unable to find matching target for model.decoder.",
        "cure": r"re:^model\.decoder\.",
    },
    {"where": "model.decoder.mlp.shared_experts.down_proj", "count": 2},
)
# A packed draft that is built plain, and a plain one that is built packed.
PLAIN = [
    {
        "count": 12,
        "where": "model.layers.3.mlp.experts.0.down_proj.weight",
        "says": "builds model.decoder.mlp.experts as plain",
    },
    {
        "where": "model.layers.3.mlp.shared_experts.down_proj.weight",
        "count": 3,
        "says": "glm4_moe_nextn.py builds the draft plain under modelopt_fp4",
    },
    {"where": "model.layers.3.self_attn.k_proj.weight", "count": 4, "runtime": "sglang"},
]
PACKED = [
    {
        "where": "model.layers.3.mlp.experts.",
        "count": 12,
        "says": "builds model.decoder.mlp.experts as fp8_channel (by",
    },
    {"where": "model.layers.3.mlp.shared_experts.", "says": "plain BF16", "count": 3},
    {"where": "model.layers.3.self_attn.", "says": "plain BF16", "count": 5},
]


test_judge = finds(
    "sglang-form",
    case("deepseek-r1 as released", "released deepseek-r1", found=[]),
    case("glm-4.7 as released", "released glm-4.7", found=[]),
    case("qwen3.5-27b as released", "released qwen3.5-27b", found=[]),
    case("deepseek-v3.2 as released", "released deepseek-v3.2", found=[]),
    runtimes=SGLANG,
)


test_unresolved = finds(
    "sglang-unresolved",
    case(
        "names of the draft that no target matches",
        partial(ours, "glm-4.7", "NVFP4", "FP8_DYNAMIC"),
        quantization("config_groups/group_0/targets", [r"re:^model\.layers\.3\.(mlp|self_attn)\."]),
        quantization("ignore", ["lm_head", "re:.*mlp[.]gate$", "re:.*eh_proj$"]),
        found=[
            *NO_TARGET,
            {"where": "model.decoder.self_attn.qkv_proj", "count": 2},
        ],
    ),
    case(
        "integers of experts in a mixed config",
        partial(ours, "glm-4.7", "W4A16", "FP8_DYNAMIC"),
        found=[
            *NO_TARGET,
            {"where": "model.decoder.self_attn.qkv_proj", "count": 2},
            {"where": "model.layers.1.mlp.experts", "says": "pack-quantized", "count": 2},
        ],
    ),
    # sglang #38574, #40002: `Linear` reaches the draft, for which the scheme of the experts has no
    # linear class.
    case(
        "a draft that neither list names",
        w4afp8,
        quantization("ignore", ["lm_head"]),
        found=[
            {"where": ".linear_attn.in_proj_qkvz", "says": "it has no class for"},
            {"where": ".mlp.shared_expert.down_proj"},
            {"where": ".layers.3.self_attn.qkv_proj"},
            {"where": "mtp.layers.0.mlp.shared_expert.down_proj", "says": "it has no class for"},
            {
                "rule": "sglang-form",
                "where": "mtp.layers.0.mlp.experts.0",
                "says": "as quantized weights",
                "cure": "re:^mtp",
            },
            {
                "where": "mtp.layers.0.self_attn.qkv_proj",
                "says": "it has no class for",
                "cure": "re:^mtp",
            },
        ],
    ),
    # sglang #35797: entries for single projections reach the fused ones of Qwen3.5, if all are there.
    case(
        "halves of fused modules in ignore",
        partial(ours, "qwen3.5-27b", "NVFP4"),
        quantization("config_groups/*/targets", ["Linear"]),
        quantization("ignore", [*IGNORED, "mtp.layers.0.self_attn.k_proj"]),
        found=[],
    ),
    case(
        "two thirds of a fused module in ignore",
        partial(ours, "qwen3.5-27b", "NVFP4"),
        quantization("config_groups/*/targets", ["Linear"]),
        quantization("ignore", IGNORED),
        where="mtp.layers.0.self_attn.qkv_proj",
        says="different",
    ),
    case(
        "SGLang makes a regular expression of each glob",
        partial(modelopt, "glm-4.7"),
        quantization("ignore", ["x["]),
        rule="config",
        where="x[",
        says="SGLang raises",
    ),
    runtimes=SGLANG,
)


test_draft_class_exists = finds(
    "sglang-draft",
    case(
        "SGLang has no draft for exaone-4.5-33b", "released exaone-4.5-33b", says="has no draft for"
    ),
    case(
        "SGLang has no draft for openpangu-ultra",
        "released openpangu-ultra",
        says="has no draft for",
    ),
    case("SGLang has no draft for kimi-k3-mtp", "released kimi-k3-mtp", says="has no draft for"),
    case("SGLang has no draft for minimax-m3", "released minimax-m3", says="has no draft for"),
    runtimes=SGLANG,
)


test_config_is_read = finds(
    "sglang-config",
    case(
        "SGLang reads MIXED_PRECISION without NVFP4 as W4AFP8",
        partial(ours, "glm-4.7", "NVFP4", "bf16", format="modelopt"),
        quantization("quant_algo", "MIXED_PRECISION"),
        quantization(
            "quantized_layers", {"model.layers.0.self_attn.o_proj": {"quant_algo": "FP8"}}
        ),
        says="W4AFP8",
    ),
    case(
        "a group without weights",
        partial(ours, "glm-4.7", "NVFP4"),
        quantization("config_groups/group_9", {"targets": ["LlamaAttention"]}),
        says="config_groups.group_9.weights",
    ),
    runtimes=SGLANG,
)


test_one_layer_is_promised = finds(
    "sglang-layers",
    case(
        "two MTP layers are one too many",
        "released glm-4.7",
        config("num_nextn_predict_layers", 2),
        found=[{"says": "Only 1 nextn layer"}, {"rule": "sglang-mtp-missing"}],
    ),
    runtimes=SGLANG,
)


test_block_is_whole = finds(
    "sglang-mtp-missing",
    case(
        "a block that is not there",
        "released glm-4.7",
        lose(r"model\.layers\.3\..*"),
        where="model.layers.3.*",
        says="drafts from what was in memory",
    ),
    runtimes=SGLANG,
)


test_misbuilt = finds(
    "sglang-form",
    case(
        "a quantized draft under modelopt_fp4 is built plain",
        partial(ours, "glm-4.7", "NVFP4", "NVFP4", format="modelopt"),
        found=PLAIN,
    ),
    case(
        "the draft's layer alone is renamed",
        partial(ours, "deepseek-r1", "FP8_DYNAMIC"),
        quantization("ignore", ["lm_head", "re:.*mlp[.]gate$", r"re:^model\.layers\.3(\.|$)"]),
        quantization("config_groups/*/targets", ["Linear"]),
        found=PACKED,
    ),
    # sglang #38870, #39064, #40597: such an entry makes the whole block plain, whatever its other
    # tensors are.
    case(
        "an entry of Quark's that names experts",
        partial(
            quark,
            "qwen3.5-397b",
            "FP8_DYNAMIC",
            exclude=["re:.*gate$", "mtp.layers.0.mlp.experts.0"],
        ),
        found=[
            {"where": "mtp.layers.0.mlp.experts.", "count": 12},
            {"where": "mtp.layers.0.mlp.shared_expert.", "count": 3},
            {"where": "mtp.layers.0.self_attn.", "count": 4, "says": "exclude names it"},
        ],
    ),
    # sglang #36158: size mismatch, or values cast to 8 bits.
    case(
        "a plain block of Quark's that no entry names",
        partial(quark, "deepseek-r1", exclude=["re:.*gate$"]),
        found=PACKED,
    ),
    runtimes=SGLANG,
)


test_misbuilt_where_vllm_builds_it = finds(
    "sglang-form",
    case(
        "both servers are asked at once, and vLLM serves it",
        partial(ours, "glm-4.7", "NVFP4", "NVFP4", format="modelopt"),
        found=PLAIN,
    ),
    runtimes=["vllm", "sglang"],
)


test_stored_form_is_what_is_built = finds(
    "sglang-unresolved",
    case(
        "blocks without the target Linear",
        partial(ours, "deepseek-r1", "FP8_BLOCK"),
        found=[
            *NO_TARGET,
            {"where": "model.decoder.self_attn.fused_qkv_a_proj_with_mqa", "count": 4},
            {
                "rule": "sglang-block-size",
                "where": "self_attn.kv_b_proj.weight",
                "count": 3,
                "says": "_resolve_layer_weight_block_size",
            },
        ],
    ),
    case(
        "SGLang absorbs a packed weight",
        partial(ours, "deepseek-r1", "NVFP4A16"),
        found=[
            *NO_TARGET,
            {"where": "model.decoder.self_attn.fused_qkv_a_proj_with_mqa", "count": 4},
            {
                "rule": "sglang-absorbed",
                "where": "model.layers.0.self_attn.kv_b_proj.weight",
                "count": 3,
            },
        ],
    ),
    case(
        "SGLang absorbs a packed weight of modelopt",
        partial(ours, "deepseek-r1", "NVFP4A16", format="modelopt"),
        rule="sglang-absorbed",
        where="model.layers.0.self_attn.kv_b_proj.weight",
        count=3,
    ),
    runtimes=SGLANG,
)


test_table_is_looked_up = finds(
    "sglang-table",
    case("SGLang looks rows of FP8 up", qwen38_fp8, found=[]),
    case("SGLang has no table in NVFP4", qwen38_nvfp4, where=f"{TABLE}.shard_0.weight"),
    runtimes=SGLANG,
    about=["sglang-table"],
)


@pytest.mark.full
def test_the_command_names_the_server(tmp_path):
    folder = write(tmp_path / "checkpoint", ours("glm-4.7", "NVFP4", "NVFP4", format="modelopt"))
    both = keepmtp(f"check {folder} --runtime vllm --runtime sglang")
    assert both.stdout.rstrip().endswith("; judged for vLLM 0.33.0, SGLang 0.5.23 (not run)")
    assert "judged for" not in ran(f"check {folder}"), "vLLM takes it"
