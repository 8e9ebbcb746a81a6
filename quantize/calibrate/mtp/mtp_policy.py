"""The MTP block under one policy: filled, calibrated or trained, its acceptance measured.

In: a finished backbone pass as two targets (`acceptance.py`), and a plan for each policy. Out:
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
from ...plan.plan import Plan
from ..data.claim import left_behind
from ..layers.backbone import Backbone, fitting
from ..layers.forwards import serving
from ..layers.layer import Calibrated, calibrate
from ..layers.served import InMemory, serve_scales, serve_weights
from ..layers.tables import served_tables
from ..layers.work import LayerWork
from ..model.skeleton import Skeleton
from ..model.states import Stream
from .acceptance import Acceptance, Target, acceptance, block_input
from .mtp_block import MtpBlock, bound_block
from .tuning import Training


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
        return self._kept("released", self.source, self.plan)

    def measured(
        self, plan: Plan | None = None, progress: Callable[[int], None] | None = None
    ) -> Acceptance:
        """Of the quantized backbone with the block as `plan` has it; a killed run goes on with a
        training, which stays until `forget_training`.

        Args:
            plan: of one policy; None for the block as released.
            progress: see `Training.run`.
        """
        if plan is None or not is_served_changed(plan):
            return self._kept("unquantized", self.served, self.plan)
        return self._kept(_key(plan), self.served, plan, progress)

    def forget_training(self, plan: Plan) -> None:
        """Remove the state of a training that is done."""
        if self.backbone.ranks.is_first:
            self._training(plan).unlink(missing_ok=True)

    def _training(self, plan: Plan) -> Path:
        """The state of a training."""
        return self.backbone.folder / "mtp" / f"{_key(plan)}.training"

    def statistics(self, plan: Plan) -> list[Path]:
        """The statistics of a policy that was measured: a file for each block."""
        stem = self.backbone.folder / "mtp" / _key(plan)
        return [Path(f"{stem}-{index:05d}.safetensors") for index in range(num_blocks(plan))]

    def _kept(
        self,
        key: str,
        target: Target,
        plan: Plan,
        progress: Callable[[int], None] | None = None,
    ) -> Acceptance:
        """A result from the pass's folder, or one that is measured now and written there for the
        next run.
        """
        ranks = self.backbone.ranks
        path = self.backbone.folder / "mtp" / f"{key}.json"
        kept = left_behind(path, ranks)
        if kept is not None:
            return Acceptance(torch.tensor(kept, dtype=torch.float64))
        with fitting(self.plan, "the MTP block and a batch", ranks.device):
            blocks = filled_blocks(plan, self.backbone.skeleton)
            if key == _key(plan):  # the block is not as released
                self._make(blocks, plan, progress)
            measured = acceptance(target, blocks_that_draft(plan, blocks))
        if ranks.is_first:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, json.dumps(measured.counts.tolist()))
        return measured

    def _make(
        self, blocks: Sequence[MtpBlock], plan: Plan, progress: Callable[[int], None] | None
    ) -> None:
        """Round or train the blocks as `plan` says; all that is written of them is then on disk."""
        is_tuned = any(tensor.tuned for tensor in plan.mtp)
        stream: Stream = "served"
        if any(tensor.calibrated for tensor in plan.mtp):
            stream = "mtp"
        for index, (block, file) in enumerate(zip(blocks, self.statistics(plan), strict=True)):
            work = LayerWork.of(plan, block.binding)
            training = None
            if is_tuned:  # training chooses the weights, from the released ones on
                training = Training(plan, self.backbone, block)
                work = replace(work, algorithm="minmax")
            found = Calibrated(tensors={}, coverage={})
            inputs = BlockInputs(backbone=self.backbone, blocks=blocks[: index + 1], stream=stream)
            if work.schemes or work.caches:
                found = calibrate(block, inputs, work)
            tensors = work.on_disk(found.tensors)
            serve_weights(block, plan, work, InMemory(tensors))
            if training is not None:
                trained = training.run(InMemory(tensors), self._training(plan), progress)
                if tensors:  # scales of inputs, and trained weights make others
                    found = calibrate(block, inputs, work)
                    tensors = work.on_disk(found.tensors)
                    serve_scales(block, work, InMemory(tensors))
                tensors = trained | tensors
            if self.backbone.ranks.is_first:
                self.backbone.record(file, found, work, tensors)


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

    @torch.no_grad()
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        skeleton = self.backbone.skeleton
        embedding = skeleton.model.get_input_embeddings()
        for batch in self.backbone.batches(self.stream).batches():
            ids = batch.ids.to(skeleton.device)
            # The last slots have no next token.
            length = ids.shape[1] - len(self.blocks)
            hidden = block_input(skeleton, self.blocks[0], batch)[:, :length]
            for step, block in enumerate(self.blocks):
                with served_tables(skeleton, self.stream):
                    rows = embedding(ids[:, 1 + step : 1 + step + length])
                arguments = {
                    "inputs_embeds": rows,
                    "hidden": hidden,
                    "position_ids": torch.arange(step, step + length, device=skeleton.device),
                }
                if step + 1 == len(self.blocks):
                    yield arguments
                    break
                with serving(block):
                    hidden = block(**arguments)[1]


def filled_blocks(plan: Plan, skeleton: Skeleton) -> list[MtpBlock]:
    """The blocks with the released weights, on the skeleton's device."""
    blocks = []
    for index in range(num_blocks(plan)):
        block = bound_block(plan, index)
        skeleton.fill(block, block.binding)
        if block.rotary is not None:
            block.rotary.to(skeleton.device)
        blocks.append(block.requires_grad_(False))
    return blocks


def blocks_that_draft(plan: Plan, blocks: list[MtpBlock]) -> list[MtpBlock]:
    """The blocks that vLLM runs: one a step, or the first one for every step."""
    if plan.view.family.drafts_by_turns:
        return blocks
    return blocks[:1]


def is_served_changed(plan: Plan) -> bool:
    """Whether a server computes the block otherwise than the release: trained, rounded, FP8
    cache.
    """
    for tensor in plan.mtp:
        if tensor.fate == "quantize" or tensor.cache is not None or tensor.tuned:
            return True
    return False


def num_blocks(plan: Plan) -> int:
    """MTP layers of the model, each of one part or more on disk."""
    return plan.view.num_mtp_layers // plan.view.num_mtp_parts


def _key(plan: Plan) -> str:
    """What a policy makes of the block, whatever a recipe calls it; and how it is trained, if it
    is.
    """
    schemes = {}
    caches = []
    for tensor in plan.mtp:
        if tensor.fate == "quantize":
            schemes[tensor.name] = tensor.scheme
        if tensor.cache is not None:
            caches.append(tensor.name)
    tuned = None
    if plan.recipe.mtp_tuned is not None:
        tuned = plan.recipe.mtp_tuned.model_dump(mode="json")
    made = json.dumps([sorted(schemes.items()), caches, tuned])
    return hashlib.sha256(made.encode()).hexdigest()[:16]
