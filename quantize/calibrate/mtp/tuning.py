"""Trains an MTP block on what the quantized backbone computes, with the very weights that are
packed.

In: a block with the released weights, its binding, static input scales, and a finished backbone
pass with the `mtp` stream: the calibration text as a server computes it. Out: the same block
trained, as it will be served.

Each step runs the block over some sequences as vLLM drafts (`mtp_block.draft_steps`), up to three
tokens ahead. The loss compares each draft with the target's own distribution where it chooses that
token (`draft_loss.py`). Weights are kept in F32. The forward computes with what they become in the
file: rounded to BF16, or packed and decompressed; inputs of packed layers are rounded as served. A
gradient passes both roundings as if they were not there (Bengio et al., "Estimating or Propagating
Gradients Through Stochastic Neurons", 2013). Further draft steps weigh less, as in FastMTP (Cai et
al., 2025).

Easy to get wrong: a run that is resumed must end with the same bytes. So the order of the sequences
is a function of the seed and the step alone, and weights, moments and losses are kept in one file,
which is written whole. Processes each take some sequences of a step and sum their gradients, in an
order of their
own: other last bits than those of one process, as with GPTQ's sums.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ....checkpoints.values import TORCH_DTYPES
from ....recipes.errors import RecipeError
from ....recipes.family import HFName
from ....recipes.schema import MtpTuned
from ...pack.weights import separate
from ...plan.plan import Plan
from ...run.statistics import read_metadata, write_statistics
from ..layers.backbone import Backbone
from ..layers.forwards import serving
from ..layers.served import InMemory, serve_tuned
from ..model.binding import Binding, Piece
from ..model.skeleton import Batch
from .draft_loss import draft_loss
from .mtp_block import MtpBlock, draft_steps
from .target import block_input, head_input

BETAS = (0.9, 0.95)
"""Of AdamW; no weight decays, since the released weights are where training begins."""
_LARGEST_GRADIENT = 1.0  # its norm; larger ones are scaled down to it
_WARM_UP = 0.1  # of the steps
_SAVE_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training reads.

    Attributes:
        plan: with the tensors that are tuned.
        backbone: a finished pass with the `mtp` stream.
        block: filled, calibrated and served; its tuned weights are still those of `masters`.
        binding: of the block.
        scales: static input scales, by their names on disk.
        masters: parameter of the block -> its weight in F32.
    """

    plan: Plan
    backbone: Backbone
    block: MtpBlock
    binding: Binding
    scales: Mapping[HFName, Tensor]
    masters: Mapping[str, Tensor]

    @property
    def settings(self) -> MtpTuned:
        """The recipe's."""
        assert self.plan.recipe.mtp_tuned is not None
        return self.plan.recipe.mtp_tuned

    @torch.no_grad()
    def serve(self) -> dict[HFName, Tensor]:
        """Give the block the weights that a server will have, and return them as they are
        written.
        """
        for name, master in self.masters.items():
            self.block.get_parameter(name).data.copy_(master)
        packed = _plain(self.block, self.binding)
        for module in serve_tuned(self.block, self.plan, self.binding, InMemory(self.scales)):
            for leaf, value in module.tensors.items():
                packed[HFName(f"{module.module}.{leaf}")] = value
        return packed


def train(
    training: Training, kept: Path, progress: Callable[[int], None] | None = None
) -> list[float]:
    """Train the block, from where `kept` says that an earlier run has stopped.

    Args:
        training: its masters are changed.
        kept: the file of an unfinished training; it is there until the caller removes it.
        progress: called with the number of steps that are done.

    Returns: the loss of each step.

    Raises:
        RecipeError: a loss or a gradient is not finite.
    """
    settings, ranks, masters = training.settings, training.backbone.ranks, training.masters
    for name in masters:
        training.block.get_parameter(name).requires_grad_()
    optimizer = torch.optim.AdamW(
        masters.values(), lr=settings.learning_rate, betas=BETAS, weight_decay=0.0
    )
    losses: list[float] = []
    # One rank looks for all: each for itself, one could find what another does not see yet.
    if ranks.of_first(kept.is_file):
        losses = _resumed(training, optimizer, kept)
    ranks.wait()  # none writes the file while another one reads it
    saved = time.monotonic()
    try:
        with training.backbone.skeleton.head(), serving(training.block, trains=True):
            for step in range(len(losses), settings.steps):
                losses.append(_step(training, optimizer, step))
                if ranks.is_first and time.monotonic() - saved >= _SAVE_SECONDS:
                    _save(training, optimizer, losses, kept)
                    saved = time.monotonic()
                if progress:
                    progress(step + 1)
        ranks.take_from_first(masters.values())
        if ranks.is_first:
            _save(training, optimizer, losses, kept)
    finally:
        training.block.requires_grad_(False)
    return losses


