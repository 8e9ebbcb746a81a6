"""The vocabulary of a family table: what each tensor on disk is, and what vLLM calls it.

In: nothing. Out: the types that a family file (recipes/families/<model_type>.yaml) is read into:
rows, stems and config keys. `family_view` applies them to a config.json. Nothing here reads a
checkpoint or knows a scheme.

Easy to get wrong: vLLM compares `ignore` and `targets` with the prefix that it *constructs* a
module with. That prefix is fused (qkv_proj). In some families it has another number (MTP block 0 is
layer `num_hidden_layers`). It mostly lacks the `.mtp_block` of parameter names.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Literal, NewType

from .frozen import Raw, frozen

HFName = NewType("HFName", str)
"""A tensor or module name as in the source's safetensors files."""
VLLMName = NewType("VLLMName", str)
"""A module prefix as vLLM gives it to its quantization config."""

Role = Literal[
    # what recipes choose schemes for
    "attention", "linear_attention", "dense_mlp", "experts", "shared_experts",
    # kept as they are
    "indexer", "compressor", "router", "glue", "norm", "state", "embedding", "head", "table",
    "vision",
]  # fmt: skip
QUANTIZABLE_ROLES: tuple[Role, ...] = (
    "attention",
    "linear_attention",
    "dense_mlp",
    "shared_experts",
    "experts",
)
TABLE_ROLES: tuple[Role, ...] = ("embedding", "head", "table")
"""Groups of the backbone that stay as they are where no recipe names them."""
Part = Literal["backbone", "mtp"]

Proof = Literal["vllm", "vllm, attention by a reference", "source"]
"""How it is known that a draft computes as vLLM's does; docs/mtp.md says what each word means."""

INDEX = "(?:0|[1-9][0-9]{0,5})"
"""The index of a layer or an expert in a name, as a regex: as checkpoints write it, and not without
end.
"""


@frozen
class Row:
    """One module of a block.

    Attributes:
        path: module path under the stem, `{e}` for the index of an expert. For a parameter without
            a module, its full path.
        sides: of its weight, as sums of products of keys of config.json and whole numbers ("2
            hidden_size"; a list counts as its length); () where only the other layers show them.
        runtime: vLLM's path under the runtime stem where it differs: the fused module, or the
            router of experts.
        shares: modules with the same value (`{e}` filled in) are one fused parameter and need one
            global scale.
        why_kept: if not empty, the reason why no recipe quantizes the module. A quantized form in
            the source may stay.
        loads_quantized: whether vLLM's module has slots for packed weights and scales.
        aliases: other runtime names that some vLLM versions ask for.
        stacked: for a 3-D expert parameter [E, n * I, K], the projections along I. When it is
            quantized, each expert and projection becomes a tensor of its own under `runtime`.
        takes_tensor_scale: False where vLLM's fused module cannot load one scale for a whole
            tensor.
        in_every_layer: False where only layers of one kind have the module; the others do not miss
            it.
        where: what config.json says where a layer that has others of its parent module has it; of
            a list, the layer's entry.
        bias: the key of config.json that gives it a bias; "" where no key does.
        unit: a layer has all modules of a unit, or none; "" where the paths show what belongs
            together.
        interleaved: for q, k and v in one matrix, whose rows come in slices, each with rows of q,
            then of k, then of v: paths of the three modules that keepmtp writes instead.
        is_drafts_own: for an embedding or head of the MTP block: vLLM's draft keeps it. Other
            drafts get the target's once they are loaded. For a module of the backbone: the draft
            loads it too, for itself.
        joins: a second module of vLLM's that loads the same tensors: one for all layers of the
            block, which the quantization config is asked about by this name.
        table_scale: for a part of a table whose rows are looked up: path of the one scale that all
            parts share where they are stored in FP8, or of the table's own. NVFP4's ends in `_2`.
    """

    path: str
    role: Role
    sides: tuple[str, ...] = ()
    runtime: str = ""
    shares: str = ""
    why_kept: str = ""
    loads_quantized: bool = True
    aliases: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()
    takes_tensor_scale: bool = True
    in_every_layer: bool = True
    where: Raw = field(default_factory=dict, hash=False)
    bias: str = ""
    unit: str = ""
    interleaved: tuple[str, ...] = ()
    table_scale: str = ""
    is_drafts_own: bool = False
    joins: str = ""

    @property
    def in_vllm(self) -> str:
        """vLLM's path under the runtime stem."""
        return self.runtime or self.path

    @property
    def unstacked(self) -> tuple[str, ...]:
        """Paths of the tensors that a stacked parameter becomes: one for each expert and
        projection.
        """
        return tuple(f"{self.runtime}.{{e}}.{name}" for name in self.stacked)


