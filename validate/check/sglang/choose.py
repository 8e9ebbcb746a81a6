"""Which reader SGLang takes for a checkpoint's quantization config, and what its draft classes make of it.

In: config.json, hf_quant_config.json, and a part. Out: a `SglangDialect`.

Easy to get wrong: target and draft each read config.json anew, each with its own class's mapping. And a draft class may
build everything plain whatever the config says: under modelopt's NVFP4 nearly all do, so a quantized block is not read.

Source: SGLang 0.5.23 sglang/srt/model_loader/checkpoint_quantization.py, configs/model_config.py
(_verify_quantization), models/qwen3_5_mtp.py (_mtp_quant_config), models/deepseek_nextn.py, models/glm4_moe.py and
models/glm5_next_nextn.py (_resolve_nextn_quant_config), models/longcat_flash_nextn.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....recipes.errors import CheckpointError
from ....recipes.family import Part
from ....recipes.family_view import FamilyView
from ....recipes.runtimes.sglang import sglang_model
from ..dialects.choose import quantization_of
from ..dialects.methods import method_of
from ..vllm_module import PLAIN, Resolution
from .asked import AskedModule, Failing, SglangDialect, Unread
from .classes import SglangClasses, WeightsMapper, sglang_classes
from .compressed_tensors import read_sglang_compressed_tensors
from .fp8 import read_sglang_fp8
from .modelopt import SglangModelOpt, read_sglang_modelopt
from .quark import SglangQuark, read_sglang_quark

_LATENT = "fused_qkv_a_proj_with_mqa"
_INKLING = "InklingForConditionalGeneration"
_QWEN = ("Qwen3_5", "Qwen4Exp", "InternS2")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllPlain:
    """No quantization config, or a draft class that drops it; `why` is a sentence, or "" where there is none."""

    method: str = ""
    why: str = ""

    def resolve(self, asked: AskedModule) -> Resolution:
        """Every module is plain."""
        return Resolution(built=PLAIN, entry=self.why)


def read_sglang(view: FamilyView, hf_quant_config: Mapping[str, Any] | None, part: Part) -> SglangDialect:
    """The quantization config as SGLang's class for this part reads it.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    config = view.config
    raw = quantization_of(config) or hf_quant_config
    if raw is None:
        return AllPlain()
    try:
        dialect = _read(raw, view, part)
    except CheckpointError as error:
        raise error.at("config.json: quantization_config") from error
    return _in_draft(dialect, view) if part == "mtp" else dialect


def _read(raw: Mapping[str, Any], view: FamilyView, part: Part) -> SglangDialect:
    method = method_of(raw) or ("modelopt" if "quant_algo" in raw or "quantization" in raw else "")
    classes = _classes(view, part, method)
    if (view.config.get("architectures") or [""])[0] == _INKLING and "modelopt_quant_config" not in raw:
        return Failing(
            method=method, error="KeyError: 'modelopt_quant_config', the only form that Inkling's class reads"
        )
    if method == "compressed-tensors":
        return read_sglang_compressed_tensors(raw, classes)
    if method.startswith("modelopt"):
        return read_sglang_modelopt(raw, classes)
    if method == "fp8":
        return read_sglang_fp8(raw, classes, is_v4=view.config.get("model_type") == "deepseek_v4")
    if method == "quark":
        return read_sglang_quark(raw, classes)
    return Unread(method=method or "quantization_config without quant_method")


def _classes(view: FamilyView, part: Part, method: str) -> SglangClasses:
    """What the class says, where that depends on config.json: latent attention, and drafts that rename by depth."""
    classes = sglang_classes(view.config, part)
    if view.text_config.get("q_lora_rank", 0) is None and _LATENT in classes.packed:
        packed = {name: parts for name, parts in classes.packed.items() if name != _LATENT}
        classes = SglangClasses(packed=packed, mapper=classes.mapper)
    architecture = str((view.config.get("architectures") or [""])[0])
    if part == "backbone":
        return classes
    glue = [(name, f"model.{name}") for name in ("shared_head.norm", "eh_proj", "enorm", "hnorm")]
    if architecture == "GlmMoeDsaForCausalLM" and method == "quark":
        layer = f"model.layers.{view.num_layers}."
        pairs = tuple((layer + old, new) for old, new in glue)
        return SglangClasses(packed=classes.packed, mapper=WeightsMapper(prefixes=(*pairs, (layer, "model.decoder."))))
    if architecture == "Glm5NextForConditionalGeneration":
        stems = (f"model.language_model.layers.{view.num_layers}", f"model.layers.{view.num_layers}")
        pairs = tuple((f"{stem}.{old}", new) for stem in stems for old, new in glue[1:])
        blocks = tuple((stem, "model.decoder") for stem in stems)
        return SglangClasses(packed=classes.packed, mapper=WeightsMapper(substrings=(*pairs, *blocks)))
    return classes


def _in_draft(dialect: SglangDialect, view: FamilyView) -> SglangDialect:
    """The config after the draft's class has looked at it."""
    model = sglang_model(view.config)
    file = f"sglang/srt/{model.file}"
    if model.plain_draft:
        return AllPlain(method=dialect.method, why=f"{file} builds the draft without a quantization config")
    if isinstance(dialect, SglangModelOpt) and dialect.method in model.plain_under:
        named = any(name.startswith("mtp.") for name in dialect.layers)
        if dialect.method != "modelopt_mixed" or not named:
            return AllPlain(method=dialect.method, why=f"{file} builds the draft plain under {dialect.method}")
    if isinstance(dialect, SglangQuark) and _excludes_draft(dialect, view):
        return AllPlain(method="quark", why=f"{file} builds the draft plain: exclude names it")
    if view.config.get("model_type") == "longcat_flash" and "mtp" in (view.config.get("disable_quant_module") or ()):
        return AllPlain(method=dialect.method, why=f"{file} builds the draft plain: disable_quant_module has mtp")
    return dialect


def _excludes_draft(quark: SglangQuark, view: FamilyView) -> bool:
    """Whether a draft class takes quark's list for one that leaves the whole block alone."""
    architecture = str((view.config.get("architectures") or [""])[0])
    if architecture.startswith(_QWEN):
        return any(entry.startswith("mtp.") and "mlp.experts" in entry for entry in quark.exclude.written)
    if architecture in ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"):
        decoder = "model.decoder" if view.num_layers == 61 else f"model.layers.{view.num_layers}"
        return quark.exclude.first(decoder) is not None
    return False
