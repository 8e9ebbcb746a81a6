"""Checkpoints as their makers publish them: true names, dtypes and shapes, at full size or tiny.

In: a model's name (the recipes' `model`). Out: its config.json and {tensor name: (dtype, shape)},
and on request the
files: holes instead of weights at full size, small finite numbers at tiny size.

The names come from published indexes and from transformers' save_pretrained, never from keepmtp's
own tables: these files are what those tables are tested against. The configs of the oldest families
are in releases.yaml. A new family has its own in tests/helpers/layouts/.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import layouts
import numpy as np
import yaml
from tensors import (
    Config,
    Form,
    Published,
    Tensors,
    embeddings,
    experts,
    gated_mlp,
    gqa,
    linear,
    mla,
    norms,
    num_bytes,
    table,
    under,
    vectors,
)

SHARD_BYTES = 5_000_000_000

_RAW = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
MODELS: dict[str, Config] = layouts.MODELS | _RAW["models"]
TINY: dict[str, Config] = layouts.TINY | _RAW["tiny"]
PUBLISHED = layouts.PUBLISHED | {
    model: Published(**known) for model, known in _RAW["published"].items()
}
SPLIT: Config = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 4,
                 "linear_num_value_heads": 8, "num_heads": 4}  # fmt: skip


def source_layout(
    model: str, *, size: Literal["tiny", "split", "full"], changes: Mapping[str, Any] | None = None
) -> tuple[Config, Tensors]:
    """config.json and tensors of a released checkpoint.

    Args:
        model: a key of MODELS, which is the `model` of a recipe.
        size: "full" as published, "tiny" the same layout narrow and shallow, "split" a tiny one
            that is wide enough to give each of four tensor-parallel ranks whole blocks of 128.
        changes: config keys to set on top, at their own level (`{"num_hidden_layers": 21}`).
    """
    config = json.loads(json.dumps(MODELS[model]))
    if size != "full":
        _update(config, TINY[config["model_type"]])
    if size == "split":
        nested = {
            key: _known(value, SPLIT) for key, value in config.items() if isinstance(value, dict)
        }
        _update(config, nested | _known(config, SPLIT))
    _update(config, changes or {})
    return config, FAMILIES[config["model_type"]](config)


def thin_layout(model: str) -> tuple[Config, Tensors]:
    """A release at its true widths with few layers and experts: all that decides which schemes it
    can take.
    """
    depth = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_hash_layers": 1, "depth": 1}
    depth["layer_group_size"] = 2
    experts = {"n_routed_experts": 2, "num_experts": 2, "num_experts_per_tok": 2}
    config = MODELS[model]
    changes = {
        key: _known(value, depth | experts)
        for key, value in config.items()
        if isinstance(value, dict)
    }
    return source_layout(model, size="full", changes=changes | _known(config, depth | experts))


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]], *,
    num_shards: int | None = 2, data: Literal["sparse", "random"] = "sparse", seed: int = 0,
) -> Path:  # fmt: skip
    """Write config.json, the shards and their index.

    Args:
        folder: created if absent.
        config: config.json.
        tensors: as `source_layout` gives them, written in this order.
        num_shards: files to cut into; 1 writes model.safetensors without an index, None cuts every
            5 GB.
        data: "sparse" leaves holes that take no disk, "random" fills in small finite numbers.
        seed: of those numbers.
    Returns: `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    total = sum(num_bytes(*spec) for spec in tensors.values())
    shards = _cut(tensors, SHARD_BYTES if num_shards is None else math.ceil(total / num_shards))
    rng = np.random.default_rng(seed)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = (
            "model.safetensors"
            if num_shards == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        weight_map |= dict.fromkeys(names, file)
        _write_shard(
            folder / file,
            {name: tensors[name] for name in names},
            rng if data == "random" else None,
        )
    if num_shards != 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


# --- Families -------------------------------------------------------------------------------------


def deepseek_line(config: Config) -> Tensors:
    """DeepSeek-V3, -V3.2, GLM-4.5 to 4.7, GLM-4.7-Flash and GLM-5: the MTP layer continues the
    decoder layers.
    """
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    form: Form = "fp8_scale_inv" if "quantization_config" in config else "bf16"
    is_gqa = config["model_type"] == "glm4_moe"
    attention = (
        gqa(config, bias=config["attention_bias"], qk_norm=config["use_qk_norm"])
        if is_gqa
        else mla(config, form)
    )
    inner = config["moe_intermediate_size"]
    routed = (
        linear("gate", config["n_routed_experts"], hidden)
        | vectors(["gate.e_score_correction_bias"], config["n_routed_experts"], "F32")
        | experts("experts", config["n_routed_experts"], hidden, inner, form)
        | gated_mlp("shared_experts", hidden, inner * config["n_shared_experts"], form)
    )
    block = attention | norms("input_layernorm post_attention_layernorm", hidden)
    sparse = block | under("mlp.", routed)
    dense = block | gated_mlp("mlp", hidden, config["intermediate_size"], form)
    tensors = embeddings(config)
    for layer in range(num_layers):
        tensors |= under(
            f"model.layers.{layer}.", dense if layer < config["first_k_dense_replace"] else sparse
        )
    mtp = (
        sparse
        | linear("eh_proj", hidden, 2 * hidden)
        | norms("enorm hnorm shared_head.norm", hidden)
    )
    # GLM-5 (zai-org/GLM-5: 791 tensors in layer 78) is the one that publishes no copies.
    if config["model_type"] != "glm_moe_dsa":
        mtp |= linear("embed_tokens", config["vocab_size"], hidden)
        mtp |= linear("shared_head.head", config["vocab_size"], hidden)
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.layers.{num_layers + index}.", mtp)
    return tensors


def deepseek_v4(config: Config) -> Tensors:
    """DeepSeek-V4: FP8 with ue8m0 scales, MXFP4 experts, compressors on most layers, MTP as `mtp.0`
    without copies.
    """
    hidden, hc, hash_layers = config["hidden_size"], config["hc_mult"], config["num_hash_layers"]
    head_state = _hyper_connections("head", hc, hc, hidden, scales=1)
    tensors = embeddings(config, "embed", "head", "norm") | head_state
    for layer in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][layer]
        tensors |= under(
            f"layers.{layer}.", _v4_block(config, ratio, is_hashed=layer < hash_layers)
        )
    mtp = _v4_block(config, 0, is_hashed=False) | norms("enorm hnorm norm", hidden) | head_state
    mtp |= linear("e_proj", hidden, hidden, "fp8_scale") | linear(
        "h_proj", hidden, hidden, "fp8_scale"
    )
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"mtp.{index}.", mtp)
    return tensors


def _v4_block(config: Config, ratio: int, *, is_hashed: bool) -> Tensors:
    hidden, heads, head = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    q_rank, groups, o_rank = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    num_experts, inner, hc = (
        config["n_routed_experts"],
        config["moe_intermediate_size"],
        config["hc_mult"],
    )
    attention = (
        vectors(["attn_sink"], heads, "F32") | norms("q_norm", q_rank) | norms("kv_norm", head)
        | linear("wq_a", q_rank, hidden, "fp8_scale") | linear("wq_b", heads * head, q_rank, "fp8_scale")
        | linear("wkv", head, hidden, "fp8_scale")
        | linear("wo_a", groups * o_rank, heads * head // groups, "fp8_scale")
        | linear("wo_b", hidden, groups * o_rank, "fp8_scale")
    )  # fmt: skip
    if ratio:
        attention |= under("compressor.", _compressor(ratio, head, hidden))
    if ratio == 4:
        index_heads, index_dim = config["index_n_heads"], config["index_head_dim"]
        attention |= under("indexer.", (
            linear("wq_b", index_heads * index_dim, q_rank, "fp8_scale") | linear("weights_proj", index_heads, hidden)
            | under("compressor.", _compressor(ratio, index_dim, hidden))
        ))  # fmt: skip
    ffn = linear("gate", num_experts, hidden)
    if is_hashed:
        ffn["gate.tid2eid"] = ("I64", (config["vocab_size"], config["num_experts_per_tok"]))
    else:
        ffn |= vectors(["gate.bias"], num_experts, "F32")
    ffn |= experts("experts", num_experts, hidden, inner, "mxfp4", names="w1 w3 w2")
    ffn |= gated_mlp("shared_experts", hidden, inner, "fp8_scale", names="w1 w3 w2")
    state = _hyper_connections("attn", hc, (2 + hc) * hc, hidden) | _hyper_connections(
        "ffn", hc, (2 + hc) * hc, hidden
    )
    return (
        under("attn.", attention) | norms("attn_norm ffn_norm", hidden) | under("ffn.", ffn) | state
    )


def _compressor(ratio: int, head: int, hidden: int) -> Tensors:
    width = (2 if ratio == 4 else 1) * head  # windows overlap at ratio 4
    return (
        {"ape": ("F32", (ratio, width))} | norms("norm", head)
        | linear("wkv", width, hidden) | linear("wgate", width, hidden)
    )  # fmt: skip


def _hyper_connections(
    part: str, streams: int, rows: int, hidden: int, *, scales: int = 3
) -> Tensors:
    return {
        f"hc_{part}_fn": ("F32", (rows, streams * hidden)),
        f"hc_{part}_base": ("F32", (rows,)),
        f"hc_{part}_scale": ("F32", (scales,)),
    }


def qwen3_next(config: Config) -> Tensors:
    """Qwen3-Next: fused delta-net projections, one tensor an expert, MTP as `mtp.*`."""
    return (
        embeddings(config)
        | _qwen_layers(
            config, "model.layers.", table("qwen.fused_delta_net", config), _qwen_mlp(config)
        )
        | _qwen_mtp(config, _qwen_mlp(config))
    )


def qwen3_5(config: Config) -> Tensors:
    """Qwen3.5: split delta-net projections; vision-language releases nest the text model and stack
    its experts.
    """
    text = config.get("text_config", config)
    stem = "model.language_model." if "text_config" in config else "model."
    mlp = _qwen_mlp(text)
    stacked = mlp
    if "num_experts" in text:
        count, hidden, inner = (
            text["num_experts"],
            text["hidden_size"],
            text["moe_intermediate_size"],
        )
        stacked = {name: spec for name, spec in mlp.items() if ".experts." not in name} | {
            "mlp.experts.gate_up_proj": ("BF16", (count, 2 * inner, hidden)),
            "mlp.experts.down_proj": ("BF16", (count, hidden, inner)),
        }
    return (
        embeddings(text, f"{stem}embed_tokens", "lm_head", f"{stem}norm")
        | _qwen_layers(text, f"{stem}layers.", table("qwen.delta_net", text), stacked)
        | (table("qwen.vision_tower", config["vision_config"]) if "vision_config" in config else {})
        | _qwen_mtp(text, mlp)
    )


def _qwen_layers(config: Config, stem: str, delta_net: Tensors, mlp: Tensors) -> Tensors:
    tensors: Tensors = {}
    layer_norms = norms("input_layernorm post_attention_layernorm", config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        is_full = (layer + 1) % config["full_attention_interval"] == 0
        mixer = gqa(config, qk_norm=True, gated=True) if is_full else delta_net
        tensors |= under(f"{stem}{layer}.", mixer | mlp | layer_norms)
    return tensors


def _qwen_mtp(config: Config, mlp: Tensors) -> Tensors:
    hidden = config["hidden_size"]
    block = (
        gqa(config, qk_norm=True, gated=True)
        | mlp
        | norms("input_layernorm post_attention_layernorm", hidden)
    )
    tensors = linear("fc", hidden, 2 * hidden) | norms(
        "norm pre_fc_norm_embedding pre_fc_norm_hidden", hidden
    )
    for index in range(config.get("mtp_num_hidden_layers", 1)):
        tensors |= under(f"layers.{index}.", block)
    return under("mtp.", tensors)


def _qwen_mlp(config: Config) -> Tensors:
    hidden = config["hidden_size"]
    if "num_experts" not in config:
        return gated_mlp("mlp", hidden, config["intermediate_size"])
    return under("mlp.", (
        linear("gate", config["num_experts"], hidden)
        | experts("experts", config["num_experts"], hidden, config["moe_intermediate_size"])
        | gated_mlp("shared_expert", hidden, config["shared_expert_intermediate_size"])
        | linear("shared_expert_gate", 1, hidden)
    ))  # fmt: skip


def mimo(config: Config) -> Tensors:
    """MiMo-7B: dense, MTP as `model.mtp_layers.0`, without copies of embedding and head."""
    hidden = config["hidden_size"]
    block = (
        gqa(config, bias=True) | gated_mlp("mlp", hidden, config["intermediate_size"])
        | norms("input_layernorm post_attention_layernorm", hidden)
    )  # fmt: skip
    mtp = block | linear("input_proj", hidden, 2 * hidden)
    mtp |= norms("token_layernorm hidden_layernorm final_layernorm", hidden)
    tensors = embeddings(config)
    for layer in range(config["num_hidden_layers"]):
        tensors |= under(f"model.layers.{layer}.", block)
    for index in range(config["num_nextn_predict_layers"]):
        tensors |= under(f"model.mtp_layers.{index}.", mtp)
    return tensors


FAMILIES: dict[str, Callable[[Config], Tensors]] = layouts.LAYOUTS | {
    "deepseek_v3": deepseek_line,
    "deepseek_v32": deepseek_line,
    "deepseek_v4": deepseek_v4,
    "glm4_moe": deepseek_line,
    "glm4_moe_lite": deepseek_line,
    "glm_moe_dsa": deepseek_line,
    "mimo": mimo,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
}

# --- Files ----------------------------------------------------------------------------------------


def _update(config: Config, changes: Mapping[str, Any]) -> None:
    """Set keys in place, one level into `text_config` and `vision_config`."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key].update(value)
        else:
            config[key] = value


def _known(config: Config, changes: Config) -> Config:
    return {key: value for key, value in changes.items() if key in config}


def _cut(tensors: Mapping[str, tuple[str, tuple[int, ...]]], shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in tensors.items():
        size = num_bytes(*spec)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_shard(path: Path, tensors: Tensors, rng: np.random.Generator | None) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if rng is None:
            file.truncate(8 + len(raw) + end)
        else:
            for name, (dtype, shape) in tensors.items():
                file.write(_values(name, dtype, shape, rng).tobytes())


def _values(name: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Numbers a trained model could have: weights near 0, norms near 1, scales positive and
    small.
    """
    count = math.prod(shape)
    match dtype:
        case "I64":
            return rng.integers(0, 2, count)  # the hash table of DeepSeek-V4: expert indices
        case "I8":
            return rng.integers(
                0, 256, count, dtype=np.uint8
            )  # two e2m1 numbers, all patterns finite
        case "F8_E8M0":
            return rng.integers(118, 123, count, dtype=np.uint8)  # 2^-9 to 2^-5
        case "F8_E4M3":
            magnitude = rng.integers(0, 0x78, count, dtype=np.uint8)  # up to 240; 0x7f is NaN
            return magnitude | rng.integers(0, 2, count, dtype=np.uint8) << 7
    values = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
    if name.endswith(("weight_scale_inv", "weight_scale")):
        values = np.abs(values) / 100 + np.float32(1e-4)
    elif name.endswith(".weight") and "norm" in name.split(".")[-2]:
        values += 1
    # BF16 is the upper half of a float32.
    return values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
