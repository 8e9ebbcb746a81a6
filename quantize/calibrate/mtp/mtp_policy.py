"""The MTP block under one policy: filled, calibrated or trained, its acceptance measured.

In: a finished backbone pass as two targets (`target.py`), and a plan for each policy. Out:
`PolicyResults`: the acceptance of the released model, of the quantized backbone with the block as
released, and of both quantized, and the files with what is written of the block.

The block is a small model of its own. Its inputs are the hidden states of the calibration batches
as a server computes them, which the backbone pass wrote after its last layer, and the embeddings of
the next tokens. So a policy needs no other backbone pass.

Easy to get wrong: with several blocks, block j drafts step j + 1. Its inputs are the tokens j + 1
slots on, and the hidden state that block j - 1 computes as a server would.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ....checkpoints.files import write_whole
from ....recipes.family import HFName
from ...plan.plan import Plan
from ..layers.backbone import Backbone, fitting
from ..layers.forwards import serving
from ..layers.layer import Calibrated, calibrate
from ..layers.served import InMemory, serve_weights
from ..layers.work import LayerWork
from ..model.skeleton import Skeleton
from ..model.states import Stream
from .acceptance import Acceptance, acceptance
from .mtp_block import MtpBlock, bind_block, build_block
from .target import Target, block_input
from .tuning import Training, train

# vLLM 0.32.0 runs the first MTP layer at every step, however many there are
# (v1/spec_decode/llm_base_proposer.py leaves spec_step_idx at 0). For this family alone a proposer
# takes the next layer at each step (v1/spec_decode/step3p5.py).
_A_LAYER_A_STEP = frozenset({"step3p5"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResults:
    """Results of policies, measured when they are first asked for.

    Each is kept in a file of the pass's folder, so that a killed run repeats one policy at most.

    Attributes:
        plan: the run's.
        source: the backbone as released.
        served: the quantized one.
    """

    plan: Plan
    source: Target
    served: Target

    @property
    def backbone(self) -> Backbone:
        """The finished pass."""
        return self.served.backbone

    def released(self) -> Acceptance:
        """Of the released model."""
        return self._kept("released", self.source, self._filled)

    def unquantized(self) -> Acceptance:
        """Of the quantized backbone with the block as released."""
        return self._kept("unquantized", self.served, self._filled)

    def measured(self, plan: Plan, progress: Callable[[int], None] | None = None) -> Acceptance:
        """Of the quantized backbone with the block as `plan` has it; a killed run goes on with a
        training.

        Args:
            plan: of one policy.
            progress: see `tuning.train`.
        """
        if not is_served_changed(plan):
            return self.unquantized()
        found = self._kept(_key(plan), self.served, lambda: self._made(plan, progress))
        if self.backbone.ranks.is_first:
            for file in self.statistics(plan):
                file.with_suffix(".training").unlink(missing_ok=True)
        return found

    def statistics(self, plan: Plan) -> list[Path]:
        """The statistics of a policy that was measured: a file for each block."""
        folder, key = self.backbone.folder / "mtp", _key(plan)
        return [folder / f"{key}-{index:05d}.safetensors" for index in range(num_blocks(plan))]

    def _kept(self, key: str, target: Target, blocks: Callable[[], list[MtpBlock]]) -> Acceptance:
        """A result from the pass's folder, or one that is measured now and written there for the
        next run.
        """
        path, ranks = self.backbone.folder / "mtp" / f"{key}.json", self.backbone.ranks
        # One rank looks for all: each for itself, one could find what another has not seen yet, and
        # wait for its sums.
        kept = ranks.of_first(lambda: json.loads(path.read_text()) if path.is_file() else None)
        if kept is not None:
            return Acceptance.read(kept)
        with fitting(self.plan, "the MTP block and a batch", ranks.device):
            found = acceptance(target, blocks_that_draft(self.plan, blocks()))
        if ranks.is_first:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, json.dumps(found.as_json()))
        return found

    def _filled(self) -> list[MtpBlock]:
        return filled_blocks(self.plan, self.backbone.skeleton)

    def _made(self, plan: Plan, progress: Callable[[int], None] | None) -> list[MtpBlock]:
        """The blocks rounded or trained as `plan` says, once all that is written of them is on
        disk.
        """
        blocks, backbone = filled_blocks(plan, self.backbone.skeleton), self.backbone
        needs_batches = any(tensor.calibrated for tensor in plan.tensors if tensor.part == "mtp")
        for index, (block, file) in enumerate(zip(blocks, self.statistics(plan), strict=True)):
            binding = bind_block(block, plan)
            work, masters = LayerWork.of(plan, binding), dict[str, Tensor]()
            for name, pieces in binding.items():
                if pieces[0].tensor.tuned:
                    masters[name] = block.get_parameter(name).detach().float().clone()
            if masters:  # training chooses the weights
                work = replace(work, algorithm="minmax")
            found = Calibrated(tensors={}, coverage=())
            if work.schemes or work.caches:
                found = calibrate(
                    block,
                    BlockInputs(
                        backbone=backbone,
                        blocks=blocks[: index + 1],
                        stream="mtp" if needs_batches else "served",
                    ),
                    work,
                )
            elif not masters:
                continue
            tensors, losses = work.on_disk(found.tensors), []
            serve_weights(block, plan, work, InMemory(tensors))
            if masters:
                training = Training(
                    plan=plan,
                    backbone=backbone,
                    block=block,
                    binding=binding,
                    scales=tensors,
                    masters=masters,
                )
                losses = train(training, file.with_suffix(".training"), progress)
                tensors = tensors | training.serve()
            if backbone.ranks.is_first:
                backbone.record(file, found, work, tensors, losses=losses)
        return blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInputs:
    """Batches as inputs of the last of `blocks`, computed again for each iteration.

    Attributes:
        blocks: those before the last one have their served weights.
        stream: `mtp`, the calibration text; `served`, held-out text, for schemes that no batch
            changes.
    """

    backbone: Backbone
    blocks: Sequence[MtpBlock]
    stream: Stream = "mtp"

    def __len__(self) -> int:
        return len(self.backbone.batches(self.stream))

    @torch.no_grad()
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        skeleton, (*before, _) = self.backbone.skeleton, self.blocks
        embedding = skeleton.model.get_input_embeddings()
        for batch in self.backbone.batches(self.stream).batches():
            ids = batch.ids.to(skeleton.device)
            # The last slots have no next token.
            length = ids.shape[1] - len(self.blocks)
            arguments = {
                "inputs_embeds": embedding(ids[:, 1 : 1 + length]),
                "hidden": block_input(skeleton, self.blocks[0], batch)[:, :length],
                "position_ids": torch.arange(length, device=skeleton.device),
            }
            for step, block in enumerate(before, start=1):
                with serving(block):
                    hidden = block(**arguments)[1]
                arguments = {
                    "inputs_embeds": embedding(ids[:, 1 + step : 1 + step + length]),
                    "hidden": hidden,
                    "position_ids": arguments["position_ids"] + 1,
                }
            yield arguments


def filled_blocks(plan: Plan, skeleton: Skeleton) -> list[MtpBlock]:
    """The blocks with the released weights, on the skeleton's device."""
    blocks = []
    for index in range(num_blocks(plan)):
        block = build_block(plan.view, index)
        skeleton.fill(block, bind_block(block, plan))
        if block.rotary is not None:
            block.rotary.to(skeleton.device)
        blocks.append(block.requires_grad_(False))
    return blocks


