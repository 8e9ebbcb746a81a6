"""Serves the source and then the checkpoint, and compares what they predict on the same text, window by window.

In: two local checkpoints, held-out texts and a `VLLM`. Out: a `ClosenessFact`, `closeness.jsonl`, and the source's
predictions for the next checkpoint that is made from it.

Easy to get wrong: what is on the disk is not asked again. A source whose predictions are all there is not served, which
for a release of 700 GB is most of the time; and a killed run goes on with the windows that it lacks.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ...checkpoints.files import held
from ...checkpoints.identity import file_sha256
from ...recipes.errors import RecipeError
from ..facts.closeness import Asked, ClosenessFact, PredictedFact, SourceSitting, WorstFact
from ..facts.served import AsServed
from ..facts.vllm_env import VLLM
from .closeness_asking import predictions, text_of, tokens_of
from .closeness_servers import ClosenessSetup, ComparedModel, ask_windows, served_model, vocabulary_of
from .closeness_stored import SourceStore, open_store, take_store_from_sibling
from .compared import FILE, ComparedFile, ComparedHeader, ComparedSitting, ComparedWindow, open_compared, sum_of
from .divergence import Predicted, compare
from .server import Server
from .texts import HeldOut, Text

CONTEXT_TOKENS = 24
"""Tokens before a position that the result quotes."""
_SITTING = {*SourceSitting.model_fields}


def measure(
    checkpoint: ComparedModel, source: ComparedModel, text: HeldOut, *, vllm: VLLM, setup: ClosenessSetup
) -> ClosenessFact:
    """Ask what is missing, the source first, and compare.

    Raises:
        RecipeError: another run is at work there, or texts without two tokens.
        ServerFailed: a server did not come up, died, refused a request, or was silent.
        GateError: a server gave no log-probabilities.
        VLLMError: no room for a BF16 copy.
        CheckpointError: a disk or a file that fails.
    """
    asked = Asked(
        text_sha256=text.sha256,
        tokens=setup.tokens,
        window=setup.window,
        top=setup.top,
        vocabulary=vocabulary_of(source.source),
        source_sha256=source.identity.sha256,
        vllm=vllm.version,
        device=vllm.device,
        words=setup.extra,
    )
    setup.out.mkdir(parents=True, exist_ok=True)
    with held(setup.out, "only one run may measure into a folder"):
        store = _source_predictions(source, text, asked, vllm, setup)
        compared = _compared(checkpoint, store, text, vllm, setup)
    return _fact(checkpoint, source, text, store, compared, vllm, setup)


# --- the source -------------------------------------------------------------------------------------------------------


def _source_predictions(
    model: ComparedModel, text: HeldOut, asked: Asked, vllm: VLLM, setup: ClosenessSetup
) -> SourceStore:
    """The source's predictions for every window; it is served only if one is missing."""
    if sibling := take_store_from_sibling(setup.out, asked):
        setup.say(f"The source was asked the same before: taken from {sibling.name}.")
    store, aside = open_store(setup.out, asked)
    if aside is not None:
        setup.say(f"Predictions for another text or other bytes are kept in {aside.name}.")
    if not store.is_finished:
        served_model(model, partial(_ask_source, store, text, setup), vllm, setup)
    return store


def _ask_source(
    store: SourceStore, text: HeldOut, setup: ClosenessSetup, server: Server, as_served: AsServed, why: str
) -> None:
    if store.windows is None:
        store.cut(cut_windows(lambda each: tokens_of(server, each), text, setup))
    windows, asked, first = store.windows, store.asked, next(iter(store.missing), 0)
    assert windows is not None

    def note(seconds: float, repeated: float | None, *, is_first: bool = False) -> None:
        sitting = SourceSitting(as_served=as_served, reason=why, seconds=seconds, repeated=repeated)
        store.sit(sitting, is_first=is_first)

    note(0.0, None, is_first=True)
    ask = partial(predictions, server, top=asked.top, vocabulary=asked.vocabulary)
    start = time.monotonic()
    for number, predicted in ask_windows("source", store.missing, windows, ask, setup):
        store.add(number, predicted)
        note(round(time.monotonic() - start, 3), None)
    note(round(time.monotonic() - start, 3), _repeated(store.read(first), ask(windows[first])))


