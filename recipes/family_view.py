"""A family table applied to one checkpoint: what each tensor is, on disk and in vLLM.

In: a `Family` and a config.json. Out: a `FamilyView`. It gives each name on disk (HFName) its
place: the row of the table, the layer, the expert, and the name at run time (VLLMName). No other
module turns one into the other.

Easy to get wrong: an MTP layer has one index on disk and may have another number in vLLM
(`runtime_number`).
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from .errors import CheckpointError, counted
from .family import INDEX, Family, HFName, Layout, Part, Role, Row, Stem, VLLMName
from .frozen import Raw, frozen, without

_EXPERT = re.compile(rf"(?<=experts\.)({INDEX})(?=\.)")
_NUMBER = re.compile(rf"(?<=\.){INDEX}(?=\.)")
_UNKNOWN = "outside of the family's table"
_JOINING = ("glue", "norm", "state")
_ROUTED = ("experts", "shared_experts", "router")
_COMPARED = ("attention", "dense_mlp", "shared_experts", "router")


@frozen
class Place:
    """What one tensor on disk is.

    Attributes:
        row: the row of the table.
        part: backbone or MTP block.
        layer: index of the decoder layer or MTP layer on disk; None outside layers.
        expert: routed expert's index, if the row has one.
        leaf: the part of the tensor's name after the module ("weight", "bias", "weight_scale_inv",
            ...); "" for a parameter without a module.
        module: the module's name on disk.
        runtime: vLLM's module, fused.
        shares: key of the fused group that has one global scale; "" if the module is not fused.
    """

    row: Row
    part: Part
    layer: int | None = None
    expert: int | None = None
    leaf: str
    module: HFName
    runtime: VLLMName
    shares: str = ""

    @property
    def role(self) -> Role:
        return self.row.role

    @property
    def stem(self) -> str:
        """What comes before the row's path, which has no expert in it."""
        return self.module.removesuffix(self.row.path)

    def unstacked(self, num_experts: int) -> Iterator[HFName]:
        """The modules that a stacked parameter becomes, expert by expert."""
        for expert in range(num_experts):
            for path in self.row.unstacked:
                yield HFName(self.stem + path.replace("{e}", str(expert)))

    @property
    def is_known(self) -> bool:
        """Whether the family's table has a row for it."""
        return self.row.why_kept != _UNKNOWN


def unknown_place(module: HFName) -> Place:
    """The place of a module that the family's table does not know: no server calls it otherwise
    than the disk does.
    """
    row = Row(path=module, role="state", why_kept=_UNKNOWN)
    return Place(row=row, part="backbone", leaf="", module=module, runtime=VLLMName(module))


def language_config(config: Raw) -> Any:
    """The part of config.json for the language model: `text_config` in vision-language models, else
    all of it.
    """
    # Nemotron Omni calls it `llm_config`.
    return config.get("text_config") or config.get("llm_config") or config


