"""How much a model's answers and drafts change when one unit is rounded by one scheme.

In: the choices of a search, and the first part of the calibration text. Out: for each unit and
scheme the divergence that it is expected to cost, in nats a token.

Three sweeps over the layers, one layer in memory at a time:

    forward    each layer computes the text as released; its outputs stay on disk
    top        head and MTP block predict; tokens are drawn from the predictions, and the gradient
               of their log likelihood is taken at the outputs of the last layer
    backward   from the last layer to the first: the gradient passes through the layer, and each
               scheme of each unit is judged by it (`candidates.py`)

Every file is whole or not there, so that a killed run goes on at the layer it was in.
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....checkpoints.files import write_whole
from ....recipes.errors import CheckpointError
from ...plan.choices import SWEEP_TOKENS, Choices, auto_of, rows_looked_at
from ...run.progress import ProgressCallback, reporter
from ...run.ranks import Ranks
from ..data.data import CalibrationData
from ..layers.forwards import released
from ..model.batches import Batches
from ..model.binding import Binding
from ..model.hooks import hooked
from ..model.skeleton import Batch, Skeleton
from ..model.states import LayerState, States, as_state
from ..mtp.acceptance import block_input, computed
from ..mtp.mtp_block import MtpBlock, draft_steps
from ..mtp.mtp_policy import blocks_that_draft, filled_blocks
from .candidates import (
    Seen,
    unit_errors,
    watching,
)

Sensitivities = dict[tuple[str, str], float]
"""Unit and word -> nats a token; a word that rounds nothing is not there."""


class SearchRun:
    """One search over a model, and its two sweeps. State: files in its folder.

    Args:
        choices: of the search.
        data: of the run; the sweeps read the first part of its text.
        folder: for what is kept between layers.
        ranks: who shares the text.
        can_draft: whether the model has an MTP block that can be run (`refuse_mtp`).
        progress: called after each layer of each sweep.
    """

    def __init__(
        self,
        choices: Choices,
        data: CalibrationData,
        folder: Path,
        ranks: Ranks,
        *,
        can_draft: bool = True,
        progress: ProgressCallback | None = None,
    ):
        self.choices = choices
        self.auto = auto_of(choices.recipe)
        self.data = data
        self.folder = folder
        self.ranks = ranks
        self._can_draft = can_draft
        # Of the base plan, whose layers have the released weights.
        self.skeleton = Skeleton(choices.base, device=ranks.device)
        self.ids = data.ids[: rows_looked_at(choices.recipe)]
        total = 2 * len(self.skeleton) + 1
        self.report = reporter(progress, ranks, "search", total=total, tokens=self.ids.numel())
        self._states = States(folder / "states", ranks)
        self._gradients = States(folder / "gradients", ranks)

    def blocks(self) -> list[MtpBlock]:
        """The MTP blocks that draft, with the released weights; none where they cannot be run."""
        base = self.choices.base
        if not self._can_draft:
            return []
        return blocks_that_draft(base, filled_blocks(base, self.skeleton))

    def sensitivities(self) -> Sensitivities:
        """Both sweeps, as far as an earlier run has not done them."""
        last = len(self.skeleton)
        ranks = self.ranks
        if ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
        ranks.wait()

        def first_judged() -> int:
            """The sweep goes down, so this layer is the last that an earlier run judged."""
            for index in range(last):
                if self._figures(index).is_file():
                    return index
            return last

        todo = ranks.of_first(first_judged)
        if todo == last and not self._gradients.num_done():
            for index in range(self._states.num_done(), last):
                self._forward(index)
                self.report(index + 1)
            self._top()
        self.report(last + 1)
        for index in reversed(range(todo)):
            self._backward(index)
            self.report(2 * last + 1 - index)
        losses = {}
        for path in (self.folder / "errors").glob("*.json"):
            for unit, word, value in json.loads(path.read_text()):
                # To second order the divergence is half of the mean square (`candidates.py`).
                losses[unit, word] = value / (2 * self.ids.numel())
        return losses

    # --- the sweeps -------------------------------------------------------------------------------

    def _forward(self, index: int) -> None:
        skeleton = self.skeleton
        with (
            skeleton.layer(index) as layer,
            self._states.writing(index + 1, keeps=True) as outputs,
            torch.no_grad(),
            released(skeleton.model),
            _returned_by(layer) as returned,
        ):
            for batch, arguments in self._batches(index):
                skeleton.model(**arguments, use_cache=False)
                state = returned.pop()
                if not all(value.isfinite().all() for value in state if value is not None):
                    raise CheckpointError(
                        f"{self.choices.base.source.where}: {skeleton.layer_path}.{index}",
                        "a released model must compute finite values",
                        got="NaN or infinity",
                        cure="Check the download, or choose the schemes yourself",
                    )
                outputs.put("calibration", batch.first, state)

    def _top(self) -> None:
        """The gradient at the states after the last layer, and the sums of the block's units."""
        model = self.skeleton.model
        blocks = self.blocks()
        sides = []
        with ExitStack() as stack:
            stack.enter_context(self.skeleton.head())
            model.requires_grad_(False)
            for block in blocks:
                stack.enter_context(released(block))
                seen = stack.enter_context(watching(block, self.choices, block.binding, ""))
                sides.append((block, seen))
            outputs = stack.enter_context(self._gradients.writing(len(self.skeleton), keeps=True))
            stack.enter_context(released(model))
            for batch, _ in self._batches(len(self.skeleton)):
                self._draw(batch, blocks)
                outputs.put("calibration", batch.first, _gradients(batch))
            for number, (block, seen) in enumerate(sides):
                self._judge(-1 - number, block, block.binding, "", seen)

    def _draw(self, sequence: Batch, blocks: Sequence[MtpBlock]) -> None:
        """Sends the gradient of drawn tokens' log likelihood back from one sequence's predictions
        and drafts.
        """
        skeleton = self.skeleton
        model = skeleton.model
        ids = sequence.ids.to(skeleton.device)
        base = self.choices.base
        seed = base.calibration.seed + sequence.first
        generator = torch.Generator(skeleton.device).manual_seed(seed)

        def drawn(logits_SV: Tensor) -> Tensor:
            """The summed log likelihood of tokens drawn from these predictions."""
            wide = logits_SV.float()
            drawn_S = torch.multinomial(wide.detach().softmax(dim=-1), 1, generator=generator)[:, 0]
            return -F.cross_entropy(wide, drawn_S, reduction="sum")

        # Never of the text's next token: its gradient says what would improve the model, not what
        # would change it.
        likelihood = drawn(computed(skeleton, sequence).logits[0])
        if blocks and self.auto.draft_weight:
            hidden = block_input(skeleton, blocks[0], sequence)
            tokens = model.get_input_embeddings()
            outputs = draft_steps(blocks, tokens, ids=ids, hidden=hidden, num_steps=len(blocks))
            for step, (block, output) in enumerate(zip(blocks, outputs, strict=True), start=1):
                head: Any = block.head or model.get_output_embeddings()
                # One gradient for answers and drafts: their tokens are drawn apart, so the product
                # of the two gradients is zero in the mean, and the square of the sum is the sum of
                # the squares. The last slots have no next token.
                drafts = drawn(head(output[0, : ids.shape[1] - step]))
                likelihood = likelihood + math.sqrt(self.auto.draft_weight) * drafts
        if not likelihood.requires_grad:
            raise CheckpointError(
                base.source.where,
                "a model must be differentiable for backbone: auto",
                got="no gradient",
                cure="Choose the schemes yourself: its own code computes without gradients",
            )
        likelihood.backward()

    def _backward(self, index: int) -> None:
        skeleton = self.skeleton
        model = skeleton.model
        binding = skeleton.bind_layer(index)
        path = f"{skeleton.layer_path}.{index}."
        begin = []
        if not index:  # gradients begin at the embedding, whose weights have none

            def require(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
                return output.requires_grad_()

            begin.append(model.get_input_embeddings().register_forward_hook(require))
        with skeleton.layer(index) as layer:
            model.requires_grad_(False)
            with (
                watching(model, self.choices, binding, path) as seen,
                self._gradients.writing(index, keeps=True) as below,
                released(model),
                hooked(begin),
                _returned_by(layer) as returned,
            ):
                for batch, arguments in self._batches(index):
                    model(**arguments, use_cache=False)
                    first = batch.first
                    last = first + len(batch.ids)
                    above = self._gradients.read(index + 1, "calibration", first, last)
                    outputs = []
                    gradients = []
                    for output, gradient in zip(returned.pop(), above, strict=True):
                        if output is not None and gradient is not None and output.requires_grad:
                            outputs.append(output)
                            gradients.append(gradient.to(output.device))
                    torch.autograd.backward(outputs, gradients)
                    own = _gradients(batch)
                    if not own:  # the first layer reads no states
                        own = (torch.zeros(last - first, 1),)
                    below.put("calibration", first, own)
            self._judge(index, model, binding, path, seen)
        if self.ranks.is_first:
            for kind in ("states", "gradients"):
                shutil.rmtree(self.folder / kind / f"{index + 1:05d}", ignore_errors=True)
        self.ranks.wait()

    def _judge(
        self, index: int, model: Any, binding: Binding, path: str, seen: dict[str, Seen]
    ) -> None:
        """What all words do to a layer's units, summed over the ranks, on disk."""
        errors = unit_errors(self.choices, model, binding, path, seen)
        sums = self.ranks.sum(torch.tensor([*errors.values()], dtype=torch.float64)).tolist()
        if self.ranks.is_first:
            found = [(*pair, value) for pair, value in zip(errors, sums, strict=True)]
            file = self._figures(index)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(found))
        self.ranks.wait()

    def _figures(self, index: int) -> Path:
        return self.folder / "errors" / f"{index}.json"

    def _batches(self, index: int) -> Iterator[tuple[Batch, dict[str, Tensor]]]:
        """This rank's batches as inputs of layer `index`, whose states will have gradients, and the
        model's arguments for them.
        """
        ids = self.ids
        # No more in a batch than leaves some for every rank; drafts are drawn sequence by sequence.
        size = max(1, min(SWEEP_TOKENS // ids.shape[1], math.ceil(len(ids) / self.ranks.size)))
        if index == len(self.skeleton):
            size = 1
        batches = Batches(
            skeleton=self.skeleton,
            states=self._states,
            stream="calibration",
            index=index,
            ids=ids,
            rows=self.ranks.share(len(ids), size),
            size=size,
        )
        for batch in batches.batches():
            for value in batch.state or ():
                if value is not None and value.is_floating_point():
                    value.requires_grad_()
            with self.skeleton.fed(index, batch) as arguments:
                yield batch, arguments


@contextmanager
def _returned_by(layer: nn.Module) -> Iterator[list[LayerState]]:
    """Collects what a layer returns, to be popped."""
    returned = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        returned.append(as_state(output))

    with hooked([layer.register_forward_hook(keep)]):
        yield returned


def _gradients(batch: Batch) -> LayerState:
    """Of each state that the layer has read, zero where nothing depends on it."""
    gradients = []
    for value in batch.state or ():
        gradient = None
        if value is not None and value.requires_grad:
            gradient = value.grad
            if gradient is None:
                gradient = torch.zeros_like(value)
        gradients.append(gradient)
    return tuple(gradients)
