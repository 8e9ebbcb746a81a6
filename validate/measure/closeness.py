"""Serves the source and then the checkpoint, and compares what they predict on the same text,
window by window.

In: two local checkpoints, held-out texts and a `VLLM`. Out: a `ClosenessFact`, `closeness.jsonl`,
and the source's predictions for the next checkpoint that is made from it.

Easy to get wrong: what is on the disk is not asked again. A source whose predictions are all there
is not served, which for a release of 700 GB is most of the time; and a killed run goes on with the
windows that it lacks. And vLLM adds the token that follows in the text to the likeliest ones, so a
position has K or K + 1 entries. Drafting does not change them: vLLM 0.32.0 computes them from the
target alone (v1/worker/gpu_model_runner.py, `_get_prompt_logprobs_dict`), and gave the same to the
last bit with method=mtp and without. So the servers here run without it, which starts faster and
leaves more memory.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from ...checkpoints.files import held
from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import GateError, RecipeError
from ..facts.closeness import Asked, ClosenessFact, PredictedFact, SourceSitting, WorstFact
from ..facts.step import Step
from .closeness_stored import SourceStore, open_store
from .compared import (
    FILE,
    ComparedFile,
    ComparedHeader,
    ComparedSitting,
    ComparedWindow,
    figures,
    perplexities,
    sum_of,
)
from .divergence import NO_TOKEN, Predicted, compare
from .harness import Model, Setup, ask_all, hosting
from .line_file import open_lines
from .server import Server
from .texts import HeldOut, Text

CONTEXT_TOKENS = 24
"""Tokens before a position that the result quotes."""
WINDOW_SECONDS = 1800.0
"""How long one window may take: a server writes some ten thousand entries a second as JSON."""
_MOST_SUM = 1.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much is asked.

    Attributes:
        tokens: of text, at most.
        window: tokens of a window, at most.
        top: likeliest tokens at each position.
        concurrency: windows in flight.
    """

    tokens: int
    window: int
    top: int
    concurrency: int


def measure(
    checkpoint: Model,
    source: Model,
    text: HeldOut,
    *,
    setup: Setup,
    depth: Depth,
    watch: Callable[[Step], None] = lambda _: None,
) -> ClosenessFact:
    """Ask what is missing, the source first, and compare.

    Raises:
        RecipeError: another run is at work there, or texts without two tokens.
        ServerFailed: a server did not come up, died, refused a request, or was silent.
        GateError: a server gave no log-probabilities.
        VLLMError: no room for a BF16 copy.
        CheckpointError: a disk or a file that fails.
    """
    question = Asked(
        text_sha256=text.sha256,
        tokens=depth.tokens,
        window=depth.window,
        top=depth.top,
        vocabulary=vocabulary_of(source.source),
        source_sha256=source.identity.sha256,
        **setup.answered_by,
    )
    setup.out.mkdir(parents=True, exist_ok=True)
    with held(setup.out, "only one run may measure into a folder"):
        store = open_store(setup.out, question, setup.say)
        run = _Run(store=store, text=text, setup=setup, depth=depth, watch=watch)
        run.ask_source(source)
        compared = run.compare(checkpoint)
    before, after = perplexities(compared)
    servers = [_without_number(each) for each in compared.sittings.values()]
    return ClosenessFact(
        text=text.path,
        text_sha256=text.sha256,
        against=text.against,
        window=depth.window,
        top=question.top,
        vocabulary=question.vocabulary,
        source=_predicted(source, store.sittings, before),
        checkpoint=_predicted(checkpoint, servers, after),
        samples=compared.path.name,
        samples_sha256=file_sha256(compared.path),
        environment=setup.environment,
        **figures(compared),
    )


def vocabulary_of(source: Source) -> int:
    """Tokens that a model predicts."""
    size = (source.config.get("text_config") or source.config).get("vocab_size")
    if not isinstance(size, int) or size < 2:
        where, cure = f"{source.where}: config.json", "Restore the config.json of the release"
        raise RecipeError(where, "must have vocab_size", got=repr(size), cure=cure)
    return size


