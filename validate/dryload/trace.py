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
        self._asked = {
            asked.path: asked.prefix for asked in questions if asked.path and asked.prefix
        }
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
        leaf = fault.param.rpartition(".")[2]
        half = _HALF.match(leaf)
        members = self._members(self.module(fault.param), half[1] if half else "")
        there = [module for module in members if module in self._runtime.weights]
        if fault.sources:
            there = []
            members = [
                each
                for each in members
                if not any(f"{name}.".startswith(f"{each}.") for name in fault.sources)
            ]
            if not members:
                return min(fault.sources, key=lambda name: fault.sources[name])
        if there:
            return self._first_of(there[0])
        return self._missing(members[0], _HALF.sub("", leaf)) if members else fault.param

    def module_entry(self, prefix: str) -> str:
        """The first tensor on disk of a module that vLLM calls `prefix`; "" if the table does not
        know it.
        """
        members = self._members(prefix)
        there = [module for module in members if module in self._runtime.weights]
        return self._first_of(there[0]) if there else next(iter(members), "")

    def _members(self, prefix: str, half: str = "") -> list[HFName]:
        """Modules on disk; experts by number, as many as there are, and stacked ones only if there
        are no others.
        """
        modules = self._runtime.view.disk_modules.get(prefix, ())
        kept = [
            module
            for module in modules
            if not half or bool(_GATE_UP.search(module)) == (half == "w13")
        ]
        single = [module for module in kept if "{e}" in module]
        stacked = [
            module
            for module in kept
            if "{e}" not in module and module in self._runtime.source.entries
        ]
        if not single or stacked:
            return stacked if single else kept
        pattern = re.compile(re.escape(single[0]).replace(r"\{e\}", r"(\d+)"))
        numbers = [
            int(match[1])
            for module in self._runtime.weights
            if (match := pattern.fullmatch(module))
        ]
        return [
            HFName(each.replace("{e}", str(e)))
            for e in range(max(numbers, default=0) + 1)
            for each in single
        ]

    def _first_of(self, module: HFName) -> str:
        return next(entry.name for entry in self._runtime.weights[module].parts.values())

    def _missing(self, module: HFName, leaf: str) -> str:
        if module in self._runtime.source.entries:
            return module
        weight = self._runtime.weights.get(module)
        return self._first_of(module) if weight and leaf in weight.parts else f"{module}.{leaf}"

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
        found = [
            each
            for each in runtime.modules
            if wanted.endswith(f".{each.name}") or each.name.endswith(wanted)
        ]
        if found:
            best: Module = min(found, key=lambda module: (module.part == "mtp") != is_draft)
            return next(entry.name for entry in best.members[0].weight.parts.values())
    return ""