def cut_windows(
    tokenize: Callable[[Text], Sequence[int]], text: HeldOut, setup: ClosenessSetup
) -> list[tuple[int, ...]]:
    """The texts in order, each cut into windows, up to so many tokens.

    A window that goes on in a text begins with what the tokenizer puts before every text, such as <bos>.

    Raises:
        RecipeError: no text of two tokens.
    """
    before = tuple(tokenize(""))
    windows: list[tuple[int, ...]] = []
    left = setup.tokens
    for each in text.texts:
        ids = tuple(tokenize(each))
        begin = before if len(before) < setup.window - 1 and ids[: len(before)] == before else ()
        size, rest = setup.window - len(begin), ids[len(begin) :]
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


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def _compared(
    model: ComparedModel, store: SourceStore, text: HeldOut, vllm: VLLM, setup: ClosenessSetup
) -> ComparedFile:
    """Every window compared; the checkpoint is served only if one is missing."""
    assert store.windows is not None
    header = ComparedHeader(
        asked=store.asked,
        checkpoint_sha256=model.identity.sha256,
        windows_sha256=sum_of(store.windows),
        num_windows=len(store.windows),
        num_texts=len(text.texts),
    )
    compared, aside = open_compared(setup.out / FILE, header)
    if aside is not None:
        setup.say(f"Windows of another text or other bytes are kept in {aside.name}.")
    if compared.missing:
        served_model(model, partial(_ask_checkpoint, compared, store, setup), vllm, setup)
    return compared


def _ask_checkpoint(
    compared: ComparedFile, store: SourceStore, setup: ClosenessSetup, server: Server, as_served: AsServed, why: str
) -> None:
    windows, asked, number_of = store.windows, store.asked, len(compared.sittings) + 1
    assert windows is not None

    def note(seconds: float, repeated: float | None) -> None:
        sitting = ComparedSitting(
            sitting=number_of, as_served=as_served, reason=why, seconds=seconds, repeated=repeated
        )
        compared.add(sitting)

    ask = partial(predictions, server, top=asked.top, vocabulary=asked.vocabulary)
    start, first = time.monotonic(), None
    for number, predicted in ask_windows("checkpoint", compared.missing, windows, ask, setup):
        first = first or (number, predicted)
        compared.add(_window(server, number, windows[number], store.read(number), predicted))
        note(round(time.monotonic() - start, 3), None)
    assert first is not None, "something was missing"
    note(round(time.monotonic() - start, 3), _repeated(first[1], ask(windows[first[0]])))


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


def _repeated(one: Predicted, again: Predicted) -> float:
    """Nats a token between two answers of one server."""
    return float(compare(one, again).nats.mean())


# --- the fact ---------------------------------------------------------------------------------------------------------


def _fact(
    checkpoint: ComparedModel,
    source: ComparedModel,
    text: HeldOut,
    store: SourceStore,
    compared: ComparedFile,
    vllm: VLLM,
    setup: ClosenessSetup,
) -> ClosenessFact:
    before, after = compared.perplexities()
    return ClosenessFact(
        text=text.path,
        text_sha256=text.sha256,
        against=text.against,
        window=setup.window,
        top=store.asked.top,
        vocabulary=store.asked.vocabulary,
        source=_predicted(source, store.sittings, before),
        checkpoint=_predicted(checkpoint, list(compared.sittings.values()), after),
        samples=compared.path.name,
        samples_sha256=file_sha256(compared.path),
        environment={
            "vllm": vllm.version,
            "torch": vllm.torch,
            "transformers": vllm.transformers,
            "compressed_tensors": vllm.compressed_tensors,
            "build": vllm.build,
            "device": vllm.device,
            "words": " ".join(setup.extra),
        },
        **compared.figures(),
    )


def _predicted(model: ComparedModel, sittings: Sequence[SourceSitting], perplexity: float) -> PredictedFact:
    return PredictedFact(
        role=model.role,
        path=model.source.where,
        sha256=model.identity.sha256,
        perplexity=perplexity,
        servers=tuple(SourceSitting.model_validate(each.model_dump(include=_SITTING)) for each in sittings),
    )
