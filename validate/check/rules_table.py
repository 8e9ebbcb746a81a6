"""Rules on a table whose rows are looked up: BF16, or FP8 with one scale for all of its parts.

In: a `RuntimeView`. Out: objections.

Easy to get wrong: vLLM chooses the form by a key of text_config first, and by the quantization config where that key is
absent. Under modelopt and compressed-tensors a table that is not excluded is refused, and one that is excluded is BF16.

Source: vLLM 0.32.0 models/qwen4_exp/common/ngram_embedding.py (Qwen4ExpPLEEmbeddingMethod.from_quant_config).
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from ...recipes.family import HFName, VLLMName
from ..facts.findings import Objection, objection
from .dialects.fp8 import Fp8
from .dialects.modelopt import ModelOpt
from .runtime_view import Member, Module, RuntimeView
from .vllm_module import UnknownDialect

_FP8 = "F8_E4M3"
_FP8_WORD = "float8_e4m3fn"
_Form = Literal["fp8", "plain", "refused", "unknown"]


def table_is_as_built(runtime: RuntimeView) -> Iterator[Objection]:
    """The parts of a table are stored as vLLM holds the table, with its scale where it is FP8."""
    tables: dict[HFName, list[Member]] = defaultdict(list)
    names: dict[HFName, VLLMName] = {}
    for module in runtime.modules:
        for member in module.members:
            if member.place.row.table_scale:
                scale = _scale_name(module, member)
                tables[scale].append(member)
                names[scale] = module.name
    for scale, parts in tables.items():
        yield from _of_table(runtime, names[scale], scale, parts)


RULES = (table_is_as_built,)


def _of_table(runtime: RuntimeView, name: VLLMName, scale: HFName, parts: list[Member]) -> Iterator[Objection]:
    built = _built(runtime, name)
    packed = [part.weight.weight.name for part in parts if part.weight.weight.dtype == _FP8]
    plain = [part.weight.weight.name for part in parts if part.weight.form == "plain"]
    has_scale = scale in runtime.source.entries
    key = runtime.view.family.fp8_table_key
    set_key = f'Set "{key}": "{_FP8_WORD}" in config.json: text_config'
    if built == "refused":
        says = f"{runtime.dialect.name} quantizes it, which vLLM refuses: NotImplementedError"
        yield _objection(name, says, set_key if packed else f"Add {name} to the modules that stay plain", len(parts))
    elif built == "plain" and packed:
        says = f"stored as {_FP8} with one scale, but vLLM builds {name} in BF16: it raises ValueError on {scale}"
        yield _objection(packed[0], says, set_key, len(packed))
    elif built == "fp8" and plain:
        says = (
            f"stored plain, but vLLM builds {name} in FP8, casts its rows without a scale, and then raises ValueError"
        )
        cure = f"Add {name} to modules_to_not_convert, and remove {key} from text_config"
        yield _objection(plain[0], says, cure, len(plain))
    elif built == "fp8" and packed and not has_scale:
        says = "is not in the checkpoint: vLLM raises ValueError 'FP8 PLE checkpoint is missing its global scale'"
        yield _objection(scale, says, "Bring it back from the release", 1)
    elif built == "plain" and has_scale:
        says = f"is the scale of a table in FP8, but {plain[0] if plain else name} is BF16: vLLM raises ValueError"
        yield _objection(scale, says, "Remove it, or take the table from the release that it belongs to", 1)


def _built(runtime: RuntimeView, name: VLLMName) -> _Form:
    """How vLLM holds the table."""
    if runtime.view.text_config.get(runtime.view.family.fp8_table_key) == _FP8_WORD:
        return "fp8"
    dialect = runtime.dialect
    if isinstance(dialect, UnknownDialect):
        return "unknown"
    if isinstance(dialect, Fp8):
        is_plain = any(entry == name or entry.startswith(f"{name}.shard_") for entry in dialect.ignored)
        return "plain" if is_plain else "fp8"
    form = dialect.resolve(name, shards=(), kind="linear").built.form
    if isinstance(dialect, ModelOpt) and dialect.algorithm == "MIXED_PRECISION":
        return "fp8" if form == "fp8_tensor" else "plain"
    return "plain" if form == "plain" else "refused"


def _scale_name(module: Module, member: Member) -> HFName:
    return HFName(member.place.module.removesuffix(member.place.row.path) + member.place.row.table_scale)


def _objection(where: str, says: str, cure: str, count: int) -> Objection:
    return objection(rule="table", severity="error", where=where, says=says, cure=cure, count=count)
