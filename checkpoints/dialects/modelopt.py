"""`quant_method: modelopt` and hf_quant_config.json: what vLLM builds for a module, and the config
that keepmtp writes.

In: the quantization config. Out: a `ModelOpt` as vLLM reads it; or, of algorithms that it does not
load, an `UnknownDialect`. And the way back: the named modules of a checkpoint -> one algorithm, or
MIXED_PRECISION with an algorithm for each module, and the names of what stays plain.

Easy to get wrong: vLLM compares an entry as a whole name, then as a part of one, then as a glob,
and its mapper rewrites entries before that. What is written must name exactly the plain modules
after it all.

Source: vLLM 0.32.0 quantization/modelopt.py (ModelOptQuantConfigBase.from_config and
is_layer_excluded, ModelOptMixedPrecisionConfig._resolve_quant_algo), model_loader/weight_utils.py
for the producer's name. Compared with the real functions by
tests/checkpoints/dialects/test_dialects.py.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, cached_property

from ... import __version__
from ...recipes.conventions import ALGORITHMS as OF_SCHEMES
from ...recipes.conventions import MIXED_FOR_EXPERTS
from ...recipes.errors import RecipeError
from ...recipes.family import VLLMName
from ...recipes.family_view import FamilyView
from ...recipes.frozen import Json
from ...recipes.renamer import Renamer, renamer
from ...recipes.runtimes.vllm import holds
from .dialect import (
    PLAIN,
    UNKNOWN,
    Dialect,
    Exceptions,
    Kind,
    Resolution,
    UnknownDialect,
    VLLMModule,
)
from .given import ModelOptGiven, Raw, read_given
from .matching import FUSED, parts_of, plain, raises, registers, skipped
from .modules import NamedModule, RuntimeModule, runtime_modules

MIXED = "MIXED_PRECISION"
_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
FOUR_BITS = ("NVFP4", "W4A16_NVFP4")
OF_MODULES = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", *FOUR_BITS, "MXFP8")
ALGORITHMS = (*OF_MODULES, MIXED)
_INVERSE = frozenset({"weight", "weight_scale_inv"})
# What one algorithm of all modules, or one of a module in MIXED_PRECISION, is for others than
# linear modules of vLLM.
# Blocks there have the scale of native FP8, which linear modules of vLLM have not.
_OF_ONE = {"FP8_PER_CHANNEL_PER_TOKEN": "FP8", "FP8_PB_WO": "FP8"}
OF_MIXED = {**dict.fromkeys(_BLOCKS, "inverse blocks"), "FP8_PER_CHANNEL_PER_TOKEN": "plain"}
# Prefixes that vLLM tries in the place of others as it looks for a module in quantized_layers.
_ALIKE = {
    "language_model.model.": "model.language_model.",
    "model.language_model.": "language_model.model.",
}


@dataclass(frozen=True, kw_only=True)
class ModelOpt(Dialect):
    """`quant_method: modelopt`, or hf_quant_config.json.

    Attributes:
        algorithm: quant_algo, upper case.
        quantized_layers: module -> quant_algo, for MIXED_PRECISION.
        group_size: of NVFP4.
        looks_above: routed experts without an entry get the first one of their parent.
    """

    algorithm: str
    quantized_layers: Mapping[str, str]
    group_size: int
    block: int
    name: str = "modelopt"
    looks_above: bool = True

    # Whole names, parts of names and globs.
    exceptions = Exceptions(
        ("ignore", "exclude_modules", "ignored_layers"),
        of_stem="{}*",
        may_be_on_disk=True,
        parts_come_first=True,
    )

    def reads(self, word: str) -> tuple[str, ...]:
        """As the mapper of vLLM's class leaves it: one name or two."""
        return self.rename.modelopt(word)

    def scheme_of(self, answer: Resolution) -> str:
        """keepmtp's word for what a module becomes; "" where compressed-tensors has none like
        it.
        """
        kind = _kind_of(answer.built)
        for scheme, algorithm in OF_SCHEMES.items():
            if kind == _kind_of(modelopt_built(algorithm, 16, 128)):
                return scheme
        return ""

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_excluded`, then the one algorithm, or `_resolve_quant_algo` for
        MIXED_PRECISION.
        """
        is_experts = kind == "experts"
        if is_experts:
            shards = ()
        answer = skipped(module, shards, self.words)
        if answer is not None:
            return answer
        # Heads too: what no entry excludes is quantized.
        pattern = _excluding(self.words, module)
        if pattern is not None:
            return plain(pattern)
        algorithm = self.algorithm
        if algorithm != MIXED:
            if is_experts:
                # vLLM's have one FP8 method, with one scale a tensor, whatever the algorithm is.
                algorithm = _OF_ONE.get(algorithm, algorithm)
            return Resolution(modelopt_built(algorithm, self.group_size, self.block))
        entry, algorithm = self._named(module, shards)
        if algorithm is None:
            error = f"ValueError: Mixed quant_algo within fused layer {module}"
            return raises(error, entry, "algorithms")
        if not entry:
            return plain()
        if is_experts:
            algorithm = OF_MIXED.get(algorithm, algorithm)
        built = modelopt_built(algorithm, self.group_size, self.block)
        if built == UNKNOWN and not is_experts:
            built = PLAIN
        return Resolution(built, entry)

    def hits(self, read: Sequence[str], name: str) -> bool:
        """As `resolve` does, with this entry only."""
        skips = skipped(name, (), read)
        return skips is not None or _excluding(read, name) is not None

    def _named(self, module: str, shards: Sequence[str]) -> tuple[str, str | None]:
        """The entry of quantized_layers for a module, "" for none, and its algorithm: None where
        shards differ.
        """
        layers = self.quantized_layers
        spellings = _spellings(module)
        for name in spellings:
            if name in layers:
                return name, layers[name]
        named = dict[str, str]()
        for shard in shards or parts_of(module, "linear", FUSED, ()):
            for name in _spellings(shard):
                if name in layers:
                    named[name] = layers[name]
        for name, algorithm in named.items():
            if len({*named.values()}) > 1:
                return name, None
            return name, algorithm
        if module.endswith(".experts") and self.looks_above:
            spellings.append(module.removesuffix(".experts"))
        for name in spellings:
            if name in self._below:
                return self._below[name]
        return "", ""

    @cached_property
    def _below(self) -> Mapping[str, tuple[str, str]]:
        """The first of quantized_layers below each module, with its algorithm: a list may have an
        entry an expert.
        """
        first = dict[str, tuple[str, str]]()
        for name, algorithm in self.quantized_layers.items():
            at = name.find(".")
            while at >= 0:
                first.setdefault(name[:at], (name, algorithm))
                at = name.find(".", at + 1)
        return first


def read_modelopt(
    raw: Raw, hf_quant_config: Raw, rename: Renamer, vllm: str
) -> ModelOpt | UnknownDialect:
    """The config as a version of vLLM reads it: in the form of config.json, or under `quantization`
    as in hf_quant_config.json.

    Raises:
        CheckpointError: a key has another type than vLLM reads.
    """
    if reads_other_file(raw) and hf_quant_config:
        raw = {"quant_method": "modelopt", **hf_quant_config}
    given = read_given(ModelOptGiven, raw)
    holder = given.quantization or given
    listed = holder.ignore
    if given.quantization:
        listed = holder.exclude_modules
    if listed is None and holds(">=0.33", vllm):
        listed = holder.exclude_modules
    listed = listed or holder.ignored_layers
    algorithm = holder.quant_algo
    if not algorithm and given.quant_method == "mxfp8":
        algorithm = "MXFP8"
    groups = given.config_groups.values()
    if (
        algorithm == "NVFP4"
        and groups
        and all(group.get("input_activations") is None for group in groups)
    ):
        algorithm = "W4A16_NVFP4"
    if algorithm not in ALGORITHMS:
        return UnknownDialect(name=f"modelopt {algorithm or 'without quant_algo'}")
    layers = dict[str, str]()
    sizes = set[int]()
    for name, row in holder.quantized_layers.items():
        layers[rename.name(name)] = row.quant_algo
        if row.quant_algo in _BLOCKS:
            sizes.add(row.group_size)
    return ModelOpt(
        algorithm=algorithm,
        quantized_layers=layers,
        group_size=holder.group_size or 16,
        listed={"exclude": listed},
        block=min(sizes, default=128),
        rename=rename,
    )


def reads_other_file(raw: Raw) -> bool:
    """Whether vLLM reads hf_quant_config.json, its exclusions too, in place of config.json's
    quantization_config.

    vLLM 0.32.0 model_loader/weight_utils.py, get_quant_config.
    """
    given = read_given(ModelOptGiven, raw)
    return (given.quantization or given).quant_algo == MIXED and "quantized_layers" not in raw


@cache
def modelopt_built(algorithm: str, group_size: int, block: int) -> VLLMModule:
    """What a quant_algo builds."""
    inputs = frozenset({"input_scale"})
    match algorithm:
        case "NVFP4":
            return registers("nvfp4_modelopt", *inputs, group_size=group_size)
        case "W4A16_NVFP4":
            return registers("nvfp4_modelopt", optional=inputs, group_size=group_size)
        case "FP8":
            return registers("fp8_tensor", *inputs)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return registers("fp8_channel", scale_ndim=1)
        case "FP8_PB_WO":
            return registers("fp8_block", block=(block, block), scale_ndim=4)
        case "inverse blocks":
            return inverse_blocks(block, block)
        case "MXFP8":
            return registers("mxfp8")
        case "plain":
            return PLAIN
    return UNKNOWN


def layer_row(algorithm: str) -> Json:
    """What MIXED_PRECISION's table says of a module."""
    row: Json = {"quant_algo": algorithm}
    if algorithm in FOUR_BITS:
        row["group_size"] = 16
    return row


def inverse_blocks(rows: int, columns: int) -> VLLMModule:
    """FP8 in blocks under the names of native FP8."""
    return registers("fp8_block", leaves=_INVERSE, block=(rows, columns), scale_ndim=2)


def _kind_of(built: VLLMModule) -> tuple[object, ...]:
    """What tells the algorithms of `conventions.ALGORITHMS` apart."""
    return built.form, built.group_size, built.block, "input_scale" in built.leaves


def _excluding(entries: Sequence[str], module: str) -> str | None:
    """The first entry that excludes a module by substring or glob; an empty entry excludes
    everything.
    """
    # So `model.layers.1` excludes layers 10 to 19 as well.
    for entry in entries:
        if entry != module and entry in module:
            return entry
    for entry in entries:
        if fnmatch(module, entry):
            return entry
    return None


def _spellings(name: str) -> list[str]:
    """The names by which vLLM looks for a module in quantized_layers."""
    found = [name]
    if name.endswith(".lm_head"):
        found.append("lm_head")
    for prefix, other in _ALIKE.items():
        if name.startswith(prefix):
            found.append(other + name.removeprefix(prefix))
    return found


# --- what is written ------------------------------------------------------------------------------


def modelopt_config(view: FamilyView, modules: Iterable[NamedModule]) -> Json:
    """The value of config.json's `quantization_config`.

    Args:
        view: the family's names.
        modules: quantized ones in schemes of `conventions.ALGORITHMS`.

    Raises:
        RecipeError: several algorithms, and vLLM's mapper turns every spelling of a module into
            another name.
    """
    fused = runtime_modules(modules)
    schemes = set[str]()
    is_mixed = view.family.modelopt_by_module
    for module in fused:
        schemes.add(module.scheme)
        is_mixed |= module.scheme in MIXED_FOR_EXPERTS and not module.members
    schemes.discard("")
    is_mixed |= len(schemes) > 1
    names = _Names(view)
    config: Json = {
        "quant_method": "modelopt",
        "quant_algo": OF_SCHEMES[next(iter(schemes), "NVFP4")],
    }
    if schemes & {"NVFP4", "NVFP4A16"}:
        config["group_size"] = 16
    if is_mixed:
        config["quant_algo"] = MIXED
        config["quantized_layers"] = names.quantized_layers(fused)
    return {
        **config,
        "ignore": names.excluded(fused),
        "kv_cache_scheme": None,
        **view.family.config_extras,
    }


def hf_quant_config(config: Raw) -> Json:
    """hf_quant_config.json, which agrees with a `quantization_config` in modelopt's dialect.

    Readers know the file by its producer's name: vLLM refuses any other.
    """
    cache = None
    if config.get("kv_cache_scheme"):
        cache = "FP8"
    inner: Json = {"quant_algo": config["quant_algo"], "kv_cache_quant_algo": cache}
    for key in ("group_size", "quantized_layers"):
        if key in config:
            inner[key] = config[key]
    inner["exclude_modules"] = config["ignore"]
    return {
        "producer": {"name": "modelopt", "version": f"keepmtp-{__version__}"},
        "quantization": inner,
    }


# --- vLLM's names ---------------------------------------------------------------------------------


class _Names:
    """The names of a checkpoint's modules as vLLM's mappers leave them.

    Attributes:
        draft_stems: runtime prefixes of the MTP layers and of what is next to them, each with its
            last dot.
        draft_heads: heads that the draft builds with the quantization config: placeholders for the
            target's.
    """

    def __init__(self, view: FamilyView) -> None:
        stems = dict[str, None]()
        self.view = view
        self.draft_heads = list[str]()
        for index in range(view.num_mtp_layers):
            stem = view.runtime_stem("mtp", view.first_mtp_index + index)
            # The block as a whole: `mtp.layers.0*` misses `mtp.fc` (vllm #38832).
            stems[re.sub(r"^mtp\..*", "mtp.", stem)] = None
            for row in view.family.mtp_block:
                if row.role == "head":
                    self.draft_heads.append(stem + (row.runtime or row.path))
        if view.layout.draft_head:
            self.draft_heads.append(view.layout.draft_head)
        self.draft_stems = tuple(stems)
        self._mappers = (renamer(view.config), renamer(view.config, "mtp"))

    def mapper(self, name: str) -> Renamer:
        """The mapper that vLLM applies to entries for a module of this name."""
        return self._mappers[name.startswith(self.draft_stems)]

    def written(self, module: RuntimeModule) -> list[str]:
        """A module by vLLM's name, as it must be written, a glob where the mapper spoils every
        name; and by its names on disk, where these say something else.
        """
        mapper = self.mapper(module.name)
        # What the mapper turns into vLLM's name; names on disk follow, for other readers.
        first = mapper.before(module.name, module.asked) or f"*{module.name}"
        names = [first]
        for name in module.members:
            if name != first and mapper.name(name) != module.name:
                names.append(name)
        return names

    def surviving(self, entry: str) -> str:
        """How to write an entry of the exclude list, so that it is still itself after the
        mapper.
        """
        mapper = self.mapper(entry)
        if entry in mapper.modelopt(entry):
            return entry
        return mapper.before(entry) or f"*{entry}"

    def quantized_layers(self, modules: Iterable[RuntimeModule]) -> dict[str, Json]:
        """MIXED_PRECISION's table, which has whole names and no globs."""
        layers = dict[str, Json]()
        for module in modules:
            if not module.scheme:
                continue
            names = self.written(module)
            if names[0].startswith("*"):
                raise RecipeError(
                    "format: modelopt",
                    "one algorithm must be enough for modelopt's config of a "
                    f"{self.view.family.model_type}",
                    got=f"several, and vLLM renames every entry that could name {module.name}",
                    cure="Use one scheme, or compressed-tensors",
                )
            layers |= dict.fromkeys(names, layer_row(OF_SCHEMES[module.scheme]))
        return layers

    def excluded(self, modules: Sequence[RuntimeModule]) -> list[str]:
        """Exactly the plain modules: an MTP block that is plain as a whole by glob, all others by
        name.
        """
        quantized = ""
        covered = self.draft_stems
        for module in modules:
            if module.scheme:
                quantized += f"{module.name} "
                if module.name.startswith(covered):
                    covered = ()
        entries = list[str]()
        # By whole names: a part of one would exclude more.
        for module in modules:
            if not module.scheme and not module.name.startswith(covered):
                entries += self.written(module)
        for stem in covered:
            entries.append(self.surviving(f"{stem}*"))
        for head in self.draft_heads:
            # A part of a name is enough to exclude a quantized one.
            if head not in quantized and not head.startswith(covered):
                entries.append(self.surviving(head))
        for _, runtime, _ in self.view.layout.opaque:
            entries.append(f"{runtime}*")
        if "lm_head" not in quantized:
            entries.append("lm_head")
        return [*dict.fromkeys(entries)]
