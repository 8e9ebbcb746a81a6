"""The rows and sentences that terminal, page and card have in common, each figure rounded once.

In: facts. Out: a `Table` of words, and sentences.

Easy to get wrong: a k whose server failed has no figure and says so.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ...quantize.calibrate.mtp.facts import CalibrationFact
from ...recipes.errors import size_in_words
from ..facts.numbers import figure, percent
from ..facts.rows import ARM_TITLES, Arm, Row
from ..facts.schema import FullReport
from ..facts.served import StationFact
from .markdown import Table

LEGEND = (
    "±: one standard error, of speed half of what repetitions spread; in brackets the 95 % "
    "interval. Length: tokens a step of the target."
)

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
    return Table(
        columns=("", ">perplexity", ">divergence", f">accepted, k={fact.k}", ">length"), rows=rows
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
    if fact.parts:
        yield fact.parts
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


# --- what servers gave ----------------------------------------------------------------------------


def results(rows: Iterable[Row]) -> Table:
    """A line for each figure, of source, checkpoint, and checkpoint with MTP off."""
    cells = defaultdict[str, dict[Arm, str]](dict)
    for row in rows:
        cells[row.title][row.of] = row.says
    lines = []
    for name, said in cells.items():
        lines.append((name, *[said.get(arm, "-") for arm in ARM_TITLES]))
    return Table(columns=("", *[f">{each}" for each in ARM_TITLES.values()]), rows=lines)


def rows_of(report: FullReport) -> list[Row]:
    """Everything that servers gave."""
    wanted = report.judgement.gates.filter
    return [row for part in report.parts for row in part.rows(wanted)]


def how_served(fact: StationFact) -> Iterator[str]:
    """Of a station's two models, how each was served where that is not as it is."""
    for model in fact.models:
        reason = model.reason.rstrip(".")
        if reason and model.as_served == "native":
            yield f"Figures of the {model.role} are of a mended vLLM: {reason}."
        elif reason:
            yield (
                f"Figures of the {model.role} are of a {model.as_served}: {reason}. What "
                "packed kernels and quantized activations change is not in these numbers."
            )
