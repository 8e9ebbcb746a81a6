"""Charts of the report, as SVG for an HTML page.

In: parts of a `FullReport`. Out: SVG elements as text, without fixed colours: inks are the page's CSS variables, so one
drawing serves light, dark and paper. Text stays text, in the page's font.

Easy to get wrong: matplotlib reads `$` in a label as mathematics and draws with a global state in pyplot. Neither is
used: figures are made by hand, parsing is off, and every label is escaped by matplotlib's SVG writer.
"""

import io
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.typing import RcKeyType

from .report_schema import CalibrationFact, GroupSize, RunFact, Serve, ServedFact

# Drawn in these colours, which occur nowhere else, then replaced by CSS variables. Grey, blue and what lies between the
# released model and this checkpoint differ in lightness, so they are told apart in print and by colour-blind readers.
_INKS = {"#010101": "var(--ink)", "#020202": "var(--muted)", "#030303": "var(--grid)", "#040404": "var(--before)",
         "#050505": "var(--after)", "#060606": "var(--bad)", "#070707": "var(--between)"}  # fmt: skip
INK, MUTED, GRID, BEFORE, AFTER, BAD, BETWEEN = _INKS
_STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "keepmtp", "text.parse_math": False, "font.size": 11,
    "font.family": "DejaVu Sans", "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID,
    "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": MUTED, "ytick.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "xtick.major.size": 0, "ytick.major.size": 0,
}  # fmt: skip
_WIDTH_INCHES = 5.0  # 360 points: about 1:1 on a phone
_LABEL_LETTERS = 20
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """Bars of one colour."""

    name: str
    colour: str
    values: Sequence[float]


def sizes(rows: Sequence[GroupSize]) -> str:
    """Bars of one part's module groups, before and after where a source is known, in one unit of bytes."""
    largest = max(max(row.num_bytes, row.num_bytes_before or 0) for row in rows)
    unit, divisor = next(((unit, size) for unit, size in _UNITS if largest >= size), _UNITS[-1])
    has_before = any(row.num_bytes_before is not None for row in rows)
    height = 0.38 if has_before else 0.6

    def draw(axes: Axes) -> None:
        spots = range(len(rows))
        after = [row.num_bytes / divisor for row in rows]
        if has_before:
            before = [(row.num_bytes_before or 0) / divisor for row in rows]
            bars = axes.barh([spot - height / 2 for spot in spots], before, height, color=BEFORE, label="before")
            axes.bar_label(bars, fmt=_short, padding=3, fontsize=9.5, color=MUTED)
        shift = height / 2 if has_before else 0.0
        bars = axes.barh([spot + shift for spot in spots], after, height, color=AFTER, label="this checkpoint")
        axes.bar_label(bars, fmt=_short, padding=3, fontsize=9.5)
        axes.set_yticks(spots, [_label(row.group) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel(f"size on disk, scales included ({unit})")
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.margins(x=0.14)
        if has_before:
            _legend(axes)

    return _drawn(draw, height=0.95 + (0.46 if has_before else 0.32) * len(rows))


def acceptance(serve: Serve, k: int) -> str:
    """Bars of the share of drafts accepted at each position, source beside checkpoint, with the floor."""

    def draw(axes: Axes) -> None:
        runs = _runs(serve, k)
        series = [_series(model, [100 * share for share in run.acceptance_per_position]) for model, run in runs]
        _bars(axes, series, range(k), "{:.1f}".format)
        source = next((run for model, run in runs if model.role == "source"), None)
        for spot, share in enumerate(source.acceptance_per_position if source else ()):
            axes.hlines(100 * share * serve.floor, spot - 0.42, spot + 0.42, color=BAD, linewidth=1.2, linestyle="--",
                        label=f"floor: {100 * serve.floor:g} % of the source" if spot == 0 else "_")  # fmt: skip
        _positions(axes, k)

    return _drawn(draw, height=3.3)


def calibrated_acceptance(calibration: CalibrationFact) -> str:
    """Bars of the share of drafts accepted at each position on held-out text, a colour a row, released model first."""
    rows = calibration.measured
    num_steps = max(len(found.shares) for _, found in rows)

    def draw(axes: Axes) -> None:
        series = []
        for row, found in rows:
            name, colour = "MTP block as released", BETWEEN
            if row.backbone == "source":
                name, colour = "released model", BEFORE
            elif row is rows[-1][0]:
                name, colour = "this checkpoint", AFTER
            series.append(_Series(name=name, colour=colour, values=[100 * share for share in found.shares]))
        _bars(axes, series, range(num_steps), "{:.0f}".format if len(rows) > 2 else "{:.1f}".format)
        _positions(axes, num_steps)

    return _drawn(draw, height=3.3)


def candidates(calibration: CalibrationFact) -> str:
    """Size of the MTP block against the acceptance it keeps, a mark a candidate by its number, with the budget."""
    tried = [(number, each) for number, each in enumerate(calibration.candidates, start=1) if each.acceptance]
    least = calibration.min_acceptance or 0.0
    largest = max(each.bytes for _, each in tried)
    unit, divisor = next(((unit, size) for unit, size in _UNITS if largest >= size), _UNITS[-1])

    def draw(axes: Axes) -> None:
        kinds = (
            ("chosen", AFTER, "o", AFTER, lambda each: each.chosen),
            ("keeps enough, but is larger", AFTER, "o", "none", lambda each: not each.chosen and each.kept >= least),
            ("keeps too little", BAD, "X", BAD, lambda each: not each.chosen and each.kept < least),
        )
        for name, colour, marker, face, belongs in kinds:
            spots = [(each.bytes / divisor, 100 * each.kept) for _, each in tried if belongs(each)]
            if spots:
                axes.scatter(*zip(*spots, strict=True), s=64, marker=marker, facecolors=face, edgecolors=colour,
                             linewidths=1.5, label=name, zorder=3)  # fmt: skip
        together: dict[tuple[int, float], list[str]] = defaultdict(list)
        for number, each in tried:
            together[each.bytes, each.kept].append(str(number))
        chosen = next(((each.bytes, each.kept) for _, each in tried if each.chosen), None)
        for (size, kept), numbers in together.items():
            # The chosen one is the smallest of those above the budget: to its left there is room.
            place, ha = ((-8, -4), "right") if (size, kept) == chosen else ((0, 7), "center")
            axes.annotate(", ".join(numbers), (size / divisor, 100 * kept), xytext=place, textcoords="offset points",
                          ha=ha, fontsize=9.5)  # fmt: skip
        axes.axhline(100 * least, color=BAD, linewidth=1.2, linestyle="--", label=f"budget: {100 * least:g} %")
        axes.set_xlabel(f"size of the MTP block on disk ({unit})")
        axes.set_ylabel("acceptance kept (%)")
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlim(0, 1.12 * largest / divisor)
        axes.margins(y=0.18)
        axes.grid(color=GRID, linewidth=0.6)
        _legend(axes)

    return _drawn(draw, height=3.3)


def speed_up(serve: Serve) -> str:
    """Bars of output tokens a second over those without MTP, by k, source beside checkpoint."""

    def draw(axes: Axes) -> None:
        ks = sorted({run.k for model in serve.served for run in model.drafting})
        series = []
        for model in serve.served:
            runs = {run.k: run.speed_up or 0.0 for run in model.drafting}
            series.append(_series(model, [runs.get(k, 0.0) for k in ks]))
        _bars(axes, series, range(len(ks)), "{:.2f}".format)
        axes.axhline(1, color=BAD, linewidth=1.2, linestyle="--", label="without MTP")
        axes.set_xticks(range(len(ks)), [str(k) for k in ks])
        axes.set_xlabel("k, draft tokens a step")
        axes.set_ylabel("times as fast as without MTP")
        axes.set_ylim(0, 1.18 * max(1.0, *(value for each in series for value in each.values)))
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.grid(axis="y", color=GRID, linewidth=0.6)
        _legend(axes)

    return _drawn(draw, height=3.3)


def _runs(serve: Serve, k: int) -> list[tuple[ServedFact, RunFact]]:
    return [(model, run) for model in serve.served if (run := model.run(k)) is not None]


def _series(model: ServedFact, values: Sequence[float]) -> _Series:
    name = "source" if model.role == "source" else "this checkpoint"
    how = "" if model.as_served == "native" else " (BF16 copy)"
    return _Series(name=name + how, colour=BEFORE if model.role == "source" else AFTER, values=values)


def _positions(axes: Axes, k: int) -> None:
    """Axes of acceptance by position in the draft."""
    axes.set_xticks(range(k), [str(spot + 1) for spot in range(k)])
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("drafts accepted (%)")
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 25))
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    _legend(axes)