@dataclass(frozen=True)
class FamilyView:
    """A family table applied to one config.json, and to the names of its tensors where they are
    known.
    """

    family: Family
    config: Raw
    names: Iterable[str] = field(default=(), repr=False, compare=False)

    @cached_property
    def layout(self) -> Layout:
        """The names of this architecture."""
        architectures = self.config.get("architectures") or ["*"]
        architecture = architectures[0]
        # A fine-tune may name the class of the text model, and have a tower all the same.
        if self.family.with_vision and self.config.get("vision_config"):
            architecture = self.family.with_vision
        layouts = self.family.layouts
        if architecture not in layouts:
            architecture = "*"
        layout = _as_spelled(layouts[architecture], sorted(self.names))
        last = str(self.num_mtp_layers - 1)
        mtp_top = [replace(row, path=row.path.replace("{last}", last)) for row in layout.mtp_top]
        return replace(layout, mtp_top=tuple(mtp_top))

    @cached_property
    def text_config(self) -> Raw:
        """The part of config.json for the language model."""
        return language_config(self.config)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        key = "tie_word_embeddings"
        return bool(self.text_config.get(key, self.config.get(key)))

    def number(self, *keys: str) -> int:
        """The first of these keys that the language model's config has, a whole number; 0 where it
        has none.

        Raises:
            CheckpointError: it is something else.
        """
        key = next(filter(self.text_config.get, keys), keys[0])
        value = self.text_config.get(key) or 0
        # A truth is a whole number to Python.
        if type(value) is not int or not 0 <= value < 2**31:
            raise CheckpointError(
                "config.json",
                f"{key} must be a whole number",
                got=repr(value),
                cure="Take config.json from the original release",
            )
        return value

    @cached_property
    def num_layers(self) -> int:
        """Number of decoder layers; 0 where the checkpoint is only a draft.

        Raises:
            CheckpointError: config.json does not say it.
        """
        key = self.family.num_layers_key
        lists = self.family.layer_list_keys
        if not key:
            return 0
        for list_key in lists:
            layers = self.text_config.get(list_key)
            if layers:
                return len(layers)
        count = self.text_config.get(key)
        if count is not None:
            return int(count)
        got = "nothing"
        if lists:
            got = "none of them"
        raise CheckpointError(
            "config.json",
            f"{' or '.join((key, *lists))} must say how many decoder layers there are",
            got=got,
            cure=(
                "Take the key from the original release; if that lacks it too, keepmtp's table "
                f"for {self.family.model_type} does not know this release"
            ),
        )

    @cached_property
    def _mtp_count(self) -> tuple[str, int]:
        """The config key that counts the MTP layers, and what it says."""
        keys = self.family.mtp_count_keys
        # vLLM reads the language model's part of config.json first.
        for holder in (self.text_config, self.config):
            for key in keys:
                count = _at(holder, key)
                if count is not None:
                    return key, int(count)
        return keys[0], self.family.mtp_count_default

    @property
    def mtp_count_key(self) -> str:
        """The config key that counts the MTP layers, for messages."""
        return self._mtp_count[0]

    @cached_property
    def num_mtp_layers(self) -> int:
        """Number of MTP layers on disk that config.json promises (0: none)."""
        return self._mtp_count[1] * self.num_mtp_parts

    @cached_property
    def num_mtp_parts(self) -> int:
        """Number of layers on disk for one MTP layer."""
        parts = [self.text_config.get(key) or () for key in self.family.mtp_parts_keys]
        return next(filter(None, map(len, parts)), 1)

    @property
    def draft_unit(self) -> int:
        """Beyond so many tokens a step vLLM drafts a multiple of them; 0 without a block."""
        if self.family.method == "dspark":  # its width does not depend on the stages
            return min(1, self.num_mtp_layers)
        return self.num_mtp_layers

    @property
    def usual_k(self) -> int:
        """Tokens drafted a step where nothing was measured: DSpark's block, else one for each MTP
        layer.
        """
        if self.family.method == "dspark":
            return self.number("dspark_block_size") or self.num_mtp_layers
        return self.num_mtp_layers

    @property
    def drafter(self) -> str:
        """The draft in words: `DSpark, 3 stages`, `1 MTP layer`."""
        if self.family.method == "dspark":
            return f"DSpark, {counted(self.num_mtp_layers, 'stage')}"
        return counted(self.num_mtp_layers, "MTP layer")

    @property
    def first_mtp_index(self) -> int:
        """The index on disk of the first MTP layer."""
        if self.layout.mtp is None:
            return self.num_layers  # they continue the decoder layers
        return 0

    @cached_property
    def groups(self) -> Mapping[Part, Set[Role]]:
        """The groups of each part's modules that a recipe may quantize."""
        groups: dict[Part, set[Role]] = {"backbone": set(), "mtp": set()}
        for name in self.names:
            place = self.place(HFName(name))
            if place is not None and not place.row.why_kept:
                groups[place.part].add(place.role)
        return groups

    def place(self, name: HFName) -> Place | None:
        """What the tensor `name` is, or None if the table has no row for it."""
        # A checkpoint has up to 130,000 names, and plan and rules ask about each of them often.
        if name not in self._places:
            self._places[name] = self._looked_up(name)
        return self._places[name]

    @cached_property
    def _places(self) -> dict[HFName, Place | None]:
        return {}

    def _looked_up(self, name: HFName) -> Place | None:
        module, _, leaf = name.rpartition(".")
        # A parameter without a module has its whole name in the table, all others their module's.
        for path in (name, module):
            if path in self._top:
                row, part = self._top[path]
                return Place(
                    row=row,
                    part=part,
                    leaf=name[len(path) + 1 :],
                    module=HFName(path),
                    runtime=VLLMName(row.in_vllm),
                )
        for part, regex, stem in self._stems:
            match = regex.match(name)
            if match is None:
                continue
            index = int(match[1])
            # Where MTP layers have no stem of their own, only their number tells them apart.
            if self.layout.mtp is None and index >= self.num_layers:
                part = "mtp"
            return self._place_in_block(part, stem, index, rest=match[2])
        for prefix, runtime, role in self.layout.opaque:
            if name.startswith(prefix):
                path = runtime + module[len(prefix) :]
                # Blocks of a tower are alike: the table has one row for all of their numbers.
                row = self._opaque_row(_NUMBER.sub("{}", path), role)
                numbers = _NUMBER.findall(path)
                return Place(
                    row=row,
                    part="backbone",
                    leaf=leaf,
                    module=HFName(module),
                    runtime=VLLMName(row.in_vllm.format(*numbers)),
                )
        return None

    def _opaque_row(self, path: str, role: Role) -> Row:
        """The row of a module in a part that is copied whole; its numbers are `{}`."""
        known = [row for row in self.layout.vision or () if row.path == path]
        if known:
            return known[0]
        why_kept = "not part of the language model"
        return Row(path=path, role=role, why_kept=why_kept, loads_quantized=False)

    def is_judged(self, place: Place) -> bool:
        """Whether it is known what vLLM builds there: in a vision tower not always."""
        rows = self.layout.vision
        if place.role != "vision":
            return True
        if rows is None:
            return False  # vLLM was not asked
        return not rows or place.row in rows

    def is_mtp(self, name: HFName) -> bool:
        """Whether `name` belongs to the MTP block; False for names outside the table."""
        place = self.place(name)
        return place is not None and place.part == "mtp"

    @cached_property
    def disk_modules(self) -> Mapping[str, tuple[HFName, ...]]:
        """For each runtime module, its modules on disk by the table, also those that the checkpoint
        lacks.

        `{e}` is the index of a routed expert. A parameter without a module has its own name.
        """
        found = defaultdict[str, list[HFName]](list)
        for row in (*self.layout.top, *self.layout.mtp_top):
            found[row.in_vllm].append(HFName(row.path))
        first = self.first_mtp_index
        blocks: Mapping[Part, range]
        blocks = {
            "backbone": range(self.num_layers),
            "mtp": range(first, first + self.num_mtp_layers),
        }
        for part, indexes in blocks.items():
            for index in indexes:
                runtime = self.runtime_stem(part, index)
                disk = self.disk_stem(part, index)
                for row in self._rows_of(part, index).values():
                    path = HFName(disk + row.path)
                    found[self._alone(runtime + row.in_vllm)].append(path)
                    if row.joins:
                        found[row.joins].append(path)
        return {name: tuple(on_disk) for name, on_disk in found.items()}

    def sides(self, place: Place) -> list[tuple[str, int | None]]:
        """The sides of a tensor in the table's words and in numbers, None where config.json is
        silent.
        """
        sides = list[tuple[str, int | None]]()
        row = place.row
        named = row.sides
        # A norm of a layer or of the model, and not of what a module has inside.
        if row.role == "norm" and not named and (place.layer is None or "." not in row.path):
            named = ("hidden_size",)
        for words in named:
            terms = [self._product(term) for term in words.split(" + ")]
            side = None
            if None not in terms:
                side = sum(filter(None, terms))
            sides.append((words, side))
        return sides

    def _product(self, words: str) -> int | None:
        product = 1
        for word in words.split():
            value = _at(self.text_config, word)
            if value is None:
                value = self.config.get(word)
            if word.lstrip("-").isdigit():
                value = int(word)
            elif isinstance(value, list):
                value = len(value)
            if type(value) is not int:
                return None
            product *= value
        return product

    def mtp_stem(self, index: int) -> str:
        """Prefix on disk of MTP layer `index` (counted from 0)."""
        return self.disk_stem("mtp", self.first_mtp_index + index)

    def required_mtp_modules(self, layers: Iterable[int]) -> list[HFName]:
        """Names on disk of the glue, norms and state that the MTP layers (counted from 0) need, and
        of what no decoder layer has under the same name.
        """
        required = list[HFName]()
        stems = [self.mtp_stem(index) for index in layers]
        decoder = {row.path for row in self.family.block}
        needed = list[str]()
        for row in self.family.mtp_block:
            # A rule compares an MTP layer with the decoder layers in what both have.
            is_own = row.path not in decoder and row.role in _COMPARED and row.in_every_layer
            if is_own or row.role in _JOINING or row.is_drafts_own:
                needed.append(row.path)
        for stem in stems:
            required += [HFName(stem + path) for path in needed]
        if stems:
            rows = self.layout.mtp_top
            required += [
                HFName(row.path) for row in rows if row.role in _JOINING and row.in_every_layer
            ]
        return required

    def mtp_layers_of(self, names: Iterable[HFName]) -> set[int]:
        """The MTP layers (counted from 0) that have at least one of `names`."""
        places = filter(None, map(self.place, names))
        layers = {place.layer for place in places if place.part == "mtp"}
        return {layer - self.first_mtp_index for layer in layers if layer is not None}

    def is_number_wrong(self, found: Collection[int]) -> bool:
        """Whether the MTP layers on disk are a block of another count, or of other numbers, than
        config.json promises.
        """
        first = min(found, default=0)
        if not found or {*found} != {*range(first, first + len(found))}:
            return False
        # From another number on it is the whole block; from 0 on another count.
        return (len(found) == self.num_mtp_layers) == bool(first)

    def slices(self, place: Place) -> tuple[int, int, int, int]:
        """The number of slices of an interleaved matrix, and the rows of q, k and v in each. The
        sizes of a layer with sliding attention, and of an MTP layer, are under keys of their own.

        Raises:
            CheckpointError: config.json does not say it.
        """
        kinds = self.text_config.get("hybrid_layer_pattern") or ()
        prefix = ""
        # The list may be shorter than config.json says that there are layers.
        if place.part == "mtp" or kinds[place.layer :][:1] == [1]:
            prefix = "swa_"
        names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
        keys = ["num_key_value_heads", *(prefix + name for name in names)]
        sizes = [self.number(key) for key in keys]
        if not all(sizes):
            raise CheckpointError(
                "config.json",
                f"the rows of {place.module} need {', '.join(keys)}",
                got=sizes,
                cure="Take config.json from the original release",
            )
        count, heads, groups, head, value = sizes
        return count, heads * head // count, groups * head // count, groups * value // count

    def runtime_number(self, index: int) -> int:
        """The number in vLLM (`{n}` of a stem) of the MTP layer with index `index` on disk."""
        return self.num_layers * self.family.layers_at_runtime + index

    def runtime_stem(self, part: Part, index: int) -> str:
        """The prefix in vLLM of the block with index `index` on disk."""
        layout = self.layout
        stem = layout.layers.runtime
        if part == "mtp" and layout.mtp:
            stem = layout.mtp.runtime
        elif part == "mtp" and layout.mtp_runtime:
            stem = layout.mtp_runtime
        return stem.replace("{i}", str(index)).replace("{n}", str(self.runtime_number(index)))

    def disk_stem(self, part: Part, index: int) -> str:
        """The prefix on disk of the block with index `index` on disk."""
        stem = self.layout.layers
        if part == "mtp" and self.layout.mtp:
            stem = self.layout.mtp
        return stem.disk.replace("{i}", str(index))

    @cached_property
    def last_shards(self) -> frozenset[str]:
        """Paths of the rows that come last in their fused module, and of all rows that are not
        fused.
        """
        family = self.family
        # A later row of the same module takes the place of the one before.
        rows = (*family.block, *family.linear_block, *family.mtp_block)
        return frozenset({row.shares or row.runtime or row.path: row.path for row in rows}.values())

    @cached_property
    def _top(self) -> dict[str, tuple[Row, Part]]:
        parts: Mapping[Part, tuple[Row, ...]]
        parts = {"backbone": self.layout.top, "mtp": self.layout.mtp_top}
        found: dict[str, tuple[Row, Part]] = {}
        for part, rows in parts.items():
            found |= {row.path: (row, part) for row in rows}
        return found

    @cached_property
    def _stems(self) -> tuple[tuple[Part, re.Pattern[str], Stem], ...]:
        stems: list[tuple[Part, Stem | None]] = [
            ("mtp", self.layout.mtp),
            ("backbone", self.layout.layers),
        ]
        found = []
        for part, stem in stems:
            if stem is not None:
                disk = re.escape(stem.disk).replace(r"\{i\}", f"({INDEX})")
                found.append((part, re.compile(f"^{disk}(.+)$"), stem))
        return tuple(found)

    @cached_property
    def _rows(self) -> dict[str, dict[str, Row]]:
        family = self.family
        block = _by_path(family.block)
        # The special blocks say only what differs from the usual one.
        return {
            "backbone": block,
            "linear": block | _by_path(family.linear_block),
            "mtp": without(block, *family.mtp_lacks) | _by_path(family.mtp_block),
        }

    def _rows_of(self, part: Part, index: int) -> dict[str, Row]:
        """The rows of the layer with this index on disk, by path."""
        if part == "backbone" and index in self.linear_layers:
            return self._rows["linear"]
        return self._rows[part]

    @cached_property
    def linear_layers(self) -> frozenset[int]:
        """Layers with linear attention: by `layer_types`, by Ling's groups, or by Kimi's list
        (counted from 1).
        """
        layer_types = self.text_config.get("layer_types") or ()
        group_size = self.text_config.get("layer_group_size")
        kimi = self.text_config.get("linear_attn_config") or {}
        linear = [index for index, kind in enumerate(layer_types) if kind == "linear_attention"]
        if not layer_types and group_size:
            # The last layer of each group has full attention.
            linear = [index for index in range(self.num_layers) if (index + 1) % group_size]
        elif not layer_types:
            linear = [number - 1 for number in kimi.get("kda_layers", ())]
        return frozenset(linear)

    def has(self, row: Row, index: int) -> bool | None:
        """Whether a decoder layer has a row with `where`; None where the row says nothing of it."""
        has = None
        for key, value in row.where.items():
            said = self.text_config.get(key)
            if isinstance(said, list) and said[index : index + 1] != [value]:
                return None
            has = isinstance(said, list) or said == value
        return has

    def unbuilt_by(self, place: Place) -> str:
        """The key of config.json by which vLLM's decoder layer has no such tensor; "" where it may
        have it.

        vLLM 0.33.0 models/deepseek_v2.py, exaone_moe.py, mimo_v2.py, step3p5.py, glm4_moe.py: the
        decoder layers.
        """
        row = place.row
        index = place.layer
        family = self.family
        if place.part != "backbone" or index is None:
            return ""
        if index >= self.num_layers:
            return (family.num_layers_key, *family.layer_list_keys)[-1]
        if place.leaf == "bias" and row.bias and not self.text_config.get(row.bias):
            return row.bias
        if self.has(row, index) is False:
            return [*row.where][-1]
        said = self.text_config.get(family.experts_by)
        is_routed = row.role in _ROUTED
        if said is None or not (is_routed or row.role == "dense_mlp"):
            return ""
        if isinstance(said, list):
            is_sparse = said[index : index + 1] not in ([0], ["dense"])
        elif isinstance(said, str):
            is_sparse = str(index) in said.split(",")
        else:
            every = self.number("moe_layer_freq") or 1
            is_sparse = index >= said and index % every == 0
        return family.experts_by * (is_routed != is_sparse)

    def _place_in_block(self, part: Part, stem: Stem, index: int, rest: str) -> Place | None:
        expert = None
        number = "{e}"
        match = _EXPERT.search(rest)
        if match:
            # The table has one row for all experts of a layer.
            number = match[1]
            expert = int(number)
            rest = _EXPERT.sub("{e}", rest, count=1)
        rows = self._rows_of(part, index)
        row = rows.get(rest)
        leaf = ""
        if row is None:
            module, _, leaf = rest.rpartition(".")
            row = rows.get(module)
        if row is None:
            return None
        disk = stem.disk.replace("{i}", str(index))
        path = row.path.replace("{e}", number)
        runtime = self._alone(self.runtime_stem(part, index) + (row.runtime or path))
        shares = ""
        # A projection that is not fused shares no scale, whatever the table says.
        if row.shares and not runtime.endswith("kv_a_proj_with_mqa"):
            shares = disk + row.shares.replace("{e}", number)
        return Place(
            row=row,
            part=part,
            layer=index,
            expert=expert,
            leaf=leaf,
            module=HFName(disk + path),
            runtime=VLLMName(runtime),
            shares=shares,
        )

    def _alone(self, runtime: str) -> str:
        """The module's name; latent attention without low-rank queries does not fuse its first
        projection.
        """
        if self.text_config.get("q_lora_rank", 0) is None and runtime.endswith("fused_qkv_a_proj"):
            return runtime.replace("fused_qkv_a_proj", "kv_a_proj_with_mqa")
        return runtime


