"""Charts of the report and of the model card.

In: parts of a `FullReport`. Out: drawings (svg.py), which become SVG on the page and PNG on the card; for the card
also the PNG of each of its pictures.

Easy to get wrong: a chart must claim no more than its gate. A chart with a limit also has the bound that the gate
judges, and the legend says which model was served as a copy.
"""

from collections import defaultdict
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ...quantize.calibrate.mtp.facts import CalibrationFact, CandidateFact, Verdict
from ...recipes.errors import printable
from ...recipes.protocol import Gates
from ..facts.benched import Benched
from ..facts.evaluated import EvaluatedFact, EvaluationFact
from ..facts.paired import one_sided
from ..facts.schema import FullReport, GroupSize
from ..facts.served import ServeCheck, Served
from .svg import Drawing, Inks, Series, bars, legend, png

_LABEL_LETTERS = 20
_Model = Served | EvaluatedFact | Benched
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def sizes(rows: Sequence[GroupSize]) -> Drawing:
    """Bars of one part's module groups, before and after where a source is known, in one unit of bytes."""
    largest = max(max(row.num_bytes, row.num_bytes_before or 0) for row in rows)
    unit, divisor = next(((unit, size) for unit, size in _UNITS if largest >= size), _UNITS[-1])
    has_before = any(row.num_bytes_before is not None for row in rows)
    height = 0.38 if has_before else 0.6

    def draw(axes: Axes, inks: Inks) -> None:
        spots = range(len(rows))
        after = [row.num_bytes / divisor for row in rows]
        if has_before:
            before = [(row.num_bytes_before or 0) / divisor for row in rows]
            bars = axes.barh([spot - height / 2 for spot in spots], before, height, color=inks.before, label="before")
            axes.bar_label(bars, fmt=_short, padding=3, fontsize=9.5, color=inks.muted)
        shift = height / 2 if has_before else 0.0
        bars = axes.barh([spot + shift for spot in spots], after, height, color=inks.after, label="this checkpoint")
        axes.bar_label(bars, fmt=_short, padding=3, fontsize=9.5)
        axes.set_yticks(spots, [_label(row.group) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"size on disk, scales included ({unit})")
        axes.grid(axis="x", color=inks.grid, linewidth=0.6)
        axes.margins(x=0.14)
        if has_before:
            legend(axes)

    return Drawing(draw=draw, height=0.95 + (0.46 if has_before else 0.32) * len(rows))


def acceptance(serve: ServeCheck, k: int, gates: Gates) -> Drawing:
    """Bars of the share of drafts accepted at each position, for source and checkpoint, with the recipe's limit."""
    runs = [(model, run.acceptance_per_position) for model in serve.served if (run := model.run(k)) is not None]
    return by_position(runs, k, gates.min_acceptance)


def evaluated_acceptance(evaluation: EvaluationFact, gates: Gates) -> Drawing:
    """The same over the questions of an evaluation."""
    models = [(model, model.acceptance_per_position) for model in evaluation.evaluated if model.drafts]
    return by_position(models, evaluation.protocol.k, gates.min_acceptance)


def scores(evaluation: EvaluationFact) -> Drawing:
    """Bars of the share of right answers by filter, for source and checkpoint, with two standard errors each way."""
    names = [score.filter for score in evaluation.checkpoint.scores]

    def draw(axes: Axes, inks: Inks) -> None:
        series = [
            _series(
                model,
                [100 * model.score(name).value for name in names],
                inks,
                errors=[200 * model.score(name).stderr for name in names],
            )
            for model in evaluation.evaluated
        ]
        bars(axes, series, range(len(names)), "{:.2f}".format, inks.ink)
        axes.set_xticks(range(len(names)), map(_label, names))
        axes.tick_params(axis="x", labelcolor=inks.ink)
        axes.set_ylabel("right answers (%)")
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 25))
        axes.grid(axis="y", color=inks.grid, linewidth=0.6)
        legend(axes)

    return Drawing(draw=draw, height=3.0)