def blocks_that_draft(plan: Plan, blocks: list[MtpBlock]) -> list[MtpBlock]:
    """The blocks that vLLM runs: one a step, or the first one for every step."""
    return blocks if plan.view.family.model_type in _A_LAYER_A_STEP else blocks[:1]


def block_schemes(plan: Plan) -> dict[HFName, str]:
    """Tensor of the block -> scheme that it is rounded to."""
    own = [each for each in plan.tensors if each.part == "mtp" and each.fate == "quantize"]
    return {tensor.name: tensor.scheme for tensor in own}


def is_served_changed(plan: Plan) -> bool:
    """Whether a server computes the block otherwise than the release: trained, rounded, FP8
    cache.
    """
    for tensor in plan.tensors:
        if tensor.part == "mtp" and (tensor.fate == "quantize" or tensor.cache is not None):
            return True
        if tensor.tuned:
            return True
    return False


def num_blocks(plan: Plan) -> int:
    """MTP layers of the model, each of one part or more on disk."""
    return plan.view.num_mtp_layers // plan.view.num_mtp_parts


def _key(plan: Plan) -> str:
    """What a policy makes of the block, whatever a recipe calls it; and how it is trained, if it
    is.
    """
    caches = [each.name for each in plan.tensors if each.part == "mtp" and each.cache is not None]
    tuned = plan.recipe.mtp_tuned and plan.recipe.mtp_tuned.model_dump(mode="json")
    made = json.dumps([sorted(block_schemes(plan).items()), caches, tuned])
    return hashlib.sha256(made.encode()).hexdigest()[:16]
