"""Our checkpoints in the forms of other tools: GPTQ, AWQ, AutoRound, Quark; the decisions of a plan
as nvidia-modelopt writes them; and what each tool says.

In: a `Checkpoint` of good.ours, or what it is made from. Out: the same with other tensor names,
shapes and quantization_config (or hf_quant_config.json).

Source: vLLM 0.32.0 auto_gptq.py and auto_awq.py (create_weights) for names and shapes.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from checkpoint_files import Checkpoint
from data_files import table
from good import ours, planned
from keepmtp.checkpoints.dialects.modelopt import layer_row, modelopt_config
from keepmtp.checkpoints.dialects.modules import RuntimeModule, runtime_modules
from keepmtp.quantize.plan.configs import modules_of
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.conventions import ALGORITHMS
from keepmtp.recipes.frozen import without
from keepmtp.recipes.renamer import renamer
from layouts import Tensors

Packing = Literal["gptq", "awq"]
SAID = table("helpers/foreign_form")
"""What each tool says of the backbone."""


def packed(
    said: dict[str, Any],
    packing: Packing,
    model: str = "glm-4.7",
    mtp: str = "bf16",
    group_size: int = 128,
    **entries: Any,
) -> Checkpoint:
    """The backbone in 4 bits, the MTP block plain or `W4A16` as well; a group of -1 is a row."""
    checkpoint = ours(model, "W4A16", mtp)
    for name, (_, (rows, words)) in checkpoint.take(r".*\.weight_packed").items():
        stem = name.removesuffix(".weight_packed")
        for leaf in ("weight_scale", "weight_shape"):
            del checkpoint.tensors[f"{stem}.{leaf}"]
        for leaf, spec in leaves_of(rows, words * 8, packing, group_size).items():
            checkpoint.tensors[f"{stem}.{leaf}"] = spec
    return told(checkpoint, said | entries | {"group_size": group_size})


def told(checkpoint: Checkpoint, said: dict[str, Any]) -> Checkpoint:
    checkpoint.config["quantization_config"] = deepcopy(said)  # a case may change it
    checkpoint.config.get("text_config", {}).pop("quantization_config", None)
    return checkpoint


# As GPTQModel writes it (`dynamic` excepts what is plain), AutoAWQ, and AutoRound, which packs as
# GPTQ packs.
gptq = partial(packed, SAID["gptq"], "gptq")
awq = partial(packed, SAID["awq"], "awq")
autoround = partial(packed, SAID["auto-round"], "gptq")


def autoround_block(model: str) -> Checkpoint:
    """As AutoRound 0.16.1 rounds GLM's block: all of it, whatever vLLM builds plain."""
    routers = {f"model.layers.{layer}.mlp.gate": {"bits": 16} for layer in range(4)}
    checkpoint = autoround(
        model, "W4A16", block_name_to_quantize=["model.layers"], extra_config=routers
    )
    whole = r"(.*layers\.3\.(eh_proj|embed_tokens|shared_head\.head))\.weight"
    for name, (_, (rows, columns)) in checkpoint.take(whole).items():
        for leaf, spec in leaves_of(rows, columns, "gptq").items():
            checkpoint.tensors[name.replace("weight", leaf)] = spec
    checkpoint.take(r".*\.g_idx")
    return checkpoint


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


def quark_mxfp4(model: str = "glm-4.7", mtp: str = "bf16", **entries: Any) -> Checkpoint:
    """MXFP4 weights and inputs as Quark writes them for AMD's GPUs, such as
    amd/DeepSeek-R1-0528-MXFP4.
    """
    checkpoint = ours(model, "MXFP4", mtp)
    checkpoint.rename(r"(.*)\.weight_packed", r"\1.weight")
    group = SAID["quark nvfp4"]["weight"][0]
    weight = group | {"group_size": 32, "scale_format": "e8m0"}
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


