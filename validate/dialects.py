"""What vLLM makes of a checkpoint's quantization config: for each module, the parameters it will build and why.

In: config.json (hf_quant_config.json only where that has no quantization config, as in vLLM). Out: a `Dialect` with one
question, `resolve(module, shards=..., kind=...)`.

Easy to get wrong: each dialect matches names in its own way. compressed-tensors: whole name or `re:` from the start,
the fused name before its shards, routed experts by the three projections of expert 0, and no match means unquantized
without a word. modelopt: whole name, then substring, then glob. fp8: whole name only. All of it against the names that
modules are constructed with, after vLLM's mapper for the architecture has rewritten the entries that are no regexes.

Source: vLLM 0.32.0 quantization/{compressed_tensors/{compressed_tensors,utils}.py, modelopt.py, fp8.py,
utils/{config_utils,quant_utils}.py}, models/deepseek_v41/quant_config.py; tests/test_static.py compares with the real
functions.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch, fnmatchcase
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, Protocol

from ..quantize.stored import Form
from ..recipes.family import VLLMName

Kind = Literal["linear", "experts", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The parameters that vLLM registers for a module.

    Attributes:
        form: how the weight is held; "unknown" where this file does not know the scheme.
        leaves: parameter names below the module.
        optional: further leaves that are loaded, or skipped in silence, when there.
        group_size: input channels per scale; None where one scale spans them all.
        block: rows and columns per scale.
        bits: of packed integers.
        renames: what the model's loader makes of a leaf on disk.
    """

    form: Form
    leaves: frozenset[str] = frozenset({"weight"})
    optional: frozenset[str] = frozenset()
    group_size: int | None = None
    block: tuple[int, int] | None = None
    bits: int = 0
    renames: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """vLLM's answer for one module.

    Attributes:
        built: what it registers.
        entry: the entry of the config that decided; "" where none matched or none is needed.
        error: the exception that the question itself raises; `built` is then meaningless.
    """

    built: Built
    entry: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name or pattern of a quantization config, as written and as vLLM reads it after renaming.

    `by_disk`: it is matched against names on disk, which only DeepSeek-V4's list of MXFP4 experts is.
    """

    where: str
    written: str
    read: tuple[str, ...]
    by_disk: bool = False


class Dialect(Protocol):
    """A quantization config as vLLM reads it."""

    @property
    def name(self) -> str:
        """Which dialect, for messages."""
        ...

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every name and pattern of the config."""
        ...

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """What vLLM builds.

        Args:
            module: the prefix it is constructed with.
            shards: for a fused module the names of its parts; for experts the projections of expert 0.
            kind: which class of vLLM it is.
        """
        ...

    def covers(self, entry: Entry, module: VLLMName) -> bool:
        """Whether `entry` alone matches the name `module`."""
        ...


PLAIN = Built(form="plain")
UNKNOWN = Built(form="unknown")
_SHARD_ERROR = "ValueError: Found different quantization schemes for the shards of {}"
_MODELOPT_SHARD_ERROR = "ValueError: Detected some but not all shards of {} are quantized"


