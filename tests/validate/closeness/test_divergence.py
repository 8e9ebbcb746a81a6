"""Divergence and flips from the likeliest tokens of two models, against the whole distributions."""

import numpy as np
import pytest
from keepmtp.validate.measure.divergence import NO_TOKEN, Predicted, compare
from numpy.typing import NDArray
from scipy.special import log_softmax, rel_entr

VOCABULARY, LENGTH = 300, 40


def predicted(logprobs: NDArray[np.float64], following: NDArray[np.int64], top: int) -> Predicted:
    """As a server answers: the likeliest `top`, and the token that follows where it is not among
    them.
    """
    ids = np.full((len(logprobs), min(top + 1, VOCABULARY)), NO_TOKEN, dtype=np.int32)
    for at, row in enumerate(logprobs):
        named = list(dict.fromkeys([int(following[at]), *np.argsort(-row)[:top].tolist()]))[
            : ids.shape[1]
        ]
        ids[at, : len(named)] = named
    found = np.where(
        ids == NO_TOKEN, -np.inf, np.take_along_axis(logprobs, np.maximum(ids, 0), axis=1)
    )
    return Predicted(
        ids=ids,
        logprobs=found.astype(np.float32),
        following=np.take_along_axis(logprobs, following[:, None], axis=1)[:, 0].astype(np.float32),
        is_whole=top >= VOCABULARY,
    )


@pytest.fixture(scope="module", params=[0.02, 0.3, 2.0])
def models(request) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Log-probabilities of a source and of a checkpoint a little or far off, and the text."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((LENGTH, VOCABULARY))
    other = logits + request.param * rng.standard_normal(logits.shape)
    return (
        log_softmax(logits, axis=1),
        log_softmax(other, axis=1),
        rng.integers(VOCABULARY, size=LENGTH),
    )


def test_the_whole_vocabulary_gives_the_divergence_itself(models):
    before, after, text = models
    apart = compare(predicted(before, text, VOCABULARY), predicted(after, text, VOCABULARY))
    # Log-probabilities are FP32, so each is off by 2e-7 of itself at most, and they are up to 20.
    np.testing.assert_allclose(
        apart.nats, rel_entr(np.exp(before), np.exp(after)).sum(axis=1), atol=4e-6
    )
    assert (apart.is_flip == (before.argmax(axis=1) != after.argmax(axis=1))).all()
    assert (apart.choices == np.stack([before.argmax(axis=1), after.argmax(axis=1)], axis=1)).all()
    assert not apart.outside.any()


def test_a_part_of_the_vocabulary_gives_a_lower_bound_that_rises_with_it(models):
    before, after, text = models
    exact = rel_entr(np.exp(before), np.exp(after)).sum(axis=1)
    last = np.zeros(LENGTH)
    for top in (1, 2, 5, 20, 100, 250, 299):
        apart = compare(predicted(before, text, top), predicted(after, text, top))
        assert (apart.nats <= exact + 4e-6).all() and (apart.nats >= last - 4e-6).all()
        last = apart.nats
    assert last.mean() == pytest.approx(exact.mean(), rel=0.01)


def test_what_is_not_compared_is_the_sources_probability_of_the_rest(models):
    before, after, text = models
    one, other = predicted(before, text, 5), predicted(after, text, 5)
    shared = [
        set(map(int, a)) & set(map(int, b)) - {NO_TOKEN}
        for a, b in zip(one.ids, other.ids, strict=True)
    ]
    wanted = [1 - np.exp(before[at, sorted(names)]).sum() for at, names in enumerate(shared)]
    np.testing.assert_allclose(compare(one, other).outside, wanted, atol=1e-5)


def test_a_model_is_as_close_to_itself_as_can_be(models):
    """Exactly: nothing is rounded on the way."""
    before, _, text = models
    for top in (3, VOCABULARY):
        apart = compare(predicted(before, text, top), predicted(before, text, top))
        assert not apart.nats.any() and not apart.is_flip.any()


def test_a_tie_is_no_flip():
    """BF16 makes logits equal, and a server names either of them first."""
    tie, one, other = (
        np.log([[0.4, 0.4, 0.2]]),
        np.log([[0.5, 0.3, 0.2]]),
        np.log([[0.2, 0.3, 0.5]]),
    )
    whole = {
        "following": np.zeros(1, np.float32),
        "is_whole": True,
        "ids": np.array([[0, 1, 2]], np.int32),
    }
    models = [Predicted(logprobs=each.astype(np.float32), **whole) for each in (tie, one, other)]
    assert [bool(compare(models[0], each).is_flip[0]) for each in models] == [False, False, True]
