"""Measures a matrix: a checkpoint and its source, each with every k, under every load, several
times.

In: local checkpoints, a `BenchPlan` and a `VLLM`. Out: a `BenchFact`, and the file of each
checkpoint's repetitions.

The order: a server for each k; with it every load once, then every load again. So a machine that
becomes slower shows in the spread of a cell. What changes from one server to the next shows only
with a second round, which starts every server again, in the other direction.

Easy to get wrong: the same requests in the same order for every k, greedily, so that all do the
same work. And answers end by themselves: a model that is made to write on after its end repeats
itself, and a draft guesses that too easily.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...checkpoints.files import held
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ..facts.benched import BenchCell, Benched, BenchFact, RequestForm, words_of
from ..facts.step import Step
from .bench_client import Client, RequestsFailed, benchmarking
from .bench_lines import BenchHeader, Lines, MatrixPlace, Measured
from .bench_prompts import Prompts, taken, texts
from .harness import (
    CHAT_TOKENS,
    TURN_TOKENS,
    Host,
    Model,
    Setup,
    TextOrTurns,
    has_template,
    hosting,
    most_tokens,
    refuse_drafts,
    room_for,
)
from .line_file import open_lines
from .server import ServerFailed

WARM_UP_TOKENS = 32
"""Of each answer before a load is measured: kernels are compiled and graphs captured for its number
of requests.
"""
_LEAST_REQUESTS, _REQUESTS_A_SLOT = 16, 4
_SPEED_OF_A_COPY = "the speed of the copy is not the checkpoint's"

Load = tuple[int, int]
"""Requests in flight, and context."""
Watch = Callable[[Step], None]


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """What to measure.

    Attributes:
        ks: tokens drafted a step, ascending.
        concurrency: requests in flight, ascending.
        contexts: tokens that prompts are brought to; 0 leaves them as they are.
        requests: for each load; 0 takes as many as the load needs.
        output_tokens: limit of an answer.
        repeat, rounds: repetitions with each server, and how often each server is started.
        seed: of the order in which prompts are taken.
    """

    ks: tuple[int, ...]
    concurrency: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: Prompts
    requests: int
    output_tokens: int
    repeat: int
    rounds: int
    seed: int

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """Every load, by context."""
        return tuple((each, context) for context in self.contexts for each in self.concurrency)

    @cached_property
    def servers(self) -> tuple[tuple[MatrixPlace, ...], ...]:
        """Every repetition of the matrix, by server, in the order of the run."""
        found = []
        for turn in range(self.rounds):
            numbers = range(turn * self.repeat, (turn + 1) * self.repeat)
            for k in self.ks[:: -1 if turn % 2 else 1]:
                places = [MatrixPlace(k, *load, each) for each in numbers for load in self.loads]
                found.append(tuple(places))
        return tuple(found)

    def num_requests(self, load: Load) -> int:
        """Of one repetition: four for each that is in flight, and sixteen at least, where the user
        names none.
        """
        return self.requests or max(_LEAST_REQUESTS, _REQUESTS_A_SLOT * load[0])

    def max_model_len(self, source: Source, form: RequestForm) -> int:
        """Tokens of the longest prompt and its answer, at most."""
        most = max(map(self.num_requests, self.loads))
        prompts: list[TextOrTurns] = []
        for text in texts(taken(self.prompts, most, self.seed), form=form, context=0):
            prompts.append([{"content": text}] if form == "chat" else text)
        if longest := max(self.contexts):
            prompts.append("x" * (longest + CHAT_TOKENS + TURN_TOKENS))
        return room_for(prompts, source, max_tokens=self.output_tokens)


def form_of(source: Source, words: Sequence[str]) -> RequestForm:
    """Messages where the checkpoint or the user's words have a chat template; else texts."""
    return "chat" if has_template(source, words) else "completions"


