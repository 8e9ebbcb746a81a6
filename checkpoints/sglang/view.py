"""How SGLang builds the modules of a checkpoint.

In: a family's view and a quantization config. Out: a `SglangBuild`, which says for the place of a
module under which name SGLang constructs it, and as what.

Easy to get wrong: SGLang builds one MTP layer. The tensors of further ones belong to no module of
it. Target and draft each read config.json anew, each with its own class's mapping. And a draft
class may build everything plain whatever the config says: under modelopt's NVFP4 nearly all do, so
a quantized block is not read.

Source: SGLang 0.5.23 sglang/srt/model_loader/checkpoint_quantization.py, configs/model_config.py
(_verify_quantization), models/qwen3_5_mtp.py (_mtp_quant_config), models/deepseek_nextn.py,
models/glm4_moe.py and models/glm5_next_nextn.py (_resolve_nextn_quant_config),
models/longcat_flash_nextn.py.
"""

from ...recipes.errors import CheckpointError
from ...recipes.family import Part, VLLMName
from ...recipes.family_view import FamilyView, Place
from ...recipes.frozen import Raw
from ..dialects.compressed_tensors import CompressedTensors
from ..dialects.dialect import Resolution, VLLMModule
from ..dialects.matching import parts_of, plain
from ..dialects.modelopt import ModelOpt
from ..dialects.quark import Quark
from ..dialects.runtime_view import KINDS
from .names import entry_renames, sglang_model, sglang_module, sglang_stem
from .reading import SglangReader, fixed, read

# The classes of indexers and compressors are among SGLang's kernels, which nothing constructs for
# the tests.
_NOT_JUDGED = ("vision", "embedding", "table", "norm", "state", "indexer", "compressor")
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_NO_CONFIG = fixed("none", plain())


class SglangBuild:
    """What SGLang 0.5.23 builds for the modules of a family under a quantization config, if any."""

    def __init__(self, view: FamilyView, raw: Raw | None) -> None:
        """Target and draft read the config.

        Raises:
            CheckpointError: a key has another type than is read, or an entry is no regular
                expression.
        """
        self.view = view
        self.model = sglang_model(view.config)
        self.readers: dict[Part, SglangReader] = {"backbone": _NO_CONFIG, "mtp": _NO_CONFIG}
        if raw is not None:
            try:
                self.readers = {part: read(raw, view, part) for part in self.readers}
            except CheckpointError as error:
                raise error.at("config.json: quantization_config") from error
        self.why_plain = self._why_plain()

    def is_judged(self, place: Place) -> bool:
        """Whether keepmtp knows how it is built: neither a draft that SGLang has no class for, nor
        a second layer of one.
        """
        if place.role in _NOT_JUDGED:
            return False
        if place.role == "linear_attention" and self.model.other_linear_attention:
            return False
        if place.part == "backbone":
            return bool(self.model.layers)
        if self.model.draft is None or place.role == "head":
            return False  # the head of the block is the target's
        return place.layer is None or sglang_stem(self.view, "mtp", place.layer) is not None

    def resolve(self, place: Place) -> tuple[str, Resolution]:
        """The prefix of the module that SGLang constructs, "" where it asks the config about none;
        and what it builds.
        """
        name = sglang_module(self.view, place)
        if not name:
            return name, plain()
        reader = self.readers[place.part]
        kind = KINDS.get(place.role, "linear")
        packed = self.model.packed
        if place.part == "mtp" and self.model.draft_packed is not None:
            packed = self.model.draft_packed
        shards = parts_of(name, kind, packed, _PROJECTIONS)
        answer = reader.resolve(VLLMName(name), shards, kind)
        if place.part == "mtp" and self.why_plain:
            answer = plain(f"sglang/srt/{self.model.file} builds {self.why_plain}")
        elif reader.name == "modelopt_fp4" and name.endswith(tuple(self.model.plain_in_fp4)):
            answer = plain("sglang/srt/models/qwen3_next.py builds it plain under modelopt_fp4")
        return name, answer

    def unsplit(self, name: str, built: VLLMModule, part: Part) -> str:
        """Why SGLang cannot split a kv_b_proj that is built so, which it does after loading
        (sglang #32736, #37207); "" where it can.
        """
        form = built.form
        groups = self.readers[part].vllm
        if not name.endswith(".kv_b_proj"):
            return ""
        if form in ("nvfp4", "nvfp4_modelopt", "int_packed"):
            return (
                f"reads its `weight` as one number an input, which {form} has not: it raises, or "
                "splits bytes that are no numbers (deepseek_weight_loader.py: post_load_weights)"
            )
        is_sized = not isinstance(groups, CompressedTensors) or "Linear" in groups.builds
        if form != "fp8_block" or is_sized:
            return ""
        return (
            "takes the size of its blocks from the target Linear, which is not in "
            "config_groups: it raises on the "
            "scales' shape (deepseek_weight_loader.py: _resolve_layer_weight_block_size)"
        )

    def _why_plain(self) -> str:
        """What the draft's class builds plain after a look at the config; "" where it leaves that
        to the config.
        """
        model = self.model
        reader = self.readers["mtp"]
        draft = reader.vllm
        disabled = self.view.config.get("disable_quant_module") or ()
        if reader is _NO_CONFIG:
            return ""
        if model.plain_draft:
            return "the draft without a quantization config"
        if isinstance(draft, ModelOpt) and reader.name in model.plain_under:
            quantized = [name for name in draft.quantized_layers if name.startswith("mtp.")]
            # Mixed precision lists what is quantized; the class looks for its own block there.
            if reader.name != "modelopt_mixed" or not quantized:
                return f"the draft plain under {reader.name}"
        if isinstance(draft, Quark):
            renames = entry_renames(self.view, "mtp", "quark")
            block = renames.name(f"model.layers.{self.view.num_layers}")
            # The whole block by its name, or its experts by theirs.
            is_named = model.excluded_by == "block" and draft.exclude.first(block) is not None
            for entry in draft.exclude.written:
                is_of_experts = entry.startswith("mtp.") and "mlp.experts" in entry
                is_named |= is_of_experts and model.excluded_by == "experts"
            if is_named:
                return "the draft plain: exclude names it"
        if model.plain_where_disabled and model.plain_where_disabled in disabled:
            return f"the draft plain: disable_quant_module has {model.plain_where_disabled}"
        return ""
