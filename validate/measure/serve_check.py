"""The station acceptance: source and checkpoint, each served at several k, asked the same prompts
one at a time.

In: two local checkpoints and a `Setup`. Out: a `ServeCheck`, and a file of outputs for each server.

Easy to get wrong: vLLM loads a dead draft without a word. Its acceptance tells, which is measured
here; which weight nobody wrote, the dry load finds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from ...recipes.frozen import frozen
from ..facts.served import Output, Run, ServeCheck, Served, partings, those
from .harness import Ask, Failures, Model, Setup, Work, as_hosted, drafted_by, room_for
from .server import Server
from .store import Continuation, ContinuationHeader, LineFile, open_lines

_WARM_UP_TOKENS = 32
_OUTPUT = {*Output.model_fields}


@frozen
class AcceptanceStation:
    """The station: how to serve, whom, and what to ask.

    Attributes:
        setup, source, checkpoint: how to serve, and what.
        ks: tokens drafted a step, ascending, starting with 0.
        prompts, max_tokens: what is asked, and the limit of an answer.
    """

    setup: Setup
    source: Model | None
    checkpoint: Model
    ks: tuple[int, ...]
    prompts: tuple[str, ...]
    max_tokens: int

    def works(self, model: Model) -> list[Work]:
        """What a checkpoint is still to be asked, at every k.

        Raises:
            CheckpointError: outputs that cannot be read.
        """
        return [work for work in self._all(model) if work.file.missing]

    def fact(self, failures: Failures) -> ServeCheck:
        """What both answered, or how their servers failed; without a source acceptance stays
        unjudged.
        """
        models = those(self.source, self.checkpoint)
        works = chain.from_iterable(map(self._all, models))
        target = self.checkpoint.target
        return ServeCheck(
            source=self.source and self.served(self.source, failures),
            checkpoint=self.served(self.checkpoint, failures),
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            environment=self.setup.environment,
            seconds=sum([work.file.seconds for work in works]),
            target=target and target.as_target,
        )

    def served(self, model: Model, failures: Failures) -> Served:
        """One checkpoint at every k that was tried."""
        how = as_hosted(model, self.setup)
        runs = list[Run]()
        for work in self._all(model):
            log = str(self.setup.log(work.name))
            failure = failures.get((model.role, work.k))
            if failure and work.file.missing:
                runs.append(Run(k=work.k, loaded=False, error=failure.words, log=log))
                if not work.k:
                    break
                continue
            runs.append(_run(work.file, work.k, log, runs[:1]))
            how = work.file.served
        return Served(
            role=model.role,
            path=model.source.where,
            runs=tuple(runs),
            **how,
        )

    def _all(self, model: Model) -> list[Work]:
        """One for each k."""
        return [self._work(model, k) for k in sorted({drafted_by(model, k) for k in self.ks})]

    def _work(self, model: Model, k: int) -> Work:
        """The prompts, for one server."""
        name = f"serve.{model.role}.k{k}"
        header = ContinuationHeader(
            k=k,
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            num=len(self.prompts),
            **self.setup.asked_of(model),
        )

        @contextmanager
        def asking(server: Server) -> Iterator[Ask]:
            """The first prompt once for warming up, then each of them, timed."""
            server.complete(self.prompts[0], max_tokens=min(_WARM_UP_TOKENS, self.max_tokens))

            def ask(prompt: int) -> Continuation:
                start = time.monotonic()
                output = server.complete(self.prompts[prompt], max_tokens=self.max_tokens)
                seconds = time.monotonic() - start
                return Continuation(prompt=prompt, seconds=seconds, **dict(output))

            yield ask

        room = room_for(self.prompts, model.source, is_chat=False, max_tokens=self.max_tokens)
        return Work(
            name=name,
            model=model,
            file=open_lines(self.setup.out, name, header),
            asking=asking,
            k=k,
            max_model_len=room,
            max_num_seqs=4,
            may_fail=True,
            unit="prompt",
            task="acceptance",
        )


def _run(
    file: LineFile[ContinuationHeader, Continuation], k: int, log: str, before: list[Run]
) -> Run:
    """What one server's file says, against the run without drafting."""
    lines = file.in_order()
    outputs = tuple([Output(**line.model_dump(include=_OUTPUT)) for line in lines])
    rate = sum([line.num_tokens for line in lines]) / sum([line.seconds for line in lines])
    parted = None
    if before and before[0].loaded:
        parted = partings(before[0].outputs, outputs)
    return Run(
        k=k,
        loaded=True,
        seconds_to_health=[*file.sittings.values()][-1].seconds_to_health,
        tokens_per_second=rate,
        outputs=outputs,
        log=log,
        partings=parted,
        **file.counts,
    )
