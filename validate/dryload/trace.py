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

from ...checkpoints.dialects.runtime_view import Module, RuntimeView
from ...recipes.family import HFName
from ..facts.dry_load import Fault, Question

# The name of an experts' parameter says which half it is.
_HALF = re.compile(r"^(w13|w2)_")
_GATE_UP = re.compile(r"\.(gate_proj|up_proj|w1|w3|gate_up_proj)$")


class Trace:
    """The way back for the target or the draft of one dry load; `questions` are those of its
    quantization config.
    """

    def __init__(self, questions: Sequence[Question], runtime: RuntimeView):
        self._asked: dict[str, str] = {}
        for asked in questions:
            if asked.path and asked.prefix:
                self._asked[asked.path] = asked.prefix
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
        leaf = fault.param.rpartition(".")[2]
        half = ""
        match = _HALF.match(leaf)
        if match:
            half = match[1]
            leaf = leaf.removeprefix(f"{half}_")
        members = self._members(self.module(fault.param), half)
        if not fault.sources:
            first = self._first_of(members)
            if first:
                return first
        for module in members:
            read = [name for name in fault.sources if f"{name}.".startswith(f"{module}.")]
            if not read:
                return self._missing(module, leaf)
        return min(fault.sources, key=fault.sources.__getitem__, default=fault.param)

    def _missing(self, module: HFName, leaf: str) -> str:
        """The name on disk of what vLLM did not read of a module."""
        if module in self._runtime.source.entries:
            return module
        weight = self._runtime.weights.get(module)
        if weight and leaf in weight.parts:
            return self._first_of([module])
        return f"{module}.{leaf}"

    def module_entry(self, prefix: str) -> str:
        """The first tensor on disk of a module that vLLM calls `prefix`; "" if the table does not
        know it.
        """
        members = self._members(prefix)
        first = self._first_of(members)
        if not first and members:
            return members[0]
        return first

    def _members(self, prefix: str, half: str = "") -> list[HFName]:
        """Modules on disk; experts by number, as many as there are, and stacked ones only if there
        are no others.
        """
        of_experts = list[HFName]()
        others = list[HFName]()
        stacked = list[HFName]()
        for module in self._runtime.view.disk_modules.get(prefix, ()):
            is_w13 = _GATE_UP.search(module) is not None
            if half and is_w13 != (half == "w13"):
                continue
            if "{e}" in module:
                of_experts.append(module)
                continue
            others.append(module)
            if module in self._runtime.source.entries:
                stacked.append(module)
        if not of_experts:
            return others
        if stacked:
            return stacked
        pattern = re.compile(re.escape(of_experts[0]).replace(r"\{e\}", r"(\d+)"))
        last = 0
        for module in self._runtime.weights:
            match = pattern.fullmatch(module)
            if match:
                last = max(last, int(match[1]))
        numbered = list[HFName]()
        for expert in range(last + 1):
            for module in of_experts:
                numbered.append(HFName(module.replace("{e}", str(expert))))
        return numbered

    def _first_of(self, modules: Sequence[HFName]) -> str:
        """The first tensor of the first of these modules that is on disk."""
        for module in modules:
            if module in self._runtime.weights:
                return next(iter(self._runtime.weights[module].parts.values())).name
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
        hits = list[Module]()
        for module in runtime.modules:
            if wanted.endswith(f".{module.name}") or module.name.endswith(wanted):
                hits.append(module)
        # The name may be the draft's as well as the target's.
        hits.sort(key=_is_drafts, reverse=is_draft)
        if hits:
            weight = hits[0].members[0].weight
            return next(iter(weight.parts.values())).name
    return ""


def _is_drafts(module: Module) -> bool:
    return module.part == "mtp"
