"""What drafting may not change: answers that are broken, and those that are another text, with MTP
on against off; and the same of the checkpoint against its source.

In: answers, which `validate/measure/lossless.py` reads. Out: a `LosslessFact`. lossless.json and
report.json hold it, field by field.

Easy to get wrong: a model that repeats itself does so with MTP off, too. Only requests on which one
of two servers alone has a fault say anything. And rounding may change a text with MTP off as well,
where other requests are in flight.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args

from ...checkpoints.fact import Count, Fact, NumDrafts
from ...recipes.errors import counted
from .binomial import sign_test
from .rows import Row, detail
from .served import Judging, ServedModel, StationFact
from .settle import CHANCE, ReasonFact, reason

# No text; cut by the limit of tokens; and faults: broken characters, broken JSON, text that repeats
# itself, another script than the prompt's; of tool calls no end, arguments that their tool does not
# take, and other calls than the right ones.
InAnswer = Literal[
    "empty", "cut", "characters", "JSON", "repetition", "script", "no end", "schema", "calls"
]
FAULTS = get_args(InAnswer)[2:]


class AskedFact(Fact):
    """The answers of one server to all requests, asked in one way.

    Attributes:
        k: tokens drafted a step.
        way: how they were asked, such as "one at a time".
        num: of requests.
        num_compared: of them, those that were asked in the first way too.
        num_changed: of these, answers that are another text than with MTP off in that way.
        seen: names of the requests in whose answers each was seen, such as "Thai 1 JSON".
    """

    k: NumDrafts
    way: str
    num: Count
    num_compared: Count
    num_changed: Count
    seen: Mapping[InAnswer, tuple[str, ...]]


_WITH_MTP = "with MTP on"
# Whose answers they are, what they are compared with, and the answers.
_Pair = tuple[str, AskedFact, AskedFact]


class AskedModel(ServedModel):
    """One checkpoint, and what each of its servers answered in each way."""

    asked: tuple[AskedFact, ...]


class LosslessFact(StationFact):
    """What `keepmtp eval` found of answers with MTP on and off; of the source, with MTP off."""

    station = "lossless"
    part = "lossless"
    command = "eval {} --only lossless"
    form = 1

    source: AskedModel | None
    checkpoint: AskedModel

    def rows(self, wanted: str) -> Iterator[Row]:
        """Texts that are the same as with MTP off, asked in the first way."""
        for model in self.models:
            for one in model.asked:
                of = model.role
                if of == "checkpoint" and not one.k:
                    of = "plain"
                case = f"{counted(one.num, 'request')} {one.way}"
                same = one.num_compared - one.num_changed
                yield detail("texts as with MTP off", case, of, same, n=one.num_compared)

    def notes(self) -> Iterator[str]:
        """One sentence for those who would switch MTP off."""
        found = _compared([pair for pair in self._pairs() if pair[0] == _WITH_MTP])
        if found:
            where = f"vLLM {self.environment['vllm']} on {self.environment['device']}"
            on = max([one.num_changed for one in self.checkpoint.asked if one.k])
            off = max([one.num_changed for one in self.checkpoint.asked if not one.k])
            yield (
                f"MTP on against off, {where}: {found[1]} Other texts, at most: {on:,} with MTP "
                f"on, {off:,} with it off and other requests in flight."
            )

    @classmethod
    def reasons(cls, fact: "LosslessFact | None", judging: Judging) -> Iterator[ReasonFact]:
        """One, where two servers were asked: every fault in every way, by the exact sign test.
        What becomes better is no fault.
        """
        found = fact and _compared([*fact._pairs()])
        if found:
            chance, says = found
            if chance < CHANCE:
                yield reason("lossless", "regression", says)
            else:
                yield reason("lossless", "pass", says)

    def _pairs(self) -> Iterator[_Pair]:
        plain = {one.way: one for one in self.checkpoint.asked if not one.k}
        for one in self.checkpoint.asked:
            if one.k:
                yield _WITH_MTP, plain[one.way], one
        if self.source:
            for one in self.source.asked:
                yield "of the checkpoint", one, plain[one.way]


def _compared(pairs: Sequence[_Pair]) -> tuple[float, str] | None:
    """What chance gives least often, and a sentence that says it; None without pairs."""
    seen = []
    for whose, before, after in pairs:
        seen += [(*found, after.way, whose) for found in worse(before, after)]
    if not seen:
        return None
    rarest = min(seen, key=lambda one: (one[0], -len(one[2])))
    chance, fault, names, num_before, way, whose = rarest
    if not names:
        servers = " or ".join(dict.fromkeys([whose for whose, _, _ in pairs]))
        return chance, f"No answer {servers} alone has a fault."
    kinds = ", ".join(dict.fromkeys([name.partition(" ")[0] for name in names]))
    have = "has"
    if len(names) > 1:
        have = "have"
    how = "no more than chance gives"
    if chance < CHANCE:
        how = "beyond chance"
    return chance, (
        f"Asked {way}, {counted(len(names), 'answer')} {whose} alone {have} a fault of {fault} "
        f"({kinds}), and {num_before:,} the other way round (exact sign test: {chance:.2g}), {how}."
    )


def worse(before: AskedFact, after: AskedFact) -> Iterator[tuple[float, str, list[str], int]]:
    """For each fault the chance by the exact sign test, the requests on which only the second
    server has it, and on how many only the first; the chance is 1 where it has no more of them.
    """
    for fault in FAULTS:
        ours = {*before.seen.get(fault, ())}
        theirs = {*after.seen.get(fault, ())}
        num_gone = len(ours - theirs)
        new = sorted(theirs - ours)
        yield sign_test(max(len(new), num_gone), num_gone), fault, new, num_gone
