"""Our W4A16 and FP8 checkpoints in the forms of other tools: GPTQ, AWQ, AutoRound, Quark; and what
each tool says.

In: a `Checkpoint` of good.ours. Out: the same with other tensor names, shapes and
quantization_config.

Source: vLLM 0.32.0 auto_gptq.py and auto_awq.py (create_weights) for names and shapes.
"""

from copy import deepcopy
from functools import partial
from typing import Any, Literal

from checkpoint_files import Checkpoint
from good import ours
from tables import table
from tensors import Tensors

Packing = Literal["gptq", "awq"]
GROUP = 128
SAID = table("helpers/foreign_form")
"""What each tool says of the backbone."""


def packed(
    said: dict[str, Any],
    packing: Packing,
    model: str = "glm-4.7",
    mtp: str = "bf16",
    **entries: Any,
) -> Checkpoint:
    """The backbone in 4 bits, the MTP block plain or `W4A16` as well."""
    checkpoint = ours(model, "W4A16", mtp)
    for name, (_, (rows, words)) in checkpoint.take(r".*\.weight_packed").items():
        stem = name.removesuffix(".weight_packed")
        for leaf in ("weight_scale", "weight_shape"):
            del checkpoint.tensors[f"{stem}.{leaf}"]
        for leaf, spec in leaves_of(rows, words * 8, packing).items():
            checkpoint.tensors[f"{stem}.{leaf}"] = spec
    return told(checkpoint, said | entries)


def told(checkpoint: Checkpoint, said: dict[str, Any]) -> Checkpoint:
    checkpoint.config["quantization_config"] = deepcopy(said)  # a case may change it
    checkpoint.config.get("text_config", {}).pop("quantization_config", None)
    return checkpoint


# As GPTQModel writes it (`dynamic` excepts what is plain), AutoAWQ, and AutoRound, which packs as
# GPTQ packs.
gptq = partial(packed, SAID["gptq"], "gptq")
awq = partial(packed, SAID["awq"], "awq")
autoround = partial(packed, SAID["auto-round"], "gptq")


def quark(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """FP8 with a scale a channel and dynamic inputs, as Quark writes it."""
    checkpoint = ours(model, "FP8_DYNAMIC", mtp)
    checkpoint.retype(r".*\.weight_scale", shape=lambda rows, _: (rows,))
    return told(checkpoint, SAID["quark"] | entries)


def quark_nvfp4(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """NVFP4 as Quark writes it: modelopt's shapes, and `input_scale_2`."""
    checkpoint = ours(model, "NVFP4", mtp)
    checkpoint.rename(r"(.*)\.weight_packed", r"\1.weight")
    checkpoint.rename(r"(.*)\.weight_global_scale", r"\1.weight_scale_2")
    checkpoint.rename(r"(.*)\.input_global_scale", r"\1.input_scale_2")
    return told(checkpoint, SAID["quark"] | {"global_quant_config": SAID["quark nvfp4"]} | entries)


def quark_mxfp4(
    model: str = "glm-4.7", mtp: str = "bf16", *, element: str = "fp4", **entries: Any
) -> Checkpoint:
    """MXFP4 weights and inputs as Quark writes them for AMD's GPUs, such as
    amd/DeepSeek-R1-0528-MXFP4.
    """
    checkpoint = ours(model, "MXFP4", mtp)
    checkpoint.rename(r"(.*)\.weight_packed", r"\1.weight")
    group = SAID["quark nvfp4"]["weight"][0]
    weight = group | {"dtype": element, "group_size": 32, "scale_format": "e8m0"}
    said = {"weight": weight, "input_tensors": weight | {"is_dynamic": True}}
    return told(checkpoint, SAID["quark"] | {"global_quant_config": said} | entries)


def autoround_mxfp4(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """MXFP4 as AutoRound writes it: compressed-tensors' names and bytes."""
    return told(ours(model, "MXFP4", mtp), SAID["autoround mxfp4"] | entries)


def w4afp8() -> Checkpoint:
    """Integers of 4 bits with inputs in FP8, of every linear module; the list of exceptions is
    ours.
    """
    checkpoint = ours("qwen3.5-397b", "W4A16")
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    for group in checkpoint.quantization["config_groups"].values():
        group |= {"targets": ["Linear"], "input_activations": inputs | {"symmetric": True}}
    return checkpoint


def leaves_of(rows: int, columns: int, packing: Packing) -> Tensors:
    groups = columns // GROUP
    leaves = {
        "qweight": ("I32", (columns, rows // 8)),
        "scales": ("F16", (groups, rows)),
        "qzeros": ("I32", (groups, rows // 8)),
    }
    if packing == "gptq":
        leaves["qweight"] = ("I32", (columns // 8, rows))
        leaves["g_idx"] = ("I32", (columns,))
    return leaves
