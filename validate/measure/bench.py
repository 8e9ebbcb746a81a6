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
from typing import Any

from ...checkpoints.files import held
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ..facts.benched import BenchCell, Benched, BenchFact, Repetition, RequestForm, words_of
from ..facts.served import Role
from .bench_client import Client, RequestsFailed, benchmarking
from .bench_lines import BenchHeader, Lines, MatrixPlace, Measured
from .bench_prompts import Prompts, Request, num_requests, request, requests, taken
from .harness import (
    CHAT_TOKENS,
    TURN_TOKENS,
    Host,
    Model,
    Setup,
    has_template,
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
_SPEED_OF_A_COPY = "the speed of the copy is not the checkpoint's"

Load = tuple[int, int]
"""Requests in flight, and context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchStep:
    """How far one checkpoint is.

    Attributes:
        role: which one.
        doing: what is going on.
        there, left: repetitions.
        eta_seconds: at this run's rate, with its server starts; None where there is none yet.
    """

    role: Role
    doing: str
    there: int
    left: int
    eta_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every load, by context."""
        return tuple(
            (concurrency, context) for context in self.contexts for concurrency in self.concurrency
        )

    @property
    def places(self) -> tuple[MatrixPlace, ...]:
        """Every repetition of the matrix, in the order of the run."""
        found = []
        for turn in range(self.rounds):
            for k in self.ks if turn % 2 == 0 else reversed(self.ks):
                for number in range(turn * self.repeat, (turn + 1) * self.repeat):
                    found += [MatrixPlace(k, *load, number) for load in self.loads]
        return tuple(found)

    def num_requests(self, load: Load) -> int:
        """Of one repetition."""
        return num_requests(load[0], self.requests)

    def max_model_len(self, source: Source, form: RequestForm) -> int:
        """Tokens of the longest prompt and its answer, at most."""
        items = taken(self.prompts, max(map(self.num_requests, self.loads)), self.seed)
        sent = [request(item, form) for item in items]
        prompts = [each["text"] if "text" in each else each["messages"] for each in sent]
        if longest := max(self.contexts):  # brought to a length, each is one message
            prompts.append("x" * (longest + CHAT_TOKENS + TURN_TOKENS))
        return room_for(prompts, source, max_tokens=self.output_tokens)


Watch = Callable[[BenchStep], None]


def form_of(source: Source, words: Sequence[str]) -> RequestForm:
    """Messages where the checkpoint or the user's words have a chat template; else texts."""
    return "chat" if has_template(source, words) else "completions"


def refuse_model(source: Source, plan: BenchPlan, extra: Sequence[str]) -> None:
    """Refuse before anything is read at length or started.

    Raises:
        RecipeError: a k that the MTP block cannot draft, a conversation without a template, or a
            context beyond what the model was made for.
    """
    for k in plan.ks:
        refuse_drafts(source, k, where="--k", without="Use --k 0", use="Use --k 0,")
    if plan.prompts.needs_template and form_of(source, extra) != "chat":
        rule, cure = (
            "conversations need a chat template",
            "Name prompts of one message, or add -- --chat-template FILE",
        )
        raise RecipeError(source.where, rule, got="none beside the weights", cure=cure)
    most = most_tokens(source)
    asked = max(plan.contexts) + plan.output_tokens
    if most is not None and asked > most:
        rule = f"context and answer must fit max_position_embeddings, {most:,}"
        got = f"{max(plan.contexts):,} and {plan.output_tokens:,}"
        raise RecipeError(
            "--context",
            rule,
            got=got,
            cure=f"Use --context {max(1, most - plan.output_tokens)} or less",
        )


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
        found = [
            _Matrix(model, plan, setup, watch).benched() for model in (source, checkpoint) if model
        ]
    return BenchFact(
        checkpoint=found[-1],
        source=found[0] if source is not None else None,
        prompts=plan.prompts.name,
        prompts_sha256=plan.prompts.sha256,
        num_prompts=len(plan.prompts.items),
        output_tokens=plan.output_tokens,
        rounds=plan.rounds,
        seed=plan.seed,
        environment=setup.environment,
    )


class _Matrix:
    """One checkpoint's part: what is there, what is missing, and what failed."""

    def __init__(self, model: Model, plan: BenchPlan, setup: Setup, watch: Watch) -> None:
        self.model, self.plan, self.setup, self.watch = model, plan, setup, watch
        self.role: Role = model.whose
        self.form: RequestForm = form_of(model.source, setup.extra)
        self.settings: dict[str, Any] = {
            "max_num_seqs": max(plan.concurrency),
            "max_model_len": plan.max_model_len(model.source, self.form),
        }
        header = BenchHeader(
            role=self.role,
            checkpoint_sha256=model.identity.sha256,
            form=self.form,
            prompts_sha256=plan.prompts.sha256,
            requests=plan.requests,
            output_tokens=plan.output_tokens,
            seed=plan.seed,
            **self.settings,
            **setup.answered_by,
        )
        self.lines: Lines = open_lines(setup.out / f"bench.{self.role}.jsonl", header, setup.say)
        self.failed: dict[tuple[int, Load], str] = {}
        self.asked: dict[Load, list[Request]] = {}
        self.began, self.known = time.monotonic(), len(self._there())

    def benched(self) -> Benched:
        """The whole matrix; servers are started only for what is missing."""
        served: dict[str, Any] = {"as_served": "native", "reason": ""}
        if self._missing():
            with Host(self.model.source, self.role, self.setup, self._tell) as host:
                while missing := self._missing():
                    self._sit(host, missing)
                served = _as_served(host)
        if there := self._there():
            last = self.lines.lines[there[-1]]
            served = {"as_served": last.as_served, "reason": last.reason}
        return Benched(
            role=self.role,
            path=self.model.source.where,
            sha256=self.model.identity.sha256,
            form=self.form,
            cells=tuple(self._cells()),
            **self.settings,
            **served,
        )

    def _there(self) -> list[MatrixPlace]:
        return [place for place in self.plan.places if place in self.lines.lines]

    def _missing(self) -> list[MatrixPlace]:
        """What is to be measured, in the order of the run."""
        there = self.lines.lines
        return [
            place
            for place in self.plan.places
            if place not in there and place.cell not in self.failed
        ]

    def _sit(self, host: Host, missing: Sequence[MatrixPlace]) -> None:
        """One server, for all that is missing of its k in its round."""
        k, turn = missing[0].k, missing[0].number // self.plan.repeat
        places = [
            place for place in missing if (place.k, place.number // self.plan.repeat) == (k, turn)
        ]
        name = f"bench.{self.role}.k{k}"
        try:
            with (
                host.serving(name, k=k, **self.settings) as server,
                benchmarking(
                    self.setup.vllm, server, self.form, self.setup.log(f"{name}.client")
                ) as client,
            ):
                for load in dict.fromkeys(place.load for place in places):
                    self._repetition(client, MatrixPlace(k, *load, 0), is_warm_up=True)
                for place in places:
                    found = (
                        self._repetition(client, place) if place.cell not in self.failed else None
                    )
                    if found is not None:
                        where = {"k": k, "concurrency": place.concurrency, "context": place.context}
                        self.lines.add(Measured(**where, **_as_served(host), repetition=found))
                        self._tell(f"k={k}, {words_of(place.load)}: measured")
        except ServerFailed as failure:
            cure = (
                f"nothing is lost: the same command measures the {len(self._missing())} "
                "repetitions that are left"
            )
            asked = f"with k={k} for the {self.role}"
            raise ServerFailed(failure.words, failure.log, asked=asked, cure=cure) from failure

    def _repetition(
        self, client: Client, place: MatrixPlace, *, is_warm_up: bool = False
    ) -> Repetition | None:
        """None where a request failed: the cell then has no figure, and is not measured again by
        this run.

        A warm-up has as many requests as are in flight, and short answers.
        """
        load, most = place.load, self.plan.output_tokens
        if load not in self.asked:
            items = taken(self.plan.prompts, self.plan.num_requests(load), self.plan.seed)
            self.asked[load] = requests(
                items, form=self.form, context=place.context, server=client.server
            )
        sent = self.asked[load]
        doing = f"repetition {place.number + 1} of {self.plan.repeat * self.plan.rounds}"
        if is_warm_up:
            sent, most, doing = sent[: place.concurrency], min(WARM_UP_TOKENS, most), "warming up"

        def tell(_: str = "") -> None:
            self._tell(f"k={place.k}, {words_of(load)}: {doing}")

        tell()
        try:
            return client.measure(
                sent,
                number=place.number,
                concurrency=place.concurrency,
                output_tokens=most,
                watch=tell,
            )
        except RequestsFailed as failure:
            self.failed[place.cell] = failure.words
            return None

    def _tell(self, doing: str) -> None:
        there = len(self._there())
        new, left = there - self.known, len(self.plan.places) - there
        eta = (time.monotonic() - self.began) / new * left if new else None
        self.watch(BenchStep(role=self.role, doing=doing, there=there, left=left, eta_seconds=eta))

    def _cells(self) -> Iterator[BenchCell]:
        for load in self.plan.loads:
            for k in self.plan.ks:
                error = self.failed.get((k, load), "")
                places = [
                    MatrixPlace(k, *load, number)
                    for number in range(self.plan.repeat * self.plan.rounds)
                ]
                done = (
                    () if error else tuple(self.lines.lines[place].repetition for place in places)
                )
                yield BenchCell(
                    k=k, concurrency=load[0], context=load[1], repetitions=done, error=error
                )


def _as_served(host: Host) -> dict[str, Any]:
    reason = f"{host.reason}; {_SPEED_OF_A_COPY}" if host.reason else ""
    return {"as_served": host.as_served, "reason": reason}
