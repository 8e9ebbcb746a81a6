"""One judge for any finished checkpoint: what it predicts and how its drafts are accepted, beside
its release.

In: a release, a finished checkpoint of it (ours in either dialect, llm-compressor's own
`save_pretrained`, modelopt's export), and held-out text. Out: a `Reading` of each: perplexity,
divergence and flips against the release, acceptance by tokens drafted, by sequence, so that
intervals are paired; and bytes.

It computes as a server would. Nothing is calibrated or packed: weights come from the file, by
compressed-tensors' own decompression where it has one for the form, and inputs are rounded as vLLM
rounds them, with the scales in the file. A checkpoint without an MTP block gets the release's.

Easy to get wrong: what vLLM merges. Routed experts have one static input scale for their first
projections and one for their second, the largest; fused modules in FP8 with a scale a tensor are
rounded anew to the largest scale.

Source: vLLM 0.32.0 fused_moe/oracle/nvfp4.py, quantization/utils/fp8_utils.py and w8a8_utils.py
(requantize_with_max_scale); compressed-tensors 0.19.0 compressors.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from keepmtp.checkpoints.dialects.runtime_view import Member, Module, RuntimeView
from keepmtp.checkpoints.mtp_source import has_mtp, with_mtp_of
from keepmtp.checkpoints.source import MTP_FILES, Source, open_source
from keepmtp.checkpoints.stored import KV_SCALE_LEAVES, StoredWeight
from keepmtp.checkpoints.values import read_tensor
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers.backbone import Backbone
from keepmtp.quantize.calibrate.layers.caches import serve_cache
from keepmtp.quantize.calibrate.layers.forwards import serving
from keepmtp.quantize.calibrate.model.binding import Binding
from keepmtp.quantize.calibrate.model.skeleton import Skeleton
from keepmtp.quantize.calibrate.model.states import States
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance, Target, acceptance, target
from keepmtp.quantize.calibrate.mtp.mtp_block import MtpBlock, bind_block, build_block
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family import HFName
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from torch import Tensor, nn

CPU = torch.device("cpu")
_SECOND = ("down_proj", "w2")
_DIVISORS = ("input_global_scale",)
_ROUNDS = {
    ("nvfp4", True): "NVFP4",
    ("nvfp4", False): "NVFP4A16",
    ("nvfp4_modelopt", True): "NVFP4",
    ("nvfp4_modelopt", False): "NVFP4A16",
    ("fp8_tensor", True): "FP8",
    ("fp8_channel", False): "FP8_DYNAMIC",
    ("fp8_block", False): "FP8_BLOCK",
    ("int8", False): "W8A8",
    ("int_packed", False): "W4A16",
}
"""Stored form, and whether the input scale is static -> the scheme of ours that rounds inputs
alike.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a checkpoint does on held-out text.

    Attributes:
        target: its backbone, row by row.
        acceptance: of its drafts by its own backbone.
        backbone_bytes: of its tensors on disk without the MTP block.
        mtp_bytes: of the MTP block on disk.
    """

    target: Target
    acceptance: Acceptance
    backbone_bytes: int
    mtp_bytes: int


class Judge:
    """State: the release's pass over the held-out text, which every checkpoint is compared with.

    Args:
        release: the released checkpoint's folder.
        recipe: any of the model's, for its groups and its calibration block.
        data: its held-out text is measured on.
        folder: for hidden states.
    """

    def __init__(self, release: Path, recipe: Recipe, data: CalibrationData, folder: Path):
        self._recipe, self._data, self._folder = _reading_recipe(recipe), data, folder
        self._release = open_source(release)
        self._pass = self._run(self._release, folder / "release")

    @cached_property
    def release(self) -> Reading:
        """What the release does."""
        return self._reading(self._pass, self._release)

    def read(self, checkpoint: Path) -> Reading:
        """What a finished checkpoint does.

        Raises:
            CheckpointError: it cannot be computed as a server would; names the module.
        """
        opened = open_source(checkpoint)
        source = opened if has_mtp(opened) else with_mtp_of(opened, self._release)
        return self._reading(self._run(source, self._folder / "checkpoint"), source)

    def _run(self, source: Source, folder: Path) -> Backbone:
        """The held-out text through every layer, as a server computes it."""
        weights = Served.of(source)
        plan = make_plan(self._recipe, weights.without_kv_scales)
        ranks = Ranks(rank=0, size=1, device=CPU)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "states").mkdir(parents=True)
        run = Backbone(
            folder=folder,
            skeleton=Skeleton(plan, device=CPU),
            data=self._data,
            ranks=ranks,
            states=States(folder / "states", ranks),
        )
        skeleton = run.skeleton
        for index in range(len(skeleton)):
            binding, path = skeleton.bind_layer(index), f"{skeleton.layer_path}.{index}."
            with run.states.writing(index + 1) as outputs, skeleton.layer(index):
                weights.put(skeleton.model, binding, path)
                run.run("source", index, outputs, serving(skeleton.model))
        return run

    def _reading(self, run: Backbone, source: Source) -> Reading:
        plan = run.skeleton.plan
        found = target(run, "source", reference=None if run is self._pass else self.release.target)
        block = _block(plan, run.skeleton, Served.of(source))
        accepted = acceptance(found, [block])
        sizes = {
            part: sum(e.num_bytes for e in _entries(plan, source, part))
            for part in ("backbone", "mtp")
        }
        return Reading(
            target=found,
            acceptance=accepted,
            backbone_bytes=sizes["backbone"],
            mtp_bytes=sizes["mtp"],
        )


@dataclass(frozen=True)
class Served:
    """The quantized modules of a checkpoint as vLLM has them once it has loaded them."""

    runtime: RuntimeView

    @classmethod
    def of(cls, source: Source) -> "Served":
        return cls(RuntimeView(source=source, view=find_view(source.config, source.where)))

    @cached_property
    def without_kv_scales(self) -> Source:
        """The checkpoint's weights alone."""
        source = self.runtime.source
        kept = {
            name: e
            for name, e in source.entries.items()
            if name.rpartition(".")[2] not in KV_SCALE_LEAVES
        }
        return replace(source, entries=kept)

    def put(self, model: nn.Module, binding: Binding, path: str) -> None:
        """Give modules under `path` the weights and the rounded inputs that a server has.

        Args:
            model: its modules have the weights of the file.
            binding: of a layer or of an MTP block.
            path: its path in the model, with a dot; "" for the model itself.
        """
        for name, pieces in binding.items():
            found = [
                self._modules[piece.module] for piece in pieces if piece.module in self._modules
            ]
            if not name.endswith("weight") or not found:
                continue
            linear = model.get_submodule(f"{path}{name.rpartition('.')[0]}")
            rows = linear.weight.data.split([piece.tensor.shape[-2] for piece in pieces])
            for (module, member), row in zip(found, rows, strict=True):
                row.copy_(self._weight(module, member, row))
            _round_inputs(linear, *self._input(*found[0]))
        for name, pieces in binding.items():
            scales = self._cache_scales(pieces[0].module)
            if name.endswith("weight") and scales is not None:
                serve_cache(model.get_submodule(f"{path}{name.rsplit('.', 2)[0]}"), scales)

    def _cache_scales(self, module: HFName) -> tuple[float, float] | None:
        """Of the FP8 cache of the attention whose projection of keys this is; 1 where others have
        scales.
        """
        attention, _, leaf = module.rpartition(".")
        if leaf != "k_proj" or not self._kv_scales:
            return None
        named = (
            (f"{attention}.k_scale", f"{attention}.v_scale"),
            (f"{module}.k_scale", f"{attention}.v_proj.v_scale"),
        )
        found = next(((keys, values) for keys, values in named if keys in self._kv_scales), None)
        return (self._kv_scales[found[0]], self._kv_scales[found[1]]) if found else (1.0, 1.0)

    @cached_property
    def _kv_scales(self) -> Mapping[str, float]:
        source = self.runtime.source
        entries = [
            e for e in source.entries.values() if e.name.rpartition(".")[2] in KV_SCALE_LEAVES
        ]
        return {entry.name: float(read_tensor(source, entry)) for entry in entries}

    @cached_property
    def _modules(self) -> Mapping[HFName, tuple[Module, Member]]:
        """Module on disk -> the module at run time that it is a part of, for those that are
        packed.
        """
        return {
            member.weight.module: (module, member)
            for module in self.runtime.modules
            for member in module.members
            if member.weight.form != "plain"
        }

    def _weight(self, module: Module, member: Member, row: Tensor) -> Tensor:
        """[N, K], in BF16."""
        weight = member.weight
        if module.resolution.built.form == "plain":
            raise _refusal(
                weight, "a packed weight must be a module that vLLM builds packed", "a plain one"
            )
        if weight.scheme and SCHEMES[weight.scheme].format != "mxfp4-pack-quantized":
            row = _by_compressed_tensors(weight, self._parts(weight))
        fused = [other.weight for other in _fused(module, member)]
        for leaf in ("weight_scale", "weight_global_scale", "weight_scale_2"):
            scales = [
                read_tensor(self.runtime.source, each.parts[leaf])
                for each in fused
                if leaf in each.parts
            ]
            if scales and scales[0].numel() == 1 and len({float(scale) for scale in scales}) > 1:
                if weight.form != "fp8_tensor":
                    raise _refusal(
                        weight, f"modules that vLLM fuses must have one {leaf}", "several"
                    )
                largest = max(float(scale) for scale in scales)
                row = (
                    (row.float() / largest).clamp(-448, 448).to(torch.float8_e4m3fn).float()
                    * largest
                ).to(row.dtype)
        return row

    def _input(self, module: Module, member: Member) -> tuple[str, str, float]:
        """How inputs are rounded: the scheme of ours that does the same, its static scale's name or
        "", the scale.
        """
        built, form = module.resolution.built, member.weight.form
        static = sorted(built.leaves & {"input_global_scale", "input_scale"})
        scheme = _ROUNDS.get((form, bool(static)))
        if scheme is None:
            rule = "the judge must know how vLLM rounds the inputs of a stored form"
            raise _refusal(
                member.weight, rule, f"{form}, static scales: {', '.join(static) or 'none'}"
            )
        if not static:
            return scheme, "", 0.0
        second = _is_second(member)
        own = [
            other.weight
            for other in module.members
            if module.kind != "experts" or _is_second(other) == second
        ]
        scales = [float(read_tensor(self.runtime.source, each.parts[static[0]])) for each in own]
        return (scheme, *_merged(scheme, static[0], scales))

    def _parts(self, weight: StoredWeight) -> dict[str, Tensor]:
        return {
            leaf: read_tensor(self.runtime.source, entry) for leaf, entry in weight.parts.items()
        }