def leaves_of(rows: int, columns: int, packing: Packing, group_size: int = 128) -> Tensors:
    groups = max(1, columns // group_size)
    leaves = {
        "qweight": ("I32", (columns, rows // 8)),
        "scales": ("F16", (groups, rows)),
        "qzeros": ("I32", (groups, rows // 8)),
    }
    if packing == "gptq":
        leaves["qweight"] = ("I32", (columns // 8, rows))
        leaves["g_idx"] = ("I32", (columns,))
    return leaves


# ModelOptFp8MoEMethod registers one scale a tensor, whatever the algorithm: experts have no form
# for these two.
LINEAR_ONLY = ("FP8_DYNAMIC", "FP8_BLOCK")
PRODUCER = {"name": "modelopt", "version": "0.41.0"}


def modelopt(model: str, scheme: str = "NVFP4", mtp: str = "bf16", **changes: Any) -> Checkpoint:
    """A modelopt export: one algorithm, or MIXED_PRECISION where the MTP block has a scheme of its
    own.
    """
    checkpoint = ours(model, scheme, mtp, **changes)
    plan = planned(model, scheme, mtp, **changes)
    retell(checkpoint)
    checkpoint.config["quantization_config"] = said(plan)
    return checkpoint


def mixed(model: str = "glm-4.7", scheme: str = "FP8") -> Checkpoint:
    """MIXED_PRECISION: every quantized module by name, everything else plain without being
    excluded.
    """
    checkpoint = modelopt(model, scheme)
    modules = runtime_modules(modules_of(planned(model, scheme, "bf16")))
    checkpoint.config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": ["lm_head"],
        "quantized_layers": quantized_layers(checkpoint.config, modules),
        "producer": PRODUCER,
    }
    return checkpoint


def mxfp8_block(model: str = "glm-4.7") -> Checkpoint:
    """NVFP4, with the MTP block in MXFP8: FP8, and a power of two for 32 inputs."""
    checkpoint = modelopt(model, mtp="FP8")
    for row in checkpoint.quantization["quantized_layers"].values():
        if row["quant_algo"] == "FP8":
            row["quant_algo"] = "MXFP8"
    for name, (dtype, shape) in [*checkpoint.tensors.items()]:
        if dtype == "F8_E4M3" and name.endswith(".weight"):
            checkpoint.tensors[f"{name}_scale"] = ("U8", (shape[0], shape[1] // 32))
            del checkpoint.tensors[f"{name.removesuffix('.weight')}.input_scale"]
    return checkpoint


def mixed_in_two_files(*, here: list[str], there: list[str]) -> Checkpoint:
    """MIXED_PRECISION with quantized_layers in hf_quant_config.json alone, and a list of exceptions
    in each file.
    """
    checkpoint = mixed()
    layers = checkpoint.quantization.pop("quantized_layers")
    checkpoint.quantization["ignore"] = here
    said = {"quant_algo": "MIXED_PRECISION", "exclude_modules": there, "quantized_layers": layers}
    checkpoint.json_files["hf_quant_config.json"] = {"producer": PRODUCER, "quantization": said}
    return checkpoint


def block_experts(model: str = "glm-4.7", algorithm: str = "FP8_PB_WO") -> Checkpoint:
    """MIXED_PRECISION with FP8 in blocks: experts by native FP8's names, the rest by modelopt's."""
    checkpoint = mixed(model, "FP8_BLOCK")
    experts = r"(.*\.experts\.\d+\..*)\.weight_scale"
    checkpoint.retype(experts, shape=lambda rows, _, columns, __: (rows, columns))
    checkpoint.rename(experts, r"\1.weight_scale_inv")
    for name, row in checkpoint.quantization["quantized_layers"].items():
        row["quant_algo"] = algorithm if name.endswith(".experts") else row["quant_algo"]
    return checkpoint


def in_hf_quant_config(checkpoint: Checkpoint) -> Checkpoint:
    """The same config where modelopt itself writes it: in hf_quant_config.json, under
    `quantization`.
    """
    given = checkpoint.config.pop("quantization_config")
    checkpoint.config.get("text_config", {}).pop(
        "quantization_config", None
    )  # it would be read first
    inner = {
        "quant_algo": given["quant_algo"],
        "kv_cache_quant_algo": None,
        "exclude_modules": given["ignore"],
    }
    inner |= {key: given[key] for key in ("group_size", "quantized_layers") if key in given}
    checkpoint.json_files["hf_quant_config.json"] = {"producer": PRODUCER, "quantization": inner}
    return checkpoint


def retell(checkpoint: Checkpoint) -> None:
    """Names and shapes of compressed-tensors' tensors -> modelopt's; FP8 in blocks gets its scales
    in four dimensions.

    NVFP4: weight U8 [N, K/2], weight_scale F8_E4M3 [N, K/16], weight_scale_2 and input_scale F32
    [].
    FP8: weight F8_E4M3, weight_scale and input_scale F32 []; a channel: weight_scale F32 [N];
    blocks: F32 [N/128, 1, K/128, 1].
    """
    modules: dict[str, Tensors] = {}
    for name, spec in checkpoint.tensors.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, {})[leaf] = spec
    tensors: Tensors = {}
    for module, leaves in modules.items():
        if "weight_packed" in leaves:
            leaves["weight"] = leaves.pop("weight_packed")
            leaves["weight_scale_2"] = ("F32", leaves.pop("weight_global_scale")[1][:0])
            if "input_global_scale" in leaves:
                leaves["input_scale"] = ("F32", leaves.pop("input_global_scale")[1][:0])
        elif leaves.get("weight", ("",))[0] == "F8_E4M3" and "scale" not in leaves:  # no table
            leaves["weight_scale"] = (
                "F32",
                _scale_shape(leaves["weight"][1], leaves["weight_scale"][1]),
            )
            if "input_scale" in leaves:
                leaves["input_scale"] = ("F32", ())
        tensors |= {f"{module}.{leaf}".lstrip("."): spec for leaf, spec in leaves.items()}
    checkpoint.tensors = tensors


def said(plan: Plan) -> dict[str, Any]:
    """config.json's `quantization_config`, as modelopt 0.37 and later writes it."""
    modules = modules_of(plan)
    schemes = {module.scheme for module in modules} - {""}
    view = plan.view
    if len(schemes) == 1:  # also where vLLM needs the algorithm of each module
        view = replace(view, family=replace(view.family, modelopt_by_module=False))
    config = modelopt_config(view, modules)
    if len(schemes) == 1:
        config.pop("quantized_layers", None)
        config["quant_algo"] = ALGORITHMS[schemes.pop()]
    return without(config, "kv_cache_scheme") | {"producer": PRODUCER}


def quantized_layers(
    config: Mapping[str, Any], modules: Iterable[RuntimeModule]
) -> dict[str, dict[str, Any]]:
    """MIXED_PRECISION's table, by runtime name; what modelopt adds to each row is only its group
    size.
    """
    rename = renamer(config)
    layers = {}
    for module in modules:
        if module.scheme:
            spelled = [
                word for word in (module.name, *module.asked) if rename.name(word) == module.name
            ]
            name = str(next(iter(spelled), module.name))
            layers[name] = layer_row(ALGORITHMS[module.scheme])
    return layers


def _scale_shape(weight: tuple[int, ...], scale: tuple[int, ...]) -> tuple[int, ...]:
    if len(scale) == 2 and scale[1] == 1 and scale[0] == weight[0]:
        return scale[:1]
    return (scale[0], 1, scale[1], 1) if len(scale) == 2 else ()
