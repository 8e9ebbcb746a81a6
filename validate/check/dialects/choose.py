"""Which dialect a checkpoint's quantization config is written in.

In: config.json, and hf_quant_config.json if there is one. Out: a `Dialect` with one question,
`resolve(module, shards=..., kind=...)`: what vLLM 0.32 builds for a module, and which entry decided.

Easy to get wrong: where the config is. vLLM looks in config.json: for quantization_config, also in text_config, and
for the old compression_config. It reads hf_quant_config.json only if it finds nothing there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ....checkpoints.companions import HF_QUANT_CONFIG
from ....checkpoints.stored import FLOATS
from ....recipes.errors import CheckpointError
from ....recipes.family import HFName, Part, VLLMName
from ....recipes.renamer import Renamer, renamer
from ..vllm_module import PLAIN, ConfigEntry, Dialect, Kind, Resolution, UnknownDialect
from .autoround import read_autoround
from .awq import read_awq
from .compressed_tensors import read_compressed_tensors
from .fp8 import read_fp8
from .gptq import read_gptq
from .methods import method_of
from .modelopt import read_modelopt
from .quark import read_quark

_NO_TENSORS: Mapping[HFName, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Unquantized:
    """No quantization config: everything is plain."""

    name: str = "none"
    entries: tuple[ConfigEntry, ...] = ()

    def resolve(self, module: VLLMName, *, shards: Sequence[VLLMName], kind: Kind) -> Resolution:
        """Every module is plain."""
        return Resolution(built=PLAIN)

    def covered(self, entry: ConfigEntry, names: frozenset[str]) -> Sequence[str]:
        """There are no entries."""
        return ()


def read_dialect(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None,
    part: Part = "backbone",
    dtypes: Mapping[HFName, str] = _NO_TENSORS,
) -> Dialect:
    """The dialect of a checkpoint.

    Args:
        config: config.json.
        hf_quant_config: hf_quant_config.json, if there is one.
        part: backbone or mtp; the classes of some drafts have a mapper of their own.
        dtypes: of the tensors on disk; GPTQ and AWQ read from them what is quantized.

    Raises:
        CheckpointError: a key has another type than vLLM reads, or an entry is no regular expression.
    """
    found = quantization_of(config)
    if found is None and hf_quant_config is None:
        return Unquantized()
    raw: Mapping[str, Any] = found if found is not None else {"quant_method": "modelopt", **(hf_quant_config or {})}
    try:
        return _read(raw, config, hf_quant_config or {}, renamer(config, part), dtypes)
    except CheckpointError as error:
        raise error.at("config.json: quantization_config" if found is not None else HF_QUANT_CONFIG) from error


def _read(
    raw: Mapping[str, Any],
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any],
    rename: Renamer,
    dtypes: Mapping[HFName, str],
) -> Dialect:
    """The dialect of a quantization config, whose file the caller knows."""
    method = method_of(raw)
    if method == "compressed-tensors":
        return read_compressed_tensors(raw, rename)
    if method.startswith("modelopt") or method == "mxfp8":
        return read_modelopt(raw, hf_quant_config, rename)
    if method in ("fp8", "deepseek_v4_fp8"):
        return read_fp8(raw, config, rename)
    if method in ("gptq", "auto_gptq", "gptq_marlin"):
        return read_gptq(raw, rename, _modules(dtypes)[1])
    if method in ("awq", "auto_awq", "awq_marlin"):
        floats, integers = _modules(dtypes)
        return read_awq(raw, rename, floats - integers)
    if method == "inc":
        return read_autoround(raw, rename)
    if method == "quark" and config.get("model_type") != "deepseek_v4":  # it has a class of its own
        return read_quark(raw, rename)
    return read_unknown(method or "quantization_config without quant_method", raw)


def _modules(dtypes: Mapping[HFName, str]) -> tuple[frozenset[str], frozenset[str]]:
    """Modules on disk with a tensor of floating-point numbers, and modules with one of anything else."""
    floats = {name.rpartition(".")[0] or name for name, dtype in dtypes.items() if dtype in FLOATS}
    integers = {name.rpartition(".")[0] or name for name, dtype in dtypes.items() if dtype not in FLOATS}
    return frozenset(floats), frozenset(integers)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """config.json's quantization config, wherever vLLM looks for it; None if it has none."""
    text_config = config.get("text_config") or {}
    for found in (
        config.get("quantization_config"),
        text_config.get("quantization_config"),
        config.get("compression_config"),
    ):
        if isinstance(found, Mapping):
            return found
    return None


def read_unknown(method: str, raw: Mapping[str, Any]) -> UnknownDialect:
    """A dialect that keepmtp does not know: it reads only the lists of modules to leave alone."""
    entries = []
    for key in ("modules_to_not_convert", "exclude", "ignore", "ignored_layers"):
        listed = raw.get(key)
        words = [word for word in listed if isinstance(word, str)] if isinstance(listed, list | dict) else []
        entries += [ConfigEntry(where=key, written=word, read=(word,)) for word in words]
    return UnknownDialect(name=method, entries=tuple(entries))
