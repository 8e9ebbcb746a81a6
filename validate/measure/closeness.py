"""Serves the source and then the checkpoint, and compares what they predict on the same text,
window by window.

In: two local checkpoints, held-out texts and a `VLLM`. Out: a `ClosenessFact`, `closeness.jsonl`,
and the source's predictions for the next checkpoint that is made from it.

Easy to get wrong: what is on the disk is not asked again. A source whose predictions are all there
is not served, which for a release of 700 GB is most of the time; and a killed run goes on with the
windows that it lacks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...checkpoints.files import held
from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ..facts.closeness import Asked, ClosenessFact, PredictedFact, SourceSitting, WorstFact
from ..facts.step import Step
from .closeness_asking import predictions, text_of, tokens_of
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
from .divergence import Predicted, compare
from .harness import Asking, Host, Model, Setup
from .line_file import open_lines
from .server import Server
from .texts import HeldOut, Text

CONTEXT_TOKENS = 24
"""Tokens before a position that the result quotes."""


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
        run = _Run(
            store=open_store(setup.out, question, setup.say),
            text=text,
            setup=setup,
            depth=depth,
            watch=watch,
        )
        run.ask_source(source)
        compared = run.compare(checkpoint)
    before, after = perplexities(compared)
    return ClosenessFact(
        text=text.path,
        text_sha256=text.sha256,
        against=text.against,
        window=depth.window,
        top=question.top,
        vocabulary=question.vocabulary,
        source=_predicted(source, run.store.sittings, before),
        checkpoint=_predicted(
            checkpoint, [_sitting(each) for each in compared.sittings.values()], after
        ),
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
        raise RecipeError(
            f"{source.where}: config.json", "must have vocab_size", got=repr(size), cure=cure
        )
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


# --- servers
# --------------------------------------------------------------------------------------------------


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

        def keep(_: Server, window: int, predicted: Predicted) -> None:
            store.add(window, predicted)

        def note(sitting: SourceSitting) -> None:
            store.write(store.windows, (*before, sitting))

        if not store.is_finished:
            self._ask(model, store, keep, note)

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
            compared.add(
                _window(server, window, store.windows[window], store.read(window), predicted)
            )

        def note(sitting: SourceSitting) -> None:
            compared.add(ComparedSitting(sitting=number, **dict(sitting)))

        if compared.missing:
            self._ask(model, compared, keep, note)
        return compared

    def _ask(
        self,
        model: Model,
        into: SourceStore | ComparedFile,
        keep: Callable[[Server, int, Predicted], None],
        note: Callable[[SourceSitting], None],
    ) -> None:
        """Ask a server every window that is missing; then the first of them once more, alone."""
        step = Step(role=model.role, doing="", done=0, total=1, unit="window")
        top = min(self.depth.top, vocabulary_of(model.source))
        with (
            Host(
                model.source,
                model.whose,
                self.setup,
                lambda doing: self.watch(replace(step, doing=doing)),
            ) as host,
            host.serving(
                f"closeness.{model.role}",
                k=0,
                max_model_len=self.depth.window + 1,
                max_num_seqs=self.depth.concurrency,
                words=("--max-logprobs", str(top)),
            ) as server,
        ):
            if not self.store.windows:
                tokenize, depth = partial(tokens_of, server), self.depth
                self.store.write(
                    cut_windows(
                        tokenize, self.text, num_tokens=depth.tokens, window_size=depth.window
                    )
                )
            windows, missing, question = self.store.windows, into.missing, self.store.asked
            sitting = SourceSitting(as_served=host.as_served, reason=host.reason, seconds=0)
            first: dict[int, Predicted] = {}

            def ask(number: int) -> Predicted:
                return predictions(
                    server, windows[number], top=question.top, vocabulary=question.vocabulary
                )

            def keep_one(number: int, predicted: Predicted) -> int:
                if not first:
                    first[number] = predicted
                keep(server, number, predicted)
                return len(windows[number])

            def note_seconds(seconds: float, repeated: float | None = None) -> None:
                note(
                    sitting.model_copy(update={"seconds": round(seconds, 3), "repeated": repeated})
                )

            start = time.monotonic()
            Asking(
                items=missing,
                ask=ask,
                keep=keep_one,
                note=note_seconds,
                name=lambda number: f"window {number + 1} of {len(windows)} for the {model.role}",
                step=replace(step, done=len(windows) - len(missing), total=len(windows)),
                concurrency=self.depth.concurrency,
            ).run(self.watch)
            ((number, predicted),) = first.items()
            repeated = float(compare(predicted, ask(number)).nats.mean())
            note_seconds(time.monotonic() - start, repeated)


def _window(
    server: Server, number: int, ids: Sequence[int], source: Predicted, checkpoint: Predicted
) -> ComparedWindow:
    """One window compared, with the text around its worst position."""
    apart = compare(source, checkpoint)
    at = int(apart.nats.argmax())
    mine, theirs = apart.choices[at].tolist()
    worst = WorstFact(
        window=number,
        at=at + 1,
        nats=float(apart.nats[at]),
        context=text_of(server, ids[max(0, at + 1 - CONTEXT_TOKENS) : at + 1]),
        token=text_of(server, [ids[at + 1]]),
        source=text_of(server, [mine]),
        checkpoint=text_of(server, [theirs]),
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


def _sitting(line: ComparedSitting) -> SourceSitting:
    return SourceSitting.model_validate(line.model_dump(exclude={"sitting"}))


def _predicted(model: Model, sittings: Sequence[SourceSitting], perplexity: float) -> PredictedFact:
    return PredictedFact(
        role=model.whose,
        path=model.source.where,
        sha256=model.identity.sha256,
        perplexity=perplexity,
        servers=tuple(sittings),
    )
