"""A few plans measured together: each on the held-out text, as a server would compute it, a layer
at a time.

In: plans of `Choices`, and the largest inputs that the sweeps saw. Out: for each its divergence
from the released model on held-out text, and what a server would accept of its drafts.

A layer is loaded once and becomes one plan after the other. The states of each plan are a stream of
their own, in a folder that looks like that of a finished backbone pass, so that `target.py` and
`acceptance.py` measure them.

Easy to get wrong: these figures choose between plans. Those in the record are measured again, on
the calibrated
backbone: its input scales are of all calibration text, and an algorithm such as GPTQ rewrites its
weights.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ....recipes.schema import AUTO
from ...plan.plan import Plan
from ..data.data import CalibrationData
from ..layers.backbone import Backbone
from ..layers.forwards import serving
from ..model.states import States, Stream
from ..mtp.acceptance import Acceptance, NothingCounts, acceptance
from ..mtp.mtp_block import bind_block
from ..mtp.mtp_policy import blocks_that_draft, filled_blocks
from ..mtp.target import Target, target
from .candidate import LargestInputs, as_candidate
from .sensitivity import SearchRun


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """What held-out text says of a plan; `drafts` is None where there is no block that can be
    run.
    """

    target: Target
    drafts: Acceptance | None


def measure_plans(
    run: SearchRun,
    plans: Sequence[Plan],
    data: CalibrationData,
    folder: Path,
    largest: Mapping[int, LargestInputs],
) -> tuple[MeasuredPlan, ...]:
    """The released model, and each plan.

    Args:
        run: the search.
        plans: of its choices.
        data: its held-out text is measured on.
        folder: for the states of each plan, and of the released model.
        largest: of the inputs of each layer's linear layers; -1 - i for block i.

    Raises:
        NothingCounts: no slot of the text counts, and acceptance decides.
    """
    skeleton, passes = run.skeleton, [_pass(run, data, folder / "source")]
    passes += [_pass(run, data, folder / f"{number:02d}") for number in range(len(plans))]
    for index in range(min(each.states.num_done() for each in passes), len(skeleton)):
        binding, path = skeleton.bind_layer(index), f"{skeleton.layer_path}.{index}."
        with skeleton.layer(index, index + 1):
            for own, plan in zip(passes, (None, *plans), strict=True):
                if own.states.num_done() > index:  # before a kill
                    continue
                stream: Stream = "source" if plan is None else "served"
                candidate = as_candidate(skeleton.model, plan, binding, path, largest[index])
                with candidate, own.states.writing(index + 1) as outputs:
                    own.run(stream, index, outputs, serving(skeleton.model))
        run.step()
    released = target(passes[0], "source")
    targets = [released, *(target(each, "served", reference=released) for each in passes[1:])]
    drafts: Sequence[Acceptance | None] = [None] * len(targets)
    try:
        drafts = _drafts(run, (None, *plans), targets, largest)
    except NothingCounts:
        if run.recipe.mtp == AUTO or run.auto.min_acceptance:
            raise
    return tuple(
        MeasuredPlan(target=own, drafts=found) for own, found in zip(targets, drafts, strict=True)
    )


def _pass(run: SearchRun, data: CalibrationData, folder: Path) -> Backbone:
    states = States(folder / "states", run.ranks)
    states.tidy()
    return Backbone(folder=folder, skeleton=run.skeleton, data=data, ranks=run.ranks, states=states)


def _drafts(
    run: SearchRun,
    plans: Sequence[Plan | None],
    targets: Sequence[Target],
    largest: Mapping[int, LargestInputs],
) -> Sequence[Acceptance | None]:
    """With the block as released, and as each plan has it; None for all where it cannot be run."""
    if not run.has_block:
        return [None] * len(plans)
    base, found = run.choices.base, []
    blocks = blocks_that_draft(base, filled_blocks(base, run.skeleton))
    for plan, own in zip(plans, targets, strict=True):
        with ExitStack() as stack:
            for number, block in enumerate(blocks):
                binding = bind_block(block, base)
                stack.enter_context(
                    as_candidate(block, plan, binding, "", largest.get(-1 - number, {}))
                )
            found.append(acceptance(own, blocks))
    return found
