"""From vLLM's parameters to the files: which tensors on disk fill a parameter, or should have filled it.

In: the questions that vLLM asked its quantization config, the `RuntimeView`. Out: names on disk.

Easy to get wrong: a parameter's name is its place in the model (`model.layers.3.mtp_block.self_attn.qkv_proj`). The
quantization config and the family's table use the prefix of construction (`model.layers.3.self_attn.qkv_proj`, and
`mtp.fc` for `model.fc`). Each question to the config has both names; the two are compared to rename the others.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from ...recipes.family import HFName
from ..check.runtime_view import RuntimeView
from ..facts.dry_load import Fault, Question

# The name of an experts' parameter says which half it is.
_HALF = re.compile(r"^(w13|w2)_")
_GATE_UP = re.compile(r"\.(gate_proj|up_proj|w1|w3|gate_up_proj)$")


class Trace:
    """The way back for the target or the draft of one dry load; `questions` are those of its quantization config."""

    def __init__(self, questions: Sequence[Question], runtime: RuntimeView):
        self._questions = questions
        self._runtime = runtime

    def module(self, param: str) -> str:
        """vLLM's prefix of the module that owns a parameter; the parameter's own name if it belongs to none."""
        path = param.rpartition(".")[0]
        for name in (path, param):
            for known in (name, name.replace(".routed_experts", "")):
                prefix = self._prefix(known)
                if prefix in self._runtime.view.disk_modules:
                    return prefix
        return self._prefix(path)

    def entry(self, fault: Fault) -> str:
        """The tensor on disk that a fault is about: the missing one, else the one least written, else the first."""
        leaf = _HALF.sub("", fault.param.rpartition(".")[2])
        members = self._members(fault.param)
        if fault.sources:
            missing = [module for module in members if not any(_is_of(name, module) for name in fault.sources)]
            if missing:
                return self._on_disk(missing[0], leaf, is_there=False)
            return min(fault.sources, key=lambda name: fault.sources[name])
        there = [module for module in members if module in self._runtime.weights]
        if there:
            return self._on_disk(there[0], leaf, is_there=True)
        return self._on_disk(members[0], leaf, is_there=False) if members else fault.param

    def module_entry(self, prefix: str) -> str:
        """The first tensor on disk of a module that vLLM calls `prefix`; "" if the table does not know it."""
        members = self._expand(self._runtime.view.disk_modules.get(prefix, ()), "")
        there = [module for module in members if module in self._runtime.weights]
        if there:
            return self._on_disk(there[0], "", is_there=True)
        return members[0] if members else ""

    def _members(self, param: str) -> list[HFName]:
        half = _HALF.match(param.rpartition(".")[2])
        return self._expand(self._runtime.view.disk_modules.get(self.module(param), ()), half[1] if half else "")

    def _expand(self, modules: Iterable[HFName], half: str) -> list[HFName]:
        """Experts by number, as many as there are on disk; stacked ones only if there are no single ones."""
        kept = [module for module in modules if not half or bool(_GATE_UP.search(module)) == (half == "w13")]
        single = [module for module in kept if "{e}" in module]
        if not single:
            return kept
        count = self._num_experts(single[0])
        stacked = [module for module in kept if "{e}" not in module and module in self._runtime.source.entries]
        return stacked or [HFName(module.replace("{e}", str(e))) for e in range(count) for module in single]

    def _num_experts(self, template: str) -> int:
        pattern = re.compile(re.escape(template).replace(r"\{e\}", r"(\d+)"))
        found = [int(match[1]) for module in self._runtime.weights if (match := pattern.fullmatch(module))]
        return max(found, default=0) + 1

    def _on_disk(self, module: HFName, leaf: str, *, is_there: bool) -> str:
        weight = self._runtime.weights.get(module)
        if weight is None:
            entry = HFName(module)
            return entry if entry in self._runtime.source.entries else f"{module}.{leaf or 'weight'}"
        if not is_there and leaf not in weight.parts:
            return f"{module}.{leaf}"
        return next(iter(entry.name for entry in weight.parts.values()), module)

    def _prefix(self, path: str) -> str:
        """The prefix for a path in the model: its longest stem with another known prefix is replaced."""
        if path in self._asked:
            return self._asked[path]
        for stem in sorted(self._stems, key=len, reverse=True):
            if path == stem or path.startswith(f"{stem}."):
                return (self._stems[stem] + path[len(stem) :]).lstrip(".")
        return path

    @cached_property
    def _asked(self) -> Mapping[str, str]:
        return {question.path: question.prefix for question in self._questions if question.path and question.prefix}

    @cached_property
    def _stems(self) -> Mapping[str, str]:
        """Stem of a path -> stem of its prefix, where they differ. A stem is a name without the end that both share."""
        stems: dict[str, str] = {}
        for path, prefix in self._asked.items():
            ours, theirs = path.split("."), prefix.split(".")
            while ours and theirs and ours[-1] == theirs[-1]:
                ours.pop()
                theirs.pop()
            if ours != theirs and ours:
                stems.setdefault(".".join(ours), ".".join(theirs))
        return stems


def _is_of(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
