"""`keepmtp closeness`: how far a served checkpoint's predictions are from its served source's, on held-out text.

In: two checkpoints and a text. Out: a table, closeness.json with every position in the same folder, and the report made
anew.

Easy to get wrong: whatever may be refused is refused before a server is started: a text of the calibration data, a
source that is not found, results of other bytes in the same folder.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..recipes.errors import RecipeError, printable
from ..recipes.extras import require_extra
from ..validate.facts.vllm_env import TIMEOUT_SECONDS
from .gate import EXITS
from .options import AnyVLLMOption, JsonOption, TimeoutOption, chosen_vllm, refuse_stray_words
from .progress import asking, bytes_bar, downloaded
from .tables import VERDICT_COLOURS, escape, plain_table, print_json, say

if TYPE_CHECKING:
    from ..checkpoints.source import Source
    from ..validate.facts.closeness import ClosenessFact
    from ..validate.facts.schema import ReasonFact
    from ..validate.facts.served import Role
    from ..validate.measure.texts import HeldOut

_CURE = "Name it with --source"


def closeness(
    context: typer.Context,
    path: Annotated[str, typer.Argument(help="Checkpoint to judge: a folder or a Hub id.")],
    source: Annotated[
        str | None,
        typer.Option(
            help="What it was made from, folder or Hub id; default: what its keepmtp.json names, if that is a folder "
            "here."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help='Held-out text: a .txt file, or .jsonl with "text", "messages" or "tokens" a line; default: the one '
            "that ships with this model."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of text, at most.")] = 32_768,
    window: Annotated[int, typer.Option(min=2, help="Tokens of a window, at most.")] = 512,
    top: Annotated[
        int, typer.Option(min=1, help="Likeliest tokens to compare at each position; exact if it is the vocabulary.")
    ] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Windows in flight.")] = 4,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    any_vllm: AnyVLLMOption = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for closeness.json and its windows alone; default: "
            "NAME.report beside the checkpoint, with all its results.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare what a served checkpoint and its served source predict on held-out text: divergence and flips.

    Both servers give the likeliest tokens after every token of the text (vLLM's prompt_logprobs). The Kullback-Leibler
    divergence says how far the predictions are apart, in nats a token; a flip is a token where the first choice is
    another. With fewer tokens than the vocabulary has, the rest counts as one: the divergence is then a lower bound.

    The source's predictions are kept, and taken for every checkpoint that is made from it. The same command goes on
    after a stop. Servers run without drafting, which changes no prediction. Words after `--` go to `vllm serve`.

    Exit status 1 if a server fails, or the recipe's max_divergence or max_flips is exceeded; 3 if the text is too short
    to tell.

    Example: `keepmtp closeness /data/out --source /data/GLM-4.7 --text held_out.jsonl -- --tensor-parallel-size 8`
    """
    from ..checkpoints.identity import identify
    from ..checkpoints.source import open_source
    from ..checkpoints.source_of import original_of
    from ..validate.facts.results import report_folder, write_result
    from ..validate.measure.harness import Model, Setup
    from ..validate.measure.room import refuse_no_room
    from ..validate.measure.server import refuse_words
    from ..validate.report import report as reports

    refuse_stray_words("closeness", context.args)
    refuse_words("closeness", context.args)
    require_extra("keepmtp closeness", "quantize")
    from ..validate.measure import closeness as measure  # numpy, once it is known to be there

    opened, err = open_source(path), Console(stderr=True)
    compared_on = _held_out(opened, text)
    original = original_of(opened, source, cure=_CURE)
    if original is None:
        raise RecipeError("--source", "closeness is to a source", got="none", cure="Name the release")
    vllm, extra = chosen_vllm(any_vllm=any_vllm), tuple(context.args)
    is_recorded = folder is None and Path(path).is_dir()
    out = folder or (report_folder(Path(path)) if is_recorded else Path(f"{Path(opened.where).name}.report"))
    refuse_no_room((opened, original), vllm, out=out, extra=extra)
    reading = None if as_json else bytes_bar(err, "reading")

    def model(role: "Role", each: "Source") -> Model:
        local = downloaded(each, err, is_shown=not as_json)
        assert local.folder is not None
        identity = identify(local.folder, cache=out, watch=reading)
        return Model(role=role, source=local, identity=identity)

    before, judged = model("source", original), model("checkpoint", opened)
    if is_recorded:
        reports.refuse_stale(out, judged.identity, but=("closeness",))
    if before.identity.sha256 == judged.identity.sha256:
        rule = "must be what the checkpoint was made from, not the checkpoint itself"
        raise RecipeError("--source", rule, got=f"the same bytes in {before.source.where}", cure=_CURE)
    with asking(err, as_json=as_json) as watch:
        setup = Setup(vllm=vllm, out=out, timeout=timeout, extra=extra, say=partial(say, err))
        depth = measure.Depth(tokens=tokens, window=window, top=top, concurrency=concurrency)
        fact = measure.measure(judged, before, compared_on, setup=setup, depth=depth, watch=watch)
    write_result(out, "closeness", fact, checkpoint=judged.identity, vllm=vllm.version)
    full = reports.refresh(out, measured="closeness") if is_recorded else None
    reason = _own_reason(fact, opened) if full is None or full.judgement is None else _reason_in(full.judgement.reasons)
    _show(fact, reason, out, as_json=as_json)


