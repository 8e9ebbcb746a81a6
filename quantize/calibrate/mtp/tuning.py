"""Trains an MTP block on what the quantized backbone computes, with the very weights that the
writer will pack.

In: a block with the released weights, its binding, static input scales, and a finished backbone
pass with the `mtp`
stream: the calibration text as a server computes it. Out: the same block trained, as it will be
served.

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
order of their own: other last bits than those of one process, as with GPTQ's sums.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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

    def serve(self) -> dict[HFName, Tensor]:
        """Give the block the weights that a server will have, and return them as they are
        written.
        """
        with torch.no_grad():
            for name, master in self.masters.items():
                self.block.get_parameter(name).data.copy_(master)
            packed: dict[HFName, Tensor] = {}
            for module in serve_tuned(self.block, self.plan, self.binding, InMemory(self.scales)):
                packed |= {
                    HFName(f"{module.module}.{leaf}"): value
                    for leaf, value in module.tensors.items()
                }
            return packed | _plain(self.block, self.binding)


def masters_of(block: MtpBlock, binding: Binding) -> dict[str, Tensor]:
    """The weights of a filled block that are tuned, in F32: parameter -> values."""
    tuned = [name for name, pieces in binding.items() if pieces[0].tensor.tuned]
    return {name: block.get_parameter(name).detach().float().clone() for name in tuned}


def train(
    training: Training, kept: Path, progress: Callable[[int, int], None] | None = None
) -> list[float]:
    """Train the block, from where `kept` says that an earlier run has stopped.

    Args:
        training: its masters are changed.
        kept: the file of an unfinished training; it is there until the caller removes it.
        progress: called with the number of steps done before this process, and of those done now.

    Returns: the loss of each step.

    Raises:
        RecipeError: a loss or a gradient is not finite.
    """
    settings, ranks = training.settings, training.backbone.ranks
    parameters = [training.block.get_parameter(name).requires_grad_() for name in training.masters]
    optimizer = torch.optim.AdamW(
        training.masters.values(), lr=settings.learning_rate, betas=BETAS, weight_decay=0.0
    )
    losses = _resumed(training, optimizer, kept)
    ranks.wait()  # none writes the file while another one reads it
    first, saved = len(losses), time.monotonic()
    try:
        with training.backbone.skeleton.head(), serving(training.block, trains=True):
            for step in range(first, settings.steps):
                losses.append(_step(training, parameters, optimizer, step))
                if ranks.is_first and time.monotonic() - saved >= _SAVE_SECONDS:
                    _save(training, optimizer, losses, kept)
                    saved = time.monotonic()
                if progress and ranks.is_first:
                    progress(first, step + 1)
        ranks.take_from_first(training.masters.values())
        if ranks.is_first:
            _save(training, optimizer, losses, kept)
    finally:
        training.block.requires_grad_(False)
    return losses


def rows_of(step: int, *, num_rows: int, settings: MtpTuned) -> list[int]:
    """The sequences of one step: each is drawn once before one is drawn again, in an order of the
    seed's.
    """
    found = []
    for place in range(step * settings.batch_size, (step + 1) * settings.batch_size):
        epoch, index = divmod(place, num_rows)
        rng = torch.Generator().manual_seed((settings.seed + epoch) % 2**63)
        found.append(int(torch.randperm(num_rows, generator=rng)[index]))
    return found


# --- one step
# --------------------------------------------------------------------------------------------------


def _step(
    training: Training, parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, step: int
) -> float:
    """One step of the optimizer; the loss before it, over the sequences of all ranks."""
    ranks, settings = training.backbone.ranks, training.settings
    training.serve()
    masters = list(training.masters.values())
    total = torch.zeros((), device=masters[0].device)
    for master in masters:
        master.grad = torch.zeros_like(master)
    rows = rows_of(step, num_rows=len(training.backbone.data.ids), settings=settings)
    for row in rows[ranks.rank :: ranks.size]:
        total += _backward(training, row)
        for master, parameter in zip(masters, parameters, strict=True):
            if parameter.grad is not None:  # an expert that no token is sent to has none
                assert master.grad is not None
                master.grad += parameter.grad
                parameter.grad = None
    ranks.add_up([total, *(master.grad for master in masters if master.grad is not None)])
    norm = torch.nn.utils.clip_grad_norm_(masters, _LARGEST_GRADIENT)
    if not math.isfinite(value := total.item()) or not math.isfinite(norm.item()):
        raise RecipeError(
            training.plan.recipe.name,
            "the loss of mtp: tuned and its gradient must be finite",
            got=f"{value} and {norm.item()} at step {step + 1} of {settings.steps}",
            cure="Lower mtp_tuned.learning_rate, or use another mtp_tuned.loss",
        )
    optimizer.param_groups[0]["lr"] = settings.learning_rate * rate_at(step, settings.steps)
    optimizer.step()
    return value


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step, as a part of the highest."""
    warm_up = max(1, round(_WARM_UP * steps))
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up + 1))


