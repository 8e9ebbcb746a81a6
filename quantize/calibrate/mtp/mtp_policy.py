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
from ..model.skeleton import Batch, Skeleton
from ..model.states import Stream
from .acceptance import Acceptance, acceptance
from .mtp_block import MtpBlock, bind_block, build_block
from .target import Target, block_input
from .tuning import Training, masters_of, train

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

    @property
    def folder(self) -> Path:
        """Where results are kept."""
        return self.backbone.folder / "mtp"

    def released(self) -> Acceptance:
        """Of the released model."""
        return self._kept(
            "released", lambda: self._acceptance(self.source, self._filled(self.plan))
        )

    def unquantized(self) -> Acceptance:
        """Of the quantized backbone with the block as released."""
        return self._kept(
            "unquantized", lambda: self._acceptance(self.served, self._filled(self.plan))
        )

    def measured(
        self, plan: Plan, progress: Callable[[int, int], None] | None = None
    ) -> Acceptance:
        """Of the quantized backbone with the block as `plan` has it; a killed run goes on with a
        training.

        Args:
            plan: of one policy.
            progress: see `tuning.train`.
        """
        if not is_served_changed(plan):
            return self.unquantized()
        found = self._kept(
            _key(plan), lambda: self._acceptance(self.served, self._made(plan, progress))
        )
        if self.backbone.ranks.is_first:
            for file in self.statistics(plan):
                _unfinished(file).unlink(missing_ok=True)
        return found

    def statistics(self, plan: Plan) -> tuple[Path, ...]:
        """The statistics of a policy that was measured: a file for each block."""
        return tuple(
            self.folder / f"{_key(plan)}-{index:05d}.safetensors"
            for index in range(num_blocks(plan))
        )

    def _kept(self, key: str, measure: Callable[[], Acceptance]) -> Acceptance:
        """A result from the pass's folder, or one that is measured now and written there for the
        next run.
        """
        path, ranks = self.folder / f"{key}.json", self.backbone.ranks
        # One rank looks for all: each for itself, one could find what another has not seen yet, and
        # wait for its sums.
        kept = ranks.of_first(lambda: json.loads(path.read_text()) if path.is_file() else None)
        if kept is not None:
            return Acceptance.read(kept)
        with fitting(self.plan, "the MTP block and a batch", self.backbone.skeleton.device):
            found = measure()
        if ranks.is_first:
            self.folder.mkdir(exist_ok=True)
            write_whole(path, json.dumps(found.as_json()))
        return found

    def _acceptance(self, target: Target, blocks: Sequence[MtpBlock]) -> Acceptance:
        return acceptance(target, blocks_that_draft(self.plan, blocks))

    def _filled(self, plan: Plan) -> list[MtpBlock]:
        """The blocks with the released weights."""
        return filled_blocks(plan, self.backbone.skeleton)

    def _made(self, plan: Plan, progress: Callable[[int, int], None] | None) -> list[MtpBlock]:
        """The blocks rounded or trained as `plan` says, once everything that is written of them is
        on disk.
        """
        blocks = self._filled(plan)
        for index, (block, file) in enumerate(zip(blocks, self.statistics(plan), strict=True)):
            binding = bind_block(block, plan)
            work, masters = LayerWork.of(plan, binding), masters_of(block, binding)
            found = self._calibrated(plan, blocks[: index + 1], work)
            if found is None and not masters:
                continue
            found = found or Calibrated(tensors={}, coverage=())
            tensors, losses = work.on_disk(found.tensors), []
            serve_weights(block, plan, work, InMemory(tensors))
            if masters:
                training = Training(
                    plan=plan,
                    backbone=self.backbone,
                    block=block,
                    binding=binding,
                    scales=tensors,
                    masters=masters,
                )
                losses = train(training, _unfinished(file), progress)
                tensors = tensors | training.serve()
            if self.backbone.ranks.is_first:
                self.backbone.record(file, found, work, tensors, losses=losses)
        return blocks

    def _calibrated(
        self, plan: Plan, blocks: Sequence[MtpBlock], work: LayerWork
    ) -> Calibrated | None:
        """What calibration finds in the last of `blocks`; None where it has no scheme."""
        if not work.schemes and not work.caches:
            return None
        if plan.recipe.mtp_tuned:  # training chooses the weights
            work = replace(work, algorithm="minmax", backend="llmcompressor")
        needs_batches = any(tensor.calibrated for tensor in plan.tensors if tensor.part == "mtp")
        stream: Stream = "mtp" if needs_batches else "served"
        return calibrate(
            blocks[-1], BlockInputs(backbone=self.backbone, blocks=blocks, stream=stream), work
        )


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

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.backbone.batches(self.stream).batches():
            yield self._arguments(batch)

    @torch.no_grad()
    def _arguments(self, batch: Batch) -> dict[str, Tensor]:
        skeleton = self.backbone.skeleton
        embedding, ids = skeleton.model.get_input_embeddings(), batch.ids.to(skeleton.device)
        # The last slots have no next token.
        length = ids.shape[1] - len(self.blocks)
        hidden, arguments = block_input(skeleton, self.blocks[0], batch)[:, :length], {}
        for step, block in enumerate(self.blocks, start=1):
            arguments = {
                "inputs_embeds": embedding(ids[:, step : step + length]),
                "hidden": hidden,
                "position_ids": torch.arange(length, device=skeleton.device) + step - 1,
            }
            if block is not self.blocks[-1]:
                with serving(block):
                    hidden = block(**arguments)[1]
        return arguments


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


def blocks_that_draft(plan: Plan, blocks: Sequence[MtpBlock]) -> Sequence[MtpBlock]:
    """The blocks that vLLM runs: one a step, or the first one for every step."""
    return blocks if plan.view.family.model_type in _A_LAYER_A_STEP else blocks[:1]


def block_schemes(plan: Plan) -> dict[HFName, str]:
    """Tensor of the block -> scheme that it is rounded to."""
    return {
        tensor.name: tensor.scheme
        for tensor in plan.tensors
        if tensor.part == "mtp" and tensor.fate == "quantize"
    }


def is_served_changed(plan: Plan) -> bool:
    """Whether a server computes the block otherwise than the release does: trained, rounded, or
    with an FP8 cache.
    """
    is_tuned = any(tensor.tuned for tensor in plan.tensors)
    return is_tuned or bool(block_schemes(plan) or _block_caches(plan))


def _block_caches(plan: Plan) -> list[HFName]:
    """The projections of keys whose attention has an FP8 cache."""
    return [
        tensor.name for tensor in plan.tensors if tensor.part == "mtp" and tensor.cache is not None
    ]


def num_blocks(plan: Plan) -> int:
    """MTP layers of the model, each of one part or more on disk."""
    return plan.view.num_mtp_layers // plan.view.num_mtp_parts


def _unfinished(file: Path) -> Path:
    """Where a training is kept until its result is."""
    return file.with_suffix(".training")


def _key(plan: Plan) -> str:
    """What a policy makes of the block, whatever a recipe calls it; and how it is trained, if it
    is.
    """
    made = json.dumps([*sorted(block_schemes(plan).items()), *_block_caches(plan)])
    if plan.recipe.mtp_tuned is not None:
        made += plan.recipe.mtp_tuned.model_dump_json()
    return hashlib.sha256(made.encode()).hexdigest()[:16]
