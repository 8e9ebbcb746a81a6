"""What vLLM does with a weight that is stored otherwise than it is built, and the cure in each
dialect, in words.

In: a view of a checkpoint, and one of its modules. Out: parts of sentences for rules_forms.py.

Easy to get wrong: a cure names vLLM's module, not the one on disk.
"""

import re

from ...checkpoints.stored import FP8, StoredWeight
from .dialects.autoround import AutoRound
from .dialects.fp8 import Fp8
from .dialects.gptq import ACT_ORDER, Awq, Gptq
from .dialects.modelopt import ModelOpt
from .dialects.quark import Quark
from .stored_view import Module, StoredView

_ACTIVATIONS = (
    "Set the group's input_activations to "
    '{"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, '
    '"dynamic": true, "symmetric": true}'
)
_FOR_QUARK = (
    "Quantize it again in a scheme that vLLM has for Quark: FP8, INT8, MXFP4, MXFP8 or NVFP4"
)
# Words of what vLLM raises as it resolves a module, and what to do; the first that fits.
_CURES = (
    (ACT_ORDER, "Quantize it again with desc_act=False, or with static groups"),
    ("ValueError: Cannot find any of", "Complete quantization_config as its tool writes it"),
    ("ValueError: The export key", "Complete quantization_config as its tool writes it"),
    (
        "layer_type_quant_config",
        'Add "layer_type_quant_config": {} to quantization_config, as Quark writes it',
    ),
    ("uark", _FOR_QUARK),
    ("FusedMoe", _FOR_QUARK),
    ("Multi-entry", _FOR_QUARK),
    (
        "INC",
        (
            "Quantize it again: vLLM reads AutoRound's integers, MXFP4, MXFP8, and FP8 in blocks "
            "without experts"
        ),
    ),
    ("nsupported", "Quantize it again: vLLM has no kernel for these bits"),
    ("input_activations", _ACTIVATIONS),
    ("", "Name all parts of a fused module, or the fused module itself, in the same list"),
)


def decided(view: StoredView, module: Module) -> str:
    """Which entry of the config decided it."""
    if entry := module.resolution.entry:
        return f"by the entry {entry!r}"
    if module.resolution.built.form != "plain":
        return f"by {view.dialect.name}, which quantizes what is not excluded"
    return (
        "no target matches it"
        if view.dialect.name != "none"
        else "config.json has no quantization_config"
    )


def plain_in_packed(view: StoredView, module: Module) -> str:
    """What vLLM does with a plain weight where it builds another form."""
    built = module.resolution.built
    if "weight" not in built.leaves:
        return unknown_name(view, module, "weight")
    if built.form in ("nvfp4_modelopt", "mxfp4"):
        return "vLLM raises on the shape (AssertionError, or 'size of tensor a must match')"
    return (
        f"it loads in silence, cast to 8 bits with scales that nothing writes: {_garbage(module)}"
    )


def packed_in_plain(view: StoredView, module: Module, weight: StoredWeight) -> str:
    """What vLLM does with a weight of another form where it builds a plain one."""
    scales = [leaf for leaf in weight.parts if leaf != "weight"]
    if scales:
        packed = (leaf for leaf in ("weight_packed", "qweight") if leaf in scales)
        return unknown_name(view, module, next(packed, scales[0]))
    how = (
        "cast without a scale"
        if weight.weight.dtype in FP8
        else "converted from bytes as if they were numbers"
    )
    return f"its values are {how}, in silence: {_garbage(module)}"


def unknown_name(view: StoredView, module: Module, leaf: str) -> str:
    """What the loader does with a name that no parameter has."""
    loader = view.loader
    if loader is None:
        return f"vLLM raises on {leaf}, or skips it and leaves its own parameters unwritten"
    if not loader.unknown_name:
        return (
            f"vLLM skips {leaf} without a word and leaves its own parameters unwritten: "
            f"{_garbage(module)}"
        )
    if loader.unknown_name == "ValueError":
        return f"vLLM raises ValueError 'There is no module or parameter named ...{leaf}'"
    if (
        loader.drops_scales
        and module.part == "mtp"
        and leaf == "weight_scale"
        and module.kind != "experts"
    ):
        return (
            f"this draft's loader drops {leaf} without a word and takes the raw 8-bit values: "
            f"{_garbage(module)}"
        )
    return f"vLLM raises KeyError '...{leaf}'"


def _garbage(module: Module) -> str:
    return (
        "the draft guesses, acceptance is near 0 %"
        if module.part == "mtp"
        else "the model's output is garbage"
    )


def resolution_cure(error: str) -> str:
    """What to do where vLLM raises as it resolves a module."""
    return next(cure for words, cure in _CURES if words in error)


def ignore_cure(view: StoredView, module: Module) -> str:
    """How the dialect leaves a module alone."""
    name, stem = module.name, view.stem_of(module) if module.part == "mtp" else ""
    pattern = re.escape(stem or name)
    match view.dialect:
        case ModelOpt():
            return f"Exclude it under vLLM's name: {f'{stem}*' if stem else name}"
        case Fp8():
            return f"Add {name} to ignored_layers: whole names only, no patterns"
        case Gptq(is_blind_to_experts=True, group_size=size) if module.kind == "experts":
            return f"Quantize again in groups of 128: in groups of {size} no entry excepts experts"
        case Gptq():
            return f"Add '-:^{pattern}' to dynamic: vLLM's name, not the one on disk"
        case Awq(entries=()):
            return f"Write modules_to_not_convert with all that is plain, {name} among it"
        case Awq():
            return f"Add {name} to modules_to_not_convert"
        case AutoRound():
            return f'Add "{name}": {{"bits": 16}} to extra_config'
    key = "exclude" if isinstance(view.dialect, Quark) else "ignore"
    return f"Add 're:^{pattern}' to {key}: vLLM's name, not the one on disk"


def cover_cure(view: StoredView, module: Module) -> str:
    """How the dialect reaches a module that it builds plain."""
    dialect, entry = view.dialect, module.resolution.entry
    if isinstance(dialect, Awq) and not dialect.entries:
        return (
            "Write modules_to_not_convert: without it vLLM lists every module with a parameter "
            "in floating point, and an entry is a part of names"
        )
    if dialect.name == "none":
        return "Write quantization_config into config.json, or ship the weights in BF16"
    names = " and ".join(module.shards) if module.kind == "experts" else module.name
    cure = f"Let a target match {names}"
    if entry:
        cure = f"Narrow the entry {entry!r} so that it leaves {module.name} alone"
    return f"{cure}, or store the weight in BF16"
