"""What vLLM does with a weight that is stored otherwise than it is built, and the cure in each dialect, in words.

In: a `RuntimeView`, a module and a member of it. Out: parts of sentences for rules_forms.py.

Easy to get wrong: a cure names vLLM's module, not the one on disk.
"""

import re

from ...checkpoints.stored import FP8
from ...recipes.family_view import FamilyView
from .dialects.autoround import AutoRound
from .dialects.awq import Awq
from .dialects.fp8 import Fp8
from .dialects.gptq import ACT_ORDER, Gptq
from .dialects.modelopt import ModelOpt
from .dialects.quark import Quark
from .runtime_view import Member, Module, RuntimeView
from .vllm_module import VLLMModule


def decided(runtime: RuntimeView, module: Module) -> str:
    """Which entry of the config decided it."""
    entry = module.resolution.entry
    if entry:
        return f"by the entry {entry!r}"
    if module.resolution.built.form != "plain":
        return f"by {runtime.dialect.name}, which quantizes what is not excluded"
    return "no target matches it" if runtime.dialect.name != "none" else "config.json has no quantization_config"


def plain_in_packed(view: FamilyView, module: Module, built: VLLMModule) -> str:
    """What vLLM does with a plain weight where it builds another form."""
    if "weight" not in built.leaves:
        return unknown_name(view, module, "weight")
    if built.form in ("nvfp4_modelopt", "mxfp4"):
        return "vLLM raises on the shape (AssertionError, or 'size of tensor a must match')"
    return "it loads in silence, cast to 8 bits with scales that nothing writes" + _garbage(module)


def packed_in_plain(view: FamilyView, module: Module, member: Member) -> str:
    """What vLLM does with a weight of another form where it builds a plain one."""
    weight = member.weight
    scales = [leaf for leaf in weight.parts if leaf != "weight"]
    if not scales:
        how = "cast without a scale" if weight.weight.dtype in FP8 else "converted from bytes as if they were numbers"
        return f"its values are {how}, in silence" + _garbage(module)
    packed = (leaf for leaf in ("weight_packed", "qweight") if leaf in scales)
    return unknown_name(view, module, next(packed, scales[0]))


def unknown_name(view: FamilyView, module: Module, leaf: str) -> str:
    """What the loader does with a name that no parameter has."""
    loader = view.family.loader
    if not loader.unknown_name:
        return f"vLLM skips {leaf} without a word and leaves its own parameters unwritten" + _garbage(module)
    if loader.unknown_name == "ValueError":
        return f"vLLM raises ValueError 'There is no module or parameter named ...{leaf}'"
    if loader.drops_scales and module.part == "mtp" and leaf == "weight_scale" and module.kind != "experts":
        return f"this draft's loader drops {leaf} without a word and takes the raw 8-bit values" + _garbage(module)
    return f"vLLM raises KeyError '...{leaf}'"


def _garbage(module: Module) -> str:
    return ": the draft guesses, acceptance is near 0 %" if module.part == "mtp" else ": the model's output is garbage"


def resolution_cure(error: str) -> str:
    """What to do where vLLM raises as it resolves a module."""
    if error == ACT_ORDER:
        return "Quantize it again with desc_act=False, or with static groups"
    if error.startswith(("ValueError: Cannot find any of", "ValueError: The export key")):
        return "Complete quantization_config as its tool writes it"
    if "quark" in error.lower() or "FusedMoe" in error or "Multi-entry" in error:
        return "Quantize it again in a scheme that vLLM has for Quark: FP8, INT8, MXFP4, MXFP8 or NVFP4"
    if "INC" in error:
        return "Quantize it again: vLLM reads AutoRound's integers, MXFP4, MXFP8, and FP8 in blocks without experts"
    if "layer_type_quant_config" in error:
        return 'Add "layer_type_quant_config": {} to quantization_config, as Quark writes it'
    if "nsupported" in error:
        return "Quantize it again: vLLM has no kernel for these bits"
    if "input_activations" in error:
        return (
            'Set the group\'s input_activations to {"num_bits": 8, "type": "float", "strategy": "group", '
            '"group_size": 128, "dynamic": true, "symmetric": true}'
        )
    return "Name all parts of a fused module, or the fused module itself, in the same list"


def ignore_cure(runtime: RuntimeView, module: Module) -> str:
    """How the dialect leaves a module alone."""
    stem = _stem(runtime.view, module)
    if isinstance(runtime.dialect, ModelOpt):
        return f"Exclude it under vLLM's name: {stem + '*' if module.part == 'mtp' and stem else module.name}"
    if isinstance(runtime.dialect, Fp8):
        return f"Add {module.name} to ignored_layers: whole names only, no patterns"
    pattern = stem if module.part == "mtp" and stem else module.name
    if isinstance(runtime.dialect, Gptq) and module.kind == "experts" and runtime.dialect.is_blind_to_experts:
        return f"Quantize again in groups of 128: in groups of {runtime.dialect.group_size} no entry excepts experts"
    if isinstance(runtime.dialect, Gptq):
        return f"Add '-:^{re.escape(pattern)}' to dynamic: vLLM's name, not the one on disk"
    if isinstance(runtime.dialect, Awq):
        first = "Write modules_to_not_convert with all that is plain," * (not runtime.dialect.entries)
        return f"{first} {module.name} among it" if first else f"Add {module.name} to modules_to_not_convert"
    if isinstance(runtime.dialect, AutoRound):
        return f'Add "{module.name}": {{"bits": 16}} to extra_config'
    if isinstance(runtime.dialect, Quark):
        return f"Add 're:^{re.escape(pattern)}' to exclude: vLLM's name, not the one on disk"
    return f"Add 're:^{pattern.replace('.', chr(92) + '.')}' to ignore: vLLM's name, not the one on disk"


def cover_cure(runtime: RuntimeView, module: Module) -> str:
    """How the dialect reaches a module that it builds plain."""
    if isinstance(runtime.dialect, Awq) and not runtime.dialect.entries:
        return (
            "Write modules_to_not_convert: without it vLLM lists every module with a parameter in floating point, and "
            "an entry is a part of names"
        )
    if runtime.dialect.name == "none":
        return "Write quantization_config into config.json, or ship the weights in BF16"
    entry = module.resolution.entry
    narrow = (
        f"Narrow the entry {entry!r} so that it leaves {module.name} alone"
        if entry
        else (f"Let a target match {' and '.join(module.shards) if module.kind == 'experts' else module.name}")
    )
    return f"{narrow}, or store the weight in BF16"


def _stem(view: FamilyView, module: Module) -> str:
    """The runtime prefix of the module's layer, "" outside layers."""
    return "" if module.layer is None else view.runtime_stem(module.part, module.layer)
