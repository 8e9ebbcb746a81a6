"""The backbone pass: batches in, statistics and rewritten weights out, a file a decoder layer.

In: a plan over a local source, and the batches. Out: a folder with what calibration found
(`statistics.py` reads it), and the hidden states after the last layer, which the MTP pass and the
figures of `acceptance.py` read.

Each decoder layer is a small model of its own: its weights come from the source, its inputs from
the files that the layer before it wrote, llm-compressor's modifiers run on it in one basic pass,
and its outputs become the next layer's inputs. Memory is one layer, whatever the model's size, and
a killed run goes on at the layer it was in. Statistics equal those of llm-compressor's sequential
pipeline, bit for bit: the layer computes the same in the same order.

Easy to get wrong: there are four streams of hidden states, and they must not be mixed
(`_calibrate_layer`).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....recipes.errors import RecipeError
from ....recipes.family import HFName
from ....recipes.frozen import frozen
from ...plan.plan import Plan
from ...run.progress import ProgressCallback, reporter
from ...run.ranks import Ranks
from ...run.statistics import Statistics, write_statistics
from ..data.claim import claim_pass, fingerprint, has_mtp_stream
from ..data.data import CalibrationData
from ..model.batches import Batches
from ..model.hooks import hooked
from ..model.skeleton import Skeleton
from ..model.states import NextStates, States, Stream, as_state
from .forwards import calibrating, serving
from .layer import Calibrated, calibrate
from .served import InMemory, serve_weights
from .tables import calibrate_head, served_tables
from .work import LayerWork


def calibrate_backbone(
    plan: Plan,
    data: CalibrationData,
    folder: Path,
    *,
    device: torch.device,
    ranks: Ranks,
    progress: ProgressCallback | None = None,
) -> "Backbone":
    """Calibrate every decoder layer of the backbone, resuming what an earlier run left in `folder`.

    Args:
        plan: a plan over a local source whose recipe has a calibration block.
        data: what `calibration_data` chose.
        folder: of this pass alone; on several nodes one that all of them see.
        device: where the layer's weights go.
        ranks: which part of the batches is this process's.
        progress: called after each layer, on the first rank.

    Raises:
        RecipeError: the folder holds another run's pass or is not the same for all ranks, or a
            layer does not fit the device.
        CheckpointError: the architecture's class and the checkpoint disagree; a module is never
            called, or sees NaN.
    """
    claim_pass(plan, data, folder, ranks)
    with fitting(plan, "the embedding", device):
        skeleton = Skeleton(plan, device=device)
    backbone = Backbone(
        folder=folder,
        skeleton=skeleton,
        data=data,
        ranks=ranks,
        states=States(folder / "states", ranks),
    )
    backbone.states.tidy()
    tokens = data.ids.numel()
    report = reporter(progress, ranks, "backbone", total=len(skeleton), tokens=tokens)
    for index in range(backbone.states.num_done(), len(skeleton)):
        with fitting(plan, f"decoder layer {index} and a batch", device):
            _calibrate_layer(backbone, index)
        report(index + 1)
    with fitting(plan, "the head and a sequence", device):
        _calibrate_head(backbone)
    return backbone


def _calibrate_head(backbone: "Backbone") -> None:
    """The input scale of a packed head, after the last layer."""
    skeleton = backbone.skeleton
    file = backbone.folder / "statistics" / "head.safetensors"
    for head in skeleton.plan.packed_tables:
        if not head.calibrated:
            continue
        if not backbone.ranks.of_first(file.is_file):
            work, found = calibrate_head(skeleton, head, backbone.batches("calibration", size=1))
            if backbone.ranks.is_first:
                backbone.record(file, found, work, work.on_disk(found.tensors))
            backbone.ranks.wait()
        statistics = Statistics.open(file.parent)
        skeleton.given = {
            output.name: statistics.read(output.name) for output in head.calibrated_outputs
        }


def _calibrate_layer(backbone: "Backbone", index: int) -> None:
    """Observe, rewrite and serve one layer, while the next is read; its states are whole once its
    statistics are.
    """
    skeleton = backbone.skeleton
    plan = backbone.skeleton.plan
    model = skeleton.model
    work = LayerWork.of(plan, skeleton.bind_layer(index), f"{skeleton.layer_path}.{index}.")
    writing = backbone.states.writing(index + 1, is_last=index + 1 == len(skeleton))
    with writing as outputs, skeleton.layer(index, index + 1):
        # Held-out text as the release computes it: the layer has its released weights so far.
        backbone.run("source", index, outputs, serving(model))
        handing_over = nullcontext()
        if not work.rewrites:  # the layer returns the same before and after, to the bit
            handing_over = backbone.handing_over("calibration", index, outputs)
        with handing_over:
            found = calibrate(model, backbone.batches("calibration", index), work)
        tensors = work.on_disk(found.tensors)
        if backbone.ranks.is_first and (found.coverage or tensors):
            file = backbone.folder / "statistics" / f"layer-{index:05d}.safetensors"
            backbone.record(file, found, work, tensors)
        # The calibration text, handed on as llm-compressor does: rewritten weights, and no rounding
        # of activations.
        if work.rewrites:
            backbone.run("calibration", index, outputs, calibrating(model))
        # From here on the layer computes as on a server: the held-out text again, and, where an MTP
        # block may be calibrated, the calibration text for it.
        serve_weights(model, plan, work, InMemory(tensors))
        backbone.run("served", index, outputs, serving(model))
        if has_mtp_stream(backbone.folder):
            backbone.run("mtp", index, outputs, serving(model))


@frozen
class Backbone:
    """A backbone pass, finished or at a layer.

    Attributes:
        folder: of the pass; `folder / "statistics"` has the statistics.
        skeleton: the model's class.
        data: the batches.
        ranks: which batches are this process's.
        states: the hidden states between layers.
    """

    folder: Path
    skeleton: Skeleton
    data: CalibrationData
    ranks: Ranks
    states: States

    def batches(self, stream: Stream, index: int | None = None, size: int | None = None) -> Batches:
        """This rank's sequences of a stream.

        Args:
            stream: whose states.
            index: of the layer that reads them; None: after the last one.
            size: sequences in a batch; None for the recipe's.
        """
        if index is None:
            index = len(self.skeleton)
        if size is None:
            size = self.skeleton.plan.calibration.batch_size
        ids = self.data.held_out_ids
        if stream in ("calibration", "mtp"):
            ids = self.data.ids
        return Batches(
            skeleton=self.skeleton,
            states=self.states,
            stream=stream,
            index=index,
            ids=ids,
            rows=self.ranks.share(len(ids), size),
            size=size,
        )

    def run(
        self, stream: Stream, index: int, outputs: NextStates, context: AbstractContextManager[None]
    ) -> None:
        """Run a stream through the layer that is real, and hand over what it returns.

        Args:
            stream: whose sequences.
            index: of the layer, with the weights and rounded inputs that it is to be run with.
            outputs: the states of the next layer.
            context: how it computes.
        """
        tables = served_tables(self.skeleton, stream)
        with self.handing_over(stream, index, outputs), torch.no_grad(), tables, context:
            for arguments in self.batches(stream, index):
                self.skeleton.model(**arguments, use_cache=False)

    def handing_over(
        self, stream: Stream, index: int, outputs: NextStates
    ) -> AbstractContextManager[None]:
        """Each batch of a stream that the layer computes becomes states of the next one."""
        # Once around where a batch is looked at again to say what is wrong with it.
        ranges = cycle(self.batches(stream, index).ranges())

        def hand_over(_module: object, _args: object, output: Any) -> None:
            first, _ = next(ranges)
            outputs.put(stream, first, as_state(output))

        layer = self.skeleton.model.get_submodule(f"{self.skeleton.layer_path}.{index}")
        return hooked([layer.register_forward_hook(hand_over)])

    def record(
        self,
        path: Path,
        found: Calibrated,
        work: LayerWork,
        tensors: Mapping[HFName, Tensor],
    ) -> None:
        """Write the statistics of a decoder layer or MTP block, with the number of tokens that each
        module saw.

        Args:
            path: of the file.
            found: what calibration found.
            work: on the layer or block.
            tensors: by their names on disk.
        """
        coverage = {}
        for module, tokens in found.coverage.items():
            for piece in work.binding[f"{module.removeprefix(work.path)}.weight"]:
                coverage[piece.module] = tokens
        metadata = {
            "fingerprint": fingerprint(self.skeleton.plan, self.data, self.ranks.size),
            "coverage": json.dumps(coverage),
        }
        write_statistics(path, tensors, metadata)


@contextmanager
def fitting(plan: Plan, what: str, device: torch.device) -> Iterator[None]:
    """Turns running out of a GPU's memory into a refusal that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RecipeError(
            plan.recipe.name,
            f"{what} must fit {device}",
            got=f"out of memory in batches of {plan.calibration.batch_size}",
            cure="Free the device of other processes, or lower calibration.batch_size or "
            "calibration.sequence_length. "
            "minmax takes the least of all algorithms, and keepmtp plan says how much",
        ) from error
