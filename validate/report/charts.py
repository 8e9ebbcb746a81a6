"""The picture of a report, for the model card.

In: a `FullReport`. Out: a `Chart` of the acceptance that is judged, by position. Its bytes are PNG,
on white, equal for equal reports.

Easy to get wrong: labels are strangers' words, and two runs may draw in one process.
"""

import io

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ...recipes.frozen import frozen
from ..facts.numbers import limit
from ..facts.schema import FullReport
from ..facts.served import Drafted, drafted

_INCHES = (5.0, 3.4)  # 360 points wide: about 1:1 on a phone
_DOTS_PER_INCH = 220  # 1100 pixels: sharp at the width of a card on the Hub
# They differ in lightness, so they are told apart in print and by colour-blind readers.
_OWN = "#0b6fb8"
_SOURCE = "#98a4b3"
_COLOURS = (_OWN, _SOURCE)
_LIMIT = "#b3261e"
# matplotlib reads `$` in a label as mathematics, and draws with a global state in pyplot. Neither
# is used: parsing is off, and figures are made by hand.
_STYLE = {"text.parse_math": False, "font.family": "DejaVu Sans", "font.size": 10}


@frozen
class Chart:
    """A picture; `alt` is what a screen reader says instead of it."""

    alt: str
    png: bytes


def acceptance(report: FullReport) -> Chart | None:
    """The share of drafts accepted at each position, as its gate judges it; None where nothing was
    drafted.
    """
    for measured in drafted(report.parts):
        if measured.checkpoint.drafts:
            return _drawn(measured, report.judgement.gates.min_acceptance)
    return None


def _drawn(measured: Drafted, floor: float) -> Chart:
    """Groups of bars; `floor` is the part of the source's that must be kept."""
    title = f"Drafts accepted by position, k={measured.k}, {measured.what}"
    name = "this checkpoint"
    if measured.as_served != "native":
        name += " (BF16 copy)"
    shares = {name: measured.checkpoint.acceptance_per_position}
    if measured.source:
        shares["source"] = measured.source.acceptance_per_position
    width = 0.8 / len(shares)
    most = 0
    said = []
    with rc_context(_STYLE):  # pyright: ignore[reportArgumentType] - it wants literals of keys
        figure = Figure(_INCHES, _DOTS_PER_INCH, layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        for number, (label, accepted) in enumerate(shares.items()):
            shift = width * (number - (len(shares) - 1) / 2)
            heights = [100 * share for share in accepted]
            places = [place + shift for place, _ in enumerate(heights, 1)]
            most = max(most, len(heights))
            drawn = axes.bar(places, heights, 0.95 * width, color=_COLOURS[number], label=label)
            axes.bar_label(drawn, fmt="%.1f", fontsize=7, padding=2)
            words = [f"{place}: {height:.1f}" for place, height in enumerate(heights, 1)]
            said.append(f"{label} {', '.join(words)}")
            if label == "source":
                least = f"{limit(floor)} of the source"
                for place, height in enumerate(heights, 1):
                    ends = (place - 0.47, place + 0.47)
                    axes.hlines(floor * height, *ends, _LIMIT, "--", label=least)
                    least = ""  # one entry of the legend
        # One place alone is no wall of two colours.
        room = 0.6 + max(0.0, 3 - most) / 2
        axes.set_xticks(range(1, most + 1))
        axes.set_xlim(1 - room, most + room)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("drafts accepted (%)")
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", linewidth=0.4)
        axes.set_axisbelow(True)
        # A title of the figure would be drawn over a legend outside the axes (matplotlib 3.11).
        figure.legend(loc="outside upper left", ncols=2, title=title, frameon=False)
        file = io.BytesIO()
        FigureCanvasAgg(figure).print_png(file, metadata={"Software": None})
    return Chart(alt=f"{title}: {'; '.join(said)}", png=file.getvalue())
