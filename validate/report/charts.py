"""Charts of a report: SVG for its page, PNG for the model card.

In: a `FullReport`. Out: a `Chart` of each measured acceptance by position, and of speed over k.
`svg` gives an element without fixed colours, whose inks are the page's CSS variables, so that one
chart serves light, dark and paper; `png` gives bytes in the page's light colours, equal for equal
charts.

Easy to get wrong: matplotlib reads `$` in a label as mathematics and draws with a global state in
pyplot. Neither is
used: figures are made by hand, parsing is off, and every label is escaped by matplotlib's SVG
writer.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator
from matplotlib.typing import RcKeyType

from ...recipes.protocol import Gates
from ..facts.benched import BenchFact, words_of
from ..facts.schema import FullReport
from .drafted import Drafted, drafted
from .numbers import limit, percent

_INCHES = (5.0, 3.4)  # 360 points wide: about 1:1 on a phone
_DOTS_PER_INCH = 220  # 1100 pixels: sharp at the width of a card on the Hub
_MOST_LOADS = 4

Inks = Mapping[str, str]
"""Colours by what they mean, as the page's style sheet names them.

Grey, blue and what lies between the released model and this checkpoint differ in lightness, so they
are told apart in print and by colour-blind readers.
"""
_NAMES = ("ink", "muted", "grid", "before", "after", "bad", "between")
# Colours which occur nowhere else, replaced by CSS variables once drawn; and those of the style
# sheet's light form.
_PAGE: Inks = {
    name: f"#{number:02}{number:02}{number:02}" for number, name in enumerate(_NAMES, start=1)
}
_LIGHT: Inks = dict(
    zip(
        _NAMES,
        ("#16202c", "#5a6675", "#dde2e8", "#98a4b3", "#0b6fb8", "#b3261e", "#14344f"),
        strict=True,
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What is drawn, with the words of its legend; `alt` is what a screen reader says instead of
    it.
    """

    title: str
    alt: str
    draw: Callable[[Axes, Inks], None]


def charts(report: FullReport) -> dict[str, Chart]:
    """The charts of a report: `acceptance`, as its gate judges it, and `speed`; what was not
    measured has none.
    """
    found = {}
    measured = next(
        (one for one in drafted(report.serve, report.evaluation) if one.checkpoint.drafts), None
    )
    if measured:
        gates = report.judgement.gates if report.judgement else Gates()
        found["acceptance"] = _acceptance(measured, gates.min_acceptance)
    lines = _lines(report.bench) if report.bench else {}
    if lines:
        found["speed"] = _speed(lines)
    return found


# --- what is drawn --------------------------------------------------------------------------------


def _acceptance(measured: Drafted, floor: float) -> Chart:
    """Bars of the share of drafts accepted at each position; `floor` is the part of the source's
    that must be kept.
    """
    own = f"this checkpoint{'' if measured.as_served == 'native' else ' (BF16 copy)'}"
    models = [("source", "before", measured.source), (own, "after", measured.checkpoint)]
    series = [
        (name, ink, counted.acceptance_per_position) for name, ink, counted in models if counted
    ]
    floors = (
        [100 * floor * share for share in measured.source.acceptance_per_position]
        if measured.source
        else []
    )

    def draw(axes: Axes, inks: Inks) -> None:
        width = 0.8 / len(series)
        for number, (name, ink, shares) in enumerate(series):
            spots = [spot + (number - (len(series) - 1) / 2) * width for spot in range(len(shares))]
            heights = [100 * share for share in shares]
            drawn = axes.bar(spots, heights, 0.94 * width, label=name, color=inks[ink])
            axes.bar_label(drawn, fmt="{:.2f}".format, padding=2, fontsize=9.5)
        for spot, height in enumerate(floors):
            label = "_" if spot else f"floor: {limit(floor)} of the source"
            axes.hlines(
                height, spot - 0.42, spot + 0.42, color=inks["bad"], linestyle="--", label=label
            )
        axes.set_xticks(range(measured.k), [str(spot + 1) for spot in range(measured.k)])
        axes.set_xlim(-0.9, measured.k - 0.1)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("drafts accepted (%)")
        axes.set_ylim(0, 112)
        axes.set_yticks(range(0, 101, 25))
        axes.grid(axis="y", color=inks["grid"], linewidth=0.6)

    alt = "; ".join(f"{name}: {', '.join(map(percent, shares))}" for name, _, shares in series)
    return Chart(
        title=f"Drafts accepted by position, k={measured.k}, {measured.what}", alt=alt, draw=draw
    )


