"""`keepmtp closeness`: what a served checkpoint and its served source predict on held-out text.

In: two checkpoints, and a text. Out: tables of figures and the gate; closeness.json with the
servers' logs in the same folder, and the report made anew.
"""

from pathlib import Path
from typing import Annotated

import typer

from ..recipes.errors import RecipeError
from ..recipes.extras import require_extra
from .exits import OF_VERDICT
from .options import (
    OriginalOption,
    ServeOptions,
)
from .tables import answer, drawn, reasons


def closeness(
    served: ServeOptions,
    source: OriginalOption = None,
    text: Annotated[Path | None, typer.Option(help="Held-out text: .txt or .jsonl.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text, at most.")] = 32_768,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window, at most.")] = 512,
    top: Annotated[int, typer.Option(min=1, help="Likeliest tokens compared.")] = 512,
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

    The text is a .txt file, or .jsonl with "text", "messages" or "tokens" a line; default: the one
    that ships with this model.

    Exit status 1 if a server fails, or the recipe's max_divergence or max_flips is exceeded; 3 if
    the text is too short to tell.

    \b
    Example: `keepmtp closeness /data/out --source /data/GLM-4.7 --text held_out.jsonl -- -tp 8`
    """
    require_extra("keepmtp closeness", "quantize")
    from ..checkpoints.record import read_record
    from ..validate.measure import closeness as measure  # numpy, once it is known to be there
    from ..validate.measure.texts import held_out
    from ..validate.report import tables
    from .session import Session

    session = Session("closeness", "closeness", served, source)
    if session.original is None:
        raise RecipeError(
            "--source", "closeness is to a source", got="none", cure="Name the release"
        )
    record = session.record
    where = f"{session.opened.where}: keepmtp.json"
    # A text of the calibration data is refused: it says nothing.
    compared_on = held_out(text, record and read_record(record, where=where))
    judged, before = session.models()
    assert before is not None
    depth = measure.Depth(tokens=tokens, window=window, top=top, concurrency=concurrency)
    with session.watched() as setup:
        fact = measure.measure(judged, before, compared_on, setup=setup, depth=depth)
    judgement = session.keep(fact, judged, gates=session.gates, closeness=fact)
    own = [one for one in judgement.reasons if one.gate == "closeness"]
    status = 0
    reason = None
    for one in own:
        status = OF_VERDICT[one.verdict]
        reason = one
    times = "; ".join(f"the {one.role} in {one.seconds:,.0f} s" for one in fact.predicted)
    parts = [
        drawn(f"closeness {fact.checkpoint.path}", tables.closeness(fact)),
        drawn("farthest off, in the worst windows", tables.farthest(fact)),
        reasons("gate", own),
        *tables.closeness_notes(fact),
        f"vLLM {fact.environment['vllm']} on {fact.environment['device']}; {times}",
        f"{session.places}; every position in {fact.samples}",
    ]
    value = {"closeness": fact, "reason": reason}
    answer(value, parts, as_json=served.as_json, status=status)
