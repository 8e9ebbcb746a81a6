"""How close a checkpoint is to its source on held-out text, as two real servers predict it.

In: windows of text with the divergence at each position (validate/measure).
Out: a `ClosenessFact`.
closeness.json and report.json hold it, field by field.

Easy to get wrong: nothing is judged here. `validate/report/gates.py` alone says whether these
figures are good enough. And positions of one window are not independent, so errors are taken over
windows: `stderr` is a cluster's, and `effective_tokens` is how many independent positions would
tell the share of flips as well.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field, PositiveInt, computed_field

from ...checkpoints.fact import Count, Fact, Figure, Share
from .numbers import percent
from .rows import CONFIDENCE, Row, detail, interval
from .served import ServedModel


class PredictedFact(ServedModel):
    """One model on the text.

    Attributes:
        sha256: of the checkpoint's bytes, as `Identity.sha256`.
        perplexity: per token of the text.
        sittings: servers that were started for it; more than one where a run was resumed.
        seconds: of asking, over all of them.
        repeated: the most that one of them was away from itself; see `Sitting`.
    """

    sha256: str
    perplexity: Figure
    sittings: PositiveInt
    seconds: Figure
    repeated: Figure | None


class ClosenessFact(Fact):
    """What `keepmtp eval` measured on held-out text.

    Attributes:
        text, text_sha256: the file with the texts.
        texts: in the file; the last ones may be more than was asked for.
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
        environment: versions and device.
    """

    dropped = frozenset({"against"})

    text: str
    text_sha256: str
    texts: Count
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
    environment: Mapping[str, str]

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
    def is_exact(self) -> bool:
        """Whether the whole vocabulary was compared; else `divergence` is a lower bound."""
        return self.top >= self.vocabulary

    @property
    def predicted(self) -> tuple[PredictedFact, PredictedFact]:
        """Source first, then the checkpoint."""
        return self.source, self.checkpoint

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
        for one in self.predicted:
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
        for one in self.predicted:
            if one.repeated:
                yield (
                    f"Asked the same again, the {one.role}'s server was {one.repeated:.2g} nats a "
                    "token from itself: less than that is rounding."
                )
