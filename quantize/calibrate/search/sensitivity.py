"""How much each unit of a model cares for its words: one sweep forward, one backward, a decoder
layer at a time.

In: the choices of a search, and some of the calibration text. Out: for each unit and word, nats of
divergence a token, of the answers and, weighted, of the drafts; and the largest input of every
linear layer.

    forward  each layer computes the text once as released; what it returns stays on disk
    top      head and MTP block: tokens are drawn from their predictions, and the gradient of these
             tokens' log likelihood goes back to the states after the last layer
    backward from the last layer to the first: the gradient goes through, and each layer is judged
             (`unit_errors.py`)

Answers and drafts need one gradient, not two: drawn apart, the two log likelihoods have gradients
whose product is zero in the mean, so that the squares of their sum are the sum of their squares.

Every file is whole or not there, so that a killed run goes on at the layer it was in.

Easy to get wrong: what is drawn is from the model's own predictions, never the text's next token.
The text's gradients say what would improve the model, not what would change it.
"""

import json
import math
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....checkpoints.files import write_whole
from ....recipes.errors import CheckpointError
from ....recipes.schema import BackboneAuto, Recipe
from ...plan.choices import SWEEP_TOKENS, Assignment, Choices, rows_looked_at
from ...run.ranks import Ranks
from ..data.data import CalibrationData
from ..layers.forwards import released
from ..model.binding import Binding
from ..model.hooks import hooked
from ..model.skeleton import Batch, Skeleton
from ..model.states import LayerState, States
from ..mtp.mtp_block import MtpBlock, bind_block, draft_steps
from ..mtp.mtp_policy import blocks_that_draft, filled_blocks
from .unit_errors import UnitErrors, largest_inputs, unit_errors, watching

