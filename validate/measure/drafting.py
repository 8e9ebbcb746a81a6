"""Compares a checkpoint's answers with MTP on with its own answers with MTP off.

In: two finished files of answers to the same questions. Out: a `DraftingFact`.

Easy to get wrong: greedy decoding promises the same text with and without drafting, but only up to
rounding: a step of one token and a step of several are computed by other kernels, and where two
tokens are nearly as likely, the last digit decides. So another text is counted and shown, and is no
fault by itself. A fault is one way of serving that is right more often than chance gives (vLLM
issue 43559: 20 % fewer right answers with prefix caching; issue 43650: 18 of 39 against 39 of 39,
many answers empty).
"""

from collections.abc import Sequence
from itertools import zip_longest

from ..facts.binomial import sign_test
from ..facts.evaluated import NOT_EMPTY, ChangedAnswer, DraftingFact, SwitchFact
from .answers import Samples, correct

MOST_SHOWN = 5
"""So many changed answers have their texts in the result."""
MOST_NAMED = 20
"""So many questions are named for each reading."""
_BEFORE, _AFTER = 60, 140


def drafting(plain: Samples, drafted: Samples, filters: Sequence[str]) -> DraftingFact:
    """What drafting changed.

    Args:
        plain: finished answers with MTP off.
        drafted: finished answers with MTP on, to the same questions.
        filters: lm-eval's, of the task.
    """
    pairs = [
        (plain.lines[number], drafted.lines[number]) for number in range(plain.header.num_questions)
    ]
    changed = [(before, after) for before, after in pairs if before.text != after.text]
    switches = [_switch(name, correct(plain, name), correct(drafted, name)) for name in filters]
    texts = ([bool(pair[side].text.strip()) for pair in pairs] for side in (0, 1))
    return DraftingFact(
        switches=(*switches, _switch(NOT_EMPTY, *texts)),
        num_changed=len(changed),
        changed=tuple(
            _shown(before.question, before.text, after.text)
            for before, after in changed[:MOST_SHOWN]
        ),
    )


def _switch(reads: str, plain: Sequence[float], drafted: Sequence[float]) -> SwitchFact:
    pairs = list(zip(plain, drafted, strict=True))
    only_plain, only_drafting = (
        sum(one > other for one, other in pairs),
        sum(one < other for one, other in pairs),
    )
    equal = [one for one, other in pairs if one == other]
    return SwitchFact(
        reads=reads,
        both=len(equal) - equal.count(0),
        only_plain=only_plain,
        only_drafting=only_drafting,
        neither=equal.count(0),
        chance=sign_test(only_plain, only_drafting),
        questions=tuple(number for number, (before, after) in enumerate(pairs) if before != after)[
            :MOST_NAMED
        ],
    )


def _shown(question: int, plain: str, drafted: str) -> ChangedAnswer:
    """Both texts from a little before they part to a little after."""
    at = next(at for at, (one, other) in enumerate(zip_longest(plain, drafted)) if one != other)
    start = max(0, at - _BEFORE)
    cut = [
        f"{'...' * (start > 0)}{text[start : at + _AFTER]}{'...' * (len(text) > at + _AFTER)}"
        for text in (plain, drafted)
    ]
    return ChangedAnswer(question=question, plain=cut[0], drafting=cut[1])
