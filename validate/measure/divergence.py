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

    def first(self, at: int) -> set[int]:
        """The likeliest tokens at a position: more than one where BF16 makes them equal."""
        logprobs = self.logprobs[at]
        return set(self.ids[at][logprobs == logprobs.max()].tolist())


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
    num = len(source.ids)
    assert num == len(checkpoint.ids), "one window"
    nats, outside = np.zeros(num), np.zeros(num)
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
            outside[at] = max(_LEAST_REST, 1 - p.sum())
            rest = max(_LEAST_REST, 1 - np.exp(log_q).sum())
            nats[at] += outside[at] * np.log(outside[at] / rest)
        one, other = source.first(at), checkpoint.first(at)
        choices[at] = min(one & other or one), min(one & other or other)
    is_flip = choices[:, 0] != choices[:, 1]
    return Apart(nats=nats.clip(min=0), is_flip=is_flip, outside=outside, choices=choices)
