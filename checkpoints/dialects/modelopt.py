"""`quant_method: modelopt` and hf_quant_config.json: what vLLM and SGLang build for a module, and
the config that keepmtp writes.

In: the quantization config. Out: a `ModelOpt` as one of the servers reads it; or, of algorithms
that it does not load, an `UnknownDialect` for vLLM and one exception for SGLang. And the way back:
the named modules of a checkpoint -> one algorithm, or MIXED_PRECISION with an algorithm for each
module, and the names of what stays plain.

Easy to get wrong: vLLM compares an entry as a whole name, then as a part of one, then as a glob,
and its mapper rewrites entries before that. What is written must name exactly the plain modules
after it all, for both servers.

Source: vLLM 0.32.0 quantization/modelopt.py (ModelOptQuantConfigBase.from_config and
is_layer_excluded, ModelOptMixedPrecisionConfig._resolve_quant_algo), model_loader/weight_utils.py
for the producer's name; SGLang 0.5.23 configs/model_config.py (_parse_modelopt_quant_config),
layers/quantization/modelopt_quant.py and layers/quantization/utils.py (is_layer_skipped). Compared
with the real functions by tests/checkpoints/dialects/test_dialects.py and
tests/validate/check/test_sglang.py.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from ...recipes.runtimes import Runtime
from ...recipes.runtimes.sglang import (
    container,
    excluding_entry,
    is_excluded,
    sglang_model,
    sglang_stem,
)
from ...recipes.runtimes.vllm import holds
from .dialect import (
    PLAIN,
    UNKNOWN,
    ConfigEntry,
    Exceptions,
    Kind,
    Resolution,
    UnknownDialect,
    VLLMModule,
)
from .given import ModelOptGiven, ModelOptInner, Raw, read_given
from .matching import FUSED, OneAnswer, plain, raises, read_by_sglang, registers, skipped
from .modules import NamedModule, RuntimeModule, concrete, runtime_modules
from .sglang import no_draft, sglang_asks, unnamed

_MIXED = "MIXED_PRECISION"
_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
_FOUR_BITS = ("NVFP4", "W4A16_NVFP4")
_OF_MODULES = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", *_FOUR_BITS, "MXFP8")
ALGORITHMS = (*_OF_MODULES, _MIXED)
# SGLang's files that make an obstacle.
_CONFIG = "layers/quantization/modelopt_quant.py"
_METHODS = "configs/model_config.py"
_CODECS = ("IQ2_XS", "IQ2_XXS", "Q8_0")
# What one algorithm of all modules, or one of a module in MIXED_PRECISION, is for others than
# linear modules of vLLM.
# Blocks there have the scale of native FP8, which linear modules of vLLM have not.
_OF_ONE = {"FP8_PER_CHANNEL_PER_TOKEN": "FP8", "FP8_PB_WO": "FP8"}
_OF_MIXED = {**dict.fromkeys(_BLOCKS, "inverse blocks"), "FP8_PER_CHANNEL_PER_TOKEN": "plain"}
# Prefixes that a server tries in the place of others as it looks for a module in quantized_layers.
_ALIKE: Mapping[Runtime, Mapping[str, tuple[str, ...]]] = {
    "vllm": {
        "language_model.model.": ("model.language_model.",),
        "model.language_model.": ("language_model.model.",),
    },
    "sglang": {
        "language_model.model.": ("model.language_model.",),
        "model.language_model.": ("language_model.model.", "model."),
        "model.": ("model.language_model.",),
    },
}


@dataclass(frozen=True, kw_only=True)
class ModelOpt:
    """`quant_method: modelopt`, or hf_quant_config.json.

    Attributes:
        algorithm: quant_algo, upper case.
        exclude: entries after renaming.
        quantized_layers: module -> quant_algo, for MIXED_PRECISION.
        group_size: of NVFP4.
        name: the server's name for its reader.
        codecs: algorithms of blocks that are packed as GGML's, whose tensors the check does not
            know.
        rename: the mapper of the class that reads it.
    """

    algorithm: str
    exclude: tuple[str, ...]
    quantized_layers: Mapping[str, str]
    group_size: int
    entries: tuple[ConfigEntry, ...]
    block: int = 128
    runtime: Runtime = "vllm"
    name: str = "modelopt"
    codecs: tuple[str, ...] = ()
    rename: Renamer

    # Whole names, parts of names and globs.
    exceptions = Exceptions(
        ("ignore", "exclude_modules", "ignored_layers"),
        of_stem="{}*",
        may_be_on_disk=True,
        parts_come_first=True,
    )

    def reads(self, entry: str) -> ConfigEntry:
        """As the mapper of vLLM's class leaves it: one name or two."""
        return ConfigEntry("exclude", entry, self.rename.modelopt(entry))

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
        is_vllm = self.runtime == "vllm"
        is_experts = kind == "experts"
        if is_experts:
            shards = ()
        if is_vllm or not is_experts:
            answer = skipped(self.runtime, module, shards, self.exclude)
            if answer is not None:
                return answer
        # Heads too: what no entry excludes is quantized.
        excluding = _excluded_by_vllm if is_vllm else excluding_entry
        pattern = excluding(self.exclude, module)
        if pattern is not None:
            return plain(pattern)
        algorithm = self.algorithm
        if algorithm != _MIXED:
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
        if is_experts or not is_vllm:
            algorithm = _OF_MIXED.get(algorithm, algorithm)
        built = modelopt_built(algorithm, self.group_size, self.block)
        is_known = is_vllm and (is_experts or algorithm in self.codecs)
        if built == UNKNOWN and not is_known:
            built = PLAIN
        return Resolution(built, entry)

    def hits(self, entry: ConfigEntry, name: str) -> bool:
        """As `resolve` does in vLLM, with this entry only."""
        skips = skipped("vllm", name, (), entry.read)
        return skips is not None or _excluded_by_vllm(entry.read, name) is not None

    def _named(self, module: str, shards: Sequence[str]) -> tuple[str, str | None]:
        """The entry of quantized_layers for a module, "" for none, and its algorithm: None where
        shards differ.
        """
        layers = self.quantized_layers
        spellings = _spellings(self.runtime, module)
        for name in spellings:
            if name in layers:
                return name, layers[name]
        if self.runtime == "vllm" and not shards:
            parent, _, last = module.rpartition(".")
            shards = [f"{parent}.{part}" for part in FUSED.get(last, ())]
        named = list[str]()
        for shard in shards:
            for name in _spellings(self.runtime, shard):
                if name in layers:
                    named.append(name)
        if named:
            are_equal = len({layers[name] for name in named}) == 1
            return named[0], layers[named[0]] if are_equal else None
        if self.runtime == "vllm" and module.endswith(".experts"):
            spellings = (*spellings, module.removesuffix(".experts"))
        for name in spellings:
            if name in self._first_below:
                return self._first_below[name]
        return "", ""

    @cached_property
    def _first_below(self) -> Mapping[str, tuple[str, str]]:
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
    listed = listed or holder.ignored_layers or ()
    algorithm = holder.quant_algo or ""
    if not algorithm and given.quant_method == "mxfp8":
        algorithm = "MXFP8"
    groups = (given.config_groups or {}).values()
    if algorithm == "NVFP4" and groups and all(group.input_activations is None for group in groups):
        algorithm = "W4A16_NVFP4"
    if algorithm not in ALGORITHMS:
        return UnknownDialect(f"modelopt {algorithm or 'without quant_algo'}")
    entries = list[ConfigEntry]()
    exclude = list[str]()
    for written in listed:
        entry = ConfigEntry("exclude", written, rename.modelopt(written))
        entries.append(entry)
        exclude += entry.read
    codecs = ()
    if holds(">=0.32", vllm):
        codecs = _CODECS
    return ModelOpt(
        algorithm=algorithm,
        exclude=tuple(exclude),
        quantized_layers=_layers(holder, rename),
        group_size=holder.group_size or 16,
        entries=tuple(entries),
        block=min(_block_sizes(holder), default=128),
        codecs=codecs,
        rename=rename,
    )


