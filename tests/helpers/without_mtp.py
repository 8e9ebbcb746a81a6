"""Checkpoints of models that never had an MTP block, in the forms of several tools: Llama's names,
tiny sizes.

In: a tool's word. Out: a `Checkpoint`, good as it is; test_without_family.py breaks some.
"""

from copy import deepcopy

import foreign_form
from checkpoint_files import Checkpoint
from layouts import Tensors

HIDDEN = 256
WIDE = 512
LAYERS = 6
VOCABULARY = 320
EXPERTS = 4
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


def llama(tool: str = "", *, experts: bool = False) -> Checkpoint:
    """The model as a tool writes it; "" for plain. With experts, its names are those of Qwen3's
    mixture.
    """
    config = dict(CONFIG)
    said = deepcopy(SAID.get(tool, {}))
    if said:
        config["quantization_config"] = said
    if experts:
        if "modules_to_not_convert" in said:
            said["modules_to_not_convert"].append("mlp.gate")  # gate_proj in a dense one
        config |= {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": WIDE,
            "head_dim": HIDDEN // 4,
        }
    tensors = {
        "model.embed_tokens.weight": ("BF16", (VOCABULARY, HIDDEN)),
        "model.norm.weight": ("BF16", (HIDDEN,)),
        "lm_head.weight": ("BF16", (VOCABULARY, HIDDEN)),
    }
    for number in range(LAYERS):
        stem = f"model.layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}{norm}.weight"] = ("BF16", (HIDDEN,))
        if experts:
            tensors[f"{stem}mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
            for norm in ("q_norm", "k_norm"):
                tensors[f"{stem}self_attn.{norm}.weight"] = ("BF16", (HIDDEN // 4,))
        for path, (rows, columns) in _matrices(experts=experts).items():
            for leaf, spec in _stored(tool, rows, columns).items():
                tensors[f"{stem}{path}.{leaf}"] = spec
    return Checkpoint(config=config, tensors=tensors)


def _matrices(*, experts: bool) -> dict[str, tuple[int, int]]:
    heads = dict.fromkeys(("self_attn.q_proj", "self_attn.o_proj"), (HIDDEN, HIDDEN))
    heads |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (HIDDEN // 2, HIDDEN))
    mlp = {"gate_proj": (WIDE, HIDDEN), "up_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}
    stems = ["mlp."]
    if experts:
        stems = [f"mlp.experts.{number}." for number in range(EXPERTS)]
    for stem in stems:
        for last, shape in mlp.items():
            heads[stem + last] = shape
    return heads


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
