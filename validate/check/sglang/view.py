"""The view that SGLang has of a checkpoint: which module each tensor goes to, and how SGLang builds it.

In: a `RuntimeView`, which knows the files and the family. Out: an `SglangView` with a module for each prefix that
SGLang constructs; the rules read it.

Easy to get wrong: SGLang builds one MTP layer. The tensors of further ones belong to no module of it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ....recipes.family import Part, Role
from ....recipes.family_view import Place
from ....recipes.runtimes.sglang import SglangModel, sglang_model, sglang_module, sglang_stem
from ..dialects.patterns import time_limit
from ..runtime_view import Member, RuntimeView
from ..vllm_module import PLAIN, Kind, Resolution
from .asked import AskedModule, SglangDialect
from .choose import AllPlain, read_sglang

# The classes of indexers and compressors are among SGLang's kernels, which nothing constructs for the tests.
_NOT_JUDGED = ("vision", "embedding", "norm", "state", "indexer", "compressor")


_NAMED_BY_LAYER = ("Bailing", "Glm5Next", "KimiK3")
"""Their linear attention is fused with more than vLLM fuses, or has another name in some layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangBuilt:
    """One module of SGLang's, with the weights on disk that make it up.

    Attributes:
        asked: the prefix it is constructed with; the name on disk where SGLang gives it none.
        asks: SGLang builds it with a quantization config.
    """

    asked: AskedModule
    part: Part
    members: tuple[Member, ...]
    asks: bool
    resolution: Resolution

    @property
    def name(self) -> str:
        """Its prefix."""
        return self.asked.name

    @property
    def role(self) -> Role:
        """What it is in the family."""
        return self.members[0].place.role


@dataclass(frozen=True)
class SglangView:
    """A checkpoint as SGLang 0.5.23 sees it."""

    runtime: RuntimeView

    @property
    def model(self) -> SglangModel:
        """SGLang's classes and names for it."""
        return sglang_model(self.runtime.view.config)

    @cached_property
    def dialects(self) -> Mapping[Part, SglangDialect]:
        """The quantization config, as the target's class and as the draft's class read it."""
        parts: tuple[Part, ...] = ("backbone", "mtp")
        return {part: read_sglang(self.runtime.view, self.runtime.hf_quant_config, part) for part in parts}

    @cached_property
    def modules(self) -> tuple[SglangBuilt, ...]:
        """Every module with weights on disk that SGLang builds."""
        members: dict[tuple[str, Part], list[Member]] = defaultdict(list)
        asks: dict[tuple[str, Part], bool] = {}
        for member in (member for module in self.runtime.modules for member in module.members):
            name = sglang_module(self.runtime.view, member.place)
            if self._is_built(member.place):
                key = (name or str(member.weight.module), member.place.part)
                members[key].append(member)
                asks[key] = name is not None
        with time_limit():
            return tuple(self._module(*key, tuple(group), asks[key]) for key, group in members.items())

    def _module(self, name: str, part: Part, members: tuple[Member, ...], asks: bool) -> SglangBuilt:
        role = members[0].place.role
        kind: Kind = "experts" if role == "experts" else "head" if role == "head" else "linear"
        asked = AskedModule(name=name, kind=kind)
        answer = self._answer(asked, part) if asks else Resolution(built=PLAIN)
        return SglangBuilt(asked=asked, part=part, members=members, asks=asks, resolution=answer)

    def _answer(self, asked: AskedModule, part: Part) -> Resolution:
        """What SGLang builds; Qwen3-Next's class leaves qkv_proj out of modelopt's NVFP4 by itself."""
        is_qwen = self.runtime.view.family.model_type == "qwen3_next"
        if is_qwen and asked.last == "qkv_proj" and self.dialects[part].method == "modelopt_fp4":
            return Resolution(built=PLAIN, entry="sglang/srt/models/qwen3_next.py builds it plain under modelopt_fp4")
        return self.dialects[part].resolve(asked)

    def _is_built(self, place: Place) -> bool:
        """Whether SGLang has a module for it; it builds neither a draft that it has no class for, nor a second one."""
        architecture = str((self.runtime.view.config.get("architectures") or [""])[0])
        if place.role in _NOT_JUDGED or (place.role == "linear_attention" and architecture.startswith(_NAMED_BY_LAYER)):
            return False
        if place.part == "backbone":
            return bool(self.model.layers)
        if self.model.draft is None or place.role == "head":
            return False  # the head of the block is the target's
        return place.layer is None or sglang_stem(self.runtime.view, "mtp", place.layer) is not None

    def why_plain(self, part: Part) -> str:
        """Why the draft's class builds everything plain; "" where it does not."""
        dialect = self.dialects[part]
        return dialect.why if isinstance(dialect, AllPlain) else ""