def read_sglang_modelopt(raw: Raw, rename: Renamer) -> ModelOpt | OneAnswer:
    """The config as SGLang reads it: that of config.json, or `quantization` of
    hf_quant_config.json.

    Raises:
        CheckpointError: a key has another type than is read, or an entry is no glob.
    """
    given = read_given(ModelOptGiven, raw)
    holder = given.quantization or given
    algorithm = holder.quant_algo or ""
    layers = _layers(holder, rename)
    listed = holder.ignore
    if given.quantization or listed is None:
        listed = holder.exclude_modules
    name = "modelopt"
    error = ""
    sizes = _block_sizes(holder)
    # It has one reader for FP8, one for NVFP4 and one for both; without an NVFP4 layer it takes
    # MIXED_PRECISION for W4AFP8, which is another thing.
    if algorithm == _MIXED and {*_FOUR_BITS}.isdisjoint(layers.values()):
        name = "w4afp8"
        error = "ValueError: MIXED_PRECISION without an NVFP4 layer is read as W4AFP8"
    elif algorithm == _MIXED:
        name = "modelopt_mixed"
        if len(sizes) > 1:
            error = "ValueError: all block-FP8 layers must use one group_size"
    elif algorithm == "FP8":
        name = "modelopt_fp8"
    elif "FP4" in algorithm:
        name = "modelopt_fp4"
        algorithm = algorithm.replace("NVFP4_AWQ", "NVFP4")
        if algorithm not in _FOUR_BITS:
            error = f"ValueError: ModelOpt currently only supports {_FOUR_BITS}"
    else:
        error = (
            "ValueError: ModelOptFp8Config only supports regular FP8 quantization, but found "
            f"{algorithm!r}"
        )
    if error:
        return OneAnswer(name, raises(error))
    return ModelOpt(
        algorithm=algorithm,
        exclude=read_by_sglang(listed or (), rename),
        quantized_layers=layers,
        group_size=holder.group_size or 16,
        entries=(),
        block=min(sizes, default=128),
        runtime="sglang",
        name=name,
        rename=rename,
    )


