"""Trains an MTP block on what the quantized backbone computes, with the very weights that are
packed.

In: a block with the released weights, its binding, static input scales, and a finished backbone
pass with the `mtp` stream: the calibration text as a server computes it. Out: the same block
trained, as it will be served.

Each step runs the block over some sequences as vLLM drafts (`mtp_block.draft_steps`), up to three
tokens ahead. The loss compares each draft with the target's own distribution where it chooses that
token (`losses`). Weights are kept in F32. The forward computes with what they become in the file:
rounded to BF16, or packed and decompressed; inputs of packed layers are rounded as served. A
gradient passes both roundings as if they were not there (Bengio et al., "Estimating or Propagating
Gradients Through Stochastic Neurons", 2013). Further draft steps weigh less, as in FastMTP (Cai et
al., 2025).

Easy to get wrong: a run that is resumed must end with the same bytes. So weights, moments and the
number of steps are kept in one file, which is written whole.

Source: names and meaning of the losses are those of speculators (docs, "Loss Functions"), for
drafts of other kinds; Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(2023).
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from ....checkpoints.values import TORCH_DTYPES
from ....recipes.errors import RecipeError
from ....recipes.family import HFName
from ....recipes.schema import MtpTuned
from ...pack.unit import separate
from ...plan.plan import Plan
from ...run.statistics import read_metadata, write_statistics
from ..layers.backbone import Backbone
from ..layers.forwards import serving
from ..layers.served import InMemory, serve_tuned
from ..layers.tables import served_tables
from .acceptance import block_input, head_input
from .mtp_block import MtpBlock, draft_steps

# Of AdamW; no weight decays, since the released weights are where training begins.
BETAS = (0.9, 0.95)
# Slots whose logits are in memory together.
SLOTS = 256
_LARGEST_GRADIENT = 1.0  # its norm; larger ones are scaled down to it
_WARM_UP = 0.1  # of the steps
_SAVE_SECONDS = 300.0
_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


class Training:
    """State: weights in F32, and the optimizer's moments.

    Args:
        plan: with the tensors that are tuned.
        backbone: a finished pass with the `mtp` stream.
        block: bound and filled; training begins at the weights that it has now.
    """

    def __init__(self, plan: Plan, backbone: Backbone, block: MtpBlock):
        assert plan.recipe.mtp_tuned is not None
        self.settings: MtpTuned = plan.recipe.mtp_tuned
        self._plan = plan
        self._backbone = backbone
        self._block = block
        self._given = InMemory({})
        self._masters: dict[str, Tensor] = {}
        for name, pieces in block.binding.items():
            if pieces[0].tensor.tuned:
                value = block.get_parameter(name).detach()
                self._masters[name] = value.float().clone()
        self._rates = rates_of(self._masters, self.settings)
        groups = [{"params": [master]} for master in self._masters.values()]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, weight_decay=0.0)

    def run(
        self, given: InMemory, kept: Path, progress: Callable[[int], None] | None = None
    ) -> dict[HFName, Tensor]:
        """Train the block, from where `kept` says that an earlier run has stopped.

        Args:
            given: static input scales, by their names on disk; the block is served by now.
            kept: the file of an unfinished training; it is there until the caller removes it.
            progress: called with the number of steps that are done.

        Returns: what is written of the block, which has the weights that a server will have.

        Raises:
            RecipeError: a loss or a gradient is not finite.
        """
        ranks = self._backbone.ranks
        first = 0
        saved = time.monotonic()
        self._given = given
        for name in self._masters:
            self._block.get_parameter(name).requires_grad_()
        # One rank looks for all: each for itself, one could find what another does not see yet.
        if ranks.of_first(kept.is_file):
            first = self._resumed(kept)
        ranks.wait()  # none writes the file while another one reads it
        skeleton = self._backbone.skeleton
        with (
            skeleton.head(),
            served_tables(skeleton, "mtp"),
            serving(self._block, trains=True),
        ):
            for step in range(first, self.settings.steps):
                self._step(step)
                is_last = step + 1 == self.settings.steps
                if is_last and ranks.size > 1:  # all take the first one's
                    for master in self._masters.values():
                        dist.broadcast(master, src=0)
                if ranks.is_first and (is_last or time.monotonic() - saved >= _SAVE_SECONDS):
                    self._save(kept, step + 1)
                    saved = time.monotonic()
                if progress:
                    progress(step + 1)
        self._block.requires_grad_(False)
        return self._serve()

    @torch.no_grad()
    def _serve(self) -> dict[HFName, Tensor]:
        """Give the block the weights that a server will have, and return them as they are
        written.
        """
        for name, master in self._masters.items():
            self._block.get_parameter(name).data.copy_(master)
        written = _plain(self._block)
        served = serve_tuned(self._block, self._plan, self._block.binding, self._given)
        for packed in served:
            for leaf, value in packed.tensors.items():
                written[HFName(f"{packed.module}.{leaf}")] = value
        return written

    def _step(self, step: int) -> None:
        """One step of the optimizer, over the sequences of all ranks."""
        ranks = self._backbone.ranks
        settings = self.settings
        self._serve()
        total = torch.zeros((), device=self._backbone.skeleton.device)
        gradients = {}
        for name, master in self._masters.items():
            gradients[name] = torch.zeros_like(master)
            master.grad = gradients[name]
        rows = rows_of(step, num_rows=len(self._backbone.data.ids), settings=settings)
        for row in rows[ranks.rank :: ranks.size]:
            total += self._backward(row)
            for name, gradient in gradients.items():
                parameter = self._block.get_parameter(name)
                if parameter.grad is not None:  # an expert that no token is sent to has none
                    gradient += parameter.grad
                    parameter.grad = None
        if ranks.size > 1:
            # Summed in an order of their own: other last bits than those of one process, as with
            # GPTQ's sums.
            for value in (total, *gradients.values()):
                dist.all_reduce(value)
        norm = torch.nn.utils.clip_grad_norm_(self._masters.values(), _LARGEST_GRADIENT)
        if not (total + norm).isfinite():
            raise RecipeError(
                self._plan.recipe.name,
                "the loss of mtp: tuned and its gradient must be finite",
                got=f"{total.item()} and {norm.item()} at step {step + 1} of {settings.steps}",
                cure="Lower the rate of mtp_tuned, or use another mtp_tuned.loss",
            )
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * rate_at(step, settings.steps)
        self._optimizer.step()

    def _backward(self, row: int) -> Tensor:
        """The loss of one sequence; its gradients are added to the block's."""
        settings = self.settings
        block = self._block
        skeleton = self._backbone.skeleton
        batch = self._backbone.batches("mtp").batch(row, row + 1)
        with torch.no_grad():
            hidden = block_input(skeleton, block, batch)
            wanted_SH = head_input(skeleton, batch)[0]
        outputs = draft_steps(
            [block],
            skeleton.model.get_input_embeddings(),
            ids=batch.ids.to(skeleton.device),
            hidden=hidden,
            num_steps=settings.draft_steps,
        )
        target_head = skeleton.model.get_output_embeddings()
        heads = (block.head or target_head, target_head)
        # Further steps weigh less; the weights of all are 1 in sum.
        weights = [settings.decay**turn for turn in range(settings.draft_steps)]
        total = torch.zeros((), device=skeleton.device)
        gradients = []
        for step, (output, weight) in enumerate(zip(outputs, weights, strict=True), start=1):
            # Slot i of step k drafts what the target chooses at slot i + k.
            num_slots = batch.ids.shape[1] - step
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

    def _save(self, path: Path, num_steps: int) -> None:
        """Everything that the next step depends on, in one file, whole or not at all."""
        tensors = {HFName("step"): torch.tensor(float(num_steps))}
        for name, master in self._masters.items():
            tensors[HFName(f"master.{name}")] = master
            for key in _MOMENTS:
                tensors[HFName(f"{key}.{name}")] = self._optimizer.state[master][key]
        write_statistics(path, tensors, {})

    def _resumed(self, path: Path) -> int:
        """The number of steps that are done, with weights and moments put back."""
        read_metadata(path)  # a damaged file is refused
        kept = load_file(path)
        for name, master in self._masters.items():
            master.copy_(kept[f"master.{name}"])
            state = self._optimizer.state[master]
            state["step"] = kept["step"].clone()
            for key in _MOMENTS:
                state[key] = kept[f"{key}.{name}"].to(master.device)
        return int(kept["step"])


