"""The parts of a sentence about one of SGLang's modules: how it is stored, what decided, and what to do.

In: a view, a module and a weight of it. Out: words.

Easy to get wrong: a cure names SGLang's module. The entry for vLLM's stays: both servers read the same list.
"""

import re
from typing import TYPE_CHECKING

from ....checkpoints.stored import StoredWeight
from .compressed_tensors import SglangCompressedTensors
from .modelopt import SglangModelOpt
from .quark import SglangQuark

if TYPE_CHECKING:
    from .view import SglangBuilt, SglangView


def manner(weight: StoredWeight) -> str:
    """How a weight is stored."""
    if weight.form == "plain":
        return f"plain {weight.weight.dtype}"
    return f"{weight.form} ({', '.join(weight.parts)})"


def decided(view: "SglangView", module: "SglangBuilt") -> str:
    """What made SGLang build it so, with its file."""
    if not module.asks:
        return f"sglang/srt/{view.model.file}"
    if why := view.why_plain(module.part):
        return why
    if entry := module.resolution.entry:
        return f"by the entry {entry!r}"
    return f"by {view.dialects[module.part].method or 'no quantization config'}"


def unresolved_cure(view: "SglangView", module: "SglangBuilt") -> str:
    """What to write where SGLang raises as it builds a module."""
    error = module.resolution.error
    if "matching target" in error:
        which = "ignore" if module.members[0].weight.form == "plain" else "the targets of its group"
        return f"Add '{_expression(module)}' to {which}: it is SGLang's name for it"
    if "shards" in error or "schemes for" in error or "MoE projections" in error or "Mixed quant_algo" in error:
        return "Name all parts of a fused module in the same list, under SGLang's names"
    if "pack-quantized" in error:
        return "Quantize routed experts alone (format pack-quantized), or to NVFP4 or FP8: see `keepmtp ls schemes`"
    return "Quantize it in a scheme that SGLang has a kernel for: `keepmtp ls schemes`"


def cure_of(view: "SglangView", module: "SglangBuilt", weight: StoredWeight) -> str:
    """What to do where a weight is stored otherwise than SGLang builds it."""
    if not module.asks or view.why_plain(module.part):
        return "Store it in BF16: no entry changes it. Or serve it with vLLM"
    dialect = view.dialects[module.part]
    if weight.form != "plain":
        if module.resolution.built.form == "plain":
            return f"Let an entry reach {module.name}: it is SGLang's name for it, or store the weight in BF16"
        return "Convert it, or quantize the release again in a scheme that SGLang has a kernel for"
    if isinstance(dialect, SglangCompressedTensors):
        return f"Add '{_expression(module)}' to ignore: it is SGLang's name for it"
    if isinstance(dialect, SglangModelOpt):
        return f"Exclude {module.name}: it is SGLang's name for it"
    if isinstance(dialect, SglangQuark):
        return f"Add '{_expression(module)}' to exclude: it is SGLang's name for it"
    return f"Add {module.name} to modules_to_not_convert: it is SGLang's name for it"


def _expression(module: "SglangBuilt") -> str:
    """An expression for the module and its parts; routed experts by their stem."""
    tail = r"\." if module.asked.kind == "experts" else "$"
    return f"re:^{re.escape(module.name)}{tail}"
