"""What was measured of one checkpoint, section by section, for the model card.

In: a `FullReport`, and where its pictures are. Out: blocks of a document (markdown.py).

Easy to get wrong: a part that was not measured is not left out. It says why there is nothing.
"""

from collections.abc import Iterator, Mapping

from ...quantize.calibrate.mtp.facts import CalibrationFact
from ...recipes.errors import size_in_words
from ..facts.benched import BenchFact
from ..facts.closeness import PredictedFact
from ..facts.dry_load import (
    VERSION_COLUMNS,
    DryLoad,
    LoadedModel,
    by_version,
    version_rows,
    versions_in_short,
)
from ..facts.evaluated import NO_CALL, EvaluationFact
from ..facts.schema import FullReport
from ..facts.served import ARM_TITLES, ServedModel
from . import tables
from .markdown import Block, Md, Table, code, title
from .numbers import counted, limit, percent, quoted

Pictures = Mapping[str, Md]
"""What was drawn."""


def environment(of: Mapping[str, str]) -> str:
    """Versions and devices."""
    words = [f"{key}: {value}" for key, value in of.items() if value]
    return "; ".join(words) + "."


def _who(model: ServedModel | PredictedFact, *also: str) -> str:
    """Which checkpoint was served, and how."""
    how = f"NOT its own bytes, a {model.as_served}"
    if model.as_served == "native":
        how = "its own bytes"
    words = [f"{ARM_TITLES[model.role]}: {how}", code(model.path), *also]
    if model.reason:
        words.append(model.reason)
    return "; ".join(words)


# --- without a server -----------------------------------------------------------------------------


def gates(report: FullReport) -> Iterator[Block]:
    """The verdict of each gate, and why."""
    judged = report.judgement
    if judged is None:
        yield title("Gates")
        yield "Not judged."
        return
    yield title(f"Gates: {judged.title}")
    rows = [(reason.gate, reason.title, reason.says) for reason in judged.reasons]
    yield Table(columns=("gate", "verdict", "reason"), rows=rows)
    asked = dict(judged.gates)
    if report.target is not None:
        asked = judged.gates.model_dump(include={"min_acceptance", "confidence"})
    limits = [f"{name} {value}" for name, value in asked.items() if value is not None]
    yield f"The recipe's limits: {', '.join(limits)}."


def target(report: FullReport) -> list[tuple[str, str]]:
    """What a draft of its own was measured with, as a row."""
    found = report.target
    if found is None:
        return []
    says = f"{code(found.path)}, revision {code(found.revision)}"
    return [("Target", f"{says}; SHA-256 over its files {code(found.sha256)}")]


def dry(report: FullReport) -> Iterator[Block]:
    """What vLLM's own classes did with the checkpoint, and the kernels that they chose."""
    yield title("Dry load: vLLM's own classes on a pretended GPU")
    loads = report.dry
    if not loads:
        yield report.absent["dry"]
        return
    versions = versions_in_short(loads)
    if versions:
        yield f"vLLM {versions}."
    ordered = list[DryLoad]()
    for own in by_version(loads).values():
        ordered += own
    rows = []
    for load, row in zip(ordered, version_rows(loads), strict=True):
        rows.append((*row, _written(load.target), _written(load.draft), f"{load.seconds:.1f} s"))
    columns = (*VERSION_COLUMNS, "target: written", "draft: written", ">time")
    yield Table(columns=columns, rows=rows)
    yield (
        '"Written" counts runtime parameters that the loader filled over all their elements, by '
        "keepmtp's own account, not by vLLM's report."
    )
    kernels = tables.kernels(loads)
    if kernels.rows:
        yield kernels
    else:
        yield "No load came as far as choosing kernels."


def _written(model: LoadedModel) -> str:
    """How many of a model's parameters were written, and its class."""
    if not model.cls:
        return "not reached"
    shared = ""
    if model.shared:
        shared = f", {len(model.shared)} shared"
    return f"{model.num_written:,} of {model.num_params:,}{shared}: {model.cls}"


