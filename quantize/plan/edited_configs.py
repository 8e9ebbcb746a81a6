"""The config files of a checkpoint of which some modules change: its owner's, with few edits.

In: a plan whose recipe says `keeps_config`. Out: a `Proposal` with the edits, or a refusal where
the config's dialect has no word for what changes.

Easy to get wrong: an entry that takes a module away, or gives it back, may reach others. So what
vLLM builds of all others is compared.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...checkpoints.dialects.compressed_tensors import CompressedTensors
from ...checkpoints.dialects.modelopt import ModelOpt
from ...checkpoints.dialects.runtime_view import Module, RuntimeView
from ...checkpoints.dialects.said import asked_about, is_said, other_file_agrees, say_what_is_stored
from ...checkpoints.proposal import CONFIG, Proposal
from ...checkpoints.safetensors_file import Entry
from ...checkpoints.source import Source
from ...recipes.conventions import FP8_CACHE
from ...recipes.errors import RecipeError
from ...recipes.family import HFName
from ...recipes.frozen import without
from .tables import TABLE_WORDS
from .tensor_plan import TensorPlan

if TYPE_CHECKING:
    from .plan import Plan

_MAX_ROUNDS = 4  # an edit uncovers what an entry hid


def as_written(plan: "Plan") -> Source:
    """The headers of a plan's output, as they will be, with the source's own config."""
    entries = dict[HFName, Entry]()
    for shard in plan.shards:
        for entry in shard.entries:
            entries[entry.name] = entry
    return replace(plan.source, entries=entries, unindexed={}, donors={}, replaced={})


def edited_configs(plan: "Plan") -> Proposal:
    """The config files with the smallest edit that says what changes.

    Raises:
        RecipeError: the dialect cannot say it.
    """
    proposal = Proposal(plan.source)
    written = as_written(plan)
    schemes = _schemes(plan)
    before = after = RuntimeView(written, plan.view)
    for _ in range(_MAX_ROUNDS):
        had = len(proposal.edits)
        say_what_is_stored(after, proposal, schemes)
        if len(proposal.edits) == had:
            break
        config = proposal.value(CONFIG, ())
        after = RuntimeView(replace(written, config=config, changed=proposal.files()), plan.view)
        for module, was in zip(after.modules, before.modules, strict=True):
            if module.is_plain and was.resolution.built != module.resolution.built:
                schemes.setdefault(module.members[0].weight.module, "")  # its entry went
    asked = {module.name for module in asked_about(after, schemes)}
    unsaid = dict[str, Module]()  # of each new form, "" for plain, one
    for module, was in zip(after.modules, before.modules, strict=True):
        answer = module.resolution
        is_same = answer._replace(entry="") == was.resolution._replace(entry="")
        if module.name in asked:
            is_same = is_said(after, module, schemes)
        if not is_same:
            unsaid.setdefault(schemes.get(module.members[0].weight.module, ""), module)
    if unsaid:
        raise _unsaid(plan, after, *max(unsaid.items()))
    _say_cache(plan, proposal, before)
    say_tables(plan, proposal, [tensor for tensor in plan.tensors if not plan.is_own(tensor)])
    if proposal.edits and isinstance(before.dialect, ModelOpt):
        other_file_agrees(proposal)
    _say_twice(proposal)
    return proposal


def _schemes(plan: "Plan") -> dict[HFName, str]:
    """The modules that change, by their names on disk, each with its new scheme."""
    schemes = dict[HFName, str]()
    for tensor in plan.tensors:
        if len(tensor.shape) < 2 or plan.is_own(tensor):
            continue
        for output in tensor.outputs:
            name = plan.on_disk(output).name
            for module in (name, HFName(name.rpartition(".")[0])):
                schemes[module] = tensor.scheme
    return schemes


def _unsaid(plan: "Plan", view: RuntimeView, scheme: str, module: Module) -> RecipeError:
    form = scheme or module.members[0].weight.form
    cure = "Choose another form"
    if not isinstance(view.dialect, CompressedTensors):
        cure += ", or add --set format=compressed-tensors"
    return RecipeError(
        plan.recipe.name,
        f"{plan.source.where} is in {view.dialect.name}, which must have a word for what changes",
        got=f"none that gives {form} to {module.name} and leaves all else",
        cure=cure,
    )


def _say_cache(plan: "Plan", proposal: Proposal, view: RuntimeView) -> None:
    if plan.recipe.kv_cache is None:
        return
    if not isinstance(view.dialect, CompressedTensors | ModelOpt):
        raise RecipeError(
            plan.recipe.name,
            f"{view.dialect.name} must have a word for the KV cache",
            got="none",
            cure="Leave kv_cache out, or add --set format=compressed-tensors",
        )
    why = "the scales of the cache are in the files"
    if proposal.is_nested:
        proposal.set_quantization(("kv_cache_quant_algo",), "FP8", why)
    else:
        proposal.set_quantization(("kv_cache_scheme",), dict(FP8_CACHE), why)


def say_tables(plan: "Plan", proposal: Proposal, tensors: Iterable[TensorPlan]) -> None:
    """The dtype of an n-gram table, which the model's own config says."""
    key = plan.view.family.table_key
    why = "the table is stored so"
    holder = ()
    if "text_config" in plan.source.config:
        holder = ("text_config",)
    dtypes = set[str]()
    for tensor in tensors:
        if key and tensor.role == "table":
            dtypes.add(tensor.outputs[0].dtype)
    for dtype in dtypes & TABLE_WORDS.keys():
        proposal.set(CONFIG, (*holder, key), TABLE_WORDS[dtype], why)
    if dtypes and dtypes.isdisjoint(TABLE_WORDS):
        proposal.set(CONFIG, holder, without(proposal.value(CONFIG, holder), key), why)


def _say_twice(proposal: Proposal) -> None:
    """Some drafts read a copy in the language model's part of config.json."""
    place = ("text_config", "quantization_config")
    old = proposal.source.config.get("quantization_config")
    if old is not None and proposal.value(CONFIG, place) == old:
        new = proposal.value(CONFIG, ("quantization_config",))
        proposal.set(CONFIG, place, new, "some drafts read it here")
