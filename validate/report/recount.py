"""Whether the answers on disk give the score that a report tells.

In: an `EvaluationFact` and the files of answers beside it (validate/evaluation/answers.py). Out: nothing, or a refusal
that names a figure.

Easy to get wrong: the hash of a file of answers proves only that it is the one that was named. Every figure that
follows from the answers, the paired difference too, is computed from them again.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from ...checkpoints.identity import file_sha256
from ...recipes.errors import CheckpointError
from ..evaluation.answers import Samples, read_samples
from ..evaluation.evaluated import EvaluatedFact, EvaluationFact
from .paired import paired
from .results import command, file_of

Figures = Iterator[tuple[str, object, object]]
"""Name, as it is told, as the answers give it."""

# lm-evaluation-harness adds in another order; anything else than its last digits is another number.
_TOLERANCE = 1e-9


def refuse_unproved(folder: Path, evaluation: EvaluationFact) -> None:
    """Refuse an evaluation whose figures do not follow from its files of answers.

    Raises:
        CheckpointError: another file, answers of another protocol or other bytes, or a figure that they do not give.
    """
    read = {fact.role: _samples(folder, fact) for fact in evaluation.evaluated}
    for fact in evaluation.evaluated:
        samples = read[fact.role]
        _compare(folder, fact.role, _as_asked(evaluation, fact, samples))
        if samples.missing:
            raise CheckpointError(
                samples.path, "must answer every question", got=f"{len(samples.missing)} missing", cure=_cure(folder)
            )
        _compare(folder, fact.role, _figures(fact, samples))
        for number, score in enumerate(fact.scores):
            right = samples.correct(score.filter)
            value = sum(right) / len(right)
            stderr = math.sqrt(value * (1 - value) / (len(right) - 1)) if len(right) > 1 else score.stderr
            told = (("value", score.value, value), ("stderr", score.stderr, stderr))
            _compare(folder, f"{fact.role}.scores.{number}", iter(told))
    if evaluation.source is None:
        return
    for number, pair in enumerate(evaluation.paired):
        before, after = read["source"].correct(pair.filter), read["checkpoint"].correct(pair.filter)
        again = paired(pair.filter, before, after, confidence=pair.confidence)
        _compare(folder, f"paired.{number}", _fields(pair, again))


def _samples(folder: Path, fact: EvaluatedFact) -> Samples:
    path = folder / fact.samples
    if Path(fact.samples).name != fact.samples:
        raise CheckpointError(file_of(folder, "gsm8k"), "answers lie beside it", got=fact.samples, cure=_cure(folder))
    got = file_sha256(path) if path.is_file() else "no such file"
    if got != fact.samples_sha256:
        rule = f"must be the answers that were counted, {fact.samples_sha256}"
        raise CheckpointError(path, rule, got=got, cure=_cure(folder))
    return read_samples(path)


def _as_asked(evaluation: EvaluationFact, fact: EvaluatedFact, samples: Samples) -> Figures:
    yield "role", fact.role, samples.header.role
    yield "sha256", fact.sha256, samples.header.checkpoint_sha256
    yield "protocol", evaluation.protocol, samples.header.protocol
    yield "dataset_sha256", evaluation.dataset_sha256, samples.header.dataset_sha256


def _figures(fact: EvaluatedFact, samples: Samples) -> Figures:
    answers, sittings = samples.answers.values(), samples.sittings.values()
    yield "num_questions", fact.num_questions, len(answers)
    yield "num_truncated", fact.num_truncated, sum(answer.finish_reason == "length" for answer in answers)
    yield "num_tokens", fact.num_tokens, sum(answer.num_tokens for answer in answers)
    yield "seconds", fact.seconds, sum(sitting.seconds for sitting in sittings)
    yield "sittings", fact.sittings, len(sittings)
    if sittings:
        last = samples.sittings[max(samples.sittings)]
        yield "as_served", fact.as_served, last.as_served
        yield "reason", fact.reason, last.reason
    yield from _fields(fact, samples.drafts)


def _fields(told: BaseModel, again: object) -> Figures:
    """Fields that both have."""
    for name in type(told).model_fields:
        if hasattr(again, name):
            yield name, getattr(told, name), getattr(again, name)


def _compare(folder: Path, where: str, figures: Figures) -> None:
    for name, told, counted in figures:
        close = isinstance(told, float) and isinstance(counted, (int, float)) and abs(told - counted) <= _TOLERANCE
        if told != counted and not close:
            place = f"{file_of(folder, 'gsm8k')}: {where}.{name}"
            raise CheckpointError(place, f"must be what the answers give, {counted}", got=told, cure=_cure(folder))


def _cure(folder: Path) -> str:
    return f"Run `{command('gsm8k', folder)}` again"
