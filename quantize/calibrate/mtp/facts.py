"""What calibration measures: the data, the coverage, and the acceptance without a server.

In: figures of a pass (`mtp_pass.py`), or the `calibration` block of a keepmtp.json. Out: the same
fact for the record, report.json, the page and the card.

Easy to get wrong: keepmtp.json may be anybody's. A number that nobody could have measured is
refused before it is drawn.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, computed_field, model_validator

from ....checkpoints.fact import Count, Fact, Figure, Share
from ....recipes.schema import TextsOfMix


def _rounded(digits: int) -> BeforeValidator:
    """How a figure is written to the record. What is decided is decided before."""

    def rounded(value: Any) -> Any:
        return round(value, digits) if isinstance(value, float) else value

    return BeforeValidator(rounded)


Share5 = Annotated[Share, _rounded(5)]
Figure5 = Annotated[Figure, _rounded(5)]
Figure6 = Annotated[Figure, _rounded(6)]
Figure7 = Annotated[Figure, _rounded(7)]


class DataFact(Fact):
    """The batches: where they are from, and sums that are equal exactly when they are.

    Attributes:
        also: other datasets of a mix, at the revisions that were read.
    """

    dropped = frozenset({"guard", "held_out_by"})
    dataset: str
    dataset_revision: str
    subset: str
    split: str
    column: str
    prompt_column: str = ""
    also: Annotated[tuple[TextsOfMix, ...], Field(max_length=100)] = ()
    seed: Count
    rows: Count
    held_out_rows: Count
    blank_rows: Count
    tokens: Count
    held_out_tokens: Count
    held_out_written_tokens: Count | None = None
    row_numbers_sha256: str
    ids_sha256: str
    held_out_ids_sha256: str


class FewestFact(Fact):
    """The module that the fewest tokens reached."""

    module: str
    tokens: Count


class CoverageFact(Fact):
    """Modules that were calibrated.

    Attributes:
        never_routed: experts' modules that the router sent no token.
    """

    modules: Count
    never_routed: tuple[str, ...]
    fewest_tokens: FewestFact | None


class AcceptanceFact(Fact):
    """Drafts that a server would accept, by the number of tokens it drafts a step ("1", "2", ...).

    Attributes:
        num_slots: slots of the text that count.
        by_position: share accepted at each position of the draft.
    """

    num_slots: Count
    by_position: Annotated[Mapping[str, tuple[Share5, ...]], Field(min_length=1, max_length=16)]

    @model_validator(mode="after")
    def _has_a_share_a_position(self) -> "AcceptanceFact":
        for k in range(1, self.k + 1):
            if len(self.by_position.get(str(k), ())) != k:
                raise ValueError("by_position must have a share for each position, for 1 to k")
        return self

    @computed_field
    @property
    def mean_accepted_length(self) -> dict[str, float]:
        """Tokens a step of the target, its own included."""
        return {k: round(1 + sum(shares), 5) for k, shares in self.by_position.items()}

    @property
    def k(self) -> int:
        """The most tokens a step that were tried."""
        return len(self.by_position)

    @property
    def shares(self) -> tuple[float, ...]:
        """By position, where the most are drafted."""
        return self.by_position[str(self.k)]

    @property
    def length(self) -> float:
        """Tokens a step of the target, where the most are drafted."""
        return 1 + sum(self.shares)


Side = Literal["source", "quantized", "tuned"]
_BLOCKS = {
    "source": "MTP block as released",
    "quantized": "quantized MTP block",
    "tuned": "tuned MTP block",
}


class MeasuredFact(Fact):
    """One backbone with one MTP block on held-out text, all kinds of it together.

    Attributes:
        perplexity: the backbone's, per token.
        divergence: Kullback-Leibler divergence of its predictions from the released model's, nats a
            slot; None for the released model, and in older records.
    """

    dropped = frozenset({"flips", "perplexity_of_kind", "divergence_of_kind"})
    backbone: Literal["source", "quantized"]
    mtp: Side
    perplexity: Figure6
    divergence: Figure6 | None = None
    acceptance: AcceptanceFact | None

    @property
    def title(self) -> str:
        """For people."""
        if self.backbone == "source":
            return "released model"
        return f"quantized backbone, {_BLOCKS[self.mtp]}"


Verdict = Literal["keeps enough", "keeps too little", "too few slots to tell", "does not fit"]


class CandidateFact(Fact):
    """A policy for the MTP block that `mtp: auto` tried.

    Attributes:
        policy: as in a recipe.
        bytes: of the block's tensors on disk; 0 where it was refused.
        kept: part of the released model's acceptance, see `acceptance.Acceptance.kept_of`.
        kept_at_least: that share's lower limit, at the confidence of the recipe's gates; None where
            nobody asked.
        refused: why there is no plan; "" if there is.
        chosen: it is what is written.
        acceptance: with the quantized backbone; None where it was refused.
    """

    dropped = frozenset({"needed_slots"})
    policy: str | Mapping[str, str]
    bytes: Count
    kept: Figure5
    kept_at_least: Figure5 | None = None
    refused: str = ""
    chosen: bool = False
    acceptance: AcceptanceFact | None = None

    @property
    def title(self) -> str:
        """For people."""
        if isinstance(self.policy, str):
            return self.policy
        return ", ".join(f"{group}: {word}" for group, word in self.policy.items())


class GainFact(Fact):
    """What a tuned block drafts on one kind of text, as a share of what the untuned one does.

    Attributes:
        kind: the dataset.
        sequences: of it.
        gain, gain_at_least, gain_at_most: the least of all numbers of tokens a step, and limits at
            the confidence of the whole.
    """

    kind: str
    sequences: Count
    gain: Figure5
    gain_at_least: Figure5
    gain_at_most: Figure5


class TunedFact(Fact):
    """An MTP block that was trained for the quantized backbone, and what it drafts on text that it
    has not seen.

    Attributes:
        policy, steps, batch_size, learning_rate, relative_rate, seed, loss, draft_steps: the
            recipe's; see `schema.MtpTuned`.
        before, after: with the same schemes, as rounded from the release and as trained.
        gain: part of the untrained block's acceptance that the trained one has, the mean over the
            kinds of text, the least of all numbers of tokens a step; above 1 it is better.
        gain_at_least: its lower limit, at `confidence`.
        kinds: of text that it was judged on; none in older records, where there was one.
        chosen: the trained block is what is written.
    """

    dropped = frozenset({"first_loss", "last_loss", "of_released", "of_released_at_least", "share"})
    policy: str | Mapping[str, str]
    steps: Count
    batch_size: Count
    learning_rate: Figure | None = None
    relative_rate: Figure | None = None
    seed: Count
    loss: Literal["tv", "nla", "lk_hybrid", "kl_div", "ce"]
    draft_steps: Count
    before: AcceptanceFact
    after: AcceptanceFact
    gain: Figure5
    gain_at_least: Figure5
    kinds: Annotated[tuple[GainFact, ...], Field(max_length=101)] = ()
    confidence: Share
    chosen: bool

    @property
    def says(self) -> str:
        """What training did, in sentences for people."""
        end = "."
        if not self.chosen:
            end = ": it is not shown to be better, and the untrained block is what is written."
        mean = ""
        if len(self.kinds) > 1:
            mean = f" in the mean of {len(self.kinds)} kinds of text"
            by_kind = []
            for kind in self.kinds:
                limits = f"{kind.gain_at_least:.3f} to {kind.gain_at_most:.3f}"
                by_kind.append(f"{kind.kind} {kind.gain:.3f} ({limits})")
                if kind.gain_at_most < 1 and not self.chosen:
                    end = ": it is worse on a kind, and the untrained block is what is written."
            end += f" By kind: {'; '.join(by_kind)}."
        else:
            named = ""
            if self.kinds and self.kinds[0].kind:
                named = f", {self.kinds[0].kind}"
            end += f" It was judged on one kind of text{named}; on others it was not tried."
        return (
            f"The MTP block was trained for {self.steps:,} steps of {self.batch_size:,} sequences "
            f"of the calibration text (loss {self.loss}, seed {self.seed}, {self.draft_steps} "
            f"tokens ahead). On held-out text its drafts are accepted {self.gain:.3f} times as "
            f"often as those of the same block untrained{mean}, at least "
            f"{self.gain_at_least:.3f} times at {self.confidence:.0%} confidence{end}"
        )


class SearchFact(Fact):
    """What a search under a budget did.

    Attributes:
        budget: as in the recipe that asked for it.
        candidates: likewise.
        asked: a sum over all that this recipe left to the search.
        units: whose words were searched.
        tokens: of calibration text, on which sensitivities were measured.
        bytes: of all files of the plan that was found, a little more than they are.
        predicted: its nats a token by the sensitivities, of answers and weighted drafts.
    """

    budget: str
    candidates: tuple[str, ...]
    asked: str
    units: Count
    tokens: Count
    bytes: Count
    predicted: Figure7


class KeptFact(Fact):
    """What a quantized part keeps of the acceptance without it, where the most are drafted.

    Attributes:
        kept: the share, of the same sequences.
        reach: half of its interval, at 95 %.
    """

    kept: Figure5
    reach: Figure5

    def __str__(self) -> str:
        return f"{100 * self.kept:.1f} ± {100 * self.reach:.1f} %"


class MtpFact(Fact):
    """What held-out text says of a quantized model and of its MTP block.

    Attributes:
        mtp: the policy for the MTP block, chosen where the recipe says auto.
        rows: released model first, then the quantized backbone with the block as released, and with
            the block as it is written where a server computes that otherwise.
        agreement: share of held-out slots where the quantized backbone chooses what the released
            one does.
        candidates: of `mtp: auto`, in the order tried.
        tuned: of `mtp: tuned`; None where the recipe does not say so.
        of_backbone: with the quantized backbone, of the released model's; None where too little was
            measured.
        of_block: with the block as it is written, of that; None likewise, and for one as released.
        unmeasured: why there is no acceptance; "" if there is.
    """

    mtp: str | Mapping[str, str]
    rows: Annotated[tuple[MeasuredFact, ...], Field(max_length=3)]
    agreement: Share5
    candidates: Annotated[tuple[CandidateFact, ...], Field(max_length=100)] = ()
    tuned: TunedFact | None = None
    of_backbone: KeptFact | None = None
    of_block: KeptFact | None = None
    unmeasured: str = ""


class CalibrationFact(MtpFact):
    """What batches contributed to a checkpoint, and what they say of it without a server.

    Attributes:
        algorithm, sequence_length: the recipe's.
        data: the batches.
        processes: that shared them.
        batch_size: sequences that were computed at a time; None in older records.
        coverage: of the backbone's modules.
        min_acceptance: what `mtp: auto` had to keep; None where the recipe does not say auto.
        confidence: of `kept_at_least`; None where the recipe does not say auto.
        search: how the schemes were found; None where the recipe names them.
    """

    algorithm: str
    sequence_length: PositiveInt
    data: DataFact
    processes: Count
    batch_size: Count | None = None
    coverage: CoverageFact
    min_acceptance: Share | None
    confidence: Share | None = None
    search: SearchFact | None = None

    def verdict_on(self, candidate: CandidateFact) -> Verdict:
        """What the held-out text says of a candidate."""
        if candidate.refused:
            return "does not fit"
        least = self.min_acceptance or 0.0
        if candidate.kept < least:
            return "keeps too little"
        low = candidate.kept_at_least
        if low is None:  # an older record
            low = candidate.kept
        if low >= least:
            return "keeps enough"
        return "too few slots to tell"

    @property
    def measured(self) -> tuple[tuple[MeasuredFact, AcceptanceFact], ...]:
        """The rows whose drafts were counted."""
        return tuple((row, row.acceptance) for row in self.rows if row.acceptance)

    @property
    def k(self) -> int:
        """The most tokens a step that were tried; 0 where none were."""
        tried = [acceptance.k for _, acceptance in self.measured]
        return max(tried, default=0)

    @property
    def parts(self) -> str:
        """Where acceptance is lost, in a sentence; "" where too little was measured."""
        if self.of_backbone is None:
            return ""
        block = ""
        if self.of_block is not None:
            block = f", and of that its MTP block {self.of_block}"
        return (
            f"Of the released model's accepted drafts the quantized backbone keeps "
            f"{self.of_backbone}{block} (k={self.k}, ± half of a 95 % interval)."
        )