def reads_other_file(raw: Raw) -> bool:
    """Whether vLLM reads hf_quant_config.json, its exclusions too, in place of config.json's
    quantization_config.

    vLLM 0.32.0 model_loader/weight_utils.py, get_quant_config.
    """
    given = read_given(ModelOptGiven, raw)
    return (given.quantization or given).quant_algo == _MIXED and "quantized_layers" not in raw


@cache
def modelopt_built(algorithm: str, group_size: int, block: int) -> VLLMModule:
    """What a quant_algo builds."""
    two = ("weight", "weight_scale")
    inputs = frozenset({"input_scale"})
    match algorithm:
        case "NVFP4":
            leaves = (*two, "weight_scale_2", *inputs)
            return registers("nvfp4_modelopt", *leaves, group_size=group_size)
        case "W4A16_NVFP4":
            leaves = (*two, "weight_scale_2")
            return registers("nvfp4_modelopt", *leaves, optional=inputs, group_size=group_size)
        case "FP8":
            return registers("fp8_tensor", *two, *inputs)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return registers("fp8_channel", *two, scale_ndim=1)
        case "FP8_PB_WO":
            return registers("fp8_block", *two, block=(block, block), scale_ndim=4)
        case "inverse blocks":
            return inverse_blocks(block, block)
        case "MXFP8":
            return registers("mxfp8", *two, group_size=32)
        case "plain":
            return PLAIN
    return UNKNOWN


