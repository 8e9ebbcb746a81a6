"""The rows and sentences that terminal, page and card have in common, each figure rounded once.

In: facts. Out: a `Table` of words, and sentences.

Easy to get wrong: a k whose server failed has no figure and says so.
"""

from collections.abc import Iterator
from typing import get_args

from ...quantize.calibrate.mtp.facts import CalibrationFact, SearchFact
from ...recipes.errors import counted, size_in_words
from ..facts.benched import BenchCell, Benched, BenchFact, words_of
from ..facts.binomial import limits
from ..facts.closeness import ClosenessFact
from ..facts.evaluated import EvaluatedFact, EvaluationFact, ScoreFact, TaskFact
from ..facts.probed import InAnswer
from ..facts.schema import FullReport
from ..facts.served import Drafts, ServeCheck, how_served
from .drafted import counts_bench
from .markdown import Table
from .numbers import figure, percent, quoted, signed
from .settle import Recovery, mean_recovery, recovery

_CONFIDENCE = 0.95


# --- calibration ----------------------------------------------------------------------------------


def held_out(fact: CalibrationFact) -> Table:
    """A row for each model that was measured on held-out text, without a server."""
    rows = []
    for row in fact.rows:
        shares = "-"
        length = None
        divergence = "-"
        if row.acceptance:
            shares = " ".join([percent(share) for share in row.acceptance.shares])
            length = row.acceptance.length
        if row.divergence is not None:
            divergence = f"{row.divergence:.4f}"
        rows.append((row.title, figure(row.perplexity), divergence, shares, figure(length)))
        for kind, perplexity in row.perplexity_of_kind.items():
            divergence = "-"
            if kind in row.divergence_of_kind:
                divergence = f"{row.divergence_of_kind[kind]:.4f}"
            rows.append((f"only {kind}", figure(perplexity), divergence, "", ""))
    return Table(
        columns=("", ">perplexity", ">divergence", f">accepted, k={fact.k}", ">length"), rows=rows
    )


def plans(search: SearchFact) -> Table:
    """The plans that a search under a budget measured."""
    rows = []
    for plan in search.plans:
        title = f"{plan.title}{', chosen' * plan.chosen}"
        nats = f"{plan.predicted:.4f}", f"{plan.divergence:.4f}", f"{plan.lost:.4f}"
        rows.append((title, f"{plan.bytes:,}", f"{plan.bits:.2f}", *nats, percent(plan.kept)))
    return Table(
        columns=("", ">bytes", ">bits", ">predicted", ">divergence", ">lost", ">kept"), rows=rows
    )


def candidates(fact: CalibrationFact) -> Table:
    """The candidates of `mtp: auto`, in the order tried."""
    rows = []
    for each in fact.candidates:
        verdict = fact.verdict_on(each)
        if each.acceptance is None:
            rows.append((each.title, *"----", f"{verdict}: {each.refused}"))
            continue
        if each.chosen:
            verdict = f"chosen; {verdict}"
        kept = percent(each.kept), percent(each.kept_at_least)
        length = figure(each.acceptance.length)
        rows.append((each.title, size_in_words(each.bytes), *kept, length, verdict))
    return Table(columns=("policy", ">size", ">kept", ">at least", ">length", "verdict"), rows=rows)


def calibration_notes(fact: CalibrationFact) -> Iterator[str]:
    """What a reader of these tables should know."""
    coverage = fact.coverage
    seen = f"Coverage: {coverage.modules:,} modules calibrated on {fact.data.tokens:,} tokens"
    if fact.batch_size:
        seen += f", in batches of {fact.batch_size:,}"
    if coverage.fewest_tokens and coverage.fewest_tokens.tokens:
        fewest = coverage.fewest_tokens
        seen += f"; the fewest, {fewest.tokens:,}, reached {fewest.module}"
    yield f"{seen}."
    yield (
        f"The quantized backbone chooses the released model's next token at "
        f"{percent(fact.agreement)} of held-out slots."
    )
    if fact.together:
        yield fact.together
    if fact.parts:
        yield fact.parts
    if fact.data.held_out_by == "model":
        yield "The released model wrote the answers of the held-out text itself."
    never = coverage.never_routed
    if never:
        names = list(never[:3])
        if len(never) > 3:
            names.append("...")
        yield (
            f"Never routed: the router sent no token to {len(never):,} expert modules "
            f"({', '.join(names)}); calibrated on every token instead. More samples may reach them."
        )
    if fact.tuned:
        yield fact.tuned.says
    if fact.unmeasured:
        yield f"No acceptance: {fact.unmeasured}"
    if fact.measured:
        yield (
            "Accepted: by position in the draft; length: tokens that a step yields, the target's "
            "included."
        )


