"""`keepmtp serve-check`: a checkpoint and its source in real vLLM servers, with and without
method=mtp.

In: two checkpoints. Out: tables of servers and gates, serve.json, report.json and, with the
`report` extra, report.html, with the servers' logs in the same folder.

Easy to get wrong: every refusal comes before the first server: a source that is not found, results
of other bytes in the same folder, a limit in keepmtp.json that is none.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from ..recipes.errors import RecipeError
from .gate import EXITS
from .measuring import OriginalOption, ServeOptions, Session, begin
from .progress import spinner
from .tables import answer, figure, table, verdict

if TYPE_CHECKING:
    from ..checkpoints.source import Source
    from ..validate.facts.schema import JudgementFact
    from ..validate.facts.served import Run, ServeCheck
    from ..validate.measure.harness import Model

_OWN_GATES = ("findings", "loads", "acceptance")
_COLUMNS = (
    "",
    ">k",
    ">start",
    ">accepted",
    ">by position",
    ">length",
    ">tok/s",
    ">speed-up",
    ">same",
)


def serve_check(
    context: typer.Context,
    served: ServeOptions,
    source: OriginalOption = None,
    k: Annotated[
        int,
        typer.Option(
            "-k",
            "--num-speculative-tokens",
            min=1,
            help="Serve with 1 to k drafted tokens a step, and without drafting.",
        ),
    ] = 1,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='Your own: one a line, or .jsonl with "prompt"; default: eight word problems.'
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens generated a prompt, at most.")
    ] = 256,
) -> None:
    """Serve a checkpoint and its source with vLLM, with and without MTP, and compare what is
    accepted.

    The gates are those of the recipe that the checkpoint was made by, as in `keepmtp gate`. Exit
    status 1 if one of them is a regression: a server of the checkpoint does not come up, acceptance
    lost more than the recipe allows, drafting changes greedy outputs, or the check has an error; 3
    if the prompts are too few to tell: the table says how many would do.

    Words after `--` go to `vllm serve`. Without a GPU, a checkpoint that vLLM's CPU build has no
    kernel for is served as a BF16 copy of the same weights, and the report says so.

    Example: `keepmtp serve-check /data/out --source /data/GLM-4.7 -k 3 -- --tensor-parallel-size 8`
    """
    from ..recipes.families import find_view
    from ..validate.facts.binomial import refuse_without_scipy
    from ..validate.measure import serve_check as measure
    from ..validate.measure.harness import ks_up_to
    from ..validate.measure.prompts import PROMPTS, read_prompts

    refuse_without_scipy()  # its gate has exact limits
    asked = PROMPTS if prompts is None else read_prompts(prompts)
    session = begin("serve-check", "serve", served, context.args, source)
    session.limits()
    view = find_view(session.opened.config, session.opened.where, session.opened.entries)
    check = measure.Check(ks=ks_up_to(k, view.num_mtp_layers), prompts=asked, max_tokens=max_tokens)
    if check.ks == (0,):
        rule = f"with {view.num_mtp_layers} MTP layers vLLM drafts a multiple of them"
        raise RecipeError("-k", rule, got=k, cure=f"Use -k {view.num_mtp_layers}")
    setup = session.setup
    checkpoint = session.checkpoint("check")
    original = session.original and session.downloaded(session.original)
    with spinner(session.err, in_log=True) as watch:
        found = measure.serve_check(
            checkpoint.source, original, setup=setup, check=check, watch=watch
        )
    judged = _kept(session, found, checkpoint, original)
    told = {**found.model_dump(mode="json"), "judgement": judged.model_dump(mode="json")}
    answer(
        told,
        _parts(session, found, judged),
        as_json=served.as_json,
        status=exit_status(judged, found),
    )


def exit_status(judged: "JudgementFact", found: "ServeCheck") -> int:
    """1 for a regression in what this command measures; 3 if the prompts are too few to compare
    acceptance.

    Without a source nothing is compared, by choice.
    """
    from ..validate.report.gates import verdict_on

    if verdict_on(judged, _OWN_GATES) == "regression":
        return EXITS["regression"]
    return EXITS[verdict_on(judged, ("acceptance",))] if found.source else 0


def _kept(
    session: Session, found: "ServeCheck", checkpoint: "Model", original: "Source | None"
) -> "JudgementFact":
    """Write the result, and a report of it alone or of all results of the checkpoint."""
    from ..validate.check.check import check_source
    from ..validate.report.check_data import record_static
    from ..validate.report.gates import judge
    from .report import save

    if session.is_recorded:
        record_static(session.out, checkpoint.source, checkpoint.identity, source=original)
    judged = session.keep(found, checkpoint)
    if judged is None:
        checked = check_source(checkpoint.source, source=original)
        judged = judge(gates=session.limits(), check=checked, serve=found, evaluation=None)
        version, opened = session.setup.vllm.version, checkpoint.source
        save(
            session.out,
            checked,
            vllm=version,
            opened=opened,
            source=original,
            serve=found,
            judgement=judged,
        )
    return judged


def _parts(
    session: Session, found: "ServeCheck", judged: "JudgementFact"
) -> Iterator[RenderableType]:
    """One row a server, then the gates, then what a reader should know."""
    from ..validate.report.html import HTML_FILE
    from ..validate.report.report import JSON_FILE

    path, out = found.checkpoint.path, session.out
    yield table(f"serve-check {path}", _COLUMNS, _rows(found))
    yield from verdict(path, judged)
    yield from _notes(found)
    written = next(out / name for name in (HTML_FILE, JSON_FILE) if (out / name).is_file())
    yield f"Report: {written}; logs: {out / 'logs'}"


def _rows(found: "ServeCheck") -> "Iterator[list[str | Text] | None]":
    for served in found.served:
        for run in served.runs:
            yield [served.role if run is served.runs[0] else "", *_cells(run)]
        yield None


def _cells(run: "Run") -> tuple[str | Text, ...]:
    if not run.loaded:
        return (str(run.k), Text("failed", "red"), *("-",) * 6)
    by_position = " ".join(f"{100 * share:.0f}" for share in run.acceptance_per_position)
    same = (
        "-"
        if run.partings is None
        else f"{len(run.outputs) - len(run.partings)}/{len(run.outputs)}"
    )
    return (
        str(run.k),
        f"{run.seconds_to_health:.0f} s",
        f"{run.accepted_tokens}/{run.draft_tokens}" if run.k else "-",
        f"{by_position} %" if by_position else "-",
        figure("{:.2f}", run.mean_accepted_length),
        f"{run.tokens_per_second:.1f}",
        figure("{:.2f}x", run.speed_up),
        same,
    )


def _notes(found: "ServeCheck") -> Iterator[str]:
    for served in found.served:
        if served.as_served != "native":
            yield f"The {served.role} was served as a {served.as_served}: {served.reason}."
        for run in served.runs:
            if not run.is_repeatable:
                yield f"{served.role}, k={run.k}: the same prompt got other tokens the second time."
    yield (
        "start: seconds to a healthy server; length: mean accepted length, tokens a step of the "
        "target; same: outputs equal to those of k=0."
    )
    environment, num = found.environment, len(found.prompts)
    yield (
        f"vLLM {environment['vllm']} on {environment['device']}; {num} prompts, "
        f"{found.seconds:.0f} s in all."
    )