def _lines(bench: BenchFact) -> dict[str, list[tuple[int, float, float, float]]]:
    """(k, slowest, median and fastest repetition, times as fast as k=0) by load; only loads with
    k=0 and another k.

    Loads differ by a factor of a hundred in tokens a second, so each is compared with its own k=0.
    """
    found = {}
    for load in bench.checkpoint.loads[:_MOST_LOADS]:
        cells = [cell for cell in bench.checkpoint.cells if cell.load == load and cell.repetitions]
        plain = bench.checkpoint.cell(0, load)
        over = plain.tokens_per_second if plain else None
        if over and len(cells) > 1:
            rates = [
                (cell.k, cell.slowest or 0.0, cell.tokens_per_second or 0.0, cell.fastest or 0.0)
                for cell in cells
            ]
            found[words_of(load)] = sorted(
                (k, low / over, middle / over, high / over) for k, low, middle, high in rates
            )
    return found


def _speed(lines: Mapping[str, Sequence[tuple[int, float, float, float]]]) -> Chart:
    """A line for each load, from the slowest to the fastest repetition."""

    def draw(axes: Axes, inks: Inks) -> None:
        for (name, points), ink, marker in zip(
            lines.items(), ("after", "between", "before", "muted"), "osD^", strict=False
        ):
            ks, lows, middles, highs = zip(*points, strict=True)
            below = [middle - low for low, middle in zip(lows, middles, strict=True)]
            above = [high - middle for high, middle in zip(highs, middles, strict=True)]
            axes.errorbar(
                ks,
                middles,
                yerr=(below, above),
                color=inks[ink],
                label=name,
                marker=marker,
                capsize=3,
            )
        axes.axhline(1, color=inks["bad"], linewidth=1.2, linestyle="--", label="without MTP")
        axes.set_xlabel("k, draft tokens a step")
        axes.set_ylabel("times as fast as without MTP")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(axis="y", color=inks["grid"], linewidth=0.6)

    told = [
        f"{name}: {', '.join(f'k={k} {middle:.2f}' for k, _, middle, _ in line)}"
        for name, line in lines.items()
    ]
    return Chart(
        title="Speed over k by load, as repetitions spread", alt="; ".join(told), draw=draw
    )


# --- what it is drawn on --------------------------------------------------------------------------


def svg(chart: Chart) -> str:
    """The chart as one `<svg>` element that takes the width it is given."""
    with rc_context(_style(_PAGE)):
        figure = _drawn(chart, _PAGE)
        figure.patch.set_visible(False)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(
            file, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # The page has the title and the style; ids of groups repeat from figure to figure and nothing
    # refers to them.
    text = re.sub(
        r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL
    )
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(
        r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 class="chart" aria-hidden="true">', text
    )
    for name, colour in _PAGE.items():
        text = text.replace(colour, f"var(--{name})")
    return text


def png(chart: Chart) -> bytes:
    """The chart under its title, on white. Equal charts give equal bytes."""
    with rc_context(_style(_LIGHT)):
        figure = _drawn(chart, _LIGHT)
        # A title of the figure would be drawn over a legend outside the axes (matplotlib 3.11).
        figure.legends[0].set_title(chart.title, prop=FontProperties(size=11, weight="bold"))
        figure.legends[0].set_alignment("left")
        file = io.BytesIO()
        FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
    return file.getvalue()


def _drawn(chart: Chart, inks: Inks) -> Figure:
    """The chart's figure, its legend above the axes, bars before lines, two a row so that it never
    widens it.
    """
    figure = Figure(_INCHES, _DOTS_PER_INCH, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    chart.draw(axes, inks)
    pairs = sorted(
        zip(*axes.get_legend_handles_labels(), strict=True),
        key=lambda pair: isinstance(pair[0], Artist),
    )
    handles, labels = [handle for handle, _ in pairs], [label for _, label in pairs]
    figure.legend(handles, labels, loc="outside upper left", ncols=2)
    return figure


def _style(inks: Inks) -> dict[RcKeyType, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "keepmtp",
        "text.parse_math": False,
        "font.size": 11,
        "legend.borderpad": 0,
        "legend.fontsize": 9.5,
        "legend.frameon": False,
        "legend.handlelength": 1.3,
        "font.family": "DejaVu Sans",
        "text.color": inks["ink"],
        "axes.labelcolor": inks["muted"],
        "axes.edgecolor": inks["grid"],
        "xtick.color": inks["muted"],
        "ytick.color": inks["muted"],
        "xtick.labelcolor": inks["muted"],
        "ytick.labelcolor": inks["ink"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }
