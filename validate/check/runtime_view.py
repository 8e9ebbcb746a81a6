"""The view that vLLM has of a checkpoint: which runtime module each tensor goes to, and how vLLM
builds it.

In: a `Source`. Out: a `RuntimeView`, computed once; every rule reads it. Each runtime module is
resolved once, and the work for each tensor is a dictionary look-up.

Easy to get wrong: routed experts are one runtime module, and vLLM asks the quantization config
about expert 0 only. A draft's head has a name of its own. Expert tensors may be stacked in three
dimensions, without `.weight` in their name.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...checkpoints.stored import StoredWeight
from ...recipes.family import HFName, Loader, Part, Row, VLLMName
from ...recipes.family_view import FamilyView, Place
from ...recipes.runtimes.sglang import container, sglang_names
from .dialects.choose import read_dialect
from .dialects.gptq import Gptq
from .dialects.modelopt import ModelOpt
from .dialects.patterns import time_limit
from .stored_view import KINDS, Member, Module, StoredView
from .vllm_module import PLAIN, Dialect, Kind, Resolution

__all__ = ["Member", "Module", "RuntimeView"]


@dataclass(frozen=True)
class RuntimeView(StoredView):
    """A checkpoint, its family's names, and its quantization config."""

    view: FamilyView

    @property
    def loader(self) -> Loader:
        """What vLLM's draft class does with faults."""
        return self.view.family.loader

    def is_mtp_name(self, name: str) -> bool:
        """Whether a name belongs to an MTP layer or to the MTP block around it; the family need not
        know it.
        """
        stems = tuple(self.view.mtp_stem(index) for index in range(max(1, self.promised)))
        return name.startswith((*stems, "mtp.")) or self.view.is_mtp(HFName(name))

    def leaf_of(self, name: HFName) -> str:
        """The last part of a tensor's name, after its module; "" for a parameter without one."""
        place = self.view.place(name)
        return super().leaf_of(name) if place is None else place.leaf

    def stem_of(self, module: Module) -> str:
        """The runtime prefix of the module's layer, "" outside layers."""
        return "" if module.layer is None else self.view.runtime_stem(module.part, module.layer)

    @cached_property
    def draft_dialect(self) -> Dialect:
        """The quantization config, as the draft's class reads it."""
        if not self.view.layout.draft_reads_afresh:
            return self.dialect
        return read_dialect(self.source.config, self.hf_quant_config, "mtp", self.dtypes)

    @cached_property
    def placed(self) -> Mapping[HFName, Place]:
        """The place of each weight (by module) and of each other tensor (by name) that the family
        knows.
        """
        names = {module: HFName(f"{module}.weight") for module in self.weights}
        names |= {entry.name: entry.name for entry in self.others}
        return {
            key: place
            for key, name in names.items()
            if (place := self.view.place(name)) is not None
        }

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Every runtime module with weights on disk, without vision and other opaque parts."""
        weights = dict(self.weights)
        for entry in self.others:
            place = self.placed.get(entry.name)
            if place is not None and place.row.stacked:
                # A stacked expert tensor has no leaf: it is read as one plain weight.
                parts = {"weight": entry}
                weights[entry.name] = StoredWeight(
                    module=entry.name, form="plain", parts=parts, shape=entry.shape
                )
        members: dict[tuple[VLLMName, Part], list[Member]] = defaultdict(list)
        for name, weight in weights.items():
            place = self.placed.get(name)
            if place is not None and place.role != "vision":
                members[place.runtime, place.part].append(Member(place=place, weight=weight))
        with time_limit():
            return tuple(
                self._module(name, part, tuple(group)) for (name, part), group in members.items()
            )

    @cached_property
    def quantized(self) -> frozenset[VLLMName]:
        """Modules that vLLM does not build plain."""
        return frozenset(
            module.name for module in self.modules if module.resolution.built.form != "plain"
        )

    def resolve(
        self, module: VLLMName, shards: tuple[VLLMName, ...], kind: Kind, part: Part
    ) -> Resolution:
        """What vLLM builds for a module by the quantization config."""
        if (
            module == "mtp.fc"
            and isinstance(self.dialect, ModelOpt)
            and "NVFP4" in self.dialect.algorithm
        ):
            return Resolution(
                built=PLAIN, entry="vLLM builds mtp.fc without quantization under modelopt NVFP4"
            )
        dialect = self.draft_dialect if part == "mtp" else self.dialect
        # vLLM's Qwen3_5MultiTokenPredictor looks at `dynamic` itself, for its layers alone.
        looks_itself = self.view.family.model_type in (
            "qwen3_5",
            "qwen3_5_moe",
        ) and module.startswith("mtp.layers.")
        if looks_itself and isinstance(dialect, Gptq) and dialect.excepts_draft:
            return Resolution(
                built=PLAIN, entry="vLLM builds this draft's layers plain where dynamic excepts mtp"
            )
        return dialect.resolve(module, shards=shards, kind=kind)

    @cached_property
    def promised(self) -> int:
        """MTP layers that config.json promises."""
        return self.view.num_mtp_layers

    @cached_property
    def found(self) -> frozenset[int]:
        """MTP layers with at least one tensor in an indexed file."""
        first = self.view.num_layers if self.view.layout.mtp is None else 0
        layers = (place.layer for place in self.placed.values() if place.part == "mtp")
        return frozenset(layer - first for layer in layers if layer is not None)

    @cached_property
    def mtp_names(self) -> frozenset[HFName]:
        """The tensors of the MTP block."""
        keys = [key for key, place in self.placed.items() if place.part == "mtp"]
        return frozenset(
            name
            for key in keys
            for name in (self.weights[key].names() if key in self.weights else (key,))
        )

    @cached_property
    def block_at(self) -> int | None:
        """The layer whose tensors show that the MTP block begins there; None where they do not, or
        it has own names.
        """
        if self.view.layout.mtp is not None:
            return None
        glue = {row.path for row in self.view.family.mtp_block if row.role in ("glue", "norm")}
        held = self.layers.get(self.view.layout.layers.disk.partition(".{i}")[0], {})
        having = {
            at
            for at, paths in held.items()
            if not glue.isdisjoint(path.rpartition(".")[0] for path in paths)
        }
        is_last = (
            having and len(having) == self.promised and held.keys() == {*range(max(having) + 1)}
        )
        return min(having) if is_last else None

    @cached_property
    def known_names(self) -> tuple[frozenset[str], frozenset[str]]:
        """Names that vLLM may ask about, and names of modules on disk; of the experts only number
        0.
        """
        runtime, disk = set[str](), set[str]()
        for name, modules in self.view.disk_modules.items():
            runtime.add(name)
            disk.update(module.replace("{e}", "0") for module in modules)
        for module in self.modules:
            runtime |= {module.name, *module.shards}
            for member in module.members:
                if member.place.expert in (None, 0):
                    disk.add(member.weight.module)
                aliases = (alias.replace("{e}", "0") for alias in member.place.row.aliases)
                runtime.update(self.stem_of(module) + alias for alias in aliases)
        for name, place in self.placed.items():
            if place.role == "vision":
                runtime.add(place.runtime)
                disk.add(name)
        return frozenset(runtime), frozenset(disk)

    @cached_property
    def sglang_names(self) -> frozenset[str]:
        """Names under which SGLang may ask about the same modules."""
        places = (place for place in self.placed.values() if place.expert in (None, 0))
        names = {name for place in places for name in sglang_names(self.view, place)}
        return frozenset(names | set(map(container, names)))

    def _module(self, name: VLLMName, part: Part, members: tuple[Member, ...]) -> Module:
        place = members[0].place
        kind, last = KINDS.get(place.role, "linear"), name.rpartition(".")[2]
        shards = tuple(VLLMName(name.replace(last, each)) for each in self._fused.get(last, ()))
        if kind == "experts":
            shards = tuple(VLLMName(f"{name}.0.{last}") for last in self._projections)
        asks = place.row.loads_quantized
        return Module(
            name=name,
            kind=kind,
            part=part,
            shards=shards,
            members=members,
            loads_quantized=asks,
            resolution=self.resolve(name, shards, kind, part) if asks else Resolution(built=PLAIN),
        )

    @cached_property
    def _projections(self) -> tuple[str, ...]:
        """Last components of one routed expert's projections, in the order vLLM asks about them."""
        rows = [
            row for row in self.view.family.block if row.role == "experts" and "{e}" in row.path
        ]
        return tuple(row.path.rpartition(".")[2] for row in rows)

    @cached_property
    def _fused(self) -> Mapping[str, tuple[str, ...]]:
        """Last component of a fused module -> those of its parts: vLLM's packed_modules_mapping."""
        parts: dict[str, list[Row]] = defaultdict(list)
        for row in (*self.view.family.block, *self.view.family.mtp_block):
            # A projection of a module inside (`self_attn.indexer.index_qk_proj`) is fused, but no
            # part by name.
            holder = f"{row.runtime.rpartition('.')[0]}."
            is_inside = row.path.startswith(holder) and "." in row.path.removeprefix(holder)
            if row.runtime and not is_inside and row.role not in ("experts", "head", "embedding"):
                parts[row.runtime].append(row)
        return {
            runtime.rpartition(".")[2]: tuple(row.path.rpartition(".")[2] for row in rows)
            for runtime, rows in parts.items()
            if len(rows) > 1
        }
