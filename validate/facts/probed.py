"""What one server answered to the probe: which answers have faults that English prose hardly shows.

In: answers, which `validate/measure/probe.py` reads. Out: a `ProbeFact` for each depth, in a `Run`.

Easy to get wrong: a model that repeats itself does so with MTP off, too. Only prompts on which one
of two servers alone has a fault say anything.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

from ...checkpoints.fact import Count, Fact
from .binomial import sign_test

# Broken characters, broken JSON, text that repeats itself, another script than the prompt's.
AnswerFault = Literal["characters", "JSON", "repetition", "script"]


class ProbeFact(Fact):
    """The answers of one server to all prompts of the probe.

    Attributes:
        depth: tokens of other text before each prompt.
        num: answers.
        num_empty: answers without text, which have no fault.
        num_cut: answers that the limit of tokens has cut: what they lack is no fault.
        faults: names of the prompts whose answers have each fault, such as "Thai 1 JSON".
    """

    depth: Count
    num: Count
    num_empty: Count
    num_cut: Count
    faults: Mapping[AnswerFault, tuple[str, ...]]


def worse(
    before: ProbeFact, after: ProbeFact
) -> Iterator[tuple[float, str, list[str], int]]:
    """For each fault the chance by the exact sign test, the prompts on which only the second server
    has it, and on how many only the first; the chance is 1 where it has no more of them.
    """
    for fault, names in after.faults.items():
        new = sorted({*names} - {*before.faults[fault]})
        num_gone = len({*before.faults[fault]} - {*names})
        yield sign_test(max(len(new), num_gone), num_gone), fault, new, num_gone
