"""What a checkpoint holds, before any family is asked: its weights, its quantization config, its
index.

In: a `Source`. Out: a `StoredView`, each part computed once.

Easy to get wrong: names here are those on disk. Only a family knows what vLLM calls them
(runtime_view.py), and what it fuses. So a module is asked about by its name on disk and by the
usual fused one; where the two answers differ, it is left out, and nothing is said of it.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import yaml

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.hub_names import is_repo_id
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import INDEX, Source, small_bytes, small_object
from ...checkpoints.stored import StoredWeight, stored_weights, transposed_weights
from ...recipes.errors import CheckpointError
from ...recipes.family import HFName, Loader, Part, Role, VLLMName
from ...recipes.family_view import Place, unknown_place
from .dialects.choose import quantization_of, read_dialect
from .dialects.patterns import time_limit
from .vllm_module import Dialect, Kind, Resolution

_FRONT_MATTER = re.compile(rb"---\s*\n(.*?)\n---", re.DOTALL)
_MOST_OF_A_CARD = 1 << 16
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"(?P<stem>.*?)\.(?P<number>\d+)\.(?P<rest>.+)")
_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<last>[^.]+)$")
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_layers|mtp_block)\.")
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A weight on disk and its place in the family."""

    place: Place
    weight: StoredWeight


KINDS: Mapping[Role, Kind] = {"experts": "experts", "head": "head"}
"""What a server asks its quantization config for, by the group of a module; of all others for a
linear module.
"""


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
    shards: tuple[VLLMName, ...]
    members: tuple[Member, ...]
    loads_quantized: bool
    resolution: Resolution

    @property
    def role(self) -> Role:
        return "experts" if self.kind == "experts" else self.members[0].place.role

    @property
    def layer(self) -> int | None:
        return self.members[0].place.layer


class GivenConfig(NamedTuple):
    """The quantization config that vLLM reads.

    Attributes:
        file: which has it.
        raw: all of it.
        nested: what stands below `quantization`, where modelopt writes it so.
    """

    file: str
    raw: Mapping[str, Any]
    nested: Mapping[str, Any] | None

    def get(self, key: str) -> Any:
        """A value, below `quantization` where there is such a thing."""
        return (self.raw if self.nested is None else self.nested).get(key)


