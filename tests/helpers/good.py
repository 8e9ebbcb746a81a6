"""Good checkpoints: released, written by keepmtp, by llm-compressor, by hand, in each dialect but
modelopt's.

In: nothing. Out: GOOD, name -> a function that builds a `Checkpoint`; modelopt's are in
modelopt_form.py.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import releases
from checkpoint_files import Checkpoint, as_source, pack
from keepmtp.quantize.config.written import files_of, modules_of
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.conventions import Format
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family import QUANTIZABLE_ROLES, HFName
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from tensors import Tensors

_CALIBRATION = {
    "algorithm": "minmax",
    "dataset": "d",
    "dataset_revision": "r",
    "split": "s",
    "column": "c",
    "samples": 1,
    "held_out": 1,
    "sequence_length": 2,
    "batch_size": 1,
    "seed": 0,
}


# What vLLM's classes read beside config.json: model_type -> file -> content.
_COMPANIONS = {
    "dots3_note": {
        "added_tokens.json": {"<|imgpad|>": 500, "<|audiopad|>": 501, "<|audio_comp_pad|>": 502}
    }
}


def released(model: str, **changes: Any) -> Checkpoint:
    """The original release, tiny."""
    config, tensors = releases.source_layout(model, size="tiny", changes=changes)
    return Checkpoint(config=config, tensors=dict(tensors), json_files=companions(config))


def companions(config: dict[str, Any]) -> dict[str, Any]:
    """JSON files that vLLM's classes read beside config.json."""
    return deepcopy(_COMPANIONS.get(config["model_type"], {}))


@cache
def planned(
    model: str,
    scheme: str,
    mtp: str,
    size: str = "tiny",
    format: Format = "compressed-tensors",
    **changes: Any,
) -> Plan:
    """Our plan for a model: one scheme for the whole backbone, and a policy for the MTP block."""
    return plan_of(
        *releases.source_layout(model, size=size, changes=changes), model, scheme, mtp, format
    )


def plan_of(
    config: dict[str, Any],
    tensors: Tensors,
    model: str,
    scheme: str,
    mtp: str,
    format: Format = "compressed-tensors",
) -> Plan:
    """Our plan for a layout, as `planned` makes it."""
    source = as_source(Checkpoint(config=config, tensors=dict(tensors)), Path("/nonexistent"))
    view = find_view(config, model)
    places = [view.place(HFName(name)) for name in tensors]
    roles = {p.role for p in places if p and p.part == "backbone" and not p.row.why_kept} & set(
        QUANTIZABLE_ROLES
    )
    words = (scheme, mtp) if roles else (mtp,)  # a draft of its own has no backbone
    calibrated = any(SCHEMES[word].needs_calibration for word in words if word in SCHEMES)
    # A static input scale distorts what vLLM absorbs; `refuse_unservable` says so.
    absorbed = {
        p.module
        for p in places
        if p
        and p.module.endswith(".kv_b_proj")
        and getattr(SCHEMES.get(mtp if p.part == "mtp" else scheme), "needs_calibration", False)
    }
    pattern = "re:" + "|".join(map(re.escape, sorted(absorbed)))
    recipe = Recipe.model_validate(
        {
            "model": model,
            "variant": scheme.lower(),
            "default": False,
            "summary": "",
            "family": view.family.model_type,
            "source": "local",
            "revision": "local",
            "backbone": dict.fromkeys(roles, scheme),
            "mtp": mtp,
            "calibration": _CALIBRATION if calibrated else None,
            "overrides": [{"modules": pattern, "scheme": "bf16"}] if absorbed else [],
            "format": format,
        }
    )
    return make_plan(recipe, source)


def cached(
    model: str,
    scheme: str = "FP8_DYNAMIC",
    mtp: str = "bf16",
    format: Format = "compressed-tensors",
) -> Plan:
    """Our plan with scales of an FP8 KV cache."""
    plan = planned(model, scheme if format == "compressed-tensors" else "NVFP4", mtp, format=format)
    recipe = plan.recipe.model_dump() | {"kv_cache": "FP8", "calibration": _CALIBRATION}
    return make_plan(Recipe.model_validate(recipe), plan.source)


def ours(
    model: str,
    scheme: str,
    mtp: str = "bf16",
    size: str = "tiny",
    format: Format = "compressed-tensors",
    **changes: Any,
) -> Checkpoint:
    """What keepmtp writes: the plan's tensors and its quantization config."""
    return outputs_of(planned(model, scheme, mtp, size, format, **changes))


