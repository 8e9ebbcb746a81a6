"""Entries that SGLang 0.5.23 needs in a quantization config that vLLM reads well.

In: a `Checked`, and the proposal that its config is in. Out: changes of lists in config.json, and the obstacles: why
SGLang cannot serve the checkpoint with its MTP block, whatever its lists say.

Easy to get wrong: nothing that vLLM asks for may change its answer. Only names that vLLM never asks for are added, and
`fix` checks the outcome for vLLM again.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..quantize.config.compressed_tensors import ByScheme, added_names
from ..quantize.config.modelopt import entries_for_sglang as modelopt_entries
from ..quantize.config.modules import concrete, named_modules, regexes
from ..quantize.config.sglang import no_draft, unnamed
from ..recipes.errors import RecipeError
from ..recipes.runtimes.sglang import VERSION, sglang_model
from ..validate.check.check import Checked
from ..validate.check.dialects.choose import quantization_of
from ..validate.check.dialects.compressed_tensors import CompressedTensors
from ..validate.check.dialects.modelopt import ModelOpt
from ..validate.check.runtime_view import RuntimeView
from .convert_forms import StoredMatrix, matrices_in
from .json_diff import JSONPath
from .proposal import CONFIG, SetValue

_QUANTIZATION: JSONPath = ("quantization_config",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForSglang:
    """What is added for SGLang.

    Attributes:
        edits: of config.json; () where every name resolves already, or something stands against it.
        obstacles: half a sentence each.
    """

    edits: tuple[SetValue, ...] = ()
    obstacles: tuple[str, ...] = ()


def entries_for_sglang(checked: Checked) -> ForSglang:
    """The changes that let SGLang resolve every module.

    Raises:
        RecipeError: the config is in a dialect whose lists cannot be extended so.
        CheckpointError: a quantized module in a form that keepmtp has no word for.
    """
    runtime = checked.runtime
    raw = quantization_of(checked.readable().config) or {}
    if runtime is None or not raw:
        rule = "needs a model of a family that keepmtp knows, with a quantization_config in config.json"
        raise RecipeError("--runtime sglang", rule, got="another", cure="Leave out --runtime")
    if isinstance(runtime.dialect, CompressedTensors):
        return _compressed_tensors(runtime, raw)
    if isinstance(runtime.dialect, ModelOpt) and "ignore" in raw:
        return _modelopt(runtime, raw)
    rule = "adds entries to compressed-tensors' and modelopt's lists in config.json"
    raise RecipeError("--runtime sglang", rule, got=runtime.dialect.name, cure="Leave out --runtime")


def _compressed_tensors(runtime: RuntimeView, raw: Mapping[str, Any]) -> ForSglang:
    view, model = runtime.view, sglang_model(runtime.view.config)
    if obstacle := no_draft(view):
        return ForSglang(obstacles=(obstacle,))
    modules = named_modules(view, _matrices(runtime, raw))
    added, clashes = added_names(view, modules)
    obstacles = tuple(dict.fromkeys([*clashes, *unnamed(view, modules)]))
    return ForSglang(obstacles=obstacles) if obstacles else ForSglang(edits=tuple(_edits(raw, added, model.file)))


def _edits(raw: Mapping[str, Any], added: ByScheme, file: str) -> Iterator[SetValue]:
    for key, spelled in sorted(added.items()):
        place = (*_QUANTIZATION, "config_groups", key, "targets") if key else (*_QUANTIZATION, "ignore")
        now = list((raw["config_groups"][key]["targets"] if key else raw.get("ignore")) or ())
        missing = [each for each in spelled if not _is_named(next(concrete(each)), now)]
        if missing and not (key and "Linear" in now):
            example = next(concrete(min(missing)))
            why = f"SGLang {VERSION} builds these modules under names of its own, such as {example} ({file})"
            yield SetValue(file=CONFIG, place=place, value=[*now, *regexes(missing)], why=why)


def _is_named(name: str, entries: Iterable[str]) -> bool:
    """Whether one of the entries names a module, as SGLang compares them."""
    return any(
        re.match(entry[3:], name) if entry.startswith("re:") else name == entry or name.endswith(f".{entry}")
        for entry in entries
    )


def _matrices(runtime: RuntimeView, raw: Mapping[str, Any]) -> Iterator[StoredMatrix]:
    """Every matrix; the scheme of a quantized one is the key of its config group."""
    groups = {target: key for key, group in raw.get("config_groups", {}).items() for target in group["targets"]}
    for module in runtime.modules:
        group = groups.get(module.resolution.entry) or groups.get("Linear", "")
        for member in module.members:
            weight = member.weight
            if len(weight.shape) >= 2:
                scheme = "" if weight.form == "plain" else group
                parts = {} if member.place.row.stacked else weight.parts
                yield StoredMatrix(module=weight.module, place=member.place, scheme=scheme, parts=parts)


def _modelopt(runtime: RuntimeView, raw: Mapping[str, Any]) -> ForSglang:
    modules = named_modules(runtime.view, matrices_in(runtime, "compressed-tensors"))
    fit = modelopt_entries(runtime.view, modules, raw)
    if fit.obstacles:
        return ForSglang(obstacles=fit.obstacles)
    added: dict[str, Any] = {"ignore": list(fit.ignore), "quantized_layers": dict(fit.quantized_layers or {})}
    return ForSglang(edits=tuple(_modelopt_edits(runtime, raw, added)))


def _modelopt_edits(runtime: RuntimeView, raw: Mapping[str, Any], added: Mapping[str, Any]) -> Iterator[SetValue]:
    """The same in config.json and, where there is one, in hf_quant_config.json."""
    why = f"SGLang {VERSION} builds these modules under names of its own ({sglang_model(runtime.view.config).file})"
    other = (runtime.hf_quant_config or {}).get("quantization")
    holders = [(CONFIG, _QUANTIZATION, raw, "ignore")]
    holders += [(HF_QUANT_CONFIG, ("quantization",), other, "exclude_modules")] if isinstance(other, Mapping) else []
    for file, place, holder, ignore in holders:
        if added["ignore"] and ignore in holder:
            yield SetValue(file=file, place=(*place, ignore), value=[*holder[ignore], *added["ignore"]], why=why)
        if rows := added["quantized_layers"]:
            layers = {**holder.get("quantized_layers", {}), **rows}
            yield SetValue(file=file, place=(*place, "quantized_layers"), value=layers, why=why)
