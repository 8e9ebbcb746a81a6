"""The search of `backbone: auto`: sensitivities -> knapsack -> a few plans measured -> a recipe to
carry out.

In: a plan whose recipe leaves groups to a search, and the run's data. Out: the plan of a recipe
without `auto`, and what was tried. All is in `<pass>/search`; a run with another budget uses its
sensitivities again.

Measured are the plan that the knapsack found, the best of one word for all units that fits, and,
where the block is searched, the best plans with the block as large and as small as it can be: each
on the held-out text, as a server would compute it, a layer at a time. Of those that keep
`min_acceptance`, the one with the smallest sum is taken: divergence of the answers, and
`draft_weight` times the logarithm of what is lost of the release's acceptance, both in nats.

Easy to get wrong: the search must find the same again after a kill, or the pass after it would
refuse its own folder. So what was found is on disk before that pass begins. And these figures
choose between
plans: those in the record are measured again, on the calibrated backbone, whose input scales are of
all calibration text, and whose weights an algorithm such as GPTQ rewrites.

Other searches: modelopt's AutoQuantize scores modules by squared gradients and solves a linear
program, AutoRound's AutoScheme and PrismaQuant choose bits by loss; none of them looks at drafts.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from ....checkpoints.files import write_whole
from ....recipes.errors import GateError
from ....recipes.schema import AUTO
from ...plan.choices import Assignment, Choices, choices_of, refuse_budget, rows_looked_at
from ...plan.found_recipe import found_plan
from ...plan.plan import Plan
from ...run.progress import ProgressCallback
from ...run.ranks import Ranks
from ...write.output import asked
from ..data.claim import search_fingerprint
from ..data.data import CalibrationData
from ..layers.backbone import Backbone
from ..layers.forwards import serving
from ..model.skeleton import Skeleton
from ..model.states import States, Stream
from ..mtp.acceptance import Acceptance, NothingCounts, acceptance
from ..mtp.facts import DIGITS, SearchFact, TriedPlanFact
from ..mtp.mtp_block import bind_block
from ..mtp.mtp_pass import cannot_run, reporter
from ..mtp.target import Target, target
from .candidates import LargestInputs, as_candidate
from .knapsack import best_packing
from .sensitivity import SearchRun, Sensitivities


def search(
    plan: Plan,
    data: CalibrationData,
    folder: Path,
    *,
    ranks: Ranks,
    progress: ProgressCallback | None = None,
) -> tuple[Plan, SearchFact]:
    """Find the plan of a recipe with `backbone: auto`, resuming what an earlier run left in
    `folder`.

    Args:
        plan: over a local source; its recipe has a number for `batch_size`.
        data: of the run.
        folder: of searches alone; on several nodes one that all of them see.
        ranks: who shares the text.
        progress: called after each layer of each sweep.

    Returns: the plan to be calibrated and written, and the record of the search.

    Raises:
        RecipeError: the budget is too small.
        CheckpointError: the model has no gradients, or computes NaN.
        GateError: no plan keeps `min_acceptance`.
    """
    choices = choices_of(plan.recipe, plan.source, trust_remote_code=plan.trust_remote_code)
    refuse_budget(choices)
    # A search of something else has a folder of its own, and loses nothing.
    folder = folder / ranks.of_first(lambda: search_fingerprint(plan, data, ranks.size)[:16])
    key = asked(plan.recipe)[:16]
    kept, plans = folder / f"found-{key}.json", folder / f"plans-{key}"
    found = ranks.of_first(lambda: json.loads(kept.read_text()) if kept.is_file() else None)
    if found is None:
        found = _found(search_run(choices, data, folder, ranks, progress), plans)
        if ranks.is_first:
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, json.dumps(found, indent=1))
            shutil.rmtree(plans, ignore_errors=True)
        ranks.wait()
    made = found_plan(choices, found["assignment"], shard_bytes=plan.shard_bytes)
    return made, SearchFact.model_validate(found["fact"])


def search_run(
    choices: Choices,
    data: CalibrationData,
    folder: Path,
    ranks: Ranks,
    progress: ProgressCallback | None = None,
) -> SearchRun:
    """A search that reports its progress."""
    skeleton = Skeleton(choices.base, device=ranks.device)
    tokens = data.ids[: rows_looked_at(choices.recipe)].numel()
    return SearchRun(
        choices=choices,
        data=data,
        place=folder,
        skeleton=skeleton,
        ranks=ranks,
        has_block=cannot_run(choices.base) is None,
        report=reporter(progress, ranks, "search", total=3 * len(skeleton) + 1, tokens=tokens),
    )


def _found(run: SearchRun, folder: Path) -> dict[str, Any]:
    """The assignment and the fact, as JSON values."""
    choices, auto, data, confidence = run.choices, run.auto, run.data, run.recipe.gates.confidence
    sensitivities = run.sensitivities()
    tried, gap = plans_to_try(run, sensitivities)
    # All of the held-out text where acceptance must be shown; else not more of it than there is
    # text for the sensitivities, for every plan takes a pass.
    if not auto.min_acceptance:
        rows = rows_looked_at(run.recipe)
        written = None if data.held_out_written is None else data.held_out_written[:rows]
        data = replace(data, held_out_ids=data.held_out_ids[:rows], held_out_written=written)
    plans = [choices.plan(each) for each in tried.values()]
    (_, released), *measured = measure_plans(run, plans, data, folder, sensitivities.largest)
    facts = []
    for (title, assignment), (own, drafts) in zip(tried.items(), measured, strict=True):
        kept: dict[str, Any] = {}
        if drafts is not None and released is not None:
            found = drafts.kept_of(released, confidence)
            kept = {"kept": round(found.value, DIGITS), "kept_at_least": round(found.low, DIGITS)}
        facts.append(
            TriedPlanFact(
                title=title,
                bytes=choices.num_bytes(assignment),
                bits=round(choices.bits(assignment), 4),
                predicted=round(sensitivities.predicted(assignment), 7),
                divergence=round(max(0.0, own.divergence), 7),
                **kept,
            )
        )
    best = _best(run, facts)
    fact = SearchFact(
        budget=run.recipe.budget or "",
        candidates=auto.candidates,
        asked=asked(run.recipe),
        units=len(choices.units),
        tokens=sensitivities.num_tokens,
        gap=round(gap, DIGITS),
        plans=tuple(each.model_copy(update={"chosen": each is best}) for each in facts),
    )
    return {"assignment": tried[best.title], "fact": fact.model_dump(mode="json")}


def plans_to_try(
    run: SearchRun, sensitivities: Sensitivities
) -> tuple[dict[str, Assignment], float]:
    """Title -> plan, each plan once, and only those that fit; and how far the first may be from the
    best.
    """
    choices, found = run.choices, dict[str, Assignment]()

    def add(title: str, assignment: Assignment) -> None:
        if assignment not in found.values():
            found[title] = assignment

    assignment, gap = packed(choices, sensitivities, {})
    add("found", assignment)
    uniform = [(f"{word} for all", choices.uniform(word)) for word in run.auto.candidates]
    uniform = [each for each in uniform if choices.fits(each[1])]
    if uniform:
        add(*min(uniform, key=lambda each: sensitivities.predicted(each[1])))
    blocks = {"largest block": choices.largest, "smallest block": choices.smallest}
    for title, extreme in blocks.items():
        fixed = {unit.name: extreme[unit.name] for unit in choices.units if unit.part == "mtp"}
        if fixed and choices.fits({**choices.smallest, **fixed}):
            add(title, packed(choices, sensitivities, fixed)[0])
    return found, gap


def packed(
    choices: Choices, sensitivities: Sensitivities, fixed: Mapping[str, str]
) -> tuple[dict[str, str], float]:
    """The best words by sensitivities, with these for some units; and the part of the loss that
    others could save.
    """
    words, units = [], []
    for unit in choices.units:
        options = [o for o in unit.options if fixed.get(unit.name, o.word) == o.word]
        words.append([option.word for option in options])
        losses = [sensitivities.losses.get((unit.name, option.word), 0.0) for option in options]
        units.append([*zip(map(choices.cost, options), losses, strict=True)])
    chosen, gap = best_packing(units, choices.room)
    found = {}
    for unit, own, number in zip(choices.units, words, chosen, strict=True):
        found[unit.name] = own[number]
    return found, gap


def measure_plans(
    run: SearchRun,
    plans: Sequence[Plan],
    data: CalibrationData,
    folder: Path,
    largest: Mapping[int, LargestInputs],
) -> list[tuple[Target, Acceptance | None]]:
    """The released model, and each plan: its predictions, and its drafts where a block can be run.

    A layer is loaded once and becomes one plan after the other. The states of each plan are a
    stream of its own, in a folder that looks like that of a finished backbone pass.

    Args:
        run: the search.
        plans: of its choices.
        data: its held-out text is measured on.
        folder: for the states of each plan, and of the released model.
        largest: of the inputs of each layer's linear layers; -1 - i for block i.

    Raises:
        NothingCounts: no slot of the text counts, and acceptance decides.
    """
    skeleton, ranks, base = run.skeleton, run.ranks, run.choices.base
    sides: list[tuple[Plan | None, Stream, Backbone]] = []
    for number, plan in enumerate((None, *plans)):
        place = folder / f"{number:02d}"
        states = States(place / "states", ranks)
        states.tidy()
        backbone = Backbone(folder=place, skeleton=skeleton, data=data, ranks=ranks, states=states)
        sides.append((plan, "served" if plan else "source", backbone))
    for index in range(min(side.states.num_done() for *_, side in sides), len(skeleton)):
        binding, path = skeleton.bind_layer(index), f"{skeleton.layer_path}.{index}."
        with skeleton.layer(index, index + 1):
            for plan, stream, backbone in sides:
                if backbone.states.num_done() > index:  # before a kill
                    continue
                candidate = as_candidate(skeleton.model, plan, binding, path, largest[index])
                with candidate, backbone.states.writing(index + 1) as outputs:
                    backbone.run(stream, index, outputs, serving(skeleton.model))
        run.report(2 * len(skeleton) + 2 + index)
    targets: list[Target] = []
    for _, stream, backbone in sides:
        targets.append(target(backbone, stream, reference=targets[0] if targets else None))
    drafts, blocks = list[Acceptance | None](), run.blocks()
    try:
        for (plan, *_), own in zip(sides, targets, strict=True):
            if not blocks:
                break
            with ExitStack() as stack:
                for number, block in enumerate(blocks):
                    binding, seen = bind_block(block, base), largest.get(-1 - number, {})
                    stack.enter_context(as_candidate(block, plan, binding, "", seen))
                drafts.append(acceptance(own, blocks))
    except NothingCounts:
        if run.recipe.mtp == AUTO or run.auto.min_acceptance:
            raise
    return [*zip(targets, drafts or [None] * len(targets), strict=True)]


def _best(run: SearchRun, facts: Sequence[TriedPlanFact]) -> TriedPlanFact:
    """The plan to be taken, of those that keep enough: the one that loses the fewest nats."""
    auto, least, confidence = run.auto, run.auto.min_acceptance or 0.0, run.recipe.gates.confidence
    enough = [each for each in facts if (each.kept_at_least or 0.0) >= least]
    if not enough:
        best = max(facts, key=lambda each: each.kept_at_least or 0.0)
        raise GateError(
            run.recipe.name,
            f"a plan under the budget must keep {least:.1%} of acceptance, at {confidence:.0%} "
            "confidence",
            got=f"at least {best.kept_at_least or 0.0:.1%} at best, by {best.title}",
            cure="Raise budget, draft_weight or calibration.held_out, or lower "
            "backbone_auto.min_acceptance",
        )

    def score(fact: TriedPlanFact) -> tuple[float, float]:
        lost = 0.0 if fact.kept is None else -math.log(min(1.0, max(fact.kept, 1e-9)))
        # Text that cannot tell two plans apart leaves it to the sensitivities.
        return fact.divergence + auto.draft_weight * lost, fact.predicted

    return min(enough, key=score)
