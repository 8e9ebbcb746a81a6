"""Releases whose keys or forms differ from those of their family's layout: real keys, over tiny
shapes; public quantized releases by the files of tests/validate/check/real; and WRAPPED, checkpoints
whose tables are those of a family under other names.

Out: a `Checkpoint` each. Where the keys come from stands at each one.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint_files import Checkpoint
from data_files import json_of, table
from foreign_form import leaves_of
from good import released
from layouts import COMMON, TABLES, Config, Tensors, build
from releases import source_layout

TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"
_KINDS = {"M": "mamba", "*": "attention", "E": "moe"}


def nemotron_ultra() -> Checkpoint:
    """NVIDIA-Nemotron-3-Ultra-550B-A55B: `layers_block_type` and `mtp_layers_block_type`, no count,
    no patterns.

    Keys: those that transformers' NemotronHConfig writes since 5.0 (configuration_nemotron_h.py,
    where num_hidden_layers is deprecated), as in nvidia's repositories of Nemotron 3 Ultra and 3.5
    Lightning. Names are those of Super.
    """
    checkpoint = released("nemotron-3-super")
    config = checkpoint.config
    del config["num_hidden_layers"]
    config["layers_block_type"] = [_KINDS[kind] for kind in config.pop("hybrid_override_pattern")]
    config["mtp_layers_block_type"] = [
        _KINDS[kind] for kind in config.pop("mtp_hybrid_override_pattern")
    ]
    return checkpoint


def qwen38_fp8() -> Checkpoint:
    """Qwen/Qwen3.8-Flash-Next-FP8: routed experts in FP8 blocks, the n-gram table in FP8 with one
    scale, the rest BF16.

    Names, dtypes and shapes: what readers of the release's files ask of them (`weight_scale_inv`
    BF16 by 128 x 128; `ngram_embedding.weight_scale` BF16 [1], vllm #53896); the list of exceptions
    has names on disk, whole, as the MTP part of the release's list has them.
    """
    checkpoint = released("qwen3.8-flash-next")
    plain = [
        name.removesuffix(".weight")
        for name, (_, shape) in checkpoint.tensors.items()
        if len(shape) == 2
    ]
    for name, (_, (num_experts, rows, columns)) in checkpoint.take(
        r".*mlp\.experts\.\w+_proj"
    ).items():
        halves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        shape = (rows // len(halves), columns)
        for expert in range(num_experts):
            for half in halves:
                module = f"{name.rpartition('.')[0]}.{expert}.{half}"
                checkpoint.tensors[f"{module}.weight"] = ("F8_E4M3", shape)
                checkpoint.tensors[f"{module}.weight_scale_inv"] = (
                    "BF16",
                    (shape[0] // 128, shape[1] // 128),
                )
    checkpoint.retype(rf"{re.escape(TABLE)}\.shard_\d+\.weight", "F8_E4M3")
    checkpoint.tensors[f"{TABLE}.weight_scale"] = ("BF16", (1,))
    checkpoint.config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [name for name in plain if not name.startswith(TABLE)],
    }
    return checkpoint


def qwen38_nvfp4() -> Checkpoint:
    """The same with the n-gram table in NVFP4.

    Names, dtypes and shapes: vLLM 0.33.0 models/qwen4_exp/nvidia/ngram_embedding.py (load_weights)
    and common/ngram_embedding.py (Qwen4ExpPLENvFp4EmbeddingMethod).
    """
    checkpoint = qwen38_fp8()
    for name, (_, (rows, columns)) in checkpoint.take(rf"{re.escape(TABLE)}\.shard_.*").items():
        checkpoint.tensors[name] = ("U8", (rows, columns // 2))
        checkpoint.tensors[f"{name}_scale"] = ("F8_E4M3", (rows, columns // 16))
    checkpoint.take(rf"{re.escape(TABLE)}\.weight_scale")
    checkpoint.tensors[f"{TABLE}.weight_scale_2"] = ("F32", ())
    checkpoint.config["text_config"]["ple_embedding_dtype"] = "nvfp4"
    return checkpoint


def minimax_halves() -> tuple[Checkpoint, Checkpoint]:
    """MiniMax-M3 as it is released, and the MTP block alone, as vLLM's loader takes it.

    The release has no tensor of the block, though its config.json counts seven modules. Names and
    keys of the block: vLLM 0.32.0 models/minimax_m3/nvidia/mtp.py (_map_checkpoint_name),
    transformers_utils/configs/minimax_m3.py.
    """
    whole = released("minimax-m3")
    block = {
        name: spec
        for name, spec in whole.tensors.items()
        if name.startswith("language_model.model.mtp.")
    }
    release = {name: spec for name, spec in whole.tensors.items() if name not in block}
    text = whole.config["text_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    alone = {name.removeprefix("language_model."): spec for name, spec in block.items()}
    alone |= dict.fromkeys(
        ("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (vocab, hidden))
    )
    config = {
        **text,
        "model_type": "minimax_m3_mtp",
        "architectures": ["MiniMaxM3MTP"],
        "num_mtp_modules": 1,
    }
    return (
        Checkpoint(
            config=whole.config | {"text_config": text | {"num_mtp_modules": 7}}, tensors=release
        ),
        Checkpoint(config=config, tensors=alone),
    )


FOLDER = Path(__file__).parent.parent / "validate" / "check" / "real"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


@cache
def published(name: str) -> dict[str, Any]:
    """The file of a release."""
    return json_of(FOLDER / f"{name}.json")


def real_release(name: str) -> Checkpoint:
    """A release, trimmed and narrow."""
    given = json.loads(json.dumps(published(name)))
    checkpoint = released(given["layout"])
    checkpoint.config["architectures"] = given["architectures"]
    for holder in (checkpoint.config, checkpoint.config.get("text_config", {})):
        holder.pop("quantization_config", None)
    if "quantization_config" in given:
        checkpoint.config["quantization_config"] = given["quantization_config"]
    if "hf_quant_config" in given:
        checkpoint.json_files["hf_quant_config.json"] = given["hf_quant_config"]
    plain = _plain(checkpoint.tensors) if given["starts_plain"] else checkpoint.tensors
    tensors: Tensors = {}
    for tensor, (dtype, shape) in _one_by_one(plain).items():
        module, _, leaf = tensor.rpartition(".")
        form = _form(given, module)
        if not form or leaf not in ("weight", "scale"):
            tensors[tensor] = (dtype, shape)
        elif leaf == "weight":
            columns = shape[1] * (
                2 if dtype == "I8" else 1
            )  # DeepSeek-V4's experts have four bits in the release
            packed = _packed(form, shape[0], columns)
            tensors |= {f"{module}.{part}": spec for part, spec in packed.items()}
    checkpoint.tensors = tensors
    return checkpoint


def _form(given: dict[str, Any], module: str) -> str:
    if given["stored"] == "quantized_layers":
        for holder in (
            given.get("quantization_config", {}),
            given.get("hf_quant_config", {}).get("quantization", {}),
        ):
            layers = holder.get("quantized_layers", {})
            row = layers.get(module) or layers.get(re.sub(r"\.\d+\.\w+$", "", module))
            if row:
                return row["quant_algo"]
        return ""
    return next(
        (form for form, expression in given["stored"] if re.fullmatch(expression, module)), ""
    )


def _packed(form: str, rows: int, columns: int) -> Tensors:
    """What modelopt and DeepSeek's own FP8 write for a matrix."""
    four_bits = {
        "weight": ("U8", (rows, columns // 2)),
        "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()),
    }
    fp8 = {"weight": ("F8_E4M3", (rows, columns))}
    match form:
        case "NVFP4":
            return four_bits | {"input_scale": ("F32", ())}
        case "W4A16_NVFP4":
            return four_bits
        case "FP8":
            return fp8 | dict.fromkeys(("weight_scale", "input_scale"), ("F32", ()))
        case "MXFP8":
            return fp8 | {"weight_scale": ("U8", (rows, columns // 32))}
        case "GPTQ":
            return leaves_of(rows, columns, "gptq")
        case "GPTQ_64":
            return leaves_of(rows, columns, "gptq", 64)
        case "FP8_BLOCK":
            blocks = (-(-rows // 128), -(-columns // 128))
            return fp8 | {"weight_scale_inv": ("F32", blocks)}
    raise ValueError(form)


def _plain(tensors: Tensors) -> Tensors:
    """A release in FP8 blocks, dequantized."""
    scales = {name for name in tensors if name.endswith(".weight_scale_inv")}
    return {
        name: ("BF16", shape) if f"{name}_scale_inv" in scales else (dtype, shape)
        for name, (dtype, shape) in tensors.items()
        if name not in scales
    }


def _one_by_one(tensors: Tensors) -> Tensors:
    """Experts of the backbone that are stacked in the release are exported one by one."""
    found: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        stem, _, last = name.rpartition(".")
        if not stem.endswith(".experts") or len(shape) != 3 or name.startswith("mtp."):
            found[name] = (dtype, shape)
            continue
        experts, rows, columns = shape
        projections = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
        for expert in range(experts):
            for projection in projections:
                found[f"{stem}.{expert}.{projection}.weight"] = (
                    dtype,
                    (rows // len(projections), columns),
                )
    return found


_OUTER = table("helpers/wrapped")


def qwen4_exp_text() -> tuple[Config, Tensors]:
    config, tensors = source_layout("qwen3.8-flash-next")
    inner = {
        name.replace("model.language_model.", "model."): spec
        for name, spec in tensors.items()
        if not name.startswith("model.visual.")
    }
    return config["text_config"] | _OUTER["qwen4_exp_text"], inner


def inkling_model() -> tuple[Config, Tensors]:
    config, tensors = source_layout("inkling")
    text = config.pop("text_config")
    del config["model_type"]
    return text | config | _OUTER["inkling_model"], tensors


def bailing_v3_vl() -> tuple[Config, Tensors]:
    text, tensors = source_layout("ling-3.0-flash")
    config = _OUTER["bailing_moe_v3_vl"] | {"text_config": text}
    tower = {
        f"model.visual.{name}": spec
        for name, spec in build("qwen_vision_tower", config["vision_config"], COMMON).items()
        if "merger.linear_" not in name
    }
    return config, tensors | tower | build("linear_proj", text, TABLES["bailing_hybrid"])


def intern_s2_preview() -> tuple[Config, Tensors]:
    config, tensors = source_layout("qwen3.5-397b")
    tensors["model.time_series.norm.weight"] = ("BF16", (8,))
    return config | _OUTER["intern_s2_preview"], tensors


def nemotron_omni(
    model_type: str = "nemotron_h_omni_by_its_own_class",
) -> tuple[Config, Tensors]:
    """The language model; with the release's model_type vLLM takes transformers' class, which it
    cannot read.

    Under another one its keys are read as they are, as the release's own class has them.
    """
    text, tensors = source_layout("nemotron-3-super")
    config = _OUTER["NemotronH_Omni_Reasoning_V3"] | {
        "model_type": model_type,
        "llm_config": text,
    }
    return config, {f"language_model.{name}": spec for name, spec in tensors.items()}


WRAPPED = {
    "qwen4_exp_text": qwen4_exp_text,
    "inkling_model": inkling_model,
    "bailing_moe_v3_vl": bailing_v3_vl,
    "intern_s2_preview": intern_s2_preview,
    "NemotronH_Omni_Reasoning_V3": nemotron_omni,
}
