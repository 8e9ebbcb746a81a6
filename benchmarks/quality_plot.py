"""docs/quality.svg: a dot for each variant of one model, sorted by its divergence from the release,
with its interval, its name and its size.

In: the figures of docs/quality.json. Out: the SVG's text, the same for the same figures.

Easy to get wrong: matplotlib writes a date and random ids unless both are told.
"""

import io
from collections.abc import Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from quality_rows import SHORT_MODEL, rows_of

OURS, PEER = "#0b6fb8", "#b3261e"


def draw(figures: Mapping[str, Any]) -> str:
    """The plot as SVG."""
    stored = figures["models"][SHORT_MODEL]["rows"]
    rows = sorted(rows_of(SHORT_MODEL), key=lambda row: stored[row.key]["divergence"][0])
    with rc_context({"svg.hashsalt": "keepmtp", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 0.24 * len(rows) + 0.8), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        names = []
        for place, row in enumerate(rows):
            # The smallest divergence stands on top.
            height = len(rows) - place
            divergence, reach = stored[row.key]["divergence"]
            color = PEER if row.peer else OURS
            axes.errorbar(
                1e3 * divergence,
                height,
                xerr=1e3 * reach,
                fmt="o",
                markersize=4,
                capsize=2,
                color=color,
            )
            names.append(f"{row.title}, {stored[row.key]['megabytes'][0]:.2f} MB")
        axes.set_yticks(range(len(rows), 0, -1), names)
        axes.set_xscale("log")
        axes.set_xlabel("KL divergence from the release, 10^-3 nats per token; MB of the backbone")
        axes.set_title(SHORT_MODEL)
        axes.grid(color="#dde2e8", linewidth=0.5)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()
