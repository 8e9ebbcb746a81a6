"""The vocabulary of a family table: which tensor is what on disk, and what vLLM calls it.

A family file (recipes/families/<model_type>.py) is data: rows, stems and config keys. This module turns it, together
with a config.json, into a `FamilyView`, the only place where names on disk (HFName) and names at run time (VLLMName)
meet. Nothing here reads a checkpoint or knows a scheme.

Easy to get wrong: vLLM matches `ignore` and `targets` against the prefix a module was *constructed* with. That prefix
is fused (qkv_proj), sometimes renumbered (MTP block 0 is layer `num_hidden_layers`) and never contains the `.mtp_block`
of parameter names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NewType

HFName = NewType("HFName", str)
"""A tensor or module name as in the source's safetensors files."""
VLLMName = NewType("VLLMName", str)
"""A module prefix as vLLM hands it to its quantization config."""

Role = Literal[
    "attention", "linear_attention", "dense_mlp", "experts", "shared_experts",  # what recipes choose schemes for
    "indexer", "compressor", "router", "glue", "norm", "state", "embedding", "head", "vision",  # kept as they are
]  # fmt: skip
QUANTIZABLE_ROLES: tuple[Role, ...] = ("attention", "linear_attention", "dense_mlp", "shared_experts", "experts")
Part = Literal["backbone", "mtp"]

