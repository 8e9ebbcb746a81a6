"""The backbone pass: batches in, statistics and rewritten weights out, a file a decoder layer.

In: a plan over a local source, and the batches. Out: a folder with what calibration found (`statistics.py` reads it),
and the hidden states after the last layer, which the MTP pass and the figures of `held_out.py` read.

Each decoder layer is a small model of its own: its weights come from the source, its inputs from the files that the
layer before it wrote, llm-compressor's modifiers run on it in one basic pass, and its outputs become the next layer's
inputs. Memory is one layer, whatever the model's size, and a killed run goes on at the layer it was in. Statistics
equal those of llm-compressor's sequential pipeline, bit for bit: the layer computes the same in the same order.

Easy to get wrong: there are four streams of hidden states, and they must not be mixed. `calibration` is propagated as
llm-compressor does (activations are not rounded), `source` has seen no quantization at all, and `served` is what a
server would compute; the last two are held-out text. `mtp` is the calibration text as a server would compute it: what
an MTP block is calibrated on, and computed only where one may be.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....recipes.errors import RecipeError
from ....recipes.family import HFName
from ....recipes.schemes import SWEEPS
from ...plan.plan import Plan
from ...run.progress import ProgressCallback, progress_since
from ...run.ranks import Ranks
from ...run.statistics import num_parts_of, part_of, read_metadata, write_statistics
from ..data.claim import claim_pass, has_mtp_stream
from ..data.data import CalibrationData
from ..model.binding import Binding
from ..model.inference_mode import guard
from ..model.skeleton import (
    Batch,
    Skeleton,
    caches_in,
    experts_in,
    frozen_in,
    fused_in,
    on_disk,
    schemes_in,
    weighted_in,
)
from ..model.states import NextStates, States, Stream
from .ahead import ReadAhead
from .forwards import propagating, serving
from .layer import Calibrated, calibrate, rewrites
from .served import InMemory, serve_weights


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
        RecipeError: the folder holds another run's pass or is not the same for all ranks, or a layer does not fit the
            device.
        CheckpointError: the architecture's class and the checkpoint disagree; a module is never called, or sees NaN.
    """
    calibration = plan.recipe.calibration
    assert calibration is not None
    claim_pass(plan, data, folder, ranks)
    with fitting(plan, "the embedding", device):
        skeleton = Skeleton(plan, device=device)
    states = States(folder / "states", ranks)
    run = _Pass(folder=folder, skeleton=skeleton, data=data, ranks=ranks, states=states)
    states.tidy()
    first = states.num_done()
    tokens, started = data.ids.numel(), time.monotonic()
    with ReadAhead(plan, ranks) as ahead:
        for index in range(first, len(skeleton)):
            with fitting(plan, f"decoder layer {index} and a batch", device):
                run.layer(index, ahead)
            if progress and ranks.is_first:
                done = index + 1
                progress(
                    progress_since(
                        started,
                        "backbone",
                        done=done,
                        total=len(skeleton),
                        num_here=done - first,
                        tokens=tokens,
                        device=device,
                    )
                )
    return Backbone(
        folder=folder,
        skeleton=skeleton,
        data=data,
        ranks=ranks,
        states=states,
        coverage=run.read_coverage(),
        few_tokens=run.read_few_tokens(),
    )


