"""Our W4A16 and FP8 checkpoints in the forms of other tools: GPTQ, AWQ, AutoRound, Quark; and what
each tool says.

In: a `Checkpoint` of good.ours. Out: the same with other tensor names, shapes and
quantization_config.

Source: vLLM 0.32.0 auto_gptq.py and auto_awq.py (create_weights) for names and shapes.
"""

from typing import Any, Literal

from checkpoint_files import Checkpoint
from good import ours

Packing = Literal["gptq", "awq"]
GROUP = 128
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_AUTO = {"quant_method": "auto-round", "bits": 4, "sym": True}
AUTOROUND = _AUTO | {"group_size": GROUP, "data_type": "int"}
AUTOROUND |= {"packing_format": "auto_round:auto_gptq"}
AUTOROUND_MXFP4 = _AUTO | {"group_size": 32, "data_type": "mx_fp"}
_FP8 = {
    "dtype": "fp8_e4m3",
    "qscheme": "per_channel",
    "ch_axis": 0,
    "is_dynamic": False,
    "symmetric": True,
}
_GROUP = {"dtype": "fp4", "qscheme": "per_group", "group_size": 16}
_ONE = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
_NVFP4 = {
    "weight": [_GROUP | {"is_dynamic": False}, _ONE],
    "input_tensors": [_GROUP | {"is_dynamic": True}, _ONE],
}
QUARK = {
    "quant_method": "quark",
    "export": {"kv_cache_group": [], "pack_method": "reorder"},
    "global_quant_config": {"weight": _FP8, "input_tensors": {**_FP8, "is_dynamic": True}},
    "layer_quant_config": {},
    "layer_type_quant_config": {},
    "exclude": [],
}


def packed(
    model: str, said: dict[str, Any], packing: Packing, mtp: str = "bf16", **entries: Any
) -> Checkpoint:
    """The backbone in 4 bits, the MTP block plain or `W4A16` as well."""
    checkpoint = ours(model, "W4A16", mtp)
    for name in [name for name in checkpoint.tensors if name.endswith(".weight_packed")]:
        stem = name.removesuffix(".weight_packed")
        rows, words = checkpoint.tensors.pop(name)[1]
        for leaf in ("weight_scale", "weight_shape"):
            del checkpoint.tensors[f"{stem}.{leaf}"]
        checkpoint.tensors |= {
            f"{stem}.{leaf}": spec for leaf, spec in leaves_of(rows, words * 8, packing).items()
        }
    return told(checkpoint, said | entries)


def told(checkpoint: Checkpoint, said: dict[str, Any]) -> Checkpoint:
    checkpoint.config["quantization_config"] = said
    checkpoint.config.get("text_config", {}).pop("quantization_config", None)
    return checkpoint


def gptq(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """As GPTQModel writes it; `dynamic` excepts what is plain."""
    return packed(model, GPTQ, "gptq", mtp, **entries)


def awq(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """As AutoAWQ writes it."""
    return packed(model, AWQ, "awq", mtp, **entries)


def autoround(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """As AutoRound writes it, packed as GPTQ packs."""
    return packed(model, AUTOROUND, "gptq", mtp, **entries)


def quark(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """FP8 with a scale a channel and dynamic inputs, as Quark writes it."""
    checkpoint = ours(model, "FP8_DYNAMIC", mtp)
    checkpoint.retype(r".*\.weight_scale", shape=lambda rows, _: (rows,))
    return told(checkpoint, QUARK | entries)


def quark_nvfp4(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """NVFP4 as Quark writes it: modelopt's shapes, and `input_scale_2`."""
    checkpoint = ours(model, "NVFP4", mtp)
    checkpoint.rename(r"(.*)\.weight_packed", r"\1.weight")
    checkpoint.rename(r"(.*)\.weight_global_scale", r"\1.weight_scale_2")
    checkpoint.rename(r"(.*)\.input_global_scale", r"\1.input_scale_2")
    return told(checkpoint, QUARK | {"global_quant_config": _NVFP4} | entries)


def quark_mxfp4(
    model: str = "glm-4.7", mtp: str = "bf16", *, element: str = "fp4", **entries: Any
) -> Checkpoint:
    """MXFP4 weights and inputs as Quark writes them for AMD's GPUs, such as
    amd/DeepSeek-R1-0528-MXFP4.
    """
    checkpoint = ours(model, "MXFP4", mtp)
    checkpoint.rename(r"(.*)\.weight_packed", r"\1.weight")
    weight = _GROUP | {"dtype": element, "group_size": 32, "is_dynamic": False}
    weight |= {"scale_format": "e8m0"}
    said = {"weight": weight, "input_tensors": weight | {"is_dynamic": True}}
    return told(checkpoint, QUARK | {"global_quant_config": said} | entries)


def autoround_mxfp4(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """MXFP4 as AutoRound writes it: compressed-tensors' names and bytes."""
    checkpoint = ours(model, "MXFP4", mtp)
    return told(checkpoint, AUTOROUND_MXFP4 | entries)


def leaves_of(rows: int, columns: int, packing: Packing) -> dict[str, tuple[str, tuple[int, ...]]]:
    groups = columns // GROUP
    leaves: dict[str, tuple[str, tuple[int, ...]]] = {
        "qweight": ("I32", (columns // 8, rows) if packing == "gptq" else (columns, rows // 8)),
        "scales": ("F16", (groups, rows)),
        "qzeros": ("I32", (groups, rows // 8)),
    }
    return leaves | ({"g_idx": ("I32", (columns,))} if packing == "gptq" else {})