@frozen
class Stem:
    """The prefix of a repeated block: `{i}` is the index on disk, `{n}` continues the count of the
    decoder layers.
    """

    disk: str
    runtime: str


@frozen
class Renames:
    """How vLLM changes names in a quantization config: `hf_to_vllm_mapper.get_rename_mapper()` of
    the target's class.

    vLLM replaces substrings first, then prefixes. It never renames a regex.
    """

    substrings: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def read(self, name: str) -> str:
        """A name as vLLM reads it."""
        for rules in (self.substrings, self.prefixes):
            for old, new in rules.items():
                if rules is self.substrings or name.startswith(old):
                    name = name.replace(old, new, 1)
        return name

    def sources(self, name: str) -> list[str]:
        """What a rule may have made this name of."""
        found = [name.replace(new, old, 1) for old, new in self.substrings.items() if new]
        for old, new in self.prefixes.items():
            if name.startswith(new):
                found.append(old + name.removeprefix(new))
        return found


@frozen
class Loader:
    """What vLLM's draft class does with a checkpoint that does not fit it.

    Attributes:
        unknown_name: the exception for a tensor without a parameter; "" where vLLM skips it in
            silence.
        drops_scales: vLLM skips a `.weight_scale` without a parameter in silence, outside experts.
        refuses_missing_mtp: vLLM raises if an MTP layer is absent. The other classes load nothing
            and draft from noise.
        takes_kv_scales: the class loads the scales of the KV cache inside the MTP layer, or leaves
            them alone.
        draft_kv_names: under which names it reads them: "usual" ones, vLLM's "own" alone
            (`self_attn.attn.k_scale`), or "" where it never does and computes with 1.
        backbone_takes_kv_scales: the target's class does so with those of the backbone.
        mtp_leaves: the leaves that a module of the MTP block may have; () for any.
        needs: keys of config.json that the classes read without a default.
        missing_count: the exception when config.json does not count MTP layers.
        num_layers_used: number of MTP layers that vLLM reads, where it ignores the others; 0 for
            all.
        builds_as_drafted: vLLM builds an MTP layer for each drafted token, and leaves alone those
            beyond.
        plain_alone: of embedding and head, what target or draft cannot load in a packed form -> the
            file of vLLM's class that builds it plain whatever the config says.
        fills_head: the draft fills a plain head of its own with the target's `weight`, before it
            gets the target's: codes of another width do not fit.
        plain_in_fp4: modules in vLLM that the draft builds plain under modelopt's NVFP4, whatever
            the config says.
        plain_where_excepted: what the names of the modules in vLLM begin with that the draft builds
            plain where GPTQ's `dynamic` excepts mtp; "" where it leaves that to the config.
        refuses_kv_scheme: what the target's class raises at compressed-tensors' kv_cache_scheme; ""
            where it reads one.
    """

    unknown_name: Literal["KeyError", "ValueError", ""] = "KeyError"
    drops_scales: bool = False
    refuses_missing_mtp: bool = False
    takes_kv_scales: bool = False
    draft_kv_names: Literal["usual", "own", ""] = "usual"
    backbone_takes_kv_scales: bool = True
    mtp_leaves: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    missing_count: Literal["ZeroDivisionError", "AttributeError", "NotImplementedError"] = (
        "ZeroDivisionError"
    )
    num_layers_used: int = 0
    builds_as_drafted: bool = False
    plain_alone: Mapping[str, str] = field(default_factory=dict)
    fills_head: bool = False
    plain_in_fp4: tuple[str, ...] = ()
    plain_where_excepted: str = ""
    refuses_kv_scheme: str = ""

    def most_layers(self, num_drafts: int) -> int:
        """MTP layers that vLLM builds at most, to draft `num_drafts` tokens a step; 0 for all."""
        if self.builds_as_drafted:
            return num_drafts
        return self.num_layers_used


@frozen
class Alias:
    """A tensor that some runtime wants in the MTP block although it equals one of the backbone."""

    path: str
    source: str
    reason: str