def algorithm_of(form: str) -> str:
    """The algorithm that builds a stored form; "" where none does."""
    built = ((algorithm, modelopt_built(algorithm, 16, 128)) for algorithm in _OF_MODULES)
    return next((algorithm for algorithm, module in built if module.form == form), "")


def layer_row(algorithm: str) -> Json:
    """What MIXED_PRECISION's table says of a module."""
    row: Json = {"quant_algo": algorithm}
    if algorithm in _FOUR_BITS:
        row["group_size"] = 16
    return row


def inverse_blocks(rows: int, columns: int) -> VLLMModule:
    """FP8 in blocks under the names of native FP8."""
    return registers("fp8_block", "weight", "weight_scale_inv", block=(rows, columns), scale_ndim=2)


def _kind_of(built: VLLMModule) -> tuple[object, ...]:
    """What tells the algorithms of `conventions.ALGORITHMS` apart."""
    return built.form, built.group_size, built.block, "input_scale" in built.leaves


def _layers(holder: ModelOptInner, rename: Renamer) -> dict[str, str]:
    rows = (holder.quantized_layers or {}).items()
    return {rename.name(name): row.quant_algo or "" for name, row in rows}


def _block_sizes(holder: ModelOptInner) -> set[int]:
    rows = (holder.quantized_layers or {}).values()
    return {row.group_size or 128 for row in rows if row.quant_algo in _BLOCKS}


def _excluded_by_vllm(entries: Sequence[str], module: str) -> str | None:
    """The first entry that excludes a module by substring or glob; an empty entry excludes
    everything.
    """
    # So `model.layers.1` excludes layers 10 to 19 as well.
    stripped = module.removeprefix("language_model.")
    for entry in entries:
        if entry != module and (entry in module or entry in stripped):
            return entry
    return next((entry for entry in entries if fnmatch(module, entry)), None)


def _spellings(runtime: Runtime, name: str) -> tuple[str, ...]:
    """The names by which a server looks for a module in quantized_layers."""
    found = [name]
    if name.endswith(".lm_head"):
        found.append("lm_head")
    for prefix, others in _ALIKE[runtime].items():
        if name.startswith(prefix):
            found += [other + name.removeprefix(prefix) for other in others]
            break
    return tuple(dict.fromkeys(found))


# --- what is written ------------------------------------------------------------------------------