def cut_windows(
    tokenize: Callable[[Text], Sequence[int]], text: HeldOut, *, num_tokens: int, window_size: int
) -> list[tuple[int, ...]]:
    """The texts in order, each cut into windows, up to so many tokens.

    A window that goes on in a text begins with what the tokenizer puts before every text, such as
    <bos>.

    Raises:
        RecipeError: no text of two tokens.
    """
    before = tuple(tokenize(""))
    windows: list[tuple[int, ...]] = []
    left = num_tokens
    for each in text.texts:
        ids = tuple(tokenize(each))
        begin = ()
        if len(before) < window_size - 1 and ids[: len(before)] == before:
            begin = before
        size, rest = window_size - len(begin), ids[len(begin) :]
        for at in range(0, len(rest), size):
            window = (*begin, *rest[at : at + size])[:left]
            if len(window) < 2:
                break
            windows.append(window)
            left -= len(window)
    if not windows:
        got, cure = "none of two tokens", "Name another file with --text, or raise --tokens"
        raise RecipeError(text.path, "must hold text of some tokens", got=got, cure=cure)
    return windows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """What both models are asked; `store` has the windows once the source was served."""

    store: SourceStore
    text: HeldOut
    setup: Setup
    depth: Depth
    watch: Callable[[Step], None]

    def ask_source(self, model: Model) -> None:
        """The source's predictions for every window; it is served only if one is missing."""
        store, before = self.store, self.store.sittings
        if not store.is_finished:
            self.ask(
                model,
                store,
                keep=lambda _, number, predicted: store.add(number, predicted),
                note=lambda sitting: store.write(store.windows, (*before, sitting)),
            )

    def compare(self, model: Model) -> ComparedFile:
        """Every window compared; the checkpoint is served only if one is missing."""
        store = self.store
        header = ComparedHeader(
            asked=store.asked,
            checkpoint_sha256=model.identity.sha256,
            windows_sha256=sum_of(store.windows),
            num_windows=len(store.windows),
            num_texts=len(self.text.texts),
        )
        compared: ComparedFile = open_lines(self.setup.out / FILE, header, self.setup.say)
        number = len(compared.sittings) + 1

        def keep(server: Server, window: int, predicted: Predicted) -> None:
            source = store.read(window)
            compared.add(_window(server, window, store.windows[window], source, predicted))

        def note(sitting: SourceSitting) -> None:
            compared.add(ComparedSitting(sitting=number, **dict(sitting)))

        if compared.missing:
            self.ask(model, compared, keep=keep, note=note)
        return compared

    def ask(
        self,
        model: Model,
        into: SourceStore | ComparedFile,
        *,
        keep: Callable[[Server, int, Predicted], None],
        note: Callable[[SourceSitting], None],
    ) -> None:
        """Ask a server every window that is missing; then the first of them once more, alone."""
        step = Step(role=model.role, doing="", done=0, total=1, unit="window")
        question, depth, store = self.store.asked, self.depth, self.store
        top = min(depth.top, vocabulary_of(model.source))
        how = {"max_model_len": depth.window + 1, "max_num_seqs": depth.concurrency}
        words = ("--max-logprobs", str(top))
        first: dict[int, Predicted] = {}

        def tell(doing: str) -> None:
            self.watch(replace(step, doing=doing))

        with (
            hosting(model.source, model.whose, self.setup, tell) as host,
            host.serving(f"closeness.{model.role}", k=0, words=words, **how) as server,
        ):
            if not store.windows:
                sizes = {"num_tokens": depth.tokens, "window_size": depth.window}
                store.write(cut_windows(partial(tokens_of, server), self.text, **sizes))
            windows, missing = store.windows, into.missing

            def ask(number: int) -> Predicted:
                sizes = {"top": question.top, "vocabulary": question.vocabulary}
                return predictions(server, windows[number], **sizes)

            def keep_one(number: int, predicted: Predicted) -> int:
                if not first:
                    first[number] = predicted
                keep(server, number, predicted)
                return len(windows[number])

            def note_seconds(seconds: float, repeated: float | None = None) -> None:
                sitting = {**host.served, "seconds": round(seconds, 3), "repeated": repeated}
                note(SourceSitting(**sitting))

            start = time.monotonic()
            ask_all(
                missing,
                ask,
                keep=keep_one,
                note=note_seconds,
                name=lambda each: f"window {each + 1} of {len(windows)} for the {model.role}",
                step=replace(step, done=len(windows) - len(missing), total=len(windows)),
                concurrency=depth.concurrency,
                watch=self.watch,
            )
            ((number, predicted),) = first.items()
            repeated = float(compare(predicted, ask(number)).nats.mean())
            note_seconds(time.monotonic() - start, repeated)


