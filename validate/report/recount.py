"""Counts the answers on disk again, and refuses a report whose figures they do not give.

In: a `TaskFact` and its files of answers in the same folder (validate/measure/answers.py). Out: nothing, or a
refusal that names a figure.

Easy to get wrong: the hash of a file of answers proves only that it is the named file. So every figure that follows
from the answers is computed from them again, the paired difference too.
"""

from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from ...checkpoints.identity import file_sha256
from ...recipes.errors import CheckpointError
from ..facts.evaluated import EvaluatedFact, TaskFact, mean_of_questions
from ..facts.paired import paired
from ..facts.results import command, file_of
from ..measure.answers import Samples, correct, drafts_of, read_samples
from ..measure.drafting import drafting

Figures = Iterator[tuple[str, object, object]]
"""Name, as the report has it, as the answers give it."""

# lm-evaluation-harness adds in another order; anything else than its last digits is another number.
_TOLERANCE = 1e-9


def refuse_unproved(folder: Path, evaluation: TaskFact) -> None:
    """Refuse an evaluation whose figures do not follow from its files of answers.

    Raises:
        CheckpointError: another file, answers of another protocol or other bytes, or a figure that they do not give.
    """
    read = {fact.role: _samples(folder, fact) for fact in evaluation.arms}
    for fact in evaluation.arms:
        samples = read[fact.role]
        _compare(folder, fact.role, _as_asked(evaluation, fact, samples))
        if samples.missing:
            raise CheckpointError(
                samples.path, "must answer every question", got=f"{len(samples.missing)} missing", cure=_cure(folder)
            )
        _compare(folder, fact.role, _figures(fact, samples))
        _refuse_other_filters(folder, fact, samples)
        for number, score in enumerate(fact.scores):
            right = correct(samples, score.filter)
            value, stderr = mean_of_questions(right, len(right) // evaluation.protocol.repeats)
            figures = (("value", score.value, value), ("stderr", score.stderr, stderr))
            _compare(folder, f"{fact.role}.scores.{number}", iter(figures))
    if evaluation.drafting is not None:
        filters = [score.filter for score in evaluation.checkpoint.scores]
        again = drafting(read["plain"], read["checkpoint"], filters)
        _compare(folder, "drafting", _fields(evaluation.drafting, again))
    if evaluation.source is None:
        return
    for number, pair in enumerate(evaluation.paired):
        before, after = correct(read["source"], pair.filter), correct(read["checkpoint"], pair.filter)
        again = paired(pair.filter, before, after, runs=evaluation.protocol.repeats, confidence=pair.confidence)
        _compare(folder, f"paired.{number}", _fields(pair, again))


def _refuse_other_filters(folder: Path, fact: EvaluatedFact, samples: Samples) -> None:
    """Refuse a score of a filter that did not read every answer."""
    for score in fact.scores:
        if any(score.filter not in answer.correct for answer in samples.lines.values()):
            rule = f"must have every answer as {score.filter} reads it"
            raise CheckpointError(samples.path, rule, got="an answer without", cure=_cure(folder))


def _samples(folder: Path, fact: EvaluatedFact) -> Samples:
    path = folder / fact.samples
    if Path(fact.samples).name != fact.samples:
        raise CheckpointError(file_of(folder, "gsm8k"), "answers lie beside it", got=fact.samples, cure=_cure(folder))
    got = file_sha256(path) if path.is_file() else "no such file"
    if got != fact.samples_sha256:
        rule = f"must be the answers that were counted, {fact.samples_sha256}"
        raise CheckpointError(path, rule, got=got, cure=_cure(folder))
    return read_samples(path)


def _as_asked(evaluation: TaskFact, fact: EvaluatedFact, samples: Samples) -> Figures:
    yield "role", fact.role, samples.header.role
    yield "sha256", fact.sha256, samples.header.checkpoint_sha256
    yield "protocol", evaluation.protocol, samples.header.protocol
    yield "num_questions", fact.num_questions, samples.header.num_questions
    yield "num_questions", fact.num_questions, evaluation.checkpoint.num_questions
    yield "dataset_sha256", evaluation.dataset_sha256, samples.header.dataset_sha256


def _figures(fact: EvaluatedFact, samples: Samples) -> Figures:
    answers, sittings = samples.lines.values(), samples.sittings.values()
    yield "num_questions", fact.num_questions, len(answers)
    yield "num_truncated", fact.num_truncated, sum(answer.finish_reason == "length" for answer in answers)
    yield "num_empty", fact.num_empty, sum(not answer.text.strip() for answer in answers)
    yield "num_tokens", fact.num_tokens, sum(answer.num_tokens for answer in answers)
    yield "seconds", fact.seconds, sum(sitting.seconds for sitting in sittings)
    yield "sittings", fact.sittings, len(sittings)
    if sittings:
        last = samples.sittings[max(samples.sittings)]
        yield "as_served", fact.as_served, last.as_served
        yield "reason", fact.reason, last.reason
    yield from _fields(fact, drafts_of(samples))


def _fields(fact: BaseModel, again: object) -> Figures:
    """Fields that both have."""
    for name in type(fact).model_fields:
        if hasattr(again, name):
            yield name, getattr(fact, name), getattr(again, name)


def _compare(folder: Path, where: str, figures: Figures) -> None:
    for name, claimed, counted in figures:
        close = (
            isinstance(claimed, float) and isinstance(counted, (int, float)) and abs(claimed - counted) <= _TOLERANCE
        )
        if claimed != counted and not close:
            place = f"{file_of(folder, 'gsm8k')}: {where}.{name}"
            raise CheckpointError(place, f"must be what the answers give, {counted}", got=claimed, cure=_cure(folder))


def _cure(folder: Path) -> str:
    return f"Run `{command('gsm8k', folder)}` again"