# --- one pass -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One run over the layers.

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

    def layer(self, index: int, ahead: ReadAhead) -> None:
        """Calibrate one layer, and have the next one read meanwhile; its states are whole once its statistics are."""
        skeleton, plan = self.skeleton, self.skeleton.plan
        binding, path = skeleton.bind_layer(index), f"{skeleton.layer_path}.{index}."
        read = skeleton.layer(index, ahead.take())
        with self.states.writing(index + 1) as outputs, read as layer, self._guarded(index):
            ahead.start(skeleton.tensors_of(index + 1))
            self._run("source", index, layer, outputs, serving(skeleton.model))
            given = InMemory(self._calibrate(index, layer, outputs, binding, path))
            serve_weights(skeleton.model, plan, binding, path, given)
            self._run("served", index, layer, outputs, serving(skeleton.model))
            if has_mtp_stream(self.folder):
                self._run("mtp", index, layer, outputs, serving(skeleton.model))

    def _calibrate(
        self, index: int, layer: nn.Module, outputs: NextStates, binding: Binding, path: str
    ) -> Mapping[HFName, Tensor]:
        """The layer's statistics, which are on disk then, and what it returns handed over."""
        skeleton, calibration = self.skeleton, self.skeleton.plan.recipe.calibration
        assert calibration is not None
        schemes, caches = schemes_in(binding, path), caches_in(binding, path)
        # As long as no weight is rewritten, the layer returns the same before and after, to the bit.
        is_one_pass = bool(schemes or caches) and not rewrites(schemes, calibration.algorithm)
        tensors: Mapping[HFName, Tensor] = {}
        if schemes or caches:
            with self.handing_over("calibration", index, layer, outputs) as hand_over:
                found = calibrate(
                    skeleton.model,
                    Batches(run=self, stream="calibration", index=index).arguments(),
                    schemes=schemes,
                    algorithm=calibration.algorithm,
                    knobs=calibration.knobs,
                    backend=calibration.backend,
                    fused=fused_in(binding, path),
                    experts=experts_in(binding, path),
                    routed=calibration.experts == "routed",
                    frozen=frozen_in(binding, path),
                    after_batch=hand_over if is_one_pass else None,
                    caches=[name for name, scales in caches.items() if scales],
                    weighted=weighted_in(binding, path),
                )
            tensors = on_disk(found.tensors, binding, path)
            self._record(index, found, binding, path)
        if not is_one_pass:
            self._run(
                "calibration",
                index,
                layer,
                outputs,
                propagating(skeleton.model, routed=calibration.experts == "routed"),
            )
        return tensors

    @contextmanager
    def _guarded(self, index: int) -> Iterator[None]:
        """Keeps a checkpoint's own code out of inference mode; one sequence is tried first."""
        calibration = self.skeleton.plan.recipe.calibration
        assert calibration is not None
        first = next(iter(Batches(run=self, stream="calibration", index=index)))
        state = first.state and tuple(None if value is None else value[:1] for value in first.state)
        sample = next(self.skeleton.feed(index, [Batch(ids=first.ids[:1], state=state)]))
        with guard(self.skeleton.model, {**sample, "use_cache": False}, policy=calibration.decorated_forward):
            yield

    def _run(
        self, stream: Stream, index: int, layer: nn.Module, outputs: NextStates, context: AbstractContextManager[None]
    ) -> None:
        """Run a stream through the layer and hand over what it returns."""
        batches = Batches(run=self, stream=stream, index=index).arguments()
        with self.handing_over(stream, index, layer, outputs) as hand_over, torch.no_grad(), context:
            for arguments in batches:
                self.skeleton.model(**arguments, use_cache=False)
                hand_over()

    @contextmanager
    def handing_over(
        self, stream: Stream, index: int, layer: nn.Module, outputs: NextStates
    ) -> Iterator[Callable[[], None]]:
        """A function to be called after each batch of a stream, which hands over what the layer has returned."""
        ranges = iter(Batches(run=self, stream=stream, index=index).ranges())
        returned: deque[Any] = deque(maxlen=1)
        handle = layer.register_forward_hook(lambda _module, _args, output: returned.append(output))

        def hand_over() -> None:
            output, (first, _) = returned.pop(), next(ranges)
            outputs.put(stream, first, output if isinstance(output, tuple) else (output,))

        try:
            yield hand_over
        finally:
            handle.remove()

    def _record(self, index: int, found: Calibrated, binding: Binding, path: str) -> None:
        """The statistics of a layer, with the number of tokens that each module saw; ranks share large ones."""
        folder, stem = self.folder / "statistics", f"layer-{index:05d}"
        num_parts = min(self.ranks.size, num_parts_of(found.tensors))
        files = [folder / f"{stem}{f'-{part:05d}' if part else ''}.safetensors" for part in range(num_parts)]
        if self.ranks.is_first:  # a killed run of another size may have left more of them
            for stray in {*folder.glob(f"{stem}*.safetensors")} - {*files}:
                stray.unlink()
        if self.ranks.rank < num_parts:
            part, fingerprint = (self.ranks.rank, num_parts), (self.folder / "fingerprint").read_text()
            record(files[self.ranks.rank], found, binding, path, fingerprint=fingerprint, part=part)

    def read_coverage(self) -> dict[HFName, int]:
        """Of all layers, in their order."""
        found: dict[HFName, int] = {}
        for metadata in self._metadata():
            found |= json.loads(metadata["coverage"])
        return found

    def read_few_tokens(self) -> tuple[HFName, ...]:
        """Of all layers, in their order."""
        return tuple(name for metadata in self._metadata() for name in json.loads(metadata["few_tokens"]))

    def _metadata(self) -> list[Mapping[str, str]]:
        return [read_metadata(path) for path in sorted((self.folder / "statistics").glob("layer-*.safetensors"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone(_Pass):
    """A finished backbone pass.

    Attributes:
        coverage: module on disk -> tokens its calibration saw; experts: tokens the router sent them.
        few_tokens: modules of experts on disk whose statistics are of fewer tokens than they have input channels.
    """

    coverage: Mapping[HFName, int]
    few_tokens: tuple[HFName, ...]

    def serve_layer(self, index: int, layer: nn.Module, outputs: NextStates) -> None:
        """Run held-out text through a layer of a pass that calibrates nothing, as a server computes it.

        Args:
            index: of the layer.
            layer: real, with the weights and rounded inputs that it is to be judged with.
            outputs: the states of the next layer.
        """
        self._run("source", index, layer, outputs, serving(self.skeleton.model))

    def batches(self, stream: Stream) -> "Batches":
        """The sequences with the hidden states after the last layer."""
        return Batches(run=self, stream=stream, index=len(self.skeleton))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """This rank's batches of one stream as inputs of one layer, read one at a time in each iteration."""

    run: _Pass
    stream: Stream
    index: int

    def __len__(self) -> int:
        return len(self.ranges())

    def __iter__(self) -> Iterator[Batch]:
        ids, run = self._ids(), self.run
        for first, last in self.ranges():
            device = run.skeleton.device
            state = run.states.read(self.index, self.stream, first, last, device) if self.index else None
            yield Batch(ids=ids[first:last], state=state, first=first)

    def ranges(self) -> list[tuple[int, int]]:
        """The rows of each of this rank's batches: the first, and the one after the last."""
        size = self._size()
        share = self.run.ranks.share(len(self._ids()), size)
        return [(row, min(row + size, share.stop)) for row in range(share.start, share.stop, size)]

    def arguments(self) -> "Arguments":
        """The same as arguments of the model's forward."""
        return Arguments(batches=self)

    def _ids(self) -> Tensor:
        return self.run.data.ids if self.stream in ("calibration", "mtp") else self.run.data.held_out_ids

    def _size(self) -> int:
        calibration = self.run.skeleton.plan.recipe.calibration
        assert calibration is not None
        return calibration.num_in_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Batches as llm-compressor wants them: with a length, and iterated more than once."""

    batches: Batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self.batches.run.skeleton.feed(self.batches.index, self.batches)


def record(
    path: Path,
    found: Calibrated,
    binding: Binding,
    module: str,
    *,
    fingerprint: str,
    part: tuple[int, int] = (0, 1),
    tensors: Mapping[HFName, Tensor] | None = None,
    losses: Sequence[float] = (),
) -> None:
    """Write the statistics of a decoder layer or MTP block, with the number of tokens that each module saw.

    Args:
        path: of the file.
        found: what calibration found.
        binding: of the layer or block.
        module: its path in the model that was calibrated, with a dot; "" for the model itself.
        fingerprint: of the run.
        part: which of how many files; the first has what is said of the whole.
        tensors: by their names on disk, instead of those that calibration found.
        losses: of each step, where the weights were trained.
    """
    on_disk_of = {
        each: [piece.module for piece in binding[f"{each.module.removeprefix(module)}.weight"]]
        for each in found.coverage
    }
    coverage = {
        name: each.tokens if each.routed is None else each.routed
        for each, names in on_disk_of.items()
        for name in names
    }
    few_tokens = [name for each, names in on_disk_of.items() if each.has_few_tokens for name in names]
    metadata = {
        "fingerprint": fingerprint,
        "coverage": json.dumps({} if part[0] else coverage),
        "few_tokens": json.dumps(() if part[0] else few_tokens),
        "left_out": json.dumps(() if part[0] else found.left_out),
        "rounded": json.dumps(() if part[0] else found.rounded),
        **({"losses": json.dumps(losses)} if losses else {}),
    }
    tensors = on_disk(found.tensors, binding, module) if tensors is None else tensors
    write_statistics(path, part_of(tensors, *part), metadata)


@contextmanager
def fitting(plan: Plan, what: str, device: torch.device) -> Iterator[None]:
    """Turns running out of a GPU's memory into a refusal that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        calibration = plan.recipe.calibration
        assert calibration is not None
        raise RecipeError(
            plan.recipe.name,
            f"{what} must fit {device}",
            got=f"out of memory in batches of {calibration.num_in_batch}",
            cure=f"Free the device of other processes, or {_WHAT_HELPS[calibration.algorithm]}",
        ) from error


_SMALLER_BATCHES = "lower calibration.batch_size or calibration.sequence_length"
# Algorithm -> what takes less memory.
_WHAT_HELPS = {
    "minmax": _SMALLER_BATCHES,
    "smoothquant": _SMALLER_BATCHES,
    **dict.fromkeys(SWEEPS, _SMALLER_BATCHES),
    "gptq": f"{_SMALLER_BATCHES}. GPTQ's Hessians depend on neither: if they alone do not fit, "
    "set calibration.algorithm: awq, whose cache is on the host, or minmax",
    "awq": "lower calibration.samples or calibration.sequence_length: AWQ holds what a module computes in all batches, "
    "whatever their size. Or lower calibration.batch_size",
    "autoround": "lower calibration.autoround.batch_size or calibration.sequence_length, or set experts: routed. "
    "The offsets that it learns depend on neither: if they alone do not fit, set calibration.algorithm: gptq",
}