@frozen
class Layout:
    """Names of one architecture.

    Attributes:
        layers: the decoder layers.
        mtp: the MTP layers; None where they continue the decoder layers (`model.layers.{N}`).
        mtp_runtime: their prefix in vLLM, where they continue the decoder layers on disk but not in
            vLLM.
        top: modules outside layers.
        mtp_top: modules of the MTP block outside its layers; `{last}` is the index on disk of its
            last layer.
        opaque: (prefix on disk, prefix in vLLM, role) of parts that keepmtp copies whole.
        vision: their matrices by vLLM's names, `{}` for each number; () where vLLM builds all of
            them without a quantization config, None where it was not asked.
        unread: prefixes on disk of those parts that vLLM drops on purpose.
        head: the target's head on disk.
        draft_head: a head that the draft constructs with the quantization config although it uses
            the target's.
        renames: the mapper of the target's class; None where it has none.
        draft_reads_afresh: the draft reads the quantization config from config.json again, so the
            target's mapper has not changed it.
        draft_renames: the mapper of the draft's class in that case; None where it has none.
        draft_reads_text_config: it reads it from the language model's part of config.json; keepmtp
            writes it in both places.
        draft_renumbers: the draft adds the number of decoder layers to the layer in `mtp.` entries,
            but not under compressed-tensors.
    """

    layers: Stem
    mtp: Stem | None = None
    mtp_runtime: str = ""
    top: tuple[Row, ...]
    mtp_top: tuple[Row, ...] = ()
    opaque: tuple[tuple[str, str, Role], ...] = ()
    vision: tuple[Row, ...] | None = None
    unread: tuple[str, ...] = ()
    head: str = "lm_head.weight"
    draft_head: str = ""
    renames: Renames | None = None
    draft_reads_afresh: bool = False
    draft_renames: Renames | None = None
    draft_reads_text_config: bool = False
    draft_renumbers: bool = False


@frozen
class Draft:
    """What an MTP layer computes before and after its decoder layer, as vLLM's draft class does it.

    Paths are those on disk under the layer's stem, or full paths where `Layout.mtp_top` has them.
    The default names are DeepSeek's.

    Attributes:
        model_type: transformers builds the decoder layer with the configuration and classes of this
            model_type.
        classes: the first part of the names of those classes.
        decoder: class of the decoder layer; "" for `<classes>DecoderLayer`.
        rotary: class of the rotary embedding; "" for `<classes>RotaryEmbedding`, None where there
            is none.
        rope_types: kinds of rotary embedding that the layer takes by name, "own" for the one of its
            attention; () where the model has one kind.
        position_axes: 3 where the rotary embedding wants positions by axis (M-RoPE); for text they
            are equal.
        layers: one entry for each decoder layer of one MTP layer: what config.json would say for
            such a layer at index 0 of the backbone.
        renames: (path in a backbone layer, path in the MTP layer), where the names differ; first
            parts of paths.
        plain_residual: the block lacks the hyper-connections of the backbone's layers.
        embedding_norm: norm of the next token's embedding.
        hidden_norm: norm of the hidden state.
        projections: one matrix for both, concatenated; or one for the embedding and one for the
            hidden state, added.
        hidden_first: the hidden state comes before the embedding in the concatenation.
        final_norm: norm after the decoder layer; "" for none.
        head: a head of the draft's own; "" where it uses the target's.
        zeroes_first: the embedding at position 0 is zero.
        chains_normed: the next draft step reads the state after the final norm, not the one before
            it.
        reads_normed: the first step reads the target's state after its final norm.
        streams: key of config.json that counts residual streams of the hidden state; "" for one.
        joint_norm: `hidden_norm` is over all streams together, not over each one.
        collapse: class of the module that makes one stream of several before the final norm, the
            first part of its parameters' names, and that part on disk.
        can_keep_choice: later draft steps read the keys that the first one's indexer chose, if
            config.json says so (`index_share_for_mtp_iteration`).
        proof: what its results were compared with (`Proof`).
    """

    model_type: str
    classes: str
    decoder: str = ""
    rotary: str | None = ""
    rope_types: tuple[str, ...] = ()
    position_axes: int = 1
    layers: tuple[Raw, ...] = ({},)
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
    can_keep_choice: bool = False
    proof: Proof


