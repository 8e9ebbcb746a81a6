"""The vocabulary of a family table: which tensor is what on disk, and what vLLM calls it.

A family file (recipes/families/<model_type>.py) is data: rows, stems and config keys. This module turns it, together
with a config.json, into a `FamilyView`, the only place where names on disk (HFName) and names at run time (VLLMName)
meet. Nothing here reads a checkpoint or knows a scheme.

Easy to get wrong: vLLM matches `ignore` and `targets` against the prefix a module was *constructed* with. That prefix
is fused (qkv_proj), sometimes renumbered (MTP block 0 is layer `num_hidden_layers`) and mostly lacks the `.mtp_block`
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

_EXPERT = re.compile(r"(?<=experts\.)(\d+)(?=\.)")


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
        stacked: for a 3-D expert parameter [E, n * I, K], the projections stacked along I; quantized, it becomes one
            tensor an expert and projection, under `runtime`.
        takes_tensor_scale: False where vLLM's fused module has no way to load one scale for a whole tensor.
        in_every_layer: False where only layers of one kind have it: the others are not said to lack it.
    """

    path: str
    role: Role
    runtime: str = ""
    shares: str = ""
    why_kept: str = ""
    loads_quantized: bool = True
    aliases: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    takes_tensor_scale: bool = True
    in_every_layer: bool = True

    @property
    def unstacked(self) -> tuple[str, ...]:
        """Paths of the single experts' projections that a stacked parameter is written as."""
        return tuple(f"{self.runtime}.{{e}}.{name}" for name in self.stacked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stem:
    """Where repeated blocks live: `{i}` is the index on disk, `{n}` goes on behind the decoder layers."""

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
        unknown_name: the exception for a tensor without a parameter; "" where it is skipped in silence.
        drops_scales: a `.weight_scale` without a parameter is skipped in silence instead, outside experts.
        refuses_missing_mtp: an absent MTP layer raises; the other classes load nothing and draft from noise.
        takes_kv_scales: the KV cache's scales inside the MTP layer are known.
        mtp_leaves: all that may follow a module's name in the MTP block; () where anything may.
        needs: keys of config.json that the classes read without a default.
        missing_count: the exception when config.json does not count MTP layers.
        num_layers_used: MTP layers that vLLM reads, where it leaves the others alone; 0 for all.
    """

    unknown_name: Literal["KeyError", "ValueError", ""] = "KeyError"
    drops_scales: bool = False
    refuses_missing_mtp: bool = False
    takes_kv_scales: bool = False
    mtp_leaves: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    missing_count: Literal["ZeroDivisionError", "AttributeError", "NotImplementedError"] = "ZeroDivisionError"
    num_layers_used: int = 0


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
        mtp_runtime: their prefix at run time where they continue the decoder layers on disk, but not in vLLM.
        top: modules outside layers.
        mtp_top: modules of the MTP block outside its layers.
        opaque: (prefix on disk, prefix at run time, role) of parts that are carried over whole.
        head: the target's head on disk.
        draft_head: a head that the draft constructs with the quantization config although it shares the target's.
        renames: the target class's mapper; None where it has none.
        draft_reads_afresh: the draft reads the quantization config from config.json again, unmapped by the target.
        draft_renames: the draft class's mapper in that case; None where it has none.
    """

    layers: Stem
    mtp: Stem | None
    mtp_runtime: str = ""
    top: tuple[Row, ...]
    mtp_top: tuple[Row, ...] = ()
    opaque: tuple[tuple[str, str, Role], ...] = ()
    head: str = "lm_head.weight"
    draft_head: str = ""
    renames: Renames | None = None
    draft_reads_afresh: bool = False
    draft_renames: Renames | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What an MTP layer computes around its decoder layer, as vLLM's draft class does it.

    Paths are those on disk under the layer's stem, or whole where `Layout.mtp_top` has them. Where nothing is said the
    names are DeepSeek's.

    Attributes:
        model_type: whose configuration and classes transformers builds the decoder layer with.
        classes: how the names of those classes begin.
        decoder: the decoder layer's class; "" for `<classes>DecoderLayer`.
        rotary: the rotary embedding's class; "" for `<classes>RotaryEmbedding`, None where there is none.
        rope_types: kinds of rotary embedding that the layer is given by name, "own" for the one of its attention; ()
            where the model has one kind.
        position_axes: 3 where the rotary embedding wants positions by axis (M-RoPE); equal for text.
        layers: for each decoder layer that makes up one MTP layer, what config.json would say at layer 0 if it stood
            there in the backbone.
        renames: (path in a backbone layer, path in the MTP layer), where a block's names differ; beginnings of paths.
        plain_residual: the block lacks the hyper-connections of the backbone's layers.
        embedding_norm: norm of the next token's embedding.
        hidden_norm: norm of the hidden state.
        projections: one matrix over both, concatenated; or the embedding's and the hidden state's, added.
        hidden_first: the hidden state comes before the embedding in the concatenation.
        final_norm: norm behind the decoder layer; "" for none.
        head: a head of the draft's own; "" where it uses the target's.
        zeroes_first: the embedding at position 0 is replaced by zeros.
        chains_normed: the next draft step is fed the state behind the final norm, not the one before it.
        reads_normed: so is the first step, by the target.
        streams: key of config.json that counts residual streams of the hidden state; "" for one.
        joint_norm: `hidden_norm` spans all streams, not each alone.
        collapse: class of the module that makes one stream of several before the final norm, its parameters' beginning
            and their beginning on disk.
        proof: what its results were compared with: vLLM's draft, transformers' MtpModel, or nothing but the source.
    """

    model_type: str
    classes: str
    decoder: str = ""
    rotary: str | None = ""
    rope_types: tuple[str, ...] = ()
    position_axes: int = 1
    layers: tuple[Mapping[str, Any], ...] = ({},)
    renames: tuple[tuple[str, str], ...] = ()
    plain_residual: bool = False
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projections: tuple[str, ...] = ("eh_proj",)
    hidden_first: bool = False
    final_norm: str = "shared_head.norm"
    head: str = ""
    zeroes_first: bool
    chains_normed: bool
    reads_normed: bool = True
    streams: str = ""
    joint_norm: bool = False
    collapse: tuple[str, str, str] | None = None
    proof: Literal["vllm", "transformers", "source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family table.

    Attributes:
        model_type: `config.json: model_type`, also the file's name.
        also: further model_types with the same tables (text-only twins, ...).
        architectures: releases that carry the model_type of another family are known by these.
        layouts: by `architectures[0]`; "*" is the fallback.
        block: modules of a decoder layer; an MTP layer may have them too.
        linear_block: what only a linear-attention layer has, or what differs there.
        mtp_block: what only an MTP layer has, or what differs there.
        mtp_lacks: paths of `block` that an MTP layer does not have.
        num_layers_key: the config key that counts the decoder layers; "" where the checkpoint is a draft and no more.
        layers_at_runtime: decoder layers that vLLM counts for one on disk, when it numbers an MTP layer behind them.
        mtp_count_keys: config keys that promise MTP layers, first found wins; looked up at top level and in
            text_config, a dot going one level down.
        mtp_count_default: how many layers there are when no key says so: what vLLM assumes, or the releases have.
        one_mixer: a layer has attention or experts, never both.
        layer_types_count_mtp: `layer_types` in config.json goes on behind the decoder layers.
        aliases: copies to add to an MTP layer when the source has none.
        loader: how vLLM's draft class takes faults.
        config_extras: keys this family's runtime wants inside quantization_config.
        rerouted_format: a `format` by which vLLM reads experts alone and leaves linears plain; ours says
            mixed-precision instead.
        draft: how an MTP layer computes; None where it cannot be run here, and so neither calibrated nor measured.
        no_draft: why not.
        notes: one line a person should know, shown by `keepmtp ls families`.
    """

    model_type: str
    also: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    layouts: Mapping[str, Layout]
    block: tuple[Row, ...]
    linear_block: tuple[Row, ...] = ()
    mtp_block: tuple[Row, ...] = ()
    mtp_lacks: tuple[str, ...] = ()
    num_layers_key: str = "num_hidden_layers"
    layers_at_runtime: int = 1
    mtp_count_keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    mtp_count_default: int = 0
    mtp_parts_keys: tuple[str, ...] = ()
    one_mixer: bool = False
    layer_types_count_mtp: bool = False
    aliases: tuple[Alias, ...] = ()
    loader: Loader = Loader()
    config_extras: Mapping[str, Any] = field(default_factory=dict)
    rerouted_format: str = ""
    draft: Draft | None = None
    no_draft: str = ""
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
        key = self.family.num_layers_key
        return int(self.text_config[key]) if key else 0

    @cached_property
    def num_mtp_layers(self) -> int:
        """MTP layers on disk that config.json promises (0: none)."""
        for holder in (self.text_config, self.config):
            for key in self.family.mtp_count_keys:
                if (count := _at(holder, key)) is not None:
                    return int(count) * self.num_mtp_parts
        return self.family.mtp_count_default * self.num_mtp_parts

    @cached_property
    def num_mtp_parts(self) -> int:
        """Layers on disk that make up one MTP layer."""
        lists = (self.text_config.get(key) for key in self.family.mtp_parts_keys)
        return next((len(parts) for parts in lists if parts), 1)

    @cached_property
    def mtp_count_key(self) -> str:
        """How config.json spells the promise, for messages."""
        for key in self.family.mtp_count_keys:
            if _at(self.text_config, key) is not None or _at(self.config, key) is not None:
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

    @cached_property
    def disk_modules(self) -> Mapping[str, tuple[HFName, ...]]:
        """Runtime module -> what the table says makes it up on disk, whether it is there or not.

        `{e}` stands for a routed expert's index; parameters without a module stand under their own name.
        """
        found: dict[str, list[HFName]] = {}
        for row in (*self.layout.top, *self.layout.mtp_top):
            found.setdefault(row.runtime or row.path, []).append(HFName(row.path))
        first = 0 if self.layout.mtp else self.num_layers
        blocks: list[tuple[Part, str, int]] = []
        for index in range(self.num_layers):
            blocks.append(("backbone", "linear" if index in self._linear_layers else "backbone", index))
        for index in range(self.num_mtp_layers):
            blocks.append(("mtp", "mtp", first + index))
        for part, kind, index in blocks:
            runtime, disk = self.runtime_stem(part, index), self.disk_stem(part, index)
            for row in self._rows[kind].values():
                name = self._alone(runtime + (row.runtime or row.path))
                found.setdefault(name, []).append(HFName(disk + row.path))
        return {name: tuple(modules) for name, modules in found.items()}

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

    def runtime_number(self, index: int) -> int:
        """Number at run time (`{n}` of a stem) of the MTP layer with index `index` on disk."""
        return self.num_layers * self.family.layers_at_runtime + index

    def runtime_stem(self, part: Part, index: int) -> str:
        """Prefix at run time of the block with index `index` on disk."""
        stem = self.layout.layers.runtime
        if part == "mtp":
            stem = self.layout.mtp.runtime if self.layout.mtp else self.layout.mtp_runtime or stem
        return stem.replace("{i}", str(index)).replace("{n}", str(self.runtime_number(index)))

    def disk_stem(self, part: Part, index: int) -> str:
        """Prefix on disk of the block with index `index` on disk."""
        stem = self.layout.mtp if part == "mtp" and self.layout.mtp else self.layout.layers
        return stem.disk.replace("{i}", str(index))

    @cached_property
    def last_shards(self) -> frozenset[str]:
        """Paths of the rows that come last in their fused module; those of modules that stand alone too."""
        last: dict[str, str] = {}
        for row in (*self.family.block, *self.family.linear_block, *self.family.mtp_block):
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
    def _rows(self) -> dict[str, dict[str, Row]]:
        block = {row.path: row for row in self.family.block}
        linear = block | {row.path: row for row in self.family.linear_block}
        shared = {path: row for path, row in block.items() if path not in self.family.mtp_lacks}
        mtp = shared | {row.path: row for row in self.family.mtp_block}
        return {"backbone": block, "linear": linear, "mtp": mtp}

    @cached_property
    def _linear_layers(self) -> frozenset[int]:
        """Layers of linear attention: by `layer_types`, by Ling's groups, else by Kimi's list, which counts from 1."""
        if types := self.text_config.get("layer_types"):
            return frozenset(index for index, kind in enumerate(types) if kind == "linear_attention")
        if group := self.text_config.get("layer_group_size"):
            return frozenset(index for index in range(self.num_layers) if (index + 1) % group)
        kda = (self.text_config.get("linear_attn_config") or {}).get("kda_layers", ())
        return frozenset(number - 1 for number in kda)

    @cached_property
    def _templates(self) -> dict[tuple[str, str], tuple[Row, str] | None]:
        return {}

    def _place_in_block(self, part: Part, stem: Stem, index: int, rest: str) -> Place | None:
        expert_match = _EXPERT.search(rest)
        template = rest if expert_match is None else _EXPERT.sub("{e}", rest, count=1)
        expert = int(expert_match[1]) if expert_match else None
        kind = "linear" if part == "backbone" and index in self._linear_layers else part
        key = (kind, template)
        if key not in self._templates:
            self._templates[key] = self._find_row(kind, template)
        found = self._templates[key]
        if found is None:
            return None
        row, leaf = found
        disk = stem.disk.replace("{i}", str(index))
        path = row.path if expert is None else row.path.replace("{e}", str(expert))
        shares = row.shares if expert is None else row.shares.replace("{e}", str(expert))
        runtime = self._alone(self.runtime_stem(part, index) + (row.runtime or path))
        if runtime.endswith("kv_a_proj_with_mqa"):
            shares = ""
        return Place(
            row=row, part=part, layer=index, expert=expert, leaf=leaf, module=HFName(disk + path),
            runtime=VLLMName(runtime), shares=disk + shares if shares else "",
        )  # fmt: skip

    def _alone(self, runtime: str) -> str:
        """Latent attention without low-rank queries has nothing to fuse its first projection with."""
        if self.text_config.get("q_lora_rank", 0) is None and runtime.endswith("fused_qkv_a_proj"):
            return runtime.replace("fused_qkv_a_proj", "kv_a_proj_with_mqa")
        return runtime

    def _find_row(self, kind: str, template: str) -> tuple[Row, str] | None:
        rows = self._rows[kind]
        if template in rows:
            return rows[template], ""
        module, _, leaf = template.rpartition(".")
        return (rows[module], leaf) if module in rows else None


def _at(holder: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, None if there is none."""
    outer, _, inner = key.partition(".")
    value = holder.get(outer)
    return _at(value or {}, inner) if inner else value