SweepKind = Literal["states", "gradients"]


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """What the sweeps found.

    Attributes:
        losses: unit -> word -> nats a token; a word that rounds nothing is not there.
        largest: layer (or -1 - block) -> linear layer by its path there -> the largest magnitude of
            its input.
        num_tokens: that they were measured on.
    """

    losses: dict[str, dict[str, float]]
    largest: dict[int, dict[str, float]]
    num_tokens: int

    def loss(self, unit: str, word: str) -> float:
        """Nats a token."""
        return self.losses.get(unit, {}).get(word, 0.0)

    def predicted(self, assignment: Assignment) -> float:
        """Nats a token of all units with these words."""
        return math.fsum(self.loss(unit, word) for unit, word in assignment.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRun:
    """One search over a model, and its two sweeps.

    Attributes:
        choices: of the search.
        data: of the run.
        place: a folder for what is kept between layers.
        skeleton: of the base plan of `choices`, whose layers have the released weights.
        ranks: who shares the text.
        has_block: whether there is an MTP block that can be run.
        step: called after each layer of each sweep.
    """

    choices: Choices
    data: CalibrationData
    place: Path
    skeleton: Skeleton
    ranks: Ranks
    has_block: bool
    step: Callable[[], None]

    @property
    def recipe(self) -> Recipe:
        """That asked for the search."""
        return self.choices.recipe

    @property
    def auto(self) -> BackboneAuto:
        """What it asked for."""
        assert self.recipe.backbone_auto is not None
        return self.recipe.backbone_auto

    @property
    def ids(self) -> Tensor:
        """[R, S] int64, the text of the sweeps."""
        return self.data.ids[: rows_looked_at(self.recipe)]

    def sensitivities(self) -> Sensitivities:
        """Both sweeps, as far as an earlier run has not done them."""
        if self.ranks.is_first:
            self.place.mkdir(parents=True, exist_ok=True)
        self.ranks.wait()
        last = len(self.skeleton)
        for index in range(last):
            if not self._is_kept("states", index + 1) and not self._is_kept("gradients", index + 1):
                self._forward(index)
            self.step()
        if not self._is_kept("gradients", last):
            self._top()
        self.step()
        for index in reversed(range(last)):
            if not self._figures(index).is_file():
                self._backward(index)
            self.step()
        return self._read()

    # --- forward
    # ----------------------------------------------------------------------------------------------

    def _forward(self, index: int) -> None:
        with (
            self.skeleton.layer(index, index + 1) as layer,
            self._states("states").writing(index + 1, keeps=True) as outputs,
            torch.no_grad(),
            released(self.skeleton.model),
            _returning(layer) as returned,
        ):
            for first, arguments, _ in self._batches(index):
                self.skeleton.model(**arguments, use_cache=False)
                state = returned.pop()
                if not all(value.isfinite().all() for value in state if value is not None):
                    raise CheckpointError(
                        f"{self.choices.base.source.where}: {self.skeleton.layer_path}.{index}",
                        "a released model must compute finite values",
                        got="NaN or infinity",
                        cure="Check the download against the release, or choose the schemes "
                        "yourself",
                    )
                outputs.put("calibration", first, state)

    # --- top
    # ----------------------------------------------------------------------------------------------

    def _top(self) -> None:
        """The gradient at the states after the last layer, and the sums of the block's units."""
        skeleton, base = self.skeleton, self.choices.base
        last, blocks, seen = len(skeleton), [], []
        if self.has_block:
            blocks = blocks_that_draft(base, filled_blocks(base, skeleton))
        with ExitStack() as stack:
            stack.enter_context(skeleton.head())
            skeleton.model.requires_grad_(False)
            for block in blocks:
                stack.enter_context(released(block))
                seen.append(
                    stack.enter_context(watching(block, self._linears(bind_block(block, base))))
                )
            outputs = stack.enter_context(self._states("gradients").writing(last, keeps=True))
            stack.enter_context(released(skeleton.model))
            for first, arguments, leaves in self._batches(last, row_by_row=True, gradients=True):
                self._drawn(first, arguments, leaves, blocks)
                outputs.put("calibration", first, _gradients(leaves))
            for number, (block, own) in enumerate(zip(blocks, seen, strict=True)):
                binding = bind_block(block, base)
                largest = largest_inputs(own, binding, self.ranks)
                self._keep(
                    -1 - number,
                    unit_errors(self.choices, block, binding, "", own, largest),
                    largest,
                )

    def _drawn(
        self, row: int, arguments: dict[str, Tensor], leaves: LayerState, blocks: Sequence[MtpBlock]
    ) -> None:
        """Sends the gradient of drawn tokens' log likelihood back from one sequence's predictions
        and drafts.
        """
        model, ids = self.skeleton.model, arguments["input_ids"]
        assert self.recipe.calibration is not None
        generator = torch.Generator(self.skeleton.device).manual_seed(
            self.recipe.calibration.seed + row
        )
        likelihood = _drawn_likelihood(model(**arguments, use_cache=False).logits[0], generator)
        weight = self.auto.draft_weight
        if blocks and weight:
            hidden = leaves[0]
            if blocks[0].draft.reads_normed:
                hidden = model.get_decoder()(**arguments, use_cache=False).last_hidden_state
            assert hidden is not None
            embedding, target_head = model.get_input_embeddings(), model.get_output_embeddings()
            outputs = draft_steps(blocks, embedding, ids=ids, hidden=hidden, num_steps=len(blocks))
            for step, (block, output) in enumerate(zip(blocks, outputs, strict=True), start=1):
                head: Any = block.head or target_head
                # The last slots have no next token.
                logits = head(output[0, : ids.shape[1] - step])
                likelihood = likelihood + math.sqrt(weight) * _drawn_likelihood(logits, generator)
        if not likelihood.requires_grad:
            rule = "a model must be differentiable for backbone: auto"
            cure = "Choose the schemes yourself: its own code computes without gradients"
            raise CheckpointError(
                self.choices.base.source.where, rule, got="no gradient", cure=cure
            )
        likelihood.backward()

    # --- backward
    # ----------------------------------------------------------------------------------------------

    def _backward(self, index: int) -> None:
        skeleton, model, path = (
            self.skeleton,
            self.skeleton.model,
            f"{self.skeleton.layer_path}.{index}.",
        )
        binding = skeleton.bind_layer(index)
        with ExitStack() as stack:
            layer = stack.enter_context(skeleton.layer(index, index - 1))
            model.requires_grad_(False)
            seen = stack.enter_context(watching(model, self._linears(binding, path)))
            with ExitStack() as sweep:
                found = sweep.enter_context(self._states("gradients").writing(index, keeps=True))
                sweep.enter_context(released(model))
                returned = sweep.enter_context(_returning(layer))
                if not index:  # gradients begin at the embedding, whose weights have none
                    embedding = model.get_input_embeddings()
                    begin = embedding.register_forward_hook(
                        lambda _module, _args, output: output.requires_grad_()
                    )
                    sweep.enter_context(hooked([begin]))
                after = self._states("gradients")
                for first, arguments, leaves in self._batches(index, gradients=True):
                    model(**arguments, use_cache=False)
                    num_rows = len(arguments["input_ids"])
                    above = after.read(
                        index + 1, "calibration", first, first + num_rows, skeleton.device
                    )
                    outputs, gradients = [], []
                    for output, gradient in zip(returned.pop(), above, strict=True):
                        if output is not None and gradient is not None and output.requires_grad:
                            outputs.append(output)
                            gradients.append(gradient)
                    torch.autograd.backward(outputs, gradients)
                    below = _gradients(leaves) if index else (torch.zeros(num_rows, 1),)
                    found.put("calibration", first, below)
            largest = largest_inputs(seen, binding, self.ranks)
            errors = unit_errors(self.choices, model, binding, path, seen, largest)
        self._keep(index, errors, largest)
        if self.ranks.is_first:
            for kind in ("states", "gradients"):
                shutil.rmtree(self.place / kind / f"{index + 1:05d}", ignore_errors=True)
        self.ranks.wait()

    def _linears(self, binding: Binding, path: str = "") -> dict[str, str]:
        """Linear layers of a layer or block that a search decides about: path in the model -> path
        there.
        """
        searched = {
            tensor.name for unit in self.choices.units for tensor in unit.options[0].tensors
        }
        found = {}
        for name, pieces in binding.items():
            if pieces[0].tensor.name in searched:
                module = name.rpartition(".")[0]
                found[f"{path}{module}"] = module
        return found

    # --- files
    # ----------------------------------------------------------------------------------------------

    def _states(self, kind: SweepKind) -> States:
        return States(self.place / kind, self.ranks)

    def _is_kept(self, kind: SweepKind, index: int) -> bool:
        """Whether an earlier run has left it, or has gone on beyond it."""
        if kind == "gradients" and any(self._figures(below).is_file() for below in range(index)):
            return True
        return (self.place / kind / f"{index:05d}").is_dir()

    def _batches(
        self, index: int, *, row_by_row: bool = False, gradients: bool = False
    ) -> Iterator[tuple[int, dict[str, Tensor], LayerState]]:
        """This rank's batches: the first row, the model's arguments, and the states that layer
        `index` reads.
        """
        ids = self.ids
        # No more in a batch than leaves some for every rank.
        size = max(1, min(SWEEP_TOKENS // ids.shape[1], math.ceil(len(ids) / self.ranks.size)))
        if row_by_row:
            size = 1
        share, states = self.ranks.share(len(ids), size), self._states("states")
        for first in range(share.start, share.stop, size):
            last = min(first + size, share.stop)
            state: LayerState | None = None
            if index:
                state = states.read(index, "calibration", first, last, self.skeleton.device)
                for value in state:
                    if gradients and value is not None and value.is_floating_point():
                        value.requires_grad_()
            batch = Batch(ids=ids[first:last], state=state, first=first)
            for arguments in self.skeleton.feed(index, [batch]):
                yield first, arguments, state or ()

    def _figures(self, index: int) -> Path:
        name = f"layer-{index:05d}" if index >= 0 else f"block-{-1 - index:05d}"
        return self.place / "errors" / f"{name}.json"

    def _keep(self, index: int, errors: UnitErrors, largest: dict[str, float]) -> None:
        """The sums of all ranks, on disk."""
        keys = [(unit, word) for unit, by_word in errors.items() for word in by_word]
        sums = torch.tensor([errors[unit][word] for unit, word in keys], dtype=torch.float64)
        total = self.ranks.sum(sums).tolist()
        if self.ranks.is_first:
            found: UnitErrors = {unit: {} for unit in errors}
            for (unit, word), value in zip(keys, total, strict=True):
                if not math.isfinite(value):
                    where = f"{self.choices.base.source.where}: {unit}"
                    cure = (
                        "Look for weights or activations that are not finite, or choose the "
                        "schemes yourself"
                    )
                    raise CheckpointError(
                        where, f"the error that {word} makes must be a number", got=value, cure=cure
                    )
                found[unit][word] = value
            path = self._figures(index)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"errors": found, "largest": largest}))
        self.ranks.wait()

    def _read(self) -> Sensitivities:
        """The sums as nats a token: half of them."""
        losses: dict[str, dict[str, float]] = {}
        largest: dict[int, dict[str, float]] = {}
        num_tokens = self.ids.numel()
        for path in sorted((self.place / "errors").glob("*.json")):
            kept, number = json.loads(path.read_text()), int(path.stem.rpartition("-")[2])
            largest[number if path.stem.startswith("layer") else -1 - number] = kept["largest"]
            for unit, by_word in kept["errors"].items():
                losses[unit] = {word: value / (2 * num_tokens) for word, value in by_word.items()}
        return Sensitivities(losses, largest, num_tokens)


# --- tensors
# --------------------------------------------------------------------------------------------------


def _gradients(leaves: LayerState) -> LayerState:
    """Of each state, zero where nothing depends on it."""
    found = []
    for leaf in leaves:
        gradient = None if leaf is None else leaf.grad
        if gradient is None and leaf is not None and leaf.requires_grad:
            gradient = torch.zeros_like(leaf)
        found.append(gradient)
    return tuple(found)


def _drawn_likelihood(logits_SV: Tensor, generator: torch.Generator) -> Tensor:
    """The summed log likelihood of tokens drawn from these predictions."""
    wide = logits_SV.float()
    drawn_S = torch.multinomial(wide.detach().softmax(dim=-1), 1, generator=generator)[:, 0]
    return -F.cross_entropy(wide, drawn_S, reduction="sum")


@contextmanager
def _returning(layer: nn.Module) -> Iterator[deque[LayerState]]:
    """What the layer has returned last, to be popped."""
    returned = deque[LayerState](maxlen=1)

    def look(_module: nn.Module, _args: Any, output: Any) -> None:
        returned.append(output if isinstance(output, tuple) else (output,))

    with hooked([layer.register_forward_hook(look)]):
        yield returned
