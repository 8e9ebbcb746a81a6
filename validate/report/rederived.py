"""Computes every figure of a result again from its evidence, and refuses a result that says
something else.

In: the result files of one evidence folder with its files of answers, repetitions and windows, and
the checkpoint. Out: nothing, or a refusal that names a figure.

Easy to get wrong: report.json is made of the result files, so it agrees with them whatever they
say; and the hash of a file of answers proves only that it is the named file. So the static check is
run again, and whatever follows from counters, answers and windows is computed again. A finding that
check.json lacks is a contradiction. One that it has on top is none: that check may have known the
source.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ...checkpoints.identity import file_sha256
from ...recipes.errors import CheckpointError
from ..check.check import examine
from ..facts.benched import Benched, BenchFact, words_of
from ..facts.closeness import ClosenessFact, SourceSitting
from ..facts.evaluated import EvaluatedFact, EvaluationFact, TaskFact, mean_of_questions
from ..facts.findings import Finding
from ..facts.paired import paired
from ..facts.results import CheckData, Station, checkpoint_folder, command, file_of
from ..facts.served import Drafts, Run, ServeCheck, partings
from ..measure.answers import Samples, correct, counted, drafting, read_samples
from ..measure.bench_lines import Measured, read_lines
from ..measure.compared import figures, perplexities, read_compared
from .check_data import check_data

Figures = Iterator[tuple[str, object, object]]
"""Name, as the result has it, as the evidence gives it."""

# Sums in another order differ in their last digits; anything else is another number.
_TOLERANCE = 1e-9


def refuse_contradicted(folder: Path, station: Station, data: Any, sha256: str) -> None:
    """Refuse a result that its evidence does not give.

    Args:
        folder: of the evidence.
        station: that measured.
        data: its result.
        sha256: of the checkpoint's bytes.

    Raises:
        CheckpointError: names the first figure that is another, or a file that cannot be read.
    """
    for name, claimed, wanted in _FIGURES[station](folder, data, sha256):
        if claimed == wanted or _is_close(claimed, wanted):
            continue
        pretended = " with the same --gpu and --tp" if station == "check" and data.dry else ""
        cure = f"Run `{command(station, folder)}` again{pretended}"
        place = f"{file_of(folder, station)}: {name}"
        raise CheckpointError(
            place, f"must be what the evidence gives, {wanted}", got=claimed, cure=cure
        )


def _is_close(claimed: object, wanted: object) -> bool:
    if not isinstance(claimed, float) or not isinstance(wanted, (int, float)):
        return False
    return math.isclose(claimed, wanted, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


# --- the static check and servers -----------------------------------------------------------------


def _of_check(folder: Path, data: CheckData, _: str) -> Figures:
    checked = examine(checkpoint_folder(folder))
    again = check_data(checked.data, opened=checked.source)
    known = {_key(finding, data.path) for finding in data.findings}
    for finding in again.findings:
        # A separate draft, which only the dry load knows, may bring the table of a family.
        if _key(finding, again.path) not in known and not (data.dry and finding.rule == "family"):
            yield "findings", "no such finding", f"{finding.where}: {finding.says}"
    yield "facts", data.facts, again.facts
    yield "calibration", data.calibration, again.calibration
    yield "sizes", _sizes(data), _sizes(again)
    has_errors = any(
        finding.origin == "dry" and finding.severity == "error" for finding in data.findings
    )
    for load in data.dry:
        place = f"dry load on {load.gpu} at TP {load.tp}"
        yield f"{place}: ok", load.ok, not load.num_errors
        if not load.ok:
            yield f"{place}: a finding that says why", has_errors, True


def _key(finding: Finding, path: str) -> tuple[str, str, str]:
    return finding.rule, finding.severity, finding.where.removeprefix(path)


def _sizes(data: CheckData) -> list[tuple[str, str, int, int]]:
    """What the checkpoint's own headers give; the source's sizes are other headers."""
    return sorted(
        (row.part, row.group, row.num_tensors, row.num_bytes)
        for row in data.sizes
        if row.num_tensors
    )


def _of_serve(_: Path, serve: ServeCheck, __: str) -> Figures:
    for served in serve.served:
        plain = served.run(0)
        for run in served.runs:
            place = f"{served.role}, k={run.k}: "
            yield from _of_drafts(place, run, run.k)
            yield f"{place}loaded", run.loaded, not run.error
            yield f"{place}outputs", len(run.outputs), len(serve.prompts) if run.loaded else 0
            if run.k and run.loaded and plain is not None:
                yield from _against_plain(place, run, plain)


def _against_plain(place: str, run: Run, plain: Run) -> Figures:
    """What follows from two runs; gaps do not, since no file holds the log-probabilities."""
    claimed = tuple(parting.model_copy(update={"gap": None}) for parting in run.partings or ())
    yield f"{place}partings", claimed, partings(plain.outputs, run.outputs)
    if run.tokens_per_second and plain.tokens_per_second:
        yield f"{place}speed_up", run.speed_up, run.tokens_per_second / plain.tokens_per_second


def _of_drafts(place: str, counted: Drafts, k: int) -> Figures:
    """vLLM's counters: a token counts only if all before it in its draft do."""
    by_position = counted.accepted_per_position
    if by_position:
        yield f"{place}accepted_tokens", counted.accepted_tokens, sum(by_position)
        yield f"{place}accepted_per_position", by_position, tuple(sorted(by_position, reverse=True))
        yield _at_most(
            f"{place}accepted at the first position, of the drafts", by_position[0], counted.drafts
        )
        yield _at_most(f"{place}positions", len(by_position), k)
    yield _at_most(
        f"{place}draft_tokens, at most k a draft", counted.draft_tokens, k * counted.drafts
    )
    yield _at_most(
        f"{place}accepted_tokens, of those drafted", counted.accepted_tokens, counted.draft_tokens
    )


def _at_most(name: str, claimed: int, most: int) -> tuple[str, int, int]:
    return name, max(claimed, most), most


# --- tasks ----------------------------------------------------------------------------------------


def _of_evaluation(folder: Path, evaluation: EvaluationFact, _: str) -> Figures:
    for task in evaluation.by_task:
        yield from _of_task(folder, task)


def _of_task(folder: Path, task: TaskFact) -> Figures:
    read: dict[str, Samples] = {}
    for fact in task.arms:
        yield from _of_file(folder, f"{fact.role}.", fact)
        read[fact.role] = samples = read_samples(folder / fact.samples)
        yield from _of_answers(fact, task, samples)
        yield from _of_drafts(
            f"{fact.role}: ", fact, task.protocol.k if fact.role != "plain" else 0
        )
    if task.drafting is not None:
        filters = [score.filter for score in task.checkpoint.scores]
        yield from _fields(
            "drafting.", task.drafting, dict(drafting(read["plain"], read["checkpoint"], filters))
        )
    for number, pair in enumerate(task.paired):
        before, after = (
            correct(read["source"], pair.filter),
            correct(read["checkpoint"], pair.filter),
        )
        again = paired(
            pair.filter, before, after, runs=task.protocol.repeats, confidence=pair.confidence
        )
        yield from _fields(f"paired.{number}.", pair, dict(again))


def _of_file(folder: Path, place: str, fact: EvaluatedFact | ClosenessFact) -> Figures:
    """The file that a result was counted from, in the same folder."""
    path = folder / Path(fact.samples).name
    yield f"{place}samples", fact.samples, path.name
    yield (
        f"{place}samples_sha256",
        fact.samples_sha256,
        file_sha256(path) if path.is_file() else "no such file",
    )


def _of_answers(fact: EvaluatedFact, task: TaskFact, samples: Samples) -> Figures:
    place, header, answers = f"{fact.role}.", samples.header, samples.lines.values()
    yield f"{place}protocol", task.protocol, header.protocol
    yield f"{place}dataset_sha256", task.dataset_sha256, header.dataset_sha256
    for num in (header.num_questions, task.checkpoint.num_questions):
        yield f"{place}num_questions", fact.num_questions, num
    yield from _fields(place, fact, counted(samples))
    read_by = Counter(name for answer in answers for name in answer.correct)
    for number, score in enumerate(fact.scores):
        yield (
            f"{place}num_questions, read by {score.filter}",
            fact.num_questions,
            read_by[score.filter],
        )
        right = correct(samples, score.filter)
        value, stderr = mean_of_questions(right, len(right) // task.protocol.repeats)
        yield from _fields(f"{place}scores.{number}.", score, {"value": value, "stderr": stderr})


def _fields(place: str, fact: BaseModel, again: Mapping[str, object]) -> Figures:
    for name, wanted in again.items():
        yield f"{place}{name}", getattr(fact, name), wanted


# --- speed and closeness --------------------------------------------------------------------------


def _of_bench(folder: Path, bench: BenchFact, sha256: str) -> Figures:
    """Speeds follow from counts and seconds whenever they are read; a repetition is a line of the
    file it came to.
    """
    yield "checkpoint.sha256", bench.checkpoint.sha256, sha256
    for benched in bench.benched:
        measured = list(_measured(folder, benched, bench))
        for cell in benched.cells:
            for each in cell.repetitions:
                place = (
                    f"{benched.role}, k={cell.k}, {words_of(cell.load)}, repetition {each.number}"
                )
                if cell.k:
                    yield from _of_drafts(f"{place}: ", each, cell.k)
                limit = each.requests * bench.output_tokens
                yield _at_most(
                    f"{place}: output_tokens, at most the limit an answer",
                    each.output_tokens,
                    limit,
                )
                written = [
                    line for line in measured if line.place == (cell.k, *cell.load, each.number)
                ]
                if benched.as_served == "native":
                    written = [line for line in written if line.as_served == "native"]
                is_there = any(line.repetition == each for line in written)
                yield f"{place}: is a line of bench.{benched.role}.jsonl", True, is_there


def _measured(folder: Path, benched: Benched, bench: BenchFact) -> Iterator[Measured]:
    """Lines of what was measured like this; a file that was set aside since counts, too."""
    environment = bench.environment
    wanted = {
        "role": benched.role,
        "checkpoint_sha256": benched.sha256,
        "prompts_sha256": bench.prompts_sha256,
        "output_tokens": bench.output_tokens,
        "seed": bench.seed,
        "form": benched.form,
        "max_num_seqs": benched.max_num_seqs,
        "max_model_len": benched.max_model_len,
        "vllm": environment.get("vllm"),
        "device": environment.get("device"),
    }
    for path in sorted(folder.glob(f"bench.{benched.role}*.jsonl")):
        found = read_lines(path)
        if all(getattr(found.header, name) == value for name, value in wanted.items()):
            yield from found.lines.values()


def _of_closeness(folder: Path, fact: ClosenessFact, _: str) -> Figures:
    yield from _of_file(folder, "", fact)
    compared = read_compared(folder / fact.samples)
    asked = compared.header.asked
    yield from _fields(
        "", fact, asked.model_dump(include={"text_sha256", "window", "top", "vocabulary"})
    )
    yield "windows, those that are missing", len(compared.missing), 0
    yield from _fields("", fact, figures(compared))
    before, after = perplexities(compared)
    yield from _fields(
        "source.", fact.source, {"sha256": asked.source_sha256, "perplexity": before}
    )
    own = {"sha256": compared.header.checkpoint_sha256, "perplexity": after}
    yield from _fields("checkpoint.", fact.checkpoint, own)
    sittings = [
        SourceSitting(**each.model_dump(exclude={"sitting"})) for each in compared.sittings.values()
    ]
    yield "checkpoint.servers", fact.checkpoint.servers, tuple(sittings)


_FIGURES: dict[Station, Callable[[Path, Any, str], Figures]] = {
    "check": _of_check,
    "serve": _of_serve,
    "gsm8k": _of_evaluation,
    "bench": _of_bench,
    "closeness": _of_closeness,
}
