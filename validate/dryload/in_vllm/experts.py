"""vLLM's search for an expert's parameter, without the entries that cannot match.

vLLM's loaders compare the name of every tensor with three entries an expert, 768 in DeepSeek-V4:
most of a dry load's time. The entries name their expert (`experts.17.w1.`), so for a tensor of
expert 17 all others may be left out: the loop then does the same. For a name without an expert's
number the loop gets the whole list.

Easy to get wrong: the name is that of the last tensor that the loader got. vLLM 0.32.0's loaders
work on one tensor at a time. A loader that collects them first has no tensor at that point, and
gets the whole list too.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

_EXPERT = re.compile(r"\bexperts\.(\d+)\.")


class Mapping(list):
    """(parameter, name on disk, expert, shard) entries; iterated, those that the current tensor may
    match.
    """

    def __init__(self, entries: list[tuple[str, str, int, str]], current: Callable[[], str]):
        super().__init__(entries)
        self._current = current
        self._by_expert: dict[str, list[tuple[str, str, int, str]]] = {}
        for entry in entries:
            self._by_expert.setdefault(_expert_in(entry[1]), []).append(entry)

    def __iter__(self) -> Iterator[Any]:
        expert = _expert_in(self._current())
        if not expert or "" in self._by_expert:
            return super().__iter__()
        return iter(self._by_expert.get(expert, ()))


def _expert_in(name: str) -> str:
    """The number of the expert in a name; "" for none."""
    match = _EXPERT.search(name)
    return match[1] if match else ""


def install(current: Callable[[], str]) -> None:
    """Let vLLM's mappings call `current` for the name on disk of the tensor that is loaded now."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    build = RoutedExperts.build_expert_params_mapping

    def build_mapping(*args: Any, **kwargs: Any) -> Mapping:
        return Mapping(build(*args, **kwargs), current)

    RoutedExperts.build_expert_params_mapping = staticmethod(build_mapping)  # type: ignore[method-assign]