@dataclass(frozen=True)
class StoredView:
    """A checkpoint's headers and configs, under the names on disk."""

    source: Source

    @property
    def loader(self) -> Loader | None:
        """What vLLM's draft class does with faults; None where no family says it."""
        return None

    def is_mtp_name(self, name: str) -> bool:
        """Whether a name belongs to an MTP layer or to the MTP block around it; without a family
        nobody knows.
        """
        return False

    def leaf_of(self, name: HFName) -> str:
        """The last part of a tensor's name, after its module."""
        return name.rpartition(".")[2]

    def stem_of(self, module: Module) -> str:
        """The runtime prefix of the module's layer, "" outside layers."""
        return ""

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The part of config.json for the language model."""
        inner = self.source.config.get("text_config") or self.source.config.get("llm_config")
        return inner if isinstance(inner, Mapping) else self.source.config

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
        """hf_quant_config.json, if there is one. vLLM does not open it where config.json has a
        quantization config.

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
    def given(self) -> GivenConfig:
        """The quantization config, empty if there is none."""
        raw, file = quantization_of(self.source.config), "config.json"
        if raw is None:
            raw, file = self.hf_quant_config or {}, HF_QUANT_CONFIG
        nested = raw.get("quantization")
        return GivenConfig(file, raw, nested if isinstance(nested, Mapping) else None)

    @cached_property
    def index(self) -> Mapping[str, Any] | None:
        """model.safetensors.index.json, if there is one."""
        return small_object(self.source, INDEX)

    @cached_property
    def base_model(self) -> str:
        """The one model that README.md's front matter names as base, ORG/NAME; "" where it names
        none or several.
        """
        block = _FRONT_MATTER.match(
            (small_bytes(self.source, "README.md") or b"")[:_MOST_OF_A_CARD]
        )
        try:
            front = yaml.safe_load(block[1]) if block else None
        except (yaml.YAMLError, ValueError, RecursionError):
            return ""
        named = front.get("base_model") if isinstance(front, dict) else None
        names = named if isinstance(named, list) else [named]
        return (
            names[0]
            if len(names) == 1 and isinstance(names[0], str) and is_repo_id(names[0])
            else ""
        )

    @cached_property
    def dialect(self) -> Dialect:
        """The quantization config, as the target's class reads it."""
        return read_dialect(self.source.config, self.hf_quant_config, dtypes=self.dtypes)

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """The matrices that can be judged: those that are packed, and plain ones in a place where
        others are packed.
        """
        packed = {
            _NUMBER.sub("{}", weight.module)
            for weight in self.weights.values()
            if weight.form != "plain"
        }
        with time_limit():
            return tuple(
                module
                for weight in self.weights.values()
                if _NUMBER.sub("{}", weight.module) in packed
                for module in self._alone(weight)
            )

    @cached_property
    def layers(self) -> Mapping[str, Mapping[int, frozenset[str]]]:
        """For each stem that numbers follow: number -> what stands below it, experts as one."""
        found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for name in self.source.entries:
            if match := _LAYER.match(name):
                found[match["stem"]][int(match["number"])].add(_NUMBER.sub("{}", match["rest"]))
        return {
            stem: {number: frozenset(paths) for number, paths in held.items()}
            for stem, held in found.items()
        }

    @property
    def decoder_layers(self) -> tuple[str, Mapping[int, frozenset[str]]]:
        """The stem that the most numbers follow, and what stands below each."""
        return max(self.layers.items(), key=lambda item: len(item[1]), default=("", {}))

    @cached_property
    def mtp_names(self) -> frozenset[HFName]:
        """Tensors whose names speak of an MTP block, or of a layer beyond those that config.json
        counts.
        """
        count = self.text_config.get("num_hidden_layers")
        stem, held = self.decoder_layers
        later = tuple(
            f"{stem}.{number}." for number in held if isinstance(count, int) and number >= count
        )
        names = (*self.source.entries, *self.source.unindexed)
        return frozenset(
            name for name in names if _MTP.search(name) or (later and name.startswith(later))
        )

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

    def _alone(self, weight: StoredWeight) -> Iterator[Module]:
        """A weight as a module of its own; nothing where only a family knows what vLLM makes of it.

        Loaders rename the leaf `scale` and put the rows of sliced blocks in order; an embedding is
        looked up.
        """
        stem, _, last = weight.module.rpartition(".")
        if (
            len(weight.weight.shape) < 2
            or "embed" in last
            or "scale" in weight.parts
            or weight.form == "fp8_sliced"
        ):
            return
        name, shards, kind = (
            VLLMName(weight.module),
            tuple[VLLMName, ...](),
            "head" if last == "lm_head" else "linear",
        )
        if expert := _EXPERTS.match(weight.module):
            name, kind = VLLMName(expert["experts"]), "experts"
            shards = (VLLMName(f"{name}.0.{expert['last']}"),)
        answer = self.dialect.resolve(name, shards=shards, kind=kind)
        for fused, parts in _FUSED.items() if kind == "linear" else ():
            if last in parts:
                names = tuple(VLLMName(f"{stem}.{part}") for part in parts)
                together = self.dialect.resolve(
                    VLLMName(f"{stem}.{fused}"), shards=names, kind=kind
                )
                if (together.built, bool(together.error)) != (answer.built, bool(answer.error)):
                    return
        if (
            answer.built.form == "plain"
            and not answer.entry
            and not answer.error
            and self._targets_are_names
        ):
            return
        yield Module(
            name=name,
            kind=kind,
            part="backbone",
            shards=shards,
            members=(Member(place=unknown_place(weight.module), weight=weight),),
            loads_quantized=True,
            resolution=answer,
        )

    @property
    def _targets_are_names(self) -> bool:
        """Then they are vLLM's names, and what they do not reach by the names on disk is not
        known.
        """
        return any(
            entry.where == "targets" and not entry.written.isidentifier()
            for entry in self.dialect.entries
        )
