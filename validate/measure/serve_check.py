"""Runs the real server check: source and checkpoint, each served at k = 0..n, asked the same
prompts.

In: two local checkpoints and a `VLLM`. Out: a `ServeCheck`. One server at a time; each log is kept.

Easy to get wrong: vLLM loads a dead draft without a word. Its acceptance tells, which is measured
here; which weight nobody wrote, the dry load finds.
"""

import time
from collections import Counter
from dataclasses import dataclass

from ...checkpoints.source import Source
from ...checkpoints.stored import stored_weights
from ..facts.served import Role, Run, ServeCheck, Served, counters, partings
from .harness import Host, Setup, hosting, room_for
from .prompts import PROMPTS
from .server import ServerFailed, Watch

_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What to ask: `ks` are speculative tokens a step, ascending, starting with 0."""

    ks: tuple[int, ...]
    prompts: tuple[str, ...] = PROMPTS
    max_tokens: int = 256


def serve_check(
    checkpoint: Source,
    source: Source | None,
    *,
    setup: Setup,
    check: Check,
    watch: Watch = lambda _: None,
) -> ServeCheck:
    """Serve both and compare.

    Args:
        checkpoint: what is judged, local.
        source: what it was made from, local; None leaves acceptance unjudged.
        setup: how to serve, and the folder for logs.
        check: what to ask.
        watch: called with a line of progress.

    Raises:
        VLLMError: no room for a BF16 copy.
        CheckpointError: a copy is needed and a weight cannot be read.
    """
    start = time.monotonic()
    original = None
    if source is not None:
        original = serve(source, "source", setup=setup, check=check, watch=watch)
    return ServeCheck(
        source=original,
        checkpoint=serve(checkpoint, "checkpoint", setup=setup, check=check, watch=watch),
        prompts=check.prompts,
        max_tokens=check.max_tokens,
        environment=setup.vllm.versions,
        seconds=time.monotonic() - start,
    )


def serve(
    source: Source, role: Role, *, setup: Setup, check: Check, watch: Watch = lambda _: None
) -> Served:
    """One checkpoint at every k: as it is, or as a BF16 copy where this CPU has no kernel for
    it.
    """
    room = room_for(check.prompts, source, max_tokens=check.max_tokens)
    with hosting(source, role, setup, lambda doing: watch(f"{role}, {doing}")) as host:
        runs: list[Run] = []
        for k in check.ks:
            name = f"{role}-k{k}"
            try:
                run = _run(host, name, k, room, check)
            except ServerFailed as failure:
                run = Run(k=k, loaded=False, error=failure.words, log=str(setup.log(name)))
            runs.append(_against_plain(run, runs[0]) if runs else run)
            if not runs[0].loaded:
                break  # with method=mtp it would fail the same way, minutes later
        return Served(
            role=role,
            path=source.where,
            dtype=_forms(source),
            num_bytes=sum(entry.num_bytes for entry in source.entries.values()),
            runs=tuple(runs),
            **host.served,
        )


def _against_plain(run: Run, plain: Run) -> Run:
    if not run.tokens_per_second or not plain.tokens_per_second:
        return run
    parted = partings(plain.outputs, run.outputs)
    speed_up = run.tokens_per_second / plain.tokens_per_second
    return run.model_copy(update={"partings": parted, "speed_up": speed_up})


def _run(host: Host, name: str, k: int, room: int, check: Check) -> Run:
    """The first prompt once for warming up, then all of them in turn, timed; counters over the
    timed ones.
    """
    with host.serving(name, k=k, max_model_len=room) as server:
        host.tell(f"k={k}: warming up")
        most = min(_WARM_UP_TOKENS, check.max_tokens)
        warm_up = server.complete(check.prompts[0], max_tokens=most).token_ids
        before, outputs, start = server.drafts(), [], time.monotonic()
        for number, prompt in enumerate(check.prompts, 1):
            host.tell(f"k={k}: prompt {number} of {len(check.prompts)}")
            outputs.append(server.complete(prompt, max_tokens=check.max_tokens))
        seconds = time.monotonic() - start
        return Run(
            k=k,
            loaded=True,
            seconds_to_health=server.seconds_to_health,
            tokens_per_second=sum(len(output.token_ids) for output in outputs) / seconds,
            **counters(server.drafts().since(before)),
            outputs=tuple(outputs),
            is_repeatable=warm_up == outputs[0].token_ids[: len(warm_up)],
            log=str(server.log),
        )


def _forms(source: Source) -> str:
    """Stored forms, largest share of bytes first; plain weights as their dtype."""
    sizes: Counter[str] = Counter()
    for weight in stored_weights(source.entries.values())[0].values():
        name = weight.weight.dtype if weight.form == "plain" else weight.scheme or weight.form
        sizes[name] += sum(entry.num_bytes for entry in weight.parts.values())
    return ", ".join(name for name, _ in sizes.most_common()) or "no weights"