def tokens_of(server: Server, text: Text) -> tuple[int, ...]:
    """A text as the server's own tokenizer and chat template make it; tokens stay as they are."""
    asked: dict[str, Any] = {"prompt": text}
    if isinstance(text, tuple):
        if isinstance(text[0], int):
            return cast(tuple[int, ...], text)
        asked = {"messages": text, "add_generation_prompt": False}
    return tuple(server.post("/tokenize", asked)["tokens"])


def predictions(server: Server, ids: Sequence[int], *, top: int, vocabulary: int) -> Predicted:
    """What a server predicts after each token of a window but the last.

    Args:
        server: its --max-logprobs is at least `top`.
        ids: two tokens at least.
        top: how many of the likeliest tokens to name; the whole vocabulary where it has no more.
        vocabulary: its size.

    Raises:
        ServerFailed: the server died or refused the request.
        GateError: a reply that is no log-probabilities.
    """
    asked = {
        "prompt": list(ids),
        "prompt_logprobs": min(top, vocabulary),
        "max_tokens": 1,
        "temperature": 0.0,
        "seed": 0,
    }
    reply = server.post("/v1/completions", asked, timeout=WINDOW_SECONDS)
    rows: Sequence[Mapping[str, Any]] = reply["choices"][0]["prompt_logprobs"][1:]
    num, width = len(ids) - 1, min(top + 1, vocabulary)
    names = np.full((num, width), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((num, width), -np.inf, dtype=np.float32)
    following = np.empty(num, dtype=np.float32)
    for at, (row, after) in enumerate(zip(rows, ids[1:], strict=True)):
        names[at, : len(row)] = [int(name) for name in row]
        logprobs[at, : len(row)] = [entry["logprob"] for entry in row.values()]
        following[at] = row[str(after)]["logprob"]
    if np.exp(logprobs.astype(np.float64)).sum(axis=1).max() > _MOST_SUM:
        got, cure = "a row whose probabilities sum to more than 1", "Leave out --logprobs-mode"
        raise GateError("vllm serve", "must give log-probabilities", got=got, cure=cure)
    is_whole = top >= vocabulary
    return Predicted(ids=names, logprobs=logprobs, following=following, is_whole=is_whole)


def _window(
    server: Server, number: int, ids: Sequence[int], source: Predicted, checkpoint: Predicted
) -> ComparedWindow:
    """One window compared, with the text around its worst position."""
    apart = compare(source, checkpoint)
    at = int(apart.nats.argmax())

    def text_of(*tokens: int) -> str:
        """What is no whole character is shown as the replacement character."""
        return server.text_of(tokens).encode(errors="replace").decode()

    mine, theirs = apart.choices[at].tolist()
    worst = WorstFact(
        window=number,
        at=at + 1,
        nats=float(apart.nats[at]),
        context=text_of(*ids[max(0, at + 1 - CONTEXT_TOKENS) : at + 1]),
        token=text_of(ids[at + 1]),
        source=text_of(mine),
        checkpoint=text_of(theirs),
    )
    return ComparedWindow(
        window=number,
        nats=tuple(apart.nats.tolist()),
        flips=tuple(np.flatnonzero(apart.is_flip).tolist()),
        outside=tuple(apart.outside.tolist()),
        source_nll=_nll(source),
        checkpoint_nll=_nll(checkpoint),
        worst=worst,
    )


def _nll(predicted: Predicted) -> float:
    return max(0.0, -float(predicted.following.astype(np.float64).sum()))


def _without_number(line: ComparedSitting) -> SourceSitting:
    return SourceSitting.model_validate(line.model_dump(exclude={"sitting"}))


def _predicted(model: Model, sittings: Sequence[SourceSitting], perplexity: float) -> PredictedFact:
    return PredictedFact(
        role=model.whose,
        path=model.source.where,
        sha256=model.identity.sha256,
        perplexity=perplexity,
        servers=tuple(sittings),
    )
