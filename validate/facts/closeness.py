"""How close a checkpoint is to its source on held-out text, as two real servers predict it.

In: windows of text with the divergence at each position (validate/measure).
Out: a `ClosenessFact`.
closeness.json and report.json hold it, field by field.

Easy to get wrong: a fact judges nothing. `reasons` does, by the recipe's limits. And positions of
one window are not independent, so errors are taken over windows: `stderr` is a cluster's, and
`effective_tokens` is how many independent positions would tell the share of flips as well.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveInt, computed_field

from ...checkpoints.fact import Count, Figure, Share
from .binomial import limits, student
from .numbers import nats, percent
from .rows import CONFIDENCE, Row, detail, interval
from .served import Judging, ServedModel, StationFact
from .settle import BOUND, Estimate, ReasonFact, not_its_own, settle, unmeasured, worst


class PredictedFact(ServedModel):
    """One model on the text.

    Attributes:
        sha256: of the checkpoint's bytes, as `Identity.sha256`.
        perplexity: per token of the text.
    """

    sha256: str
    perplexity: Figure


class ClosenessFact(StationFact):
    """What `keepmtp eval` measured on held-out text.

    Attributes:
        text, text_sha256: the file with the texts.
        windows, window: how many, and tokens of one at most. Each begins a text, or goes on in it
            without what was before.
        tokens: positions that were compared: all but the first of each window.
        top, vocabulary: likeliest tokens that were asked for at each position, and how many there
            are.
        outside: the source's probability of tokens that were not compared one by one, mean over
            positions.
        divergence: Kullback-Leibler divergence of the checkpoint's predictions from the source's,
            nats a token; a lower bound where `top` is less than `vocabulary`.
        stderr: of `divergence`, over windows; None with one window.
        flips: positions where the first choice is another.
        effective_tokens: independent positions that would tell the share of flips as well, at most
            `tokens`.
        samples: file in the report's folder with every position, and its SHA-256.
    """

    station = "closeness"
    part = "closeness"
    command = "eval {} --only closeness"
    form = 3

    text: str
    text_sha256: str
    windows: PositiveInt
    window: Annotated[int, Field(gt=1)]
    tokens: PositiveInt
    top: PositiveInt
    vocabulary: PositiveInt
    outside: Share
    divergence: Figure
    stderr: Figure | None
    flips: Count
    effective_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    source: PredictedFact
    checkpoint: PredictedFact
    samples: str
    samples_sha256: str

    @computed_field
    @property
    def flip_rate(self) -> float:
        """Share of positions where the first choice is another."""
        return self.flips / self.tokens

    @property
    def evidence(self) -> "tuple[ClosenessFact]":
        """Whose windows are in a file of their own."""
        return (self,)

    @property
    def native_or_copy(self) -> str:
        """Its servers draft nothing."""
        return ""

    @property
    def asked(self) -> tuple[str, ...]:
        """Its own."""
        return ("closeness",)

    @property
    def is_exact(self) -> bool:
        """Whether the whole vocabulary was compared; else `divergence` is a lower bound."""
        return self.top >= self.vocabulary

    def rows(self, wanted: str) -> Iterator[Row]:
        """Divergence, flips and perplexities."""
        case = f"{self.tokens:,} tokens"
        least = ""
        if not self.is_exact:
            least = "at least "
        around = None
        if self.stderr is not None:
            around = (self.divergence - self.stderr, self.divergence + self.stderr)
        yield Row(
            metric="divergence from the source",
            case=case,
            of="checkpoint",
            value=self.divergence,
            unit="nats",
            around=around,
            also=(least, " nats a token"),
        )
        yield detail(
            "the most likely token differs",
            case,
            "checkpoint",
            self.flip_rate,
            "%",
            around=interval(self.flip_rate, self.effective_tokens),
            confidence=CONFIDENCE,
        )
        for one in self.models:
            yield detail("perplexity", case, one.role, one.perplexity, "perplexity")

    def notes(self) -> Iterator[str]:
        """What a reader of these rows should know."""
        yield (
            f"Text: {self.text}, in windows of at most {self.window:,} tokens; {self.samples} has "
            "every position."
        )
        if not self.is_exact:
            yield (
                f"The rest of the vocabulary, {percent(self.outside)} of the source's probability, "
                "counts as one token, so the divergence is a lower bound."
            )

    @classmethod
    def reasons(cls, fact: "ClosenessFact | None", judging: Judging) -> Iterator[ReasonFact]:
        """The worse of both limits, and what was found for each; none where the recipe has no
        limit.
        """
        gates = judging.gates
        if gates.max_divergence is None and gates.max_flips is None:
            return
        if fact is None or fact.stderr is None:
            cure = "`keepmtp eval CHECKPOINT --only closeness` does."
            yield unmeasured("closeness", f"Not measured in two windows or more: {cure}")
            return
        # Tokens of one window are not independent: the bound of a mean is Student's over windows,
        # and that of a share is Clopper and Pearson's over as many independent positions as would
        # tell as much (Korn and Graubard).
        reach = student(gates.confidence, fact.windows - 1) * fact.stderr

        def around(times: float) -> tuple[float, float]:
            near = reach / times**0.5
            return fact.divergence - near, fact.divergence + near

        flips = fact.flip_rate * fact.effective_tokens
        also = ""
        if not fact.is_exact:
            also = (
                f" It is a lower bound: {percent(fact.outside)} of the source's probability lies "
                "on tokens that were compared as one."
            )
        divergence = Estimate(
            value=fact.divergence,
            bounds=around,
            samples=fact.tokens,
            unit="tokens",
            says=f"On {fact.tokens:,} tokens of held-out text {nats(fact.divergence)} a token from "
            "the source",
            how="one-sided, over windows",
            shown=nats,
            also=also,
        )
        flipped = Estimate(
            value=fact.flip_rate,
            bounds=lambda times: limits(
                times * flips, times * fact.effective_tokens, gates.confidence
            ),
            samples=fact.tokens,
            unit="tokens",
            says=f"The first choice is another at {percent(fact.flip_rate)} of the tokens",
            how=f"{BOUND}, as {fact.effective_tokens:,.0f} independent tokens",
            shown=percent,
        )
        found = list[ReasonFact]()
        for estimate, most in ((divergence, gates.max_divergence), (flipped, gates.max_flips)):
            if most is not None:
                found.append(settle("closeness", estimate, most, gates, is_floor=False))
        # So many samples settle both; None where no number settles one of them.
        needed = [one.needed or 0 for one in found if one.verdict == "infeasible"]
        if 0 in needed:
            needed = []
        says = " ".join([one.says for one in found])
        yield ReasonFact(
            gate="closeness",
            verdict=worst(found),
            says=says + not_its_own(fact.checkpoint.as_served),
            needed=max(needed, default=None),
        )
