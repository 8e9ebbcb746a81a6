"""One judge for a finished checkpoint: what it predicts and how its drafts are accepted, beside its
release.

In: a release, a finished checkpoint of it in compressed-tensors' format (ours, or llm-compressor's
own `save_pretrained`), and held-out text. Out: a `Reading` of each, by sequence, so that intervals
are paired; and bytes.

It computes as a server would. Nothing is calibrated or packed: weights come from the file, and
inputs are rounded as vLLM rounds them, with the scales in the file. A checkpoint without an MTP
block gets the release's.

Easy to get wrong: what vLLM merges. Modules that it fuses have one static input scale, the largest;
so have the first projections of all routed experts, and the second ones.

Source: vLLM 0.32.0 fused_moe/oracle/nvfp4.py.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from keepmtp.checkpoints.mtp_source import has_mtp, with_mtp_of
from keepmtp.checkpoints.source import Source, open_source, origin_of
from keepmtp.checkpoints.stored import StoredWeight, stored_weights
from keepmtp.checkpoints.values import read_tensor
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers.backbone import Backbone
from keepmtp.quantize.calibrate.layers.forwards import serving
from keepmtp.quantize.calibrate.model.binding import Binding
from keepmtp.quantize.calibrate.model.skeleton import Skeleton
from keepmtp.quantize.calibrate.model.states import States
from keepmtp.quantize.calibrate.mtp.acceptance import Acceptance, Target, acceptance, target
from keepmtp.quantize.calibrate.mtp.mtp_policy import filled_blocks
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES
from torch import nn

CPU = torch.device("cpu")
# Stored form -> the scheme of ours that rounds inputs alike; "" for 16-bit inputs. NVFP4 rounds
# them where there is a scale for it.
ROUNDS = {"plain": "", "int_packed": "", "nvfp4": "", "fp8_channel": "FP8_DYNAMIC"}
INPUT_SCALE = "input_global_scale"
MERGED = {
    r"\.experts\.\d+\.": ".experts.",
    r"\.(q|k|v)_proj": ".qkv",
    r"\.(gate|up)_proj": ".gate_up",
}


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
        # Everything in BF16: a plan that reads a checkpoint and decides nothing.
        words = {
            "backbone": dict.fromkeys(recipe.backbone, "bf16"),
            "mtp": "bf16",
            "mtp_auto": None,
            "overrides": (),
        }
        self._recipe = recipe.model_copy(update=words)
        self._data, self._folder = data, folder
        self._release = open_source(release)

    @cached_property
    def release(self) -> Reading:
        """What the release does."""
        return self._read(self._release, self._folder / "release", None)

    def read(self, checkpoint: Path) -> Reading:
        """What a finished checkpoint does.

        Raises:
            KeyError: it stores weights in a form that is not in `ROUNDS`.
        """
        reference = self.release.target
        source = open_source(checkpoint)
        if not has_mtp(source):
            source = with_mtp_of(source, self._release)
        return self._read(source, self._folder / "checkpoint", reference)

    def _read(self, source: Source, folder: Path, reference: Target | None) -> Reading:
        """The held-out text through every layer and the MTP block, as a server computes it."""
        plan = make_plan(self._recipe, source)
        ranks = Ranks(rank=0, size=1, device=CPU)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "states").mkdir(parents=True)
        skeleton = Skeleton(plan, device=CPU)
        run = Backbone(
            folder=folder,
            skeleton=skeleton,
            data=self._data,
            ranks=ranks,
            states=States(folder / "states", ranks),
        )
        weights = Weights(source)
        for index in range(len(skeleton)):
            path = f"{skeleton.layer_path}.{index}."
            with run.states.writing(index + 1) as outputs, skeleton.layer(index):
                weights.round_inputs(skeleton.model, skeleton.bind_layer(index), path)
                run.run("source", index, outputs, serving(skeleton.model))
        found = target(run, "source", reference=reference)
        (block,) = filled_blocks(plan, skeleton)
        weights.round_inputs(block, block.binding, "")
        sizes = {True: 0, False: 0}
        for entry in source.entries.values():
            if not origin_of(entry):  # a borrowed block is not its own
                sizes[plan.view.is_mtp(entry.name)] += entry.num_bytes
        return Reading(
            target=found,
            acceptance=acceptance(found, [block]),
            backbone_bytes=sizes[False],
            mtp_bytes=sizes[True],
        )


class Weights:
    """The packed weights of a checkpoint. State: the input scales, as vLLM merges them."""

    def __init__(self, source: Source):
        self._stored: Mapping[Any, StoredWeight] = stored_weights(source.entries.values())[0]
        # They divide, so the smallest is for the largest input.
        self._scales = defaultdict[str, float](lambda: float("inf"))
        for entry in source.entries.values():
            module, _, leaf = entry.name.rpartition(".")
            if leaf == INPUT_SCALE:
                scale = float(read_tensor(source, entry))
                self._scales[merged(module)] = min(scale, self._scales[merged(module)])

    def round_inputs(self, model: nn.Module, binding: Binding, path: str) -> None:
        """Give modules under `path` the rounded inputs that a server has.

        Args:
            model: its modules have the weights of the file.
            binding: of a layer or of an MTP block.
            path: its path in the model, with a dot; "" for the model itself.
        """
        for name, pieces in binding.items():
            weight = self._stored.get(pieces[0].module)
            if weight is None or not name.endswith("weight"):
                continue
            scheme = ROUNDS[weight.form]
            scale = self._scales.get(merged(weight.module))
            if scale is not None:
                scheme = "NVFP4"
            if not scheme:
                continue
            linear: Any = model.get_submodule(f"{path}{name.rpartition('.')[0]}")
            arguments = SCHEMES[scheme].config_group()
            linear.quantization_scheme = QuantizationScheme(targets=["Linear"], **arguments)
            linear.quantization_status = QuantizationStatus.COMPRESSED
            if scale is not None:
                value = nn.Parameter(torch.tensor([scale]), requires_grad=False)
                linear.register_parameter(INPUT_SCALE, value)


def merged(module: str) -> str:
    """A name that all modules share whose inputs vLLM rounds by one scale."""
    for pattern, name in MERGED.items():
        module = re.sub(pattern, name, module)
    return module