def modelopt_config(view: FamilyView, modules: Iterable[NamedModule]) -> tuple[Json, list[str]]:
    """The value of config.json's `quantization_config`, and what stands against SGLang.

    Args:
        view: the family's names.
        modules: quantized ones in schemes of `conventions.ALGORITHMS`.

    Raises:
        RecipeError: several algorithms, and vLLM's mapper turns every spelling of a module into
            another name.
    """
    modules = list(modules)
    fused = runtime_modules(modules)
    schemes = {module.scheme for module in fused if module.scheme}
    mixed = [module for module in fused if module.scheme in MIXED_FOR_EXPERTS]
    is_mixed = len(schemes) > 1 or view.family.modelopt_by_module
    is_mixed |= any(not module.members for module in mixed)
    names = _Names(view)
    config: Json = {
        "quant_method": "modelopt",
        "quant_algo": OF_SCHEMES[next(iter(schemes), "NVFP4")],
    }
    if schemes & {"NVFP4", "NVFP4A16"}:
        config["group_size"] = 16
    if is_mixed:
        config["quant_algo"] = _MIXED
        config["quantized_layers"] = names.quantized_layers(fused)
    config |= {
        "ignore": names.excluded(fused),
        "kv_cache_scheme": None,
        **view.family.config_extras,
    }
    return config, _add_for_sglang(view, modules, config)


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
        first = view.num_layers
        if view.layout.mtp:
            first = 0
        stems = dict[str, None]()
        self.view = view
        self.draft_heads = list[str]()
        for index in range(view.num_mtp_layers):
            stem = view.runtime_stem("mtp", first + index)
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

    def written(self, module: RuntimeModule, *, otherwise: str) -> list[str]:
        """A module by vLLM's name, as it must be written, and by its names on disk, where these say
        something else.
        """
        mapper = self.mapper(module.name)
        # What the mapper turns into vLLM's name; names on disk follow, for other readers.
        first = mapper.before(module.name, module.asked) or otherwise
        others = [name for name in module.members if mapper.name(name) != module.name]
        return [first, *(name for name in others if name != first)]

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
            if self.mapper(module.name).before(module.name, module.asked) is None:
                raise RecipeError(
                    "format: modelopt",
                    "one algorithm must be enough for modelopt's config of a "
                    f"{self.view.family.model_type}",
                    got=f"several, and vLLM renames every entry that could name {module.name}",
                    cure="Use one scheme, or compressed-tensors",
                )
            row = layer_row(OF_SCHEMES[module.scheme])
            layers |= dict.fromkeys(self.written(module, otherwise=""), row)
        return layers

    def excluded(self, modules: Sequence[RuntimeModule]) -> list[str]:
        """Exactly the plain modules: an MTP block that is plain as a whole by glob, all others by
        name.
        """
        quantized = [module.name for module in modules if module.scheme]
        is_draft_plain = not any(name.startswith(self.draft_stems) for name in quantized)
        covered = ()
        if is_draft_plain:
            covered = self.draft_stems
        entries = list[str]()
        # By whole names: a part of one would exclude more.
        for module in modules:
            if not module.scheme and not module.name.startswith(covered):
                entries += self.written(module, otherwise=f"*{module.name}")
        for stem in covered:
            entries.append(self.surviving(f"{stem}*"))
        for head in self.draft_heads:
            # A part of a name is enough to exclude a quantized one.
            if not _is_part(head, quantized) and not head.startswith(covered):
                entries.append(self.surviving(head))
        for _, runtime, _ in self.view.layout.opaque:
            entries.append(f"{runtime}*")
        if not _is_part("lm_head", quantized):
            entries.append("lm_head")
        return [*dict.fromkeys(entries)]


# --- SGLang ---------------------------------------------------------------------------------------


def _add_for_sglang(view: FamilyView, modules: Iterable[NamedModule], config: Json) -> list[str]:
    """Add to a config in modelopt's dialect what SGLang asks about; or what stands against it,
    half a sentence each with SGLang's file, and nothing is added.
    """
    obstacle = no_draft(view)
    if obstacle:
        return [obstacle]
    method = _method(config)
    if not method:
        return [f"it has no method for {config['quant_algo']} without NVFP4 ({_METHODS})"]
    model = sglang_model(view.config)
    known = [module for module in modules if module.place.is_known]
    quantized = [module for module in known if module.scheme]
    # Under one NVFP4 algorithm most of its drafts are plain whatever the config says, and need no
    # entry but for the draft's head.
    is_draft_plain = method in model.plain_under
    asked = known
    if is_draft_plain:
        asked = [module for module in known if module.place.part != "mtp"]
    names, clashes = sglang_asks(view, asked, container)
    listed = config.get("quantized_layers")
    ignore = config["ignore"]
    plain_names = [name for name, module, _ in names if not module.scheme]
    rows = dict[str, Json]()
    for name, module, _ in names:
        if module.scheme and listed is not None and name not in listed:
            rows[name] = layer_row(OF_SCHEMES[module.scheme])
    if not any(module.place.role == "head" for module in quantized):
        plain_names += filter(None, (model.head, model.draft_head))
    plain_names = [name for name in plain_names if not is_excluded(name, ignore)]
    entries = [*dict.fromkeys(_as_entries(view, asked, plain_names))]
    obstacles = [*clashes, *unnamed(view, known), *_without_method(quantized)]
    obstacles += _harm_of(entries, quantized)
    for name, module, _ in names:
        if module.scheme and is_excluded(name, [*ignore, *entries]):
            obstacles.append(
                f"an entry for a plain module excludes {name} too, which is in {module.scheme} "
                f"({_CONFIG})"
            )
    # vLLM 0.32.0, quantization/modelopt.py (ModelOptMixedPrecisionConfig._resolve_quant_algo): to
    # it a row that begins with a dot is of a module below the one with an empty prefix.
    for name in rows:
        if name.startswith("."):
            obstacles.append(
                f"it asks for {name}, and vLLM would quantize its draft's head by such a row "
                f"({_CONFIG})"
            )
            break
    if method == "modelopt_fp4":  # where all is NVFP4
        for module in quantized:
            place = module.place
            is_in_draft = place.part == "mtp" and is_draft_plain
            if is_in_draft or place.runtime.endswith(model.plain_in_fp4):
                what = f"{place.module} is in {module.scheme}"
                says = f"it builds the module plain where all is NVFP4, and {what} ({model.file})"
                obstacles.append(says)
    if not obstacles:
        ignore += entries
        if listed is not None:
            listed |= rows
    return [*dict.fromkeys(obstacles)]


