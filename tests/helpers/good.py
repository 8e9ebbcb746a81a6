"""Good checkpoints: released, written by keepmtp, by llm-compressor, by hand, in each dialect but
modelopt's.

In: a model, schemes. Out: a `Checkpoint`; modelopt's are in foreign_form.py, and all by name in
good_checkpoints.py.
"""

import re
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import releases
from checkpoint_files import Checkpoint, as_source, write
from data_files import table
from keepmtp.checkpoints.dialects.modules import runtime_modules
from keepmtp.quantize.plan.configs import files_of, modules_of
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.conventions import FORMATS, Format
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family import QUANTIZABLE_ROLES, HFName
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from layouts import Tensors

_CALIBRATION = table("helpers/good")["calibration"]
# Of a packed head or embedding what all else is: of modelopt's words the one that experts have too.
_REST: dict[Format, str] = {"compressed-tensors": "FP8_DYNAMIC", "modelopt": "NVFP4A16"}


# What vLLM's classes read beside config.json: model_type -> file -> content.
_COMPANIONS = {
    "dots3_note": {
        "added_tokens.json": {"<|imgpad|>": 500, "<|audiopad|>": 501, "<|audio_comp_pad|>": 502}
    }
}


def released(model: str, **changes: Any) -> Checkpoint:
    """The original release, tiny."""
    config, tensors = releases.source_layout(model, changes=changes)
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


@cache
def plan_of_recipe(name: str, size: str = "tiny") -> Plan:
    """The plan of a recipe for its model's release; "thin": as wide as that, with four layers and
    sixteen experts.
    """
    recipe, _ = find_recipe(name)
    if size == "thin":
        config, tensors = releases.thin_layout(recipe.model, num_experts=16)
    else:
        config, tensors = releases.source_layout(recipe.model, size=size)
    source = as_source(Checkpoint(config=config, tensors=dict(tensors)), Path("/nonexistent"))
    return make_plan(recipe.before_measuring, source)


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
    absorbed = set[str]()
    for place in places:
        if place and place.module.endswith(".kv_b_proj"):
            word = mtp if place.part == "mtp" else scheme
            if word in SCHEMES and SCHEMES[word].needs_calibration:
                absorbed.add(place.module)
    overrides = []
    if absorbed:
        pattern = "|".join(re.escape(module) for module in sorted(absorbed))
        overrides = [{"modules": f"re:{pattern}", "scheme": "bf16"}]
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
            "overrides": overrides,
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
    if format != "compressed-tensors":
        scheme = "NVFP4"
    plan = planned(model, scheme, mtp, format=format)
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
    tensors = {}
    for shard in plan.shards:
        for output in shard.outputs:
            tensors[str(output.name)] = (output.dtype, output.shape)
    return Checkpoint(config=config, tensors=tensors, json_files={**companions(config), **files})


def with_scales(model: str = "glm-4.7", format: Format = "compressed-tensors") -> Checkpoint:
    """What keepmtp writes by a recipe with `kv_cache: FP8`."""
    return outputs_of(cached(model, format=format))


def plain_names(plan: Plan) -> list[str]:
    """The names by which vLLM asks about the modules that a plan leaves plain."""
    names = []
    for module in runtime_modules(modules_of(plan)):
        if not module.scheme:
            names += module.asked
    return names


def llmcompressor(model: str, scheme: str, mtp: str = "bf16") -> Checkpoint:
    """The same tensors under a config as llm-compressor writes it: target Linear, and whole names
    to ignore.
    """
    checkpoint = ours(model, scheme, mtp)
    names = plain_names(planned(model, scheme, mtp))
    checkpoint.quantization["config_groups"]["group_0"]["targets"] = ["Linear"]
    checkpoint.quantization["ignore"] = [*dict.fromkeys(names), "re:^visual\\."]
    return checkpoint