@dataclass(frozen=True, slots=True)
class Unquantized:
    """No quantization config: everything is plain."""

    name: str = "none"
    entries: tuple[Entry, ...] = ()

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """Plain, whatever it is."""
        return Resolution(built=PLAIN)

    def covers(self, entry: Entry, module: VLLMName) -> bool:
        """There are no entries."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A dialect whose matching is not reproduced here (GPTQ, AWQ, Quark, AutoRound, ...)."""

    name: str
    entries: tuple[Entry, ...] = ()

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """Never known."""
        return Resolution(built=UNKNOWN)

    def covers(self, entry: Entry, module: VLLMName) -> bool:
        """By substring, the loosest rule of these dialects."""
        return any(word.strip("*^$-:.re") in module for word in entry.read)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors:
    """`quant_method: compressed-tensors`.

    Attributes:
        ignore: entries after renaming.
        targets: target after renaming -> what it builds for linear modules, or the exception it raises.
        expert_targets: the same for routed experts.
    """

    ignore: tuple[str, ...]
    targets: Mapping[str, Built | str]
    expert_targets: Mapping[str, Built | str]
    entries: tuple[Entry, ...]
    name: str = "compressed-tensors"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`get_scheme_dict` for linear modules and heads, `get_moe_method` for experts."""
        if kind != "experts":
            class_name = "ParallelLMHead" if kind == "head" else _linear_class(module, shards)
            return self._scheme(module, shards, class_name, self.targets)
        targets = dict(self.expert_targets)
        if "Linear" in targets and "RoutedExperts" not in targets:
            targets["RoutedExperts"] = targets["Linear"]
        answers = [self._scheme(name, (), "RoutedExperts", targets) for name in shards]
        for answer in answers:
            if answer.error:
                return answer
        if any(answer.built != answers[-1].built for answer in answers):
            return Resolution(
                built=UNKNOWN, entry=next(answer.entry for answer in answers if answer.built != answers[-1].built),
                error="ValueError: All MoE projections need to have same quantization scheme but found multiple",
            )  # fmt: skip
        return answers[-1]

    def covers(self, entry: Entry, module: VLLMName) -> bool:
        """Whole name, or `re:` from the start."""
        return any(_equal_or_regex(module, pattern) for pattern in entry.read)

    def _scheme(
        self, name: str, shards: Sequence[str], class_name: str, targets: Mapping[str, Built | str]
    ) -> Resolution:
        if hit := _first_match(name, self.ignore):
            return Resolution(built=PLAIN, entry=hit)
        ignored = [_first_match(shard, self.ignore) for shard in shards]
        if any(ignored):
            entry = next(hit for hit in ignored if hit)
            error = "" if all(ignored) else _SHARD_ERROR.format(name)
            return Resolution(built=PLAIN, entry=entry, error=error)
        matched = _first_match(name, targets)
        if matched is None and shards:
            each = [_first_match(shard, targets) for shard in shards]
            matched = each[0] if all(each) else None
        matched = matched or _first_match(class_name, targets, contains=True)
        if matched is None:
            return Resolution(built=PLAIN)
        built = targets[matched]
        if isinstance(built, str):
            return Resolution(built=UNKNOWN, entry=matched, error=built)
        return Resolution(built=built, entry=matched)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOpt:
    """`quant_method: modelopt`, or hf_quant_config.json.

    Attributes:
        algorithm: quant_algo, upper case.
        exclude: entries after renaming.
        quantized_layers: module -> quant_algo, for MIXED_PRECISION.
        group_size: of NVFP4.
    """

    algorithm: str
    exclude: tuple[str, ...]
    quantized_layers: Mapping[str, str]
    group_size: int
    entries: tuple[Entry, ...]
    block: int = 128
    name: str = "modelopt"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_excluded`, then the one algorithm, or `_resolve_quant_algo` where it is mixed."""
        parts = () if kind == "experts" else shards
        skipped, error = _is_layer_skipped(module, parts, self.exclude)
        if error:
            return Resolution(built=UNKNOWN, entry=skipped, error=error)
        excluded = skipped or _modelopt_pattern(module, self.exclude)
        if excluded:
            return Resolution(built=PLAIN, entry=excluded)
        if self.algorithm != "MIXED_PRECISION":
            return Resolution(built=_modelopt_built(self.algorithm, self.group_size, self.block))
        entry, algorithm, error = self._mixed(module, parts)
        if error:
            return Resolution(built=UNKNOWN, entry=entry, error=error)
        if algorithm is None:
            return Resolution(built=PLAIN)
        return Resolution(built=_modelopt_built(algorithm, self.group_size, self.block), entry=entry)

    def covers(self, entry: Entry, module: VLLMName) -> bool:
        """As `resolve` does, with this entry only."""
        if entry.where == "quantized_layers":
            return any(word in (module, *_prefix_candidates(module)) or word.startswith(f"{module}.")
                       for word in entry.read)  # fmt: skip
        return bool(_is_layer_skipped(module, (), entry.read)[0] or _modelopt_pattern(module, entry.read))

    def _mixed(self, module: str, shards: Sequence[str]) -> tuple[str, str | None, str]:
        layers = self.quantized_layers
        for candidate in _prefix_candidates(module):
            if candidate in layers:
                return candidate, layers[candidate], ""
        found = [(name, layers[name]) for shard in shards for name in _prefix_candidates(shard) if name in layers]
        if len({algorithm for _, algorithm in found}) > 1:
            return found[0][0], None, f"ValueError: Mixed quant_algo within fused layer {module}"
        if found:
            return *found[0], ""
        for candidate in _prefix_candidates(module):
            for name, algorithm in layers.items():
                if name.startswith(f"{candidate}."):
                    return name, algorithm, ""
        if module.endswith(".experts"):
            parent = module.removesuffix("experts")
            for name, algorithm in layers.items():
                if name.startswith(parent):
                    return name, algorithm, ""
        return "", None, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """`quant_method: fp8`, and DeepSeek-V4's class of it, which holds routed experts in a form of their own.

    Attributes:
        ignored: ignored_layers or modules_to_not_convert, after renaming.
        linear: what a linear module becomes.
        experts: what routed experts become.
        keeps_mxfp4: DeepSeek-V4 with NVFP4 experts: entries, by name on disk, whose experts stay MXFP4.
        num_layers: num_hidden_layers, to tell MTP layers there.
    """

    ignored: tuple[str, ...]
    linear: Built
    experts: Built
    entries: tuple[Entry, ...]
    keeps_mxfp4: tuple[str, ...] = ()
    num_layers: int = 0
    name: str = "fp8"

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """`is_layer_skipped` by whole names; heads are never quantized."""
        if kind == "head":
            return Resolution(built=PLAIN)
        skipped, error = _is_layer_skipped(module, () if kind == "experts" else shards, self.ignored)
        if skipped or error:
            return Resolution(built=PLAIN, entry=skipped, error=error)
        if kind == "linear":
            return Resolution(built=self.linear)
        if self.keeps_mxfp4 and (match := re.search(r"(?:^|\.)layers\.(\d+)\.ffn\.experts$", module)):
            index = int(match[1])
            on_disk = f"layers.{index}" if index < self.num_layers else f"mtp.{index - self.num_layers}"
            for pattern in self.keeps_mxfp4:
                if fnmatchcase(f"{on_disk}.ffn.experts", pattern):
                    return Resolution(built=_DSV4_MXFP4, entry=pattern)
        return Resolution(built=self.experts)

    def covers(self, entry: Entry, module: VLLMName) -> bool:
        """Whole name; for experts any entry that contains it."""
        if entry.by_disk:
            return any(fnmatchcase(module, pattern) for pattern in entry.read)
        return bool(_is_layer_skipped(module, (), entry.read)[0])


