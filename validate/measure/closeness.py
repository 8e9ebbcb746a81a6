"""The station closeness: what source and checkpoint predict on the same text is compared, window by
window.

In: two local checkpoints, held-out texts and a `Setup`. Out: a `ClosenessFact`, a file with every
position, and the source's predictions for the next checkpoint that is made from it: a file of
windows, and a folder with the predictions for each.

Easy to get wrong: a server does not give a vocabulary of 150,000 tokens, so a token may be known of
one model alone. What is computed is then a lower bound; where both name the whole vocabulary it is
exact.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter, ValidationError

from ...checkpoints.files import write_whole
from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import CheckpointError, GateError, RecipeError
from ...recipes.frozen import Json, frozen
from ..facts.closeness import ClosenessFact, PredictedFact
from .harness import Ask, Failures, Model, Setup, Work
from .replies import PredictionsReply, TokensReply
from .server import Server, ServerFailed
from .store import (
    ComparedFile,
    ComparedWindow,
    PredictedFile,
    PredictedWindow,
    sum_of,
)
from .texts import HeldOut, Text

# How long one window may take: a server writes some ten thousand entries a second as JSON.
WINDOW_SECONDS = 1800.0
_MOST_SUM = 1.001

# What a model predicts after each token of a window but the last: log-probabilities, natural, by
# token, of the likeliest ones and of the one that follows.
Predictions = tuple[dict[int, float], ...]
_PREDICTIONS = TypeAdapter(Predictions)


@frozen
class Closeness:
    """The station: the source's predictions, then the checkpoint's, compared with them.

    Attributes:
        setup, source, checkpoint: how to serve, and what.
        text: held out.
        tokens: of text, at most.
        window: tokens of a window, at most.
        top: likeliest tokens at each position.
        concurrency: windows in flight.
    """

    setup: Setup
    source: Model
    checkpoint: Model
    text: HeldOut
    tokens: int
    window: int = 512
    top: int = 512
    concurrency: int = 4

    def works(self, model: Model) -> list[Work]:
        """The windows that a model predicts. How many there are is known once the source was
        asked.

        Raises:
            CheckpointError: a file that cannot be read.
        """
        before = self._before
        file = before
        if model.role == "checkpoint":
            file = self._after(before)
        return [self._work(model, file, before)]

    def fact(self, failures: Failures) -> ClosenessFact:
        """What both predicted, once both have."""
        before = self._before
        after = self._after(before)
        lines = after.in_order()
        found = self._asked | compared(lines)
        of_source = math.fsum([line.source_nll for line in lines])
        of_checkpoint = math.fsum([line.checkpoint_nll for line in lines])
        return ClosenessFact(
            text=self.text.path,
            source=_predicted(self.source, before, of_source / found["tokens"]),
            checkpoint=_predicted(self.checkpoint, after, of_checkpoint / found["tokens"]),
            samples=after.path.name,
            samples_sha256=file_sha256(after.path),
            environment=self.setup.environment,
            **found,
        )

    @property
    def _asked(self) -> Json:
        """What the headers of both files say."""
        return {
            "text_sha256": self.text.sha256,
            "tokens": self.tokens,
            "window": self.window,
            "top": self.top,
            "vocabulary": vocabulary_of(self.source.source),
        }

    @property
    def _before(self) -> PredictedFile:
        name = "closeness.source"
        file = self.setup.answers(name, PredictedWindow, self.source, **self._asked)
        num = len(file.lines)
        if not any(sitting.has_all for sitting in file.sittings.values()):
            num += 1  # or more: the server cuts the text
        file.wanted = range(num)
        return file

    def _after(self, before: PredictedFile) -> ComparedFile:
        windows = windows_of(before)
        file = self.setup.answers(
            "closeness.checkpoint",
            ComparedWindow,
            self.checkpoint,
            **self._asked,
            num=len(windows),
            source_sha256=self.source.identity.sha256,
            windows_sha256=sum_of(json.dumps(windows)),
            num_texts=len(self.text.texts),
        )
        file.wanted = before.wanted
        return file

    def _work(
        self, model: Model, file: PredictedFile | ComparedFile, source: PredictedFile
    ) -> Work:
        """The windows that a model's file lacks. The source is asked for its predictions, the
        checkpoint for those that are compared with them.
        """
        is_source = file is source
        top = self.top
        vocabulary = vocabulary_of(self.source.source)
        windows = list[tuple[int, ...]]()

        @contextmanager
        def asking(server: Server) -> Iterator[Ask]:
            """Predictions for a window, kept or compared."""
            if is_source:
                tokenize = partial(tokens_of, server)
                windows[:] = cut_windows(
                    tokenize, self.text, num_tokens=self.tokens, window_size=self.window
                )
                file.wanted = range(len(windows))
            else:
                windows[:] = windows_of(source)

            def ask(number: int) -> PredictedWindow | ComparedWindow:
                ids = windows[number]
                rows = predictions(server, ids, top=top, vocabulary=vocabulary)
                if is_source:
                    write_whole(_path(source, number), _PREDICTIONS.dump_json(rows).decode())
                    return PredictedWindow(window=number, ids=ids)
                before = kept(source, number)
                places = compare(before, rows, is_whole=top >= vocabulary)
                return ComparedWindow(
                    window=number,
                    nats=tuple([place.nats for place in places]),
                    flips=tuple([at for at, place in enumerate(places) if place.is_flip]),
                    outside=tuple([place.outside for place in places]),
                    source_nll=_nll(before, ids),
                    checkpoint_nll=_nll(rows, ids),
                )

            yield ask

        return Work(
            name=f"closeness.{model.role}",
            model=model,
            file=file,
            asking=asking,
            # Drafting does not change predictions: vLLM 0.32.0 computes them from the target alone
            # (v1/worker/gpu_model_runner.py, `_get_prompt_logprobs_dict`), and gave the same to the
            # last bit with method=mtp and without. Without it a server starts faster and leaves
            # more memory.
            k=0,
            max_model_len=self.window + 1,
            concurrency=self.concurrency,
            further=("--max-logprobs", str(min(top, vocabulary))),
            unit="window",
            task="closeness",
        )


def _predicted(model: Model, file: PredictedFile | ComparedFile, nll: float) -> PredictedFact:
    """One model on the text, with so many nats a token."""
    return PredictedFact(
        role=model.role,
        path=model.source.where,
        sha256=model.identity.sha256,
        perplexity=math.exp(nll),
        **file.served,
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
    for each in text.texts:
        ids = tuple(tokenize(each))
        is_begun = len(before) < window_size - 1 and ids[: len(before)] == before
        begin = ()
        if is_begun:
            begin = before
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


def _path(file: PredictedFile, number: int) -> Path:
    return file.path.with_suffix("") / f"{number:05}.window"


def kept(file: PredictedFile, number: int) -> Predictions:
    """The source's predictions for a window.

    Raises:
        CheckpointError: the file is damaged, or gone.
    """
    path = _path(file, number)
    num = len(file.lines[number].ids) - 1
    try:
        rows = _PREDICTIONS.validate_json(path.read_bytes())
        got = f"{len(rows)} positions"
    except (OSError, ValidationError) as error:
        rows = ()
        got = repr(error)
    if len(rows) == num:
        return rows
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
    return server.post("/tokenize", asked, TokensReply).tokens


def predictions(server: Server, ids: Sequence[int], *, top: int, vocabulary: int) -> Predictions:
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
    reply = server.post("/v1/completions", asked, PredictionsReply, timeout=WINDOW_SECONDS)
    rows = []
    pairs = zip(reply.choices[0].prompt_logprobs[1:], ids[1:], strict=False)
    for row, after in pairs:
        if row and after in row and len(row) <= width:
            rows.append({token: entry["logprob"] for token, entry in row.items()})
    if len(rows) != num:
        raise ServerFailed(f"predictions of {len(rows)} tokens for {num}", server.log)
    for row in rows:
        # Logits of a raw mode may be any number.
        if math.fsum([math.exp(min(1.0, value)) for value in row.values()]) > _MOST_SUM:
            got = "a row whose probabilities sum to more than 1"
            cure = "Leave out --logprobs-mode"
            raise GateError("vllm serve", "must give log-probabilities", got=got, cure=cure)
    return tuple(rows)


def _nll(rows: Predictions, ids: Sequence[int]) -> float:
    return max(0.0, -math.fsum([row[after] for row, after in zip(rows, ids[1:], strict=True)]))


# --- divergence, position by position -------------------------------------------------------------

# Probability of the rest, at least: log-probabilities in FP32 over a vocabulary sum to one up to
# about so much.
_LEAST_REST = 1e-6


@frozen
class Apart:
    """Two predictions of one token, compared.

    Attributes:
        nats: divergence of the checkpoint's from the source's.
        outside: the source's probability of all tokens that were not compared one by one.
        is_flip: they share no first choice, of which there are several where some are equal.
    """

    nats: float
    outside: float
    is_flip: bool


def compare(source: Predictions, checkpoint: Predictions, *, is_whole: bool) -> list[Apart]:
    """Compare two models' predictions on one window of the same tokens; `is_whole` where rows name
    the whole vocabulary.
    """
    places = []
    for p, q in zip(source, checkpoint, strict=True):
        shared = [(p[token], q[token]) for token in p.keys() & q.keys()]
        nats = math.fsum([math.exp(one) * (one - other) for one, other in shared])
        outside = 0.0
        if not is_whole:
            # All tokens that not both name are one more outcome. To put outcomes together never
            # adds divergence (the data-processing inequality).
            outside = max(_LEAST_REST, 1 - math.fsum([math.exp(one) for one, _ in shared]))
            rest = max(_LEAST_REST, 1 - math.fsum([math.exp(other) for _, other in shared]))
            nats += outside * math.log(outside / rest)
        is_flip = _first(p).isdisjoint(_first(q))
        places.append(Apart(nats=max(0.0, nats), outside=outside, is_flip=is_flip))
    return places


def _first(row: Mapping[int, float]) -> set[int]:
    """The likeliest tokens: more than one where BF16 makes them equal."""
    most = max(row.values())
    return {token for token, value in row.items() if value == most}


# --- what follows from all windows ----------------------------------------------------------------


def compared(lines: Sequence[ComparedWindow]) -> Json:
    """Fields of a `ClosenessFact`. Positions of one window are not independent, so every error is
    taken over windows.
    """
    sizes = [len(line.nats) for line in lines]
    flips = [len(line.flips) for line in lines]
    sums = [math.fsum(line.nats) for line in lines]
    num = sum(sizes)
    outside = math.fsum(chain.from_iterable([line.outside for line in lines]))
    divergence = math.fsum(chain.from_iterable([line.nats for line in lines]))
    return {
        "windows": len(lines),
        "tokens": num,
        "outside": min(1.0, outside / num),
        "divergence": divergence / num,
        "stderr": _stderr(sums, sizes),
        "flips": sum(flips),
        "effective_tokens": _effective(flips, sizes),
    }


def _stderr(sums: Sequence[float], sizes: Sequence[int]) -> float | None:
    """Standard error of a mean over positions, from the sum and the number of positions of each
    window.

    The windows are the independent draws: the ratio estimator's error with clusters of unequal size
    (W. G. Cochran, Sampling Techniques, 1977, 2.11).
    """
    num = len(sizes)
    if num < 2:
        return None
    size = sum(sizes)
    mean = math.fsum(sums) / size
    squares = [(one - mean * of) ** 2 for one, of in zip(sums, sizes, strict=True)]
    return math.sqrt(num / (num - 1) * math.fsum(squares)) / size


def _effective(counts: Sequence[int], sizes: Sequence[int]) -> float:
    """Independent positions with the same error of a share, at most as many as there are.

    E. L. Korn, B. I. Graubard, "Confidence intervals for proportions with small expected number of
    positive counts estimated from survey data", Survey Methodology 24 (1998), 193-201.
    """
    num = sum(sizes)
    share = sum(counts) / num
    stderr = _stderr(counts, sizes)
    if not stderr or share in (0.0, 1.0):
        return float(num)
    return min(float(num), max(1.0, share * (1 - share) / stderr**2))
