"""What a checkpoint holds, before any family is asked: its weights, its quantization config, its index.

In: a `Source`. Out: a `StoredView`, each part computed once.

Easy to get wrong: names here are those on disk. Only a family knows what vLLM calls them (runtime_view.py).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.hub_names import is_repo_id
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import INDEX, Source, small_bytes, small_object
from ...checkpoints.stored import StoredWeight, stored_weights, transposed_weights
from ...recipes.errors import CheckpointError
from ...recipes.family import HFName
from .dialects.choose import quantization_of, read_dialect
from .vllm_module import Dialect

_FRONT_MATTER = re.compile(rb"---\s*\n(.*?)\n---", re.DOTALL)
_MOST_OF_A_CARD = 1 << 16


@dataclass(frozen=True)
class StoredView:
    """A checkpoint's headers and configs."""

    source: Source

    @cached_property
    def weights(self) -> Mapping[HFName, StoredWeight]:
        """Every weight that a loader following the index would see, by module on disk."""
        return self._grouped[0]

    @cached_property
    def others(self) -> tuple[Entry, ...]:
        """Every tensor that is no weight and no scale of one."""
        return tuple(self._grouped[1])

    @cached_property
    def hf_quant_config(self) -> Mapping[str, Any] | None:
        """hf_quant_config.json, if there is one. vLLM does not open it where config.json has a quantization config.

        Raises:
            CheckpointError: it is no JSON object, and vLLM reads it.
        """
        try:
            return small_object(self.source, HF_QUANT_CONFIG)
        except CheckpointError:
            if quantization_of(self.source.config) is None:
                raise
            return None

    @cached_property
    def index(self) -> Mapping[str, Any] | None:
        """model.safetensors.index.json, if there is one."""
        return small_object(self.source, INDEX)

    @cached_property
    def base_model(self) -> str:
        """The one model that README.md's front matter names as base, ORG/NAME; "" where it names none or several."""
        block = _FRONT_MATTER.match((small_bytes(self.source, "README.md") or b"")[:_MOST_OF_A_CARD])
        try:
            front = yaml.safe_load(block[1]) if block else None
        except (yaml.YAMLError, ValueError, RecursionError):
            return ""
        named = front.get("base_model") if isinstance(front, dict) else None
        names = named if isinstance(named, list) else [named]
        return names[0] if len(names) == 1 and isinstance(names[0], str) and is_repo_id(names[0]) else ""

    @cached_property
    def dialect(self) -> Dialect:
        """The quantization config, as the target's class reads it."""
        return read_dialect(self.source.config, self.hf_quant_config, dtypes=self.dtypes)

    @cached_property
    def _grouped(self) -> tuple[dict[HFName, StoredWeight], list[Entry]]:
        weights, others = stored_weights(self.source.entries.values())
        transposed, others = transposed_weights(others)
        return weights | transposed, others

    @property
    def dtypes(self) -> Mapping[HFName, str]:
        """Of all files in the folder: vLLM reads their headers too."""
        entries = {**self.source.entries, **self.source.unindexed}
        return {name: entry.dtype for name, entry in entries.items()}
