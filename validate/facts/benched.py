"""How fast real vLLM servers were with each k under each load, and which k that recommends.

In: what `vllm bench serve` and vLLM's draft counters gave for each repetition
(validate/measure/bench.py).
Out: a `BenchFact`. bench.json and report.json hold it, field by field.

Easy to get wrong: a high acceptance is not speed, and a difference that is smaller than the spread
of the repetitions says nothing.
"""

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, computed_field, model_validator

from ...checkpoints.fact import Count, Fact, Figure, NumDrafts
from .rows import Arm, Row, detail
from .served import Drafts, ServedModel, those, total

RequestForm = Literal["chat", "completions"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_HIGH_ACCEPTANCE = 0.5


class Latency(Fact):
    """Of one repetition's requests or tokens, in milliseconds."""

    median_ms: Figure
    p99_ms: Figure


class Repetition(Drafts):
    """One pass over the prompts of a load, with vLLM's draft counters over it, without its warm-up.

    Attributes:
        number: from 0; all loads of a server are measured once before any is measured again.
        at: when it began (UTC); with it, a machine that becomes slower during the run can be seen.
        seconds: wall time from the first request to the last token.
        requests: all of them were answered.
        input_tokens, output_tokens: as the server counts them.
        first_token: from a request to its first token (TTFT).
        per_token: of each request, the time after its first token over its other tokens (TPOT).
        between: from one piece of a stream to the next (ITL). With drafting a piece may hold
            several tokens.
    """

    number: Count
    at: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$")]
    seconds: Seconds
    requests: PositiveInt
    input_tokens: Count
    output_tokens: Count
    first_token: Latency
    per_token: Latency
    between: Latency

    @computed_field
    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over wall time, all requests together."""
        return self.output_tokens / self.seconds

    @computed_field
    @property
    def all_tokens_per_second(self) -> float:
        """The same with the tokens of the prompts."""
        return (self.input_tokens + self.output_tokens) / self.seconds

    @computed_field
    @property
    def requests_per_second(self) -> float:
        """Answered requests over wall time."""
        return self.requests / self.seconds


class BenchCell(Fact):
    """One k under one load.

    Attributes:
        k: tokens drafted a step; 0 served without method=mtp.
        concurrency: requests in flight.
        context: tokens that earlier versions brought each prompt to; 0 where prompts were sent as
            they are.
        repetitions: by number; empty where `error` says why.
        error: why there is no figure; "" if there is one.
    """

    k: NumDrafts
    concurrency: PositiveInt
    context: Count = 0
    repetitions: tuple[Repetition, ...] = ()
    error: str = ""

    @property
    def load(self) -> tuple[int, int]:
        """Concurrency and context: what is compared over k."""
        return self.concurrency, self.context

    @computed_field
    @property
    def tokens_per_second(self) -> float | None:
        """Median over the repetitions; None where there is none."""
        return _median(self._rates)

    @computed_field
    @property
    def slowest(self) -> float | None:
        """Tokens a second of the slowest repetition."""
        return min(self._rates, default=None)

    @computed_field
    @property
    def fastest(self) -> float | None:
        """Tokens a second of the fastest repetition."""
        return max(self._rates, default=None)

    @computed_field
    @property
    def first_token_ms(self) -> float | None:
        """Median over the repetitions of the median time to the first token."""
        return _median([one.first_token.median_ms for one in self.repetitions])

    @computed_field
    @property
    def per_token_ms(self) -> float | None:
        """Median over the repetitions of the median time for each further token."""
        return _median([each.per_token.median_ms for each in self.repetitions])

    @property
    def drafts(self) -> Drafts:
        """vLLM's counters over all repetitions."""
        return total(self.repetitions)

    @computed_field
    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were kept, over all repetitions; None where nothing was
        drafted.
        """
        return self.drafts.acceptance

    @computed_field
    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of drafts whose token at each position was kept, over all repetitions."""
        return self.drafts.acceptance_per_position

    @computed_field
    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a step of the target, over all repetitions; None where nothing was drafted."""
        return self.drafts.mean_accepted_length

    @property
    def rate(self) -> str:
        """Tokens a second, ± half of what repetitions spread."""
        if not (self.tokens_per_second and self.fastest and self.slowest):
            return "failed"
        return f"{self.tokens_per_second:,.1f} ± {(self.fastest - self.slowest) / 2:,.1f}"

    @property
    def _rates(self) -> list[float]:
        return [each.tokens_per_second for each in self.repetitions]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if bool(self.repetitions) == bool(self.error):
            raise ValueError("a cell has either repetitions or an error")
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
    context: Count
    k: NumDrafts | None
    speed_up: Figure | None
    says: str

    @property
    def load(self) -> tuple[int, int]:
        """As that of a cell."""
        return self.concurrency, self.context


class Benched(ServedModel):
    """One checkpoint: every k under every load.

    Attributes:
        sha256: of the bytes, as `Identity.sha256`. The speed of a BF16 copy is not theirs.
        form: how prompts were sent: as messages through the chat template, or as texts.
        max_num_seqs, max_model_len: with which the servers were started, whatever the load.
        cells: by context, then concurrency, then k.
    """

    sha256: str
    form: RequestForm
    max_num_seqs: Count
    max_model_len: Count
    cells: tuple[BenchCell, ...]

    @property
    def loads(self) -> tuple[tuple[int, int], ...]:
        """(concurrency, context), each once."""
        return tuple(dict.fromkeys([cell.load for cell in self.cells]))

    def cell(self, k: int, load: tuple[int, int]) -> BenchCell | None:
        """The cell with a figure, if there is one."""
        for cell in self.cells:
            if (cell.k, cell.load) == (k, load) and cell.repetitions:
                return cell
        return None

    def speed_up(self, cell: BenchCell) -> float | None:
        """Tokens a second over those of k=0 under the same load; None where there is nothing to
        compare.
        """
        plain = self.cell(0, cell.load)
        if plain is None or not plain.tokens_per_second or cell.tokens_per_second is None:
            return None
        return cell.tokens_per_second / plain.tokens_per_second

    @computed_field
    @property
    def recommended(self) -> tuple[RecommendedK, ...]:
        """The k to serve with, for each load."""
        return tuple([self._recommended(load) for load in self.loads])

    @computed_field
    @property
    def slower(self) -> tuple[str, ...]:
        """A sentence for each cell that accepts much and is slower than k=0 all the same."""
        said = []
        # A draft costs time too, and only tokens a second say whether it paid (vllm #39680,
        # #35387).
        for cell in self.cells:
            plain = self.cell(0, cell.load)
            share = cell.acceptance
            if plain is None or share is None or share < _HIGH_ACCEPTANCE:
                continue
            if cell.fastest and plain.slowest and cell.fastest < plain.slowest:
                said.append(
                    f"k={cell.k}, {words_of(cell.load)}: {100 * share:.1f} % of the drafts are "
                    f"accepted, and it is slower than k=0 ({self.speed_up(cell):.2f}x). A draft "
                    "costs more time here than it saves."
                )
        return tuple(said)

    def _recommended(self, load: tuple[int, int]) -> RecommendedK:
        """From the smallest k upwards: a larger one only if its slowest repetition beats the
        fastest of the best.
        """
        concurrency, context = load
        cells = [cell for cell in self.cells if cell.load == load and cell.repetitions]
        cells.sort(key=lambda cell: cell.k)
        says = "no k has a figure"
        if cells:
            says = "one repetition has no spread: measure with --repeat 3"
        if not cells or min([len(cell.repetitions) for cell in cells]) < 2:
            return RecommendedK(
                concurrency=concurrency, context=context, k=None, speed_up=None, says=says
            )
        best = cells[0]
        says = f"no larger k is faster than k={best.k} beyond the spread of the repetitions"
        if len(cells) == 1:
            says = "no other k was measured"
        for cell in cells[1:]:
            if (cell.slowest or 0) > (best.fastest or 0):
                says = (
                    f"its slowest repetition, {cell.slowest:.1f} tokens a second, is faster than "
                    f"the fastest of k={best.k}, {best.fastest:.1f}"
                )
                best = cell
        speed_up = self.speed_up(best)
        return RecommendedK(
            concurrency=concurrency, context=context, k=best.k, speed_up=speed_up, says=says
        )


def words_of(load: tuple[int, int]) -> str:
    """`8 at once`, `8 at once, context 4,096`."""
    concurrency, context = load
    if not context:
        return f"{concurrency} at once"
    return f"{concurrency} at once, context {context:,}"


def _median(values: list[float]) -> float | None:
    if not values:
        return None
    return median(values)


class BenchFact(Fact):
    """Everything that `keepmtp bench` measured.

    Attributes:
        checkpoint: what is judged.
        source: what it was made from, under the same loads; None where the user had none.
        prompts: the file's name, or what the shipped prompts are.
        prompts_sha256: of all prompts, in the order of the file.
        num_prompts: in the file.
        output_tokens: limit of tokens an answer; an answer that ends earlier by itself is not made
            longer.
        rounds: how often each server was started; once, but in results of earlier versions.
        seed: of the order in which prompts are taken.
        environment: versions, device, and the words for `vllm serve`, by name.
    """

    checkpoint: Benched
    source: Benched | None = None
    prompts: str
    prompts_sha256: str
    num_prompts: PositiveInt
    output_tokens: PositiveInt
    rounds: PositiveInt = 1
    seed: Count
    environment: Mapping[str, str]

    @property
    def benched(self) -> tuple[Benched, ...]:
        """Source first, then the checkpoint."""
        return those(self.source, self.checkpoint)

    def counts(self, *, device: str = "") -> bool:
        """Whether it is about the checkpoint: its own bytes were served, on a GPU or on `device`
        itself.
        """
        served_on = self.environment.get("device", "")
        is_there = bool(served_on) and (served_on == device or not served_on.startswith("CPU"))
        return self.checkpoint.as_served == "native" and is_there

    def rows(self, wanted: str) -> Iterator[Row]:
        """Tokens a second with the k that is recommended, and without drafting; then with each
        k.
        """
        if not self.counts():
            return
        for model in self.benched:
            for best in model.recommended:
                yield from self._row(model, best.load, best.k, model.role)
        for load in self.checkpoint.loads:
            yield from self._row(self.checkpoint, load, 0, "plain")
        for cell in self.checkpoint.cells:
            case = f"{words_of(cell.load)}, k={cell.k}"
            yield detail("tokens a second", case, "checkpoint", says=cell.rate)

    def _row(self, model: Benched, load: tuple[int, int], k: int | None, of: Arm) -> Iterator[Row]:
        cell = None if k is None else model.cell(k, load)
        if cell:
            says = f"{cell.rate}, k={k}"
            yield Row(metric="tokens a second", case=words_of(load), of=of, says=says)

    def notes(self) -> Iterator[str]:
        """What is recommended of the checkpoint, and what speaks against the figures."""

        for row in self.checkpoint.recommended:
            load = words_of(row.load)
            if row.k is None:
                yield f"{load}: no k is recommended: {row.says}."
            else:
                gain = ""
                if row.k and row.speed_up:
                    gain = f", {row.speed_up:.2f} times as fast as k=0"
                yield f"{load}: k={row.k}{gain}: {row.says}."
        yield from self.checkpoint.slower
        for model in self.benched:
            for cell in model.cells:
                if cell.error:
                    yield (
                        f"{model.role}, k={cell.k}, {words_of(cell.load)}: no figure. "
                        f"{cell.error.rstrip('.')}."
                    )
