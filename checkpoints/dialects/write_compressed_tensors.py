"""Modules and their schemes -> the quantization config in compressed-tensors' dialect, for vLLM and
for SGLang.

In: the named modules of a plan or of a finished checkpoint. Out: `config_groups` whose targets
cover exactly the quantized modules, and an `ignore` list that covers exactly the others. Every
entry is a regex anchored at both ends, because vLLM matches `re:` from the start only, and lists
every spelling under which a module may be asked for: the fused runtime name, its shards, the routed
experts' projections (w1 or gate_proj, by vLLM's version), and the name on disk for tools that read
those.

Easy to get wrong: in vLLM since 0.29 a module that no target matches is silently unquantized, and
one that an ignore entry covers by accident (`model.layers.1` hits layers 10 to 19) is too. Layer
numbers are therefore written as exact ranges. SGLang raises for a module of the draft that neither
a target nor an ignore entry names, so a plain draft needs entries as much as a quantized one. A
draft that it builds under the name of a backbone layer gets that layer's scheme: an entry for it
would change what vLLM reads.

Source of the keys: compressed-tensors 0.19.0 quantization/quant_config.py; of the matching rules:
vLLM 0.32.0 quantization/compressed_tensors/{utils,compressed_tensors}.py,
quantization/utils/config_utils.py, and SGLang 0.5.23,
layers/quantization/compressed_tensors/{compressed_tensors,utils}.py and the files in
recipes/runtimes/sglang.py.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from ...recipes.family_view import FamilyView
from ...recipes.frozen import Json
from ...recipes.runtimes.sglang import sglang_model
from ...recipes.schemes import SCHEMES
from .modules import NamedModule, Spellings, concrete, regexes
from .sglang import no_draft, sglang_asks, unnamed

_CONFIG = "layers/quantization/compressed_tensors/compressed_tensors.py"
_WEIGHTS = "models/deepseek_common/deepseek_weight_loader.py"
ByScheme = dict[str, set[Spellings]]
"""Spellings by scheme, "" for plain."""


def compressed_tensors_config(
    view: FamilyView, modules: Iterable[NamedModule]
) -> tuple[Json, list[str]]:
    """The value of config.json's `quantization_config`, and what stands against SGLang."""
    modules = list(modules)
    by_scheme: ByScheme = defaultdict(set)
    for module in modules:
        by_scheme[module.scheme].add(module.spelled)
    added, obstacles = added_names(view, modules)
    for scheme, spelled in added.items():
        by_scheme[scheme] |= spelled
    ignored = by_scheme.pop("", set())
    # transformers 5.17 (integrations/compressed_tensors.get_experts_scheme) takes the first group
    # whose targets mention "experts" for the routed ones; a group with shared experts alone must
    # not come before it.
    routed = {module.scheme for module in modules if module.place.role == "experts"}
    schemes = sorted(by_scheme, key=lambda scheme: (scheme not in routed, scheme))
    groups = Json()
    formats = set[str]()
    for number, name in enumerate(schemes):
        targets = {"targets": regexes(by_scheme[name])}
        groups[f"group_{number}"] = targets | SCHEMES[name].config_group()
        formats.add(SCHEMES[name].format)
    if len(formats) != 1 or view.family.rerouted_format in formats:
        formats = {"mixed-precision"}
    opaque = [
        f"re:^(?:{re.escape(runtime)}|{re.escape(disk)})" for disk, runtime, _ in view.layout.opaque
    ]
    config = {
        "quant_method": "compressed-tensors",
        "format": formats.pop(),
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": regexes(ignored) + opaque,
        "kv_cache_scheme": None,
        **view.family.config_extras,
    }
    return config, obstacles


# --- SGLang ---------------------------------------------------------------------------------------


def added_names(view: FamilyView, modules: Iterable[NamedModule]) -> tuple[ByScheme, list[str]]:
    """The spellings that only SGLang asks about, by scheme; or what stands against it, and nothing
    is added.
    """
    if obstacle := no_draft(view):
        return {}, [obstacle]
    known = [module for module in modules if module.place.is_known]
    model = sglang_model(view.config)
    a_layer = re.escape(model.layers).replace(r"\{i\}", r"\d+")
    has_layers = any(module.place.part == "backbone" for module in known)
    if not has_layers and re.fullmatch(a_layer, model.draft or ""):
        return {}, [f"it gives the MTP layer the names of a decoder layer ({model.file})"]
    spelled_by_vllm = {name for module in known for name in concrete(module.spelled)}
    asked, clashes = sglang_asks(view, known)
    obstacles = [*dict.fromkeys([*clashes, *unnamed(view, known), *_without_kernel(known)])]
    added: ByScheme = defaultdict(set)
    for name, module, spelled in asked:
        if name not in spelled_by_vllm and not obstacles:
            added[module.scheme].add(spelled)
    return added, obstacles


def _without_kernel(modules: Iterable[NamedModule]) -> Iterator[str]:
    """Schemes that SGLang has no class for, of experts, of linears, or of what it absorbs into
    attention.
    """
    modules = list(modules)
    is_mixed = len({SCHEMES[module.scheme].format for module in modules if module.scheme}) > 1
    for module in modules:
        place = module.place
        scheme = module.scheme
        if scheme.startswith("MXFP4"):
            yield f"it has no class for {scheme} in a config of mixed precision ({_CONFIG})"
        elif scheme == "W8A8" and place.role == "experts":
            yield f"it has experts in W8A8 for NPUs only ({_CONFIG})"
        elif is_mixed and scheme.startswith(("W4A16", "W8A16")) and place.role == "experts":
            yield (
                f"it takes experts in {scheme} only where all of the checkpoint is "
                f"pack-quantized ({_CONFIG})"
            )
        elif place.module.endswith(".kv_b_proj"):
            words = "an unpacked weight" if "4" in scheme or scheme == "W8A16" else ""
            if scheme == "FP8_BLOCK":
                words = "its blocks' size from the target Linear alone"
            if words:
                yield f"it reads {words} for kv_b_proj, which is in {scheme} ({_WEIGHTS})"
