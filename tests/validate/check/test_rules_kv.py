"""Rules on the KV cache: what is said is what vLLM 0.32 did in dry loads of every family."""

from functools import partial

from broken_case import case, finds, met
from checkpoint_files import hf_quant_config, lose, quantization, tensor
from foreign_form import modelopt
from good import ours, with_scales

SCALES = r".*\.[kv]_(proj\.[kv]_)?scale"
GLM = partial(ours, "glm-4.7", "FP8_DYNAMIC")
CACHE = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


def cache(**entries):
    """compressed-tensors' entry for an FP8 cache, with others in place of some."""
    return quantization("kv_cache_scheme", CACHE | entries)


test_kv_entry_is_known = finds(
    "kv-cache",
    met(
        "INT4 cache",
        "glm fp8",
        quantization("kv_cache_scheme", {"num_bits": 4, "type": "int"}),
        where="config.json: quantization_config.kv_cache_scheme",
        says="NotImplementedError",
    ),
    case(
        "FP8 scheme of the cache",
        GLM,
        cache(),
        found=[],
    ),
    case(
        "a scale for each head",
        GLM,
        cache(strategy="attn_head"),
        found=[],
    ),
    case(
        "FP8 scheme of the cache under modelopt",
        partial(modelopt, "glm-4.7"),
        cache(),
        found=[],
    ),
    case(
        "4 bits",
        GLM,
        cache(num_bits=4),
        where="kv_cache_scheme",
        says="'num_bits': 4",
    ),
    case(
        "integers",
        GLM,
        cache(type="int"),
        where="kv_cache_scheme",
        says="'type': 'int'",
    ),
    case(
        "a scale for each channel",
        GLM,
        cache(strategy="channel"),
        where="kv_cache_scheme",
        says="'strategy': 'channel'",
    ),
    case(
        "no strategy",
        GLM,
        cache(strategy=None),
        where="kv_cache_scheme",
        says="'strategy': None",
    ),
    case(
        "with a zero point",
        GLM,
        cache(symmetric=False),
        where="kv_cache_scheme",
        says="'symmetric': False",
    ),
    case(
        "a word for a scheme",
        GLM,
        quantization("kv_cache_scheme", "fp8"),
        where="kv_cache_scheme",
        says="AttributeError",
    ),
    case(
        "a cache that nobody asks",
        partial(ours, "deepseek-r1", "FP8_DYNAMIC"),
        cache(),
        severity="warning",
        where="kv_cache_scheme",
        says="no effect",
    ),
    case(
        "a class that has no such cache",
        partial(ours, "qwen3.8-flash-next", "FP8_DYNAMIC"),
        cache(),
        where="kv_cache_scheme",
        says="Qwen4Exp QSA does not support KV quantization",
    ),
    case(
        "modelopt's INT3",
        "glm modelopt file",
        hf_quant_config("quantization/kv_cache_quant_algo", "INT3"),
        severity="warning",
        where="hf_quant_config.json: kv_cache_quant_algo",
    ),
    case(
        "modelopt's algorithm as a number",
        "glm modelopt file",
        hf_quant_config("quantization/kv_cache_quant_algo", 8),
        where="hf_quant_config.json: kv_cache_quant_algo",
    ),
    case(
        "modelopt's algorithm in small letters",
        "glm modelopt file",
        hf_quant_config("quantization/kv_cache_quant_algo", "fp8"),
        found=[],
    ),
    about=["kv-cache"],
)


