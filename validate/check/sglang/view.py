"""The view that SGLang has of a checkpoint: which module each tensor goes to, and how SGLang builds
it.

In: a `RuntimeView`, which knows the files and the family. Out: an `SglangView` with a module for
each prefix that SGLang constructs; the rules read it.

Easy to get wrong: SGLang builds one MTP layer. The tensors of further ones belong to no module of
it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ....recipes.family import Part, VLLMName
from ....recipes.family_view import Place
from ....recipes.runtimes.sglang import (
    SglangModel,
    packed_modules,
    sglang_model,
    sglang_module,
    sglang_stem,
)
from ..dialects.matching import OneAnswer, plain
from ..dialects.patterns import time_limit
from ..runtime_view import KINDS, Member, Module, RuntimeView
from ..vllm_module import Dialect, Kind, Resolution
from .choose import read_sglang

# The classes of indexers and compressors are among SGLang's kernels, which nothing constructs for
# the tests.
_NOT_JUDGED = ("vision", "embedding", "norm", "state", "indexer", "compressor")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class SglangView:
    """A checkpoint as SGLang 0.5.23 sees it."""

    runtime: RuntimeView

    @cached_property
    def model(self) -> SglangModel:
        """SGLang's classes and names for it."""
        return sglang_model(self.runtime.view.config)

    @cached_property
    def dialects(self) -> Mapping[Part, Dialect]:
        """The quantization config, as the target's class and as the draft's class read it."""
        view, other = self.runtime.view, self.runtime.hf_quant_config
        return {
            "backbone": read_sglang(view, other, "backbone"),
            "mtp": read_sglang(view, other, "mtp"),
        }

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Every module with weights on disk that SGLang builds; by its name on disk where SGLang
        gives it none.
        """
        members: dict[tuple[str, Part, bool], list[Member]] = defaultdict(list)
        for member in (member for module in self.runtime.modules for member in module.members):
            if self._is_built(member.place):
                name = sglang_module(self.runtime.view, member.place)
                members[name or member.weight.module, member.place.part, name is not None].append(
                    member
                )
        with time_limit():
            return tuple(self._module(*key, tuple(group)) for key, group in members.items())

    def why_plain(self, part: Part) -> str:
        """Why the draft's class builds everything plain; "" where it does not."""
        dialect = self.dialects[part]
        return (
            dialect.answer.entry
            if isinstance(dialect, OneAnswer) and not dialect.answer.error
            else ""
        )

    def _module(self, name: str, part: Part, asks: bool, members: tuple[Member, ...]) -> Module:
        kind = KINDS.get(members[0].place.role, "linear")
        shards = tuple(VLLMName(f"{name}.0.{last}") for last in _PROJECTIONS)
        if kind != "experts":
            last = name.rpartition(".")[2]
            parts = packed_modules(self.runtime.view, part).get(last, ())
            shards = tuple(VLLMName(name.replace(last, each)) for each in parts)
        resolution = plain()
        if asks:
            resolution = self._answer(VLLMName(name), part, shards, kind)
        return Module(
            name=VLLMName(name),
            kind=kind,
            part=part,
            shards=shards,
            members=members,
            loads_quantized=asks,
            resolution=resolution,
        )

    def _answer(
        self, name: VLLMName, part: Part, shards: tuple[VLLMName, ...], kind: Kind
    ) -> Resolution:
        """What SGLang builds; Qwen3-Next's class leaves qkv_proj out of modelopt's NVFP4 by
        itself.
        """
        dialect = self.dialects[part]
        if dialect.name == "modelopt_fp4" and name.endswith(self.model.plain_in_fp4):
            return plain("sglang/srt/models/qwen3_next.py builds it plain under modelopt_fp4")
        return dialect.resolve(name, shards=shards, kind=kind)

    def _is_built(self, place: Place) -> bool:
        """Whether SGLang has a module for it; it builds neither a draft that it has no class for,
        nor a second one.
        """
        if place.role in _NOT_JUDGED or (
            place.role == "linear_attention" and self.model.other_linear_attention
        ):
            return False
        if place.part == "backbone":
            return bool(self.model.layers)
        if self.model.draft is None or place.role == "head":
            return False  # the head of the block is the target's
        return place.layer is None or sglang_stem(self.runtime.view, "mtp", place.layer) is not None