def _harm_of(entries: Iterable[str], quantized: Iterable[NamedModule]) -> Iterator[str]:
    """Entries for SGLang's draft that would exclude a quantized module in vLLM."""
    # A draft that SGLang builds without a prefix asks for `self_attn.qkv_proj`, which to vLLM is a
    # part of the names of every layer.
    names = list[str]()
    for module in quantized:
        names += concrete(module.spelled)
    for entry in entries:
        for name in names:
            if entry.removesuffix("*") in name:
                yield f"an entry {entry} for its draft would exclude {name} in vLLM"
                break


def _is_part(word: str, names: Iterable[str]) -> bool:
    return any(word in name for name in names)


def _method(config: Raw) -> str:
    """SGLang's name of the quantization method; "" where it has none, or takes it for another."""
    algorithm = config["quant_algo"]
    if algorithm == _MIXED:
        algorithms = {row["quant_algo"] for row in config["quantized_layers"].values()}
        return "" if algorithms.isdisjoint(_FOUR_BITS) else "modelopt_mixed"
    if "NVFP4" in algorithm:
        return "modelopt_fp4"
    if algorithm == "FP8":
        return "modelopt_fp8"
    return ""


def _as_entries(
    view: FamilyView, asked: list[NamedModule], plain_names: list[str]
) -> Iterator[str]:
    """The entries for plain names: a draft that is plain as a whole is one glob."""
    stems = set[str | None]()
    is_draft_plain = True
    for module in asked:
        place = module.place
        if place.part == "mtp" and place.layer is not None:
            stems.add(sglang_stem(view, "mtp", place.layer))
            is_draft_plain &= not module.scheme
    globs = list[str]()
    for stem in sorted(filter(None, stems)):
        is_own = not re.match(r"model\.layers\.\d", stem)
        if is_draft_plain and is_own and any(name.startswith(stem) for name in plain_names):
            globs.append(stem)
            yield f"{stem}*"
    for name in plain_names:
        if not name.startswith(tuple(globs)):
            yield name


def _without_method(modules: list[NamedModule]) -> Iterator[str]:
    for module in modules:
        scheme = module.scheme
        place = module.place
        if scheme == "FP8_DYNAMIC":
            yield f"it has no class for {OF_SCHEMES[scheme]} ({_CONFIG})"
        elif scheme == "FP8_BLOCK" and place.role != "experts":
            yield (
                f"it reads the scales of {OF_SCHEMES[scheme]} from weight_scale_inv alone "
                f"({_CONFIG})"
            )
        elif scheme.startswith("NVFP4") and place.module.endswith(".kv_b_proj"):
            yield f"it reads an unpacked weight for kv_b_proj, which is in {scheme} ({_CONFIG})"
