"""From vLLM's parameters to the files: which tensors on disk fill a parameter, or should have
filled it.

In: the questions that vLLM asked its quantization config, the `RuntimeView`. Out: names on disk.

Easy to get wrong: a parameter's name is its place in the model
(`model.layers.3.mtp_block.self_attn.qkv_proj`). The quantization config and the family's table use
the prefix of construction (`model.layers.3.self_attn.qkv_proj`, and `mtp.fc` for `model.fc`). Each
question to the config has both names; the two are compared to rename the others.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

from ...recipes.family import HFName
from ..check.runtime_view import Module, RuntimeView
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
        path = param.rpartition(".")[0]
        for name in (path, param):
            for known in (name, name.replace(".routed_experts", "")):
                prefix = self._prefix(known)
                if prefix in self._runtime.view.disk_modules:
                    return prefix
        return self._prefix(path)

    def entry(self, fault: Fault) -> str:
        """The tensor on disk that a fault is about: the missing one, else the one least written,
        else the first.
        """
        leaf, half = fault.param.rpartition(".")[2], ""
        if match := _HALF.match(leaf):
            half = match[1]
        members = self._members(self.module(fault.param), half)
        if not fault.sources and (there := self._first_of(members)):
            return there
        used, leaf = tuple(f"{name}." for name in fault.sources), leaf.removeprefix(f"{half}_")
        for module in members:
            if not any(name.startswith(f"{module}.") for name in used):
                weight = self._runtime.weights.get(module)
                if module in self._runtime.source.entries:
                    return module
                if weight and leaf in weight.parts:
                    return self._first_of([module])
                return f"{module}.{leaf}"
        return min(fault.sources, key=fault.sources.__getitem__, default=fault.param)

    def module_entry(self, prefix: str) -> str:
        """The first tensor on disk of a module that vLLM calls `prefix`; "" if the table does not
        know it.
        """
        members = self._members(prefix)
        return self._first_of(members) or next(iter(members), "")

    def _members(self, prefix: str, half: str = "") -> list[HFName]:
        """Modules on disk; experts by number, as many as there are, and stacked ones only if there
        are no others.
        """
        single, others, stacked = list[HFName](), list[HFName](), list[HFName]()
        for module in self._runtime.view.disk_modules.get(prefix, ()):
            if half and bool(_GATE_UP.search(module)) != (half == "w13"):
                continue
            if "{e}" in module:
                single.append(module)
                continue
            others.append(module)
            if module in self._runtime.source.entries:
                stacked.append(module)
        if not single:
            return others
        if stacked:
            return stacked
        pattern, last = re.compile(re.escape(single[0]).replace(r"\{e\}", r"(\d+)")), 0
        for module in self._runtime.weights:
            if match := pattern.fullmatch(module):
                last = max(last, int(match[1]))
        numbered = range(last + 1)
        return [HFName(each.replace("{e}", str(e))) for e in numbered for each in single]

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
            ours, theirs = path.split("."), prefix.split(".")
            while ours and theirs and ours[-1] == theirs[-1]:
                ours.pop()
                theirs.pop()
            if ours != theirs and ours:
                stems.setdefault(".".join(ours), ".".join(theirs))
        return stems


def on_disk(runtime: RuntimeView, named: str, *, is_draft: bool) -> str:
    """The tensor of the checkpoint that a name in vLLM's words means; "" where none is found.

    Loaders cut names at both ends: `layers.0.mlp.experts.w2_weight` may be the draft's or the
    target's. The draft's is meant if the words speak of it.
    """
    if HFName(named) in runtime.source.entries:
        return named
    words = named.replace(".mtp_block", "").replace(".routed_experts", "").split(".")
    for end in range(len(words), 1, -1):
        wanted = f".{'.'.join(words[:end])}"
        found = list[Module]()
        for module in runtime.modules:
            if wanted.endswith(f".{module.name}") or module.name.endswith(wanted):
                found.append(module)
        if found:
            best = min(found, key=lambda module: (module.part == "mtp") != is_draft)
            return next(iter(best.members[0].weight.parts.values())).name
    return ""
