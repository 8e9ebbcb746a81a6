"""The view that SGLang has of a checkpoint: which module each tensor goes to, and how SGLang builds
it.

In: a `RuntimeView`, which knows the files and the family. Out: an `SglangView` with a module for
each prefix that SGLang constructs; the rules read it.

Easy to get wrong: SGLang builds one MTP layer. The tensors of further ones belong to no module of
it. Target and draft each read config.json anew, each with its own class's mapping. And a draft
class may build everything plain whatever the config says: under modelopt's NVFP4 nearly all do, so
a quantized block is not read.

Source: SGLang 0.5.23 sglang/srt/model_loader/checkpoint_quantization.py, configs/model_config.py
(_verify_quantization), models/qwen3_5_mtp.py (_mtp_quant_config), models/deepseek_nextn.py,
models/glm4_moe.py and models/glm5_next_nextn.py (_resolve_nextn_quant_config),
models/longcat_flash_nextn.py.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ....checkpoints.dialects.choose import UNQUANTIZED, quantization_of, read_sglang_dialect
from ....checkpoints.dialects.dialect import Dialect
from ....checkpoints.dialects.matching import OneAnswer, plain
from ....checkpoints.dialects.modelopt import ModelOpt
from ....checkpoints.dialects.quark import Quark
from ....checkpoints.dialects.runtime_view import KINDS, Member, Module, RuntimeView, parts_of
from ....recipes.errors import CheckpointError
from ....recipes.family import Part, VLLMName
from ....recipes.family_view import FamilyView, Place
from ....recipes.runtimes.sglang import (
    SglangModel,
    entry_renames,
    packed_modules,
    sglang_model,
    sglang_module,
    sglang_stem,
)

# The classes of indexers and compressors are among SGLang's kernels, which nothing constructs for
# the tests.
_NOT_JUDGED = ("vision", "embedding", "table", "norm", "state", "indexer", "compressor")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class SglangView:
    """A checkpoint as SGLang 0.5.23 sees it."""

    runtime: RuntimeView

    @cached_property
    def model(self) -> SglangModel:
        """SGLang's classes and names for it."""
        return sglang_model(self.runtime.view.config)

    @cached_property
    def dialects(self) -> Mapping[Part, Dialect]:
        """The quantization config, as the target's class and as the draft's class read it.

        Raises:
            CheckpointError: a key has another type than is read, or an entry is no regular
                expression.
        """
        view = self.runtime.view
        raw = quantization_of(view.config) or self.runtime.hf_quant_config
        if raw is None:
            return {"backbone": UNQUANTIZED, "mtp": UNQUANTIZED}
        try:
            target = read_sglang_dialect(raw, view, "backbone")
            draft = read_sglang_dialect(raw, view, "mtp")
        except CheckpointError as error:
            raise error.at("config.json: quantization_config") from error
        why = _why_plain(draft, self.model, view)
        if why:
            draft = OneAnswer(draft.name, plain(f"sglang/srt/{self.model.file} builds {why}"))
        return {"backbone": target, "mtp": draft}

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Every module with weights on disk that SGLang builds; by its name on disk where SGLang
        gives it none.
        """
        members: dict[tuple[str, Part, bool], list[Member]] = defaultdict(list)
        for module in self.runtime.modules:
            for member in module.members:
                if not self._is_built(member.place):
                    continue
                name = sglang_module(self.runtime.view, member.place)
                asks = name is not None
                key = (name or member.weight.module, member.place.part, asks)
                members[key].append(member)
        return tuple(self._module(*key, tuple(group)) for key, group in members.items())

    def why_plain(self, part: Part) -> str:
        """Why the draft's class builds everything plain; "" where it does not."""
        dialect = self.dialects[part]
        if isinstance(dialect, OneAnswer) and not dialect.answer.error:
            return dialect.answer.entry
        return ""

    def _module(self, name: str, part: Part, asks: bool, members: tuple[Member, ...]) -> Module:
        kind = KINDS.get(members[0].place.role, "linear")
        shards = parts_of(name, kind, packed_modules(self.runtime.view, part), _PROJECTIONS)
        dialect = self.dialects[part]
        if not asks:
            resolution = plain()
        elif dialect.name == "modelopt_fp4" and name.endswith(self.model.plain_in_fp4):
            resolution = plain("sglang/srt/models/qwen3_next.py builds it plain under modelopt_fp4")
        else:
            resolution = dialect.resolve(VLLMName(name), shards=shards, kind=kind)
        return Module(VLLMName(name), kind, part, shards, members, asks, resolution)

    def _is_built(self, place: Place) -> bool:
        """SGLang builds neither a draft that it has no class for, nor a second layer of one."""
        if place.role in _NOT_JUDGED:
            return False
        if place.role == "linear_attention" and self.model.other_linear_attention:
            return False
        if place.part == "backbone":
            return bool(self.model.layers)
        if self.model.draft is None or place.role == "head":
            return False  # the head of the block is the target's
        return place.layer is None or sglang_stem(self.runtime.view, "mtp", place.layer) is not None


def _why_plain(draft: Dialect, model: SglangModel, view: FamilyView) -> str:
    """What the draft's class builds plain after a look at the config; "" where it leaves that to
    the config.
    """
    if model.plain_draft:
        return "the draft without a quantization config"
    if isinstance(draft, ModelOpt) and draft.name in model.plain_under:
        quantized = [name for name in draft.quantized_layers if name.startswith("mtp.")]
        # Mixed precision lists what is quantized; the class looks for its own block there.
        if draft.name != "modelopt_mixed" or not quantized:
            return f"the draft plain under {draft.name}"
    if isinstance(draft, Quark):
        block = entry_renames(view, "mtp", draft.name).name(f"model.layers.{view.num_layers}")
        experts = [entry for entry in draft.exclude.written if "mlp.experts" in entry]
        # The whole block by its name, or its experts by theirs.
        by = {
            "block": draft.exclude.first(block) is not None,
            "experts": any(entry.startswith("mtp.") for entry in experts),
        }
        if by.get(model.excluded_by):
            return "the draft plain: exclude names it"
    disabled = view.config.get("disable_quant_module") or ()
    if model.plain_where_disabled and model.plain_where_disabled in disabled:
        return f"the draft plain: disable_quant_module has {model.plain_where_disabled}"
    return ""
