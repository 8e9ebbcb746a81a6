"""The config files that a plan writes, and the modules that they speak of.

In: a plan. Out: the modules that a server asks about, and config.json with the
quantization config in the dialect that the recipe's `format` names; and what modelopt's readers
look for next to it.
"""

from dataclasses import replace

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...checkpoints.dialects.compressed_tensors import compressed_tensors_config
from ...checkpoints.dialects.fp8 import fp8_config
from ...checkpoints.dialects.modelopt import hf_quant_config, modelopt_config
from ...checkpoints.dialects.modules import NamedModule, named_modules
from ...checkpoints.proposal import CONFIG, Proposal
from ...checkpoints.sglang import VERSION
from ...checkpoints.sglang.entries import with_entries
from ...recipes.conventions import FP8_CACHE
from ...recipes.family_view import Place
from ...recipes.frozen import Json, frozen, without
from .edited_configs import say_tables
from .plan import Plan


@frozen
class QuantizationConfig:
    """What a config.json says of how the checkpoint is quantized.

    Attributes:
        value: of its `quantization_config`: for vLLM and, where nothing stands against it, for
            SGLang.
        obstacles: why SGLang cannot serve the checkpoint with its MTP block, half a sentence each,
            with SGLang's file; () where it resolves every module.
    """

    value: Json
    obstacles: tuple[str, ...]

    @property
    def line(self) -> str:
        """SGLang's verdict in one line, for the plan."""
        for first in self.obstacles:
            return f"not SGLang {VERSION}: {first}"
        return f"SGLang {VERSION} too"

    @property
    def other_servers(self) -> Json:
        """For machines: every other server than vLLM, and what stands against it."""
        return {"sglang": {"version": VERSION, "obstacles": list(self.obstacles)}}


def modules_of(plan: Plan) -> list[NamedModule]:
    """The plan's weights of two and more dimensions: what a Linear, an expert stack, an embedding
    or a head holds. Of an n-gram table the config says nothing.
    """
    opaque = tuple(disk for disk, _, _ in plan.view.layout.opaque)
    matrices = list[tuple[Place, str]]()
    for tensor in plan.tensors:
        is_matrix = len(tensor.shape) >= 2 and tensor.fate != "drop"
        is_matrix &= tensor.module != tensor.name or tensor.role == "experts"
        if is_matrix and not tensor.name.startswith(opaque):
            scheme = tensor.scheme
            if tensor.role == "table":
                scheme = ""
            matrices.append((tensor.place, scheme))
    return named_modules(plan.view, matrices)


def config_of(plan: Plan) -> QuantizationConfig:
    """The quantization config that a plan writes, in the dialect that the recipe's `format`
    names.

    Raises:
        RecipeError: see `modelopt_config`.
    """
    cache = None
    if plan.recipe.kv_cache is not None:
        cache = dict(FP8_CACHE)
    elif plan.served is not None:
        cache = plan.served.kv_cache_scheme
    modules = modules_of(plan)
    if plan.recipe.keeps_config:
        value = plan.edited.quantization()
        _, obstacles = with_entries(plan.view, modules, value, stays=True)
        return QuantizationConfig(value=value, obstacles=obstacles)
    if plan.recipe.format == "fp8":
        value = fp8_config(modules)
    else:
        written = compressed_tensors_config
        if plan.recipe.format == "modelopt":
            written = modelopt_config
        value = written(plan.view, modules) | {"kv_cache_scheme": cache}
    value, obstacles = with_entries(plan.view, modules, value)
    for tensor in plan.tensors:
        if tensor.role == "table" and tensor.outputs[0].dtype == "U8":
            obstacles = ("models/qwen4_exp.py has no n-gram table in NVFP4", *obstacles)
            break
    return QuantizationConfig(value=value, obstacles=obstacles)


def files_of(plan: Plan) -> dict[str, Json]:
    """The config files of a plan: the source's config.json with a new quantization_config, and
    without any other in the places where vLLM looks for one.
    """
    if plan.recipe.keeps_config:
        files = {}
        for name in ("config.json", HF_QUANT_CONFIG):
            value = plan.edited.value(name, ())
            if value is not None:
                files[name] = value
        return files
    family = plan.view.family
    quantization = config_of(plan).value
    changed = {**plan.source.config, **family.config_changes}
    config = without(changed, "compression_config")
    if family.table_key:  # the quantization config cannot say it
        proposal = Proposal(replace(plan.source, config=config))
        say_tables(plan, proposal, plan.tensors)
        config = proposal.value(CONFIG, ())
    # Some drafts read it from the language model's part of config.json.
    is_wanted_twice = plan.view.layout.draft_reads_text_config
    for name in ("text_config", "llm_config"):
        inner = config.get(name)
        if inner is not None and (is_wanted_twice or "quantization_config" in inner):
            config[name] = inner = dict(inner)
            inner.pop("quantization_config", None)
            if is_wanted_twice:
                inner["quantization_config"] = quantization
    files = {"config.json": {**config, "quantization_config": quantization}}
    if quantization["quant_method"] == "modelopt":
        files[HF_QUANT_CONFIG] = hf_quant_config(quantization)
    return files