def _bars(axes: Axes, series: Sequence[_Series], spots: Sequence[int], label: Callable[[float], str]) -> None:
    width = 0.8 / max(1, len(series))
    for number, each in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * width
        bars = axes.bar([spot + shift for spot in spots[: len(each.values)]], each.values, width * 0.94,
                        label=each.name, color=each.colour)  # fmt: skip
        axes.bar_label(bars, fmt=label, padding=2, fontsize=9.5)
    # A lone position would otherwise be one bar as wide as the chart.
    axes.set_xlim(-0.5 - 0.4 * (len(spots) == 1), len(spots) - 0.5 + 0.4 * (len(spots) == 1))


def _legend(axes: Axes) -> None:
    """Above the axes, bars before lines, two a row so that it never widens the figure."""
    pairs = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda pair: isinstance(pair[0], Artist))
    handles, labels = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    axes.figure.legend(handles, labels, loc="outside upper left", ncols=2, frameon=False, fontsize=9.5,
                       handlelength=1.3, columnspacing=1.4, borderpad=0)  # fmt: skip


def _label(group: str) -> str:
    """A group's name, cut where it would leave no room for the bars."""
    words = group.replace("_", " ")
    return words if len(words) <= _LABEL_LETTERS else f"{words[: _LABEL_LETTERS - 3]}..."


def _short(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return "" if value == 0 else f"{value:,.{digits}f}" if value >= 0.01 else "<0.01"


def _drawn(draw: Callable[[Axes], None], *, height: float) -> str:
    """The figure as one `<svg>` element that takes the width it is given."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
        figure.patch.set_visible(False)
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        draw(axes)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    # The page has the title and the style; ids of groups repeat from figure to figure and nothing refers to them.
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 class="chart" aria-hidden="true">', svg)
    for colour, variable in _INKS.items():
        svg = svg.replace(colour, variable)
    return svg
