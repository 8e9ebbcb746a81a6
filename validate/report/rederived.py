"""Computes again what follows from other facts, and refuses results that contradict it.

In: the result files of one evidence folder, and the checkpoint. Out: nothing, or a refusal that names a figure.

Easy to get wrong: report.json is made of the result files, so it agrees with them whatever they say. So the static
check is run again, sizes and calibration are read again, and counters and outputs of a server must agree. A finding
that check.json lacks is a contradiction. One that it has on top is none: that check may have known the source.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...checkpoints.identity import Identity
from ...recipes.errors import CheckpointError
from ..check.check import examine
from ..facts.benched import BenchCell, Benched, BenchFact, Repetition, words_of
from ..facts.findings import Finding
from ..facts.results import CheckData, Station, checkpoint_folder, command, file_of
from ..facts.served import Drafts, Run, ServeCheck, partings
from ..measure.bench_lines import BenchHeader, Lines, read_lines
from .check_data import check_data
from .recount import Figures

_TOLERANCE = 1e-9


def refuse_contradicted_check(folder: Path, data: CheckData) -> None:
    """Refuse a check.json that the checkpoint's headers and record do not give.

    Raises:
        CheckpointError: a finding that is not in it, or a figure that is another.
    """
    checkpoint = checkpoint_folder(folder)
    checked = examine(checkpoint)
    again = check_data(checked.data, opened=checked.source)
    if lost := _lost(data, again):
        got, rule = "no such finding", f"must have the finding of {lost[0].where}: {lost[0].says}"
        raise CheckpointError(file_of(folder, "check"), rule, got=got, cure=_cure(folder, "check", data))
    figures = [("facts", data.facts, again.facts), ("calibration", data.calibration, again.calibration)]
    figures += [("sizes", _sizes(data), _sizes(again)), *_loads(data)]
    _compare(folder, "check", "", iter(figures), cure=_cure(folder, "check", data))


def refuse_contradicted_serve(folder: Path, serve: ServeCheck) -> None:
    """Refuse a serve.json whose counters, outputs and times contradict each other.

    Raises:
        CheckpointError: names the figure.
    """
    for served in serve.served:
        plain = served.run(0)
        for run in served.runs:
            _compare(folder, "serve", f"{served.role}, k={run.k}: ", _of_run(run, plain, len(serve.prompts)))


def refuse_contradicted_drafts(folder: Path, role: str, counted: Drafts, k: int) -> None:
    """Refuse the draft counters of an evaluation that contradict each other.

    Raises:
        CheckpointError: names the figure.
    """
    _compare(folder, "gsm8k", f"{role}: ", _of_drafts(counted, k))


def refuse_contradicted_bench(folder: Path, bench: BenchFact, identity: Identity) -> None:
    """Refuse a speed matrix of other bytes, or one whose counters and requests contradict each other.

    Speeds follow from the counts of tokens and the seconds, whenever they are read. Each repetition must be a line of
    the file that it was written to when it was measured.

    Raises:
        CheckpointError: names the figure.
    """
    _compare(folder, "bench", "checkpoint: ", iter([("sha256", bench.checkpoint.sha256, identity.sha256)]))
    for benched in bench.benched:
        for cell in benched.cells:
            place = f"{benched.role}, k={cell.k}, {words_of(cell.load)}"
            for each in cell.repetitions:
                _compare(folder, "bench", f"{place}, repetition {each.number}: ", _of_repetition(each, cell, bench))
        _compare(folder, "bench", "", _of_lines(benched, _lines_of(folder, benched, bench)))


def _lines_of(folder: Path, benched: Benched, bench: BenchFact) -> Lines:
    """The file of repetitions that were measured like this; one that was set aside since counts, too."""
    file = folder / f"bench.{benched.role}.jsonl"
    paths = [path for path in (file, *sorted(folder.glob(f"bench.{benched.role}.*.jsonl"))) if path.is_file()]
    found = [lines for lines in map(read_lines, paths) if _is_header_of(lines.header, benched, bench)]
    if not found:
        rule = "must hold the repetitions that bench.json was made from"
        raise CheckpointError(file, rule, got="none of these bytes and prompts", cure=_cure(folder, "bench"))
    whole = (lines for lines in found if all(claimed == line for _, claimed, line in _of_lines(benched, lines)))
    return next(whole, found[0])


def _is_header_of(header: BenchHeader, benched: Benched, bench: BenchFact) -> bool:
    asked = (header.checkpoint_sha256, header.prompts_sha256, header.output_tokens, header.seed)
    served = (header.form, header.max_num_seqs, header.max_model_len, header.vllm, header.device)
    environment = bench.environment
    return asked == (benched.sha256, bench.prompts_sha256, bench.output_tokens, bench.seed) and served == (
        *(benched.form, benched.max_num_seqs, benched.max_model_len),
        *(environment.get("vllm"), environment.get("device")),
    )


def _of_lines(benched: Benched, lines: Lines) -> Figures:
    for cell in benched.cells:
        for each in cell.repetitions:
            line = lines.lines.get((cell.k, *cell.load, each.number))
            place = f"{benched.role}, k={cell.k}, {words_of(cell.load)}, repetition {each.number}"
            yield f"{place}: the line of {lines.path.name}", each, line and line.repetition
            if benched.as_served == "native":
                yield f"{place}: as_served", benched.as_served, line and line.as_served


def _of_repetition(each: Repetition, cell: BenchCell, bench: BenchFact) -> Figures:
    if cell.k:
        yield from _of_drafts(each, cell.k)
    most = each.requests * bench.output_tokens
    yield "output_tokens, at most the limit an answer", max(each.output_tokens, most), most


def _lost(data: CheckData, again: CheckData) -> list[Finding]:
    """Findings of the headers that a check.json does not have. A separate draft may bring the table of a family."""
    known = {_key(finding, data.path) for finding in data.findings}
    has_draft = bool(data.dry)
    return [
        finding
        for finding in again.findings
        if _key(finding, again.path) not in known and not (has_draft and finding.rule == "family")
    ]


def _key(finding: Finding, path: str) -> tuple[str, str, str]:
    return finding.rule, finding.severity, finding.where.removeprefix(path)


def _sizes(data: CheckData) -> list[tuple[str, str, int, int]]:
    """What the checkpoint's own headers give; the source's sizes are other headers."""
    return sorted((row.part, row.group, row.num_tensors, row.num_bytes) for row in data.sizes if row.num_tensors)


def _loads(data: CheckData) -> Figures:
    has_errors = any(finding.origin == "dry" and finding.severity == "error" for finding in data.findings)
    for load in data.dry:
        place = f"dry load on {load.gpu} at TP {load.tp}"
        yield f"{place}: ok", load.ok, not load.num_errors
        if not load.ok:
            yield f"{place}: a finding that says why", has_errors, True


def _of_run(run: Run, plain: Run | None, num_prompts: int) -> Figures:
    yield from _of_drafts(run, run.k)
    yield "loaded", run.loaded, not run.error
    yield "outputs", len(run.outputs), num_prompts if run.loaded else 0
    if not run.k or not run.loaded or plain is None:
        return
    yield "partings", _places(run.partings or ()), _places(partings(plain.outputs, run.outputs))
    if run.tokens_per_second and plain.tokens_per_second:
        yield "speed_up", run.speed_up, run.tokens_per_second / plain.tokens_per_second


def _of_drafts(counted: Drafts, k: int) -> Figures:
    """vLLM's counters: a token counts only if all before it in its draft do."""
    by_position = counted.accepted_per_position
    if by_position:
        yield "accepted_tokens", counted.accepted_tokens, sum(by_position)
        yield "accepted_per_position", by_position, tuple(sorted(by_position, reverse=True))
        yield "accepted at the first position, of the drafts", max(by_position[0], counted.drafts), counted.drafts
        yield "positions", max(len(by_position), k), k
    most = k * counted.drafts
    yield "draft_tokens, at most k a draft", max(counted.draft_tokens, most), most
    yield "accepted_tokens, of those drafted", max(counted.accepted_tokens, counted.draft_tokens), counted.draft_tokens


