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
from .gate import EXITS
from .measuring import OriginalOption, ServeOptions, Session, begin
from .progress import asking
from .tables import answer, reasons, table

if TYPE_CHECKING:
    from ..validate.facts.closeness import ClosenessFact
    from ..validate.facts.schema import ReasonFact


def closeness(
    context: typer.Context,
    served: ServeOptions,
    source: OriginalOption = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help='Held-out text: a .txt file, or .jsonl with "text", "messages" or "tokens" a '
            "line; default: the one "
            "that ships with this model."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text, at most.")] = 32_768,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window, at most.")] = 512,
    top: Annotated[
        int,
        typer.Option(
            min=1,
            help="Likeliest tokens to compare at each position; exact if it is the vocabulary.",
        ),
    ] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Windows in flight.")] = 4,
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
    limits, setup = session.limits(), session.setup
    judged = session.checkpoint()
    before = session.source_of(judged)
    assert before is not None
    depth = measure.Depth(tokens=tokens, window=window, top=top, concurrency=concurrency)
    with asking(session.err, as_json=served.as_json) as watch:
        fact = measure.measure(judged, before, compared_on, setup=setup, depth=depth, watch=watch)
    judgement = session.keep(fact, judged)
    if judgement is None:
        from ..validate.report.gates import judge

        judgement = judge(gates=limits, check=None, serve=None, evaluation=None, closeness=fact)
    reason = next((one for one in judgement.reasons if one.gate == "closeness"), None)
    found = {
        "closeness": fact.model_dump(mode="json"),
        "reason": reason and reason.model_dump(mode="json"),
    }
    answer(
        found,
        _parts(session, fact, reason),
        as_json=served.as_json,
        status=EXITS[reason.verdict] if reason else 0,
    )


def _parts(
    session: Session, fact: "ClosenessFact", reason: "ReasonFact | None"
) -> Iterator[RenderableType]:
    """The figures, the positions that are farthest off, the gate, and what a reader should know."""
    from ..validate.report.closeness_words import figures, notes

    yield table(f"closeness {fact.checkpoint.path}", ("", ""), figures(fact))
    far = (
        [f"{one.nats:.2f}", *map(repr, (one.context[-32:], one.token, one.source, one.checkpoint))]
        for one in fact.worst[:5]
    )
    yield table(
        "farthest off, in the worst windows",
        (">nats", "after", "text", "source", "checkpoint"),
        far,
    )
    if reason is not None:
        yield reasons("gate", [reason])
    yield from notes(fact)
    times = "; ".join(f"the {one.role} in {one.seconds:,.0f} s" for one in fact.predicted)
    yield f"vLLM {fact.environment['vllm']} on {fact.environment['device']}; {times}"
    yield f"{session.places}; every position in {fact.samples}"
