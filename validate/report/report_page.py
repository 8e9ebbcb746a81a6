"""What the page of one checkpoint says, section by section.

In: a `FullReport` and its pictures. Out: `Section`s in words, which templates/report.html.j2 lays
out; it computes nothing. Needs the `report` extra (markupsafe comes with jinja2).

Easy to get wrong: names in a report come from strangers' checkpoints. A word becomes markup in
`marked` alone, which escapes all that it is given.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup, escape

from ...quantize.calibrate.mtp.facts import CalibrationFact
from ...recipes.errors import printable, size_in_words
from ...recipes.frozen import frozen
from ..facts.benched import BenchFact
from ..facts.closeness import ClosenessFact
from ..facts.dry_load import DryLoad, LoadedModel, cured_in, gpu_title, versions_in_short
from ..facts.evaluated import DraftingFact, EvaluationFact
from ..facts.findings import CheckpointFacts, Finding
from ..facts.schema import FullReport, GroupSize, JudgementFact, JudgementWord
from ..facts.served import Parting, Run, ServeCheck
from . import tables
from .numbers import count, counted, percent, quoted
from .tables import Table

Block = tuple[str, Any]
"""What a section holds: its kind and its content.

    p, note, absent   a paragraph: usual, small, or instead of what was not measured
    h3                a title within the section
    table             a `Table`; a head that begins with `=` is of words that are not broken
    facts             rows of (title, value), and rows that take the whole width
    how               (is it the checkpoint's own bytes, title, words) of each that was served
    chart             the name of a picture
"""
_KINDS: Mapping[JudgementWord, str] = {"pass": "good", "regression": "bad", "infeasible": "warn"}
_PROMPTS = {"chat": "chat template", "completions": "plain text (completions)"}
_ON_OFF = {True: "on", False: "off"}
_SEVERITIES = {"error": "bad", "warning": "warn"}
_ORIGINS = {"dry": "dry load"}
# What vLLM did with a model when it raised.
_STAGES = {
    "config": "reading the config of",
    "construct": "building",
    "load": "loading",
    "share": "sharing weights with",
    "process": "preparing the weights of",
    "world": "starting",
    "crash": "judging",
}


@frozen
class Section:
    """A section of the page; `name` is its anchor."""

    name: str
    title: str
    blocks: tuple[Block, ...]


def sections(report: FullReport, pictures: Collection[str]) -> Iterator[Section]:
    """All sections that the page has, in its order; `pictures` are the names of those that were
    drawn.
    """

    def part(name: str, blocks_of: Callable[[Any], Iterable[Block]]) -> Iterable[Block]:
        """What is said of a part, or why it is not there."""
        fact = getattr(report, name)
        if fact:
            return blocks_of(fact)
        return [("absent", ticked(report.absent[name]))]

    # The order is that of a reader's questions: is it good, what is it, what is wrong with it, and
    # then what was measured, from headers to tasks.
    found: list[tuple[str, str, Iterable[Block]]] = []
    if report.judgement:
        title = marked("Gates {}", _verdict(report.judgement))
        found.append(("gates", title, _gates(report.judgement)))
    if "acceptance" in pictures:
        found.append(("acceptance", "Acceptance, as it is judged", [("chart", "acceptance")]))
    asked = "GSM8K"
    if report.evaluation and report.evaluation.protocol.task != "gsm8k":
        asked = report.evaluation.protocol.title
    found += [
        ("facts", "Checkpoint", _checkpoint(report, report.facts)),
        ("findings", "Findings", _findings(report, report.findings)),
        ("dry", "Dry load: vLLM's own classes on a pretended GPU", part("dry", _dry)),
        ("sizes", "Size by module group", part("sizes", _sizes)),
        (
            "calibration",
            "Calibration, and acceptance without a server",
            part("calibration", _calibration),
        ),
        ("serve", "Real server, with and without MTP", part("serve", _serve)),
    ]
    if report.bench:
        blocks = _bench(report.bench, has_picture="speed" in pictures)
        found.append(("bench", "Speed with and without MTP", blocks))
    if report.closeness:
        title = "Closeness to the source on held-out text, as served"
        found.append(("closeness", title, _closeness(report, report.closeness)))
    wanted = tables.wanted_filter(report)
    found.append(("gsm8k", f"{asked} with MTP", part("evaluation", partial(_tasks, wanted))))
    for name, title, blocks in found:
        yield Section(name=name, title=title, blocks=tuple(blocks))


# --- words and marks ------------------------------------------------------------------------------


def marked(form: str, *values: object) -> Markup:
    """HTML with values in its places, each escaped unless it is `Markup` already."""
    # `Markup.format` escapes; a plain f-string would not. So no words are put together otherwise.
    shown = []
    for value in values:
        # A stranger's control characters and marks of direction become `\x1b`.
        if not isinstance(value, Markup):
            value = printable(str(value))
        shown.append(value)
    return Markup(form).format(*shown)  # noqa: S704 - `format` escapes


def ticked(words: str) -> Markup:
    """A sentence, escaped, with the words between backticks as code."""
    words = str(escape(printable(words)))  # of a Markup, `re` would escape what it puts in
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", words))  # noqa: S704 - escaped above


def _name(text: object) -> Markup:
    """A path, a hash or a module."""
    return marked('<span class="name">{}</span>', text)


def _pill(kind: str, words: str) -> Markup:
    return marked('<span class="pill {}">{}</span>', kind, words)


def _verdict(found: Any) -> Markup:
    """Of a gate, or of all of them."""
    return _pill(_KINDS[found.verdict], found.title)


def _environment(environment: Mapping[str, str]) -> str:
    words = [f"{key}: {value}" for key, value in environment.items() if value]
    return "; ".join(words) + "."


def _how(model: Any, words: Markup) -> tuple[bool, str, Markup]:
    """How one model was served, in the form of a `how` block."""
    is_own = model.as_served == "native"
    title = f"NOT its own bytes: a {model.as_served}"
    if is_own:
        title = "served natively, its own bytes"
    return is_own, f"{model.role.capitalize()}: {title}", words


def _which(models: Iterable[Any]) -> Block:
    """How each was served, by its path and the reason."""
    boxes = []
    for model in models:
        words = _name(model.path)
        if model.reason:
            words = marked("{}. {}", words, model.reason)
        boxes.append(_how(model, words))
    return "how", boxes


# --- without a server -----------------------------------------------------------------------------


def _gates(judgement: JudgementFact) -> Iterator[Block]:
    rows = []
    for reason in judgement.reasons:
        rows.append((reason.gate, _verdict(reason), ticked(reason.says)))
    yield "table", Table(columns=("=Gate", "Verdict", "Reason"), rows=rows)
    limits = judgement.gates
    says = (
        f"The recipe's limits, each at {100 * limits.confidence:g} % confidence to one side: at "
        f"most {100 * limits.max_drop:g} points of the source's GSM8K score lost "
        f"({limits.filter}), at least {100 * limits.min_acceptance:g} % of its acceptance kept."
    )
    if limits.min_speedup:
        says += (
            f" For one request at a time, at least {limits.min_speedup:g} times as many tokens a "
            "second with drafting as without it, beyond the spread of the repetitions."
        )
    if limits.max_divergence:
        says += (
            f" On held-out text, at most {limits.max_divergence:g} nats a token from the source."
        )
    if limits.max_flips:
        says += f" At most {100 * limits.max_flips:g} % of its tokens with another first choice."
    yield "note", says


def _checkpoint(report: FullReport, facts: CheckpointFacts) -> Iterator[Block]:
    rows = [
        ("Family", facts.family or "unknown"),
        ("Quantization config", facts.dialect or "unknown"),
        ("Size", size_in_words(facts.num_bytes)),
        ("Tensors", count(facts.num_tensors)),
        ("MTP layers", facts.num_mtp_layers),
        ("MTP tensors", count(facts.num_mtp_tensors)),
        ("MTP weights stored as", ", ".join(facts.mtp_forms) or "none"),
    ]
    wide = [("Path", _name(report.path))]
    if report.identity:
        title = f"SHA-256 over its {len(report.identity.files):,} files"
        wide.append((title, _name(report.identity.sha256)))
    yield "facts", (rows, wide)
    if not report.identity:
        yield "note", ticked(report.absent["identity"])


def _findings(report: FullReport, findings: Sequence[Finding]) -> Iterator[Block]:
    if not findings:
        who = "The static check"
        if report.dry:
            who += " and the dry load"
        yield "p", f"None. {who} found nothing that vLLM {report.vllm} would stumble over."
        return
    rows = []
    for finding in findings:
        rows.append(
            (
                _pill(_SEVERITIES[finding.severity], finding.severity),
                _name(finding.where),
                ticked(finding.says),
                ticked(finding.cure),
                count(finding.count),
                _ORIGINS.get(finding.origin, "static check"),
            )
        )
    columns = ("=Severity", "Where", "What will happen", "Cure", ">Count", "=Found by")
    yield "table", Table(columns=columns, rows=rows)


def _dry(loads: Sequence[DryLoad]) -> Iterator[Block]:
    versions = versions_in_short(loads)
    if versions:
        yield "p", f"vLLM {versions}."
    rows = []
    for load in loads:
        rows.append(
            (
                load.vllm,
                marked("<strong>{}</strong>", gpu_title(load.gpu)),
                f"{load.tp}",
                f"{load.k}",
                _result(load, loads),
                _written(load.target),
                _written(load.draft),
                f"{load.seconds:.1f} s",
            )
        )
    columns = ("vLLM", "GPU", ">TP", ">k", "Result", "Target: written", "Draft: written", ">Time")
    yield "table", Table(columns=columns, rows=rows)
    yield (
        "note",
        '"Written" counts runtime parameters that the loader filled over all their elements, by '
        "keepmtp's own account, not by vLLM's report.",
    )
    yield "h3", "Kernels"
    kernels = tables.kernels(loads)
    if kernels.rows:
        yield "table", kernels
    else:
        yield "absent", "No load came as far as choosing kernels."


def _result(load: DryLoad, loads: Sequence[DryLoad]) -> Markup:
    """What came of one dry load."""
    failure = load.failure
    if failure:
        raised = failure.words
        if failure.type:
            raised = f"{failure.type}: {raised}"
        said = marked(
            "{} while {} the {}: <code>{}</code>",
            _pill("bad", "vLLM raises"),
            _STAGES.get(failure.stage, failure.stage),
            failure.role or "model",
            raised,
        )
        if failure.at:
            said += marked(" at {}", _name(failure.at))
        if failure.tensor:
            said += marked(", while loading {}", _name(failure.tensor))
        if load.defect:
            said += marked("; {}", load.defect)
    elif load.num_errors:
        errors = counted(load.num_errors, "error")
        said = marked("{} in silence: {} above", _pill("bad", "loads wrongly"), errors)
    else:
        said = _pill("good", "loads")
    cured = cured_in(load, loads)
    if cured:
        said += marked("; cured in vLLM {}", cured)
    if load.cures:
        said += marked("; loads with keepmtp's cures of vLLM: {}", ", ".join(load.cures))
    return said


def _written(model: LoadedModel) -> Markup:
    """How many of a model's parameters were written, and its class."""
    if not model.cls:
        return Markup("not reached")
    short = '<span class="short">{}</span>'
    said = marked(short, f"{model.num_written:,} of {model.num_params:,}")
    if model.shared:
        said += marked(f", {short}", f"{len(model.shared)} shared")
    return said + marked('<br><span class="name note">{}</span>', model.cls)


def _sizes(sizes: Sequence[GroupSize]) -> Iterator[Block]:
    rows = []
    before = 0
    after = 0
    has_source = True
    for row in sizes:
        was = "-"
        after += row.num_bytes
        if row.num_bytes_before is not None:
            was = size_in_words(row.num_bytes_before)
            before += row.num_bytes_before
        else:
            has_source = False
        now = size_in_words(row.num_bytes)
        rows.append((row.part, row.group, count(row.num_tensors), was, now))
    columns = ("=Part", "Modules", ">Tensors", ">Before", ">This checkpoint")
    yield "table", Table(columns=columns, rows=rows)
    says = f"Before: {size_in_words(before)}; this checkpoint: {size_in_words(after)}."
    if not has_source:
        says = 'No source was given, so there is no "before" to compare with.'
    yield "note", says


def _calibration(fact: CalibrationFact) -> Iterator[Block]:
    data = fact.data
    texts = marked("{}, seed {}", _texts(data), data.seed)
    for one in data.also:
        texts += marked("; {} {}", percent(one.share), _texts(one))
    tokens = f"{data.tokens:,} tokens in sequences of {fact.sequence_length:,}"
    rows = [
        ("Algorithm", fact.algorithm),
        ("Calibrated on", tokens),
        ("Measured on", f"{data.held_out_tokens:,} tokens held out"),
        ("Processes", fact.processes),
    ]
    yield "facts", (rows, [("Dataset", texts)])
    if fact.rows:
        yield "h3", "Held-out text"
        yield "table", tables.held_out(fact)
    if fact.candidates:
        yield "h3", "Candidates for the MTP block"
        yield "table", tables.candidates(fact)
        says = (
            "The smallest that is shown to keep enough is taken; kept is the least over 1 to "
            f"{fact.k} tokens a step."
        )
        if fact.min_acceptance is not None:
            sure = ""
            if fact.confidence is not None:
                sure = (
                    f", at {100 * fact.confidence:g} % confidence to one side (a jackknife over "
                    "the held-out sequences)"
                )
            kept = percent(fact.min_acceptance)
            says = f"The budget: {kept} of the released model's acceptance{sure}. {says}"
        yield "note", says
    for note in tables.calibration_notes(fact):
        yield "note", ticked(note)
    says = (
        "Divergence is Kullback and Leibler's, of a backbone's predictions from the released "
        "model's, in nats a position. "
    )
    if fact.measured:
        num = fact.measured[0][1].num_slots
        says += (
            "Acceptance is what a server at temperature 0 would accept where the text is what the "
            f"model itself would write, {num:,} positions of it."
        )
    yield "note", says


def _texts(data: Any) -> Markup:
    """Which texts of which dataset."""
    name = _name(data.dataset)
    if data.subset:
        name = marked("{} ({})", name, data.subset)
    return marked(
        "{}, {}, split {}, column {}", name, data.dataset_revision, data.split, data.column
    )


# --- servers --------------------------------------------------------------------------------------


def _serve(serve: ServeCheck) -> Iterator[Block]:
    boxes = []
    runs: list[tuple[str, Run]] = []
    for model in serve.served:
        words = marked(
            "{}, {} stored as {}.", _name(model.path), size_in_words(model.num_bytes), model.dtype
        )
        if model.reason:
            words = marked("{} {}", words, model.reason)
        boxes.append(_how(model, words))
        for run in model.runs:
            runs.append((model.role, run))
    yield "how", boxes
    if not serve.checkpoint.drafting:
        yield (
            "absent",
            "No server came up with method=mtp, so there is no acceptance to show.",
        )
    yield "h3", "Runs"
    yield "table", tables.servers(serve)
    yield (
        "note",
        "Mean accepted length counts tokens per step of the target, its own included: between 1 "
        "and k + 1. Acceptance is the share of all drafted tokens that the target kept.",
    )
    partings: list[tuple[str, int, Parting]] = []
    has_compared = False
    for role, run in runs:
        yield from _notes_of_run(f"{role}, k={run.k}", run)
        if run.partings is not None:
            has_compared = True
            for parting in run.partings:
                partings.append((role, run.k, parting))
    yield "h3", "Where outputs part"
    if partings:
        yield "table", _partings(serve, partings)
    elif has_compared:
        yield (
            "absent",
            "Nowhere: all greedy outputs with MTP are those without, token for token.",
        )
    else:
        yield "absent", "There was no output with and without MTP to compare."
    yield (
        "note",
        f"{counted(len(serve.prompts), 'prompt')}, at most {serve.max_tokens} tokens each, "
        f"{serve.seconds:.0f} s in all. {_environment(serve.environment)}",
    )


def _notes_of_run(where: str, run: Run) -> Iterator[Block]:
    """What speaks against one server."""
    if run.error:
        pill = _pill("bad", "did not come up")
        yield "note", marked("{} {}: <code>{}</code>", pill, where, run.error)
    for note in run.notes:
        yield "note", f"{where}: {note}"
    for name in run.unwritten:
        yield "note", f"{where}: {name} was not written."
    if not run.is_repeatable:
        yield "note", f"{where}: Two passes of this server wrote different tokens."


def _partings(serve: ServeCheck, partings: Sequence[tuple[str, int, Parting]]) -> Table:
    def token(number: int | None) -> str:
        if number is None:
            return "end of text"
        return f"token {number}"

    rows = []
    for role, k, parting in partings:
        prompt = str(parting.prompt)
        if parting.prompt < len(serve.prompts):
            prompt = quoted(serve.prompts[parting.prompt])
        gap = "unknown"
        if parting.gap is not None:
            gap = f"{parting.gap:.3f}"
        verdict = _pill("bad", "differs")
        if parting.is_near_tie:
            verdict = _pill("none", "near-tie")
        tokens = token(parting.plain_token), token(parting.token)
        rows.append((role, f"{k}", _name(prompt), f"{parting.at}", *tokens, gap, verdict))
    heads = ("=Model", ">k", "Prompt", ">At token", "Without MTP", "With MTP", ">Gap (nats)")
    return Table(columns=(*heads, "Verdict"), rows=rows)


def _bench(bench: BenchFact, *, has_picture: bool) -> Iterator[Block]:
    boxes = []
    for model in bench.benched:
        asked = "texts"
        if model.form == "chat":
            asked = "messages through the chat template"
        says = f"asked with {asked}, at most {model.max_num_seqs:,} requests at once."
        if model.reason:
            says += f" {model.reason}"
        boxes.append(_how(model, marked("{}, {}", _name(model.path), says)))
    yield "how", boxes
    if has_picture:
        yield "chart", "speed"
    for model in bench.benched:
        yield "h3", f"Tokens a second: {model.role}, served {tables.served_as(model)}"
        yield "table", tables.cells(model)
    yield (
        "note",
        "± is half the distance from the slowest to the fastest repetition; the best k is the one "
        "that is recommended; first and each: milliseconds to the first token and to each further "
        "one; by position: drafted tokens that were accepted; length: tokens a step of the target.",
    )
    for note in tables.speed_notes(bench):
        yield "note", ticked(note)
    yield (
        "note",
        marked(
            "Times are medians of the repetitions' medians. {} prompts of {} (SHA-256 "
            "<code>{}</code>), greedily, at most {} tokens an answer. {}",
            count(bench.num_prompts),
            _name(bench.prompts),
            bench.prompts_sha256,
            count(bench.output_tokens),
            _environment(bench.environment),
        ),
    )


def _closeness(report: FullReport, fact: ClosenessFact) -> Iterator[Block]:
    yield _which(fact.predicted)
    yield "table", tables.closeness(fact)
    for note in tables.closeness_notes(fact):
        yield "note", note
    if report.calibration and report.calibration.rows:
        yield (
            "note",
            "The divergence in the section on calibration is another one: of transformers with "
            "these weights, on calibration's own held-out text. This one is of the servers.",
        )
    yield "h3", "Farthest off, in the worst windows"
    yield "table", tables.farthest(fact)
    yield "note", f"Every position is in {fact.samples}. {_environment(fact.environment)}"


def _tasks(wanted: str, fact: EvaluationFact) -> Iterator[Block]:
    yield _which(fact.arms)
    yield "h3", "Scores"
    yield "table", tables.scores(fact)
    yield (
        "note",
        "±: one standard error of the mean over questions, in points. Cut short: answers that "
        "reached max_tokens; they count as they are.",
    )
    if fact.paired:
        yield "h3", "Question by question"
        yield "table", tables.differences(fact)
        yield (
            "note",
            "Checkpoint less source, on the same questions. Standard error and interval are "
            "Agresti and Min's (2005), which are not zero where few answers part.",
        )
    else:
        yield "absent", "The source was not evaluated, so there is no difference to show."
    if fact.drafting and fact.plain:  # it was also asked with MTP off
        yield from _drafting(fact.drafting, fact.plain.num_questions)
    yield "h3", "Drafts over the same questions"
    yield "table", tables.drafts(fact)
    together = tables.tasks(fact, wanted)
    if together:
        yield "h3", "All tasks"
        yield "table", together
        yield (
            "note",
            "Recovery: the score as a share of the source's; its interval is from the pairs of "
            "answers (Agresti and Min), and the mean counts each task once, their errors being "
            "independent. Cut: answers that reached their limit of tokens. What follows, and the "
            "charts, are of the first task.",
        )
    yield "h3", "Protocol"
    asked = fact.protocol
    limit = "all"
    if asked.limit is not None:
        limit = f"the first {asked.limit:,}"
    rows = [
        ("Task", asked.task),
        ("Shots", asked.shots),
        ("Prompts", _PROMPTS[asked.api]),
        ("Tokens an answer, at most", count(asked.max_tokens)),
        ("Draft tokens a step (k)", asked.k),
        ("Prefix caching", _ON_OFF[asked.prefix_caching]),
        ("Requests in flight", asked.concurrency),
        ("Questions asked", limit),
        ("Seed, temperature", f"{asked.seed}, 0"),
    ]
    dataset = _name(asked.dataset_name)
    if asked.dataset_revision:
        dataset = marked("{}, {}", dataset, asked.dataset_revision)
    sums = "{}, SHA-256 of questions and answers {}"
    yield "facts", (rows, [("Dataset", marked(sums, dataset, _name(fact.dataset_sha256)))])
    yield "note", _environment(fact.environment)


def _drafting(fact: DraftingFact, num_questions: int) -> Iterator[Block]:
    yield "h3", "MTP on against off"
    rows = []
    for switch in fact.switches:
        questions = "none"
        if switch.questions:
            questions = ", ".join([str(number) for number in switch.questions])
        rows.append(
            (
                switch.reads,
                count(switch.both),
                count(switch.only_plain),
                count(switch.only_drafting),
                count(switch.neither),
                f"{switch.chance:.2g}",
                questions,
            )
        )
    heads = ("Read by", ">Both right", ">Only with MTP off", ">Only with MTP on", ">Neither")
    yield "table", Table(columns=(*heads, ">Chance", "Questions that differ"), rows=rows)
    share = percent(fact.num_changed / num_questions)
    yield (
        "note",
        "The same checkpoint, greedy, on the same questions. Chance: how often two equal servers "
        f"split at least as unevenly (exact two-sided sign test). {fact.num_changed:,} of "
        f"{num_questions:,} answers ({share}) are another text: greedy decoding promises the same "
        "one up to rounding, and near-ties may flip.",
    )
    for one in fact.changed:
        form = "Question {}, MTP off: {}<br>MTP on: {}"
        texts = _name(quoted(one.plain)), _name(quoted(one.drafting))
        yield "note", marked(form, one.question, *texts)
