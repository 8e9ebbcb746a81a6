"""Measures a matrix: a checkpoint and its source, each with every k, under every load, several
times.

In: local checkpoints and a `Setup`. Out: a `BenchFact`, and the file of each
checkpoint's repetitions.

The order: a server for each k; with it every load once, then every load again. So a machine that
becomes slower shows in the spread of a cell.

Easy to get wrong: the same requests in the same order for every k, greedily, so that all do the
same work. vLLM's own benchmark sends them, from a process in vLLM's Python.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

from pydantic import ValidationError

from ...checkpoints.files import fresh
from ...quantize.run.child import Child
from ...recipes.errors import first_fault
from ...recipes.frozen import Json, frozen
from ..facts.benched import BenchCell, Benched, BenchFact, Repetition, RequestForm
from ..facts.served import counters
from .harness import (
    Ask,
    Failures,
    Model,
    Setup,
    Work,
    drafted_by,
    has_template,
    room_for,
)
from .server import PLUGIN, Server, ServerFailed, last_error
from .store import Measured
from .texts import Prompts, texts

# Of each answer before a load is measured: kernels are compiled and graphs captured for its number
# of requests.
WARM_UP_TOKENS = 32
_LEAST_REQUESTS = 16
_REQUESTS_A_SLOT = 4
_MAX_WORDS = 300


@frozen
class Bench:
    """The station: how to serve, whom, and what to measure.

    Attributes:
        ks: tokens drafted a step, ascending.
        concurrency: requests in flight, ascending.
        requests: for each load; 0 takes as many as the load needs.
        output_tokens: limit of an answer.
        repeat: repetitions.
        seed: of the order in which prompts are taken.
    """

    setup: Setup
    source: Model | None
    checkpoint: Model
    ks: tuple[int, ...]
    concurrency: tuple[int, ...]
    prompts: Prompts
    requests: int
    output_tokens: int
    repeat: int
    seed: int

    def works(self, model: Model) -> list[Work]:
        """What a checkpoint's matrix is asked, a server for each k."""
        return [self._work(model, k) for k in sorted({drafted_by(model, k) for k in self.ks})]

    def fact(self, failures: Failures) -> BenchFact:
        """Both matrices, once they are whole."""
        return BenchFact(
            checkpoint=self._benched(self.checkpoint),
            source=self.source and self._benched(self.source),
            prompts=self.prompts.name,
            prompts_sha256=self.prompts.sha256,
            num_prompts=len(self.prompts.items),
            output_tokens=self.output_tokens,
            seed=self.seed,
            environment=self.setup.environment,
        )

    def _benched(self, model: Model) -> Benched:
        """One checkpoint's whole matrix."""
        cells = []
        works = self.works(model)
        for concurrency, work in product(self.concurrency, works):
            lines = []
            for line in work.file.in_order():
                if line.concurrency == concurrency:
                    lines.append(line.repetition)
            cells.append(BenchCell(k=work.k, concurrency=concurrency, repetitions=tuple(lines)))
        return Benched(
            role=model.role,
            path=model.source.where,
            sha256=model.identity.sha256,
            form=self.form_of(model),
            cells=tuple(cells),
            **works[-1].file.served,
        )

    def num_requests(self, concurrency: int) -> int:
        """Of one repetition: four for each that is in flight, and sixteen at least, where the user
        names none.
        """
        return self.requests or max(_LEAST_REQUESTS, _REQUESTS_A_SLOT * concurrency)

    def _sent(self, concurrency: int, form: RequestForm) -> list[str]:
        """What a load is asked."""
        return texts(self.prompts, self.num_requests(concurrency), seed=self.seed, form=form)

    def form_of(self, model: Model) -> RequestForm:
        """Messages where the checkpoint or the user's words have a chat template, else texts."""
        if has_template(model.source, self.setup.extra):
            return "chat"
        return "completions"

    def _work(self, model: Model, k: int) -> Work:
        """One server's part of the matrix."""
        form = self.form_of(model)
        name = f"bench.{model.role}.k{k}"
        most = max(self.concurrency)
        room = room_for(
            self._sent(most, form),
            model.source,
            is_chat=form == "chat",
            max_tokens=self.output_tokens,
        )
        file = self.setup.answers(
            name,
            Measured,
            model,
            k=k,
            form=form,
            prompts_sha256=self.prompts.sha256,
            requests=self.requests,
            output_tokens=self.output_tokens,
            seed=self.seed,
            max_num_seqs=most,
            max_model_len=room,
        )
        # All loads once before any again: a machine that becomes slower shows in each one's spread.
        file.wanted = []
        for number, concurrency in product(range(self.repeat), self.concurrency):
            file.wanted.append((concurrency, number))

        @contextmanager
        def asking(server: Server) -> Iterator[Ask]:
            log = self.setup.log(f"{name}.client")
            warm = set[int]()

            def measured(place: tuple[int, int], sent: Sequence[str], most: int) -> Measured:
                load, number = place
                before = server.drafts()
                found = answered(
                    {
                        "texts": sent,
                        "is_chat": form == "chat",
                        "output_tokens": most,
                        "concurrency": load,
                        "address": str(server.client.base_url),
                        "model": server.name,
                    }
                )
                drafted = counters(server.drafts(before))  # a server that died says so here
                if found is None:
                    raise ServerFailed(last_error(log, None), log)
                failed = len(sent) - found["completed"]
                if failed:
                    # vLLM's benchmark counts a failed request and goes on, and its figures are then
                    # those of a smaller load.
                    said = next(filter(None, found["errors"]), "no reason given")
                    words = said.strip().splitlines()[-1][:_MAX_WORDS]
                    raise ServerFailed(f"{failed} of {len(sent)} requests failed: {words}", log)
                try:
                    repetition = Repetition(
                        number=number,
                        seconds=found["duration"],
                        requests=found["completed"],
                        input_tokens=found["total_input_tokens"],
                        output_tokens=found["total_output_tokens"],
                        first_token_ms=found["median_ttft_ms"],
                        per_token_ms=found["median_tpot_ms"],
                        **drafted,
                    )
                except ValidationError as error:
                    words = f"figures that nobody could have measured ({first_fault(error)})"
                    raise ServerFailed(words, log) from error
                return Measured(concurrency=load, repetition=repetition)

            def ask(place: tuple[int, int]) -> Measured:
                """A warm-up, once a load, whose answers are short and which no file holds; then the
                repetition.
                """
                load = place[0]
                sent = self._sent(load, form)
                if load not in warm:
                    warm.add(load)
                    measured(place, sent[:load], min(WARM_UP_TOKENS, self.output_tokens))
                return measured(place, sent, self.output_tokens)

            with _client(self.setup, server, log) as answered:
                yield ask

        return Work(
            name=name,
            model=model,
            file=file,
            asking=asking,
            k=k,
            max_model_len=room,
            max_num_seqs=most,
            unit="repetition",
            task="speed",
        )


@contextmanager
def _client(setup: Setup, server: Server, log: Path) -> Iterator[Callable[[Json], Json | None]]:
    """vLLM's benchmark in a process of its own: from what is asked to what it found; None where it
    has ended.
    """
    variables = {**server.environment, "NO_PROXY": "*", "no_proxy": "*"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    words = [setup.vllm.python, PLUGIN / "keepmtp_bench.py"]
    with (
        open(fresh(log), "xb") as printed,
        Child(words, environment=variables, stderr=printed, **pipes) as child,
    ):
        given = child.process.stdin
        said = child.process.stdout
        assert given and said

        def answered(asked: Json) -> Json | None:
            with suppress(BrokenPipeError):  # the next line is empty then
                given.write(json.dumps(asked) + "\n")
                given.flush()
            return json.loads(said.readline() or "null")

        yield answered
