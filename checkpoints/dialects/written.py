"""The one writer of quantization configs, of a release's plan as of a finished checkpoint's.

In: named modules, each with its place and its scheme, and a dialect. Out: the `quantization_config`
of config.json for vLLM; config.json with it; and what modelopt's readers look for next to it.
"""

from collections.abc import Iterable

from ...recipes.conventions import Format
from ...recipes.family_view import FamilyView
from ...recipes.frozen import Json, Raw, without
from ..companions import HF_QUANT_CONFIG
from .compressed_tensors import compressed_tensors_config
from .fp8 import fp8_config
from .modelopt import hf_quant_config, modelopt_config
from .modules import NamedModule


def quantization_config(
    view: FamilyView, modules: Iterable[NamedModule], *, format: Format, cache: Raw | None
) -> Json:
    """The quantization config of these modules.

    Args:
        view: the family's names.
        modules: all that vLLM may ask about, plain ones with the scheme "".
        format: the dialect.
        cache: the value of `kv_cache_scheme`; None for a cache that is not quantized.

    Raises:
        RecipeError: see `modelopt_config`.
    """
    if format == "fp8":
        return fp8_config(modules)
    written = compressed_tensors_config
    if format == "modelopt":
        written = modelopt_config
    return written(view, modules) | {"kv_cache_scheme": cache}


def config_files(config: Raw, quantization: Raw, view: FamilyView) -> dict[str, Json]:
    """config.json with this quantization config, and without any other in the places where vLLM
    looks for one; and what modelopt's readers look for next to it.
    """
    made = without(config, "compression_config")
    # Some drafts read it from the language model's part of config.json.
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
