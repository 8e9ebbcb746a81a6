"""Checkpoints as their makers publish them: true names, dtypes and shapes, at full size or tiny.

In: a model's name (the recipes' `model`). Out: its config.json and {tensor name: (dtype, shape)},
and on request the files: holes instead of weights at full size, small finite numbers at tiny size.

What a maker publishes of a family is a file in tests/helpers/layouts/. And every recipe that ships,
with the checkpoints that they make.
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from keepmtp import api
from keepmtp.recipes.find import named_file
from keepmtp.recipes.model_file import model_files
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import num_bytes
from layouts import MODELS, NARROW, TABLES, TINY, Config, Tensors, build

SHARD_BYTES = 5_000_000_000
# One half in the bytes of a dtype: a value that no norm starts its training with.
HALF = {"F32": b"\0\0\0\x3f", "BF16": b"\0\x3f", "F16": b"\0\x38", "F8_E8M0": b"\x7e"}

SPLIT = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_num_key_heads": 4,
                 "linear_num_value_heads": 8, "num_heads": 4}  # fmt: skip


def source_layout(
    model: str,
    *,
    size: Literal["tiny", "split", "full"] = "tiny",
    changes: Mapping[str, Any] | None = None,
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
        _update(config, _known(config, NARROW))
        _update(config, TINY[config["model_type"]])
    if size == "split":
        _update(config, _everywhere(config, SPLIT))
    _update(config, changes or {})
    return config, build(config["model_type"], config, TABLES[config["model_type"]])


def thin_layout(model: str, num_experts: int = 2) -> tuple[Config, Tensors]:
    """A release at its true widths with few layers and experts: all that decides which schemes it
    can take.
    """
    depth = {"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_hash_layers": 1, "depth": 1}
    depth["layer_group_size"] = 2
    experts = {"num_experts_per_tok": 2}
    experts |= dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), num_experts)
    changes = _everywhere(MODELS[model], depth | experts)
    return source_layout(model, size="full", changes=changes)


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Tensors, *,
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
    most = SHARD_BYTES
    if num_shards is not None:
        most = math.ceil(total / num_shards)
    shards = _cut(tensors, most)
    rng = None
    if data == "random":
        rng = np.random.default_rng(seed)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if num_shards != 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        write_shard(folder / file, {name: tensors[name] for name in names}, rng)
    if num_shards != 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def target_of(assistant: Config) -> tuple[Config, Tensors]:
    """config.json and tensors of a language model, text only and two layers deep, that one of Gemma
    4's assistants can draft for.
    """
    config = assistant["text_config"] | {
        "architectures": ["Gemma4ForCausalLM"], "hidden_size": assistant["backbone_hidden_size"],
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
    }  # fmt: skip
    return config, build("gemma4_text", config, TABLES["gemma4_assistant"])


def _update(config: Config, changes: Mapping[str, Any]) -> None:
    """Set keys in place, one level into `text_config` and `vision_config`."""
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            config[key].update(value)
        else:
            config[key] = value


def _known(config: Config, changes: Config) -> Config:
    """Those of the changes whose keys the config has, in the parts that they are for."""
    found = {}
    for key in changes.keys() & config.keys():
        found[key] = changes[key]
        if isinstance(changes[key], dict):
            found[key] = _known(config[key], changes[key])
    return found


def _everywhere(config: Config, changes: Config) -> Config:
    """Those of the changes whose keys the config or a part of it has."""
    parts = {key: _known(part, changes) for key, part in config.items() if isinstance(part, dict)}
    return parts | _known(config, changes)


def _cut(tensors: Tensors, shard_bytes: int) -> list[list[str]]:
    shards = [[]]
    filled = 0
    for name, spec in tensors.items():
        size = num_bytes(*spec)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_shard(
    path: Path, tensors: Tensors, rng: np.random.Generator | None = None, *, has_norms: bool = False
) -> None:
    """Write a safetensors file: with holes, or with numbers where there is an `rng`; with
    `has_norms`, floats that are one number or one row or column are one half and no holes.
    """
    header = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end = end + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        if rng is None:
            file.truncate(8 + len(raw) + end)
            for name, (dtype, shape) in tensors.items():
                if has_norms and dtype in HALF and math.prod(shape) == max(shape, default=1):
                    file.seek(8 + len(raw) + header[name]["data_offsets"][0])
                    file.write(HALF[dtype] * math.prod(shape))
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
    if dtype == "F32":
        return values
    # BF16 is the upper half of a float32.
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def shipped_recipes() -> list[Recipe]:
    files = [named_file(path.stem)[0] for path in model_files()]
    return [file.recipe(variant) for file in files for variant in file.flat]


def made_of(recipe: str, out: Path, **choices: str) -> Path:
    """The checkpoint that a recipe makes, by a plan with these choices."""
    return api.quantize(api.plan(recipe, **choices), out).out