# --- tasks ----------------------------------------------------------------------------------------


def wanted_filter(report: FullReport) -> str:
    """The filter whose score the recipe judges; without a judgement the first; "" where no task was
    asked.
    """
    if report.judgement:
        return report.judgement.gates.filter
    if report.evaluation:
        return report.evaluation.checkpoint.scores[0].filter
    return ""


def scores(task: TaskFact) -> Table:
    """A row for each that was asked: its score by every filter, and answers cut or empty."""
    columns = [f">{name}" for name in task.checkpoint.filters]
    rows = []
    for arm in task.arms:
        reached = [score(one) for one in arm.scores]
        cut = f"{_cut(arm)} ({arm.num_truncated:,})"
        rows.append((arm.title, *reached, f"{arm.num_questions:,}", cut, f"{arm.num_empty:,}"))
    columns = ("", *columns, ">asked", ">cut", ">empty")
    if not task.protocol.calls_tools:
        return Table(columns=columns, rows=rows)
    # So many columns have no room in 80.
    (_, *titles), *lines = zip(columns, *rows, strict=True)
    named = [(name[1:], *cells) for name, *cells in lines]
    return Table(columns=("", *[f">{title}" for title in titles]), rows=named)


def differences(task: TaskFact) -> Table:
    """The checkpoint less its source, on the same questions, by every filter."""
    rows = []
    interval = ">interval"
    for pair in task.paired:
        interval = f">{100 * pair.confidence:g} % interval"
        rows.append(
            (
                pair.filter,
                f"{signed(pair.difference)} ± {100 * pair.stderr:.2f}",
                f"{signed(pair.low)} to {signed(pair.high)}",
                f"{pair.both:,}",
                f"{pair.only_source:,}",
                f"{pair.only_checkpoint:,}",
                f"{pair.neither:,}",
            )
        )
    return Table(
        columns=("right by", ">difference", interval, ">both", ">source", ">this", ">neither"),
        rows=rows,
    )


def drafts(task: TaskFact) -> Table:
    """What was drafted over the questions, and how fast they were answered."""
    rows = []
    for arm in task.arms:
        rate = "-"
        if arm.seconds:
            rate = f"{arm.num_tokens / arm.seconds:,.0f}"
        rows.append((arm.title, *_accepted(arm), f"{arm.num_tokens:,}", rate))
    return Table(columns=("", *_ACCEPTED, ">tokens", ">tok/s"), rows=rows)


def tasks(evaluation: EvaluationFact | None, wanted: str) -> Table | None:
    """A row for each task and one for their mean; None where one task or less was asked.

    Args:
        evaluation: what was asked.
        wanted: the filter that the recipe judges.
    """
    if evaluation is None or not evaluation.tasks:
        return None
    rows = []
    for task in evaluation.by_task:
        name = task.judged_filter(wanted)
        before = "-"
        cut = _cut(task.checkpoint)
        if task.source:
            before = percent(task.source.score(name).value)  # 80 columns have room for one error
            # A checkpoint that no longer ends its answers reaches the limit of tokens more often
            # than its source, and its score may hide that where the answer comes early.
            cut = f"{_cut(task.source)} / {cut}"
        after = score(task.checkpoint.score(name))
        kept = _recovery(recovery(task, wanted))
        rows.append((f"{task.protocol.title}, {name}", before, after, kept, cut))
    rows.append(("mean", "-", "-", _recovery(mean_recovery(evaluation.by_task, wanted)), "-"))
    return Table(columns=("task", ">source", ">checkpoint", ">recovery", ">cut"), rows=rows)


def score(one: ScoreFact) -> str:
    """`68.92 % ± 1.27`, with the standard error in points."""
    return f"{percent(one.value)} ± {100 * one.stderr:.2f}"


def _recovery(found: Recovery | None) -> str:
    if found is None:
        return "-"
    low, high = found.interval
    return f"{percent(found.value)} ({100 * low:.2f} to {100 * high:.2f})"


def _cut(one: EvaluatedFact) -> str:
    return percent(one.num_truncated / one.num_questions)


# --- drafts, servers and speed --------------------------------------------------------------------

_ACCEPTED = (">accepted", ">by position, %", ">length")


def _accepted(counted: Drafts) -> tuple[str, ...]:
    """Cells under `_ACCEPTED`; length: tokens a step of the target."""
    shares = [f"{100 * share:.1f}" for share in counted.acceptance_per_position]
    by_position = "-"
    if shares:
        by_position = " ".join(shares)
    return percent(counted.acceptance), by_position, figure(counted.mean_accepted_length)


