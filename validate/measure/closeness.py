"""Serves the source and then the checkpoint, and compares what they predict on the same text, window by window.

In: two local checkpoints, held-out texts and a `VLLM`. Out: a `ClosenessFact`, `closeness.jsonl`, and the source's
predictions for the next checkpoint that is made from it.

Easy to get wrong: what is on the disk is not asked again. A source whose predictions are all there is not served, which
for a release of 700 GB is most of the time; and a killed run goes on with the windows that it lacks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ...checkpoints.files import held
from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ..facts.closeness import Asked, ClosenessFact, PredictedFact, SourceSitting, WorstFact
from ..facts.served import AsServed
from ..facts.step import Step
from .closeness_asking import predictions, text_of, tokens_of
from .closeness_stored import SourceStore, open_store, take_store_from_sibling
from .compared import (
    FILE,
    FORM,
    ComparedFile,
    ComparedHeader,
    ComparedSitting,
    ComparedWindow,
    figures,
    perplexities,
    sum_of,
)
from .divergence import Predicted, compare
from .harness import Model, Setup, asked, served
from .line_file import open_lines
from .server import Server, serving
from .texts import HeldOut, Text

CONTEXT_TOKENS = 24
"""Tokens before a position that the result quotes."""
_SITTING = {*SourceSitting.model_fields}


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
        vllm=setup.vllm.version,
        device=setup.vllm.device,
        words=setup.extra,
    )
    setup.out.mkdir(parents=True, exist_ok=True)
    with held(setup.out, "only one run may measure into a folder"):
        store = _of_source(source, text, question, setup, depth, watch)
        compared = _compared(checkpoint, store, text, setup, depth, watch)
    before, after = perplexities(compared)
    return ClosenessFact(
        text=text.path,
        text_sha256=text.sha256,
        against=text.against,
        window=depth.window,
        top=question.top,
        vocabulary=question.vocabulary,
        source=_predicted(source, store.sittings, before),
        checkpoint=_predicted(checkpoint, list(compared.sittings.values()), after),
        samples=compared.path.name,
        samples_sha256=file_sha256(compared.path),
        environment=setup.environment,
        **figures(compared),
    )


def vocabulary_of(source: Source) -> int:
    """Tokens that a model predicts."""
    size = (source.config.get("text_config") or source.config).get("vocab_size")
    if not isinstance(size, int) or size < 2:
        cure = "Restore the config.json of the release"
        raise RecipeError(f"{source.where}: config.json", "must have vocab_size", got=repr(size), cure=cure)
    return size


def cut_windows(
    tokenize: Callable[[Text], Sequence[int]], text: HeldOut, *, num_tokens: int, window_size: int
) -> list[tuple[int, ...]]:
    """The texts in order, each cut into windows, up to so many tokens.

    A window that goes on in a text begins with what the tokenizer puts before every text, such as <bos>.

    Raises:
        RecipeError: no text of two tokens.
    """
    before = tuple(tokenize(""))
    windows: list[tuple[int, ...]] = []
    left = num_tokens
    for each in text.texts:
        ids = tuple(tokenize(each))
        begin = before if len(before) < window_size - 1 and ids[: len(before)] == before else ()
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


# --- servers ----------------------------------------------------------------------------------------------------------


def _of_source(
    model: Model, text: HeldOut, question: Asked, setup: Setup, depth: Depth, watch: Callable[[Step], None]
) -> SourceStore:
    """The source's predictions for every window; it is served only if one is missing."""
    if sibling := take_store_from_sibling(setup.out, question):
        setup.say(f"The source was asked the same before: taken from {sibling.name}.")
    store, aside = open_store(setup.out, question)
    if aside is not None:
        setup.say(f"Predictions for another text or other bytes are kept in {aside.name}.")
    number = len(store.sittings)

    def begin(server: Server) -> Sequence[int]:
        if store.windows is None:
            tokenize = partial(tokens_of, server)
            store.cut(cut_windows(tokenize, text, num_tokens=depth.tokens, window_size=depth.window))
        return store.missing

    def keep(_: Server, window: int, predicted: Predicted) -> None:
        store.add(window, predicted)

    if not store.is_finished:
        sitting = _Sitting(store=store, begin=begin, keep=keep, note=partial(store.sit, number))
        _serve(model, sitting, setup, depth, watch)
    return store


