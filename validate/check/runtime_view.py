"""The view that vLLM has of a checkpoint: which runtime module each tensor goes to, and how vLLM builds it.

In: a `Source`. Out: a `RuntimeView`, computed once; every rule reads it. Each runtime module is resolved once, and the
work for each tensor is a dictionary look-up.

Easy to get wrong: routed experts are one runtime module, and vLLM asks the quantization config about expert 0 only. A
draft's head has a name of its own. Expert tensors may be stacked in three dimensions, without `.weight` in their name.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ...checkpoints.stored import StoredWeight
from ...recipes.family import HFName, Part, Role, Row, VLLMName
from ...recipes.family_view import FamilyView, Place
from ...recipes.runtimes.sglang import container, sglang_names
from .dialects.choose import read_dialect
from .dialects.gptq import Gptq
from .dialects.modelopt import ModelOpt
from .dialects.patterns import time_limit
from .stored_view import StoredView
from .vllm_module import PLAIN, Dialect, Kind, Resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A weight on disk and its place in the family."""

    place: Place
    weight: StoredWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One module at run time, with the weights on disk that make it up.

    Attributes:
        name: the prefix vLLM constructs it with.
        shards: names of its parts, which vLLM also looks up in the quantization config.
        loads_quantized: False where vLLM builds it without the quantization config.
    """

    name: VLLMName
    kind: Kind
    part: Part
    role: Role
    layer: int | None
    shards: tuple[VLLMName, ...]
    members: tuple[Member, ...]
    loads_quantized: bool
    resolution: Resolution


@dataclass(frozen=True)
class RuntimeView(StoredView):
    """A checkpoint, its family's names, and its quantization config."""

    view: FamilyView

    @cached_property
    def draft_dialect(self) -> Dialect:
        """The quantization config, as the draft's class reads it."""
        afresh = self.view.layout.draft_reads_afresh
        if not afresh:
            return self.dialect
        return read_dialect(self.source.config, self.hf_quant_config, "mtp", self.dtypes)

    @cached_property
    def placed(self) -> Mapping[HFName, Place]:
        """The place of each weight (by module) and of each other tensor (by name) that the family knows."""
        names = [HFName(f"{module}.weight") for module in self.weights]
        places = {module: self.view.place(name) for module, name in zip(self.weights, names, strict=True)}
        places |= {entry.name: self.view.place(entry.name) for entry in self.others}
        return {name: place for name, place in places.items() if place is not None}

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Every runtime module with weights on disk, without vision and other opaque parts."""
        members: dict[tuple[VLLMName, Part], list[Member]] = defaultdict(list)
        for name, weight in self.weights.items():
            place = self.placed.get(name)
            if place is not None and place.role != "vision":
                members[place.runtime, place.part].append(Member(place=place, weight=weight))
        for entry in self.others:
            place = self.placed.get(entry.name)
            if place is not None and place.row.stacked:
                # A stacked expert tensor has no leaf: it is read as one plain weight.
                weight = StoredWeight(module=entry.name, form="plain", parts={"weight": entry}, shape=entry.shape)
                members[place.runtime, place.part].append(Member(place=place, weight=weight))
        with time_limit():
            return tuple(self._module(name, part, tuple(group)) for (name, part), group in members.items())

    @cached_property
    def quantized(self) -> frozenset[VLLMName]:
        """Modules that vLLM does not build plain."""
        return frozenset(module.name for module in self.modules if module.resolution.built.form != "plain")

    def resolve(self, module: VLLMName, shards: tuple[VLLMName, ...], kind: Kind, part: Part) -> Resolution:
        """What vLLM builds for a module by the quantization config."""
        if module == "mtp.fc" and isinstance(self.dialect, ModelOpt) and "NVFP4" in self.dialect.algorithm:
            return Resolution(built=PLAIN, entry="vLLM builds mtp.fc without quantization under modelopt NVFP4")
        dialect = self.draft_dialect if part == "mtp" else self.dialect
        if isinstance(dialect, Gptq) and dialect.excepts_draft and self._is_of_qwen_draft(module):
            return Resolution(built=PLAIN, entry="vLLM builds this draft's layers plain where dynamic excepts mtp")
        return dialect.resolve(module, shards=shards, kind=kind)

    def _is_of_qwen_draft(self, module: VLLMName) -> bool:
        """Whether a module is in a layer of vLLM's Qwen3_5MultiTokenPredictor, which looks at `dynamic` itself."""
        return self.view.family.model_type in ("qwen3_5", "qwen3_5_moe") and module.startswith("mtp.layers.")

    def is_mtp_name(self, name: str) -> bool:
        """Whether a name belongs to an MTP layer or to the MTP block around it; the family need not know it."""
        stems = tuple(self.view.mtp_stem(index) for index in range(max(1, self.promised)))
        place = self.view.place(HFName(name))
        return name.startswith((*stems, "mtp.")) or (place is not None and place.part == "mtp")

    @cached_property
    def promised(self) -> int:
        """MTP layers that config.json promises."""
        return self.view.num_mtp_layers

    @cached_property
    def found(self) -> frozenset[int]:
        """MTP layers with at least one tensor in an indexed file."""
        return frozenset(_mtp_layers(self.view, self.placed.values()))

    @cached_property
    def block_at(self) -> int | None:
        """The layer whose tensors show that the MTP block begins there; None where they do not, or it has own names."""
        if self.view.layout.mtp is not None:
            return None
        glue = {row.path for row in self.view.family.mtp_block if row.role in ("glue", "norm")}
        before = self.view.layout.layers.disk.partition("{i}")[0]
        layers, having = set[int](), set[int]()
        for name in self.source.entries:
            number, _, rest = name.removeprefix(before).partition(".")
            if name.startswith(before) and number.isdecimal():
                layers.add(int(number))
                having |= {int(number)} if rest.rpartition(".")[0] in glue else set()
        is_last = having and len(having) == self.promised and layers == {*range(max(having) + 1)}
        return min(having) if is_last else None

    @cached_property
    def known_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """Names that vLLM may ask about, and names of modules on disk; of the experts only number 0."""
        runtime: set[str] = set()
        disk: set[str] = set()
        for module in self.modules:
            runtime |= {module.name, *module.shards}
            for member in module.members:
                if member.place.expert in (None, 0):
                    disk.add(member.weight.module)
                runtime.update(self._aliases(member.place, member.place.row.aliases))
        for row in (*self.view.layout.top, *self.view.layout.mtp_top):
            runtime |= {row.runtime or row.path, *row.aliases}
            disk.add(row.path)
        for index in range(self.promised):
            disk_index = index + (self.view.num_layers if self.view.layout.mtp is None else 0)
            for row in self.view.family.mtp_block:
                runtime.add(self.view.runtime_stem("mtp", disk_index) + (row.runtime or row.path))
                disk.add(self.view.mtp_stem(index) + row.path)
        for name, place in self.placed.items():
            if place.role == "vision":
                runtime.add(place.runtime)
                disk.add(name)
        return frozenset(runtime), frozenset(disk)

    @cached_property
    def sglang_names(self) -> frozenset[str]:
        """Names under which SGLang may ask about the same modules."""
        weights = {name: place for name, place in self.placed.items() if place.expert in (None, 0)}
        names = {name for place in weights.values() for name in sglang_names(self.view, place)}
        return frozenset(names | set(map(container, names)))

    def _module(self, name: VLLMName, part: Part, members: tuple[Member, ...]) -> Module:
        place = members[0].place
        kind: Kind = "experts" if place.role == "experts" else "head" if place.role == "head" else "linear"
        if kind == "experts":
            shards = tuple(VLLMName(f"{name}.0.{last}") for last in self._projections)
        else:
            last = name.rpartition(".")[2]
            shards = tuple(VLLMName(name.replace(last, shard)) for shard in self._fused.get(last, ()))
        asks = place.row.loads_quantized
        return Module(
            name=name,
            kind=kind,
            part=part,
            role=place.role,
            layer=place.layer,
            shards=shards,
            members=members,
            loads_quantized=asks,
            resolution=self.resolve(name, shards, kind, part) if asks else Resolution(built=PLAIN),
        )

    def _aliases(self, place: Place, aliases: tuple[str, ...]) -> Iterator[str]:
        stem = "" if place.layer is None else self.view.runtime_stem(place.part, place.layer)
        for alias in aliases:
            yield stem + alias.replace("{e}", "0")

    @cached_property
    def _projections(self) -> tuple[str, ...]:
        """Last components of one routed expert's projections, in the order vLLM asks about them."""
        rows = [row for row in self.view.family.block if row.role == "experts" and "{e}" in row.path]
        return tuple(row.path.rpartition(".")[2] for row in rows)

    @cached_property
    def _fused(self) -> Mapping[str, tuple[str, ...]]:
        """Last component of a fused module -> those of its parts: vLLM's packed_modules_mapping."""
        parts: dict[str, list[Row]] = defaultdict(list)
        for row in (*self.view.family.block, *self.view.family.mtp_block):
            # A projection of a module inside (`self_attn.indexer.index_qk_proj`) is fused, but no part by name.
            is_inside = row.path.startswith(holder := f"{row.runtime.rpartition('.')[0]}.") and "." in (
                row.path.removeprefix(holder)
            )
            if row.runtime and not is_inside and row.role not in ("experts", "head", "embedding"):
                parts[row.runtime].append(row)
        return {
            runtime.rpartition(".")[2]: tuple(row.path.rpartition(".")[2] for row in rows)
            for runtime, rows in parts.items()
            if len(rows) > 1
        }


def _mtp_layers(view: FamilyView, places: Iterable[Place]) -> set[int]:
    first = view.num_layers if view.layout.mtp is None else 0
    return {place.layer - first for place in places if place.part == "mtp" and place.layer is not None}
