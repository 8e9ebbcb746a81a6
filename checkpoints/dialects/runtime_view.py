"""A checkpoint as its files show it, and the view that vLLM has of it: which runtime module each
tensor goes to.

In: a `Source`. Out: a `StoredView`, before any family is asked; or a `RuntimeView`, which has the
family's names, and is what nearly every rule reads. Each part is computed once: each module is
resolved once, and the work for each tensor is a dictionary look-up.

Easy to get wrong: names on disk are not those of vLLM, and only a family knows them, and what is
fused. Without one a module is asked about by its name on disk and by the usual fused one; where the
two answers differ, nothing is said of it. Routed experts are one runtime module, and vLLM asks the
quantization config about expert 0 only. A draft's head has a name of its own. Expert tensors may be
stacked in three dimensions, without `.weight` in their name.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from os.path import commonprefix
from typing import NamedTuple

from ...recipes.conventions import FP8_CACHE
from ...recipes.errors import CheckpointError
from ...recipes.families import find_view
from ...recipes.family import HFName, Loader, Part, Role, VLLMName
from ...recipes.family_view import FamilyView, Place, unknown_place
from ...recipes.forms import TRANSPOSED
from ...recipes.runtimes.vllm import NEWEST, holds
from ...recipes.tensor_parallel import Cut, Cuts, cut_of
from ..companions import HF_QUANT_CONFIG
from ..safetensors_file import Entry
from ..source import Source, small_object
from ..stored import StoredWeight, stored_weights
from .choose import quantization_of, read_dialect
from .compressed_tensors import CompressedTensors
from .dialect import PLAIN, Dialect, Kind, Resolution, UnknownDialect, VLLMModule
from .given import Raw
from .gptq import Gptq, scheme_of
from .matching import FUSED, parts_of, plain
from .modelopt import ModelOpt
from .patterns import time_limit

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"(?P<stem>.*?)\.(?P<number>\d+)\.(?P<rest>.+)")
_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.\d+\.(?P<last>[^.]+)$")
_MTP = re.compile(r"(?:^|\.)(?:mtp|nextn|mtp_layers|mtp_block|mtp_dspark)\.")
_FUSED = {**FUSED, "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa")}
KINDS: Mapping[Role, Kind] = {"experts": "experts", "head": "head", "embedding": "embedding"}
"""What a server asks its quantization config for, by the group of a module; of all others for a
linear module.
"""


class Member(NamedTuple):
    """A weight on disk and its place in the family."""

    place: Place
    weight: StoredWeight

    @property
    def name(self) -> HFName:
        """Of the tensor that holds the weight itself."""
        return self.weight.weight.name


class Module(NamedTuple):
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
        if self.kind == "experts":
            return "experts"
        return self.members[0].place.role

    @property
    def is_plain(self) -> bool:
        """Whether none of its weights is packed."""
        return all(member.weight.form == "plain" for member in self.members)

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
    raw: Raw
    nested: Raw | None


@dataclass(frozen=True)
class StoredView:
    """A checkpoint's headers and configs, under the names on disk, for a version of vLLM."""

    source: Source
    vllm: str = field(default=NEWEST, kw_only=True)

    @property
    def loader(self) -> Loader:
        """What vLLM's draft class does with faults; nothing special where no family says it."""
        return Loader()

    def is_mtp_name(self, name: str) -> bool:
        """Whether a name belongs to an MTP layer or to the MTP block around it; without a family
        nobody knows.
        """
        return False

    @cached_property
    def placed(self) -> Mapping[HFName, Place]:
        """The places that a family knows; it has none."""
        return {}

    def leaf_of(self, name: HFName) -> str:
        """The last part of a tensor's name, after its module; "" for a parameter without one."""
        place = self.placed.get(name)
        if place is None:
            return name.rpartition(".")[2]
        return place.leaf

    @cached_property
    def weights(self) -> Mapping[HFName, StoredWeight]:
        """Every weight that a loader following the index would see, by module on disk."""
        return self._grouped[0]

    @property
    def others(self) -> list[Entry]:
        """Every tensor that is no weight and no scale of one."""
        return self._grouped[1]

    @property
    def tensors(self) -> Mapping[HFName, StoredWeight]:
        """Every weight, and every other tensor as a plain one."""
        return {**self.weights, **{entry.name: described(entry) for entry in self.others}}

    @cached_property
    def _grouped(self) -> tuple[dict[HFName, StoredWeight], list[Entry]]:
        return stored_weights(self.source.entries.values())

    @cached_property
    def hf_quant_config(self) -> Raw | None:
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
        file = "config.json"
        raw = quantization_of(self.source.config)
        if raw is None:
            file = HF_QUANT_CONFIG
            raw = self.hf_quant_config or {}
        nested = raw.get("quantization")
        if not isinstance(nested, Mapping):
            nested = None
        return GivenConfig(file, raw, nested)

    @property
    def dtypes(self) -> Mapping[HFName, str]:
        """Of all files in the folder: vLLM reads their headers too."""
        entries = {**self.source.entries, **self.source.unindexed}
        return {name: entry.dtype for name, entry in entries.items()}

    @cached_property
    def dialect(self) -> Dialect:
        """The quantization config, as the target's class reads it."""
        return read_dialect(
            self.source.config, self.hf_quant_config, dtypes=self.dtypes, vllm=self.vllm
        )

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """The matrices that can be judged: those that are packed, and plain ones in a place where
        others are packed.
        """
        packed = set[str]()
        for weight in self.weights.values():
            if weight.form != "plain":
                packed.add(_kind(weight))
        modules = list[Module]()
        for weight in self.weights.values():
            module = None
            if _kind(weight) in packed:
                module = self._alone(weight)
            if module is not None:
                modules.append(module)
        return tuple(modules)

    @cached_property
    def layers(self) -> Mapping[str, Mapping[int, Set[str]]]:
        """For each stem that numbers follow: number -> what stands below it, experts as one."""
        layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for match in filter(None, map(_LAYER.match, self.source.entries)):
            # Experts differ in their number alone, and are one path.
            path = _NUMBER.sub("{}", match["rest"])
            layers[match["stem"]][int(match["number"])].add(path)
        return layers

    @property
    def decoder_layers(self) -> tuple[str, Mapping[int, Set[str]]]:
        """The stem that the most numbers follow, and what stands below each."""
        return max(self.layers.items(), key=lambda layers: len(layers[1]), default=("", {}))

    @cached_property
    def mtp_names(self) -> frozenset[HFName]:
        """Tensors whose names speak of an MTP block, or of a layer beyond those that config.json
        counts.
        """
        count = self.source.text_config.get("num_hidden_layers")
        stem, held = self.decoder_layers
        later = tuple[str, ...]()
        if count is not None:
            # DeepSeek's way: the MTP layers continue the decoder layers.
            later = tuple(f"{stem}.{number}." for number in held if number >= count)
        names = (*self.source.entries, *self.source.unindexed)
        return frozenset(name for name in names if _MTP.search(name) or name.startswith(later))

    def _alone(self, weight: StoredWeight) -> Module | None:
        """A weight as a module of its own; None where only a family knows what vLLM makes of it.

        Loaders rename the leaf `scale` and put the rows of sliced blocks in order; an embedding is
        looked up. Targets that are names are vLLM's: what they do not reach by the names on disk is
        not known.
        """
        stem, _, last = weight.module.rpartition(".")
        is_renamed = "scale" in weight.parts or weight.form == "fp8_sliced"
        if len(weight.weight.shape) < 2 or "embed" in last or is_renamed:
            return None
        name = VLLMName(weight.module)
        shards = ()
        kind = "linear"
        if last == "lm_head":
            kind = "head"
        expert = _EXPERTS.match(weight.module)
        if expert:
            # vLLM asks about all experts of a layer once, under the name of the first.
            name = VLLMName(expert["experts"])
            kind = "experts"
            shards = (VLLMName(f"{name}.0.{expert['last']}"),)
        answer = self.dialect.resolve(name, shards=shards, kind=kind)
        for fused, parts in _FUSED.items():
            if kind == "linear" and last in parts:
                whole = VLLMName(f"{stem}.{fused}")
                names = parts_of(whole, kind, _FUSED, ())
                together = self.dialect.resolve(whole, shards=names, kind=kind)
                # Only a family knows which of the two vLLM asks about.
                if (together.built, bool(together.error)) != (answer.built, bool(answer.error)):
                    return None
        if answer == Resolution(PLAIN):
            # A target that is a class (`Linear`) reaches by class; one that is a name reaches by
            # vLLM's names.
            for entry in self.dialect.entries:
                if entry.where == "targets" and not entry.written.isidentifier():
                    return None
        members = (Member(unknown_place(weight.module), weight),)
        return Module(name, kind, "backbone", shards, members, True, answer)


