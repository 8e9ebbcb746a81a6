"""Which dialect a checkpoint's quantization config is written in.

In: config.json, and hf_quant_config.json if there is one. Out: a `Dialect` as a version of vLLM
reads it, with one question, `resolve(module, shards=..., kind=...)`: what is built for a module,
and which entry decided.

Easy to get wrong: where the config is.
"""

from collections.abc import Mapping

from ...recipes.errors import CheckpointError
from ...recipes.families import family_of
from ...recipes.family import HFName, Part
from ...recipes.frozen import Json, without
from ...recipes.renamer import renamer
from ...recipes.runtimes.vllm import NEWEST, asked, minor
from ..companions import HF_QUANT_CONFIG
from ..stored import FLOATS
from .autoround import read_autoround
from .compressed_tensors import read_compressed_tensors
from .dialect import Dialect, UnknownDialect
from .fp8 import read_fp8
from .given import Raw
from .gptq import read_awq, read_gptq
from .matching import plain
from .modelopt import read_modelopt
from .quark import read_quark

# Names that vLLM reads as another one.
ALIASES = {"auto-round": "inc", "compressed_tensors": "compressed-tensors"}
_ELSEWHERE = "Serve it with the engine that it was made for, or quantize the original release"
_LOWER = _ELSEWHERE.lower()
NO_METHOD = "quantization_config without quant_method"
UNQUANTIZED = Dialect(name="none", answer=plain())


def read_dialect(
    config: Raw,
    hf_quant_config: Raw | None,
    part: Part = "backbone",
    dtypes: Mapping[HFName, str] = {},
    vllm: str = NEWEST,
) -> Dialect:
    """The dialect of a checkpoint.

    Args:
        config: config.json.
        hf_quant_config: hf_quant_config.json, if there is one.
        part: backbone or mtp; the classes of some drafts have a mapper of their own.
        dtypes: of the tensors on disk; GPTQ and AWQ read from them what is quantized.
        vllm: the version that reads it.

    Raises:
        CheckpointError: a key has another type than vLLM reads, or an entry is no regular
            expression.
    """
    where = "config.json: quantization_config"
    raw = quantization_of(config)
    # hf_quant_config.json is read only where config.json has nothing.
    if raw is None and hf_quant_config is None:
        return UNQUANTIZED
    if raw is None:
        where = HF_QUANT_CONFIG
        raw = {"quant_method": "modelopt", **(hf_quant_config or {})}
    method = method_of(raw)
    try:
        family = family_of(config, vllm)
        rename = renamer(config, part, vllm)
        match method:
            case "compressed-tensors":
                return read_compressed_tensors(raw, rename, family)
            case "fp8" | "deepseek_v4_fp8":
                return read_fp8(raw, config, rename)
            case "gptq" | "auto_gptq" | "gptq_marlin":
                return read_gptq(raw, rename, _modules(dtypes, are_floats=False))
            case "awq" | "auto_awq" | "awq_marlin":
                integers = _modules(dtypes, are_floats=False)
                return read_awq(raw, rename, _modules(dtypes, are_floats=True) - integers)
            case "inc":
                return read_autoround(raw, rename)
            case "quark" if family is None or not family.fp8_class:  # else it goes to that class
                return read_quark(raw, rename)
        if method.startswith("modelopt") or method == "mxfp8":
            return read_modelopt(raw, hf_quant_config or {}, rename, vllm)
    except CheckpointError as error:
        raise error.at(where) from error
    # A dialect that keepmtp does not know: only the lists of modules to leave alone are read.
    listed = dict[str, list[str]]()
    for key in ("modules_to_not_convert", "exclude", "ignore", "ignored_layers"):
        words = raw.get(key)
        if isinstance(words, list | dict):
            listed[key] = [word for word in words if isinstance(word, str)]
    return UnknownDialect(name=method or NO_METHOD, listed=listed)


def _modules(dtypes: Mapping[HFName, str], *, are_floats: bool) -> frozenset[str]:
    """Modules on disk with a tensor of floating-point numbers, or with one of anything else."""
    modules = set[str]()
    for name, dtype in dtypes.items():
        if (dtype in FLOATS) == are_floats:
            modules.add(name.rpartition(".")[0] or name)
    return frozenset(modules)


def quantization_of(config: Raw) -> Raw | None:
    """config.json's quantization config, wherever vLLM looks for it; None if it has none."""
    text_config = config.get("text_config") or {}
    # In their order; the last is an old name.
    places = (
        config.get("quantization_config"),
        text_config.get("quantization_config"),
        config.get("compression_config"),
    )
    for place in places:
        if place is not None:
            return place
    return None


def without_quantization(config: Raw) -> Json:
    """config.json with no quantization config in any of the places where somebody looks for one."""
    plain = without(config, "quantization_config", "compression_config")
    for name in ("text_config", "llm_config"):
        if isinstance(plain.get(name), Mapping):
            plain[name] = without(plain[name], "quantization_config", "compression_config")
    return plain


def attention_backends(config: Raw) -> Mapping[str, str]:
    """The family's `attention_backends` for a checkpoint that is not in the release's own form."""
    family = family_of(config)
    raw = quantization_of(config) or {}
    is_own = not (raw.get("ignored_layers") or raw.get("modules_to_not_convert"))
    if family is None or (is_own and method_of(raw) in ("fp8", family.fp8_class)):
        return {}
    return family.attention_backends


def method_of(raw: Raw | None) -> str:
    """The quant_method as vLLM reads it; "" where there is none."""
    given = (raw or {}).get("quant_method")
    if not isinstance(given, str):
        return ""
    return ALIASES.get(given.lower(), given.lower())


def unloadable(config: Raw, vllm: str) -> tuple[str, str, str] | None:
    """Why this vLLM has nothing to load the quantization method with, if it has not: the key of
    config.json, what vLLM does, and the cure.
    """
    methods = asked(vllm)
    name = f"vLLM {minor(vllm)}"
    method = method_of(quantization_of(config))
    given = config.get("quantization")
    if not method and isinstance(given, Mapping) and "bits" in given and "group_size" in given:
        says = (
            f"is MLX's key, which {name} does not read: it builds a plain model and raises on "
            "the packed weights"
        )
        return "config.json: quantization", says, _ELSEWHERE
    says = ""
    cure = _ELSEWHERE
    if method in methods.deprecated_methods:
        says = (
            f"is {method}, which {name} refuses as deprecated unless "
            "--allow-deprecated-quantization is set"
        )
        cure = f"Set that option, or {_LOWER}"
    elif method and method not in methods.methods:
        says = (
            f"is {method}, which {name} does not have: it raises ValueError 'Unknown "
            f"quantization method: {method}'"
        )
    if method == "bitsandbytes":
        says += ". With 0.28 it moved to vllm-bnb-plugin (vllm #43529)"
        cure = (
            f"Install vllm-bnb-plugin beside vLLM, whose rules keepmtp does not know, or {_LOWER}"
        )
    if not says:
        return None
    return "config.json: quantization_config.quant_method", says, cure
