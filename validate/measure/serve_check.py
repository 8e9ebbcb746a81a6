"""Runs the real server check: source and checkpoint, each served at k = 0..n, asked the same prompts.

In: two local checkpoints and a `VLLM`. Out: a `ServeCheck`. One server at a time; each log is kept.

Easy to get wrong: vLLM's weight tracking (`enable_weights_track`) is off for quantized checkpoints, so dead drafts load
without a word. Here it is on. Some parameters that it names are filled later or never read. A server that it refuses is
started again without it: if only such parameters were named, that is harmless; any other name is a fault, and the
second start measures what it does to acceptance.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ...checkpoints.source import Source
from ...checkpoints.stored import stored_weights
from ..facts.served import AsServed, Role, Run, ServeCheck, Served, counters, partings
from .harness import Setup, lack_of_kernel, served
from .prompts import PROMPTS
from .server import Server, ServerFailed, Watch, serving

_WARM_UP_TOKENS = 32
# Parameters that no tensor writes in a good checkpoint; the first two only in a draft.
_PLACEHOLDERS = (
    (re.compile(r"(^|\.)embed_tokens\.weight$"), True, "the draft's embedding, which vLLM replaces by the target's"),
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

    @property
    def max_model_len(self) -> int:
        """Room for the longest prompt: a token has at least one byte."""
        return max(len(prompt.encode()) for prompt in self.prompts) + self.max_tokens + 16


def serve_check(
    checkpoint: Source, source: Source | None, *, setup: Setup, check: Check, watch: Watch = lambda _: None
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
    original = None if source is None else serve(source, "source", setup=setup, check=check, watch=watch)
    judged = serve(checkpoint, "checkpoint", setup=setup, check=check, watch=watch)
    return ServeCheck(
        checkpoint=judged,
        source=original,
        prompts=check.prompts,
        max_tokens=check.max_tokens,
        environment=setup.vllm.versions,
        seconds=time.monotonic() - start,
    )


def serve(source: Source, role: Role, *, setup: Setup, check: Check, watch: Watch = lambda _: None) -> Served:
    """One checkpoint at every k: as it is, or as a BF16 copy where this CPU has no kernel for it."""

    def use(folder: Path, as_served: AsServed, reason: str) -> Served:
        runs = _Runs(folder, role, setup, check, watch).all()
        failed = next((run for run in runs if not run.loaded), None)
        if failed and as_served == "native" and lack_of_kernel(setup.vllm, failed.error):
            raise ServerFailed(failed.error, Path(failed.log))
        return Served(
            role=role,
            path=source.where,
            as_served=as_served,
            reason=reason,
            dtype=_forms(source),
            num_bytes=sum(entry.num_bytes for entry in source.entries.values()),
            runs=runs,
        )

    return served(source, role, setup, use, watch)


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


class _Runs:
    """The servers of one folder, one after the other; `is_tracked` until weight tracking has refused one."""

    def __init__(self, folder: Path, role: Role, setup: Setup, check: Check, watch: Watch) -> None:
        self.folder, self.role, self.setup, self.check, self.watch = folder, role, setup, check, watch
        self.is_tracked = True

    def all(self) -> tuple[Run, ...]:
        """Every k in turn; what needs the outputs of k=0 is filled in after it."""
        runs: list[Run] = []
        for k in self.check.ks:
            run = self._run(k)
            plain = runs[0] if runs and runs[0].k == 0 else None
            if run.loaded and plain is not None and plain.loaded:
                assert run.tokens_per_second and plain.tokens_per_second
                compared = {
                    "partings": partings(plain.outputs, run.outputs),
                    "speed_up": run.tokens_per_second / plain.tokens_per_second,
                }
                run = run.model_copy(update=compared)
            runs.append(run)
            if k == 0 and not run.loaded:
                break  # with method=mtp it would fail the same way, minutes later
        return tuple(runs)

    def _run(self, k: int) -> Run:
        """One k, started a second time where only weight tracking refuses it."""
        run, names = self._attempt(k, f"{self.role}-k{k}")
        if not names:
            return run
        self.is_tracked = False
        whys, unwritten = explained(names, is_draft=k > 0)
        notes = [f"Weight tracking named {why}: harmless; started again without it." for why in whys]
        if unwritten:
            notes.append("Started again without weight tracking, to measure what the unwritten weights do.")
        run, _ = self._attempt(k, f"{self.role}-k{k}-untracked")
        return run.model_copy(update={"unwritten": unwritten, "notes": tuple(notes)})

    def _attempt(self, k: int, name: str) -> tuple[Run, tuple[str, ...]]:
        """One server. Returns the run, and the names that weight tracking refused it for."""
        log = self.setup.log(name)

        def tell(words: str) -> None:
            self.watch(f"{self.role}, k={k}: {words}")

        try:
            with serving(
                self.setup.vllm,
                self.folder,
                k=k,
                log=log,
                is_tracked=self.is_tracked,
                max_model_len=self.check.max_model_len,
                timeout=self.setup.timeout,
                extra=self.setup.extra,
                watch=tell,
            ) as server:
                return _ask(server, k, self.check, tell), ()
        except ServerFailed as failure:
            run = Run(k=k, loaded=False, error=failure.words, log=str(log))
            return run, failure.unwritten if self.is_tracked else ()


def _ask(server: Server, k: int, check: Check, tell: Watch) -> Run:
    """The first prompt once for warming up, then all of them in turn, timed; counters over the timed ones."""
    tell("warming up")
    warm_up = server.complete(check.prompts[0], max_tokens=min(_WARM_UP_TOKENS, check.max_tokens)).token_ids
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