def _kind(weight: StoredWeight) -> str:
    """A module's name without numbers."""
    return _NUMBER.sub("{}", weight.module)


def of_bits(weight: StoredWeight, built: VLLMModule) -> StoredWeight:
    """Integers with the bits that the config gives them: one scale a row leaves them open."""
    is_open = weight.form == built.form == "int_packed" and "weight_g_idx" not in weight.parts
    if not is_open:
        return weight
    num_rows, words = weight.weight.shape
    shape = (num_rows, words * 32 // built.bits)
    if shape == weight.shape:
        return weight
    return replace(weight, shape=shape, scheme="")


def described(entry: Entry) -> StoredWeight:
    """A tensor of another kind as a plain weight."""
    return StoredWeight(module=entry.name, form="plain", parts={"weight": entry}, shape=entry.shape)


@dataclass(frozen=True)
class RuntimeView(StoredView):
    """A checkpoint, its family's names, and its quantization config."""

    view: FamilyView

    @classmethod
    def of(cls, source: Source, vllm: str = NEWEST) -> "RuntimeView":
        """The view that a version of vLLM has of an opened checkpoint.

        Raises:
            RecipeError: no family has its model_type.
            CheckpointError: config.json lacks what the family reads.
        """
        return cls(source, find_view(source.config, source.where, source.entries, vllm), vllm=vllm)

    @property
    def loader(self) -> Loader:
        """What vLLM's draft class does with faults."""
        return self.view.family.loader

    def is_mtp_name(self, name: str) -> bool:
        """Whether a name belongs to an MTP layer or to the MTP block around it; the family need not
        know it.
        """
        return name.startswith(self._mtp_stems) or self.view.is_mtp(HFName(name))

    @cached_property
    def _mtp_stems(self) -> tuple[str, ...]:
        stems = [self.view.mtp_stem(index) for index in range(max(1, self.promised))]
        return (*stems, "mtp.")

    def stem_of(self, module: Module) -> str:
        """The runtime prefix of the module's layer or tower, "" outside."""
        for _, runtime, _ in self.view.layout.opaque:
            if module.role == "vision" and module.name.startswith(runtime):
                return runtime
        # One that all layers of the block fill is in none of them.
        if module.layer is None or module.name == module.members[0].place.row.joins:
            return ""
        return self.view.runtime_stem(module.part, module.layer)

    def dialect_of(self, part: Part) -> Dialect:
        """The quantization config, as the class of a part reads it."""
        if part == "mtp":
            return self.draft_dialect
        return self.dialect

    @cached_property
    def plain_draft_stem(self) -> str:
        """What the draft's names begin with where it is plain; "" where another module's do too."""
        asking = [module for module in self.modules if module.loads_quantized]
        drafts = [module.name for module in asking if module.part == "mtp"]
        shared = commonprefix(drafts)  # noqa: RUF071 - cut to whole parts below
        stem = shared[: shared.rfind(".") + 1]
        for module in asking:
            is_plain_draft = module.part == "mtp" and module.is_plain
            if module.name.startswith(stem) and not is_plain_draft:
                return ""
        return stem

    @cached_property
    def draft_dialect(self) -> Dialect:
        """The quantization config, as the draft's class reads it."""
        if not self.view.layout.draft_reads_afresh:
            return self.dialect
        return read_dialect(self.source.config, self.hf_quant_config, "mtp", self.dtypes, self.vllm)

    @cached_property
    def weights(self) -> Mapping[HFName, StoredWeight]:
        """With the width that the config gives integers."""
        weights = dict(self._grouped[0])
        for module in self.modules:
            for _, weight in module.members:
                if weight.module in weights:
                    weights[weight.module] = weight
        return weights

    @cached_property
    def placed(self) -> Mapping[HFName, Place]:
        """The place of each weight (by module) and of each other tensor (by name) that the family
        knows.
        """
        # The family's table is asked about the tensor that a module has in every form.
        names = {module: HFName(f"{module}.weight") for module in self._grouped[0]}
        names |= {entry.name: entry.name for entry in self.others}
        placed = dict[HFName, Place]()
        for key, name in names.items():
            place = self.view.place(name)
            if place is not None:
                placed[key] = place
        return placed

    @property
    def is_draft_alone(self) -> bool:
        """Whether it has MTP layers and no decoder layer."""
        held = {place.part for place in self.placed.values() if place.layer is not None}
        return held == {"mtp"} and not self.strange_layers

    @cached_property
    def strange_layers(self) -> str:
        """What stands before the numbers of decoder layers where the family knows none of them; ""
        where it knows one, or none is there.
        """
        for place in self.placed.values():
            if place.part == "backbone" and place.layer is not None:
                return ""
        layout = self.view.layout
        towers = tuple(disk for disk, *_ in layout.opaque)
        strange = ""
        most = 0
        for stem, held in self.layers.items():
            count = 0
            for number in held:
                count += not self.is_mtp_name(f"{stem}.{number}.")
            is_known = f"{stem}.{{i}}." == layout.layers.disk or stem.startswith(towers)
            if count > most and not is_known:
                strange = stem
                most = count
        return strange

    @cached_property
    def fitting_class(self) -> str:
        """A class like config.json's whose decoder layers have the names of the files; "" for
        none.
        """
        family = self.view.family
        config = self.source.config
        stem = (config.get("architectures") or [""])[0].partition("For")[0]
        others = (f"{stem}ForCausalLM", f"{stem}ForConditionalGeneration")
        for name in (*family.layouts, *others):
            view = FamilyView(family, {**config, "architectures": [name]}, self.source.entries)
            fits = view.layout.layers.disk.startswith(f"{self.strange_layers}.{{i}}")
            if fits and name != "*":
                return name
        return ""

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Every runtime module with weights on disk, where it is known what vLLM builds."""
        weights = dict(self._grouped[0])
        for entry in self.others:
            place = self.placed.get(entry.name)
            if place is not None and place.row.stacked:
                # A stacked expert tensor has no leaf: it is read as one plain weight.
                weights[entry.name] = described(entry)
        members: dict[tuple[VLLMName, Part], list[Member]] = defaultdict(list)
        for name, weight in weights.items():
            place = self.placed.get(name)
            if place is None or (place.role == "vision" and len(weight.shape) != 2):
                continue
            if self.view.is_judged(place):
                members[place.runtime, place.part].append(Member(place, weight))
                if place.row.joins:
                    members[VLLMName(place.row.joins), place.part].append(Member(place, weight))
        # Regular expressions of a stranger's config are compared with each name.
        with time_limit():
            return tuple(self._module(*key, tuple(group)) for key, group in members.items())

    @cached_property
    def cuts(self) -> Cuts:
        """The weights as tensor-parallel ranks cut them, each with the first tensor that is so."""
        cuts = dict[Cut, str]()
        for module in self.modules:
            built = module.resolution.built
            for place, weight in module.members:
                cut = cut_of(place, weight.shape, built.group_size, built.block, weight.scheme)
                if cut:
                    cuts.setdefault(cut, weight.weight.name)
        return cuts

    @cached_property
    def schemes(self) -> Mapping[HFName, str]:
        """The scheme of each packed module on disk, by a config that keepmtp can write; "" where
        it has no word for what the config builds. The bytes alone do not say it: FP8 with a scale
        a row is FP8_DYNAMIC only where the config quantizes activations.
        """
        schemes = dict[HFName, str]()
        for module in self.modules:
            dialect = self.dialect_of(module.part)
            for member in module.members:
                weight = member.weight
                form = module.resolution.built.form
                if weight.form in TRANSPOSED and form in (weight.form, "plain"):
                    schemes[weight.module] = scheme_of(weight, module.resolution.built)
                elif weight.form != "plain" and isinstance(dialect, CompressedTensors | ModelOpt):
                    schemes[weight.module] = dialect.scheme_of(module.resolution)
        return schemes

    def refuse_more(self) -> None:
        """Refuse what a config says besides how weights, activations and the cache are quantized.

        Raises:
            CheckpointError: rotations or sparsity, which no config that keepmtp writes has.
        """
        for key in ("transform_config", "sparsity_config"):
            if self.given.raw.get(key):
                raise CheckpointError(
                    f"{self.source.where}/config.json: {key}",
                    "must be empty: no config that keepmtp writes has a word for it",
                    got="an entry",
                    cure="Keep the checkpoint as it is",
                )

    @cached_property
    def kv_cache_scheme(self) -> Raw | None:
        """How the config quantizes the KV cache: the same key in both dialects that keepmtp writes,
        a word in hf_quant_config.json.

        Raises:
            CheckpointError: a word that compressed-tensors lacks.
        """
        given = self.given
        if given.nested is None:
            return given.raw.get("kv_cache_scheme")
        word = given.nested.get("kv_cache_quant_algo")
        if word in (None, "FP8"):
            return word and dict(FP8_CACHE)
        raise CheckpointError(
            f"{self.source.where}/{given.file}",
            "both dialects must have a word for the KV cache",
            got=word,
            cure="Quantize the original release anew",
        )

    @cached_property
    def num_unjudged(self) -> int:
        """Matrices of vision towers for which it is not known what vLLM builds."""
        if self.dialect.name == "none":
            return 0  # then all of them are plain
        count = 0
        for module, weight in self.weights.items():
            place = self.placed.get(module)
            is_read = len(weight.shape) == 2 and not module.startswith(self.view.layout.unread)
            count += place is not None and is_read and not self.view.is_judged(place)
        return count

    def resolve(
        self, module: VLLMName, shards: tuple[VLLMName, ...], kind: Kind, part: Part
    ) -> Resolution:
        """What vLLM builds for a module by the quantization config."""
        loader = self.loader
        is_fp4 = isinstance(self.dialect, ModelOpt) and "NVFP4" in self.dialect.algorithm
        if is_fp4 and module in loader.plain_in_fp4:
            # A config may lack the exclusion, since its tool never quantizes the module.
            return plain(f"vLLM builds {module} without quantization under modelopt NVFP4")
        dialect = self.dialect_of(part)
        stem = loader.plain_where_excepted
        is_excepted = isinstance(dialect, Gptq) and any("mtp" in word for word in dialect.words)
        if stem and module.startswith(stem) and is_excepted:
            # The draft's class looks at `dynamic` itself, before the config is asked.
            return plain("vLLM builds this draft's layers plain where dynamic excepts mtp")
        if kind == "embedding" and not isinstance(dialect, CompressedTensors | UnknownDialect):
            return plain()  # no other dialect looks rows up packed
        return dialect.resolve(module, shards=shards, kind=kind)

    @cached_property
    def promised(self) -> int:
        """MTP layers that config.json promises."""
        return self.view.num_mtp_layers

    @cached_property
    def found(self) -> frozenset[int]:
        """MTP layers with at least one tensor in an indexed file."""
        found = set[int]()
        for place in self.placed.values():
            if place.part == "mtp" and place.layer is not None:
                found.add(place.layer - self.view.first_mtp_index)
        return frozenset(found)

    @cached_property
    def mtp_names(self) -> frozenset[HFName]:
        """The tensors of the MTP block."""
        names = set[HFName]()
        for key, place in self.placed.items():
            if place.part != "mtp":
                continue
            if key in self.weights:
                names.update(self.weights[key].names())
            else:
                names.add(key)
        return frozenset(names)

    @cached_property
    def block_at(self) -> int | None:
        """The layer whose tensors show that the MTP block begins there; None where they do not, or
        it has own names.
        """
        if self.view.layout.mtp is not None:
            return None
        block = self.view.family.mtp_block
        glue = {row.path for row in block if row.role in ("glue", "norm")}
        held = self.layers.get(self.view.layout.layers.disk.partition(".{i}")[0], {})
        with_glue = set[int]()
        for number, paths in held.items():
            if not glue.isdisjoint(path.rpartition(".")[0] for path in paths):
                with_glue.add(number)
        # They say it only where they are the last of all layers, and no layer is lost.
        is_last = held.keys() == {*range(max(with_glue, default=-1) + 1)}
        if is_last and len(with_glue) == self.promised:
            return min(with_glue, default=None)
        return None

    def _module(self, name: VLLMName, part: Part, members: tuple[Member, ...]) -> Module:
        place = members[0].place
        family = self.view.family
        kind = KINDS.get(place.role, "linear")
        shards = parts_of(name, kind, self._fused, self._projections)
        asks = place.row.loads_quantized
        asked = name
        if kind == "embedding":
            asks = part in family.embeddings
            asked = VLLMName(family.embeddings.get(part, "").format(name))
        module = Module(name, kind, part, shards, members, asks, plain())
        if place.role in family.loader.plain_alone and not module.is_plain:
            return module._replace(loads_quantized=False)
        if not asks:
            return module
        answer = self.resolve(asked, shards, kind, part)
        read = [Member(each.place, of_bits(each.weight, answer.built)) for each in members]
        return module._replace(resolution=answer, members=tuple(read))

    @cached_property
    def _projections(self) -> list[str]:
        """Last components of one routed expert's projections, in the order vLLM asks about them.

        vLLM before 0.32 had three names for all models; since then it asks for `None` where a model
        has no gate (compressed_tensors_moe.py, get_moe_method).
        """
        if holds("<0.32", self.vllm):
            return ["gate_proj", "up_proj", "down_proj"]
        paths = list[str]()
        for row in self.view.family.block:
            if row.role == "experts":
                paths.append(row.path)
                if row.aliases[:1] and row.aliases[0].endswith(".None"):
                    paths.append(row.aliases[0])
        return [path.rpartition(".")[2] for path in paths if "{e}" in path]

    @cached_property
    def _fused(self) -> Mapping[str, list[str]]:
        """Last component of a fused module -> those of its parts: vLLM's packed_modules_mapping."""
        parts: dict[str, list[str]] = defaultdict(list)
        fused = dict[str, list[str]]()
        for row in (*self.view.family.block, *self.view.family.mtp_block):
            # A projection of a module inside (`self_attn.indexer.index_qk_proj`) is fused, but no
            # part by name.
            holder, _, last = row.path.rpartition(".")
            is_inside = holder.startswith(f"{row.runtime.rpartition('.')[0]}.")
            if row.runtime and not is_inside and row.role not in KINDS:
                parts[row.runtime].append(last)
        for name, lasts in parts.items():
            if len(lasts) > 1:
                fused[name.rpartition(".")[2]] = lasts
        return fused