def outputs_of(plan: Plan) -> Checkpoint:
    """What keepmtp writes by a plan."""
    files = deepcopy(files_of(plan))
    config = files.pop("config.json")
    tensors = {
        str(output.name): (output.dtype, output.shape)
        for shard in plan.shards
        for output in shard.outputs
    }
    return Checkpoint(config=config, tensors=tensors, json_files={**companions(config), **files})


def llmcompressor(model: str, scheme: str, mtp: str = "bf16") -> Checkpoint:
    """The same tensors under a config as llm-compressor writes it: target Linear, and whole names
    to ignore.
    """
    checkpoint = ours(model, scheme, mtp)
    names = [
        name
        for module in modules_of(planned(model, scheme, mtp))
        if not module.scheme
        for name in module.asked
    ]
    checkpoint.quantization["config_groups"]["group_0"]["targets"] = ["Linear"]
    checkpoint.quantization["ignore"] = [*dict.fromkeys(names), "re:^visual\\."]
    return checkpoint


def published_flash() -> Checkpoint:
    """DeepSeek-V4-Flash as published with NVFP4 experts and FP8 attention, its regexes verbatim."""
    checkpoint = ours("dsv4-flash", "NVFP4")
    plan = ours("dsv4-flash", "FP8_BLOCK")
    for name in [*checkpoint.tensors]:
        if re.match(r"layers\.\d+\.(attn|ffn\.shared_experts)\.", name):
            del checkpoint.tensors[name]
    for name, spec in plan.tensors.items():
        if re.match(r"layers\.\d+\.attn\.", name):
            checkpoint.tensors[name] = spec
    for name, spec in ours("dsv4-flash", "bf16").tensors.items():
        if re.match(r"layers\.\d+\.ffn\.shared_experts\.", name):
            checkpoint.tensors[name] = spec
    checkpoint.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "scale_fmt": "ue8m0",
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "targets": [
                    "re:.*\\.attn\\.(fused_wqa_wkv|compressor\\.fused_wkv_wgate|wq_b|wo_a|wo_b)$"
                ],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "block",
                    "block_structure": [128, 128],
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": {
                    "dynamic": True,
                    "group_size": 128,
                    "num_bits": 8,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                },
            },
            "group_1": {
                "format": "nvfp4-pack-quantized",
                "targets": ["re:.*\\.ffn\\.experts\\.\\d+\\.(w1|w2|w3)$"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "symmetric": True,
                },
                "input_activations": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "dynamic": "local",
                },
            },
        },
        "ignore": [
            "head",
            "embed",
            "re:.*norm.*",
            "re:.*\\.ffn\\.gate$",
            "re:.*mtp\\..*",
            "re:.*\\.layers\\.3\\..*",
        ],
    }
    return checkpoint