def _places(found: Iterable[Any]) -> list[tuple[int, int, int | None, int | None]]:
    return [(parting.prompt, parting.at, parting.plain_token, parting.token) for parting in found]


def _compare(
    folder: Path, station: Station, place: str, figures: Iterator[tuple[str, object, object]], *, cure: str = ""
) -> None:
    for name, claimed, wanted in figures:
        if claimed == wanted or _is_close(claimed, wanted):
            continue
        raise CheckpointError(
            f"{file_of(folder, station)}: {place}{name}",
            f"must be what the rest of it gives, {wanted}",
            got=claimed,
            cure=cure or _cure(folder, station),
        )


def _is_close(claimed: object, wanted: object) -> bool:
    if not isinstance(claimed, float) or not isinstance(wanted, float):
        return False
    return abs(claimed - wanted) <= _TOLERANCE * max(1.0, abs(wanted))


def _cure(folder: Path, station: Station, data: CheckData | None = None) -> str:
    """The command that measures again, with the GPUs that were pretended."""
    loads = data.dry if data else ()
    gpus = "".join(f" --gpu {gpu}" for gpu in dict.fromkeys(load.gpu for load in loads))
    sizes = "".join(f" --tp {tp}" for tp in dict.fromkeys(load.tp for load in loads))
    return f"Run `{command(station, folder)}{gpus}{sizes}` again"