def differences(evaluation: EvaluationFact, gates: Gates) -> Drawing:
    """Checkpoint less source by filter, in points: the interval, the bounds that the gate judges, and its limit."""

    def draw(axes: Axes, inks: Inks) -> None:
        for spot, pair in enumerate(evaluation.paired):
            sides = f"{100 * pair.confidence:g} % interval", f"judged: {100 * gates.confidence:g} % one-sided"
            ends = (pair.low, pair.high), one_sided(pair, gates.confidence)
            for (low, high), side, width in zip(ends, sides, (1.5, 5.0), strict=True):
                axes.hlines(
                    spot, 100 * low, 100 * high, color=inks.after, linewidth=width, label=side if not spot else "_"
                )
            axes.scatter(
                [100 * pair.difference], [spot], s=44, color=inks.ink, zorder=3, label="_" if spot else "difference"
            )
            axes.annotate(
                f"{100 * pair.difference:+.2f}",
                (100 * pair.difference, spot),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9.5,
            )
        axes.axvline(0, color=inks.muted, linewidth=0.8)
        axes.axvline(
            -100 * gates.max_drop,
            color=inks.bad,
            linewidth=1.2,
            linestyle="--",
            label=f"limit: {100 * gates.max_drop:g} points lost",
        )
        names = [_label(pair.filter) + "\n(judged)" * (pair.filter == gates.filter) for pair in evaluation.paired]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.6)
        axes.set_xlabel("checkpoint less source (points)")
        axes.margins(x=0.1)
        axes.grid(axis="x", color=inks.grid, linewidth=0.6)
        legend(axes)

    return Drawing(draw=draw, height=1.35 + 0.6 * len(evaluation.paired))


def gsm8k_png(report: FullReport) -> bytes | None:
    """The card's picture of scores and their difference; None where there is no evaluation."""
    evaluation = report.evaluation
    if evaluation is None:
        return None
    task = evaluation.protocol.title
    charts = [(f"{task}: {evaluation.checkpoint.num_questions:,} questions", scores(evaluation))]
    if evaluation.paired:
        charts.append(("Difference, question by question", differences(evaluation, gates_of(report))))
    return png(*charts)


def acceptance_png(report: FullReport) -> bytes | None:
    """The card's picture of acceptance by position: GSM8K's, else serve-check's, else calibration's, or None."""
    evaluation, serve, calibration = report.evaluation, report.serve, report.calibration
    title = "Drafts accepted by position"
    if evaluation and any(model.drafts for model in evaluation.evaluated):
        words = f"{title}, {evaluation.protocol.title}, k={evaluation.protocol.k}"
        return png((words, evaluated_acceptance(evaluation, gates_of(report))))
    ks = {run.k for model in serve.served for run in model.drafting} if serve else set()
    if serve and ks:
        words = f"{title}, {len(serve.prompts)} prompts, k={max(ks)}"
        return png((words, acceptance(serve, max(ks), gates_of(report))))
    if calibration and calibration.measured:
        return png((f"{title}, held-out text, k={calibration.k}", calibrated_acceptance(calibration)))
    return None


def gates_of(report: FullReport) -> Gates:
    """The recipe's, or those of a recipe that names none."""
    return report.judgement.gates if report.judgement else Gates()


def calibrated_acceptance(calibration: CalibrationFact) -> Drawing:
    """Bars of the share of drafts accepted at each position on held-out text, a colour a row, released model first."""
    rows = calibration.measured
    num_steps = max(len(found.shares) for _, found in rows)

    def draw(axes: Axes, inks: Inks) -> None:
        series = []
        for row, found in rows:
            name, colour = "MTP block as released", inks.between
            if row.backbone == "source":
                name, colour = "released model", inks.before
            elif row is rows[-1][0]:
                name, colour = "this checkpoint", inks.after
            series.append(Series(name=name, colour=colour, values=[100 * share for share in found.shares]))
        bars(axes, series, range(num_steps), "{:.0f}".format if len(rows) > 2 else "{:.2f}".format, inks.ink)
        _positions(axes, num_steps, inks)

    return Drawing(draw=draw, height=3.3)