def rows_of(step: int, *, num_rows: int, settings: MtpTuned) -> list[int]:
    """The sequences of one step: each is drawn once before one is drawn again, as the seed says."""
    found = []
    for place in range(step * settings.batch_size, (step + 1) * settings.batch_size):
        epoch, index = divmod(place, num_rows)
        rng = torch.Generator().manual_seed((settings.seed + epoch) % 2**63)
        found.append(int(torch.randperm(num_rows, generator=rng)[index]))
    return found


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step, as a part of the highest."""
    warm_up = max(1, round(_WARM_UP * steps))
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up + 1))


def _step(training: Training, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step of the optimizer; the loss before it, over the sequences of all ranks."""
    ranks, settings = training.backbone.ranks, training.settings
    training.serve()
    total = torch.zeros((), device=training.backbone.skeleton.device)
    gradients = {name: torch.zeros_like(master) for name, master in training.masters.items()}
    rows = rows_of(step, num_rows=len(training.backbone.data.ids), settings=settings)
    for row in rows[ranks.rank :: ranks.size]:
        total += _backward(training, row)
        for name, gradient in gradients.items():
            parameter = training.block.get_parameter(name)
            if parameter.grad is not None:  # an expert that no token is sent to has none
                gradient += parameter.grad
                parameter.grad = None
    ranks.add_up([total, *gradients.values()])
    for name, master in training.masters.items():
        master.grad = gradients[name]
    norm = torch.nn.utils.clip_grad_norm_(training.masters.values(), _LARGEST_GRADIENT)
    value = total.item()
    if not math.isfinite(value + norm.item()):
        raise RecipeError(
            training.plan.recipe.name,
            "the loss of mtp: tuned and its gradient must be finite",
            got=f"{value} and {norm.item()} at step {step + 1} of {settings.steps}",
            cure="Lower mtp_tuned.learning_rate, or use another mtp_tuned.loss",
        )
    optimizer.param_groups[0]["lr"] = settings.learning_rate * rate_at(step, settings.steps)
    optimizer.step()
    return value


def _backward(training: Training, row: int) -> Tensor:
    """The loss of one sequence; its gradients are added to the block's."""
    backbone, settings, block = training.backbone, training.settings, training.block
    skeleton, ids = backbone.skeleton, backbone.data.ids[row : row + 1]
    state = backbone.states.read(len(skeleton), "mtp", row, row + 1, skeleton.device)
    batch = Batch(ids=ids, state=state, first=row)
    with torch.no_grad():
        hidden = block_input(skeleton, block, batch)
        wanted_SH = head_input(skeleton, batch)[0]
    outputs = draft_steps(
        [block],
        skeleton.model.get_input_embeddings(),
        ids=ids.to(skeleton.device),
        hidden=hidden,
        num_steps=settings.draft_steps,
    )
    target_head = skeleton.model.get_output_embeddings()
    heads = block.head or target_head, target_head
    # Further steps weigh less; the weights of all are 1 in sum.
    weights = [settings.decay**turn for turn in range(settings.draft_steps)]
    total, gradients = torch.zeros((), device=skeleton.device), []
    for step, (output, weight) in enumerate(zip(outputs, weights, strict=True), start=1):
        # Slot i of step k drafts what the target chooses at slot i + k.
        num_slots = ids.shape[1] - step
        loss, gradient_NH = draft_loss(
            output[0, :num_slots], wanted_SH[step:], heads, settings.loss
        )
        scale = weight / sum(weights) / (settings.batch_size * num_slots)
        gradient = torch.zeros_like(output)
        gradient[0, :num_slots] = gradient_NH * scale
        total += loss * scale
        gradients.append(gradient)
    torch.autograd.backward(outputs, gradients)
    return total


# --- tensors and files ----------------------------------------------------------------------------


def _plain(block: MtpBlock, binding: Binding) -> dict[HFName, Tensor]:
    """The tuned tensors that are written in floating point, by their names on disk."""
    parts: dict[HFName, list[tuple[Piece, Tensor]]] = defaultdict(list)
    for name, pieces in binding.items():
        tensor = pieces[0].tensor
        if not tensor.tuned or tensor.fate == "quantize":
            continue
        rows = [piece.tensor.shape[0] for piece in pieces]
        if tensor.stacked:
            rows = [tensor.shape[1] // len(tensor.stacked)] * len(pieces)
        values = block.get_parameter(name).data.split(rows)
        for piece, value in zip(pieces, values, strict=True):
            parts[piece.tensor.name].append((piece, value))
    found: dict[HFName, Tensor] = {}
    for own in parts.values():
        tensor = own[0][0].tensor
        own.sort(key=lambda each: (each[0].expert or 0, each[0].part))
        whole = torch.cat([value for _, value in own]).view(tensor.shape)
        values = separate(whole, tensor.slices) if tensor.slices else [whole]
        for output, value in zip(tensor.outputs, values, strict=True):
            found[output.name] = value.to(TORCH_DTYPES[output.dtype], copy=True)
    return found


def _save(
    training: Training, optimizer: torch.optim.Optimizer, losses: list[float], path: Path
) -> None:
    """Everything that the next step depends on, in one file, whole or not at all."""
    tensors = {HFName("losses"): torch.tensor(losses, dtype=torch.float64)}
    for name, master in training.masters.items():
        tensors[HFName(f"master.{name}")] = master
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[HFName(f"{key}.{name}")] = optimizer.state[master][key]
    fingerprint = (training.backbone.folder / "fingerprint").read_text()
    write_statistics(path, tensors, {"fingerprint": fingerprint})


def _resumed(training: Training, optimizer: torch.optim.Optimizer, path: Path) -> list[float]:
    """The losses so far, with weights and moments put back."""
    read_metadata(path)  # a damaged file is refused
    kept = load_file(path)
    losses = kept["losses"].tolist()
    for name, master in training.masters.items():
        master.copy_(kept[f"master.{name}"])
        state = {"step": torch.tensor(float(len(losses)))}
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = kept[f"{key}.{name}"].to(master.device)
        optimizer.state[master] = state
    return losses
