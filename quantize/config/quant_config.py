"""Plan -> the `quantization_config` of config.json, in compressed-tensors' dialect and vLLM's runtime names.

In: a plan, or the matrices of a finished checkpoint with their schemes. Out: `config_groups` whose targets cover
exactly the quantized modules, and an `ignore` list that covers exactly the others. Every entry is a regex anchored at
both ends, because vLLM matches `re:` from the start only, and lists every spelling under which a module may be asked
for: the fused runtime name, its shards, the routed experts' projections (w1 or gate_proj, by vLLM's version), and the
name on disk for tools that read those.

Easy to get wrong: in vLLM 0.32 a module that no target matches is silently unquantized, and one that an ignore entry
covers by accident (`model.layers.1` hits layers 10 to 19) is too. Layer numbers are therefore written as exact ranges.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...recipes.family import HFName, VLLMName
from ...recipes.family_view import FamilyView
from ...recipes.schemes import SCHEMES
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan
from .sglang_fit import fit_sglang
from .spelled import Matrix, Spellings, concrete, regexes, spell


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeModule:
    """One module whose quantization vLLM decides by name.

    Attributes:
        name: the prefix vLLM constructs it with.
        scheme: what the plan writes for it, "" for plain.
        members: its modules on disk; () for routed experts.
        asked: the names under which some version of vLLM, or a reader of names on disk, looks it up.
    """

    name: VLLMName
    scheme: str
    members: tuple[HFName, ...]
    asked: tuple[str, ...]


def compressed_tensors_config(view: FamilyView, matrices: Iterable[Matrix]) -> dict[str, Any]:
    """The value of config.json's `quantization_config`.

    Source of the keys: compressed-tensors 0.19.0 quantization/quant_config.py; of the matching rules: vLLM 0.32.0
    quantization/compressed_tensors/{utils,compressed_tensors}.py, quantization/utils/config_utils.py.
    """
    matrices = list(matrices)
    by_scheme: dict[str, set[Spellings]] = defaultdict(set)
    routed: set[str] = set()
    for matrix in matrices:
        by_scheme[matrix.scheme].add(spell(view, matrix))
        # transformers 5.17 (integrations/compressed_tensors.get_experts_scheme) takes the first group whose targets
        # mention "experts" for the routed ones; a group with shared experts alone must not come before it.
        routed |= {matrix.scheme} if matrix.role == "experts" else set()
    for scheme, spelled in fit_sglang(view, matrices).added.items():
        by_scheme[scheme] |= spelled
    ignored = by_scheme.pop("", set())
    groups = {
        f"group_{number}": {"targets": regexes(by_scheme[scheme]), **SCHEMES[scheme].config_group()}
        for number, scheme in enumerate(sorted(by_scheme, key=lambda scheme: (scheme not in routed, scheme)))
    }
    formats = sorted({group["format"] for group in groups.values()})
    is_single = len(formats) == 1 and formats[0] != view.family.rerouted_format
    opaque = [f"re:^(?:{re.escape(runtime)}|{re.escape(disk)})" for disk, runtime, _ in view.layout.opaque]
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if is_single else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": regexes(ignored) + opaque,
        "kv_cache_scheme": None,
        **view.family.config_extras,
    }


def runtime_modules(plan: Plan) -> list[RuntimeModule]:
    """Every module of the plan that vLLM may ask its quantization config about, by its fused runtime name."""
    return modules_of(plan.view, matrices_of(plan))


def modules_of(view: FamilyView, matrices: Iterable[Matrix]) -> list[RuntimeModule]:
    """The runtime modules that these matrices make up."""
    schemes: dict[VLLMName, str] = {}
    asked: dict[VLLMName, dict[str, None]] = defaultdict(dict)
    members: dict[VLLMName, dict[HFName, None]] = defaultdict(dict)
    for matrix in matrices:
        schemes[matrix.runtime] = matrix.scheme
        asked[matrix.runtime].update(dict.fromkeys(concrete(spell(view, matrix))))
        if matrix.role != "experts":
            members[matrix.runtime][matrix.module] = None
    return [
        RuntimeModule(name=name, scheme=scheme, members=tuple(members[name]), asked=tuple(asked[name]))
        for name, scheme in schemes.items()
    ]


def matrices_of(plan: Plan) -> list[TensorPlan]:
    """The plan's weights of two and more dimensions: what a Linear, an expert stack, an embedding or a head holds."""
    opaque = tuple(disk for disk, _, _ in plan.view.layout.opaque)
    return [
        tensor
        for tensor in plan.tensors
        if len(tensor.shape) >= 2
        and tensor.fate != "drop"
        and (tensor.module != tensor.name or tensor.role == "experts")
        and not tensor.name.startswith(opaque)
    ]
