"""The chart of closeness: how the divergence is spread over the tokens.

In: a `ClosenessFact`. Out: a drawing (svg.py).

Easy to get wrong: most tokens of a good checkpoint differ by next to nothing and a few by a lot, so the axis is
logarithmic, and a mean lies far to the right of the middle. Both have a line.
"""

from math import log10

from matplotlib.axes import Axes

from ..facts.closeness import HISTOGRAM_EDGES, ClosenessFact
from .svg import Drawing, Inks, legend

_TICKS = (-6, -4, -2, 0)


def divergences(closeness: ClosenessFact) -> Drawing:
    """Bars of the share of tokens by divergence, half a power of ten each, with mean and 99th percentile.

    The first bar has all below HISTOGRAM_EDGES, the last all above.
    """
    edges = [log10(edge) for edge in HISTOGRAM_EDGES]
    width = edges[1] - edges[0]
    lefts = [edges[0] - width, *edges]
    shares = [100 * count / closeness.tokens for count in closeness.histogram]

    def draw(axes: Axes, inks: Inks) -> None:
        axes.bar(lefts, shares, width * 0.92, align="edge", color=inks.after, label="tokens")
        marks = (("mean", closeness.divergence, "-"), ("99th percentile", closeness.percentile_99, "--"))
        for name, value, style in marks:
            spot = min(max(log10(value), lefts[0]), lefts[-1] + width) if value > 0 else lefts[0]
            axes.axvline(spot, color=inks.ink, linewidth=1.2, linestyle=style, label=f"{name}: {value:.2g}")
        axes.set_xticks(_TICKS, [f"{10.0**power:g}" for power in _TICKS])
        axes.set_xlim(lefts[0], lefts[-1] + width)
        axes.set_xlabel("divergence of a token (nats)")
        axes.set_ylabel("tokens (%)")
        axes.grid(axis="y", color=inks.grid, linewidth=0.6)
        legend(axes)

    return Drawing(draw=draw, height=3.0)
