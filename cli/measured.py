"""What was measured, for people: by eval and bench, and by a run that calibrates.

In: a fact. Out: tables and lines. It imports what help must not wait for, so verbs import it when
they run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from ..quantize.calibrate.mtp.facts import CalibrationFact
from ..recipes.errors import counted
from ..validate.facts.benched import BenchFact
from ..validate.facts.results import in_order
from ..validate.facts.rows import Row
from ..validate.facts.schema import JudgementFact
from ..validate.facts.served import has_no_block
from ..validate.report import tables
from ..validate.report.gates import verdict_on
from .exits import FINDINGS, OF_VERDICT
from .tables import drawn, table, verdict


def shown(facts: Mapping[str, Any], judged: JudgementFact) -> Iterator[RenderableType]:
    """What eval measured, and what a reader should know; then the gates, and the verdict."""
    path = ""
    rows = list[Row]()
    for fact in facts.values():
        path = fact.checkpoint.path
        rows += fact.rows(judged.gates.filter)
    found = tables.results(rows)
    # Cells may be broken: 80 columns have no room for three figures with their intervals.
    yield table(f"eval {path}", [head.removeprefix(">") for head in found.columns], found.rows)
    notes = dict[str, None]()
    for fact in facts.values():
        notes |= dict.fromkeys([*tables.how_served(fact), *fact.notes()])
    yield from notes
    yield "±: one standard error; in brackets the 95 % interval; length: tokens a target's step."
    yield from verdict(path, judged)


def benched(found: BenchFact) -> Iterator[RenderableType]:
    """Source and checkpoint by load and k; then which k to serve with, and what a reader should
    know.
    """
    yield drawn(f"bench {found.checkpoint.path}", tables.results(found.cells()))
    yield from tables.how_served(found)
    yield from found.remarks()
    yield (
        "Tokens a second: ± half the distance from slowest to fastest; length: tokens a step of "
        "the target."
    )
    form = "as texts"
    if found.checkpoint.form == "chat":
        form = "as messages through the chat template"
    yield (
        f"{counted(found.num_prompts, 'prompt')} of {found.prompts}, {form}, greedily; answers end "
        f"by themselves or after {found.output_tokens:,} tokens."
    )
    yield f"vLLM {found.environment['vllm']} on {found.environment['device']}."


def calibrated(fact: CalibrationFact) -> Iterator[RenderableType]:
    """What a run found: coverage, perplexity and acceptance, and the candidates of `mtp: auto`."""
    yield drawn("held-out text, without a server", tables.held_out(fact))
    search = fact.search
    if search:
        yield (
            f"Found for {search.budget}: {search.bytes:,} bytes; "
            "the recipe is recipe.yaml in the output."
        )
        yield ""
    if fact.candidates:
        title = "candidates for the MTP block"
        if fact.min_acceptance is not None:
            title += f"; {fact.min_acceptance:.1%} must be kept"
        if fact.confidence is not None:
            title += f", at {fact.confidence:.0%} confidence"
        yield drawn(title, tables.candidates(fact))
    yield from tables.calibration_notes(fact)
    yield ""


def exit_status(judged: JudgementFact, facts: Mapping[str, Any]) -> int:
    """1 for a regression in what was asked, or an error of the checkpoint; 3 if too little was
    asked to tell.
    """
    parts = in_order(facts)
    asked = {"drafting"}
    for part in parts:
        asked.update(part.asked)
    if has_no_block(parts):  # of which there is nothing to compare with
        asked.discard("acceptance")
    if verdict_on(judged, {*asked, "findings", "loads", "lossless"}) == "regression":
        return FINDINGS
    return OF_VERDICT[verdict_on(judged, asked)]
