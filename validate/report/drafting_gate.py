"""The gate on what drafting changes: the checkpoint's answers with MTP on against those with MTP off.

In: an evaluation whose questions the checkpoint was asked twice. Out: a `ReasonFact`, or none where it was not.

Easy to get wrong: most checkpoints have some answers that differ, because near-ties flip, and as many for the better as
for the worse. So the gate asks whether the split is one that chance hardly gives, by the exact sign test, and it asks
that of every task, of every filter and of empty answers. Both directions count: a server that answers better with
drafting does not compute what it computes without.
"""

from collections.abc import Iterator

from ..facts.evaluated import NOT_EMPTY, DraftingFact, EvaluationFact, SwitchFact
from ..facts.schema import ReasonFact

CHANCE = 0.001
"""A split is no chance if two equal servers come to it less often than this: one good checkpoint in a thousand fails.

Both reports from the field are far beyond it: of 39 questions, 21 that only one server gets right are 1 in a million.
"""
_MOST_NAMED = 8


def drafting(evaluation: EvaluationFact | None) -> Iterator[ReasonFact]:
    """One reason where the checkpoint was asked with MTP off as well."""
    both = [(task, task.drafting) for task in evaluation.by_task if task.drafting] if evaluation else []
    if not both:
        return
    task, found = min(both, key=lambda one: _rarest(one[1]).chance)
    rarest, num = _rarest(found), task.checkpoint.num_questions
    where = f"{task.protocol.title}: " if len(both) > 1 else ""
    texts = (
        f"{where}{num - found.num_changed:,} of {num:,} greedy answers are the same text with MTP on and off"
        f"{'; near-ties may flip the others' if found.num_changed else ''}."
    )
    if rarest.chance < CHANCE:
        says = f"Drafting changes what is right beyond chance. {_split(rarest)}{_named(rarest)}. {texts}"
        yield ReasonFact(gate="drafting", verdict="regression", says=says)
    elif rarest.only_plain == rarest.only_drafting == 0:
        yield ReasonFact(gate="drafting", verdict="pass", says=f"{texts} Each is as right or wrong with it as without.")
    else:
        yield ReasonFact(gate="drafting", verdict="pass", says=f"{texts} {_split(rarest)}: no more than chance gives.")


def _rarest(found: DraftingFact) -> SwitchFact:
    return min(found.switches, key=lambda switch: switch.chance)


def _split(switch: SwitchFact) -> str:
    what = "with text" if switch.reads == NOT_EMPTY else f"right by {switch.reads}"
    return (
        f"Only without drafting {switch.only_plain:,} are {what}, only with it {switch.only_drafting:,} "
        f"(exact sign test: {switch.chance:.2g})"
    )


def _named(switch: SwitchFact) -> str:
    """The first questions, by their numbers in the files of answers."""
    parted = switch.only_plain + switch.only_drafting
    named = ", ".join(str(number) for number in switch.questions[:_MOST_NAMED])
    more = f" and {parted - min(_MOST_NAMED, len(switch.questions)):,} more"
    return f": questions {named}{more if parted > _MOST_NAMED else ''}"