def _backward(training: Training, row: int) -> Tensor:
    """The loss of one sequence; its gradients are added to the block's."""
    backbone, settings, block = training.backbone, training.settings, training.block
    skeleton = backbone.skeleton
    ids = backbone.data.ids[row : row + 1]
    batch = Batch(
        ids=ids,
        state=backbone.states.read(len(skeleton), "mtp", row, row + 1, skeleton.device),
        first=row,
    )
    with torch.no_grad():
        hidden = block_input(skeleton, block, batch)
        wanted_SH = head_input(skeleton, batch)[0]
    embedding, target_head = (
        skeleton.model.get_input_embeddings(),
        skeleton.model.get_output_embeddings(),
    )
    device_ids = ids.to(skeleton.device)
    outputs = draft_steps(
        [block], embedding, ids=device_ids, hidden=hidden, num_steps=settings.draft_steps
    )
    # Further steps weigh less; the weights of all are 1 in sum.
    weights = [settings.decay**turn for turn in range(settings.draft_steps)]
    total, gradients = torch.zeros((), device=skeleton.device), []
    for step, (output, weight) in enumerate(zip(outputs, weights, strict=True), start=1):
        # Slot i of step k drafts what the target chooses at slot i + k.
        num_slots = ids.shape[1] - step
        heads = block.head or target_head, target_head
        found = draft_loss(output[0, :num_slots], wanted_SH[step:], heads, settings.loss)
        scale = weight / sum(weights) / (settings.batch_size * num_slots)
        gradient = torch.zeros_like(output)
        gradient[0, :num_slots] = found.gradient * scale
        total += found.total * scale
        gradients.append(gradient)
    torch.autograd.backward(outputs, gradients)
    return total


# --- tensors and files
# ------------------------------------------------------------------------------------------------


def _plain(block: MtpBlock, binding: Binding) -> dict[HFName, Tensor]:
    """The tuned tensors that are written in floating point, by their names on disk; on the block's
    device.
    """
    parts: dict[HFName, list[tuple[Piece, Tensor]]] = defaultdict(list)
    for name, pieces in binding.items():
        tensor = pieces[0].tensor
        if tensor.tuned and tensor.fate != "quantize":
            rows = tensor.shape[1] // len(tensor.stacked) if tensor.stacked else 0
            sizes = [rows or piece.tensor.shape[0] for piece in pieces]
            for piece, value in zip(
                pieces, block.get_parameter(name).data.split(sizes), strict=True
            ):
                parts[piece.tensor.name].append((piece, value))
    found: dict[HFName, Tensor] = {}
    for pieces in parts.values():
        tensor, values = pieces[0][0].tensor, [pieces[0][1]]
        if tensor.slices:  # interleaved rows
            values = separate(values[0], tensor.slices)
        elif tensor.stacked:  # experts
            in_order = sorted(pieces, key=lambda each: (each[0].expert or 0, each[0].part))
            whole = torch.cat([value for _, value in in_order])
            values = [whole.unflatten(0, (tensor.shape[0], -1))]
        for output, value in zip(tensor.outputs, values, strict=True):
            found[output.name] = value.to(TORCH_DTYPES[output.dtype], copy=True)
    return found


def _save(
    training: Training, optimizer: torch.optim.Optimizer, losses: Sequence[float], path: Path
) -> None:
    """Everything that the next step depends on, in one file, whole or not at all."""
    tensors = {HFName("losses"): torch.tensor(losses, dtype=torch.float64)}
    for name, master in training.masters.items():
        state = optimizer.state[master]
        tensors |= {HFName(f"{key}.{name}"): state[key] for key in ("exp_avg", "exp_avg_sq")}
        tensors[HFName(f"master.{name}")] = master
    write_statistics(
        path, tensors, {"fingerprint": (training.backbone.folder / "fingerprint").read_text()}
    )


def _resumed(training: Training, optimizer: torch.optim.Optimizer, path: Path) -> list[float]:
    """The losses so far, with weights and moments put back; none where nothing was kept."""
    # One rank looks for all: each for itself, one could find what another does not see yet.
    if not training.backbone.ranks.of_first(path.is_file):
        return []
    read_metadata(path)  # a damaged file is refused
    kept = load_file(path)
    losses = kept["losses"].tolist()
    for name, master in training.masters.items():
        master.copy_(kept[f"master.{name}"])
        moments = {
            key: kept[f"{key}.{name}"].to(master.device) for key in ("exp_avg", "exp_avg_sq")
        }
        optimizer.state[master] = {"step": torch.tensor(float(len(losses))), **moments}
    return losses
