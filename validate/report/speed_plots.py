"""Charts of a speed matrix: speed over k for each load, source against checkpoint, and acceptance by position.

In: a `BenchFact`. Out: drawings (svg.py).

Easy to get wrong: loads differ by a factor of a hundred in tokens a second, so over k each is drawn against its own
k=0. A bar of error goes from the slowest to the fastest repetition: two k whose bars overlap are not different.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ...recipes.protocol import Gates
from ..facts.benched import BenchCell, Benched, BenchFact, words_of
from .plots import by_position
from .speed_table import ks_of
from .svg import Drawing, Inks, legend, png

_MARKERS = "osD^vPX*"
_STYLES = ("-", "--", ":", "-.")
_MOST_LOADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """Speeds over k; `over` divides them."""

    name: str
    cells: Sequence[BenchCell]
    over: float = 1.0


def speed_over_k(bench: BenchFact) -> Drawing | None:
    """Times as fast as k=0, over k, a line for each load of the checkpoint; None without k=0 or another k."""
    own = bench.checkpoint
    lines = []
    for load in own.loads[:_MOST_LOADS]:
        cells, plain = _cells(own, load), own.cell(0, load)
        if plain and plain.tokens_per_second and len(cells) > 1:
            lines.append(_Line(name=words_of(load), cells=cells, over=plain.tokens_per_second))
    if not lines:
        return None

    def draw(axes: Axes, inks: Inks) -> None:
        shades = (inks.after, inks.between, inks.before, inks.muted)
        for number, line in enumerate(lines):
            _draw(axes, line, shades[number % len(shades)], number)
        axes.axhline(1, color=inks.bad, linewidth=1.2, linestyle="--", label="without MTP")
        _frame(axes, inks, bench, "times as fast as without MTP")

    return Drawing(draw=draw, height=3.5)


def speed_of_both(bench: BenchFact) -> Drawing | None:
    """Tokens a second over k under the smallest load, source and checkpoint; None without a source's figures."""
    if bench.source is None:
        return None
    load = min(bench.checkpoint.loads)
    models = [(model, _cells(model, load)) for model in bench.benched]
    if not all(cells for _, cells in models):
        return None

    def draw(axes: Axes, inks: Inks) -> None:
        for number, (model, cells) in enumerate(models):
            name = "source" if model.role == "source" else "this checkpoint"
            how = "" if model.as_served == "native" else " (BF16 copy)"
            colour = inks.before if model.role == "source" else inks.after
            _draw(axes, _Line(name=name + how, cells=cells), colour, number)
        _frame(axes, inks, bench, f"tokens a second, {words_of(load)}")

    return Drawing(draw=draw, height=3.3)


def bench_acceptance(bench: BenchFact, gates: Gates) -> tuple[int, Drawing] | None:
    """The largest k under the smallest load, and its acceptance by position; None where nothing was drafted."""
    load = min(bench.checkpoint.loads)
    drafting = [cell.k for cell in _cells(bench.checkpoint, load) if cell.acceptance_per_position]
    if not drafting:
        return None
    k = max(drafting)
    found = [(model, cell) for model in bench.benched if (cell := model.cell(k, load)) is not None]
    return k, by_position([(model, cell.acceptance_per_position) for model, cell in found], k, gates.min_acceptance)


def speed_png(bench: BenchFact) -> bytes | None:
    """The card's picture: speed over k, and source against checkpoint; None where nothing can be drawn."""
    load = words_of(min(bench.checkpoint.loads))
    drawn = (("Speed over k", speed_over_k(bench)), (f"Source and checkpoint, {load}", speed_of_both(bench)))
    charts = [(title, drawing) for title, drawing in drawn if drawing is not None]
    return png(*charts) if charts else None


def _cells(model: Benched, load: tuple[int, int]) -> list[BenchCell]:
    """Those with a figure, by k."""
    return sorted((cell for cell in model.cells if cell.load == load and cell.repetitions), key=lambda cell: cell.k)


def _draw(axes: Axes, line: _Line, colour: str, number: int) -> None:
    rates = [(cell.tokens_per_second or 0.0) / line.over for cell in line.cells]
    ends = [((cell.slowest or 0.0) / line.over, (cell.fastest or 0.0) / line.over) for cell in line.cells]
    below = [max(0.0, rate - slowest) for rate, (slowest, _) in zip(rates, ends, strict=True)]
    above = [max(0.0, fastest - rate) for rate, (_, fastest) in zip(rates, ends, strict=True)]
    axes.errorbar(
        [cell.k for cell in line.cells],
        rates,
        yerr=(below, above),
        color=colour,
        label=line.name,
        marker=_MARKERS[number % len(_MARKERS)],
        linestyle=_STYLES[number % len(_STYLES)],
        linewidth=1.6,
        markersize=6,
        capsize=3,
    )


def _frame(axes: Axes, inks: Inks, bench: BenchFact, ylabel: str) -> None:
    axes.set_xticks(ks_of(bench))
    axes.set_xlabel("k, draft tokens a step")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.grid(axis="y", color=inks.grid, linewidth=0.6)
    legend(axes)
