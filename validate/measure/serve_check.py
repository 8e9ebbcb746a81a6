"""Runs the real server check: source and checkpoint, each served at k = 0..n, asked the same
prompts.

In: two local checkpoints and a `VLLM`. Out: a `ServeCheck`. One server at a time; each log is kept.

Easy to get wrong: vLLM's weight tracking (`enable_weights_track`) is off for quantized checkpoints,
so dead drafts load without a word. Here it is on. Some parameters that it names are filled later or
never read. A server that it refuses is started again without it: if only such parameters were
named, that is harmless; any other name is a fault, and the second start measures what it does to
acceptance.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...checkpoints.source import Source
from ...checkpoints.stored import stored_weights
from ..facts.served import Role, Run, ServeCheck, Served, counters, partings
from .harness import Host, Setup, room_for
from .prompts import PROMPTS
from .server import Server, ServerFailed, Watch

_WARM_UP_TOKENS = 32
# Parameters that no tensor writes in a good checkpoint; the first two only in a draft.
_PLACEHOLDERS = (
    (
        re.compile(r"(^|\.)embed_tokens\.weight$"),
        True,
        "the draft's embedding, which vLLM replaces by the target's",
    ),
    (
        re.compile(r"(^|\.)(lm_head|shared_head\.head)\.weight$"),
        True,
        "the draft's head, which vLLM replaces by the target's",
    ),
    (
        re.compile(r"\.w(13|2)_input_global_scale$"),
        False,
        "activation scales that weight-only NVFP4 experts never read",
    ),
)


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
    original = (
        None if source is None else serve(source, "source", setup=setup, check=check, watch=watch)
    )
    judged = serve(checkpoint, "checkpoint", setup=setup, check=check, watch=watch)
    return ServeCheck(
        checkpoint=judged,
        source=original,
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
    with Host(source, role, setup, lambda doing: watch(f"{role}, {doing}")) as host:
        runs = _runs(
            _Served(host=host, role=role, source=source, setup=setup, check=check, watch=watch)
        )
        return Served(
            role=role,
            path=source.where,
            as_served=host.as_served,
            reason=host.reason,
            dtype=_forms(source),
            num_bytes=sum(entry.num_bytes for entry in source.entries.values()),
            runs=runs,
        )


def explained(names: Iterable[str], *, is_draft: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names from weight tracking: why those are harmless that are, and the others.

    Args:
        names: runtime parameters that no tensor wrote.
        is_draft: they are a draft's, since the target alone has passed.

    Returns: explanations, each once, and the names without one.
    """
    whys, faults = [], []
    for name in names:
        for pattern, only_draft, why in _PLACEHOLDERS:
            if pattern.search(name) and (is_draft or not only_draft):
                whys.append(why)
                break
        else:
            faults.append(name)
    return tuple(dict.fromkeys(whys)), tuple(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """One checkpoint's servers."""

    host: Host
    role: Role
    source: Source
    setup: Setup
    check: Check
    watch: Watch


def _runs(served: _Served) -> tuple[Run, ...]:
    """A server for each k; weight tracking is on until it has refused one."""
    runs: list[Run] = []
    is_tracked = True
    for k in served.check.ks:
        as_served = served.host.as_served
        run, names = _attempt(served, k, is_tracked=is_tracked)
        if names:
            is_tracked = False
            whys, unwritten = explained(names, is_draft=k > 0)
            notes = [
                f"Weight tracking named {why}: harmless; started again without it." for why in whys
            ]
            if unwritten:
                notes.append(
                    "Started again without weight tracking, to measure what the unwritten "
                    "weights do."
                )
            run, _ = _attempt(served, k, is_tracked=False, suffix="-untracked")
            run = run.model_copy(update={"unwritten": unwritten, "notes": tuple(notes)})
        if runs and served.host.as_served != as_served:
            return _runs(served)  # the runs before were not of the copy
        runs.append(_against_plain(run, runs[0]) if runs else run)
        if not runs[0].loaded:
            break  # with method=mtp it would fail the same way, minutes later
    return tuple(runs)


def _against_plain(run: Run, plain: Run) -> Run:
    if not run.loaded or not run.tokens_per_second or not plain.tokens_per_second:
        return run
    compared = {
        "partings": partings(plain.outputs, run.outputs),
        "speed_up": run.tokens_per_second / plain.tokens_per_second,
    }
    return run.model_copy(update=compared)


def _attempt(
    served: _Served, k: int, *, is_tracked: bool, suffix: str = ""
) -> tuple[Run, tuple[str, ...]]:
    """One server. Returns the run, and the names that weight tracking refused it for."""
    name, check = f"{served.role}-k{k}{suffix}", served.check
    room = room_for(check.prompts, served.source, max_tokens=check.max_tokens)
    try:
        with served.host.serving(name, k=k, max_model_len=room, is_tracked=is_tracked) as server:
            return _ask(
                server, k, check, lambda doing: served.watch(f"{served.role}, k={k}: {doing}")
            ), ()
    except ServerFailed as failure:
        run = Run(k=k, loaded=False, error=failure.words, log=str(served.setup.log(name)))
        return run, failure.unwritten if is_tracked else ()


def _ask(server: Server, k: int, check: Check, tell: Watch) -> Run:
    """The first prompt once for warming up, then all of them in turn, timed; counters over the
    timed ones.
    """
    tell("warming up")
    warm_up = server.complete(
        check.prompts[0], max_tokens=min(_WARM_UP_TOKENS, check.max_tokens)
    ).token_ids
    before = server.drafts()
    outputs = []
    start = time.monotonic()
    for number, prompt in enumerate(check.prompts, 1):
        tell(f"prompt {number} of {len(check.prompts)}")
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