def _compared(
    model: Model, store: SourceStore, text: HeldOut, setup: Setup, depth: Depth, watch: Callable[[Step], None]
) -> ComparedFile:
    """Every window compared; the checkpoint is served only if one is missing."""
    windows = store.windows
    assert windows is not None
    header = ComparedHeader(
        asked=store.asked,
        checkpoint_sha256=model.identity.sha256,
        windows_sha256=sum_of(windows),
        num_windows=len(windows),
        num_texts=len(text.texts),
    )
    compared, aside = open_lines(setup.out / FILE, header, FORM)
    if aside is not None:
        setup.say(f"Windows of another text or other bytes are kept in {aside.name}.")
    number = len(compared.sittings) + 1

    def keep(server: Server, window: int, predicted: Predicted) -> None:
        compared.add(_window(server, window, windows[window], store.read(window), predicted))

    def note(sitting: SourceSitting) -> None:
        compared.add(ComparedSitting(sitting=number, **dict(sitting)))

    if missing := compared.missing:
        sitting = _Sitting(store=store, begin=lambda _: missing, keep=keep, note=note)
        _serve(model, sitting, setup, depth, watch)
    return compared


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sitting:
    """What is done with a server.

    Attributes:
        store: says what is asked; it has the windows once `begin` has returned.
        begin: gives the windows that are missing.
        keep: of one window what was predicted.
        note: how the server was used so far.
    """

    store: SourceStore
    begin: Callable[[Server], Sequence[int]]
    keep: Callable[[Server, int, Predicted], None]
    note: Callable[[SourceSitting], None]


def _serve(model: Model, sitting: _Sitting, setup: Setup, depth: Depth, watch: Callable[[Step], None]) -> None:
    """Start a server for what is missing, and ask it."""

    def use(folder: Path, as_served: AsServed, reason: str) -> None:
        with serving(
            setup.vllm,
            folder,
            k=0,
            log=setup.log(f"closeness.{model.role}"),
            is_tracked=False,
            max_model_len=depth.window + 1,
            max_num_seqs=depth.concurrency,
            timeout=setup.timeout,
            extra=("--max-logprobs", str(min(depth.top, vocabulary_of(model.source))), *setup.extra),
            watch=tell,
        ) as server:
            _ask(server, model, sitting, SourceSitting(as_served=as_served, reason=reason, seconds=0), depth, watch)

    def tell(words: str) -> None:
        doing = words.removeprefix(f"{model.role}: ")
        watch(Step(role=model.role, doing=doing, done=0, total=1, unit="window"))

    served(model.source, model.whose, setup, use, tell)


def _ask(
    server: Server,
    model: Model,
    sitting: _Sitting,
    begun: SourceSitting,
    depth: Depth,
    watch: Callable[[Step], None],
) -> None:
    """Every missing window; then the first of them once more, alone."""
    missing, question = sitting.begin(server), sitting.store.asked
    windows = sitting.store.windows
    assert windows is not None and missing, "a server is started for what is missing"
    total, done, num_tokens = len(windows), len(windows) - len(missing), 0
    left = sum(len(windows[number]) for number in missing)

    def ask(number: int) -> Predicted:
        return predictions(server, windows[number], top=question.top, vocabulary=question.vocabulary)

    sitting.note(begun)
    start, first = time.monotonic(), None
    for number, predicted in asked(
        missing,
        ask,
        concurrency=depth.concurrency,
        name=lambda number: f"window {number + 1} of {total} for the {model.role}",
        lack="are missing",
    ):
        first = first or (number, predicted)
        sitting.keep(server, number, predicted)
        seconds = time.monotonic() - start
        sitting.note(begun.model_copy(update={"seconds": round(seconds, 3)}))
        done, num_tokens = done + 1, num_tokens + len(windows[number])
        watch(
            Step(
                role=model.role,
                doing="",
                done=done,
                total=total,
                tokens_per_second=num_tokens / seconds,
                eta_seconds=(left - num_tokens) * seconds / num_tokens,
                unit="window",
            )
        )
    assert first is not None, "something was missing"
    number, predicted = first
    repeated = float(compare(predicted, ask(number)).nats.mean())
    sitting.note(begun.model_copy(update={"seconds": round(time.monotonic() - start, 3), "repeated": repeated}))


def _window(
    server: Server, number: int, ids: Sequence[int], source: Predicted, checkpoint: Predicted
) -> ComparedWindow:
    """One window compared, with the text around its worst position."""
    apart = compare(source, checkpoint)
    at = int(apart.nats.argmax())
    first, other = (int(each) for each in apart.choices[at])
    context = text_of(server, ids[max(0, at + 1 - CONTEXT_TOKENS) : at + 1])
    token, mine, theirs = (text_of(server, [each]) for each in (ids[at + 1], first, other))
    worst = WorstFact(
        window=number,
        at=at + 1,
        nats=float(apart.nats[at]),
        context=context,
        token=token,
        source=mine,
        checkpoint=theirs,
    )
    return ComparedWindow(
        window=number,
        nats=tuple(map(float, apart.nats)),
        flips=tuple(map(int, np.flatnonzero(apart.is_flip))),
        outside=tuple(map(float, apart.outside)),
        source_nll=_nll(source),
        checkpoint_nll=_nll(checkpoint),
        worst=worst,
    )


def _nll(predicted: Predicted) -> float:
    return max(0.0, -float(predicted.following.astype(np.float64).sum()))


def _predicted(model: Model, sittings: Sequence[SourceSitting], perplexity: float) -> PredictedFact:
    return PredictedFact(
        role=model.whose,
        path=model.source.where,
        sha256=model.identity.sha256,
        perplexity=perplexity,
        servers=tuple(SourceSitting.model_validate(each.model_dump(include=_SITTING)) for each in sittings),
    )
