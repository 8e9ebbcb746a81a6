"""The config files that a plan writes, and the modules that they speak of.

In: a plan. Out: its matrices, the modules that a server asks about, and config.json with the
quantization config in the dialect that the recipe's `format` names. `checkpoints/dialects/` does
the writing, for a plan as for a finished checkpoint.
"""

from dataclasses import replace

from ...checkpoints.dialects.modules import RuntimeModule, named_modules, runtime_modules
from ...checkpoints.dialects.written import QuantizationConfig, config_files, quantization_config
from ...recipes.conventions import FP8_CACHE
from ...recipes.frozen import Json, without
from .plan import Plan
from .tables import TABLE_WORDS
from .tensor_plan import TensorPlan


def matrices_of(plan: Plan) -> list[TensorPlan]:
    """The plan's weights of two and more dimensions: what a Linear, an expert stack, an embedding
    or a head holds. Of an n-gram table the config says nothing.
    """
    opaque = tuple(disk for disk, _, _ in plan.view.layout.opaque)
    return [
        tensor._replace(scheme="" if tensor.role == "table" else tensor.scheme)
        for tensor in plan.tensors
        if len(tensor.shape) >= 2
        and tensor.fate != "drop"
        and (tensor.module != tensor.name or tensor.role == "experts")
        and not tensor.name.startswith(opaque)
    ]


def modules_of(plan: Plan) -> list[RuntimeModule]:
    """Every module of the plan that vLLM may ask its quantization config about, by its fused
    runtime name.
    """
    return runtime_modules(named_modules(plan.view, matrices_of(plan)))


def config_of(plan: Plan) -> QuantizationConfig:
    """The quantization config that a plan writes, in the dialect that the recipe's `format`
    names.
    """
    cache = plan.recipe.kv_cache and dict(FP8_CACHE)
    if cache is None and plan.served is not None:
        cache = plan.served.kv_cache_scheme
    matrices = matrices_of(plan)
    made = quantization_config(plan.view, matrices, format=plan.recipe.format, cache=cache)
    if "U8" in _tables_of(plan):
        says = "models/qwen4_exp.py has no n-gram table in NVFP4"
        made = replace(made, obstacles=(says, *made.obstacles))
    return made


def _tables_of(plan: Plan) -> set[str]:
    """The dtypes of the n-gram tables' tensors."""
    return {tensor.outputs[0].dtype for tensor in plan.tensors if tensor.role == "table"}


def files_of(plan: Plan) -> dict[str, Json]:
    """The config files of a plan: the source's config.json has a new quantization_config instead of
    its own.
    """
    family = plan.view.family
    config = {**plan.source.config, **family.config_changes}
    tables = _tables_of(plan)
    if family.table_key and tables:  # the quantization config cannot say it
        told = without(config.get("text_config", config), family.table_key)
        for dtype in tables & TABLE_WORDS.keys():
            told[family.table_key] = TABLE_WORDS[dtype]
        if "text_config" in config:
            told = {**config, "text_config": told}
        config = told
    return config_files(config, config_of(plan).value, plan.view)