@frozen
class Family:
    """A family table.

    Attributes:
        model_type: `config.json: model_type`, also the file's name.
        also: other model_types with the same tables (text-only twins, ...).
        architectures: for releases with the model_type of another family: the architectures that
            identify them.
        layouts: by `architectures[0]`; "*" is for all others.
        with_vision: the architecture that vLLM gives a config.json with a `vision_config`; "" for
            the one it has.
        block: modules of a decoder layer; an MTP layer may have them too.
        linear_block: modules that only a linear-attention layer has, or that differ there.
        mtp_block: modules that only an MTP layer has, or that differ there.
        mtp_lacks: paths of `block` that an MTP layer does not have.
        num_layers_key: the config key that counts the decoder layers; "" where the checkpoint is
            only a draft.
        layer_list_keys: config keys whose list has one entry for each decoder layer, before the key
            that counts them.
        layers_at_runtime: decoder layers in vLLM for one on disk; the number of an MTP layer
            depends on it.
        mtp_count_keys: config keys that promise MTP layers. The first one found counts, at top
            level or in text_config; a dot goes one level down.
        mtp_count_default: number of layers where no key gives one: what vLLM assumes, or what the
            releases have.
        mtp_parts_keys: config keys whose list has one entry for each layer on disk of one MTP
            layer.
        one_mixer: a layer has attention or experts, never both.
        experts_by: the config key that says which decoder layers have routed experts: the first of
            them, a list with an entry for each layer, or a text with their numbers.
        activations: the values of hidden_act that its classes take; () for all.
        drafts_by_turns: each draft step runs the next MTP layer, as vLLM 0.32.0
            v1/spec_decode/step3p5.py does; llm_base_proposer.py runs the first one at every step.
        layer_types_count_mtp: `layer_types` in config.json also lists the MTP layers, after the
            decoder layers.
        aliases: copies to add to an MTP layer when the source has none.
        loader: what vLLM's draft class does with faults.
        config_extras: keys that this family's runtime wants inside quantization_config.
        config_changes: keys of config.json that differ in what keepmtp writes, because it writes
            other names.
        rerouted_format: a `format` that makes vLLM read only experts and leave linears plain.
            keepmtp writes mixed-precision instead.
        modelopt_by_module: vLLM builds a module that no exclude entry reaches: a head without a
            name, or attention that is plain under one algorithm. modelopt's config then names the
            algorithm of each module (MIXED_PRECISION).
        fp8_class: vLLM's name for the family's own class of `quant_method: fp8`, whose routed
            experts are MXFP4 or NVFP4, with scales that are called `.scale` on disk; "" for the
            usual one.
        released_as: quant_method of its release, where that is one that tools write, too.
        table_key: key of text_config that makes vLLM hold a table in FP8 ("float8_e4m3fn") or NVFP4
            ("nvfp4"), whatever the quantization config says; "" where a table is always FP8.
        mtp_source_prefixes: (prefix in a checkpoint of the MTP block alone, prefix in a release),
            where they differ.
        norms_add_one: the model adds one to the weights of its norms, so a norm of zeros changes
            nothing.
        embeddings: the prefix with which vLLM asks its quantization config about an embedding, by
            part; "{}" for the module's own. Others are plain whatever the config says.
        draft: how an MTP layer computes; None where keepmtp cannot run it, so cannot calibrate or
            measure it.
        no_draft: why not.
        built_as: the model_type whose classes in transformers are those of the backbone, where none
            has this name.
        no_fp8_cache: why its attention layers have no scales of an FP8 cache, where the tables do
            not show it.
        no_backbone: why the backbone cannot be calibrated, where transformers would say it in words
            of its classes.
        attention_backends: GPU -> the value of `--attention-backend` with which vLLM serves what is
            not in the release's own form, where its own choice takes that form alone.
        method: what vLLM calls this way of drafting (`--speculative-config`).
        tool_parser: vLLM's name for what reads tool calls (`--tool-call-parser`; 0.32.0
            tool_parsers/__init__.py); "" where it has none for all releases of the family.
        reasoning_parser: that for what reads thoughts (`--reasoning-parser`; 0.32.0
            reasoning/__init__.py).
        dspark: the table of those releases whose block is DSpark's stages; None where vLLM has no
            such draft.
        pipeline: vLLM drafts with a pipeline's stages, also where the block has no embedding.
    """

    model_type: str
    also: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    layouts: Mapping[str, Layout]
    with_vision: str = ""
    block: tuple[Row, ...] = ()
    linear_block: tuple[Row, ...] = ()
    mtp_block: tuple[Row, ...] = ()
    mtp_lacks: tuple[str, ...] = ()
    num_layers_key: str = "num_hidden_layers"
    layer_list_keys: tuple[str, ...] = ()
    layers_at_runtime: int = 1
    mtp_count_keys: tuple[str, ...] = ("num_nextn_predict_layers",)
    mtp_count_default: int = 0
    mtp_parts_keys: tuple[str, ...] = ()
    one_mixer: bool = False
    experts_by: str = "first_k_dense_replace"
    activations: tuple[str, ...] = ("silu",)
    drafts_by_turns: bool = False
    layer_types_count_mtp: bool = False
    aliases: tuple[Alias, ...] = ()
    loader: Loader = Loader()
    config_extras: Raw = field(default_factory=dict)
    config_changes: Raw = field(default_factory=dict)
    rerouted_format: str = ""
    modelopt_by_module: bool = False
    fp8_class: str = ""
    released_as: str = ""
    table_key: str = ""
    mtp_source_prefixes: tuple[tuple[str, str], ...] = ()
    norms_add_one: bool = False
    embeddings: Mapping[Part, str] = field(default_factory=dict)
    draft: Draft | None = None
    no_draft: str = ""
    built_as: str = ""
    no_fp8_cache: str = ""
    no_backbone: str = ""
    attention_backends: Mapping[str, str] = field(default_factory=dict)
    method: Literal["mtp", "dspark"] = "mtp"
    tool_parser: str = ""
    reasoning_parser: str = ""
    dspark: "Family | None" = None
    pipeline: bool = True
