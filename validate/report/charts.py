"""Pictures of a report, for the model card.

In: a `FullReport`. Out: a `Chart` of the acceptance that is judged, by position, and of speed over
k. A picture's bytes are PNG, on white, equal for equal reports.

Easy to get wrong: labels are strangers' words, and two runs may draw in one process.
"""

import io
from collections.abc import Callable

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ...recipes.frozen import frozen
from ...recipes.protocol import Gates
from ..facts.benched import Benched, words_of
from ..facts.numbers import limit, percent
from ..facts.schema import FullReport
from .drafted import Drafted, drafted

_INCHES = (5.0, 3.4)  # 360 points wide: about 1:1 on a phone
_DOTS_PER_INCH = 220  # 1100 pixels: sharp at the width of a card on the Hub
_MOST_LOADS = 4
# They differ in lightness, so they are told apart in print and by colour-blind readers.
_SOURCE = "#98a4b3"
_OWN = "#0b6fb8"
_LIMIT = "#b3261e"
# matplotlib reads `$` in a label as mathematics, and draws with a global state in pyplot. Neither
# is used: parsing is off, and figures are made by hand.
_STYLE = {"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 10}


@frozen
class Chart:
    """A picture; `alt` is what a screen reader says instead of it."""

    alt: str
    png: bytes


def charts(report: FullReport) -> dict[str, Chart]:
    """The charts of a report: `acceptance`, as its gate judges it, and `speed`; what was not
    measured has none.
    """
    found = {}
    for measured in drafted(report.serve, report.evaluation):
        if measured.checkpoint.drafts:
            gates = Gates()
            if report.judgement:
                gates = report.judgement.gates
            found["acceptance"] = _acceptance(measured, gates.min_acceptance)
            break
    if report.bench:
        chart = _speed(report.bench.checkpoint)
        if chart:
            found["speed"] = chart
    return found


def _acceptance(measured: Drafted, floor: float) -> Chart:
    """The share of drafts accepted at each position; `floor` is the part of the source's that must
    be kept.
    """
    name = "this checkpoint"
    if measured.as_served != "native":
        name += " (BF16 copy)"
    mine = measured.checkpoint.acceptance_per_position
    bars = {name: (mine, _OWN)}
    kept: dict[str, tuple[float, ...]] = {}
    if measured.source:
        theirs = measured.source.acceptance_per_position
        bars["source"] = (theirs, _SOURCE)
        kept[f"{limit(floor)} of the source"] = tuple([floor * share for share in theirs])

    def draw(axes: Axes) -> None:
        width = 0.8 / len(bars)
        for number, (label, (shares, colour)) in enumerate(bars.items()):
            shift = width * (number - (len(bars) - 1) / 2)
            places = [position + shift for position in range(1, len(shares) + 1)]
            heights = [100 * share for share in shares]
            drawn = axes.bar(places, heights, 0.95 * width, color=colour, label=label)
            axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=2)
        for label, shares in kept.items():
            heights = [100 * share for share in shares]
            starts = [position - 0.47 for position in range(1, len(shares) + 1)]
            ends = [position + 0.47 for position in range(1, len(shares) + 1)]
            axes.hlines(heights, starts, ends, _LIMIT, "--", label=label)
        # One position alone is no wall of two colours.
        room = max(0.0, 3 - len(mine)) / 2
        axes.set_xlim(0.4 - room, len(mine) + 0.6 + room)
        axes.set_ylim(top=108)
        axes.set_xticks(range(1, len(mine) + 1))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("drafts accepted (%)")

    said = []
    for label, shares in (*[(label, shares) for label, (shares, _) in bars.items()], *kept.items()):
        heights = [percent(share) for share in shares]
        said.append(f"{label}: {', '.join(heights)}")
    title = f"Drafts accepted by position, k={measured.k}, {measured.what}"
    return _drawn(title, "; ".join(said), draw)


def _speed(benched: Benched) -> Chart | None:
    """A line for each load, from the slowest to the fastest repetition; None where none has k=0 and
    another k.

    Loads differ by a factor of a hundred in tokens a second, so each is compared with its own k=0.
    """
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for load in benched.loads[:_MOST_LOADS]:
        points = []
        plain = benched.cell(0, load)
        for cell in benched.cells:
            if cell.load == load and plain and plain.tokens_per_second and cell.repetitions:
                low = (cell.slowest or 0.0) / plain.tokens_per_second
                middle = (cell.tokens_per_second or 0.0) / plain.tokens_per_second
                high = (cell.fastest or 0.0) / plain.tokens_per_second
                points.append((cell.k, middle, middle - low, high - middle))
        if len(points) > 1:
            lines[words_of(load)] = sorted(points)
    if not lines:
        return None

    def draw(axes: Axes) -> None:
        for (label, points), marker in zip(lines.items(), "osD^", strict=False):
            ks, middles, below, above = zip(*points, strict=True)
            axes.errorbar(ks, middles, (below, above), label=label, marker=marker, capsize=3)
        axes.axhline(1, color=_LIMIT, linestyle="--", label="without MTP")
        axes.set_xlabel("k, draft tokens a step")
        axes.set_ylabel("times as fast as without MTP")

    said = []
    for name, points in lines.items():
        heights = [f"k={k} {middle:.2f}" for k, middle, *_ in points]
        said.append(f"{name}: {', '.join(heights)}")
    return _drawn("Speed over k by load, as repetitions spread", "; ".join(said), draw)


def _drawn(title: str, alt: str, draw: Callable[[Axes], None]) -> Chart:
    with rc_context(_STYLE):  # pyright: ignore[reportArgumentType] - it wants literals of keys
        figure = Figure(_INCHES, _DOTS_PER_INCH, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        draw(axes)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", linewidth=0.4)
        axes.set_axisbelow(True)
        # A title of the figure would be drawn over a legend outside the axes (matplotlib 3.11).
        figure.legend(loc="outside upper left", ncols=2, title=title, frameon=False)
        file = io.BytesIO()
        FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
    return Chart(alt=f"{title}: {alt}", png=file.getvalue())