def _merged(scheme: str, leaf: str, scales: list[float]) -> tuple[str, float]:
    """The parameter of the module, and the scale for the largest of the inputs: divisors shrink,
    multipliers grow.
    """
    if leaf in _DIVISORS:
        return leaf, min(scales)
    if scheme == "NVFP4":  # modelopt's multiplier
        return "input_global_scale", 1 / max(scales)
    return leaf, max(scales)


def _reading_recipe(recipe: Recipe) -> Recipe:
    """Everything in BF16: a plan that reads a checkpoint and decides nothing."""
    words = {
        "backbone": dict.fromkeys(recipe.backbone, "bf16"),
        "mtp": "bf16",
        "mtp_auto": None,
        "overrides": (),
    }
    return recipe.model_copy(update=words)


def _by_compressed_tensors(weight: StoredWeight, parts: dict[str, Tensor]) -> Tensor:
    scheme = SCHEMES[weight.scheme]
    args = QuantizationScheme(targets=["Linear"], **scheme.config_group())
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    own = {leaf: value for leaf, value in parts.items() if not leaf.startswith("input_")}
    return compressor.decompress(own, args)["weight"].bfloat16()


def _fused(module: Module, member: Member) -> Iterable[Member]:
    """The weights whose scales vLLM makes one: all of a fused module, the first projections of one
    expert.
    """
    if module.kind != "experts":
        return module.members
    same = [other for other in module.members if other.place.expert == member.place.expert]
    return [other for other in same if _is_second(other) == _is_second(member)]