def servers(serve: ServeCheck) -> Table:
    """A row for each server."""
    rows = []
    for served in serve.served:
        for run in served.runs:
            cells = ("failed", *("-",) * 6)
            if run.loaded:
                rate = f"{run.tokens_per_second:,.1f}"
                same = "-"
                if run.partings is not None:
                    same = f"{len(run.outputs) - len(run.partings)}/{len(run.outputs)}"
                start = f"{run.seconds_to_health:.0f} s"
                cells = (start, *_accepted(run), rate, figure(run.speed_up), same)
            rows.append((served.role, f"{run.k}", *cells))
    return Table(
        columns=("", ">k", ">start", *_ACCEPTED, ">tok/s", ">over k=0", ">same"), rows=rows
    )


def probed(serve: ServeCheck) -> Table:
    """A row for each server and depth of the probe: in how many answers each was seen."""
    rows = []
    for served in serve.served:
        for run in served.runs:
            for each in run.probed:
                counts = [run.k, each.depth]
                counts += [len(each.seen.get(name, ())) for name in get_args(InAnswer)]
                rows.append((served.role, *map(str, counts)))
    return Table(
        columns=("", *[f">{head}" for head in ("k", "depth", *get_args(InAnswer))]), rows=rows
    )


def results(report: FullReport) -> Table:
    """A row for each figure, of source, checkpoint, and checkpoint with MTP off: scores, acceptance
    by k, divergence, and speed where it is the checkpoint's.
    """
    rows = []
    wanted = wanted_filter(report)
    for task in report.evaluation.by_task if report.evaluation else ():
        name = task.judged_filter(wanted)
        cells = []
        for one in (task.source, task.checkpoint, task.plain):
            cells.append(score(one.score(name)) if one else "-")
        asked = counted(task.checkpoint.num_questions, "question")
        rows.append((f"{task.protocol.title}, {name}, {asked}", *cells))
    for asked, k, source, checkpoint in _drafts_by_k(report):
        rows.append((f"accepted, k={k}, {asked}", _in_short(source), _in_short(checkpoint), "-"))
    if report.closeness:
        fact = report.closeness
        says = f"divergence from the source, {fact.tokens:,} tokens"
        rows.append((says, "-", _divergence(fact), "-"))
    if report.bench and counts_bench(report.bench):
        bench = report.bench
        for load in bench.checkpoint.loads:
            cells = [_speed(bench.source, load), _speed(bench.checkpoint, load)]
            cells.append(_speed(bench.checkpoint, load, k=0))
            rows.append((f"tokens a second, {words_of(load)}", *cells))
    return Table(columns=("", ">source", ">checkpoint", ">checkpoint, MTP off"), rows=rows)


def _drafts_by_k(report: FullReport) -> Iterator[tuple[str, int, Drafts | None, Drafts]]:
    """What was asked, k, and the counters of source and checkpoint: of the first task and of
    serve-check's prompts.
    """
    if first := report.evaluation:
        yield first.protocol.title, first.protocol.k, first.source, first.checkpoint
    if report.serve:
        asked = f"serve-check's {counted(len(report.serve.prompts), 'prompt')}"
        before = {}
        if report.serve.source:
            before = {run.k: run for run in report.serve.source.drafting}
        for run in report.serve.checkpoint.drafting:
            yield asked, run.k, before.get(run.k), run


def _in_short(counted: Drafts | None) -> str:
    """`79.33 % of 120,000, length 3.38`."""
    if counted is None or not counted.draft_tokens:
        return "-"
    length = figure(counted.mean_accepted_length)
    return f"{percent(counted.acceptance)} of {counted.draft_tokens:,}, length {length}"


def _speed(benched: Benched | None, load: tuple[int, int], k: int | None = None) -> str:
    """`193.0 ± 3.9, k=3`, of the k that is recommended where none is given."""
    for row in benched.recommended if benched and k is None else ():
        if row.load == load:
            k = row.k
    if benched and k is not None and (cell := benched.cell(k, load)):
        return f"{_rate(cell)}, k={k}"
    return "-"


def _rate(cell: BenchCell) -> str:
    """Tokens a second, ± half of what repetitions spread."""
    if not (cell.tokens_per_second and cell.fastest and cell.slowest):
        return "failed"
    return f"{cell.tokens_per_second:,.1f} ± {(cell.fastest - cell.slowest) / 2:,.1f}"


