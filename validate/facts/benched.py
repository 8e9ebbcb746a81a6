"""How fast real vLLM servers were with each k under each load, and which k that recommends.

In: what `vllm bench serve` and vLLM's draft counters gave for each repetition
(validate/measure/bench.py).
Out: a `BenchFact`. bench.json and report.json hold it, field by field.

Easy to get wrong: a high acceptance is not speed, and a difference that is smaller than the spread
of the repetitions says nothing.
"""

from collections.abc import Iterator
from operator import attrgetter
from statistics import median
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, computed_field, model_validator

from ...checkpoints.fact import Count, Fact, Figure, NumDrafts
from .rows import Arm, Row, detail
from .served import Drafts, Judging, ServedModel, StationFact, total
from .settle import ReasonFact, reason, unmeasured

RequestForm = Literal["chat", "completions"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

NO_SPEED = (
    "Speed was not measured in a way that promises one: that needs a GPU, and `keepmtp bench` of "
    "these very bytes."
)


class Repetition(Drafts):
    """One pass over the prompts of a load, with vLLM's draft counters over it, without its warm-up.

    Attributes:
        number: from 0; all loads of a server are measured once before any is measured again.
        seconds: wall time from the first request to the last token.
        requests: all of them were answered.
        input_tokens, output_tokens: as the server counts them.
        first_token_ms: median time from a request to its first token (TTFT).
        per_token_ms: median, over requests, of the time after the first token over the other tokens
            (TPOT).
    """

    dropped = frozenset({"at"})

    number: Count
    seconds: Seconds
    requests: PositiveInt
    input_tokens: Count
    output_tokens: Count
    first_token_ms: Figure
    per_token_ms: Figure

    @computed_field
    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time, all requests together."""
        return self.output_tokens / self.seconds


class BenchCell(Fact):
    """One k under one load.

    Attributes:
        k: tokens drafted a step; 0 served without method=mtp.
        concurrency: requests in flight.
        repetitions: by number.
    """

    k: NumDrafts
    concurrency: PositiveInt
    repetitions: Annotated[tuple[Repetition, ...], Field(min_length=1)]

    @computed_field
    @property
    def tokens_per_second(self) -> float:
        """Median over the repetitions."""
        return median(self.rates)

    @computed_field
    @property
    def drafts(self) -> Drafts:
        """vLLM's counters over all repetitions."""
        return total(self.repetitions)

    def row(self, case: str, of: Arm, *, also: str = "", is_detail: bool = False) -> Row:
        """Tokens a second, ± half of what repetitions spread."""
        return Row(
            metric="tokens a second",
            case=case,
            of=of,
            value=self.tokens_per_second,
            unit="rate",
            around=(min(self.rates), max(self.rates)),
            also=("", also),
            is_detail=is_detail,
        )

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each repetition."""
        return [each.tokens_per_second for each in self.repetitions]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        for each in self.repetitions:
            if len(each.accepted_per_position) > self.k or (each.drafts and not self.k):
                says = f"repetition {each.number} drafted more than k={self.k} tokens a step"
                raise ValueError(says)
        return self


class RecommendedK(Fact):
    """The k to serve with under one load.

    Attributes:
        k: None where the repetitions cannot tell.
        speed_up: tokens a second over those of k=0; None without k=0.
        says: why, in a sentence.
    """

    concurrency: Count
    k: NumDrafts | None
    speed_up: Figure | None = None
    says: str


class Benched(ServedModel):
    """One checkpoint: every k under every load.

    Attributes:
        sha256: of the bytes, as `Identity.sha256`. The speed of a BF16 copy is not theirs.
        form: how prompts were sent: as messages through the chat template, or as texts.
        cells: by concurrency, then k.
    """

    sha256: str
    form: RequestForm
    cells: tuple[BenchCell, ...]

    @property
    def loads(self) -> tuple[int, ...]:
        """Requests in flight, each once."""
        return tuple(dict.fromkeys([cell.concurrency for cell in self.cells]))

    def cell(self, k: int, concurrency: int) -> BenchCell | None:
        """The cell, if it was measured."""
        for cell in self.cells:
            if (cell.k, cell.concurrency) == (k, concurrency):
                return cell
        return None

    def times(self, cell: BenchCell) -> tuple[float, float, float] | None:
        """Tokens a second over those of k=0 under the same load: of the slowest repetition over the
        fastest, of the medians, of the fastest over the slowest; None where there is nothing to
        compare.
        """
        plain = self.cell(0, cell.concurrency)
        if plain is None or not min(plain.rates):
            return None
        return (
            min(cell.rates) / max(plain.rates),
            median(cell.rates) / median(plain.rates),
            max(cell.rates) / min(plain.rates),
        )

    @computed_field
    @property
    def recommended(self) -> tuple[RecommendedK, ...]:
        """The k to serve with, for each load."""
        return tuple([self._recommended(load) for load in self.loads])

    def _recommended(self, concurrency: int) -> RecommendedK:
        """From the smallest k upwards: a larger one only if its slowest repetition beats the
        fastest of the best.
        """
        cells = [cell for cell in self.cells if cell.concurrency == concurrency]
        cells.sort(key=attrgetter("k"))
        if min([len(cell.rates) for cell in cells]) < 2:
            says = "one repetition has no spread: measure with --repeat 3"
            return RecommendedK(concurrency=concurrency, k=None, says=says)
        best = cells[0]
        says = f"no larger k is faster than k={best.k} beyond the spread of the repetitions"
        if len(cells) == 1:
            says = "no other k was measured"
        for cell in cells[1:]:
            slowest = min(cell.rates)
            fastest = max(best.rates)
            if slowest > fastest:
                says = (
                    f"its slowest repetition, {slowest:.1f} tokens a second, is faster than the "
                    f"fastest of k={best.k}, {fastest:.1f}"
                )
                best = cell
        times = self.times(best)
        speed_up = times and times[1]
        return RecommendedK(concurrency=concurrency, k=best.k, speed_up=speed_up, says=says)


def words_of(concurrency: int) -> str:
    """`8 at once`."""
    return f"{concurrency} at once"


class BenchFact(StationFact):
    """Everything that `keepmtp bench` measured.

    Attributes:
        checkpoint: what is judged.
        source: what it was made from, under the same loads; None where the user had none.
        prompts: the file's name, or what the shipped prompts are.
        prompts_sha256: of all prompts, in the order of the file.
        num_prompts: in the file.
        output_tokens: limit of tokens an answer; an answer that ends earlier by itself is not made
            longer.
        seed: of the order in which prompts are taken.
    """

    station = "bench"
    part = "bench"
    command = "bench {}"
    form = 3

    checkpoint: Benched
    source: Benched | None = None
    prompts: str
    prompts_sha256: str
    num_prompts: PositiveInt
    output_tokens: PositiveInt
    seed: Count

    def counts(self, *, device: str = "") -> bool:
        """Whether it is about the checkpoint: its own bytes were served, on a GPU or on `device`
        itself.
        """
        served_on = self.environment.get("device", "")
        is_there = bool(served_on) and (served_on == device or not served_on.startswith("CPU"))
        return self.checkpoint.as_served == "native" and is_there

    def rows(self, wanted: str) -> Iterator[Row]:
        """Tokens a second with the k that is recommended, and without drafting; then `cells`."""
        if not self.counts():
            return
        for model in self.models:
            for best in model.recommended:
                yield from self._row(model, best.concurrency, best.k, model.role)
        for concurrency in self.checkpoint.loads:
            yield from self._row(self.checkpoint, concurrency, 0, "plain")
        yield from self.cells()

    def cells(self) -> Iterator[Row]:
        """By load and k tokens a second, how much faster than k=0 that is, times, and drafts."""
        for model in self.models:
            for cell in model.cells:
                asked = words_of(cell.concurrency)
                case = f"{asked}, k={cell.k}"
                yield cell.row(case, model.role, is_detail=True)
                times = model.times(cell)
                if cell.k and times:
                    yield detail("times as fast as k=0", case, model.role, times[1], "times")
                first = median([one.first_token_ms for one in cell.repetitions])
                other = median([one.per_token_ms for one in cell.repetitions])
                yield detail("ms to the first token", case, model.role, first, "ms")
                yield detail("ms for each further token", case, model.role, other, "ms")
                yield from cell.drafts.accepted(model.role, cell.k, asked, is_detail=True)

    def _row(self, model: Benched, load: int, k: int | None, of: Arm) -> Iterator[Row]:
        cell = None if k is None else model.cell(k, load)
        if cell:
            yield cell.row(words_of(load), of, also=f", k={k}")

    def notes(self) -> Iterator[str]:
        """The same, of figures that count."""
        if self.counts():
            yield from self.remarks()
        else:
            yield NO_SPEED

    def remarks(self) -> Iterator[str]:
        """Which k to serve with under which load, and what speaks against the figures."""
        advised = []
        for row in self.checkpoint.recommended:
            load = words_of(row.concurrency)
            if row.k:
                gain = ""
                if row.speed_up:
                    gain = f", {row.speed_up:.2f} times as fast as without MTP"
                advised.append(f"{load} with k={row.k}{gain}")
            elif row.k == 0:
                advised.append(f"{load} without MTP")
            else:
                yield f"{load}: no k is recommended: {row.says}."
        if advised:
            yield f"Serve {'; '.join(advised)}."

    @classmethod
    def reasons(cls, fact: "BenchFact | None", judging: Judging) -> Iterator[ReasonFact]:
        """Whether drafting makes one request at a time faster; none where the recipe has no
        limit.
        """
        least = judging.gates.min_speedup
        if least is None:
            return
        if fact is None or not fact.counts():
            says = (
                "Not measured of the checkpoint's own bytes on a GPU: `keepmtp bench CHECKPOINT` "
            )
            yield unmeasured("speed", f"{says}there does.")
            return
        plain = fact.checkpoint.cell(0, 1)
        found = []
        for cell in fact.checkpoint.cells:
            times = fact.checkpoint.times(cell)
            has_spread = plain and min(len(plain.rates), len(cell.rates)) > 1
            if cell.concurrency == 1 and cell.k and times and has_spread:
                # The estimate of a ratio is no proof. A k passes only if its slowest repetition
                # reaches the limit against the fastest one without drafting; all of them fail only
                # if no pair of repetitions reaches it.
                found.append((*times, cell.k))
        if not found:
            says = (
                "k=0 and a k with drafting must both answer one request at a time, twice or more: "
            )
            cure = "`keepmtp bench CHECKPOINT --k 0,1 --concurrency 1 --repeat 3`."
            yield unmeasured("speed", says + cure)
            return
        low, middle, high, k = max(found)
        says = (
            f"One request at a time on {fact.environment['device']}: k={k} is {middle:.2f} times "
            f"as fast as k=0, by the repetitions {low:.2f} to {high:.2f} times; at least {least:g} "
            "times is asked for."
        )
        if low >= least:
            yield reason("speed", "pass", says)
        elif all(high < least for _, _, high, _ in found):
            yield reason("speed", "regression", f"{says} No other k is faster.")
        else:
            yield unmeasured("speed", f"{says} The repetitions are too far apart to tell.")
