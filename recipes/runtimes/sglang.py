"""SGLang 0.5.23: the names under which it asks the quantization config, model by model.

In: a family's view of one config.json, and a module's place in it. Out: the names under which SGLang constructs the
module in its target and in its draft, with a quantization config; and why its draft cannot be served, if so.

Easy to get wrong: SGLang builds one MTP layer, mostly as `model.decoder`, so its names have no layer number; a few
draft classes build it under the name of a backbone layer. Glue that is a plain nn.Linear is never asked about. A class
that joins an empty prefix with a dot asks for names that start with a dot.

Source: SGLang 0.5.23, sglang/srt/configs/model_config.py (_config_draft_model) and the file of each model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..family import Part
from ..family_view import FamilyView, Place

VERSION = "0.5.23"
DECODER = "model.decoder."
SHARED_HEAD = "model.shared_head.head"


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangModel:
    """How SGLang names the modules of one architecture.

    Attributes:
        file: SGLang's file of the draft, or of the target where it has no draft, under sglang/srt.
        layers: prefix of a decoder layer, `{i}` its index; "" where SGLang has no class for the model.
        draft: prefix of the MTP layer that it builds: `{i}` its index on disk; None where it has no draft class.
        renames: (path in the family's table, path in SGLang), for the first parts of a path; the first that fits.
        draft_renames: the same for the MTP layer, tried first.
        also: path in the family's table -> further paths in SGLang: of a module that it fuses with more than vLLM does.
        glue: modules of the MTP layer or block that join it to the target -> SGLang's full name. Those that are not
            here are plain nn.Linear, about which SGLang never asks.
        head: the target's head.
        draft_head: the draft's.
        unasked: paths, in SGLang's names, that it constructs without a quantization config.
        plain_draft: it constructs the MTP layer without a quantization config.
        plain_under: its names of quantization methods under which it does so.
        plain_in_fp4: modules by vLLM's path that it constructs so where all is NVFP4 in modelopt's dialect.
        no_draft: why it has no draft for the model.
        own_config: its classes read a quantization config of their own form alone.
    """

    file: str
    layers: str = "model.layers.{i}."
    draft: str | None = DECODER
    renames: tuple[tuple[str, str], ...] = ()
    draft_renames: tuple[tuple[str, str], ...] = ()
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    glue: Mapping[str, str] = field(default_factory=dict)
    head: str = "lm_head"
    draft_head: str = SHARED_HEAD
    unasked: tuple[str, ...] = ()
    plain_draft: bool = False
    plain_under: tuple[str, ...] = ()
    plain_in_fp4: tuple[str, ...] = ()
    no_draft: str = ""
    own_config: bool = False


_LATENT = (("self_attn.fused_qkv_a_proj", "self_attn.fused_qkv_a_proj_with_mqa"),)
_FP4 = ("modelopt_fp4",)
_QWEN = SglangModel(
    file="models/qwen3_5_mtp.py",
    draft="mtp.layers.0.",
    draft_head="lm_head",
    plain_under=("modelopt_fp4", "modelopt_mixed"),
)
_QWEN_VISION = SglangModel(
    file="models/qwen3_5_mtp.py", layers="model.language_model.layers.{i}.", draft="mtp.layers.0.",
    draft_head="lm_head", plain_under=("modelopt_fp4", "modelopt_mixed"),
)  # fmt: skip
_EXAONE = SglangModel(file="models/exaone_moe_mtp.py", draft="model.layers.0.", draft_head="lm_head")
_MIMO_V2 = SglangModel(file="models/mimo_v2_nextn.py", draft_head="lm_head")
_DEEPSEEK = SglangModel(file="models/deepseek_nextn.py", renames=_LATENT, plain_under=_FP4)
# SGLang asks for three projections, also of experts that have no gate.
_NO_GATE = {"mixer.experts.{e}.up_proj": ("mixer.experts.{e}.gate_proj",)}
_NO_CLASS = "it has no class for the model"
_NO_DRAFT = "it has the target's class and no draft class"

# By the first architecture of config.json.
MODELS: Mapping[str, SglangModel] = {
    "BailingMoeV2_5ForCausalLM": SglangModel(
        file="models/bailing_moe_nextn.py", draft="model.layers.{i}.", plain_under=_FP4, head="",
        renames=(("self_attn.fused_qkv_a_proj", "attention.fused_qkv_a_proj_with_mqa"),
                 ("attention.dense", "attention.o_proj"), ("attention.query_key_value", "attention.qkv_proj"),
                 ("attention.g_proj", "attention.output_gate")),
        also={"attention.dense": ("attention.out_proj",)}, glue={"eh_proj": "model.layers.{i}.eh_proj"},
    ),
    "BailingMoeV3ForCausalLM": SglangModel(
        file="models/bailing_moe_nextn.py", draft="model.layers.{i}.", plain_under=_FP4, head="",
        renames=(("self_attn.fused_qkv_a_proj", "attention.fused_qkv_a_proj_with_mqa"),
                 ("attention.dense", "attention.o_proj"), ("attention.g_proj", "attention.output_gate"),
                 ("mlp.experts", "experts"), ("mlp.shared_experts", "shared_experts"), ("mlp", "")),
        also={f"attention.{name}_proj": ("self_attn.fused_qkvbfg_proj", "self_attn.fused_qkvbfg_a_proj")
              for name in ("q", "k", "v", "f", "f_a", "g_a")},
        glue={"eh_proj": "model.layers.{i}.eh_proj"}, unasked=("self_attn.b_proj", "attention.output_gate"),
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "DeepseekV4ForCausalLM": SglangModel(
        file="models/deepseek_v4_nextn.py",
        renames=(("attn.fused_wqa_wkv", "self_attn.wqkv_a"), ("attn", "self_attn"),
                 ("ffn.shared_experts.w1", "mlp.shared_experts.gate_proj"),
                 ("ffn.shared_experts.w3", "mlp.shared_experts.up_proj"),
                 ("ffn.shared_experts.w2", "mlp.shared_experts.down_proj"), ("ffn", "mlp")),
        glue={"e_proj": "model.e_proj", "h_proj": "model.h_proj"}, unasked=("self_attn.wo_a",),
    ),
    "Dots3NoteForCausalLM": SglangModel(
        file="models/dots3_common/nextn.py", layers="thinker.language_model.model.layers.{i}.",
        draft="model.heads.0.decoder.", head="thinker.language_model.lm_head",
        renames=(("self_attn.fused_qkv_a_proj", "self_attn.fused_qkv_a_g_proj_with_mqa"),),
        glue={"eh_proj": "model.heads.0.eh_proj"},
    ),
    "Ernie4_5_MoeForCausalLM": SglangModel(
        file="models/ernie4_eagle.py", draft="model.mtp_block.", draft_head="lm_head"
    ),
    "Exaone4_5_ForConditionalGeneration": SglangModel(file="models", layers="", draft=None, no_draft=_NO_CLASS),
    "ExaoneMoEForCausalLM": _EXAONE,
    "ExaoneMoeForCausalLM": _EXAONE,
    "Gemma4AssistantForCausalLM": SglangModel(
        file="models/gemma4_mtp.py", draft="model.layers.{i}.",
        also={"self_attn.q_proj": ("self_attn.qkv_proj", "self_attn.k_proj", "self_attn.v_proj")},
        glue={"pre_projection": "pre_projection", "post_projection": "post_projection"},
    ),
    "Glm4MoeForCausalLM": SglangModel(file="models/glm4_moe_nextn.py", plain_under=_FP4),
    "Glm4MoeLiteForCausalLM": SglangModel(file="models/glm4_moe_lite_nextn.py", renames=_LATENT, plain_under=_FP4),
    "Glm5NextForConditionalGeneration": SglangModel(
        file="models/glm5_next_nextn.py", renames=_LATENT, plain_under=_FP4
    ),
    "GlmMoeDsaForCausalLM": SglangModel(file="models/glm4_moe.py", renames=_LATENT, plain_under=_FP4),
    "GlmOcrForConditionalGeneration": SglangModel(
        file="models/glm_ocr_nextn.py", plain_under=_FP4, also={"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
    ),
    "HYV3ForCausalLM": SglangModel(
        file="models/hunyuan_v3_nextn.py", layers=".model.layers.{i}.", head=".lm_head", draft_head="lm_head"
    ),
    "HYV4ForCausalLM": SglangModel(
        file="models/hunyuan_v4_nextn.py", layers=".model.layers.{i}.", draft=".model.decoder.", renames=_LATENT,
        head=".lm_head", draft_head=".lm_head",
        unasked=("hc_attn_layer.hc_pre.hc_fn", "hc_mlp_layer.hc_pre.hc_fn"),
    ),
    "InklingForConditionalGeneration": SglangModel(
        file="models/inkling.py", draft="model.", draft_head="lm_head", plain_draft=True,
        draft_renames=(("transformer_block.mlp.w13_dn", "transformer_block.mlp.gate_up_proj"),
                       ("transformer_block.mlp.w2_md", "transformer_block.mlp.down_proj")),
        own_config=True,
    ),
    "KimiK3ForConditionalGeneration": SglangModel(
        file="models/kimi_k3.py", layers="language_model.model.layers.{i}.", draft=None, no_draft=_NO_DRAFT
    ),
    "LongcatFlashForCausalLM": SglangModel(
        file="models/longcat_flash_nextn.py", draft="", draft_head="", glue={"model.mtp.layers.0.eh_proj": "eh_proj"},
        renames=(*((f"self_attn.{index}.fused_qkv_a_proj", f"self_attn.{index}.fused_qkv_a_proj_with_mqa")
                   for index in (0, 1)), *_LATENT),
        draft_renames=(("transformer_layer.mlp", "mlps"), ("mlp", "mlps")),
    ),
    "MiMoForCausalLM": SglangModel(file="models/mimo_mtp.py", draft="", draft_head=""),
    "MiMoV2FlashForCausalLM": _MIMO_V2,
    "MiMoV2ForCausalLM": _MIMO_V2,
    "MiniMaxM3SparseForConditionalGeneration": SglangModel(
        file="models/minimax_m3_vl.py", layers="language_model.model.layers.{i}.", draft=None, no_draft=_NO_DRAFT
    ),
    "NemotronHForCausalLM": SglangModel(
        file="models/nemotron_h_mtp.py", draft="mtp.layers.{i}.", draft_head="lm_head", also=_NO_GATE,
        glue={"mtp.layers.0.eh_proj": "mtp.layers.0.eh_proj"},
    ),
    "NemotronH_Omni_Reasoning_V3": SglangModel(
        file="models/nemotron_h_mtp.py", layers="language_model.model.layers.{i}.", draft="mtp.layers.{i}.",
        head="language_model.lm_head", draft_head="lm_head", also=_NO_GATE,
        glue={"language_model.mtp.layers.0.eh_proj": "mtp.layers.0.eh_proj"},
    ),
    "PanguUltraMoEForCausalLM": SglangModel(file="models", layers="", draft=None, no_draft=_NO_CLASS),
    "Qwen3NextForCausalLM": SglangModel(
        file="models/qwen3_next_mtp.py", draft="model.layers.0.", plain_in_fp4=("self_attn.qkv_proj",)
    ),
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN_VISION,
    "Qwen3_5MoeForCausalLM": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_VISION,
    "Qwen4ExpForConditionalGeneration": SglangModel(
        file="models/qwen4_exp_mtp.py", layers="model.language_model.layers.{i}.", draft="mtp.layers.0.",
        plain_under=("modelopt_fp4", "modelopt_mixed"),
    ),
    "Step3p5ForCausalLM": SglangModel(
        file="models/step3p5_mtp.py", draft="model.mtp_block.", draft_head="", plain_draft=True,
        renames=(("moe.experts", "mlp.experts"), ("moe.gate", "mlp.gate"), ("moe.share_expert", "share_expert"),
                 ("mtp_block", "")),
        unasked=("self_attn.g_proj",),
    ),
    "Step3p7ForConditionalGeneration": SglangModel(
        file="models/step3p5_mtp.py", layers="language_model.model.layers.{i}.", draft="model.mtp_block.",
        draft_head="", plain_draft=True, head="language_model.lm_head",
        renames=(("moe.experts", "mlp.experts"), ("moe.gate", "mlp.gate"), ("moe.share_expert", "share_expert"),
                 ("mtp_block", "")),
        unasked=("self_attn.g_proj",),
    ),
}  # fmt: skip
_UNKNOWN = SglangModel(file="models", layers="", draft=None, no_draft=_NO_CLASS)
_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def sglang_model(config: Mapping[str, Any]) -> SglangModel:
    """The names of the model of this config.json; one without classes where SGLang does not know the architecture."""
    return MODELS.get((config.get("architectures") or [""])[0], _UNKNOWN)


def sglang_stem(view: FamilyView, part: Part, layer: int) -> str | None:
    """SGLang's prefix of the block with index `layer` on disk; None where it builds none for it."""
    model = sglang_model(view.config)
    if part == "mtp":
        first = 0 if view.layout.mtp else view.num_layers
        if model.draft is None or (layer > first and "{i}" not in model.draft):
            return None
        return model.draft.replace("{i}", str(layer))
    return model.layers.replace("{i}", str(layer)) or None


def sglang_spelling(view: FamilyView, place: Place) -> tuple[str, tuple[str, ...]]:
    """SGLang's prefix of the module's block, "" outside blocks, and its spellings below it; () where it never asks.

    The spellings are the module's shards, the fused module, and projections of routed experts, `{e}` their index.
    """
    model = sglang_model(view.config)
    if place.role == "head":
        head = model.head if place.part == "backbone" else model.draft_head
        return "", tuple(filter(None, (head,)))
    if name := model.glue.get(place.row.path):
        return "", (name.replace("{i}", str(place.layer)),)
    if place.layer is None or place.role in ("router", "embedding") or _is_unnamed_glue(view, place):
        return "", ()
    if place.part == "mtp" and model.plain_draft:
        return "", ()
    stem = sglang_stem(view, place.part, place.layer)
    return ("", ()) if stem is None else (stem, _paths(model, view, place))


def sglang_names(view: FamilyView, place: Place) -> tuple[str, ...]:
    """The names under which SGLang may ask about a module; expert 0 is the one of routed experts."""
    stem, paths = sglang_spelling(view, place)
    return tuple(stem + path.replace("{e}", "0") for path in paths)


def sglang_module(view: FamilyView, place: Place) -> str | None:
    """The prefix of the module that SGLang constructs, fused where its parts share one; None where it never asks."""
    stem, paths = sglang_spelling(view, place)
    if not paths or place.role == "experts":
        return container(stem + paths[0].replace("{e}", "0")) if paths else None
    model = sglang_model(view.config)
    fused = place.runtime.removeprefix(view.runtime_stem(place.part, place.layer or 0))
    renames = (*(model.draft_renames if place.part == "mtp" else ()), *model.renames)
    named = _renamed(fused if place.shares else place.row.path, renames)
    return stem + (named if named in paths else paths[0])


def container(name: str) -> str:
    """The name of the module that holds all routed experts, for a projection of expert 0; any other name as it is."""
    return re.sub(r"(experts)\.0\.(?:gate|up|down)_proj$", r"\1", name)


def _paths(model: SglangModel, view: FamilyView, place: Place) -> tuple[str, ...]:
    renames = (*(model.draft_renames if place.part == "mtp" else ()), *model.renames)
    spelled = [_as_asked(_renamed(path, renames)) for path in table_paths(view, place)]
    spelled += model.also.get(place.row.path, ())
    return tuple(path for path in dict.fromkeys(spelled) if path not in model.unasked)


def _is_unnamed_glue(view: FamilyView, place: Place) -> bool:
    return place.role == "glue" and place.row in view.family.mtp_block


def table_paths(view: FamilyView, place: Place) -> tuple[str, ...]:
    """A module's spellings below its block's stem in the family's table: shard, fused, projections of experts."""
    row = place.row
    if row.stacked:
        return row.unstacked
    if "{e}" in row.path:
        return (row.path, *row.aliases)
    runtime = place.runtime.removeprefix(view.runtime_stem(place.part, place.layer or 0))
    return tuple(dict.fromkeys((row.path, *([runtime] if row.runtime else []), *row.aliases)))


def _renamed(path: str, renames: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in renames:
        if path == ours or path.startswith(f"{ours}."):
            return (theirs + path[len(ours) :]).lstrip(".")
    return path


def _as_asked(path: str) -> str:
    """A routed expert's projection in the name that SGLang asks for, whatever the checkpoint calls it."""
    stem, dot, leaf = path.rpartition(".")
    is_expert = re.search(r"experts\.\{e\}$", stem)
    return f"{stem}{dot}{_EXPERT[leaf]}" if is_expert and leaf in _EXPERT else path
