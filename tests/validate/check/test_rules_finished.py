"""Rules on what tools change in finished checkpoints: what is said is what vLLM 0.32 and 0.33 did in
dry loads, and what its attention layers do without scales.
"""

from functools import partial

from broken_case import assert_found, case, rows
from checkpoint_files import Checkpoint, lose, pack, quantization, tensor
from foreign_form import modelopt
from good import ours, with_scales
from heads import written

SCALES = r".*\.[kv]_(proj\.[kv]_)?scale"
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def other_tool(checkpoint: Checkpoint) -> None:
    """modelopt's file beside a config of compressed-tensors, as where two exports share a folder."""
    inner = {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}
    producer = {"name": "modelopt", "version": "0.45.0"}
    checkpoint.json_files["hf_quant_config.json"] = {"producer": producer, "quantization": inner}


@rows(
    "kv-unscaled",
    case("with its scales", with_scales, found=[]),
    case("modelopt's with its scales", partial(with_scales, format="modelopt"), found=[]),
    case(
        "a cache whose scales were lost",
        with_scales,
        lose(SCALES),
        severity="warning",
        where="config.json: kv_cache_scheme",
        says="Using KV cache scaling factor 1.0",
    ),
    case(
        "a scheme that was written by hand",
        partial(ours, "qwen3.5-27b", "FP8_DYNAMIC"),
        quantization("kv_cache_scheme", CACHE),
        severity="warning",
        where="config.json: kv_cache_scheme",
    ),
    case(
        "modelopt's",
        partial(modelopt, "glm-4.7"),
        quantization("kv_cache_quant_algo", "FP8"),
        severity="warning",
        where="config.json: kv_cache_quant_algo",
    ),
    # Its one cache for keys and values never asks for a scheme; `kv_entry_is_known` says it.
    case(
        "latent attention",
        partial(ours, "deepseek-r1", "FP8_DYNAMIC"),
        quantization("kv_cache_scheme", CACHE),
        found=[],
    ),
)
def test_declared_cache_has_scales(case, tmp_path):
    assert_found(case, tmp_path, about=["kv-unscaled"])


@rows(
    "head-form",
    case("a scale a row", partial(written, "glm-4.7", "head", "FP8_DYNAMIC"), found=[]),
    case("codes of NVFP4", partial(written, "glm-4.7", "head", "NVFP4A16"), found=[]),
    case(
        "modelopt's NVFP4, with a draft that fills none",
        partial(written, "deepseek-r1", "head", "NVFP4A16", "modelopt"),
        found=[],
    ),
    case(
        "FP8 blocks",
        partial(written, "glm-4.7", "head", "FP8_DYNAMIC"),
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
)
def test_packed_head_loads(case, tmp_path):
    assert_found(case, tmp_path, about=["head-form"])


@rows(
    "two-tools",
    case("one of them", partial(ours, "glm-4.7", "NVFP4"), found=[]),
    case("modelopt's own two", "glm modelopt file", found=[]),
    case(
        "modelopt's file beside another config",
        partial(ours, "glm-4.7", "NVFP4"),
        other_tool,
        severity="warning",
        where="hf_quant_config.json",
        says="vLLM reads config.json, which says compressed-tensors",
    ),
)
def test_one_tool_wrote_the_configs(case, tmp_path):
    assert_found(case, tmp_path, about=["two-tools"])


@rows(
    "form",
    case("an embedding", partial(written, "deepseek-r1", "embedding", "W4A16"), found=[]),
    case(
        "an embedding with zero points",
        partial(written, "deepseek-r1", "embedding", "W4A16"),
        tensor("model.embed_tokens.weight_zero_point", "I32", 64, 2),
        quantization("config_groups/group_1/weights/symmetric", False),
        quantization("config_groups/group_0/weights/symmetric", False),
        among=True,
        where="model.embed_tokens",
        says="weight_zero_point has no place",
    ),
)
def test_rows_that_are_looked_up_have_no_zero_points(case, tmp_path):
    """vLLM's class of packed embeddings registers none."""
    assert_found(case, tmp_path, about=["form"])
