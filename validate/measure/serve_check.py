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
from ..facts.served import Output, Run, ServeCheck, Served, counters, partings, those, total
from . import figures, lossless
from .harness import Ask, Failures, Model, Setup, Work, as_hosted, drafted_by, room_for
from .server import Server
from .store import Continuation, ContinuationHeader, LineFile, ProbeHeader, open_lines

_WARM_UP_TOKENS = 32
_OUTPUT = {*Output.model_fields}


@frozen
class Check:
    """What to ask: `ks` are speculative tokens a step, ascending, starting with 0; `depths` those
    of the probe, which is asked with the first and the last k.
    """

    ks: tuple[int, ...]
    prompts: tuple[str, ...]
    max_tokens: int
    depths: tuple[int, ...] = ()


@frozen
class AcceptanceStation:
    """The station: how to serve, whom, and what to ask."""

    setup: Setup
    source: Model | None
    checkpoint: Model
    check: Check

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
        sittings = chain.from_iterable(work.file.sittings.values() for work in works)
        target = self.checkpoint.target
        return ServeCheck(
            source=self.source and self.served(self.source, failures),
            checkpoint=self.served(self.checkpoint, failures),
            prompts=self.check.prompts,
            max_tokens=self.check.max_tokens,
            environment=self.setup.environment,
            seconds=sum(sitting.seconds for sitting in sittings),
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
            how = figures.served(prompts.file)
        return Served(
            role=model.whose,
            path=model.source.where,
            runs=tuple(runs),
            **how,
        )

    def _all(self, model: Model) -> list[Work]:
        """For each k the prompts, then the probe."""
        ks = sorted({drafted_by(model, k) for k in self.check.ks})
        works = []
        for k in ks:
            works.append(_work(model, k, self.setup, self.check))
            if k in (ks[0], ks[-1]):
                for depth in self.check.depths:
                    works.append(_work(model, k, self.setup, self.check, depth))
        return works


def _work(model: Model, k: int, setup: Setup, check: Check, depth: int | None = None) -> Work:
    """The prompts for one server; or with a depth the probe."""
    if depth is not None:
        most = min(check.max_tokens, lossless.MAX_TOKENS)
        check = replace(check, prompts=(*lossless.PROMPTS.values(),), max_tokens=most)
    header = ContinuationHeader(
        k=k,
        prompts=check.prompts,
        max_tokens=check.max_tokens,
        num=len(check.prompts),
        **setup.asked_of(model),
    )
    name = f"serve.{model.role}.k{k}"
    if depth is not None:
        name = f"lossless.{model.role}.k{k}.{depth}"
        header = ProbeHeader(depth=depth, other_sha256=lossless.OTHER.sha256, **dict(header))
    file = open_lines(setup.out, name, header)

    @contextmanager
    def asking(server: Server) -> Iterator[Ask]:
        """The first prompt once for warming up, then each of them, timed."""
        most = min(_WARM_UP_TOKENS, check.max_tokens)
        before = lossless.text_before(server, depth or 0)
        server.complete(before + check.prompts[0], max_tokens=most)

        def ask(prompt: int) -> Continuation:
            start = time.monotonic()
            output = server.complete(before + check.prompts[prompt], max_tokens=check.max_tokens)
            seconds = time.monotonic() - start
            if depth is not None:
                output = lossless.joined(server, output)
            return Continuation(prompt=prompt, seconds=seconds, **dict(output))

        yield ask

    return Work(
        name=name,
        model=model,
        file=file,
        asking=asking,
        k=k,
        max_model_len=(depth or 0)
        + room_for(check.prompts, model.source, is_chat=False, max_tokens=check.max_tokens),
        concurrency=1 if depth is None else 4,
        max_num_seqs=4,
        may_fail=True,
        unit="prompt",
        task="acceptance" if depth is None else f"the probe at depth {depth:,}",
    )


def _run(
    file: LineFile[ContinuationHeader, Continuation], k: int, log: str, before: list[Run]
) -> Run:
    """What one server's file says, against the run without drafting."""
    sittings = list(file.sittings.values())
    lines = file.in_order()
    outputs = tuple([Output(**line.model_dump(include=_OUTPUT)) for line in lines])
    rate = sum([line.num_tokens for line in lines]) / sum([line.seconds for line in lines])
    parted = None
    if before and before[0].loaded:
        parted = partings(before[0].outputs, outputs)
    return Run(
        k=k,
        loaded=True,
        seconds_to_health=sittings[-1].seconds_to_health,
        tokens_per_second=rate,
        outputs=outputs,
        log=log,
        partings=parted,
        **counters(total(sittings)),
    )