def integers(
    model: str, *, columns: int | None, has_zeros: bool = False, bits: int = 4
) -> Checkpoint:
    """Integers in groups of so many columns, which no scheme has, or with a scale a row, under
    llm-compressor's config.
    """
    checkpoint = llmcompressor(model, "W4A16")
    for name in [*checkpoint.tensors]:
        if name.endswith("weight_packed"):
            rows, words = checkpoint.tensors[name][1]
            stem = name.removesuffix("_packed")
            groups = words * 8 // (columns or words * 8)
            checkpoint.tensors[name] = ("I32", (rows, words * bits // 4))
            checkpoint.tensors[f"{stem}_scale"] = ("BF16", (rows, groups))
            if has_zeros:
                checkpoint.tensors[f"{stem}_zero_point"] = ("I32", (rows * bits // 32, groups))
    given = {"group_size": columns, "symmetric": not has_zeros, "num_bits": bits}
    if columns is None:
        given["strategy"] = "channel"
    checkpoint.quantization["config_groups"]["group_0"]["weights"] |= given
    return checkpoint


def flash_of_three_schemes() -> Checkpoint:
    """DeepSeek-V4-Flash with NVFP4 experts, FP8 attention and plain shared experts."""
    checkpoint = ours("dsv4-flash", "NVFP4")
    for part, scheme in ((r"attn\.", "FP8_BLOCK"), (r"ffn\.shared_experts\.", "bf16")):
        names = rf"layers\.\d+\.{part}.*"
        checkpoint.take(names)
        checkpoint.tensors |= ours("dsv4-flash", scheme).take(names)
    return checkpoint


def nvfp4_experts(model: str = "dsv4-pro") -> Checkpoint:
    """DeepSeek-V4-Pro as published: native FP8 config, NVFP4 experts, MTP passed through as
    MXFP4.
    """
    checkpoint = released(model)
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


def plain_delta_nets() -> Checkpoint:
    """Qwen3-Next in FP8, its delta nets left in BF16."""
    checkpoint = ours("qwen3-next-80b", "FP8_DYNAMIC")
    names = r".*\.linear_attn\..*"
    checkpoint.take(names)
    checkpoint.tensors |= released("qwen3-next-80b").take(names)
    return checkpoint


def qwen_fp8() -> Checkpoint:
    """Qwen3.5 as its makers publish it in FP8: blocks, MTP layers too, exceptions in names on
    disk.
    """
    checkpoint = ours("qwen3.5-27b", "FP8_BLOCK", "FP8_BLOCK")
    checkpoint.rename(r"(.*)\.weight_scale", r"\1.weight_scale_inv")
    names = []
    for name in plain_names(planned("qwen3.5-27b", "FP8_BLOCK", "FP8_BLOCK")):
        if name.startswith(("model.", "mtp.", "lm_head")):
            names.append(name)
    for name in checkpoint.tensors:
        if name.startswith("model.visual.") and name.endswith(".weight"):
            names.append(name.removesuffix(".weight"))
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
    for scale in checkpoint.take(r"model\.layers\.3\..*weight_scale_inv"):
        weight = scale.removesuffix("_scale_inv")
        checkpoint.tensors[weight] = ("BF16", checkpoint.tensors[weight][1])
    attention = ["fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]
    checkpoint.quantization["ignored_layers"] = [
        *(f"{stem}self_attn.{name}" for name in attention),
        f"{stem}mlp.shared_experts.gate_up_proj",
        f"{stem}mlp.shared_experts.down_proj",
        f"{stem}mlp.experts",
    ]
    return checkpoint


MODELS = {
    "deepseek-v3.1": "experts",
    "glm-4.7": "experts",
    "glm-5": "experts",
    "hy3": "experts",
    "longcat-flash-chat": "experts",
    "mimo-7b": "dense_mlp",
    "qwen3-next-80b": "experts",
    "qwen3.5-27b": "dense_mlp",
}
"""Model -> its heavy group: one of each of eight families."""


def builds(home: Path, model: str, format: Format) -> tuple[Path, Path, Path]:
    """Their headers; the first in this format, the others in the other one."""
    (other,) = {*FORMATS} - {format}
    first = write(home / "dense", ours(model, "FP8_BLOCK", format=format))
    heavy = write(home / "heavy", ours(model, "NVFP4A16", format=other))
    block = write(home / "block", ours(model, "NVFP4", "FP8_BLOCK", format=other))
    return first, heavy, block


def changes(model: str, heavy: Path, block: Path) -> list[str]:
    """The words of --set that put them together."""
    return [f"{MODELS[model]}=from:{heavy}", f"mtp=from:{block}"]


def packed(model: str, group: str, word: str, format: Format = "compressed-tensors") -> Plan:
    """Our plan for a model whose embedding or head has a word; without a group as it is."""
    try:
        plan = planned(model, _REST[format], "bf16", format=format)
    except RecipeError:  # MiniMax-M3 takes no scale of a whole tensor
        plan = planned(model, "FP8_BLOCK", "bf16", format=format)
    if not group:
        return plan
    recipe = plan.recipe.model_dump()
    recipe["backbone"] |= {group: word}
    if SCHEMES[word].needs_calibration and group != "table":
        recipe["calibration"] = _CALIBRATION
    return make_plan(Recipe.model_validate(recipe), plan.source)


def with_packed(
    model: str, group: str, word: str, format: Format = "compressed-tensors"
) -> Checkpoint:
    """What keepmtp writes by it."""
    return outputs_of(packed(model, group, word, format))