def cells(benched: Benched) -> Table:
    """A row for each load and k; `best` is the k that is recommended, ± half of what repetitions
    spread.
    """
    best = {row.load: row.k for row in benched.recommended}
    rows = []
    for cell in benched.cells:
        figures = (_rate(cell), *("-",) * 5)
        if cell.tokens_per_second:
            times = f"{cell.first_token_ms:,.1f}", f"{cell.per_token_ms:,.1f}"
            over = "-"
            if cell.k:
                over = figure(benched.speed_up(cell))
            figures = (_rate(cell), over, *times, *_accepted(cell.drafts)[1:])
        name = f"{cell.k}"
        if cell.k == best[cell.load]:
            name = f"best {cell.k}"
        rows.append((words_of(cell.load), name, *figures))
    return Table(
        columns=("load", ">k", ">tok/s", ">over k=0", ">first ms", ">each ms", *_ACCEPTED[1:]),
        rows=rows,
    )


def speed_notes(bench: BenchFact) -> Iterator[str]:
    """What is recommended of the checkpoint, and what speaks against the figures."""
    for row in bench.checkpoint.recommended:
        load = words_of(row.load)
        if row.k is None:
            yield f"{load}: no k is recommended: {row.says}."
        else:
            gain = ""
            if row.k and row.speed_up:
                gain = f", {row.speed_up:.2f} times as fast as k=0"
            yield f"{load}: k={row.k}{gain}: {row.says}."
    yield from bench.checkpoint.slower
    for model in bench.benched:
        for cell in model.cells:
            if cell.error:
                yield (
                    f"{model.role}, k={cell.k}, {words_of(cell.load)}: no figure. "
                    f"{cell.error.rstrip('.')}."
                )


# --- closeness ------------------------------------------------------------------------------------


def closeness(fact: ClosenessFact) -> Table:
    """Name and figure, the most telling first."""
    before = f"{fact.source.perplexity:.4g}"
    after = f"{fact.checkpoint.perplexity:.4g}"
    whole = "all"
    if not fact.is_exact:
        whole = f"the likeliest {fact.top:,} of"
    rows = [
        ("divergence from the source", _divergence(fact)),
        (
            "of a token: median, 99th percentile",
            f"{fact.median:.3g}, {fact.percentile_99:.3g} nats",
        ),
        ("the most likely token differs", _flips(fact)),
        ("perplexity: source, checkpoint", f"{before}, {after}"),
        ("tokens compared", f"{fact.tokens:,} in {fact.windows:,} windows"),
        ("predicted tokens compared", f"{whole} {fact.vocabulary:,}"),
    ]
    return Table(columns=("figure", "value"), rows=rows)


def farthest(fact: ClosenessFact) -> Table:
    """The positions that are farthest off; texts are a model's, in quotes."""
    rows = []
    for one in fact.worst:
        row = [f"{one.nats:.2f}"]
        for text in (one.context[-32:], one.token, one.source, one.checkpoint):
            row.append(quoted(text))
        rows.append(tuple(row))
    return Table(columns=(">nats", "after", "text", "source", "checkpoint"), rows=rows)


def closeness_notes(fact: ClosenessFact) -> Iterator[str]:
    """What a reader should know, a sentence or two each."""
    yield (
        f"Text: {fact.text}, in windows of at most {fact.window:,} tokens. ±: one standard error, "
        "over windows; in brackets the 95 % interval, by Korn and Graubard."
    )
    if fact.against:
        yield fact.against
    if not fact.is_exact:
        yield (
            f"The rest of the vocabulary, {percent(fact.outside)} of the source's probability, "
            "counts as one token, so the divergence is a lower bound."
        )
    for one in fact.predicted:
        if one.reason:
            yield how_served(one.role, one.as_served, one.reason)
        if one.repeated:
            yield (
                f"Asked the same again, the {one.role}'s server was {one.repeated:.2g} nats a "
                "token from itself: less than that is rounding."
            )


def _divergence(fact: ClosenessFact) -> str:
    """`0.0123 ± 0.0004 nats a token`."""
    says = f"{fact.divergence:.3g}"
    if not fact.is_exact:
        says = f"at least {says}"
    if fact.stderr is not None:
        says += f" ± {fact.stderr:.2g}"
    return f"{says} nats a token"


def _flips(fact: ClosenessFact) -> str:
    """`2.10 % (1.92 to 2.30)`, the interval at 95 % confidence."""
    trials = fact.effective_tokens
    low, high = limits(fact.flip_rate * trials, trials, 1 - (1 - _CONFIDENCE) / 2)
    return f"{percent(fact.flip_rate)} ({100 * low:.2f} to {100 * high:.2f})"