_EXPERT = re.compile(r"(?<=\.)(\d+)(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One module of a block.

    Attributes:
        path: module path under the stem, `{e}` for an expert's index; for a parameter without a module, its full path.
        runtime: vLLM's path under the runtime stem where it differs: the fused module, or the router of experts.
        shares: modules with the same value (`{e}` filled in) are one fused parameter and need one global scale.
            Defaults to `runtime` for fused modules.
        why_kept: not empty: never quantized by a recipe, for this reason. A form it has in the source may stay.
        loads_quantized: whether vLLM's module has slots for packed weights and scales at all.
        aliases: further runtime spellings that some vLLM versions ask for.
        stacked: for a 3-D expert parameter [E, n * I, K], the projections stacked along I.
    """

    path: str
    role: Role
    runtime: str = ""
    shares: str = ""
    why_kept: str = ""
    loads_quantized: bool = True
    aliases: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stem:
    """Where repeated blocks live: `{i}` is the index on disk, `{n}` is `num_hidden_layers + i`."""

    disk: str
    runtime: str

    def disk_regex(self) -> re.Pattern[str]:
        return re.compile("^" + re.escape(self.disk).replace(r"\{i\}", r"(\d+)") + r"(.+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Renames:
    """`hf_to_vllm_mapper.get_rename_mapper()` of the target's class: what vLLM makes of names in a quantization config.

    Substrings are replaced first, then prefixes; regexes are never renamed.
    """

    substrings: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How vLLM's draft class takes a checkpoint that does not fit it.

    Attributes:
        unknown_name: the exception for a tensor without a parameter.
        drops_scales: a `.weight_scale` without a parameter is skipped in silence instead, outside experts.
        refuses_missing_mtp: an absent MTP layer raises; the other classes load nothing and draft from noise.
        takes_kv_scales: the KV cache's scales inside the MTP layer are known.
        needs: keys of config.json that the classes read without a default.
        missing_count: the exception when config.json does not count MTP layers.
    """

    unknown_name: Literal["KeyError", "ValueError"] = "KeyError"
    drops_scales: bool = False
    refuses_missing_mtp: bool = False
    takes_kv_scales: bool = False
    needs: tuple[str, ...] = ()
    missing_count: Literal["ZeroDivisionError", "AttributeError"] = "ZeroDivisionError"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A tensor some runtime wants under the MTP block although it equals one of the backbone."""

    path: str
    source: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of one architecture.

    Attributes:
        layers: the decoder layers.
        mtp: the MTP layers; None where they continue the decoder layers (`model.layers.{N}`).
        top: modules outside layers.
        mtp_top: modules of the MTP block outside its layers.
        opaque: (prefix on disk, prefix at run time, role) of parts that are carried over whole.
        head: the target's head on disk.
        draft_head: a head that the draft constructs with the quantization config although it shares the target's.
        renames: the target class's mapper; None where it has none.
    """

    layers: Stem
    mtp: Stem | None
    top: tuple[Row, ...]
    mtp_top: tuple[Row, ...] = ()
    opaque: tuple[tuple[str, str, Role], ...] = ()
    head: str = "lm_head.weight"
    draft_head: str = ""
    renames: Renames | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family table.

    Attributes:
        model_type: `config.json: model_type`, also the file's name.
        also: further model_types with the same tables (text-only twins, ...).
        layouts: by `architectures[0]`; "*" is the fallback.
        block: modules of a decoder layer; an MTP layer may have them too.
        mtp_block: what only an MTP layer has.
        mtp_count_keys: config keys that promise MTP layers, first found wins; looked up at top level and in
            text_config.
        mtp_count_default: how many layers vLLM assumes when no key is there.
        aliases: copies to add to an MTP layer when the source has none.
        loader: how vLLM's draft class takes faults.
        config_extras: keys this family's runtime wants inside quantization_config.
        notes: one line a person should know, shown by `keepmtp ls families`.
    """

    model_type: str
    also: tuple[str, ...] = ()
    layouts: Mapping[str, Layout]
    block: tuple[Row, ...]
    mtp_block: tuple[Row, ...] = ()
    mtp_count_keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    mtp_count_default: int = 0
    aliases: tuple[Alias, ...] = ()
    loader: Loader = Loader()
    config_extras: Mapping[str, Any] = field(default_factory=dict)
    notes: str = ""

    def view(self, config: Mapping[str, Any]) -> "FamilyView":
        """This family's names for the checkpoint that `config` (its config.json) describes."""
        architectures = config.get("architectures") or ["*"]
        layout = self.layouts.get(architectures[0]) or self.layouts["*"]
        return FamilyView(family=self, layout=layout, config=config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What one tensor on disk is.

    Attributes:
        row: the table's row.
        part: backbone or MTP block.
        layer: index on disk of the decoder layer or MTP layer; None outside layers.
        expert: routed expert's index, if the row has one.
        leaf: what follows the module in the tensor's name ("weight", "bias", "weight_scale_inv", ...); "" for a
            parameter without a module.
        module: the module's name on disk.
        runtime: vLLM's module, fused.
        shares: key of the fused group across which a global scale is common; "" if the module stands alone.
    """

    row: Row
    part: Part
    layer: int | None
    expert: int | None
    leaf: str
    module: HFName
    runtime: VLLMName
    shares: str

    @property
    def role(self) -> Role:
        return self.row.role


@dataclass(frozen=True)
class FamilyView:
    """A family table applied to one config.json."""

    family: Family
    layout: Layout
    config: Mapping[str, Any]

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The language model's part of config.json: `text_config` for vision-language models, else all of it."""
        return self.config.get("text_config") or self.config

    @cached_property
    def num_layers(self) -> int:
        return int(self.text_config["num_hidden_layers"])

    @cached_property
    def num_mtp_layers(self) -> int:
        """MTP layers that config.json promises (0: none)."""
        for holder in (self.text_config, self.config):
            for key in self.family.mtp_count_keys:
                if holder.get(key) is not None:
                    return int(holder[key])
        return self.family.mtp_count_default

    @cached_property
    def mtp_count_key(self) -> str:
        """How config.json spells the promise, for messages."""
        for key in self.family.mtp_count_keys:
            if self.text_config.get(key) is not None or self.config.get(key) is not None:
                return key
        return self.family.mtp_count_keys[0]

    def place(self, name: HFName) -> Place | None:
        """What the tensor `name` is, or None if the table has no row for it."""
        if (found := self._top.get(name)) or (found := self._top.get(name.rpartition(".")[0])):
            row, part = found
            module = row.path
            return Place(
                row=row, part=part, layer=None, expert=None, leaf=name[len(module) + 1 :], module=HFName(module),
                runtime=VLLMName(row.runtime or module), shares="",
            )  # fmt: skip
        for part, regex, stem in self._stems:
            if match := regex.match(name):
                index, rest = int(match[1]), match[2]
                if self.layout.mtp is None and index >= self.num_layers:
                    part = "mtp"
                return self._place_in_block(part, stem, index, rest)
        for prefix, runtime, role in self.layout.opaque:
            if name.startswith(prefix):
                module, _, leaf = name.rpartition(".")
                row = Row(path=module, role=role, why_kept="not part of the language model", loads_quantized=False)
                return Place(
                    row=row, part="backbone", layer=None, expert=None, leaf=leaf, module=HFName(module),
                    runtime=VLLMName(runtime + module[len(prefix) :]), shares="",
                )  # fmt: skip
        return None

    def is_mtp(self, name: HFName) -> bool:
        """Whether `name` belongs to the MTP block; False for names outside the table."""
        place = self.place(name)
        return place is not None and place.part == "mtp"

    def mtp_stem(self, index: int) -> str:
        """Prefix on disk of MTP layer `index` (counted from 0)."""
        if self.layout.mtp is None:
            return self.layout.layers.disk.replace("{i}", str(self.num_layers + index))
        return self.layout.mtp.disk.replace("{i}", str(index))

    def required_mtp_modules(self, layers: Iterable[int]) -> list[HFName]:
        """Names on disk of the glue, norms and state without which MTP layers (counted from 0) cannot work."""
        layers = list(layers)
        own = [row.path for row in self.family.mtp_block if row.role in ("glue", "norm", "state")]
        names = [self.mtp_stem(index) + path for index in layers for path in own]
        names += [row.path for row in self.layout.mtp_top if row.role in ("glue", "norm")] if layers else []
        return [HFName(name) for name in names]

    def mtp_layers_of(self, names: Iterator[HFName] | Mapping[HFName, Any]) -> set[int]:
        """MTP layers (counted from 0) that own at least one of `names`."""
        first = self.num_layers if self.layout.mtp is None else 0
        places = (self.place(name) for name in names)
        return {p.layer - first for p in places if p and p.part == "mtp" and p.layer is not None}

    def runtime_stem(self, part: Part, index: int) -> str:
        """Prefix at run time of the block with index `index` on disk."""
        stem = self.layout.mtp if part == "mtp" and self.layout.mtp else self.layout.layers
        return stem.runtime.replace("{i}", str(index)).replace("{n}", str(self.num_layers + index))

    def disk_stem(self, part: Part, index: int) -> str:
        """Prefix on disk of the block with index `index` on disk."""
        stem = self.layout.mtp if part == "mtp" and self.layout.mtp else self.layout.layers
        return stem.disk.replace("{i}", str(index))

    @cached_property
    def last_shards(self) -> frozenset[str]:
        """Paths of the rows that come last in their fused module; those of modules that stand alone too."""
        last: dict[str, str] = {}
        for row in (*self.family.block, *self.family.mtp_block):
            last[row.shares or row.path] = row.path
        return frozenset(last.values())

    @cached_property
    def _top(self) -> dict[str, tuple[Row, Part]]:
        parts: tuple[tuple[Part, tuple[Row, ...]], ...] = (("backbone", self.layout.top), ("mtp", self.layout.mtp_top))
        return {row.path: (row, part) for part, rows in parts for row in rows}

    @cached_property
    def _stems(self) -> tuple[tuple[Part, re.Pattern[str], Stem], ...]:
        stems: list[tuple[Part, re.Pattern[str], Stem]] = []
        if self.layout.mtp is not None:
            stems.append(("mtp", self.layout.mtp.disk_regex(), self.layout.mtp))
        stems.append(("backbone", self.layout.layers.disk_regex(), self.layout.layers))
        return tuple(stems)

    @cached_property
    def _rows(self) -> dict[Part, dict[str, Row]]:
        block = {row.path: row for row in self.family.block}
        return {"backbone": block, "mtp": block | {row.path: row for row in self.family.mtp_block}}

    @cached_property
    def _templates(self) -> dict[tuple[Part, str], tuple[Row, str] | None]:
        return {}

    def _place_in_block(self, part: Part, stem: Stem, index: int, rest: str) -> Place | None:
        expert_match = _EXPERT.search(rest)
        template = rest if expert_match is None else _EXPERT.sub("{e}", rest, count=1)
        expert = int(expert_match[1]) if expert_match else None
        key = (part, template)
        if key not in self._templates:
            self._templates[key] = self._find_row(part, template)
        found = self._templates[key]
        if found is None:
            return None
        row, leaf = found
        disk = stem.disk.replace("{i}", str(index))
        runtime = stem.runtime.replace("{i}", str(index)).replace("{n}", str(self.num_layers + index))
        path = row.path if expert is None else row.path.replace("{e}", str(expert))
        shares = row.shares if expert is None else row.shares.replace("{e}", str(expert))
        return Place(
            row=row, part=part, layer=index, expert=expert, leaf=leaf, module=HFName(disk + path),
            runtime=VLLMName(runtime + (row.runtime or path)), shares=disk + shares if shares else "",
        )  # fmt: skip

    def _find_row(self, part: Part, template: str) -> tuple[Row, str] | None:
        rows = self._rows[part]
        if template in rows:
            return rows[template], ""
        module, _, leaf = template.rpartition(".")
        return (rows[module], leaf) if module in rows else None
