"""From a name in vLLM back to the tensor on disk.

In: the questions to a quantization config that a dry load noted, and a `RuntimeView`; or a name in
vLLM's words. Out: names on disk.

Easy to get wrong: a parameter's name is its place in the model
(`model.layers.3.mtp_block.self_attn.qkv_proj`). The quantization config and the family's table use
the prefix of construction (`model.layers.3.self_attn.qkv_proj`, and `mtp.fc` for `model.fc`). Each
question to the config has both names; the two are compared to rename the others.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter

from ...checkpoints.dialects.runtime_view import RuntimeView
from ...recipes.family import HFName
from ..facts.dry_load import Fault, Question

_GATE_UP = re.compile(r"\.(gate_proj|up_proj|w1|w3|gate_up_proj)$")


class Trace:
    """The way back for the target or the draft of one dry load; `questions` are those of its
    quantization config.
    """

    def __init__(self, questions: Sequence[Question], runtime: RuntimeView):
        self._asked = {each.path: each.prefix for each in questions if each.path and each.prefix}
        self._runtime = runtime

    def module(self, param: str) -> str:
        """vLLM's prefix of the module that owns a parameter; the parameter's own name if it belongs
        to none.
        """
        owner = param.rpartition(".")[0]
        for path in (owner, param):
            # vLLM has a module inside of the one that it constructs for experts.
            for spelling in (path, path.replace(".routed_experts", "")):
                prefix = self._prefix(spelling)
                if prefix in self._runtime.view.disk_modules:
                    return prefix
        return self._prefix(owner)

    def entry(self, fault: Fault) -> str:
        """The tensor on disk that a fault is about: the missing one, else the one least written,
        else the first.
        """
        # The name of an experts' parameter says which half it is.
        half, leaf = re.findall(r"^(w13|w2|)_?(.*)", fault.param.rpartition(".")[2])[0]
        members = self._members(self.module(fault.param), half)
        first = self._first_of(members)
        if first and not fault.sources:
            return first
        for module in members:
            if not any(f"{name}.".startswith(f"{module}.") for name in fault.sources):
                if module in self._runtime.source.entries:
                    return module
                weight = self._runtime.weights.get(module)
                if weight and leaf in weight.parts:
                    return self._first_of([module])
                return f"{module}.{leaf}"
        return min(fault.sources, key=fault.sources.__getitem__, default=fault.param)

    def _members(self, prefix: str, half: str) -> list[HFName]:
        """Modules on disk; experts by number, as many as there are, and stacked ones only if there
        are no others.
        """
        modules = list[HFName]()
        for module in self._runtime.view.disk_modules.get(prefix, ()):
            is_w13 = _GATE_UP.search(module) is not None
            if not half or is_w13 == (half == "w13"):
                modules.append(module)
        others = [module for module in modules if "{e}" not in module]
        of_experts = [module for module in modules if module not in others]
        if not of_experts:
            return others
        stacked = [module for module in others if module in self._runtime.source.entries]
        if stacked:
            return stacked
        pattern = re.compile(re.escape(of_experts[0]).replace(r"\{e\}", r"(\d+)"))
        matches = filter(None, map(pattern.fullmatch, self._runtime.weights))
        last = max([int(match[1]) for match in matches], default=0)
        numbered = list[HFName]()
        for expert in range(last + 1):
            numbered += [HFName(module.replace("{e}", str(expert))) for module in of_experts]
        return numbered

    def _first_of(self, modules: Sequence[HFName]) -> str:
        """The first tensor of the first of these modules that is on disk."""
        for module in modules:
            if module in self._runtime.weights:
                return self._runtime.weights[module].names()[0]
        return ""

    def _prefix(self, path: str) -> str:
        """The prefix for a path in the model: its longest stem with another known prefix is
        replaced.
        """
        if path in self._asked:
            return self._asked[path]
        for stem in sorted(self._stems, key=len, reverse=True):
            if f"{path}.".startswith(f"{stem}."):
                return (self._stems[stem] + path[len(stem) :]).lstrip(".")
        return path

    @cached_property
    def _stems(self) -> Mapping[str, str]:
        """Stem of a path -> stem of its prefix, where they differ. A stem is a name without the end
        that both share.
        """
        stems: dict[str, str] = {}
        for path, prefix in self._asked.items():
            of_path = path.split(".")
            of_prefix = prefix.split(".")
            while of_path and of_prefix and of_path[-1] == of_prefix[-1]:
                of_path.pop()
                of_prefix.pop()
            if of_path != of_prefix and of_path:
                stems.setdefault(".".join(of_path), ".".join(of_prefix))
        return stems


def on_disk(runtime: RuntimeView, named: str, *, is_draft: bool) -> str:
    """The tensor of the checkpoint that a name in vLLM's words means; "" where none is found.

    Args:
        runtime: the checkpoint.
        named: the name.
        is_draft: the words speak of the draft.
    """
    if HFName(named) in runtime.source.entries:
        return named
    parts = named.replace(".mtp_block", "").replace(".routed_experts", "").split(".")
    # Loaders cut names at both ends: `layers.0.mlp.experts.w2_weight` lacks its start, and its last
    # part is no module.
    for end in range(len(parts), 1, -1):
        wanted = f".{'.'.join(parts[:end])}"
        hits = [
            module
            for module in runtime.modules
            if wanted.endswith(f".{module.name}") or module.name.endswith(wanted)
        ]
        # The name may be the draft's as well as the target's.
        hits.sort(key=attrgetter("part"), reverse=is_draft)
        if hits:
            return hits[0].members[0].weight.names()[0]
    return ""