def sizes(report: FullReport) -> Iterator[Block]:
    """Bytes before and now."""
    yield title("Size by module group")
    rows = []
    before = 0
    for row in report.sizes:
        was = "-"
        if row.num_bytes_before is not None:
            was = size_in_words(row.num_bytes_before)
            before += row.num_bytes_before
        now = size_in_words(row.num_bytes)
        rows.append((row.part, row.group, f"{row.num_tensors:,}", was, now))
    if not rows:
        yield report.absent["sizes"]
        return
    after = sum([row.num_bytes for row in report.sizes])
    rows.append(("all", "", "", size_in_words(before), size_in_words(after)))
    yield Table(columns=("part", "modules", ">tensors", ">before", ">now"), rows=rows)
    yield "Scales are counted with the weights they belong to."


def calibration(report: FullReport) -> Iterator[Block]:
    """What it was calibrated on, and what was measured without a server."""
    if report.target is not None:  # nothing of it can be
        return
    yield title("Calibration, and acceptance without a server")
    fact = report.calibration
    if fact is None:
        yield report.absent["calibration"]
        return
    data = fact.data
    yield (
        f"Calibrated by {fact.algorithm} on {data.tokens:,} tokens ({counted(data.rows, 'row')}) "
        f"in sequences of {fact.sequence_length:,}, seed {data.seed}, "
        f"processes: {fact.processes}; measured on {data.held_out_tokens:,} tokens held "
        "out. Texts:"
    )
    texts = []
    for one in (data, *data.also):
        share = f"{percent(one.share)} of " if one in data.also else ""
        subset = f", {one.subset}" if one.subset else ""
        place = f"{one.dataset_revision}, split {one.split}, column {one.column}"
        texts.append(f"{share}{code(one.dataset)}{subset}, {place}")
    yield texts
    if fact.rows:
        yield tables.held_out(fact)
    if fact.candidates:
        yield "Candidates for the MTP block:"
        yield tables.candidates(fact)
        yield _budget(fact)
    yield [*tables.calibration_notes(fact)]
    yield (
        "Divergence is Kullback and Leibler's, of a backbone's predictions from the released "
        "model's, in nats a position."
    )
    if fact.measured:
        yield (
            "Acceptance is what a server at temperature 0 would accept where the text is what the "
            f"model itself would write, {fact.measured[0][1].num_slots:,} positions of it."
        )


def _budget(fact: CalibrationFact) -> str:
    says = (
        "The smallest that is shown to keep enough is taken; kept is the least over 1 to "
        f"{fact.k} tokens a step."
    )
    if fact.min_acceptance is None:
        return says
    sure = ""
    if fact.confidence is not None:
        sure = (
            f", at {limit(fact.confidence)} confidence to one side (a jackknife over the held-out "
            "sequences)"
        )
    kept = percent(fact.min_acceptance)
    return f"The budget: {kept} of the released model's acceptance{sure}. {says}"


# --- servers --------------------------------------------------------------------------------------


def accepted(report: FullReport, pictures: Pictures) -> Iterator[Block]:
    """Whatever servers drafted and accepted."""
    yield title("Draft acceptance")
    if "acceptance" in pictures:
        yield pictures["acceptance"]
    counters = tables.accepted(report)
    if counters.rows:
        yield counters
        yield (
            "Acceptance depends on what is asked: compare rows of the same question only. A draft "
            "that is rejected costs time, never answers. Length: tokens a step of the target."
        )
    else:
        yield "Not measured on a server."


def bench(fact: BenchFact, pictures: Pictures) -> Iterator[Block]:
    """Tokens a second over k."""
    yield title("Speed with and without MTP")
    if "speed" in pictures:
        yield pictures["speed"]
    for model in fact.benched:
        asked = "texts"
        if model.form == "chat":
            asked = "messages through the chat template"
        yield _who(model, f"asked with {asked}, at most {model.max_num_seqs:,} requests at once")
        yield tables.cells(model)
    yield (
        "tok/s: tokens a second, ± half the distance from the slowest to the fastest repetition; "
        "best: the k that is recommended; first and each: milliseconds to the first token and to "
        "each further one; by position: drafted tokens that were accepted; length: tokens a step "
        "of the target."
    )
    yield [*tables.speed_notes(fact)]
    yield (
        f"{fact.num_prompts:,} prompts of {code(fact.prompts)} (SHA-256 "
        f"{code(fact.prompts_sha256)}), greedily, at most {fact.output_tokens:,} tokens an answer, "
        f"asked by `vllm bench serve`. {environment(fact.environment)}"
    )


