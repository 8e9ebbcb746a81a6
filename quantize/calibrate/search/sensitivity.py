"""How much each unit of a model cares for its words: one sweep forward, one backward, layer by
layer.

In: the choices of a search, and some of the calibration text. Out: for each unit and word, nats of
divergence a token, of the answers and, weighted, of the drafts; and the largest input of every
linear layer.

    forward   each layer computes the text once as released; what it returns stays on disk
    top       head and MTP block: tokens are drawn from their predictions, and the gradient of these
               tokens' log likelihood goes back to the states after the last layer
    backward   from the last layer to the first: the gradient goes through, and each layer is judged
               (`candidates.py`)

Answers and drafts need one gradient, not two: drawn apart, the two log likelihoods have gradients
whose product is zero in the mean, so that the squares of their sum are the sum of their squares.

Every file is whole or not there, so that a killed run goes on at the layer it was in.

Easy to get wrong: what is drawn is from the model's own predictions, never the text's next token.
The text's gradients say what would improve the model, not what would change it.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

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
from .candidates import Seen, largest_inputs, unit_errors, watching


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """What the sweeps found.

    Attributes:
        losses: (unit, word) -> nats a token; a word that rounds nothing is not there.
        largest: layer (or -1 - block) -> linear layer by its path there -> largest magnitude of its
            input.
        num_tokens: that they were measured on.
    """

    losses: dict[tuple[str, str], float]
    largest: dict[int, dict[str, float]]
    num_tokens: int

    def predicted(self, assignment: Assignment) -> float:
        """Nats a token of all units with these words."""
        return math.fsum(self.losses.get(pair, 0.0) for pair in assignment.items())


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
        report: called with the number of steps done, a layer of a sweep each.
    """

    choices: Choices
    data: CalibrationData
    place: Path
    skeleton: Skeleton
    ranks: Ranks
    has_block: bool
    report: Callable[[int], None]

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

    def blocks(self) -> list[MtpBlock]:
        """The MTP blocks that draft, with the released weights; none where they cannot be run."""
        if not self.has_block:
            return []
        return blocks_that_draft(self.choices.base, filled_blocks(self.choices.base, self.skeleton))

    def sensitivities(self) -> Sensitivities:
        """Both sweeps, as far as an earlier run has not done them."""
        last, states, gradients = (
            len(self.skeleton),
            self._states("states"),
            self._states("gradients"),
        )
        if self.ranks.is_first:
            self.place.mkdir(parents=True, exist_ok=True)
        self.ranks.wait()
        judged = self.ranks.of_first(lambda: [i for i in range(last) if self._figures(i).is_file()])
        todo = min(judged, default=last)
        if todo == last and not self.ranks.of_first(gradients.num_done):
            for index in range(self.ranks.of_first(states.num_done), last):
                self._forward(index)
                self.report(index + 1)
            self._top()
        self.report(last + 1)
        for index in reversed(range(todo)):
            self._backward(index)
            self.report(2 * last + 1 - index)
        return self._read()

    # --- the sweeps -------------------------------------------------------------------------------

    def _forward(self, index: int) -> None:
        returned: list[LayerState] = []
        with (
            self.skeleton.layer(index, index + 1) as layer,
            self._states("states").writing(index + 1, keeps=True) as outputs,
            torch.no_grad(),
            released(self.skeleton.model),
            hooked([layer.register_forward_hook(_keeping(returned))]),
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

    def _top(self) -> None:
        """The gradient at the states after the last layer, and the sums of the block's units."""
        skeleton, base, last = self.skeleton, self.choices.base, len(self.skeleton)
        blocks = self.blocks()
        bindings = [bind_block(block, base) for block in blocks]
        with ExitStack() as stack:
            stack.enter_context(skeleton.head())
            skeleton.model.requires_grad_(False)
            seen = []
            for block, binding in zip(blocks, bindings, strict=True):
                stack.enter_context(released(block))
                seen.append(stack.enter_context(watching(block, self.choices, binding, "")))
            outputs = stack.enter_context(self._states("gradients").writing(last, keeps=True))
            stack.enter_context(released(skeleton.model))
            for first, arguments, leaves in self._batches(last):
                self._draw(first, arguments, leaves, blocks)
                outputs.put("calibration", first, _gradients(leaves))
            for number, block in enumerate(blocks):
                self._judge(-1 - number, block, bindings[number], "", seen[number])

    def _draw(
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

        def drawn(logits_SV: Tensor) -> Tensor:
            """The summed log likelihood of tokens drawn from these predictions."""
            wide = logits_SV.float()
            drawn_S = torch.multinomial(wide.detach().softmax(dim=-1), 1, generator=generator)[:, 0]
            return -F.cross_entropy(wide, drawn_S, reduction="sum")

        likelihood = drawn(model(**arguments, use_cache=False).logits[0])
        if blocks and (weight := self.auto.draft_weight):
            hidden = leaves[0]
            if blocks[0].draft.reads_normed:
                hidden = model.get_decoder()(**arguments, use_cache=False).last_hidden_state
            assert hidden is not None
            embedding, target_head = model.get_input_embeddings(), model.get_output_embeddings()
            outputs = draft_steps(blocks, embedding, ids=ids, hidden=hidden, num_steps=len(blocks))
            for step, (block, output) in enumerate(zip(blocks, outputs, strict=True), start=1):
                head: Any = block.head or target_head
                # The last slots have no next token.
                drafts = drawn(head(output[0, : ids.shape[1] - step]))
                likelihood = likelihood + math.sqrt(weight) * drafts
        if not likelihood.requires_grad:
            rule = "a model must be differentiable for backbone: auto"
            cure = "Choose the schemes yourself: its own code computes without gradients"
            raise CheckpointError(
                self.choices.base.source.where, rule, got="no gradient", cure=cure
            )
        likelihood.backward()

    def _backward(self, index: int) -> None:
        skeleton, model = self.skeleton, self.skeleton.model
        binding, path = skeleton.bind_layer(index), f"{skeleton.layer_path}.{index}."
        after, returned = self._states("gradients"), list[LayerState]()
        with skeleton.layer(index, index - 1) as layer:
            model.requires_grad_(False)
            hooks = [layer.register_forward_hook(_keeping(returned))]
            if not index:  # gradients begin at the embedding, whose weights have none
                embedding = model.get_input_embeddings()
                begin = embedding.register_forward_hook(
                    lambda _m, _args, output: output.requires_grad_()
                )
                hooks.append(begin)
            with (
                watching(model, self.choices, binding, path) as seen,
                self._states("gradients").writing(index, keeps=True) as below,
                released(model),
                hooked(hooks),
            ):
                for first, arguments, leaves in self._batches(index):
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
                    below.put(
                        "calibration", first, _gradients(leaves) or (torch.zeros(num_rows, 1),)
                    )
            self._judge(index, model, binding, path, seen)
        if self.ranks.is_first:
            for kind in ("states", "gradients"):
                shutil.rmtree(self.place / kind / f"{index + 1:05d}", ignore_errors=True)
        self.ranks.wait()

    def _judge(
        self, index: int, model: Any, binding: Binding, path: str, seen: dict[str, Seen]
    ) -> None:
        """What all words do to a layer's units, summed over the ranks, on disk."""
        largest = largest_inputs(seen, binding)
        errors = unit_errors(self.choices, model, binding, path, seen, largest)
        sums = self.ranks.sum(torch.tensor([*errors.values()], dtype=torch.float64))
        found = []
        for (unit, word), value in zip(errors, sums.tolist(), strict=True):
            if not math.isfinite(value):
                raise CheckpointError(
                    f"{self.choices.base.source.where}: {unit}",
                    f"the error that {word} makes must be a number",
                    got=value,
                    cure="Look for weights or activations that are not finite, or choose the "
                    "schemes yourself",
                )
            found.append((unit, word, value))
        if self.ranks.is_first:
            file = self._figures(index)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps({"errors": found, "largest": largest}))
        self.ranks.wait()

    # --- files ------------------------------------------------------------------------------------

    def _states(self, kind: Literal["states", "gradients"]) -> States:
        return States(self.place / kind, self.ranks)

    def _figures(self, index: int) -> Path:
        return self.place / "errors" / f"{index}.json"

    def _read(self) -> Sensitivities:
        """The sums as nats a token: half of them."""
        losses, largest, num_tokens = {}, {}, self.ids.numel()
        for path in (self.place / "errors").glob("*.json"):
            kept = json.loads(path.read_text())
            largest[int(path.stem)] = kept["largest"]
            for unit, word, value in kept["errors"]:
                losses[unit, word] = value / (2 * num_tokens)
        return Sensitivities(losses, largest, num_tokens)

    def _batches(self, index: int) -> Iterator[tuple[int, dict[str, Tensor], LayerState]]:
        """This rank's batches: first row, the model's arguments, and the states that layer `index`
        reads.
        """
        ids, last = self.ids, len(self.skeleton)
        # No more in a batch than leaves some for every rank; drafts are drawn sequence by sequence.
        size = max(1, min(SWEEP_TOKENS // ids.shape[1], math.ceil(len(ids) / self.ranks.size)))
        if index == last:
            size = 1
        share, states = self.ranks.share(len(ids), size), self._states("states")
        for first in range(share.start, share.stop, size):
            end, state = min(first + size, share.stop), None
            if index:
                state = states.read(index, "calibration", first, end, self.skeleton.device)
                for value in state:
                    if value is not None and value.is_floating_point():
                        value.requires_grad_()
            for arguments in self.skeleton.feed(
                index, [Batch(ids=ids[first:end], state=state, first=first)]
            ):
                yield first, arguments, state or ()


def _keeping(returned: list[LayerState]) -> Callable[..., None]:
    """A forward hook that keeps what a layer has returned, to be popped."""
    return lambda _module, _args, output: returned.append(
        output if isinstance(output, tuple) else (output,)
    )


def _gradients(leaves: LayerState) -> LayerState:
    """Of each state, zero where nothing depends on it."""
    found = []
    for leaf in leaves:
        gradient = None
        if leaf is not None and leaf.requires_grad:
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        found.append(gradient)
    return tuple(found)