def read_dialect(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> Dialect:
    """The dialect of a checkpoint.

    Args:
        config: config.json.
        hf_quant_config: hf_quant_config.json, if there is one.
    """
    found = quantization_of(config)
    if found is None and hf_quant_config is None:
        return Unquantized()
    raw: Mapping[str, Any] = found if found is not None else {"quant_method": "modelopt", **(hf_quant_config or {})}
    method = str(raw.get("quant_method", "")).lower()
    rename = _renamer(config)
    if method == "compressed-tensors":
        return _read_compressed_tensors(raw, rename)
    if method.startswith("modelopt") or method == "mxfp8":
        return _read_modelopt(raw, hf_quant_config or {}, rename)
    if method in ("fp8", "deepseek_v4_fp8"):
        return _read_fp8(raw, config, rename)
    return _read_unknown(method or "quantization_config without quant_method", raw)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json's quantization config, wherever vLLM looks for it; None if it has none."""
    text_config = config.get("text_config") or {}
    for found in (config.get("quantization_config"), text_config.get("quantization_config"),
                  config.get("compression_config")):  # fmt: skip
        if isinstance(found, Mapping):
            return found
    return None


# --- compressed-tensors -------------------------------------------------------------------------------------------


def _read_compressed_tensors(raw: Mapping[str, Any], rename: "_Renamer") -> CompressedTensors:
    targets: dict[str, Built | str] = {}
    expert_targets: dict[str, Built | str] = {}
    entries: list[Entry] = []
    for group in (raw.get("config_groups") or {}).values():
        names = list(group.get("targets") or ())
        if len(names) == 1 and names[0].endswith("Attention"):
            continue  # KV-cache quantization; vLLM skips it
        for target in names:
            read = rename.path(target)
            targets[read] = _compressed_tensors_built(group, raw.get("format"), is_experts=False)
            expert_targets[read] = _compressed_tensors_built(group, raw.get("format"), is_experts=True)
            entries.append(Entry(where="targets", written=target, read=(read,)))
    ignore = tuple(rename.path(entry) for entry in raw.get("ignore") or ())
    entries += [
        Entry(where="ignore", written=written, read=(read,))
        for written, read in zip(raw.get("ignore") or (), ignore, strict=True)
    ]
    return CompressedTensors(ignore=ignore, targets=targets, expert_targets=expert_targets, entries=tuple(entries))


def _compressed_tensors_built(group: Mapping[str, Any], format_: str | None, *, is_experts: bool) -> Built | str:
    """`_get_scheme_from_parts` and `get_moe_method`: what a config group builds, or the exception it raises."""
    weights, inputs = _arguments(group.get("weights")), _arguments(group.get("input_activations"))
    format_ = group.get("format") or format_
    if weights is None:
        return PLAIN
    bits, strategy, is_float = weights["num_bits"], weights["strategy"], weights["type"] == "float"
    size = weights["group_size"]
    static = inputs is not None and inputs["dynamic"] is False
    if is_float and bits == 4 and strategy == "tensor_group" and size == 16:
        if inputs is not None and (inputs["num_bits"], inputs["strategy"]) != (4, "tensor_group"):
            return "ValueError: For NVFP4 weights, input quantization must also be NVFP4 format, None for NVFP4A16"
        leaves = ("weight_packed", "weight_scale", "weight_global_scale", *(("input_global_scale",) if inputs else ()))
        return Built(form="nvfp4", leaves=frozenset(leaves), group_size=16)
    if is_float and strategy == "group" and size == 32 and bits == 4:
        return Built(form="mxfp4", leaves=frozenset({"weight_packed", "weight_scale"}), group_size=32)
    if is_float and strategy == "group" and size == 32 and bits == 8:
        return Built(form="mxfp8", leaves=frozenset({"weight", "weight_scale"}), group_size=32)
    if is_float and bits == 8 and strategy in ("tensor", "channel", "block"):
        if format_ not in ("float-quantized", "naive-quantized", "int-quantized", "nvfp4-pack-quantized"):
            return f"NotImplementedError: No compressed-tensors compatible scheme was found (format {format_!r})"
        if inputs is None and is_experts:
            return "RuntimeError: Unsupported FusedMoe scheme (FP8 weights, input_activations: null)"
        if inputs is None and strategy == "block":
            return "AssertionError: assert self.is_static_input_scheme is False (input_activations: null)"
        leaves = {"weight", "weight_scale"} | ({"input_scale"} if static else set())
        form: Form = {"tensor": "fp8_tensor", "channel": "fp8_channel", "block": "fp8_block"}[strategy]  # type: ignore[assignment]
        block = tuple(weights["block_structure"] or (128, 128)) if strategy == "block" else None
        return Built(form=form, leaves=frozenset(leaves), block=block)  # type: ignore[arg-type]
    if not is_float and inputs is None and format_ == "pack-quantized" and strategy in ("group", "channel"):
        leaves = {"weight_packed", "weight_scale", "weight_shape"}
        leaves |= set() if weights["symmetric"] else {"weight_zero_point"}
        group_size = size if strategy == "group" and size and size > 0 else None
        return Built(form="int_packed", leaves=frozenset(leaves), optional=frozenset({"weight_g_idx"}),
                     group_size=group_size, bits=bits)  # fmt: skip
    if not is_float and bits == 8 and inputs and inputs["num_bits"] == 8 and strategy in ("channel", "tensor"):
        return Built(form="int8", leaves=frozenset({"weight", "weight_scale"} | ({"input_scale"} if static else set())))
    return UNKNOWN


def _arguments(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """compressed-tensors' QuantizationArgs with its defaults filled in."""
    if not given:
        return None
    filled = {
        "num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None, "block_structure": None,
    } | {key: value for key, value in given.items() if value is not None}  # fmt: skip
    if not filled.get("strategy"):
        size = filled["group_size"]
        grouped = None if size is None else ("group" if size > 0 else "channel")
        filled["strategy"] = grouped or ("block" if filled["block_structure"] else None)
        filled["strategy"] = filled["strategy"] or ("token" if filled["dynamic"] else "tensor")
    return filled


def _linear_class(module: str, shards: Sequence[str]) -> str:
    if module.endswith("qkv_proj"):
        return "QKVParallelLinear"
    return "MergedColumnParallelLinear" if shards else "RowParallelLinear"


def _first_match(name: str, patterns: Iterable[str], *, contains: bool = False) -> str | None:
    return next((pattern for pattern in patterns if _equal_or_regex(name, pattern, contains=contains)), None)


def _equal_or_regex(name: str, pattern: str, *, contains: bool = False) -> bool:
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(name) is not None
    return pattern.lower() in name.lower() if contains else pattern == name


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error:
        return re.compile(r"(?!)")  # vLLM would raise; the rule on entries reports what matches nothing


# --- modelopt -----------------------------------------------------------------------------------------------------


def _read_modelopt(
    raw: Mapping[str, Any], hf_quant_config: Mapping[str, Any], rename: "_Renamer"
) -> ModelOpt | Unknown:
    inner = raw["quantization"] if isinstance(raw.get("quantization"), Mapping) else None
    holder = inner if inner is not None else raw
    listed = holder.get("exclude_modules" if inner is not None else "ignore") or holder.get("ignored_layers") or ()
    default = "MXFP8" if str(raw.get("quant_method")) == "mxfp8" else ""
    algorithm = str(holder.get("quant_algo") or default).upper()
    layers = holder.get("quantized_layers") or (hf_quant_config.get("quantization") or {}).get("quantized_layers") or {}
    groups = raw.get("config_groups")
    if algorithm == "NVFP4" and isinstance(groups, Mapping) and groups and all(
        isinstance(group, Mapping) and group.get("input_activations") is None for group in groups.values()
    ):  # fmt: skip
        algorithm = "W4A16_NVFP4"
    if algorithm not in (*_MODELOPT_ALGORITHMS, "MIXED_PRECISION"):
        return Unknown(name=f"modelopt {algorithm or 'without quant_algo'}")
    exclude = [rename.modelopt(entry) for entry in listed]
    entries = [Entry(where="exclude", written=entry, read=read) for entry, read in zip(listed, exclude, strict=True)]
    read_layers = {rename.name(name): str(row.get("quant_algo", "")).upper() for name, row in layers.items()}
    entries += [Entry(where="quantized_layers", written=name, read=(rename.name(name),)) for name in layers]
    blocks = {int(row.get("group_size", 128)) for row in layers.values()
              if str(row.get("quant_algo", "")).upper() in ("FP8_PB_WO", "FP8_BLOCK_SCALES")}  # fmt: skip
    return ModelOpt(
        algorithm=algorithm, exclude=tuple(word for read in exclude for word in read), quantized_layers=read_layers,
        group_size=int(holder.get("group_size") or 16), entries=tuple(entries), block=min(blocks, default=128),
    )  # fmt: skip


_MODELOPT_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8")


def _modelopt_built(algorithm: str, group_size: int, block: int) -> Built:
    weight_and_scale = frozenset({"weight", "weight_scale"})
    match algorithm:
        case "NVFP4":
            return Built(form="nvfp4_modelopt", leaves=weight_and_scale | {"weight_scale_2", "input_scale"},
                         group_size=group_size)  # fmt: skip
        case "W4A16_NVFP4":
            return Built(form="nvfp4_modelopt", leaves=weight_and_scale | {"weight_scale_2"},
                         optional=frozenset({"input_scale"}), group_size=group_size)  # fmt: skip
        case "FP8":
            return Built(form="fp8_tensor", leaves=weight_and_scale | {"input_scale"})
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return Built(form="fp8_channel", leaves=weight_and_scale)
        case "FP8_PB_WO" | "FP8_BLOCK_SCALES":
            renames = MappingProxyType({"weight_scale_inv": "weight_scale"})
            return Built(form="fp8_block", leaves=weight_and_scale, block=(block, block), renames=renames)
        case "MXFP8":
            return Built(form="mxfp8", leaves=weight_and_scale, group_size=32)
        case _:
            return UNKNOWN


def _modelopt_pattern(module: str, patterns: Iterable[str]) -> str:
    """The first entry that excludes a module by substring or glob."""
    stripped = module.removeprefix("language_model.")
    for pattern in patterns:
        if pattern != module and (pattern in module or pattern in stripped):
            return pattern
    return next((pattern for pattern in patterns if fnmatch(module, pattern)), "")


def _prefix_candidates(name: str) -> tuple[str, ...]:
    candidates = [name]
    if name.endswith(".lm_head"):
        candidates.append("lm_head")
    for here, there in (("language_model.model.", "model.language_model."), ("model.language_model.",
                                                                             "language_model.model.")):  # fmt: skip
        if name.startswith(here):
            candidates.append(there + name.removeprefix(here))
            break
    return tuple(candidates)


def _is_layer_skipped(module: str, shards: Sequence[str], entries: Sequence[str]) -> tuple[str, str]:
    """vLLM's `is_layer_skipped` in exact mode: the entry that skips (or ""), and the exception it raises (or "")."""
    if shards:
        if module in entries:
            return module, ""
        hits = [shard for shard in shards if shard in entries]
        if hits and len(hits) < len(shards):
            return hits[0], _MODELOPT_SHARD_ERROR.format(module)
        return (hits[0] if hits else ""), ""
    if "experts" in module:
        return next((entry for entry in entries if "experts" in entry and module in entry), ""), ""
    return (module if module in entries else ""), ""


# --- fp8 ----------------------------------------------------------------------------------------------------------

_SCALE_IS_INVERSE = MappingProxyType({"scale": "weight_scale_inv"})
_SCALE_IS_SCALE = MappingProxyType({"scale": "weight_scale"})
_DSV4_MXFP4 = Built(form="mxfp4", leaves=frozenset({"weight", "weight_scale"}), group_size=32, renames=_SCALE_IS_SCALE)


def _read_fp8(raw: Mapping[str, Any], config: Mapping[str, Any], rename: "_Renamer") -> Fp8:
    listed = raw.get("ignored_layers") or raw.get("modules_to_not_convert") or ()
    ignored = tuple(rename.name(entry) for entry in listed)
    entries = [
        Entry(where="ignored_layers", written=written, read=(read,))
        for written, read in zip(listed, ignored, strict=True)
    ]
    size = raw.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None
    if block:
        linear = Built(form="fp8_block", leaves=frozenset({"weight", "weight_scale_inv"}), block=block)
    else:
        static = raw.get("activation_scheme") == "static"
        leaves = frozenset({"weight", "weight_scale", *(("input_scale",) if static else ())})
        linear = Built(form="fp8_tensor", leaves=leaves)
    if config.get("model_type") != "deepseek_v4":
        return Fp8(ignored=ignored, linear=linear, experts=linear, entries=tuple(entries))
    # DeepSeek-V4's loaders turn `.scale` into `.weight_scale_inv`, that of FP4 experts into `.weight_scale`.
    linear = Built(form=linear.form, leaves=linear.leaves, block=block, renames=_SCALE_IS_INVERSE)
    experts, keeps = linear, ()
    if config.get("expert_dtype", "fp4") == "fp4":
        experts = _DSV4_MXFP4
        if str(raw.get("moe_quant_algo") or "").upper() == "NVFP4":
            experts = _modelopt_built("NVFP4", 16, 128)
            keeps = tuple(entry for entry in raw.get("ignore") or () if isinstance(entry, str))
            entries += [Entry(where="ignore", written=entry, read=(entry,), by_disk=True) for entry in keeps]
    return Fp8(
        ignored=ignored, linear=linear, experts=experts, entries=tuple(entries), keeps_mxfp4=keeps,
        num_layers=int(config.get("num_hidden_layers", 0)), name="deepseek_v4_fp8",
    )  # fmt: skip


def _read_unknown(method: str, raw: Mapping[str, Any]) -> Unknown:
    """Dialects that are not reproduced: only their lists of modules to leave alone are read."""
    entries = []
    for key in ("modules_to_not_convert", "exclude", "ignore", "ignored_layers", "dynamic", "extra_config"):
        entries += [Entry(where=key, written=str(word), read=(str(word),)) for word in raw.get(key) or ()]
    return Unknown(name=method, entries=tuple(entries))


# --- how vLLM's model classes rewrite entries ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Renamer:
    """`hf_to_vllm_mapper.get_rename_mapper()` of the target's class, as far as module names go."""

    is_applied: bool = False
    substrings: tuple[tuple[str, str], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()

    def name(self, entry: str) -> str:
        """One name, in the mapper's order: substrings, then prefixes."""
        for old, new in self.substrings:
            entry = entry.replace(old, new, 1)
        for old, new in self.prefixes:
            if entry.startswith(old):
                entry = entry.replace(old, new, 1)
        return entry

    def path(self, entry: str) -> str:
        """compressed-tensors renames paths only, neither regexes nor class names."""
        return self.name(entry) if "." in entry and not entry.startswith("re:") else entry

    def modelopt(self, entry: str) -> tuple[str, ...]:
        """modelopt splits `x*` into `x` and `x.*` first, but only where a mapper is applied at all."""
        if self.is_applied and len(entry) >= 2 and entry[-1] == "*" and entry[-2] != ".":
            return self.name(entry[:-1]), self.name(entry[:-1] + ".*")
        return (self.name(entry),)


_DEEPSEEK_V4 = _Renamer(
    is_applied=True,
    substrings=((".shared_experts.w2", ".shared_experts.down_proj"),),
    prefixes=(("layers.", "model.layers."), ("embed.", "model.embed."), ("norm.", "model.norm."),
              ("hc_head", "model.hc_head"), ("mtp.", "model.mtp.")),
)  # fmt: skip
_QWEN_VISION = _Renamer(
    is_applied=True,
    prefixes=(("model.visual.", "visual."), ("lm_head.", "language_model.lm_head."),
              ("model.language_model.", "language_model.model.")),
)  # fmt: skip
_QWEN_TEXT = _Renamer(is_applied=True, prefixes=(("model.language_model.", "model."),))
_RENAMERS: Mapping[str, _Renamer] = MappingProxyType({
    "deepseek_v4": _DEEPSEEK_V4, "mimo": _Renamer(is_applied=True), "qwen3_next": _Renamer(is_applied=True),
    "qwen3_5": _QWEN_TEXT, "qwen3_5_text": _QWEN_TEXT, "qwen3_5_moe": _QWEN_TEXT, "qwen3_5_moe_text": _QWEN_TEXT,
})  # fmt: skip


def _renamer(config: Mapping[str, Any]) -> _Renamer:
    architecture = str(next(iter(config.get("architectures") or ()), ""))
    if architecture.startswith("Qwen3_5") and architecture.endswith("ForConditionalGeneration"):
        return _QWEN_VISION
    return _RENAMERS.get(str(config.get("model_type", "")), _Renamer())