def closeness(report: FullReport) -> Iterator[Block]:
    """How far the served predictions are from those of the source, where that was measured."""
    fact = report.closeness
    if fact is None:
        return
    yield title("Closeness to the source on held-out text, as served")
    yield [_who(model) for model in fact.predicted]
    yield tables.closeness(fact)
    yield [*tables.closeness_notes(fact)]
    if report.calibration and report.calibration.rows:
        yield (
            "The divergence in the section on calibration is another one: of transformers with "
            "these weights, on calibration's own held-out text. This one is of the servers."
        )
    yield "Farthest off, in the worst windows:"
    yield tables.farthest(fact)
    yield f"Every position is in {fact.samples}. {environment(fact.environment)}"


def tasks(report: FullReport) -> Iterator[Block]:
    """Scores of source and checkpoint, and the protocol."""
    if report.target is not None:  # a draft has none
        return
    fact = report.evaluation
    asked = "GSM8K"
    if fact and fact.protocol.task != "gsm8k":
        asked = fact.protocol.title
    yield title(f"{asked} with MTP")
    if fact is None:
        yield report.absent["evaluation"]
        return
    yield [_who(model) for model in fact.arms]
    yield tables.scores(fact)
    for task in fact.by_task:
        if task.num_calls == 0:
            yield NO_CALL
    yield (
        "±: one standard error of the mean over questions, in points. Cut: answers that reached "
        "max_tokens; they count as they are."
    )
    if fact.paired:
        yield tables.differences(fact)
        yield (
            "Checkpoint less source, in points, on the same questions. Standard error and interval "
            "are Agresti and Min's (2005), which are not zero where few answers part."
        )
    else:
        yield "The source was not evaluated, so there is no difference to show."
    if fact.plain:
        yield from _drafting(fact)
    together = tables.tasks(fact, tables.wanted_filter(report))
    if together:
        yield title("All tasks")
        yield together
        yield (
            "Recovery: the score as a share of the source's; its interval is from the pairs of "
            "answers (Agresti and Min), and the mean counts each task once, their errors being "
            "independent. What is above, and the charts, are of the first task."
        )
    for task in fact.tasks:
        if task.protocol.calls_tools:
            yield title(task.protocol.title)
            yield tables.scores(task)
    yield _protocol(fact)
    yield environment(fact.environment)


def _protocol(fact: EvaluationFact) -> Table:
    asked = fact.protocol
    rows = [
        ("dataset", code(asked.dataset_name)),
        ("SHA-256 of questions and answers", code(fact.dataset_sha256)),
    ]
    for name, value in asked:
        if name != "dataset" and value is not None:
            rows.append((name, f"{value}"))
    harness = "" if asked.calls_tools else " of lm-evaluation-harness"
    return Table(columns=(f"protocol{harness}", ""), rows=rows)


def _drafting(fact: EvaluationFact) -> Iterator[Block]:
    drafting = fact.drafting
    assert fact.plain and drafting, "what was asked with MTP off is compared"
    rows = []
    for switch in drafting.switches:
        counts = (
            f"{switch.both:,}",
            f"{switch.only_plain:,}",
            f"{switch.only_drafting:,}",
            f"{switch.neither:,}",
        )
        questions = ", ".join([str(number) for number in switch.questions]) or "none"
        rows.append((switch.reads, *counts, f"{switch.chance:.2g}", questions))
    heads = ("right by", ">both", ">only with MTP off", ">only with MTP on", ">neither")
    yield Table(columns=(*heads, ">chance", "questions that differ"), rows=rows)
    num = fact.plain.num_questions
    yield (
        "The same checkpoint, greedy, on the same questions. Chance: how often two equal servers "
        f"split at least as unevenly (exact two-sided sign test). {drafting.num_changed:,} of "
        f"{num:,} answers ({percent(drafting.num_changed / num)}) are another text: greedy "
        "decoding promises the same one up to rounding, and near-ties may flip."
    )
    changed = []
    for one in drafting.changed:
        texts = f"MTP off: {quoted(one.plain)}; MTP on: {quoted(one.drafting)}"
        changed.append(f"Question {one.question}, {texts}")
    if changed:
        yield changed