def _is_second(member: Member) -> bool:
    return member.place.row.path.rpartition(".")[2] in _SECOND


def _round_inputs(linear: Any, scheme: str, leaf: str, scale: float) -> None:
    linear.quantization_scheme = QuantizationScheme(
        targets=["Linear"], **SCHEMES[scheme].config_group()
    )
    linear.quantization_status = QuantizationStatus.COMPRESSED
    if leaf:
        linear.register_parameter(leaf, nn.Parameter(torch.tensor([scale]), requires_grad=False))


def _block(plan: Plan, skeleton: Skeleton, weights: Served) -> MtpBlock:
    block = build_block(plan.view)
    binding = bind_block(block, plan)
    skeleton.fill(block, binding)
    weights.put(block, binding, "")
    return block.requires_grad_(False)


def _entries(plan: Plan, source: Source, part: str) -> list[Any]:
    """Tensors of the checkpoint's own files; a borrowed MTP block has none."""
    own = [each for each in source.entries.values() if not each.file.startswith(MTP_FILES)]
    return [each for each in own if plan.view.is_mtp(each.name) == (part == "mtp")]


def _refusal(weight: StoredWeight, rule: str, got: str) -> CheckpointError:
    return CheckpointError(weight.module, rule, got=got, cure="Run `keepmtp check` on it")