def refuse_model(source: Source, plan: BenchPlan) -> None:
    """Refuse before anything is read at length or started.

    Raises:
        RecipeError: a k that the MTP block cannot draft, or a context beyond what the model was
            made for.
    """
    for k in plan.ks:
        refuse_drafts(source, k, option="--k")
    most, context = most_tokens(source), max(plan.contexts)
    if most is not None and context + plan.output_tokens > most:
        rule = f"context and answer must fit max_position_embeddings, {most:,}"
        got = f"{context:,} and {plan.output_tokens:,}"
        cure = f"Use --context {max(1, most - plan.output_tokens)} or less"
        raise RecipeError("--context", rule, got=got, cure=cure)


def bench(
    checkpoint: Model,
    source: Model | None,
    plan: BenchPlan,
    *,
    setup: Setup,
    watch: Watch = lambda _: None,
) -> BenchFact:
    """Measure what is missing of the source's matrix, then of the checkpoint's.

    Args:
        checkpoint: what is judged.
        source: what it was made from; None leaves it out.
        plan: what to measure.
        setup: how to serve, and where to write.
        watch: called with each step of progress.

    Raises:
        RecipeError: another run is at work there.
        ServerFailed: a server did not come up, or died. What was measured is kept.
        VLLMError: no room for a BF16 copy.
        CheckpointError: repetitions that cannot be read, or weights that cannot be copied.
    """
    setup.out.mkdir(parents=True, exist_ok=True)
    with held(setup.out, "only one run may measure into a folder"):
        before = None if source is None else _Matrix(source, plan, setup, watch).benched()
        after = _Matrix(checkpoint, plan, setup, watch).benched()
    return BenchFact(
        checkpoint=after,
        source=before,
        prompts=plan.prompts.name,
        prompts_sha256=plan.prompts.sha256,
        num_prompts=len(plan.prompts.items),
        output_tokens=plan.output_tokens,
        rounds=plan.rounds,
        seed=plan.seed,
        environment=setup.environment,
    )


def open_matrix(model: Model, plan: BenchPlan, setup: Setup) -> Lines:
    """The file of one checkpoint's repetitions, with what is in it already."""
    form = form_of(model.source, setup.extra)
    header = BenchHeader(
        role=model.whose,
        checkpoint_sha256=model.identity.sha256,
        form=form,
        prompts_sha256=plan.prompts.sha256,
        requests=plan.requests,
        output_tokens=plan.output_tokens,
        seed=plan.seed,
        max_num_seqs=max(plan.concurrency),
        max_model_len=plan.max_model_len(model.source, form),
        **setup.answered_by,
    )
    return open_lines(setup.out / f"bench.{model.whose}.jsonl", header, setup.say)


