"""Runs the real server check: source and checkpoint, each served at k = 0..n, asked the same
prompts one at a time.

In: two local checkpoints and a `VLLM`. Out: a `ServeCheck`, and a file of outputs for each server.

Easy to get wrong: vLLM loads a dead draft without a word. Its acceptance tells, which is measured
here; which weight nobody wrote, the dry load finds.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ...checkpoints.safetensors_file import total_bytes
from ...checkpoints.stored import stored_weights
from ...recipes.frozen import Json, frozen
from ..facts.served import Output, Run, ServeCheck, Served, counters, partings, total
from . import figures, probe
from .harness import Ask, Model, Setup, Work, drafted_by, hosting, room_for
from .server import Server, ServerFailed
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


def serve_check(
    checkpoint: Model,
    source: Model | None,
    *,
    setup: Setup,
    check: Check,
) -> ServeCheck:
    """Serve both and compare.

    Args:
        checkpoint: what is judged.
        source: what it was made from; None leaves acceptance unjudged.
        setup: how to serve, and where to write.
        check: what to ask.

    Raises:
        RecipeError: another run is at work there, or no room for a BF16 copy.
        CheckpointError: outputs that cannot be read, or weights that cannot be copied.
    """
    start = time.monotonic()
    original = None
    target = None
    if checkpoint.target:
        target = checkpoint.target.as_target
    with setup.alone():
        if source is not None:
            original = serve(source, setup=setup, check=check)
        served = serve(checkpoint, setup=setup, check=check)
    return ServeCheck(
        source=original,
        checkpoint=served,
        prompts=check.prompts,
        max_tokens=check.max_tokens,
        environment=setup.environment,
        seconds=time.monotonic() - start,
        target=target,
    )


def serve(model: Model, *, setup: Setup, check: Check) -> Served:
    """One checkpoint at every k: as it is, or as a BF16 copy where this CPU has no kernel for
    it.
    """
    ks = sorted({drafted_by(model, k) for k in check.ks})
    works = [_work(model, k, setup, check) for k in ks]
    ends = sorted({ks[0], ks[-1]})
    probes = [_work(model, k, setup, check, depth) for k in ends for depth in check.depths]
    missing = [work for work in (*works, *probes) if work.file.missing]
    errors = {}
    how = Json()
    if missing:
        with hosting(model, setup) as host:
            how = Json(as_served=host.as_served, reason=host.reason)
            for k in sorted({work.k for work in missing}):
                try:
                    host.answer(*[work for work in missing if work.k == k])
                except ServerFailed as failure:
                    errors[k] = failure.words
                    if not k:
                        break  # with method=mtp it would fail the same way, minutes later
    runs = list[Run]()
    for work in works:
        log = str(setup.log(work.name))
        if work.k in errors:
            runs.append(Run(k=work.k, loaded=False, error=errors[work.k], log=log))
        elif 0 not in errors:
            probed = tuple([probe.counted(each.file) for each in probes if each.k == work.k])
            run = _run(work.file, work.k, log, runs[:1])
            runs.append(run.model_copy(update={"probed": probed}))
            how = figures.served(work.file)
    entries = model.source.entries.values()
    sizes = Counter[str]()
    for weight in stored_weights(entries)[0].values():
        form = weight.scheme or weight.form
        if form == "plain":
            form = weight.weight.dtype
        sizes[form] += total_bytes(weight.parts.values())
    return Served(
        role=model.whose,
        path=model.source.where,
        dtype=", ".join([form for form, _ in sizes.most_common()]) or "no weights",
        num_bytes=total_bytes(entries),
        runs=tuple(runs),
        **how,
    )


def _work(model: Model, k: int, setup: Setup, check: Check, depth: int | None = None) -> Work:
    """The prompts for one server; or with a depth the probe."""
    if depth is not None:
        most = min(check.max_tokens, probe.MAX_TOKENS)
        check = replace(check, prompts=(*probe.PROMPTS.values(),), max_tokens=most)
    header = ContinuationHeader(
        k=k,
        prompts=check.prompts,
        max_tokens=check.max_tokens,
        num=len(check.prompts),
        **setup.asked_of(model),
    )
    name = f"serve.{model.role}.k{k}"
    if depth is not None:
        name = f"probe.{model.role}.k{k}.{depth}"
        header = ProbeHeader(depth=depth, other_sha256=probe.OTHER.sha256, **dict(header))
    warm = list[Output]()
    file = open_lines(setup.out, name, header)

    @contextmanager
    def asking(server: Server) -> Iterator[Ask]:
        """The first prompt once for warming up, then each of them, timed."""
        most = min(_WARM_UP_TOKENS, check.max_tokens)
        before = probe.text_before(server, depth or 0)
        warm.append(server.complete(before + check.prompts[0], max_tokens=most))

        def ask(prompt: int) -> Continuation:
            start = time.monotonic()
            output = server.complete(before + check.prompts[prompt], max_tokens=check.max_tokens)
            seconds = time.monotonic() - start
            if depth is not None:
                output = probe.joined(server, output)
            return Continuation(prompt=prompt, seconds=seconds, **dict(output))

        yield ask

    def repeated() -> float:
        tokens = warm[0].token_ids
        return float(tokens != file.lines[0].token_ids[: len(tokens)])

    return Work(
        name=name,
        file=file,
        asking=asking,
        k=k,
        max_model_len=(depth or 0)
        + room_for(check.prompts, model.source, is_chat=False, max_tokens=check.max_tokens),
        concurrency=1 if depth is None else 4,
        max_num_seqs=4,
        repeated=repeated,
        unit="prompt",
        task=f"k={k}" if depth is None else f"k={k}, the probe at depth {depth:,}",
    )


def _run(
    file: LineFile[ContinuationHeader, Continuation], k: int, log: str, before: list[Run]
) -> Run:
    """What one server's file says, against the run without drafting."""
    sittings = list(file.sittings.values())
    lines = file.in_order()
    outputs = tuple([Output(**line.model_dump(include=_OUTPUT)) for line in lines])
    rate = sum([line.num_tokens for line in lines]) / sum([line.seconds for line in lines])
    against = {}
    if before and before[0].tokens_per_second:
        speed_up = rate / before[0].tokens_per_second
        against = {"partings": partings(before[0].outputs, outputs), "speed_up": speed_up}
    return Run(
        k=k,
        loaded=True,
        seconds_to_health=sittings[-1].seconds_to_health,
        tokens_per_second=rate,
        outputs=outputs,
        is_repeatable=not any(sitting.repeated for sitting in sittings),
        log=log,
        **counters(total(sittings)),
        **against,
    )
