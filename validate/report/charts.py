"""Pictures of a report, for the model card.

In: a `FullReport`. Out: a `Chart` of the acceptance that is judged, by position, and of speed over
k. A picture's bytes are PNG, on white, equal for equal reports.

Easy to get wrong: labels are strangers' words, and two runs may draw in one process.
"""

import io

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...recipes.frozen import frozen
from ..facts.benched import Benched, BenchFact, words_of
from ..facts.numbers import limit
from ..facts.schema import FullReport
from ..facts.served import Drafted, drafted

_INCHES = (5.0, 3.4)  # 360 points wide: about 1:1 on a phone
_DOTS_PER_INCH = 220  # 1100 pixels: sharp at the width of a card on the Hub
_MOST_LOADS = 4
# They differ in lightness, so they are told apart in print and by colour-blind readers.
_OWN = "#0b6fb8"
_SOURCE = "#98a4b3"
_COLOURS = (_OWN, _SOURCE, "#d98c21", "#3f7d4e")
_LIMIT = "#b3261e"
# matplotlib reads `$` in a label as mathematics, and draws with a global state in pyplot. Neither
# is used: parsing is off, and figures are made by hand.
_STYLE = {"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 10}


@frozen
class Chart:
    """A picture; `alt` is what a screen reader says instead of it."""

    alt: str
    png: bytes


# A name -> (place, height, how far it spreads down, and up).
_Bars = dict[str, list[tuple[int, float, float, float]]]


def charts(report: FullReport) -> dict[str, Chart]:
    """The charts of a report: `acceptance`, as its gate judges it, and `speed`; what was not
    measured has none.
    """
    found = {}
    for measured in drafted(report.parts):
        if measured.checkpoint.drafts:
            found["acceptance"] = _acceptance(measured, report.judgement.gates.min_acceptance)
            break
    bench = report.of(BenchFact)
    if bench:
        speed = _speed(bench.checkpoint)
        if speed:
            found["speed"] = speed
    return found


def _acceptance(measured: Drafted, floor: float) -> Chart:
    """The share of drafts accepted at each position; `floor` is the part of the source's that must
    be kept.
    """
    name = "this checkpoint"
    if measured.as_served != "native":
        name += " (BF16 copy)"
    shares = {name: measured.checkpoint.acceptance_per_position}
    lines = {}
    if measured.source:
        shares["source"] = measured.source.acceptance_per_position
        least = {place: 100 * floor * one for place, one in enumerate(shares["source"], 1)}
        lines[f"{limit(floor)} of the source"] = least
    bars: _Bars = {}
    for label, heights in shares.items():
        bars[label] = [(place, 100 * one, 0.0, 0.0) for place, one in enumerate(heights, 1)]
    return _drawn(
        f"Drafts accepted by position, k={measured.k}, {measured.what}",
        x="position in the draft",
        y="drafts accepted (%)",
        digits=1,
        bars=bars,
        lines=lines,
    )


def _speed(benched: Benched) -> Chart | None:
    """Of each load, from the slowest to the fastest repetition; None where none has k=0 and another
    k.

    Loads differ by a factor of a hundred in tokens a second, so each is compared with its own k=0.
    """
    bars: _Bars = {}
    for load in benched.loads[:_MOST_LOADS]:
        points = []
        for cell in benched.cells:
            times = benched.times(cell)
            if cell.concurrency == load and times:
                low, middle, high = times
                points.append((cell.k, middle, middle - low, high - middle))
        if len(points) > 1:
            bars[words_of(load)] = sorted(points)
    if not bars:
        return None
    ks = sorted({cell.k for cell in benched.cells})
    return _drawn(
        "Speed over k by load, as repetitions spread",
        x="k, draft tokens a step",
        y="times as fast as without MTP",
        digits=2,
        bars=bars,
        lines={"without MTP": dict.fromkeys(ks, 1.0)},
    )


def _drawn(
    title: str, *, x: str, y: str, digits: int, bars: _Bars, lines: dict[str, dict[int, float]]
) -> Chart:
    """Groups of bars; `lines` are limits, or what is compared with: a height for each place."""
    width = 0.8 / len(bars)
    said = []
    with rc_context(_STYLE):  # pyright: ignore[reportArgumentType] - it wants literals of keys
        figure = Figure(_INCHES, _DOTS_PER_INCH, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        known = set[int]()
        for number, (label, points) in enumerate(bars.items()):
            places, heights, below, above = zip(*points, strict=True)
            known.update(places)
            shift = width * (number - (len(bars) - 1) / 2)
            spread = None
            if any(above):
                spread = (below, above)
            drawn = axes.bar(
                [place + shift for place in places],
                heights,
                0.95 * width,
                yerr=spread,
                color=_COLOURS[number],
                label=label,
                capsize=3,
            )
            axes.bar_label(drawn, fmt=f"%.{digits}f", fontsize=7, padding=2)
            words = [f"{place}: {height:.{digits}f}" for place, height, *_ in points]
            said.append(f"{label} {', '.join(words)}")
        for label, levels in lines.items():
            starts = [place - 0.47 for place in levels]
            ends = [place + 0.47 for place in levels]
            axes.hlines([*levels.values()], starts, ends, _LIMIT, "--", label=label)
        # One place alone is no wall of two colours.
        room = 0.6 + max(0.0, 3 - len(known)) / 2
        axes.set_xticks(sorted(known))
        axes.set_xlim(min(known) - room, max(known) + room)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", linewidth=0.4)
        axes.set_axisbelow(True)
        # A title of the figure would be drawn over a legend outside the axes (matplotlib 3.11).
        figure.legend(loc="outside upper left", ncols=2, title=title, frameon=False)
        file = io.BytesIO()
        FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
    return Chart(alt=f"{title}: {'; '.join(said)}", png=file.getvalue())
