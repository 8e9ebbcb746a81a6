"""What a server accepts of a block's drafts, sequence by sequence, and how sure a comparison of two blocks is.

In: counts of `held_out.server_counts`, a row for each held-out sequence. Out: an `Acceptance`, and `Kept`: the share of
another's acceptance that is kept, with limits that hold at a confidence.

A sequence is the sample, not a slot: slots of one text go right or wrong together. The limits are the jackknife's over
sequences, both blocks on the same ones, so that what is hard for both cancels out (B. Efron, "The Jackknife, the
Bootstrap and Other Resampling Plans", SIAM 1982, chapter 3).

Easy to get wrong: where all sequences say the same, the jackknife sees no error at all. So many slots without a loss
allow a loss all the same: 1 - (1 - confidence)^(1 / slots) at most, as Clopper and Pearson's limit says.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from .facts import DIGITS, AcceptanceFact

FEWEST_SEQUENCES = 4
"""Sequences below which nothing is known: the expansion of Student's t is good to a per mille from 3 degrees on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Acceptance:
    """What a server accepts of the drafts on held-out text.

    Attributes:
        num_slots: slots of the text that count.
        counts: [held_out, 2, K, K] float64. By sequence, by tokens drafted a step (entry k - 1 is for k), by position:
            slots whose earlier drafts were accepted, weighted by how often a server drafts there; and of these, the
            slots whose draft is the target's choice.
    """

    num_slots: int
    counts: Tensor

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Acceptance":
        """From what `as_json` gave."""
        counts = torch.tensor(values["counts"], dtype=torch.float64)
        return cls(num_slots=values["num_slots"], counts=counts)

    def as_json(self) -> dict[str, Any]:
        """The same value, for a file."""
        return {"num_slots": self.num_slots, "counts": self.counts.tolist()}

    @property
    def num_steps(self) -> int:
        """The most tokens a step that were tried."""
        return self.counts.shape[-1]

    def by_position(self, k: int) -> tuple[float, ...]:
        """Share of drafts whose token at each position is accepted, as `Drafts.acceptance_per_position` of a server."""
        return tuple(_by_position(self.counts.sum(dim=0), k).tolist())

    def mean_accepted_length(self, k: int) -> float:
        """Tokens a step of the target: the accepted ones and its own."""
        return 1 + sum(self.by_position(k))

    def kept_of(self, other: "Acceptance") -> float:
        """The least that is kept of another's share of accepted tokens, whatever a server drafts a step.

        A released block of which no draft is accepted has nothing to lose: all is kept.
        """
        return min(_kept(self.counts.sum(dim=0), other.counts.sum(dim=0), k) for k in self._ks)

    def limits_of(self, other: "Acceptance", confidence: float) -> "Kept":
        """How much is kept of another's share, over the same sequences.

        Args:
            other: measured on the same held-out text.
            confidence: of each limit, one-sided.
        """
        each = [self._limits(other, k, confidence) for k in self._ks]
        value, low, high = (min(found) for found in zip(*each, strict=True))
        return Kept(value=value, low=low, high=high, num_slots=self.num_slots, confidence=confidence)

    def fact(self) -> AcceptanceFact:
        """The figures for the record, by the number of tokens drafted a step."""
        return AcceptanceFact(
            num_slots=self.num_slots,
            by_position={str(k): tuple(round(rate, DIGITS) for rate in self.by_position(k)) for k in self._ks},
            mean_accepted_length={str(k): round(self.mean_accepted_length(k), DIGITS) for k in self._ks},
        )

    @property
    def _ks(self) -> range:
        return range(1, self.num_steps + 1)

    def _limits(self, other: "Acceptance", k: int, confidence: float) -> tuple[float, float, float]:
        """Estimate, lower and upper limit where k tokens are drafted a step."""
        own, theirs = self.counts.sum(dim=0), other.counts.sum(dim=0)
        kept = _kept(own, theirs, k)
        # A sequence that counts for neither says nothing.
        rows = [row for row in range(len(self.counts)) if self.counts[row].any() or other.counts[row].any()]
        if len(rows) < FEWEST_SEQUENCES:
            return kept, 0.0, math.inf
        without = [_kept(own - self.counts[row], theirs - other.counts[row], k) for row in rows]
        mean = sum(without) / len(rows)
        variance = (len(rows) - 1) / len(rows) * sum((each - mean) ** 2 for each in without)
        reach = max(student_t(confidence, len(rows) - 1) * math.sqrt(variance), unseen(self.num_slots, confidence))
        return kept, max(0.0, kept - reach), kept + reach


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A share that is kept, and its one-sided limits at a confidence.

    Attributes:
        value: the estimate.
        low, high: with `confidence` it is above the first, and likewise below the second.
        num_slots: slots that it was measured on.
    """

    value: float
    low: float
    high: float
    num_slots: int
    confidence: float

    def is_shown(self, least: float) -> bool:
        """Whether at least so much is kept, as far as the confidence goes."""
        return self.low >= least

    def is_refuted(self, least: float) -> bool:
        """Whether less is kept, as far as the confidence goes."""
        return self.high < least

    def needed_slots(self, least: float) -> int | None:
        """About how many slots would show that `least` is kept; None where the estimate is below it."""
        margin = self.value - least
        if self.is_shown(least) or margin <= 0 or not math.isfinite(self.high):
            return None
        by_spread = self.num_slots * ((self.value - self.low) / margin) ** 2
        by_count = math.log1p(-self.confidence) / math.log1p(-min(margin, 0.5))
        # The limit without a loss shrinks with the slots, the jackknife's with their root.
        is_spread = self.value - self.low > unseen(self.num_slots, self.confidence) * (1 + 1e-9)
        return math.ceil(max(by_spread if is_spread else 0.0, by_count))


def student_t(confidence: float, degrees: int) -> float:
    """The one-sided quantile of Student's t, for 3 degrees of freedom or more.

    Source: M. Abramowitz, I. A. Stegun, Handbook of Mathematical Functions (1964), 26.7.5.
    """
    x = NormalDist().inv_cdf(confidence)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def unseen(num_slots: int, confidence: float) -> float:
    """The largest share of slots that may be lost where none of `num_slots` was."""
    return 1 - (1 - confidence) ** (1 / num_slots) if num_slots else 1.0


def fewest_slots(least: float, confidence: float) -> int:
    """Slots that show that a share of `least` is kept, if no draft is lost on them."""
    return math.ceil(math.log1p(-confidence) / math.log(least)) if least < 1 else 2**63


def _kept(own: Tensor, theirs: Tensor, k: int) -> float:
    """The share of another's accepted tokens that is kept where k tokens are drafted a step."""
    mine, others = (float(_by_position(counts, k).mean()) for counts in (own, theirs))
    return mine / others if others else 1.0


def _by_position(counts: Tensor, k: int) -> Tensor:
    """[k]: what is accepted at each position, as a share of all drafts.

    Args:
        counts: [2, K, K], see `Acceptance`.
        k: tokens drafted a step.
    """
    reached, accepted = counts[:, k - 1, :k]
    rates = torch.where(reached > 0, accepted / reached.clamp(min=1e-300), torch.zeros_like(accepted))
    return rates.cumprod(dim=0)
