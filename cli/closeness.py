"""`keepmtp closeness`: how far a served checkpoint's predictions are from its served source's, on
held-out text.

In: two checkpoints and a text. Out: a table, closeness.json with every position in the same folder,
and the report made anew.

Easy to get wrong: a text of the calibration data says nothing. It is refused before a server is
started.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from ..recipes.errors import RecipeError
from ..recipes.extras import require_extra
from .exits import OF_VERDICT
from .measuring import OriginalOption, ServeOptions, Session, begin
from .options import AtLeastOne
from .progress import asking
from .tables import answer, drawn, reasons

if TYPE_CHECKING:
    from ..validate.facts.closeness import ClosenessFact
    from ..validate.facts.schema import ReasonFact


def closeness(
    context: typer.Context,
    served: ServeOptions,
    source: OriginalOption = None,
    text: Path | None = None,
    tokens: Annotated[int, typer.Option(min=2)] = 32_768,
    window: Annotated[int, typer.Option(min=2)] = 512,
    top: AtLeastOne = 512,
    concurrency: AtLeastOne = 4,
) -> None:
    """Compare what a served checkpoint and its served source predict on held-out text: divergence
    and flips.

    Both servers give the likeliest tokens after every token of the text (vLLM's prompt_logprobs).
    The Kullback-Leibler divergence says how far the predictions are apart, in nats a token; a flip
    is a token where the first choice is another. With fewer tokens than the vocabulary has, the
    rest counts as one: the divergence is then a lower bound.

    The source's predictions are kept, and taken for every checkpoint that is made from it. The same
    command goes on after a stop. Servers run without drafting, which changes no prediction. Words
    after `--` go to `vllm serve`.

    Exit status 1 if a server fails, or the recipe's max_divergence or max_flips is exceeded; 3 if
    the text is too short to tell.

    Example: `keepmtp closeness /data/out --source /data/GLM-4.7 --text held_out.jsonl --
    --tensor-parallel-size 8`

    Args:
        text: Held-out text: a .txt file, or .jsonl with "text", "messages" or "tokens" a line;
            default: the one that ships with this model.
        tokens: Tokens of text, at most.
        window: Tokens of a window, at most.
        top: Likeliest tokens to compare at each position; exact if it is the vocabulary.
        concurrency: Windows in flight.
    """
    require_extra("keepmtp closeness", "quantize")
    from ..checkpoints.record import read_record
    from ..validate.measure import closeness as measure  # numpy, once it is known to be there
    from ..validate.measure.texts import held_out

    session = begin("closeness", "closeness", served, context.args, source)
    if session.original is None:
        raise RecipeError(
            "--source", "closeness is to a source", got="none", cure="Name the release"
        )
    record, where = session.record, f"{session.opened.where}: keepmtp.json"
    compared_on = held_out(text, None if record is None else read_record(record, where=where))
    gates, setup = session.gates, session.setup
    judged = session.checkpoint()
    before = session.source_of(judged)
    assert before is not None
    depth = measure.Depth(tokens=tokens, window=window, top=top, concurrency=concurrency)
    with asking(session.err, as_json=served.as_json) as watch:
        fact = measure.measure(judged, before, compared_on, setup=setup, depth=depth, watch=watch)
    judgement = session.keep(fact, judged, gates=gates, closeness=fact)
    reason = next((one for one in judgement.reasons if one.gate == "closeness"), None)
    found = {
        "closeness": fact.model_dump(mode="json"),
        "reason": reason and reason.model_dump(mode="json"),
    }
    status = OF_VERDICT[reason.verdict] if reason else 0
    answer(found, _parts(session, fact, reason), as_json=served.as_json, status=status)


def _parts(
    session: Session, fact: "ClosenessFact", reason: "ReasonFact | None"
) -> Iterator[RenderableType]:
    """The figures, the positions that are farthest off, the gate, and what a reader should know."""
    from ..validate.report import tables

    yield drawn(f"closeness {fact.checkpoint.path}", tables.closeness(fact))
    yield drawn("farthest off, in the worst windows", tables.farthest(fact))
    if reason is not None:
        yield reasons("gate", [reason])
    yield from tables.closeness_notes(fact)
    times = "; ".join(f"the {one.role} in {one.seconds:,.0f} s" for one in fact.predicted)
    yield f"vLLM {fact.environment['vllm']} on {fact.environment['device']}; {times}"
    yield f"{session.places}; every position in {fact.samples}"
