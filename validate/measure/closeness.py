"""Serves the source and then the checkpoint, and compares what they predict on the same text,
window by window.

In: two local checkpoints, held-out texts and a `VLLM`. Out: a `ClosenessFact`, a file with every
position, and the source's predictions for the next checkpoint that is made from it: a file of
windows, and a folder with the arrays of each.

Easy to get wrong: a server does not give a vocabulary of 150,000 tokens, so a token may be known of
one model alone. What is computed is then a lower bound; where both name the whole vocabulary it is
exact.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ...checkpoints.files import making, refuse_strange, unwritable
from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import CheckpointError, GateError, RecipeError
from ...recipes.frozen import Json, frozen
from ..facts.closeness import ClosenessFact, PredictedFact, WorstFact
from . import figures
from .harness import Ask, Model, Setup, Watch, Work, answer_missing, unwatched
from .replies import PredictionsReply, TokensReply
from .server import Server, ServerFailed
from .store import (
    ComparedFile,
    ComparedHeader,
    ComparedWindow,
    PredictedFile,
    PredictedHeader,
    PredictedWindow,
    open_lines,
)
from .texts import HeldOut, Text

CONTEXT_TOKENS = 24
"""Tokens before a position that the result quotes."""
WINDOW_SECONDS = 1800.0
"""How long one window may take: a server writes some ten thousand entries a second as JSON."""
_MOST_SUM = 1.001
_ARRAYS = ("ids", "logprobs", "following")


@frozen
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
    watch: Watch = unwatched,
) -> ClosenessFact:
    """Ask what is missing, the source first, and compare.

    Raises:
        RecipeError: another run is at work there, or texts without two tokens.
        ServerFailed: a server did not come up, died, refused a request, or was silent.
        GateError: a server gave no log-probabilities.
        VLLMError: no room for a BF16 copy.
        CheckpointError: a disk or a file that fails.
    """
    asked = {
        "text_sha256": text.sha256,
        "tokens": depth.tokens,
        "window": depth.window,
        "top": depth.top,
        "vocabulary": vocabulary_of(source.source),
    }
    with setup.alone():
        first = PredictedHeader(**asked, **setup.asked_of(source))
        before = open_lines(setup.out, "closeness.source", first)
        # Its last server was asked the same again once there was nothing more to ask.
        if all(sitting.repeated is None for sitting in before.sittings.values()):
            answer_missing(source, [_work(source, before, before, text, depth)], setup, watch)
        windows = windows_of(before)
        header = ComparedHeader(
            **asked,
            **setup.asked_of(checkpoint),
            num=len(windows),
            source_sha256=source.identity.sha256,
            windows_sha256=hashlib.sha256(json.dumps(windows).encode()).hexdigest(),
            num_texts=len(text.texts),
        )
        after = open_lines(setup.out, "closeness.checkpoint", header)
        if after.missing:
            work = _work(checkpoint, after, before, text, depth)
            answer_missing(checkpoint, [work], setup, watch)
    of_source, of_checkpoint = figures.predicted(after, before)
    return ClosenessFact(
        text=text.path,
        against=text.against,
        source=PredictedFact(path=source.source.where, **of_source),
        checkpoint=PredictedFact(path=checkpoint.source.where, **of_checkpoint),
        samples=after.path.name,
        samples_sha256=file_sha256(after.path),
        environment=setup.environment,
        **figures.closeness(after),
    )


def vocabulary_of(source: Source) -> int:
    """Tokens that a model predicts."""
    size = source.text_config.get("vocab_size")
    if not isinstance(size, int) or size < 2:
        where = f"{source.where}: config.json"
        cure = "Restore the config.json of the release"
        raise RecipeError(where, "must have vocab_size", got=repr(size), cure=cure)
    return size


def windows_of(file: PredictedFile) -> list[tuple[int, ...]]:
    """The token ids of each window that the source was asked."""
    return [file.lines[number].ids for number in sorted(file.lines)]


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
    windows = list[tuple[int, ...]]()
    left = num_tokens
    for ids in map(tuple, map(tokenize, text.texts)):
        is_begun = len(before) < window_size - 1 and ids[: len(before)] == before
        begin = before if is_begun else ()
        size = window_size - len(begin)
        for at in range(len(begin), len(ids), size):
            window = (*begin, *ids[at : at + size])[:left]
            if len(window) < 2:
                break
            windows.append(window)
            left -= len(window)
    if not windows:
        cure = "Name another file with --text, or raise --tokens"
        rule = "must hold text of some tokens"
        raise RecipeError(text.path, rule, got="none of two tokens", cure=cure)
    return windows


def _work(
    model: Model,
    file: PredictedFile | ComparedFile,
    source: PredictedFile,
    text: HeldOut,
    depth: Depth,
) -> Work:
    """The windows that a model's file lacks; then the first of them once more, alone. The source is
    asked for its predictions, the checkpoint for those that are compared with them.
    """
    is_source = file is source
    header = source.header
    windows = list[tuple[int, ...]]()
    firsts = list[tuple[Predicted, Callable[[], Predicted]]]()

    @contextmanager
    def asking(server: Server) -> Iterator[Ask]:
        """Predictions for a window, kept or compared."""
        if is_source:
            tokenize = partial(tokens_of, server)
            size = depth.window
            windows[:] = cut_windows(tokenize, text, num_tokens=depth.tokens, window_size=size)
            file.wanted = range(len(windows))
        else:
            windows[:] = windows_of(source)

        def predict(number: int) -> Predicted:
            ids = windows[number]
            return predictions(server, ids, top=header.top, vocabulary=header.vocabulary)

        if is_source and 0 in file.lines:  # a run that goes on
            firsts.append((kept(source, 0), partial(predict, 0)))

        def ask(number: int) -> PredictedWindow | ComparedWindow:
            predicted = predict(number)
            if not firsts:
                firsts.append((predicted, partial(predict, number)))
            if is_source:
                keep(source, number, predicted)
                return PredictedWindow(window=number, ids=windows[number])
            return _compared(server, number, windows[number], kept(source, number), predicted)

        yield ask

    def repeated() -> float:
        """Nats a token between this server's first predictions, with others in flight, and the same
        alone.
        """
        predicted, again = firsts[0]
        return float(compare(predicted, again()).nats.mean())

    return Work(
        name=f"closeness.{model.role}",
        file=file,
        asking=asking,
        title=lambda at: f"window {at + 1} of {len(windows)}",
        # Drafting does not change predictions: vLLM 0.32.0 computes them from the target alone
        # (v1/worker/gpu_model_runner.py, `_get_prompt_logprobs_dict`), and gave the same to the
        # last bit with method=mtp and without. Without it a server starts faster and leaves more
        # memory.
        k=0,
        max_model_len=depth.window + 1,
        concurrency=depth.concurrency,
        words=("--max-logprobs", str(min(depth.top, vocabulary_of(model.source)))),
        repeated=repeated,
        unit="window",
    )


def _path(file: PredictedFile, number: int) -> Path:
    return file.path.with_suffix("") / f"{number:05}.safetensors"


def keep(file: PredictedFile, number: int, predicted: "Predicted") -> None:
    """Write the source's predictions for a window; they are on the disk when this returns.

    Raises:
        CheckpointError: the disk does not take them.
    """
    path = _path(file, number)
    try:
        refuse_strange(path.parent)
        path.parent.mkdir(exist_ok=True)
        with making(path) as partial_file:
            save_file({name: getattr(predicted, name) for name in _ARRAYS}, partial_file)
    except (OSError, SafetensorError) as error:
        raise unwritable(path, error) from error


def kept(file: PredictedFile, number: int) -> "Predicted":
    """The source's predictions for a window.

    Raises:
        CheckpointError: the file is damaged, or gone.
    """
    path = _path(file, number)
    num = len(file.lines[number].ids) - 1
    try:
        arrays = load_file(path)
        predicted = Predicted(**arrays, is_whole=file.header.top >= file.header.vocabulary)
        if len(predicted.ids) == num:
            return predicted
        got = f"{len(predicted.ids)} positions"
    except (OSError, SafetensorError, TypeError) as error:
        got = repr(error)
    rule = f"must be what the source predicts at {num} positions"
    cure = f"Remove {file.path}, and the source is asked again"
    raise CheckpointError(path, rule, got=got, cure=cure)


def tokens_of(server: Server, text: Text) -> tuple[int, ...]:
    """A text as the server's own tokenizer and chat template make it; tokens stay as they are."""
    asked: Json = {"prompt": text}
    if isinstance(text, tuple):
        if isinstance(text[0], int):
            return cast(tuple[int, ...], text)
        asked = {"messages": text, "add_generation_prompt": False}
    # A token takes less than 16 bytes of the reply, and at least one of the text.
    return server.post("/tokenize", asked, TokensReply, tokens=len(str(text)) // 16).tokens


def predictions(server: Server, ids: Sequence[int], *, top: int, vocabulary: int) -> "Predicted":
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
    num = len(ids) - 1
    # vLLM adds the token that follows in the text to the likeliest ones.
    width = min(top + 1, vocabulary)
    reply = server.post(
        "/v1/completions", asked, PredictionsReply, tokens=num * width, timeout=WINDOW_SECONDS
    )
    (choice,) = reply.choices
    pairs = zip(choice.prompt_logprobs[1:], ids[1:], strict=False)
    rows = [row for row, after in pairs if row and after in row and len(row) <= width]
    if len(rows) != num:
        raise ServerFailed(f"predictions of {len(rows)} tokens for {num}", server.log)
    names = np.full((num, width), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((num, width), -np.inf, dtype=np.float32)
    following = np.empty(num, dtype=np.float32)
    for at, (row, after) in enumerate(zip(rows, ids[1:], strict=True)):
        names[at, : len(row)] = list(row)
        logprobs[at, : len(row)] = [entry["logprob"] for entry in row.values()]
        following[at] = row[after]["logprob"]
    if np.exp(logprobs.clip(max=1).astype(np.float64)).sum(axis=1).max() > _MOST_SUM:
        got = "a row whose probabilities sum to more than 1"
        cure = "Leave out --logprobs-mode"
        raise GateError("vllm serve", "must give log-probabilities", got=got, cure=cure)
    return Predicted(ids=names, logprobs=logprobs, following=following, is_whole=top >= vocabulary)


def _compared(
    server: Server, number: int, ids: Sequence[int], source: "Predicted", checkpoint: "Predicted"
) -> ComparedWindow:
    """One window compared, with the text around its worst position."""
    apart = compare(source, checkpoint)
    at = int(apart.nats.argmax())
    mine, theirs = apart.choices[at].tolist()
    after = at + 1
    worst = WorstFact(
        window=number,
        at=after,
        nats=float(apart.nats[at]),
        context=server.text_of(ids[max(0, after - CONTEXT_TOKENS) : after]),
        token=server.text_of([ids[after]]),
        source=server.text_of([mine]),
        checkpoint=server.text_of([theirs]),
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


def _nll(predicted: "Predicted") -> float:
    return max(0.0, -float(predicted.following.astype(np.float64).sum()))


# --- divergence, position by position -------------------------------------------------------------

# Probability of the rest, at least: log-probabilities in FP32 over a vocabulary sum to one up to
# about so much.
_LEAST_REST = 1e-6
NO_TOKEN = -1


@frozen
class Predicted:
    """What a model predicts after each token of a window but the last.

    Attributes:
        ids: [T-1, K+1] int32, the likeliest K tokens and the one that follows; NO_TOKEN where a row
            is shorter.
        logprobs: [T-1, K+1] float32, natural; minus infinity for NO_TOKEN.
        following: [T-1] float32, of the token that follows in the text.
        is_whole: the rows name the whole vocabulary.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    following: NDArray[np.float32]
    is_whole: bool

    def first(self, at: int) -> set[int]:
        """The likeliest tokens at a position: more than one where BF16 makes them equal."""
        logprobs = self.logprobs[at]
        return set(self.ids[at][logprobs == logprobs.max()].tolist())


@frozen
class Apart:
    """A window's predictions compared.

    Attributes:
        nats: [T-1] float64, divergence of the checkpoint's prediction from the source's.
        is_flip: [T-1] bool, the first choice is another; a tie with the source's first choice is
            none.
        outside: [T-1] float64, the source's probability of all tokens that were not compared one by
            one.
        choices: [T-1, 2] int32, the first choice of the source, and of the checkpoint.
    """

    nats: NDArray[np.float64]
    is_flip: NDArray[np.bool_]
    outside: NDArray[np.float64]
    choices: NDArray[np.int32]


def compare(source: Predicted, checkpoint: Predicted) -> Apart:
    """Compare two models' predictions on one window of the same tokens."""
    num = len(source.ids)
    assert num == len(checkpoint.ids), "one window"
    nats = np.zeros(num)
    outside = np.zeros(num)
    choices = np.zeros((num, 2), np.int32)
    for at in range(num):
        shared, mine, theirs = np.intersect1d(
            source.ids[at], checkpoint.ids[at], return_indices=True
        )
        is_token = shared != NO_TOKEN
        log_p = source.logprobs[at][mine[is_token]].astype(np.float64)
        log_q = checkpoint.logprobs[at][theirs[is_token]].astype(np.float64)
        p = np.exp(log_p)
        nats[at] = (p * (log_p - log_q))[p > 0].sum()
        if not (source.is_whole and checkpoint.is_whole):
            # All tokens that not both name are one more outcome. To put outcomes together never
            # adds divergence (the data-processing inequality).
            outside[at] = max(_LEAST_REST, 1 - p.sum())
            rest = max(_LEAST_REST, 1 - np.exp(log_q).sum())
            nats[at] += outside[at] * np.log(outside[at] / rest)
        one = source.first(at)
        other = checkpoint.first(at)
        choices[at] = min(one & other or one), min(one & other or other)
    is_flip = choices[:, 0] != choices[:, 1]
    return Apart(nats=nats.clip(min=0), is_flip=is_flip, outside=outside, choices=choices)