def candidates(calibration: CalibrationFact) -> Drawing:
    """Size of the MTP block against the acceptance it keeps, a mark a candidate by its number, with the budget."""
    tried = [(number, each) for number, each in enumerate(calibration.candidates, start=1) if each.acceptance]
    least = calibration.min_acceptance or 0.0
    largest = max(each.bytes for _, each in tried)
    unit, divisor = next(((unit, size) for unit, size in _UNITS if largest >= size), _UNITS[-1])

    def _is(each: CandidateFact, verdict: Verdict) -> bool:
        return not each.chosen and calibration.verdict_on(each) == verdict

    def draw(axes: Axes, inks: Inks) -> None:
        kinds = (
            ("chosen", inks.after, "o", inks.after, lambda each: each.chosen),
            (
                "keeps enough, but is larger",
                inks.after,
                "o",
                "none",
                lambda each: _is(each, "keeps enough"),
            ),
            ("too few slots to tell", inks.muted, "d", "none", lambda each: _is(each, "too few slots to tell")),
            ("keeps too little", inks.bad, "X", inks.bad, lambda each: _is(each, "keeps too little")),
        )
        for name, colour, marker, face, belongs in kinds:
            spots = [(each.bytes / divisor, 100 * each.kept) for _, each in tried if belongs(each)]
            if spots:
                axes.scatter(
                    *zip(*spots, strict=True),
                    s=64,
                    marker=marker,
                    facecolors=face,
                    edgecolors=colour,
                    linewidths=1.5,
                    label=name,
                    zorder=3,
                )
        together: dict[tuple[int, float], list[str]] = defaultdict(list)
        for number, each in tried:
            together[each.bytes, each.kept].append(str(number))
        chosen = next(((each.bytes, each.kept) for _, each in tried if each.chosen), None)
        for (size, kept), numbers in together.items():
            # The chosen one is the smallest of those above the budget: to its left there is room.
            place, ha = ((-8, -4), "right") if (size, kept) == chosen else ((0, 7), "center")
            axes.annotate(
                ", ".join(numbers),
                (size / divisor, 100 * kept),
                xytext=place,
                textcoords="offset points",
                ha=ha,
                fontsize=9.5,
            )
        axes.axhline(100 * least, color=inks.bad, linewidth=1.2, linestyle="--", label=f"budget: {100 * least:g} %")
        axes.set_xlabel(f"size of the MTP block on disk ({unit})")
        axes.set_ylabel("acceptance kept (%)")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(0, 1.12 * largest / divisor)
        axes.margins(y=0.18)
        axes.grid(color=inks.grid, linewidth=0.6)
        legend(axes)

    return Drawing(draw=draw, height=3.3)


def speed_up(serve: ServeCheck) -> Drawing:
    """Bars of output tokens a second over those without MTP, by k, for source and checkpoint."""

    def draw(axes: Axes, inks: Inks) -> None:
        ks = sorted({run.k for model in serve.served for run in model.drafting})
        series = []
        for model in serve.served:
            runs = {run.k: run.speed_up or 0.0 for run in model.drafting}
            series.append(_series(model, [runs.get(k, 0.0) for k in ks], inks))
        bars(axes, series, range(len(ks)), "{:.2f}".format, inks.ink)
        axes.axhline(1, color=inks.bad, linewidth=1.2, linestyle="--", label="without MTP")
        axes.set_xticks(range(len(ks)), [str(k) for k in ks])
        axes.set_xlabel("k, draft tokens a step")
        axes.set_ylabel("times as fast as without MTP")
        axes.set_ylim(0, 1.18 * max(1.0, *(value for each in series for value in each.values)))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y", color=inks.grid, linewidth=0.6)
        legend(axes)

    return Drawing(draw=draw, height=3.3)


def by_position(models: Sequence[tuple[_Model, Sequence[float]]], k: int, floor: float) -> Drawing:
    """Shares accepted at each position, and `floor` as a share of the source's."""

    def draw(axes: Axes, inks: Inks) -> None:
        series = [_series(model, [100 * share for share in shares], inks) for model, shares in models]
        bars(axes, series, range(k), "{:.2f}".format, inks.ink)
        source = next((shares for model, shares in models if model.role == "source"), ())
        for spot, share in enumerate(source):
            axes.hlines(
                100 * share * floor,
                spot - 0.42,
                spot + 0.42,
                color=inks.bad,
                linewidth=1.2,
                linestyle="--",
                label=f"floor: {100 * floor:g} % of the source" if spot == 0 else "_",
            )
        _positions(axes, k, inks)

    return Drawing(draw=draw, height=3.3)


def _series(model: _Model, values: Sequence[float], inks: Inks, *, errors: Sequence[float] | None = None) -> Series:
    name = "source" if model.role == "source" else "this checkpoint"
    how = "" if model.as_served == "native" else " (BF16 copy)"
    colour = inks.before if model.role == "source" else inks.after
    return Series(name=name + how, colour=colour, values=values, errors=errors)


def _positions(axes: Axes, k: int, inks: Inks) -> None:
    """Axes of acceptance by position in the draft."""
    axes.set_xticks(range(k), [str(spot + 1) for spot in range(k)])
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("drafts accepted (%)")
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 25))
    axes.grid(axis="y", color=inks.grid, linewidth=0.6)
    legend(axes)


def _label(name: str) -> str:
    """A group's or filter's name, cut where it would leave no room for the bars."""
    words = printable(name.replace("_", " "))
    return words if len(words) <= _LABEL_LETTERS else f"{words[: _LABEL_LETTERS - 3]}..."


def _short(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return "" if value == 0 else f"{value:,.{digits}f}" if value >= 0.01 else "<0.01"
