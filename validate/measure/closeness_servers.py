"""Servers of a source and of a checkpoint, and windows of text asked of them, several at once.

In: a checkpoint on this machine and how to serve it; windows, and what to ask for each. Out: a healthy server for as
long as it is asked; answers as they come.

Easy to get wrong: a request that fails is no answer. The first failure ends the sitting; what is in flight is waited
for and kept, so that a window is asked again only if its answer never came.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ...checkpoints.identity import Identity
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ..facts.served import AsServed, Role
from ..facts.step import Step
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from .bf16_copy import why_no_kernel
from .serve_check import COPY, UNTRIED, bf16_copy, lack_of_kernel
from .server import Server, ServerFailed, serving

_Sit = Callable[[Server, AsServed, str], None]
_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedModel:
    """One checkpoint: its role, its files on this machine, and their identity."""

    role: Role
    source: Source
    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosenessSetup:
    """How to ask, how to serve, and where to write.

    Attributes:
        out: evidence folder.
        tokens: of text, at most.
        window: tokens of a window, at most.
        top: likeliest tokens at each position.
        concurrency: windows in flight.
        timeout: seconds to a healthy server.
        extra: further words for `vllm serve`.
        say: called with a sentence on what is there already.
        watch: called with each step of progress.
    """

    out: Path
    tokens: int
    window: int
    top: int
    concurrency: int
    timeout: float = TIMEOUT_SECONDS
    extra: tuple[str, ...] = ()
    say: Callable[[str], None] = lambda _: None
    watch: Callable[[Step], None] = lambda _: None


def vocabulary_of(source: Source) -> int:
    """Tokens that a model predicts."""
    size = (source.config.get("text_config") or source.config).get("vocab_size")
    if not isinstance(size, int) or size < 2:
        cure = "Restore the config.json of the release"
        raise RecipeError(f"{source.where}: config.json", "must have vocab_size", got=repr(size), cure=cure)
    return size


def served_model(model: ComparedModel, sit: _Sit, vllm: VLLM, setup: ClosenessSetup) -> None:
    """A server of the model: as it is, or as a BF16 copy where this CPU has no kernel for it."""
    assert model.source.folder is not None, "download() first"
    reason = why_no_kernel(model.source, vllm)
    if not reason:
        try:
            with _server(model, model.source.folder.absolute(), vllm, setup) as server:
                return sit(server, "native", "")
        except ServerFailed as failure:
            reason = lack_of_kernel(vllm, failure.words)
            if not reason:
                raise
    watch = partial(_tell, model.role, setup)
    with (
        bf16_copy(model.source, model.role, out=setup.out, watch=watch) as copy,
        _server(model, copy, vllm, setup) as server,
    ):
        sit(server, COPY, f"{reason}; {UNTRIED}")


@contextmanager
def _server(model: ComparedModel, folder: Path, vllm: VLLM, setup: ClosenessSetup) -> Iterator[Server]:
    most = min(setup.top, vocabulary_of(model.source))
    with serving(
        vllm,
        folder,
        k=0,
        log=(setup.out / "logs" / f"closeness.{model.role}.log").absolute(),
        is_tracked=False,
        max_model_len=setup.window + 1,
        max_num_seqs=setup.concurrency,
        timeout=setup.timeout,
        extra=("--max-logprobs", str(most), *setup.extra),
        watch=partial(_tell, model.role, setup),
    ) as server:
        yield server


def _tell(role: Role, setup: ClosenessSetup, words: str) -> None:
    setup.watch(Step(role=role, doing=words.removeprefix(f"{role}: "), done=0, total=1, unit="window"))


def ask_windows(
    role: Role,
    numbers: Sequence[int],
    windows: Sequence[Sequence[int]],
    ask: Callable[[Sequence[int]], _Kept],
    setup: ClosenessSetup,
) -> Iterator[tuple[int, _Kept]]:
    """Answers as they come, some in flight; a failure ends it once those in flight are there, and names its window."""
    start, num_tokens, done = time.monotonic(), 0, len(windows) - len(numbers)
    failed: tuple[int, ServerFailed] | None = None
    pool, waiting = ThreadPoolExecutor(setup.concurrency), iter(numbers)
    futures = {pool.submit(ask, windows[number]): number for number in islice(waiting, setup.concurrency)}
    try:
        while futures:
            future = next(as_completed(futures))
            number = futures.pop(future)
            try:
                answer = future.result()
            except ServerFailed as failure:
                failed = failed or (number, failure)
                continue
            if failed is None and (following := next(waiting, None)) is not None:
                futures[pool.submit(ask, windows[following])] = following
            yield number, answer
            done, num_tokens = done + 1, num_tokens + len(windows[number])
            seconds = time.monotonic() - start
            setup.watch(_step(role, done, windows, numbers, num_tokens, seconds))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if failed is not None:
        number, failure = failed
        raise ServerFailed(
            failure.words,
            failure.log,
            asked=f"window {number + 1} of {len(windows)} for the {role}",
            cure=f"nothing is lost: the same command asks only the {len(windows) - done} that are missing",
        ) from failure


def _step(
    role: Role, done: int, windows: Sequence[Sequence[int]], numbers: Sequence[int], num_tokens: int, seconds: float
) -> Step:
    left = sum(len(windows[number]) for number in numbers) - num_tokens
    return Step(
        role=role,
        doing="",
        done=done,
        total=len(windows),
        tokens_per_second=num_tokens / seconds,
        eta_seconds=left * seconds / num_tokens,
        unit="window",
    )
