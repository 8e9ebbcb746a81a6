"""What charts are drawn on: SVG for the report's page, PNG for the model card.

In: a `Drawing`, which draws in the inks it is given. Out: an `<svg>` element without fixed colours, whose inks are the
page's CSS variables, so that one drawing serves light, dark and paper; or PNG bytes in the page's light colours, equal
for equal drawings.

Easy to get wrong: matplotlib reads `$` in a label as mathematics and draws with a global state in pyplot. Neither is
used: figures are made by hand, parsing is off, and every label is escaped by matplotlib's SVG writer.
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FuncFormatter
from matplotlib.typing import RcKeyType

_WIDTH_INCHES = 5.0  # 360 points: about 1:1 on a phone
_DOTS_PER_INCH = 220  # 1100 pixels: sharp at the width of a card on the Hub


@dataclass(frozen=True, slots=True, kw_only=True)
class Inks:
    """Colours by what they mean, as the page's style sheet names them.

    Grey, blue and what lies between the released model and this checkpoint differ in lightness, so they are told apart
    in print and by colour-blind readers.
    """

    ink: str
    muted: str
    grid: str
    before: str
    after: str
    bad: str
    between: str


# Colours which occur nowhere else, replaced by CSS variables once drawn.
_PAGE = Inks(
    ink="#010101", muted="#020202", grid="#030303", before="#040404", after="#050505", bad="#060606", between="#070707"
)
# The style sheet's own, of its light form.
_LIGHT = Inks(
    ink="#16202c", muted="#5a6675", grid="#dde2e8", before="#98a4b3", after="#0b6fb8", bad="#b3261e", between="#14344f"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What to draw, with a `legend`, and how high it is in inches."""

    draw: Callable[[Axes, Inks], None]
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Bars of one colour; `errors` are half the length of each one's error bar."""

    name: str
    colour: str
    values: Sequence[float]
    errors: Sequence[float] | None = None


def svg(drawing: Drawing) -> str:
    """The drawing as one `<svg>` element that takes the width it is given."""
    with rc_context(_style(_PAGE)):
        figure = Figure(figsize=(_WIDTH_INCHES, drawing.height), layout="constrained")
        figure.patch.set_visible(False)
        _fill(figure, drawing, _PAGE)
        file = io.StringIO()
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    # The page has the title and the style; ids of groups repeat from figure to figure and nothing refers to them.
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 class="chart" aria-hidden="true">', text)
    for name, colour in asdict(_PAGE).items():
        text = text.replace(colour, f"var(--{name})")
    return text


def png(*titled: tuple[str, Drawing]) -> bytes:
    """Drawings under their titles, one below the other, on white. Equal drawings give equal bytes."""
    heights = [drawing.height + 0.3 for _, drawing in titled]
    with rc_context(_style(_LIGHT)):
        figure = Figure(
            figsize=(_WIDTH_INCHES, sum(heights)), dpi=_DOTS_PER_INCH, layout="constrained", facecolor="white"
        )
        parts = figure.subfigures(len(titled), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, (title, drawing) in zip(parts, titled, strict=True):
            _fill(part, drawing, _LIGHT)
            # A title of the figure would be drawn over a legend outside the axes (matplotlib 3.11).
            part.legends[0].set_title(title, prop={"size": 11, "weight": "bold"})
            part.legends[0].set_alignment("left")
        file = io.BytesIO()
        FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
    return file.getvalue()


def bars(axes: Axes, series: Sequence[Series], spots: Sequence[int], label: Callable[[float], str], ink: str) -> None:
    """Groups of upright bars at `spots`, each with its figure above it, and above its error bar, drawn in `ink`."""
    width = 0.8 / max(1, len(series))
    for number, each in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * width
        found = axes.bar(
            [spot + shift for spot in spots[: len(each.values)]],
            each.values,
            width * 0.94,
            label=each.name,
            color=each.colour,
            yerr=each.errors,
            error_kw={"ecolor": ink, "elinewidth": 1.2},
        )
        axes.bar_label(found, fmt=label, padding=2, fontsize=9.5)
    # A lone position would otherwise be one bar as wide as the chart.
    axes.set_xlim(-0.5 - 0.4 * (len(spots) == 1), len(spots) - 0.5 + 0.4 * (len(spots) == 1))


def legend(axes: Axes) -> None:
    """Above the axes, bars before lines, two a row so that it never widens the figure."""
    pairs = sorted(zip(*axes.get_legend_handles_labels(), strict=True), key=lambda pair: isinstance(pair[0], Artist))
    handles, labels = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    axes.figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=2,
        frameon=False,
        fontsize=9.5,
        handlelength=1.3,
        columnspacing=1.4,
        borderpad=0,
    )


def _fill(figure: Figure | SubFigure, drawing: Drawing, inks: Inks) -> None:
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    drawing.draw(axes, inks)


def _style(inks: Inks) -> dict[RcKeyType, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "keepmtp",
        "text.parse_math": False,
        "font.size": 11,
        "font.family": "DejaVu Sans",
        "text.color": inks.ink,
        "axes.labelcolor": inks.muted,
        "axes.edgecolor": inks.grid,
        "xtick.color": inks.muted,
        "ytick.color": inks.muted,
        "xtick.labelcolor": inks.muted,
        "ytick.labelcolor": inks.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
    }
