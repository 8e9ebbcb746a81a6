"""What people see of a speed matrix: k across, loads down, as publishers print it; then what recommends a k.

In: a `BenchFact`, or a `BenchPlan` before anything is measured. Out: tables and lines. Nothing is decided here.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..recipes.errors import printable
from .tables import escape, plain_table

if TYPE_CHECKING:
    from ..validate.facts.benched import BenchCell, Benched, BenchFact
    from ..validate.measure.bench import BenchPlan


def counted(plan: "BenchPlan", num_checkpoints: int) -> dict[str, Any]:
    """What a run would do, for machines."""
    repetitions = plan.repeat * plan.rounds
    requests = sum(map(plan.num_requests, plan.loads)) * len(plan.ks) * repetitions * num_checkpoints
    return {
        "checkpoints": num_checkpoints,
        "servers": len(plan.ks) * plan.rounds * num_checkpoints,
        "k": list(plan.ks),
        "loads": [{"concurrency": concurrency, "context": context} for concurrency, context in plan.loads],
        "repetitions": repetitions,
        "requests": requests,
        "output_tokens": plan.output_tokens,
    }


def planned(plan: "BenchPlan", num_checkpoints: int) -> Text:
    """What a run would do, before it does it."""
    requests, servers = counted(plan, num_checkpoints)["requests"], len(plan.ks) * plan.rounds
    ks, loads = ", ".join(map(str, plan.ks)), "; ".join(_load(load) for load in plan.loads)
    return Text(
        f"{num_checkpoints} checkpoint{_s(num_checkpoints)}, {servers} server{_s(servers)} each, one after the other\n"
        f"k         {ks}\n"
        f"loads     {loads}\n"
        f"cells     {len(plan.ks) * len(plan.loads)} each, {plan.repeat * plan.rounds} repetitions a cell\n"
        f"requests  {requests:,} in all, at most {plan.output_tokens:,} tokens an answer\n"
        f"prompts   {len(plan.prompts.items):,} of {printable(plan.prompts.name)}"
    )


def tables(found: "BenchFact") -> Iterator[RenderableType]:
    """A table for each checkpoint; then the recommendations, and what a reader should know."""
    for benched in found.benched:
        yield Text(f"bench {printable(benched.path)} ({benched.role}): generated tokens a second")
        yield _matrix(benched)
        yield Text("\n".join(map(printable, _recommendations(benched))) + "\n")
    yield Text("\n".join(map(printable, _notes(found))))


def _matrix(benched: "Benched") -> Table:
    """For each load the rates, the fastest in bold, the recommended one with a star; below each what belongs to it."""
    ks = sorted({cell.k for cell in benched.cells})
    table = plain_table("")
    table.add_column("", no_wrap=True)
    for k in ks:
        table.add_column(f"k={k}", justify="right", no_wrap=True)
    for load in benched.loads:
        cells = [next(cell for cell in benched.cells if (cell.k, cell.load) == (k, load)) for k in ks]
        chosen = next(row.k for row in benched.recommended if (row.concurrency, row.context) == load)
        best = max((cell.tokens_per_second or 0 for cell in cells), default=0)
        table.add_row(escape(_load(load)), *(_rate(cell, best, is_chosen=cell.k == chosen) for cell in cells))
        for name, words in _rows(benched, cells):
            table.add_row(f"  {name}", *words, style="dim")
        table.add_section()
    return table


def _rate(cell: "BenchCell", best: float, *, is_chosen: bool) -> str:
    if cell.tokens_per_second is None:
        return "[red]failed[/]"
    words = f"{cell.tokens_per_second:,.1f}"
    return f"{f'[bold]{words}[/]' if cell.tokens_per_second == best else words}{' *' if is_chosen else '  '}"


def _rows(benched: "Benched", cells: "list[BenchCell]") -> "Iterator[tuple[str, list[str]]]":
    """What belongs to a rate: its spread, the speed-up, times, and what was accepted at each position."""

    def row(figures: "list[float | None]", form: str) -> list[str]:
        return [f"{form.format(figure) if figure is not None else '-'}  " for figure in figures]

    spreads = [None if c.fastest is None or c.slowest is None else (c.fastest - c.slowest) / 2 for c in cells]
    yield "spread", row(spreads, "± {:,.1f}")
    yield "over k=0", row([benched.speed_up(cell) if cell.k else None for cell in cells], "{:.2f}x")
    yield "first token", row([cell.first_token_ms for cell in cells], "{:,.1f} ms")
    yield "each further token", row([cell.per_token_ms for cell in cells], "{:,.1f} ms")
    yield "tokens a step", row([cell.mean_accepted_length for cell in cells], "{:.2f}")
    for at in range(max(len(cell.acceptance_per_position) for cell in cells)):
        shares = [cell.acceptance_per_position[at : at + 1] for cell in cells]
        yield f"accepted at {at + 1}", row([100 * share[0] if share else None for share in shares], "{:.1f} %")


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
        "Times are medians; tokens a step of the target, with its own; accepted at each position of a draft."
    )
    form = "as messages through the chat template" if found.checkpoint.form == "chat" else "as texts"
    yield (
        f"{found.num_prompts:,} prompts of {found.prompts}, {form}, greedily; answers end by themselves or after "
        f"{found.output_tokens:,} tokens."
    )
    if found.rounds == 1:
        yield "Each server was started once: what changed on the machine between them shows only with --rounds 2."
    yield f"vLLM {found.environment['vllm']} on {found.environment['device']}."


def _load(load: tuple[int, int]) -> str:
    from ..validate.facts.benched import words_of

    return words_of(load)


def _s(count: int) -> str:
    return "" if count == 1 else "s"
