"""What people see of a speed matrix: k across, loads down, as publishers print it; then what recommends a k.

In: a `BenchFact`, or a `BenchPlan` before anything is measured. Out: tables and lines. Nothing is decided here.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..recipes.errors import printable
from .tables import escape, plain_table

if TYPE_CHECKING:
    from ..validate.bench.benched import BenchCell, Benched, BenchFact
    from ..validate.bench.matrix import BenchPlan


def planned(plan: "BenchPlan", num_checkpoints: int) -> Text:
    """What a run would do, before it does it."""
    requests = sum(map(plan.num_requests, plan.loads)) * len(plan.ks) * plan.repeat * plan.rounds * num_checkpoints
    servers = len(plan.ks) * plan.rounds
    ks, loads = ", ".join(map(str, plan.ks)), "; ".join(_load(load) for load in plan.loads)
    return Text(
        f"{num_checkpoints} checkpoint{_s(num_checkpoints)}, {servers} server{_s(servers)} each, one after the other\n"
        f"k         {ks}\n"
        f"loads     {loads}\n"
        f"cells     {len(plan.ks) * len(plan.loads)} each, {plan.repeat * plan.rounds} repetitions a cell\n"
        f"requests  {requests:,} in all, at most {plan.output_tokens:,} tokens an answer\n"
        f"prompts   {len(plan.prompts.items):,} of {plan.prompts.name}"
    )


def tables(found: "BenchFact") -> Iterator[RenderableType]:
    """A table for each checkpoint; then the recommendations, and what a reader should know."""
    for benched in found.benched:
        yield Text(f"bench {printable(benched.path)} ({benched.role}): generated tokens a second")
        yield _matrix(benched)
        yield Text("\n".join(_recommendations(benched)) + "\n")
    yield Text("\n".join(_notes(found)))


def _matrix(benched: "Benched") -> Table:
    ks = sorted({cell.k for cell in benched.cells})
    table = plain_table("")
    table.add_column("", no_wrap=True)
    for k in ks:
        table.add_column(f"k={k}", justify="right")
    for load in benched.loads:
        cells = [next(cell for cell in benched.cells if (cell.k, cell.load) == (k, load)) for k in ks]
        best = max(cells, key=lambda cell: cell.tokens_per_second or 0)
        chosen = next(row.k for row in benched.recommended if (row.concurrency, row.context) == load)
        table.add_row(escape(_load(load)), *(_cell(benched, cell, cell is best, cell.k == chosen) for cell in cells))
        table.add_row("  to first token", *(_milliseconds(cell.first_token_ms) for cell in cells), style="dim")
        table.add_row("  each further token", *(_milliseconds(cell.per_token_ms) for cell in cells), style="dim")
        table.add_row("  accepted", *(_accepted(cell) for cell in cells), style="dim")
        table.add_section()
    return table


def _cell(benched: "Benched", cell: "BenchCell", is_best: bool, is_chosen: bool) -> str:
    """`193.0 ± 2.1` and `1.82x` below it; the fastest in bold, the recommended one with a star."""
    if cell.tokens_per_second is None or cell.fastest is None or cell.slowest is None:
        return "[red]failed[/]"
    rate = f"{cell.tokens_per_second:,.1f} ± {(cell.fastest - cell.slowest) / 2:,.1f}"
    speed_up = benched.speed_up(cell)
    words = f"{rate}\n{f'{speed_up:.2f}x' if cell.k and speed_up else ''}{' *' if is_chosen else ''}".rstrip()
    return f"[bold]{words}[/]" if is_best else words


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"


def _accepted(cell: "BenchCell") -> str:
    if cell.acceptance is None:
        return "-"
    by_position = " ".join(f"{100 * share:.0f}" for share in cell.acceptance_per_position)
    return f"{by_position} %\nlength {cell.mean_accepted_length:.2f}"


def _recommendations(benched: "Benched") -> Iterator[str]:
    for row in benched.recommended:
        load = _load((row.concurrency, row.context))
        gain = f" ({row.speed_up:.2f}x of k=0)" if row.k and row.speed_up else ""
        yield f"{load}: {'no k is recommended' if row.k is None else f'k={row.k}{gain}'}: {row.says}."
    yield from benched.slower
    for cell in benched.cells:
        if cell.error:
            yield f"k={cell.k}, {_load(cell.load)}: no figure. {cell.error}."
    if benched.as_served != "native":
        yield f"NOT the checkpoint's speed: it was served as a {benched.as_served}. {benched.reason}."


def _notes(found: "BenchFact") -> Iterator[str]:
    yield (
        "± is half the distance from the slowest to the fastest repetition; * is recommended; bold is the fastest. "
        "Times are medians; accepted: by position, and tokens a step."
    )
    form = "as messages through the chat template" if found.checkpoint.form == "chat" else "as texts"
    yield (
        f"{found.num_prompts:,} prompts of {found.prompts}, {form}, greedily; answers end by themselves or after "
        f"{found.output_tokens:,} tokens."
    )
    yield f"vLLM {found.environment['vllm']} on {found.environment['device']}."


def _load(load: tuple[int, int]) -> str:
    from ..validate.bench.benched import words_of

    return words_of(load)


def _s(count: int) -> str:
    return "" if count == 1 else "s"