def _held_out(opened: "Source", text: Path | None) -> "HeldOut":
    from ..checkpoints.record import RECORD, read_record
    from ..checkpoints.source import small_file
    from ..validate.measure.texts import held_out

    record = small_file(opened, RECORD)
    return held_out(text, None if record is None else read_record(record, where=f"{opened.where}: {RECORD}"))


def _reason_in(reasons: "tuple[ReasonFact, ...]") -> "ReasonFact | None":
    return next((reason for reason in reasons if reason.gate == "closeness"), None)


def _own_reason(fact: "ClosenessFact", opened: "Source") -> "ReasonFact | None":
    """The gate's answer where there is no report: by the limits in the checkpoint's record."""
    from ..checkpoints.record import RECORD
    from ..checkpoints.source import small_file
    from ..validate.report.gates import judge, limits_in

    gates = limits_in(small_file(opened, RECORD), cure=f"Restore the {RECORD} that keepmtp wrote")
    return _reason_in(judge(gates=gates, check=None, serve=None, evaluation=None, closeness=fact).reasons)


def _show(fact: "ClosenessFact", reason: "ReasonFact | None", out: Path, *, as_json: bool) -> None:
    """Print what was found, and end with the status it comes to."""
    from ..validate.facts.results import file_of

    if as_json:
        told = reason.model_dump(mode="json") if reason else None
        print_json({"closeness": fact.model_dump(mode="json"), "reason": told})
    else:
        Console().print(table(fact, reason))
        words = f"Result: {file_of(out, 'closeness')}; every position in {fact.samples}; logs: {out / 'logs'}"
        say(Console(), words)
    if reason is not None and reason.verdict != "pass":
        raise typer.Exit(EXITS[reason.verdict])


def table(fact: "ClosenessFact", reason: "ReasonFact | None") -> RenderableType:
    """The figures, the positions that are farthest off, the gate, and what a reader should know."""
    from ..validate.report.closeness_words import figures

    rows = plain_table(f"closeness {fact.checkpoint.path}", show_header=False)
    for name, value in figures(fact):
        rows.add_row(name, escape(value))
    far = plain_table("farthest off, in the worst windows")
    for name in ("nats", "after", "text", "source", "checkpoint"):
        far.add_column(name, justify="right" if name == "nats" else "left", overflow="fold")
    for one in fact.worst[:5]:
        after = one.context[-32:]
        far.add_row(f"{one.nats:.2f}", *(escape(repr(each)) for each in (after, one.token, one.source, one.checkpoint)))
    lines: list[RenderableType] = [rows, far]
    if reason is not None:
        lines.append(f"[{VERDICT_COLOURS[reason.verdict]}]{reason.gate}: {reason.title}[/]  {escape(reason.says)}")
    return Group(*lines, Text("\n".join(map(printable, _notes(fact)))))


def _notes(fact: "ClosenessFact") -> Iterator[str]:
    from ..validate.report.closeness_words import notes

    yield from notes(fact)
    environment = fact.environment
    yield f"vLLM {environment['vllm']} on {environment['device']}; " + "; ".join(
        f"the {one.role} in {one.seconds:,.0f} s" for one in fact.predicted
    )
