"""What counts of a measurement of drafting: whose draft counters are judged and shown.

In: draft counters of servers. Out: a `Drafted` for each station that has some.

Easy to get wrong: two stations measured two things. The one that also asked the source comes first.
"""

from ...recipes.errors import counted
from ...recipes.frozen import frozen
from ..facts.evaluated import EvaluationFact
from ..facts.served import Drafts, ServeCheck


@frozen
class Drafted:
    """Draft counters of a served checkpoint, and of its source over the same questions or prompts.

    Attributes:
        what: was asked, in words.
        unit: of what was asked, "questions" or "prompts".
        k: draft tokens a step.
        num_asked: questions or prompts.
        as_served: how the checkpoint was served, "native" for its own bytes.
        source: None where it was not asked, or drafted nothing.
    """

    what: str
    unit: str
    k: int
    num_asked: int
    as_served: str
    checkpoint: Drafts
    source: Drafts | None


def drafted(serve: ServeCheck | None, evaluation: EvaluationFact | None) -> list[Drafted]:
    """What was measured of drafting, at most one of each station; the first is judged, and on top
    of the page.

    That is the evaluation, unless only the prompts were asked of the source. Of these it is the
    largest k that both drafted with.
    """
    found = []
    if evaluation:
        mine = evaluation.checkpoint
        theirs = evaluation.source
        if theirs and not theirs.draft_tokens:
            theirs = None
        found.append(
            Drafted(
                what=f"{counted(mine.num_questions, 'question')} of {evaluation.protocol.title}",
                unit="questions",
                k=evaluation.protocol.k,
                num_asked=mine.num_questions,
                as_served=mine.as_served,
                checkpoint=mine,
                source=theirs,
            )
        )
    if serve and serve.checkpoint.drafting:
        sources = {}
        for run in serve.source.drafting if serve.source else ():
            if run.draft_tokens:
                sources[run.k] = run
        # The largest k that both drafted with, else the largest of all.
        run = max(serve.checkpoint.drafting, key=lambda run: (run.k in sources, run.k))
        found.append(
            Drafted(
                what=counted(len(serve.prompts), "prompt"),
                unit="prompts",
                k=run.k,
                num_asked=len(serve.prompts),
                as_served=serve.checkpoint.as_served,
                checkpoint=run,
                source=sources.get(run.k),
            )
        )
    return sorted(found, key=lambda one: one.source is None)


def has_no_block(serve: ServeCheck | None, evaluation: EvaluationFact | None) -> bool:
    """Whether a source was served with MTP off alone: it has no MTP block to draft with."""
    if evaluation and evaluation.source:
        return not evaluation.source.drafts
    if serve and serve.source:
        return all(run.loaded and not run.k for run in serve.source.runs)
    return False