test_kv_scales_have_a_place = finds(
    "kv-scales",
    met(
        "F32 KV scales in the draft",
        "glm fp8",
        tensor("model.layers.3.self_attn.k_proj.k_scale", "F32", 1),
        where="model.layers.3.self_attn.k_proj.k_scale",
    ),
    # Qwen3.5's drafts read scales by AutoWeightsLoader; DeepSeek-V3.2's loader stumbles over a name
    # that became None.
    case(
        "scales in the MTP layer, glm-4.7",
        GLM,
        tensor("model.layers.3.self_attn.k_proj.k_scale", "F32"),
        where="model.layers.3.self_attn.k_proj.k_scale",
    ),
    case(
        "scales in the MTP layer, deepseek-v3.2",
        partial(ours, "deepseek-v3.2", "FP8_DYNAMIC"),
        tensor("model.layers.3.self_attn.k_proj.k_scale", "F32"),
        where="model.layers.3.self_attn.k_proj.k_scale",
    ),
    case(
        "scales in the MTP layer, deepseek-r1",
        partial(ours, "deepseek-r1", "FP8_DYNAMIC"),
        tensor("model.layers.3.self_attn.k_proj.k_scale", "F32"),
        found=[],
    ),
    case(
        "scales in the MTP layer, qwen3.5-27b",
        partial(ours, "qwen3.5-27b", "FP8_DYNAMIC"),
        tensor("mtp.layers.0.self_attn.k_proj.k_scale", "F32"),
        found=[],
    ),
    case(
        "scales in the MTP layer, qwen3-next-80b",
        partial(ours, "qwen3-next-80b", "FP8_DYNAMIC"),
        tensor("mtp.layers.0.self_attn.k_proj.k_scale", "F32"),
        found=[],
    ),
    case(
        "a scale of a class without a parameter for it",
        partial(ours, "dsv4-flash", "NVFP4"),
        tensor("layers.0.attn.k_scale", "F32"),
        where="layers.0.attn.k_scale",
        says="with and without a draft",
    ),
    case(
        "a scale for each head under modelopt",
        partial(modelopt, "glm-4.7"),
        tensor("model.layers.0.self_attn.k_proj.k_scale", "F32", 4),
        where="model.layers.0.self_attn.k_proj.k_scale",
        says="[4]: vLLM raises ValueError: KV-cache scale expects a scalar weight",
    ),
    about=["kv-scales"],
)


test_kv_scales_are_whole = finds(
    "kv-scales",
    # In the backbone, and in the MTP block under vLLM's own name, the only one that this draft's
    # loader takes.
    case(
        "a scale of the backbone was dropped",
        with_scales,
        lose(r"model\.layers\.1\.self_attn\.k_scale"),
        where="model.layers.1.self_attn.k_scale",
        says="takes 1",
    ),
    case(
        "a scale of the draft was dropped",
        with_scales,
        lose(r"model\.layers\.3\.self_attn\.attn\.v_scale"),
        where="model.layers.3.self_attn.attn.v_scale",
        says="takes 1",
    ),
    case(
        "a scale of the backbone was dropped, modelopt",
        partial(with_scales, format="modelopt"),
        lose(r"model\.layers\.1\.self_attn\.k_proj\.k_scale"),
        where="model.layers.1.self_attn.k_proj.k_scale",
        says="the other scale",
    ),
    case(
        "a scale of the draft was dropped, modelopt",
        partial(with_scales, format="modelopt"),
        lose(r"model\.layers\.3\.self_attn\.attn\.v_scale"),
        where="model.layers.3.self_attn.attn.v_scale",
        says="the other scale",
    ),
    case(
        "a layer without its scales",
        with_scales,
        lose(r"model\.layers\.0\.self_attn\.[kv]_scale"),
        where="model.layers.0.self_attn.k_scale",
    ),
    # What a block from the release leaves: the draft's cache is FP8 all the same, with scales of 1.
    case(
        "a draft without its scales",
        partial(with_scales, "qwen3.5-27b"),
        lose(r"mtp\.layers\.0\.self_attn\.[kv]_scale"),
        where="mtp.layers.0.self_attn.k_scale",
        severity="warning",
    ),
    case(
        "a scale of no layer",
        with_scales,
        tensor("model.layers.7.self_attn.k_scale", "BF16", 1),
        where="model.layers.7.self_attn.k_scale",
    ),
    case(
        "a scale of what does not attend",
        with_scales,
        tensor("model.layers.1.mlp.v_scale", "BF16", 1),
        where="model.layers.1.mlp.v_scale",
    ),
    about=["kv-scales"],
)


test_declared_cache_has_scales = finds(
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
    about=["kv-unscaled"],
)
