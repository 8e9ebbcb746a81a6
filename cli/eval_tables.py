"""What `keepmtp eval` found, for people: scores, what they lost, drafts, and what the recipe's gates say of it.

In: an `EvaluationFact` and a `JudgementFact`. Out: what rich prints.

Easy to get wrong: a score without its protocol, its number of questions and its standard error is no score.
"""

from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..validate.evaluation.evaluated import Arm, EvaluatedFact, EvaluationFact, PairedFact
from ..validate.report.schema import JudgementFact
from .tables import VERDICT_COLOURS, escape

_ROWS: Mapping[Arm, str] = {"source": "source", "checkpoint": "checkpoint", "plain": "MTP off"}


def table(fact: EvaluationFact, judged: JudgementFact) -> RenderableType:
    """One row a checkpoint, then the differences, the gates, and whatever a reader should know."""
    rows = Table(
        title=f"eval {escape(fact.checkpoint.path)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    filters = [score.filter.partition("-")[0] for score in fact.checkpoint.scores]
    for name in ("", *filters, "n", "kept", "by position", "len", "tok/s"):
        rows.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in fact.arms:
        rows.add_row(_ROWS[one.role], *_cells(one))
    lines = [escape(_difference(pair)) for pair in fact.paired]
    for reason in judged.reasons:
        colour = VERDICT_COLOURS[reason.verdict]
        lines.append(f"[{colour}]{reason.gate}: {reason.verdict}[/]  {escape(reason.says)}")
    lines.append(f"[{VERDICT_COLOURS[judged.verdict]}]Judgement: {judged.verdict}[/]")
    lines += [escape(note) for note in _notes(fact)]
    return Group(rows, Text.from_markup("\n".join(lines)))


def _cells(one: EvaluatedFact) -> tuple[str, ...]:
    length = one.mean_accepted_length
    return (
        *(f"{100 * score.value:.2f} ±{100 * score.stderr:.2f}" for score in one.scores),
        f"{one.num_questions}",
        "-" if one.acceptance is None else f"{100 * one.acceptance:.1f}",
        " ".join(f"{100 * share:.1f}" for share in one.acceptance_per_position) or "-",
        f"{length:.2f}" if length else "-",
        f"{one.num_tokens / one.seconds:.0f}" if one.seconds else "-",
    )


def _difference(pair: PairedFact) -> str:
    low, high = 100 * pair.low, 100 * pair.high
    return (
        f"{pair.filter}: {100 * pair.difference:+.2f} points, {100 * pair.confidence:g} % interval {low:+.2f} to "
        f"{high:+.2f}; {pair.only_source} right by the source alone, {pair.only_checkpoint} by the checkpoint alone."
    )


def _notes(fact: EvaluationFact) -> Iterator[str]:
    for one in fact.evaluated:
        if one.as_served != "native":
            yield f"The {one.title} was served as a {one.as_served}: {one.reason}."
        if one.sittings > 1:
            yield f"The {one.title} was asked in {one.sittings} sittings."
    protocol, environment = fact.protocol, fact.environment
    yield (
        f"Protocol: {protocol.title} by lm-eval {environment['lm-eval']} on {protocol.dataset_name}, "
        f"{protocol.shots} shots, {protocol.api}, at most {protocol.max_tokens} tokens, greedy, method=mtp with "
        f"k={protocol.k}, prefix caching {'on' if protocol.prefix_caching else 'off'}, {protocol.concurrency} requests "
        f"in flight, seed {protocol.seed}."
    )
    cut = ", ".join(f"{_ROWS[one.role]} {one.num_truncated}" for one in fact.arms)
    empty = ", ".join(f"{_ROWS[one.role]} {one.num_empty}" for one in fact.arms)
    yield f"Answers cut at the limit of tokens: {cut}. Empty answers: {empty}."
    yield (
        f"vLLM {environment['vllm']} on {environment['device']}. Scores in %, ±: standard error; kept: drafted tokens "
        "that were accepted, in %, also by position; len: mean accepted length, tokens a step of the target."
    )