def _as_spelled(layout: Layout, names: Sequence[str]) -> Layout:
    """The layout under the names that the tensors have, of those that vLLM's mapper makes one."""
    renames = layout.renames
    # The target alone has the mapper. A draft finds its block by the names of the release, also
    # where that is the last of the target's layers.
    if renames is None or layout.mtp is None or not names:
        return layout

    def spelled(disk: str) -> str:
        """The spelling of a name in the table that some tensor's name begins with."""
        read = renames.read(disk)
        for spelling in (disk, read, *renames.sources(read)):
            start = spelling.partition("{i}")[0]
            # Names are sorted: the first that is not before `start` begins with it, or none does.
            at = bisect_left(names, start)
            if at == len(names) or not names[at].startswith(start):
                continue
            if renames.read(spelling) == read:
                return spelling
        return disk

    top = [replace(row, path=spelled(row.path), runtime=row.in_vllm) for row in layout.top]
    return replace(
        layout,
        layers=replace(layout.layers, disk=spelled(layout.layers.disk)),
        top=tuple(top),
        opaque=tuple((spelled(disk), *names) for disk, *names in layout.opaque),
        head=spelled(layout.head),
    )


def _by_path(rows: Iterable[Row]) -> dict[str, Row]:
    return {row.path: row for row in rows}


def _at(holder: Any, key: str) -> Any:
    """The value at a dotted key; None if there is none."""
    for part in key.split("."):
        if not isinstance(holder, Mapping):
            return None
        holder = holder.get(part)
    return holder
