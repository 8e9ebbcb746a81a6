"""The station acceptance: source and checkpoint, each served at several k, asked the same prompts
one at a time.

In: two local checkpoints and a `Setup`. Out: a `ServeCheck`, and a file of outputs for each server.

Easy to get wrong: vLLM loads a dead draft without a word. Its acceptance tells, which is measured
here; which weight nobody wrote, the dry load finds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, groupby
from operator import attrgetter

from ...recipes.frozen import frozen
from ..facts.served import Output, Run, ServeCheck, Served, partings, those
from . import lossless
from .harness import Ask, Failures, Model, Setup, Work, as_hosted, drafted_by, room_for
from .server import Server
from .store import Continuation, ContinuationHeader, LineFile, ProbeHeader, open_lines

_WARM_UP_TOKENS = 32
_OUTPUT = {*Output.model_fields}


@frozen
class AcceptanceStation:
    """The station: how to serve, whom, and what to ask.

    Attributes:
        setup, source, checkpoint: how to serve, and what.
        ks: tokens drafted a step, ascending, starting with 0.
        prompts, max_tokens: what is asked, and the limit of an answer.
        depths: those of the probe, which is asked with the first and the last k.
    """

    setup: Setup
    source: Model | None
    checkpoint: Model
    ks: tuple[int, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    depths: tuple[int, ...] = ()

    def works(self, model: Model) -> list[Work]:
        """What a checkpoint is still to be asked: at every k the prompts, at the first and the last
        the probe.

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
        for k, works in groupby(self._all(model), key=attrgetter("k")):
            prompts, *probes = works
            log = str(self.setup.log(prompts.name))
            failure = failures.get((model.whose, k))
            if failure and any(work.file.missing for work in (prompts, *probes)):
                runs.append(Run(k=k, loaded=False, error=failure.words, log=log))
                if not k:
                    break
                continue
            run = _run(prompts.file, k, log, runs[:1])
            probed = tuple([lossless.counted(each.file) for each in probes])
            runs.append(run.model_copy(update={"probed": probed}))
            how = prompts.file.served
        return Served(
            role=model.whose,
            path=model.source.where,
            runs=tuple(runs),
            **how,
        )

    def _all(self, model: Model) -> list[Work]:
        """For each k the prompts, then the probe."""
        ks = sorted({drafted_by(model, k) for k in self.ks})
        works = []
        for k in ks:
            works.append(self._prompts(model, k))
            if k in (ks[0], ks[-1]):
                works += [self._probe(model, k, depth) for depth in self.depths]
        return works

    def _prompts(self, model: Model, k: int) -> Work:
        header = ContinuationHeader(
            k=k,
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            num=len(self.prompts),
            **self.setup.asked_of(model),
        )
        return _work(self.setup, model, f"serve.{model.role}.k{k}", header)

    def _probe(self, model: Model, k: int, depth: int) -> Work:
        header = ProbeHeader(
            k=k,
            prompts=(*lossless.PROMPTS.values(),),
            max_tokens=min(self.max_tokens, lossless.MAX_TOKENS),
            num=len(lossless.PROMPTS),
            depth=depth,
            other_sha256=lossless.OTHER.sha256,
            **self.setup.asked_of(model),
        )
        work = _work(self.setup, model, f"lossless.{model.role}.k{k}.{depth}", header, depth)
        return replace(work, concurrency=4, task=f"the probe at depth {depth:,}")


def _work(
    setup: Setup, model: Model, name: str, header: ContinuationHeader, depth: int = 0
) -> Work:
    """Prompts for one server, after so many tokens of other text."""
    is_probe = isinstance(header, ProbeHeader)

    @contextmanager
    def asking(server: Server) -> Iterator[Ask]:
        """The first prompt once for warming up, then each of them, timed."""
        before = lossless.text_before(server, depth)
        most = min(_WARM_UP_TOKENS, header.max_tokens)
        server.complete(before + header.prompts[0], max_tokens=most)

        def ask(prompt: int) -> Continuation:
            text = before + header.prompts[prompt]
            start = time.monotonic()
            output = server.complete(text, max_tokens=header.max_tokens)
            seconds = time.monotonic() - start
            if is_probe:
                output = lossless.joined(server, output)
            return Continuation(prompt=prompt, seconds=seconds, **dict(output))

        yield ask

    room = room_for(header.prompts, model.source, is_chat=False, max_tokens=header.max_tokens)
    return Work(
        name=name,
        model=model,
        file=open_lines(setup.out, name, header),
        asking=asking,
        k=header.k,
        max_model_len=depth + room,
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