def rows_of(step: int, *, num_rows: int, settings: MtpTuned) -> list[int]:
    """The sequences of one step: each is drawn once before one is drawn again, as the seed says."""
    rows = []
    # A function of the seed and the step alone, so that a resumed run draws what a whole one draws.
    for place in range(step * settings.batch_size, (step + 1) * settings.batch_size):
        epoch, index = divmod(place, num_rows)
        rng = torch.Generator().manual_seed((settings.seed + epoch) % 2**63)
        rows.append(int(torch.randperm(num_rows, generator=rng)[index]))
    return rows


def rates_of(weights: Mapping[str, Tensor], settings: MtpTuned) -> list[float]:
    """The highest learning rate of each weight.

    One that is relative goes by the root mean square of a matrix, as in Adafactor (N. Shazeer, M.
    Stern, 2018). Norms and biases, which may be near 1 or near 0, have the matrices' mean.
    """
    if settings.relative_rate is None:
        return [settings.learning_rate or 0.0] * len(weights)
    sizes = {}  # root mean square of each matrix
    for name, weight in weights.items():
        if weight.ndim > 1:
            sizes[name] = float(weight.norm()) / math.sqrt(weight.numel())
    mean = math.fsum(sizes.values()) / max(1, len(sizes))
    return [settings.relative_rate * sizes.get(name, mean) for name in weights]


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step, as a part of the highest."""
    warm_up = max(1, round(_WARM_UP * steps))
    return min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up + 1))


def _plain(block: MtpBlock) -> dict[HFName, Tensor]:
    """The tuned tensors that are written in floating point, by their names on disk."""
    tensors = {}
    parts: dict[HFName, dict[tuple[int, int], Tensor]] = defaultdict(dict)
    for name, pieces in block.binding.items():
        tensor = pieces[0].tensor
        if not tensor.tuned or tensor.fate == "quantize":
            continue
        value = block.get_parameter(name).data
        sizes = [piece.tensor.shape[0] for piece in pieces]
        if tensor.stacked:  # a part of it has a parameter of its own
            sizes = [len(value)]
        for piece, rows in zip(pieces, value.split(sizes), strict=True):
            tensors[piece.tensor.name] = piece.tensor
            parts[piece.tensor.name][piece.expert or 0, piece.part] = rows
    found = {}
    for name, tensor in tensors.items():
        own = parts[name]
        values: Sequence[Tensor] = [torch.cat([own[key] for key in sorted(own)]).view(tensor.shape)]
        if tensor.slices:
            values = separate(values[0], tensor.slices)
        for output, value in zip(tensor.outputs, values, strict=True):
            found[output.name] = value.to(TORCH_DTYPES[output.dtype], copy=True)
    return found


# --- losses ---------------------------------------------------------------------------------------


def draft_loss(
    draft_NH: Tensor, target_NH: Tensor, heads: tuple[Any, Any], loss: str
) -> tuple[Tensor, Tensor]:
    """The loss of the drafts of one step.

    Args:
        draft_NH: what the head multiplies at N slots to draft a token.
        target_NH: what it multiplies where the target chooses that token.
        heads: of draft and target, mostly the same; they get no gradient.
        loss: its name.

    Returns: the sum over the slots, as a number on their device, and its gradient by `draft_NH`.
    """
    head, target_head = heads
    total = torch.zeros((), device=draft_NH.device)
    gradient_NH = torch.empty_like(draft_NH)
    # Logits of a batch are gigabytes, with 150,000 tokens a vocabulary: they are there for a few
    # slots at a time, and only the gradient of hidden states stays.
    for start in range(0, len(draft_NH), SLOTS):
        part = slice(start, start + SLOTS)
        states = draft_NH[part].detach().requires_grad_()
        with torch.no_grad():
            target_NV = target_head(target_NH[part]).float()
        with torch.enable_grad():
            value = losses(loss, target_NV, head(states).float()).sum()
        (gradient_NH[part],) = torch.autograd.grad(value, states)
        total += value.detach()
    return total, gradient_NH


def losses(loss: str, target_NV: Tensor, draft_NV: Tensor) -> Tensor:
    """[N]: the loss of each slot, from logits of target and draft.

    p is the target's distribution and q the draft's; their overlap, the sum of min(p, q), is the
    share of drafts that rejection sampling accepts.

        tv         1 - overlap: the share that is rejected; a small gradient where they hardly
                   overlap
        nla        -log overlap
        kl_div     the divergence of q from p
        lk_hybrid  kl_div where they hardly overlap, tv where they do: exp(-3 overlap) of it is
                   kl_div
        ce         -log q of the target's choice: temperature 0, and nothing else of the target
                   counts
    """
    if loss == "ce":
        return F.cross_entropy(draft_NV, target_NV.argmax(dim=-1), reduction="none")
    overlap_N = torch.minimum(target_NV.softmax(dim=-1), draft_NV.softmax(dim=-1)).sum(dim=-1)
    if loss == "tv":
        return 1 - overlap_N
    if loss == "nla":  # NaN has to stay: a clamp would hide it
        return -(overlap_N + torch.finfo(torch.float32).tiny).log()
    expected_NV = target_NV.log_softmax(dim=-1)
    predicted_NV = draft_NV.log_softmax(dim=-1)
    divergence_NV = F.kl_div(predicted_NV, expected_NV, reduction="none", log_target=True)
    divergence_N = divergence_NV.sum(dim=-1)
    if loss == "kl_div":
        return divergence_N
    share_N = torch.exp(-3 * overlap_N.detach())
    return share_N * divergence_N + (1 - share_N) * (1 - overlap_N)
