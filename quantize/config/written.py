"""The one writer of quantization configs: for a plan, and for the matrices of a finished
checkpoint.

In: matrices, each with its place and its scheme, and a dialect. Out: the `quantization_config` of
config.json for vLLM and, where nothing stands against it, for SGLang; config.json with it; and what
modelopt's readers look for next to it.

Easy to get wrong: where vLLM looks. Some drafts read the config from the language model's part of
config.json.
"""

from collections.abc import Iterable

from ...checkpoints.companions import HF_QUANT_CONFIG
from ...recipes.conventions import FP8_CACHE, Format
from ...recipes.family_view import FamilyView
from ...recipes.frozen import Json, Raw, frozen, without
from ...recipes.runtimes.sglang import VERSION
from ..plan.decide import FP8_TABLE
from ..plan.plan import Plan
from ..plan.tensor_plan import TensorPlan
from .compressed_tensors import compressed_tensors_config
from .modelopt import hf_quant_config, modelopt_config
from .modules import Matrix, RuntimeModule, named_modules, runtime_modules


@frozen
class QuantizationConfig:
    """What a config.json says of how the checkpoint is quantized.

    Attributes:
        value: of its `quantization_config`.
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


def quantization_config(
    view: FamilyView,
    matrices: Iterable[Matrix],
    *,
    format: Format,
    cache: Raw | None,
) -> QuantizationConfig:
    """The quantization config of these matrices.

    Args:
        view: the family's names.
        matrices: all that vLLM may ask about, plain ones with the scheme "".
        format: the dialect.
        cache: the value of `kv_cache_scheme`; None for a cache that is not quantized.

    Raises:
        RecipeError: see `modelopt_config`.
    """
    made = modelopt_config if format == "modelopt" else compressed_tensors_config
    value, obstacles = made(view, named_modules(view, matrices))
    return QuantizationConfig(value=value | {"kv_cache_scheme": cache}, obstacles=tuple(obstacles))


def config_files(config: Raw, quantization: Raw, view: FamilyView) -> dict[str, Json]:
    """config.json with this quantization config, and without any other in the places where vLLM
    looks for one; and what modelopt's readers look for next to it.
    """
    made = without(config, "compression_config")
    is_wanted_twice = view.layout.draft_reads_text_config
    for name in ("text_config", "llm_config"):
        inner = made.get(name)
        if isinstance(inner, dict) and (is_wanted_twice or "quantization_config" in inner):
            made[name] = inner = dict(inner)
            inner.pop("quantization_config", None)
            if is_wanted_twice:
                inner["quantization_config"] = quantization
    files = {"config.json": {**made, "quantization_config": quantization}}
    if quantization["quant_method"] == "modelopt":
        files[HF_QUANT_CONFIG] = hf_quant_config(quantization)
    return files


# --- of a plan ------------------------------------------------------------------------------------


def matrices_of(plan: Plan) -> list[TensorPlan]:
    """The plan's weights of two and more dimensions: what a Linear, an expert stack, an embedding
    or a head holds.
    """
    opaque = tuple(disk for disk, _, _ in plan.view.layout.opaque)
    return [
        tensor
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
    return quantization_config(plan.view, matrices_of(plan), format=plan.recipe.format, cache=cache)


def files_of(plan: Plan) -> dict[str, Json]:
    """The config files of a plan: the source's config.json has a new quantization_config instead of
    its own.
    """
    family = plan.view.family
    config = {**plan.source.config, **family.config_changes}
    if family.fp8_table_key and any(
        tensor.place.row.table_scale and tensor.outputs[0].dtype == FP8_TABLE
        for tensor in plan.tensors
    ):  # a table in FP8, which the quantization config cannot say
        config["text_config"] = {**config["text_config"], family.fp8_table_key: "float8_e4m3fn"}
    return config_files(config, config_of(plan).value, plan.view)