def nvfp4_experts() -> Checkpoint:
    """DeepSeek-V4-Pro as published: native FP8 config, NVFP4 experts, MTP passed through as
    MXFP4.
    """
    checkpoint = released("dsv4-pro")
    for name in [*checkpoint.tensors]:
        if re.match(r"layers\.\d+\.ffn\.experts\.", name):
            n, k = checkpoint.tensors[name][1]
            stem = name.rpartition(".")[0]
            if name.endswith(".weight"):
                checkpoint.tensors[name] = ("U8", (n, k))
                checkpoint.tensors[f"{stem}.weight_scale"] = ("F8_E4M3", (n, 2 * k // 16))
                checkpoint.tensors[f"{stem}.weight_scale_2"] = ("F32", (1,))
                checkpoint.tensors[f"{stem}.input_scale"] = ("F32", (1,))
            else:
                del checkpoint.tensors[name]
    checkpoint.quantization.update(moe_quant_algo="NVFP4", ignore=["mtp.*"])
    return checkpoint


def red_hat() -> Checkpoint:
    """Qwen3-Next under a hand-written recipe: delta nets left in BF16, everything by regexes from
    the start.
    """
    checkpoint = ours("qwen3-next-80b", "FP8_DYNAMIC")
    plain = released("qwen3-next-80b").tensors
    for name in [*checkpoint.tensors]:
        if ".linear_attn." in name and name not in plain:
            del checkpoint.tensors[name]
    checkpoint.tensors.update(
        {name: spec for name, spec in plain.items() if ".linear_attn." in name}
    )
    checkpoint.quantization["config_groups"]["group_0"]["targets"] = ["Linear"]
    checkpoint.quantization["ignore"] = [
        "lm_head",
        "re:.*mlp.gate$",
        "re:.*mlp.shared_expert_gate$",
        "re:.*linear_attn.*",
        "re:mtp.*",
        "re:.*visual.*",
    ]
    return checkpoint


def qwen_fp8() -> Checkpoint:
    """Qwen3.5 as its makers publish it in FP8: blocks, MTP layers too, exceptions in names on
    disk.
    """
    checkpoint = ours("qwen3.5-27b", "FP8_BLOCK", "FP8_BLOCK")
    checkpoint.rename(r"(.*)\.weight_scale", r"\1.weight_scale_inv")
    names = [
        name
        for module in modules_of(planned("qwen3.5-27b", "FP8_BLOCK", "FP8_BLOCK"))
        if not module.scheme
        for name in module.asked
        if name.startswith(("model.", "mtp.", "lm_head"))
    ]
    names += [
        name.removesuffix(".weight")
        for name in checkpoint.tensors
        if name.startswith("model.visual.") and name.endswith(".weight")
    ]
    checkpoint.config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": names,
    }
    return checkpoint


def native_bf16_mtp() -> Checkpoint:
    """DeepSeek-V3 in its own FP8, MTP block dequantized and listed whole name by whole name."""
    checkpoint = released("deepseek-r1")
    stem = "model.layers.3."
    scaled = [
        n.rpartition(".")[0] for n in checkpoint.take(r"model\.layers\.3\..*weight_scale_inv")
    ]
    for module in scaled:
        checkpoint.tensors[f"{module}.weight"] = ("BF16", checkpoint.tensors[f"{module}.weight"][1])
    attention = ["fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]
    checkpoint.quantization["ignored_layers"] = [
        *(f"{stem}self_attn.{name}" for name in attention),
        f"{stem}mlp.shared_experts.gate_up_proj",
        f"{stem}mlp.shared_experts.down_proj",
        f"{stem}mlp.experts",
    ]
    return checkpoint


def copies_in_fp8() -> Checkpoint:
    """GLM-4.7 with all of the MTP layer in FP8, the embedding and head too in whose place vLLM puts
    the target's.
    """
    checkpoint = llmcompressor("glm-4.7", "FP8_DYNAMIC")
    pack(r"model\.layers\.3\.(embed_tokens|shared_head\.head)", "FP8_DYNAMIC")(checkpoint)
    return checkpoint


def head_that_is_skipped() -> Checkpoint:
    """Ring 2.5 with a packed copy of the head in its MTP layer, whose loader skips names that it
    does not know.
    """
    checkpoint = ours("ring-2.5-1t", "NVFP4")
    copy = "model.layers.4.shared_head.head"
    checkpoint.tensors[f"{copy}.weight"] = checkpoint.tensors["lm_head.weight"]
    pack(copy, "NVFP4")(checkpoint)
    return checkpoint


GOOD: dict[str, Callable[[], Checkpoint]] = {
    **{f"released {model}": (lambda model=model: released(model)) for model in releases.MODELS},
    "dsv4 bf16": lambda: ours("dsv4-flash", "NVFP4"),
    "dsv4 block": lambda: ours("dsv4-flash", "FP8_BLOCK", "source"),
    "dsv4 published": published_flash,
    "dsv4 nvfp4 experts": nvfp4_experts,
    "v3 native bf16 mtp": native_bf16_mtp,
    "v3 nvfp4": lambda: ours("deepseek-r1", "NVFP4"),
    "v3 block": lambda: ours("deepseek-r1", "FP8_BLOCK", "FP8_BLOCK"),
    "glm w4a16": lambda: ours("glm-4.7", "W4A16", "W4A16"),
    "glm fp8": lambda: llmcompressor("glm-4.7", "FP8_DYNAMIC"),
    "glm fp8, the draft's copies too": copies_in_fp8,
    "glm fp8 static": lambda: ours("glm-4.7", "FP8", "FP8"),
    "glm nvfp4": lambda: ours("glm-4.7", "NVFP4", "NVFP4A16"),
    "glm-5 nvfp4": lambda: ours("glm-5", "NVFP4"),
    "lite fp8": lambda: llmcompressor("glm-4.7-flash", "FP8_DYNAMIC"),
    "next nvfp4": lambda: llmcompressor("qwen3-next-80b", "NVFP4"),
    "next fp8": lambda: ours("qwen3-next-80b", "FP8_DYNAMIC", "FP8_DYNAMIC"),
    "next red hat": red_hat,
    "qwen vl native fp8": qwen_fp8,
    "qwen vl fp8": lambda: llmcompressor("qwen3.5-27b", "FP8_DYNAMIC"),
    "qwen vl moe nvfp4": lambda: llmcompressor("qwen3.5-397b", "NVFP4"),
    "qwen text int8": lambda: llmcompressor("qwen3.5-text", "W8A8"),
    "ring nvfp4, the draft's head too": head_that_is_skipped,
    "mimo w4a16": lambda: ours("mimo-7b", "W4A16"),
    "mimo fp8": lambda: llmcompressor("mimo-7b", "FP8_DYNAMIC"),
}
