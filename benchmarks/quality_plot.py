"""docs/quality.svg: bytes against divergence, and bytes against acceptance, with whiskers, a row
for each model.

In: the figures of docs/quality.json. Out: the SVG's text, the same for the same figures.

Easy to get wrong: matplotlib writes a date and random ids unless both are told.
"""

import io
from collections.abc import Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from quality_rows import rows_of

OURS, PEER = "#0b6fb8", "#b3261e"


def draw(figures: Mapping[str, Any]) -> str:
    """The plot as SVG."""
    models = figures["models"]
    with rc_context({"svg.hashsalt": "keepmtp", "svg.fonttype": "none", "font.size": 7}):
        figure = Figure(figsize=(9, 3.2 * len(models)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(len(models), 2, squeeze=False)
        for (left, right), (model, found) in zip(axes, models.items(), strict=True):
            _points(left, model, found, lambda own: own["divergence"], log=True)
            left.set_title(f"{model}: divergence from the release, nats a slot", fontsize=8)
            _points(
                right,
                model,
                found,
                lambda own: [100 * each for each in own["kept"]["3"]],
                log=False,
            )
            right.axhline(100, color="#98a4b3", linewidth=0.8)
            right.set_title(f"{model}: acceptance at k=3, % of the release's", fontsize=8)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def _points(axes: Axes, model: str, found: Mapping[str, Any], figure_of: Any, *, log: bool) -> None:
    numbers: dict[tuple[float, float], list[int]] = {}
    for number, row in enumerate(rows_of(model), start=1):
        own = found["rows"][row.key]
        value, reach = figure_of(own)
        megabytes = sum(own["megabytes"]) or own["megabytes"][0]
        if not own["megabytes"][
            1
        ]:  # a peer's checkpoint has no MTP block: the release's is beside it
            megabytes += found["rows"]["release"]["megabytes"][1]
        colour = PEER if row.peer else OURS
        axes.errorbar(
            megabytes,
            value,
            yerr=reach,
            fmt="o",
            markersize=3,
            linewidth=0.8,
            color=colour,
            capsize=2,
        )
        numbers.setdefault((megabytes, value), []).append(number)
    for place, rows in numbers.items():
        label = ", ".join(map(str, rows))
        axes.annotate(label, place, xytext=(3, 3), textcoords="offset points", color=OURS)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("MB on disk, MTP block included")
    axes.grid(color="#dde2e8", linewidth=0.5)
