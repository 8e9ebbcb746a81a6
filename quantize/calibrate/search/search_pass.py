"""The search of `backbone: auto`: sensitivities -> knapsack -> a few plans measured -> the recipe that is carried out.

In: a plan whose recipe leaves groups to a search, and the run's data. Out: a `Found`: the plan of a recipe without
`auto`, its text, and what was tried. All is in `<pass>/search`; a run with another budget uses its sensitivities again.

Measured are the plan that the knapsack found, the best of one word for all units that fits, and, where the block is
searched, the best plans with the block as large and as small as it can be. Of those that keep `min_acceptance`, the one
with the smallest sum is taken: divergence of the answers, and `draft_weight` times the logarithm of what is lost of the
release's acceptance, both in nats.

Easy to get wrong: the search must find the same again after a kill, or the pass after it would refuse its own folder.
So what was found is on disk before that pass begins.

Other searches: modelopt's AutoQuantize scores modules by squared gradients and solves a linear program, AutoRound's
AutoScheme and PrismaQuant choose bits by loss; none of them looks at drafts.
"""

import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....checkpoints.files import write_whole
from ....recipes.errors import GateError, RecipeError
from ....recipes.schema import Recipe
from ...plan.choices import Assignment, Choices, choices_of, refuse_budget, rows_looked_at
from ...plan.found_recipe import found_plan, found_text
from ...plan.plan import Plan
from ...run.progress import ProgressCallback, progress_since
from ...run.ranks import Ranks
from ...write.output import asked
from ..data.claim import search_fingerprint
from ..data.data import CalibrationData
from ..model.skeleton import Skeleton
from ..mtp.facts import DIGITS, SearchFact, TriedPlanFact
from ..mtp.mtp_pass import cannot_run
from .knapsack import Packing, best_packing
from .measured_plans import MeasuredPlan, PlanMeasuring
from .sensitivity import SearchRun, Sensitivities, Sweeps


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        plan: to be calibrated and written.
        text: its recipe, as a file.
        fact: for the record.
    """

    plan: Plan
    text: str
    fact: SearchFact


def search(
    plan: Plan, data: CalibrationData, folder: Path, *, ranks: Ranks, progress: ProgressCallback | None = None
) -> Found:
    """Find the plan of a recipe with `backbone: auto`, resuming what an earlier run left in `folder`.

    Args:
        plan: over a local source; its recipe has a number for `batch_size`.
        data: of the run.
        folder: of the search alone; on several nodes one that all of them see.
        ranks: who shares the text.
        progress: called after each layer of each sweep.

    Raises:
        RecipeError: the budget is too small, or the folder holds another search.
        CheckpointError: the model has no gradients, or computes NaN.
        GateError: no plan keeps `min_acceptance`.
    """
    choices = choices_of(plan.recipe, plan.source, trust_remote_code=plan.trust_remote_code)
    refuse_budget(choices)
    _claim(plan, data, folder, ranks)
    kept = folder / f"found-{_key(plan.recipe)}.json"
    found = ranks.of_first(lambda: json.loads(kept.read_text()) if kept.is_file() else None)
    if found is None:
        found = _Search(choices, data, folder, ranks, progress).found()
        if ranks.is_first:
            write_whole(kept, json.dumps(found, indent=1))
            shutil.rmtree(folder / f"plans-{_key(plan.recipe)}", ignore_errors=True)
        ranks.wait()
    made = found_plan(choices, found["assignment"], shard_bytes=plan.shard_bytes)
    return Found(plan=made, text=found_text(made.recipe), fact=SearchFact.model_validate(found["fact"]))


def _key(recipe: Recipe) -> str:
    return asked(recipe)[:16]


def _claim(plan: Plan, data: CalibrationData, folder: Path, ranks: Ranks) -> None:
    """Marks the folder as this search's, or refuses another one's."""
    stamp, wanted = folder / "fingerprint", search_fingerprint(plan, data, ranks.size)
    if stamp.is_file() and stamp.read_text() != wanted:
        rule = "an unfinished search can only be resumed with the same recipe, source, data, processes and versions"
        cure = f"Undo the change to go on, or remove {folder.parent} to start anew"
        raise RecipeError(folder, rule, got="another search; its budget alone may differ", cure=cure)
    ranks.wait()
    if ranks.is_first and not stamp.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(stamp, wanted)
    ranks.wait()


class _Search:
    """State: one search, and how far it is."""

    def __init__(
        self,
        choices: Choices,
        data: CalibrationData,
        folder: Path,
        ranks: Ranks,
        progress: ProgressCallback | None,
    ):
        self.choices, self.data, self.folder, self.ranks, self.progress = choices, data, folder, ranks, progress
        self.run = SearchRun(
            choices=choices,
            skeleton=Skeleton(choices.base, device=ranks.device),
            ranks=ranks,
            has_block=cannot_run(choices.base) is None,
            step=self._step,
        )
        assert choices.recipe.backbone_auto is not None
        self.auto = choices.recipe.backbone_auto
        self.done, self.started = 0, time.monotonic()

    def found(self) -> dict[str, Any]:
        """The assignment and the fact, as JSON values."""
        sensitivities = self._sweeps().sensitivities()
        packing = self._packed(sensitivities, {})
        tried = self._tried(sensitivities, packing)
        place = self.folder / f"plans-{_key(self.choices.recipe)}"
        measuring = PlanMeasuring(self.run, self._held_out(), place, sensitivities.largest)
        released, measured = measuring.measure([self.choices.plan(each) for each in tried.values()])
        facts = [
            self._fact(title, each, sensitivities, released, own)
            for (title, each), own in zip(tried.items(), measured, strict=True)
        ]
        best = self._best(facts)
        facts[best] = facts[best].model_copy(update={"chosen": True})
        fact = SearchFact(
            budget=self.choices.recipe.budget or "",
            candidates=self.auto.candidates,
            asked=asked(self.choices.recipe),
            units=len(self.choices.units),
            tokens=sensitivities.num_tokens,
            gap=round(packing.gap, DIGITS),
            plans=tuple(facts),
        )
        return {"assignment": [*tried.values()][best], "fact": fact.model_dump(mode="json")}

    def _sweeps(self) -> Sweeps:
        return Sweeps(self.run, self.data.ids[: rows_looked_at(self.choices.recipe)], self.folder)

    def _held_out(self) -> CalibrationData:
        """The held-out text on which plans are compared: all of it where acceptance must be shown, else not more of it
        than there is text for the sensitivities, for every plan takes a pass.
        """
        rows = len(self.data.held_out_ids) if self.auto.min_acceptance else rows_looked_at(self.choices.recipe)
        written = self.data.held_out_written
        return replace(
            self.data,
            held_out_ids=self.data.held_out_ids[:rows],
            held_out_written=None if written is None else written[:rows],
        )

    def _step(self) -> None:
        self.done += 1
        if self.progress and self.ranks.is_first:
            self.progress(
                progress_since(
                    self.started,
                    "search",
                    done=self.done,
                    total=3 * len(self.run.skeleton) + 1,
                    num_here=self.done,
                    tokens=self.data.ids[: rows_looked_at(self.choices.recipe)].numel(),
                    device=self.ranks.device,
                )
            )

    # --- plans --------------------------------------------------------------------------------------------------------

    def _packed(self, sensitivities: Sensitivities, fixed: Mapping[str, str]) -> Packing:
        """The best choice by sensitivities, with these words for some units."""
        units = [
            [
                (self.choices.cost(option), sensitivities.loss(unit.name, option.word))
                for option in unit.options
                if fixed.get(unit.name, option.word) == option.word
            ]
            for unit in self.choices.units
        ]
        return best_packing(units, self.choices.room)

    def _assignment(self, packing: Packing, fixed: Mapping[str, str]) -> dict[str, str]:
        return {
            unit.name: fixed.get(unit.name) or unit.options[number].word
            for unit, number in zip(self.choices.units, packing.chosen, strict=True)
        }

    def _tried(self, sensitivities: Sensitivities, packing: Packing) -> dict[str, dict[str, str]]:
        """Title -> plan; each plan once, and only those that fit."""
        found = {"found": self._assignment(packing, {})}
        uniform = [self.choices.uniform(word) for word in self.auto.candidates]
        fitting = [each for each in uniform if self.choices.fits(each)]
        if fitting:
            best = min(fitting, key=lambda each: self._predicted(sensitivities, each))
            words = zip(self.auto.candidates, uniform, strict=True)
            found[f"{next(word for word, each in words if each == best)} for all"] = best
        for title, extreme in (("largest block", self.choices.largest), ("smallest block", self.choices.smallest)):
            fixed = {unit.name: extreme[unit.name] for unit in self.choices.units if unit.part == "mtp"}
            cheapest = {**self.choices.smallest, **fixed}
            if fixed and self.choices.fits(cheapest):
                found[title] = self._assignment(self._packed(sensitivities, fixed), fixed)
        seen: list[Assignment] = []
        for title, each in [*found.items()]:
            if each in seen:
                del found[title]
            seen.append(each)
        return found

    def _predicted(self, sensitivities: Sensitivities, assignment: Assignment) -> float:
        return math.fsum(sensitivities.loss(unit, word) for unit, word in assignment.items())

    # --- what was measured --------------------------------------------------------------------------------------------

    def _fact(
        self,
        title: str,
        assignment: Assignment,
        sensitivities: Sensitivities,
        released: MeasuredPlan,
        measured: MeasuredPlan,
    ) -> TriedPlanFact:
        kept = None
        if measured.drafts is not None and released.drafts is not None:
            kept = measured.drafts.limits_of(released.drafts, self.choices.recipe.gates.confidence)
        return TriedPlanFact(
            title=title,
            bytes=self.choices.num_bytes(assignment),
            bits=round(self.choices.bits(assignment), 4),
            predicted=round(self._predicted(sensitivities, assignment), 7),
            divergence=round(max(0.0, measured.target.divergence), 7),
            kept=None if kept is None else round(kept.value, DIGITS),
            kept_at_least=None if kept is None else round(kept.low, DIGITS),
        )

    def _best(self, facts: list[TriedPlanFact]) -> int:
        """The number of the plan to be taken."""
        least = self.auto.min_acceptance
        enough = [n for n, each in enumerate(facts) if least is None or (each.kept_at_least or 0.0) >= least]
        if not enough:
            best = max(facts, key=lambda each: each.kept_at_least or 0.0)
            sure = f"{self.choices.recipe.gates.confidence:.0%} confidence"
            raise GateError(
                self.choices.recipe.name,
                f"a plan under the budget must keep {least:.1%} of acceptance, at {sure}",
                got=f"{best.kept or 0.0:.1%} at best, at least {best.kept_at_least or 0.0:.1%}, by {best.title}",
                cure="Raise budget, draft_weight or calibration.held_out, or lower backbone_auto.min_acceptance",
            )
        # Text that cannot tell two plans apart leaves it to the sensitivities.
        return min(enough, key=lambda number: (self._score(facts[number]), facts[number].predicted))

    def _score(self, fact: TriedPlanFact) -> float:
        """Nats that are lost."""
        lost = 0.0 if fact.kept is None else -math.log(min(1.0, max(fact.kept, 1e-9)))
        return fact.divergence + self.auto.draft_weight * lost