class _Matrix:
    """One checkpoint's part: what is there, what is missing, and what failed."""

    def __init__(self, model: Model, plan: BenchPlan, setup: Setup, watch: Watch) -> None:
        self.model, self.plan, self.setup, self.watch = model, plan, setup, watch
        self.lines = open_matrix(model, plan, setup)
        self.header = self.lines.header
        self.failed: dict[tuple[int, Load], str] = {}
        self.places = [place for places in plan.servers for place in places]
        self.began, self.known = time.monotonic(), self.num_done

    @property
    def num_done(self) -> int:
        """Of the repetitions."""
        return len(self.lines.lines.keys() & set(self.places))

    def benched(self) -> Benched:
        """The whole matrix; servers are started only for what is missing."""
        served: dict[str, Any] = {"as_served": "native", "reason": ""}
        if self.known < len(self.places):
            role = self.model.whose
            with hosting(self.model.source, role, self.setup, self.tell) as host:
                for places in self.plan.servers:
                    if not self.lines.lines.keys() >= set(places):
                        self.sit(host, places)
                served = _served(host)
        for place in self.places:
            if line := self.lines.lines.get(place):
                served = {"as_served": line.as_served, "reason": line.reason}
        return Benched(
            role=self.model.whose,
            path=self.model.source.where,
            sha256=self.model.identity.sha256,
            form=self.header.form,
            max_num_seqs=self.header.max_num_seqs,
            max_model_len=self.header.max_model_len,
            cells=tuple(self.cells()),
            **served,
        )

    def sit(self, host: Host, places: Sequence[MatrixPlace]) -> None:
        """One server, for what is missing of its repetitions; of a load that failed once, nothing
        more is asked.
        """
        k, header = places[0].k, self.header
        missing = [place for place in places if place not in self.lines.lines]
        name = f"bench.{header.role}.k{k}"
        vllm, log = self.setup.vllm, self.setup.log(f"{name}.client")
        most, at_once = header.max_model_len, header.max_num_seqs
        try:
            with (
                host.serving(name, k=k, max_model_len=most, max_num_seqs=at_once) as server,
                benchmarking(vllm, server, header.form, log) as client,
            ):
                sent = {}
                for load in dict.fromkeys(place.load for place in missing):
                    items = taken(self.plan.prompts, self.plan.num_requests(load), header.seed)
                    context = load[1]
                    sent[load] = texts(items, form=header.form, context=context, server=server)
                    self.repetition(client, MatrixPlace(k, *load, -1), sent[load][: load[0]], host)
                for place in missing:
                    self.repetition(client, place, sent[place.load], host)
        except ServerFailed as failure:
            left = len(self.places) - self.num_done
            cure = (
                f"nothing is lost: the same command measures the {left} repetitions that are left"
            )
            asked = f"with k={k} for the {header.role}"
            raise ServerFailed(failure.words, failure.log, asked=asked, cure=cure) from failure

    def repetition(
        self, client: Client, place: MatrixPlace, sent: Sequence[str], host: Host
    ) -> None:
        """Measure one; number -1 is a warm-up, whose answers are short and which no file holds."""
        cell, most = (place.k, place.load), self.plan.output_tokens
        doing = f"repetition {place.number + 1} of {self.plan.repeat * self.plan.rounds}"
        if place.number < 0:
            doing, most = "warming up", min(WARM_UP_TOKENS, most)
        if cell in self.failed:
            return
        self.tell(f"k={place.k}, {words_of(place.load)}: {doing}")
        how = {"concurrency": place.concurrency, "output_tokens": most}
        try:
            found = client.measure(sent, number=max(0, place.number), **how)
        except RequestsFailed as failure:
            self.failed[cell] = failure.words
            return
        if place.number >= 0:
            k, concurrency, context, _ = place
            line = Measured(
                k=k,
                concurrency=concurrency,
                context=context,
                repetition=found,
                **_served(host),
            )
            self.lines.add(line)
            self.tell(f"k={place.k}, {words_of(place.load)}: measured")

    def tell(self, doing: str) -> None:
        """Report the progress, with the time that is left at this run's rate, server starts
        included.
        """
        done, total, eta = self.num_done, len(self.places), None
        if done > self.known:
            rate = (time.monotonic() - self.began) / (done - self.known)
            eta = rate * (total - done)
        role, unit = self.model.whose, "repetition"
        step = Step(role=role, doing=doing, done=done, total=total, eta_seconds=eta, unit=unit)
        self.watch(step)

    def cells(self) -> Iterator[BenchCell]:
        """By context, then concurrency, then k."""
        for load in self.plan.loads:
            for k in self.plan.ks:
                error, found = self.failed.get((k, load), ""), []
                for number in range(self.plan.repeat * self.plan.rounds):
                    if not error:
                        found.append(self.lines.lines[MatrixPlace(k, *load, number)].repetition)
                place = {"k": k, "concurrency": load[0], "context": load[1]}
                yield BenchCell(**place, repetitions=tuple(found), error=error)


def _served(host: Host) -> dict[str, Any]:
    served = host.served
    if host.reason:
        served["reason"] += f"; {_SPEED_OF_A_COPY}"
    return served
