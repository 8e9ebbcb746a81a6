"""Checkpoints of models that never had an MTP block, in the forms of several tools: Llama's names,
tiny sizes.

In: a tool's word. Out: a `Checkpoint`, good as it is; test_without_family.py breaks some.
"""

from copy import deepcopy

import foreign_form
from checkpoint_files import Checkpoint
from layouts import COMMON, Tensors, build

_SAID = foreign_form.SAID
CONFIG = _SAID["llama"]
SAID = {
    "gptq": _SAID["gptq"],
    "awq": _SAID["awq"],
    "awq with a list": _SAID["awq"] | _SAID["awq with a list"],
    "auto-round": _SAID["auto-round"] | _SAID["auto-round with entries"],
    "quark": _SAID["quark"] | _SAID["quark with a list"],
} | {
    name: _SAID[name] for name in ("compressed-tensors", "compressed-tensors, integers", "modelopt")
}
_TABLES = COMMON | {
    "llama": {
        ".": "ends",
        "model.layers.{num_hidden_layers}": [
            "norms",
            "attention",
            "dense if model_type == 'llama'",
            "routed if model_type != 'llama'",
        ],
    },
    "attention": {"self_attn": ["gqa 1", "qk_norm if model_type != 'llama'"]},
    "routed": {
        "mlp.gate": "linear num_experts hidden_size",
        "mlp.experts.{num_experts}": "gated moe_intermediate_size hidden_size",
    },
}


def llama(tool: str = "", *, experts: bool = False) -> Checkpoint:
    """The model as a tool writes it; "" for plain. With experts, its names are those of Qwen3's
    mixture.
    """
    config = dict(CONFIG)
    said = deepcopy(SAID.get(tool, {}))
    if experts:
        if "modules_to_not_convert" in said:
            said["modules_to_not_convert"].append("mlp.gate")  # gate_proj in a dense one
        config |= {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
        }
    tensors = {}
    for name, (dtype, shape) in build("llama", config, _TABLES).items():
        leaves = {"weight": (dtype, shape)}
        if name.endswith("_proj.weight"):
            leaves = _stored(tool, *shape)
        for leaf, spec in leaves.items():
            tensors[f"{name.removesuffix('weight')}{leaf}"] = spec
    if said:
        config["quantization_config"] = said
    return Checkpoint(config=config, tensors=tensors)


def _stored(tool: str, rows: int, columns: int) -> Tensors:
    match tool:
        case "gptq" | "auto-round":
            return foreign_form.leaves_of(rows, columns, "gptq")
        case "awq" | "awq with a list":
            return foreign_form.leaves_of(rows, columns, "awq")
        case "quark":
            return _fp8(rows, columns, (rows,))
        case "compressed-tensors":
            return _fp8(rows, columns, (rows, 1))
        case "compressed-tensors, integers":
            packed = {
                "weight_packed": ("I32", (rows, columns // 8)),
                "weight_shape": ("I64", (2,)),
            }
            return packed | {"weight_scale": ("BF16", (rows, columns // 128))}
        case "modelopt":
            return _fp8(rows, columns, ()) | {"input_scale": ("F32", ())}
    return {"weight": ("BF16", (rows, columns))}


def _fp8(rows: int, columns: int, scales: tuple[int, ...]) -> Tensors:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", scales)}
