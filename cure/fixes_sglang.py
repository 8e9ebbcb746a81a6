"""Entries that SGLang 0.5.23 needs in a quantization config that vLLM reads well.

In: a `Checked`, and the proposal that its config is in. Out: changes of lists in config.json, and
the obstacles: why SGLang cannot serve the checkpoint with its MTP block, whatever its lists say.

Easy to get wrong: nothing that vLLM asks for may change its answer. Only names that vLLM never asks
for are added, and `fix` checks the outcome for vLLM again.
"""

import re
from collections.abc import Iterator

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..quantize.config.compressed_tensors import added_names
from ..quantize.config.modelopt import entries_for_sglang
from ..quantize.config.modules import concrete, named_modules, regexes
from ..quantize.config.sglang import no_draft, unnamed
from ..recipes.errors import RecipeError
from ..recipes.runtimes.sglang import VERSION, sglang_model
from ..validate.check.check import Checked
from ..validate.check.dialects.compressed_tensors import CompressedTensors
from ..validate.check.dialects.modelopt import ModelOpt
from ..validate.check.runtime_view import RuntimeView
from .convert_forms import StoredMatrix, matrices_in
from .proposal import Proposal


def add_entries_for_sglang(checked: Checked, proposal: Proposal) -> tuple[str, ...]:
    """Make the changes that let SGLang resolve every module.

    Returns: the obstacles, half a sentence each; then nothing changes.

    Raises:
        RecipeError: the config is in a dialect whose lists cannot be extended so.
        CheckpointError: a quantized module in a form that keepmtp has no word for.
    """
    runtime = checked.runtime
    if runtime is None or not proposal.config_place:
        rule = (
            "needs a model of a family that keepmtp knows, with a quantization_config in "
            "config.json"
        )
        raise RecipeError("--runtime sglang", rule, got="another", cure="Leave out --runtime")
    if isinstance(runtime.dialect, CompressedTensors):
        return _compressed_tensors(runtime, proposal)
    if isinstance(runtime.dialect, ModelOpt) and proposal.quantization("ignore") is not None:
        return _modelopt(runtime, proposal)
    rule = "adds entries to compressed-tensors' and modelopt's lists in config.json"
    raise RecipeError(
        "--runtime sglang", rule, got=runtime.dialect.name, cure="Leave out --runtime"
    )


def _compressed_tensors(runtime: RuntimeView, proposal: Proposal) -> tuple[str, ...]:
    view, file = runtime.view, sglang_model(runtime.view.config).file
    if obstacle := no_draft(view):
        return (obstacle,)
    modules = named_modules(view, _matrices(runtime, proposal))
    added, clashes = added_names(view, modules)
    if obstacles := tuple(dict.fromkeys([*clashes, *unnamed(view, modules)])):
        return obstacles
    for key, spelled in sorted(added.items()):
        place = ("config_groups", key, "targets") if key else ("ignore",)
        now = proposal.quantization(*place) or []
        missing = [each for each in spelled if not _is_named(next(concrete(each)), now)]
        if missing and not (key and "Linear" in now):
            example = next(concrete(min(missing)))
            why = (
                f"SGLang {VERSION} builds these modules under names of its own, such as "
                f"{example} ({file})"
            )
            proposal.set_quantization(place, [*now, *regexes(missing)], why)
    return ()


def _is_named(name: str, entries: list[str]) -> bool:
    """Whether one of the entries names a module, as SGLang compares them."""
    return any(
        re.match(entry[3:], name)
        if entry.startswith("re:")
        else name == entry or name.endswith(f".{entry}")
        for entry in entries
    )


def _matrices(runtime: RuntimeView, proposal: Proposal) -> Iterator[StoredMatrix]:
    """Every matrix; the scheme of a quantized one is the key of its config group."""
    given = proposal.quantization("config_groups") or {}
    groups = {target: key for key, group in given.items() for target in group.get("targets") or ()}
    for module in runtime.modules:
        group = groups.get(module.resolution.entry) or groups.get("Linear", "")
        for member in module.members:
            weight = member.weight
            if len(weight.shape) >= 2:
                scheme = "" if weight.form == "plain" else group
                parts = {} if member.place.row.stacked else weight.parts
                yield StoredMatrix(
                    module=weight.module, place=member.place, scheme=scheme, parts=parts
                )


def _modelopt(runtime: RuntimeView, proposal: Proposal) -> tuple[str, ...]:
    """The same in config.json and, where there is one, in hf_quant_config.json."""
    modules = named_modules(runtime.view, matrices_in(runtime, "compressed-tensors"))
    fit = entries_for_sglang(runtime.view, modules, proposal.quantization())
    why = (
        f"SGLang {VERSION} builds these modules under names of its own "
        f"({sglang_model(runtime.view.config).file})"
    )
    file, place = proposal.quantization_at
    for name, where, key in (
        (file, place, "ignore"),
        (HF_QUANT_CONFIG, ("quantization",), "exclude_modules"),
    ):
        listed, rows = (proposal.value(name, (*where, each)) for each in (key, "quantized_layers"))
        if fit.ignore and listed is not None:
            proposal.set(name, (*where, key), [*listed, *fit.ignore], why)
        if fit.quantized_layers and rows is not None:
            proposal.set(name, (*where, "quantized_layers"), {**rows, **fit.quantized_layers}, why)
    return fit.obstacles
