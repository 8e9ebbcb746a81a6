"""What people see of a speed matrix: a row for each load and k, as publishers print it; then what
recommends a k.

In: a `BenchFact`, or a `BenchPlan` before anything is measured. Out: tables and lines. Nothing is
decided here.
"""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ..validate.facts.benched import BenchCell, Benched, BenchFact, words_of
from ..validate.measure.bench import BenchPlan
from ..validate.report.tables import failures, recommendation
from .tables import figure, table

_COLUMNS = ("", ">k", ">tok/s", ">±", ">over k=0", ">first", ">each", ">length", ">by position")


def counted(plan: BenchPlan, num_checkpoints: int) -> dict[str, Any]:
    """What a run would do."""
    repetitions = plan.repeat * plan.rounds
    requests = (
        sum(map(plan.num_requests, plan.loads)) * len(plan.ks) * repetitions * num_checkpoints
    )
    return {
        "checkpoints": num_checkpoints,
        "servers": len(plan.ks) * plan.rounds * num_checkpoints,
        "k": list(plan.ks),
        "loads": [
            {"concurrency": concurrency, "context": context} for concurrency, context in plan.loads
        ],
        "repetitions": repetitions,
        "requests": requests,
        "output_tokens": plan.output_tokens,
        "prompts": f"{len(plan.prompts.items):,} of {plan.prompts.name}",
    }


def tables(found: BenchFact) -> Iterator[RenderableType]:
    """A table for each checkpoint; then the recommendations, and what a reader should know."""
    for benched in found.benched:
        chosen = {(row.concurrency, row.context): row.k for row in benched.recommended}
        rows = [
            _cells(benched, cell, is_chosen=cell.k == chosen[cell.load]) for cell in benched.cells
        ]
        yield table(f"bench {benched.path} ({benched.role})", _COLUMNS, rows)
        yield from map(recommendation, benched.recommended)
        yield from benched.slower
        if benched.as_served != "native":
            yield (
                f"NOT the checkpoint's speed: it was served as a {benched.as_served}. "
                f"{benched.reason}."
            )
        yield ""
    yield from failures(found)
    yield (
        "tok/s: generated tokens a second; ±: half the distance from the slowest to the fastest "
        "repetition; *: recommended; first, each: milliseconds to the first token and to each "
        "further one, medians; length: tokens a step of the target; by position: drafted tokens "
        "that were accepted, in %."
    )
    form = (
        "as messages through the chat template" if found.checkpoint.form == "chat" else "as texts"
    )
    yield (
        f"{found.num_prompts:,} prompts of {found.prompts}, {form}, greedily; answers end by "
        f"themselves or after {found.output_tokens:,} tokens."
    )
    if found.rounds == 1:
        yield (
            "Each server was started once: what changed on the machine between them shows only "
            "with --rounds 2."
        )
    yield f"vLLM {found.environment['vllm']} on {found.environment['device']}."


def _cells(benched: Benched, cell: BenchCell, *, is_chosen: bool) -> list[str | Text]:
    load = words_of(cell.load)
    if cell.tokens_per_second is None or cell.fastest is None or cell.slowest is None:
        return [load, str(cell.k), Text("failed", "red"), *("-",) * 6]
    figures = (benched.speed_up(cell) if cell.k else None, cell.first_token_ms, cell.per_token_ms)
    over, first, each = (figure("{:,.2f}", one) for one in figures)
    return [
        load,
        f"{'* ' * is_chosen}{cell.k}",
        f"{cell.tokens_per_second:,.1f}",
        f"{(cell.fastest - cell.slowest) / 2:,.1f}",
        over,
        first,
        each,
        figure("{:.2f}", cell.mean_accepted_length),
        " ".join(f"{100 * share:.0f}" for share in cell.acceptance_per_position) or "-",
    ]
