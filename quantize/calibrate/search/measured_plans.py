"""A few plans measured together: each on the held-out text, as a server would compute it, a layer at a time.

In: plans of `Choices`, and the largest inputs that the sweeps saw. Out: for each its divergence from the released model
on held-out text, and what a server would accept of its drafts.

A layer is loaded once and becomes one plan after the other. The states of each plan are a stream of their own, in a
folder that looks like that of a finished backbone pass, so that `target.py` and `held_out.py` measure them.

Easy to get wrong: these figures choose between plans. Those in the record are measured again, on the calibrated
backbone: its input scales are of all calibration text, and an algorithm such as GPTQ rewrites its weights.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ....checkpoints.files import write_whole
from ....recipes.schema import AUTO
from ...plan.plan import Plan
from ..data.data import CalibrationData
from ..layers.ahead import ReadAhead
from ..layers.backbone import Backbone
from ..layers.forwards import serving
from ..model.states import States, Stream
from ..mtp.accepted import Acceptance
from ..mtp.held_out import NothingCounts, acceptance
from ..mtp.mtp_block import MtpBlock, bind_block
from ..mtp.mtp_policy import blocks_that_draft, filled_blocks
from ..mtp.target import Target, target
from .candidate import LargestInputs, LastServed, as_candidate, rebound
from .sensitivity import SearchRun


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """What held-out text says of a plan; `drafts` is None where there is no block that can be run."""

    target: Target
    drafts: Acceptance | None


@dataclass(frozen=True, slots=True)
class PlanMeasuring:
    """Plans on their way through the layers.

    Attributes:
        run: of the search.
        data: of the run.
        place: a folder for each plan, and one for the released model.
        largest: of the inputs of each layer's linear layers; -1 - i for block i.
    """

    run: SearchRun
    data: CalibrationData
    place: Path
    largest: Mapping[int, LargestInputs]

    def measure(self, plans: Sequence[Plan]) -> tuple[MeasuredPlan, list[MeasuredPlan]]:
        """The released model, and each plan."""
        passes = [self._pass("source"), *(self._pass(f"{number:02d}") for number in range(len(plans)))]
        with ReadAhead(self.run.choices.base, self.run.ranks) as ahead:
            for index in range(min(each.states.num_done() for each in passes), len(self.run.skeleton)):
                self._layer(index, passes, plans, ahead)
                self.run.step()
        targets = [target(passes[0], "source")]
        targets += [target(each, "served", reference=(passes[0], "source")) for each in passes[1:]]
        drafts = self._all_drafts(passes, plans, targets)
        released, *measured = (
            MeasuredPlan(target=own, drafts=found) for own, found in zip(targets, drafts, strict=True)
        )
        return released, measured

    def _pass(self, name: str) -> Backbone:
        folder = self.place / name
        if self.run.ranks.is_first and not (folder / "fingerprint").is_file():
            (folder / "states").mkdir(parents=True, exist_ok=True)
            write_whole(folder / "fingerprint", name)
        self.run.ranks.wait()
        states = States(folder / "states", self.run.ranks)
        states.tidy()
        return Backbone(
            folder=folder,
            skeleton=self.run.skeleton,
            data=self.data,
            ranks=self.run.ranks,
            states=states,
        )

    def _layer(self, index: int, passes: Sequence[Backbone], plans: Sequence[Plan], ahead: ReadAhead) -> None:
        """Every plan that is not beyond this layer yet."""
        skeleton, path = self.run.skeleton, f"{self.run.skeleton.layer_path}.{index}."
        binding, last = skeleton.bind_layer(index), LastServed()
        with skeleton.layer(index, ahead.take()):
            ahead.start(skeleton.tensors_of(index + 1))
            for own, plan in zip(passes, (None, *plans), strict=True):
                if own.states.num_done() > index:
                    continue
                with ExitStack() as stack:
                    if plan is not None:
                        bound = rebound(binding, plan)
                        stack.enter_context(as_candidate(skeleton.model, plan, bound, path, self.largest[index], last))
                    self._run(own, "source" if plan is None else "served", index)

    def _run(self, own: Backbone, stream: Stream, index: int) -> None:
        with own.states.writing(index + 1) as outputs:
            own.run(stream, index, outputs, serving(self.run.skeleton.model))

    def _all_drafts(
        self, passes: Sequence[Backbone], plans: Sequence[Plan], targets: Sequence[Target]
    ) -> Sequence[Acceptance | None]:
        """Of the released model and of each plan; None for all where nothing counts and nothing depends on drafts."""
        nothing, base, recipe = [None] * len(passes), self.run.choices.base, self.run.choices.recipe
        if not self.run.has_block:
            return nothing
        blocks = blocks_that_draft(base, filled_blocks(base, self.run.skeleton))
        lasts = [LastServed() for _ in blocks]
        assert recipe.backbone_auto is not None
        try:
            return [
                self._drafts(each, of, plan, blocks, lasts)
                for each, plan, of in zip(passes, (None, *plans), targets, strict=True)
            ]
        except NothingCounts:
            if recipe.mtp == AUTO or recipe.backbone_auto.min_acceptance:
                raise
            return nothing

    def _drafts(
        self, own: Backbone, of: Target, plan: Plan | None, blocks: Sequence[MtpBlock], lasts: Sequence[LastServed]
    ) -> Acceptance:
        """With the block as released, or as a plan has it."""
        base, written = self.run.choices.base, self.data.held_out_written
        with ExitStack() as stack:
            for number, (block, last) in enumerate(zip(blocks, lasts, strict=True)):
                if plan is not None:
                    bound = rebound(bind_block(block, base), plan)
                    stack.enter_context(as_candidate(block, plan, bound, "", self.largest[-1 - number], last))
            return acceptance(own, "source" if plan is None else "served", blocks, of, written=written)
