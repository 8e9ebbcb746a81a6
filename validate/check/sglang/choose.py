"""Which reader SGLang takes for a checkpoint's quantization config, and what its draft classes make
of it.

In: config.json, hf_quant_config.json, and a part. Out: a `Dialect` as SGLang reads it.

Easy to get wrong: target and draft each read config.json anew, each with its own class's mapping.
And a draft class may build everything plain whatever the config says: under modelopt's NVFP4 nearly
all do, so a quantized block is not read.

Source: SGLang 0.5.23 sglang/srt/model_loader/checkpoint_quantization.py, configs/model_config.py
(_verify_quantization), models/qwen3_5_mtp.py (_mtp_quant_config), models/deepseek_nextn.py,
models/glm4_moe.py and models/glm5_next_nextn.py (_resolve_nextn_quant_config),
models/longcat_flash_nextn.py.
"""

from collections.abc import Mapping
from typing import Any

from ....recipes.errors import CheckpointError
from ....recipes.family import Part
from ....recipes.family_view import FamilyView
from ....recipes.runtimes.sglang import entry_renames, sglang_model
from ..dialects.choose import UNQUANTIZED, quantization_of
from ..dialects.compressed_tensors import read_compressed_tensors
from ..dialects.fp8 import read_sglang_fp8
from ..dialects.matching import OneAnswer, plain, raises
from ..dialects.methods import method_of
from ..dialects.modelopt import ModelOpt, read_sglang_modelopt
from ..dialects.quark import Quark, read_quark
from ..vllm_module import Dialect, UnknownDialect


def read_sglang(view: FamilyView, hf_quant_config: Mapping[str, Any] | None, part: Part) -> Dialect:
    """The quantization config as SGLang's class for this part reads it.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no regular expression.
    """
    raw = quantization_of(view.config) or hf_quant_config
    if raw is None:
        return UNQUANTIZED
    try:
        dialect = _read(raw, view, part)
    except CheckpointError as error:
        raise error.at("config.json: quantization_config") from error
    if part == "mtp" and (why := _why_plain(dialect, view)):
        return OneAnswer(
            name=dialect.name,
            answer=plain(f"sglang/srt/{sglang_model(view.config).file} builds {why}"),
        )
    return dialect


def _read(raw: Mapping[str, Any], view: FamilyView, part: Part) -> Dialect:
    method = method_of(raw) or ("modelopt" if "quant_algo" in raw or "quantization" in raw else "")
    if sglang_model(view.config).own_config and "modelopt_quant_config" not in raw:
        error = "KeyError: 'modelopt_quant_config', the only form that its class reads"
        return OneAnswer(name=method, answer=raises(error))
    rename = entry_renames(view, part, method)
    if method == "compressed-tensors":
        return read_compressed_tensors(raw, rename, "sglang")
    if method == "fp8":
        return read_sglang_fp8(raw, view.config)
    if method == "quark":
        return read_quark(raw, rename, "sglang")
    if method.startswith("modelopt"):
        return read_sglang_modelopt(raw, rename)
    return UnknownDialect(name=method or "quantization_config without quant_method")


def _why_plain(dialect: Dialect, view: FamilyView) -> str:
    """What the draft's class builds plain after it has looked at the config; "" where it leaves
    that to the config.
    """
    model = sglang_model(view.config)
    if model.plain_draft:
        return "the draft without a quantization config"
    if isinstance(dialect, ModelOpt) and dialect.name in model.plain_under:
        names_draft = any(name.startswith("mtp.") for name in dialect.quantized_layers)
        if dialect.name != "modelopt_mixed" or not names_draft:
            return f"the draft plain under {dialect.name}"
    if isinstance(dialect, Quark) and _excludes_draft(dialect, view):
        return "the draft plain: exclude names it"
    if view.config.get("model_type") == "longcat_flash" and "mtp" in (
        view.config.get("disable_quant_module") or ()
    ):
        return "the draft plain: disable_quant_module has mtp"
    return ""


def _excludes_draft(quark: Quark, view: FamilyView) -> bool:
    """Whether a draft class takes quark's list for one that leaves the whole block alone."""
    model = sglang_model(view.config)
    if model.excluded_by == "experts":
        return any(
            entry.startswith("mtp.") and "mlp.experts" in entry for entry in quark.exclude.written
        )
    decoder = "model.decoder" if view.num_layers == 61 else f"model.layers.{view.num_layers}"
    return model.excluded_by == "block" and quark.exclude.first(decoder) is not None
