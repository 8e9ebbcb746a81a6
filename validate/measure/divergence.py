"""How far one model's predictions are from another's, position by position, from the likeliest
tokens of both.

In: for every position of a window the likeliest tokens of a model with their log-probabilities.
Out: the Kullback-Leibler divergence in nats, whether the first choice is another, and the
probability that was not compared.

Easy to get wrong: a server does not give a vocabulary of 150,000 tokens, so a token may be known of
one model alone. Only tokens that both name are compared one by one, and all the rest together as
one more outcome. To put outcomes together never adds divergence (the data-processing inequality),
so what is computed is a lower bound. Where both name the whole vocabulary it is exact.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEAST_REST = 1e-6
"""Probability of the rest, at least: log-probabilities in FP32 over a vocabulary sum to one up to
about so much.
"""
NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    assert len(source.ids) == len(checkpoint.ids), "one window"
    nats, outside, choices = [], [], []
    for at in range(len(source.ids)):
        apart, left = _divergence(source, checkpoint, at)
        nats.append(apart)
        outside.append(left)
        one, other = _first(source, at), _first(checkpoint, at)
        choices.append((min(one & other or one), min(one & other or other)))
    chosen = np.array(choices, np.int32)
    return Apart(
        nats=np.array(nats),
        is_flip=chosen[:, 0] != chosen[:, 1],
        outside=np.array(outside),
        choices=chosen,
    )


def _divergence(source: Predicted, checkpoint: Predicted, at: int) -> tuple[float, float]:
    """(nats, probability outside) of one position."""
    shared, mine, theirs = np.intersect1d(source.ids[at], checkpoint.ids[at], return_indices=True)
    mine, theirs = mine[shared != NO_TOKEN], theirs[shared != NO_TOKEN]
    log_p, log_q = (
        source.logprobs[at][mine].astype(np.float64),
        checkpoint.logprobs[at][theirs].astype(np.float64),
    )
    p = np.exp(log_p)
    nats = float((p * (log_p - log_q))[p > 0].sum())
    if source.is_whole and checkpoint.is_whole:
        return max(0.0, nats), 0.0
    rest_p, rest_q = (max(_LEAST_REST, 1 - float(each.sum())) for each in (p, np.exp(log_q)))
    return max(0.0, nats + rest_p * float(np.log(rest_p / rest_q))), rest_p


def _first(predicted: Predicted, at: int) -> set[int]:
    """The likeliest tokens: more than one where BF16 makes them equal."""
    logprobs = predicted.logprobs[at]
    return {int(each) for each in predicted.ids[at][logprobs == logprobs.max()]}
