"""Public quantized releases, as far as their files are public: configs as published, names and
shapes by rule.

In: a file of tests/validate/check/real. Out: a `Checkpoint`. The file says which repository it is
from, where it was read, what was trimmed, and what is derived. `stored` says which modules on disk
are packed, and how: by expressions for names on disk, or by the release's own quantized_layers.

Easy to get wrong: nothing here asks keepmtp what is packed. So the check compares two things that
do not know each
other: the published patterns, in the names that vLLM matches them with, and the names on disk.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from checkpoint_files import Checkpoint
from good import released
from json_files import json_of

FOLDER = Path(__file__).parent.parent / "validate" / "check" / "real"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
Spec = tuple[str, tuple[int, ...]]


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
    tensors: dict[str, Spec] = {}
    for tensor, (dtype, shape) in _one_by_one(plain).items():
        module, _, leaf = tensor.rpartition(".")
        form = _form(given, module)
        if not form or leaf not in ("weight", "scale"):
            tensors[tensor] = (dtype, shape)
        elif leaf == "weight":
            columns = shape[1] * (
                2 if dtype == "I8" else 1
            )  # DeepSeek-V4's experts have four bits in the release
            tensors |= {f"{module}.{part}": spec for part, spec in _packed(form, shape[0], columns)}
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


def _packed(form: str, rows: int, columns: int) -> list[tuple[str, Spec]]:
    """What modelopt and DeepSeek's own FP8 write for a matrix."""
    scalar = ("F32", ())
    four_bits = [
        ("weight", ("U8", (rows, columns // 2))),
        ("weight_scale", ("F8_E4M3", (rows, columns // 16))),
    ]
    match form:
        case "NVFP4":
            return [*four_bits, ("weight_scale_2", scalar), ("input_scale", scalar)]
        case "W4A16_NVFP4":
            return [*four_bits, ("weight_scale_2", scalar)]
        case "FP8":
            return [
                ("weight", ("F8_E4M3", (rows, columns))),
                ("weight_scale", scalar),
                ("input_scale", scalar),
            ]
        case "MXFP8":
            return [
                ("weight", ("F8_E4M3", (rows, columns))),
                ("weight_scale", ("U8", (rows, columns // 32))),
            ]
        case "GPTQ" | "GPTQ_64":
            groups = columns // (64 if form == "GPTQ_64" else 128)
            return [
                ("qweight", ("I32", (columns // 8, rows))),
                ("scales", ("F16", (groups, rows))),
                ("qzeros", ("I32", (groups, rows // 8))),
                ("g_idx", ("I32", (columns,))),
            ]
        case "FP8_BLOCK":
            blocks = (-(-rows // 128), -(-columns // 128))
            return [("weight", ("F8_E4M3", (rows, columns))), ("weight_scale_inv", ("F32", blocks))]
    raise ValueError(form)


def _plain(tensors: dict[str, Spec]) -> dict[str, Spec]:
    """A release in FP8 blocks, dequantized."""
    scales = {name for name in tensors if name.endswith(".weight_scale_inv")}
    return {
        name: ("BF16", shape) if f"{name}_scale_inv" in scales else (dtype, shape)
        for name, (dtype, shape) in tensors.items()
        if name not in scales
    }


def _one_by_one(tensors: dict[str, Spec]) -> dict[str, Spec]:
    """Experts of the backbone that are stacked in the release are exported one by one."""
    found: dict[str, Spec] = {}
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
