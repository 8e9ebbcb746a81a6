"""What one server answered to the probe: which answers have faults that English prose hardly shows.

In: answers, which `validate/measure/lossless.py` reads. Out: a `ProbeFact` for each depth, in a
`Run`.

Easy to get wrong: a model that repeats itself does so with MTP off, too. Only prompts on which one
of two servers alone has a fault say anything.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

from ...checkpoints.fact import Count, Fact
from .binomial import sign_test

# No text; cut by the limit of tokens; and faults: broken characters, broken JSON, text that repeats
# itself, another script than the prompt's.
InAnswer = Literal["empty", "cut", "characters", "JSON", "repetition", "script"]
FAULTS = get_args(InAnswer)[2:]


class ProbeFact(Fact):
    """The answers of one server to all prompts of the probe.

    Attributes:
        depth: tokens of other text before each prompt.
        seen: names of the prompts in whose answers each was seen, such as "Thai 1 JSON".
    """

    depth: Count
    seen: Mapping[InAnswer, tuple[str, ...]]


def worse(before: ProbeFact, after: ProbeFact) -> Iterator[tuple[float, str, list[str], int]]:
    """For each fault the chance by the exact sign test, the prompts on which only the second server
    has it, and on how many only the first; the chance is 1 where it has no more of them.
    """
    for fault in FAULTS:
        ours = {*before.seen.get(fault, ())}
        theirs = {*after.seen.get(fault, ())}
        num_gone = len(ours - theirs)
        new = sorted(theirs - ours)
        yield sign_test(max(len(new), num_gone), num_gone), fault, new, num_gone
