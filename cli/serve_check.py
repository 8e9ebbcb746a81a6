"""`keepmtp serve-check`: a checkpoint and its source in real vLLM servers, with and without method=mtp.

In: two checkpoints. Out: tables of servers and gates, serve.json, report.json and, with the `report` extra,
report.html, with the servers' logs in the same folder.

Easy to get wrong: every refusal comes before the first server: a source that is not found, results of other bytes in
the same folder, a limit in keepmtp.json that is none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..recipes.errors import RecipeError
from ..recipes.extras import require_extra
from ..recipes.families import find_view
from ..validate.facts.vllm_env import TIMEOUT_SECONDS
from ..validate.measure.prompts import PROMPTS, read_prompts
from . import gate
from .options import AnyVLLMOption, JsonOption, TimeoutOption, chosen_vllm, refuse_stray_words
from .progress import Paced, bytes_bar, downloaded
from .tables import escape, print_json, say

if TYPE_CHECKING:
    from ..checkpoints.identity import Identity
    from ..checkpoints.source import Source
    from ..recipes.protocol import Gates
    from ..validate.facts.schema import JudgementFact
    from ..validate.facts.served import Run, ServeCheck
    from ..validate.measure.server import Watch

_CURE = "Name it with --source, or leave acceptance unjudged with --source none"
_OWN_GATES = ("findings", "loads", "acceptance")


def serve_check(
    context: typer.Context,
    path: Annotated[str, typer.Argument(help="Checkpoint to judge: a folder or a Hub id.")],
    source: Annotated[
        str | None,
        typer.Option(
            help="What it was made from, folder or Hub id; default: what its keepmtp.json names, if that is a folder "
            "here. `none`: acceptance stays unjudged."
        ),
    ] = None,
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
        Path | None, typer.Option(help='Your own: one a line, or .jsonl with "prompt"; default: eight word problems.')
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated a prompt, at most.")] = 256,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    any_vllm: AnyVLLMOption = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for a report of this alone, and logs; default: "
            "NAME.report beside the checkpoint, with all its results.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve a checkpoint and its source with vLLM, with and without MTP, and compare what is accepted.

    The gates are those of the recipe that the checkpoint was made by, as in `keepmtp gate`. Exit status 1 if one of
    them is a regression: a server of the checkpoint does not come up, acceptance lost more than the recipe allows,
    drafting changes greedy outputs, or the check has an error; 3 if the prompts are too few to tell: the table says how
    many would do.

    Words after `--` go to `vllm serve`. Without a GPU, a checkpoint that vLLM's CPU build has no kernel for is served
    as a BF16 copy of the same weights, and the report says so.

    Example: `keepmtp serve-check /data/out --source /data/GLM-4.7 -k 3 -- --tensor-parallel-size 8`
    """
    from ..checkpoints.identity import identify
    from ..checkpoints.record import RECORD
    from ..checkpoints.source import open_source, small_file
    from ..checkpoints.source_of import original_of
    from ..validate.facts.binomial import refuse_without_scipy
    from ..validate.facts.results import report_folder
    from ..validate.measure import serve_check as measure
    from ..validate.measure.harness import Setup, ks_up_to
    from ..validate.measure.room import refuse_no_room
    from ..validate.measure.server import refuse_words
    from ..validate.report import report as reports
    from ..validate.report.gates import limits_in
    from ..validate.report.html import HTML_FILE

    refuse_stray_words("serve-check", context.args)
    refuse_words("serve-check", context.args)
    vllm = chosen_vllm(any_vllm=any_vllm)
    if vllm.build == "cpu":  # which refuses some checkpoints only when it is asked to serve them
        require_extra("a BF16 copy, for what vLLM's CPU build has no kernel for,", "quantize")
    refuse_without_scipy()  # its gate has exact limits
    asked = PROMPTS if prompts is None else read_prompts(prompts)
    opened = open_source(path)
    limits = limits_in(small_file(opened, RECORD), cure=f"Restore the {RECORD} that keepmtp wrote")
    original = original_of(opened, source, cure=_CURE)
    is_local = Path(path).is_dir()
    out = folder or (report_folder(Path(path)) if is_local else _named(opened))
    refuse_no_room((opened, original), vllm, out=out, extra=context.args)
    err = Console(stderr=True)
    checkpoint, original = downloaded(opened, err), original and downloaded(original, err)
    assert checkpoint.folder is not None
    view = find_view(checkpoint.config, checkpoint.where, checkpoint.entries)
    check = measure.Check(ks=ks_up_to(k, view.num_mtp_layers), prompts=asked, max_tokens=max_tokens)
    setup = Setup(vllm=vllm, out=out, timeout=timeout, extra=tuple(context.args))
    if check.ks == (0,):
        raise RecipeError(
            "-k",
            f"with {view.num_mtp_layers} MTP layers vLLM drafts a multiple of them",
            got=k,
            cure=f"Use -k {view.num_mtp_layers}",
        )
    identity = None
    if folder is None and is_local:
        identity = identify(checkpoint.folder, cache=out, watch=bytes_bar(err, "reading"))
        reports.refuse_stale(out, identity, but=("check", "serve"))
    with _status() as watch:
        found = measure.serve_check(checkpoint, original, setup=setup, check=check, watch=watch)
    if identity is None:
        judged = _write(found, checkpoint, original, out, limits)
    else:
        judged = _record(found, checkpoint, original, out, identity)
    if as_json:
        print_json({**found.model_dump(mode="json"), "judgement": judged.model_dump(mode="json")}, indent=None)
    else:
        Console().print(table(found, judged))
        written = next(out / name for name in (HTML_FILE, reports.JSON_FILE) if (out / name).is_file())
        say(Console(), f"Report: {written}; logs: {out / 'logs'}")
    if status := exit_status(judged, found):
        raise typer.Exit(status)


def exit_status(judged: "JudgementFact", found: "ServeCheck") -> int:
    """1 for a regression in what this command measures; 3 if the prompts are too few to compare acceptance.

    Without a source nothing is compared, by choice.
    """
    from ..validate.report.gates import verdict_on

    if verdict_on(judged, _OWN_GATES) == "regression":
        return gate.EXITS["regression"]
    return gate.EXITS[verdict_on(judged, ("acceptance",))] if found.source else 0


def table(found: "ServeCheck", judged: "JudgementFact") -> RenderableType:
    """One row a server, then the gates, then what a reader should know."""
    rows = Table(
        title=f"serve-check {escape(found.checkpoint.path)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("", "k", "start", "accepted", "by position", "length", "tok/s", "speed-up", "same"):
        rows.add_column(name, justify="right" if name else "left", no_wrap=True)
    for served in found.served:
        for run in served.runs:
            rows.add_row(served.role if run is served.runs[0] else "", *_cells(run))
        rows.add_section()
    return Group(rows, gate.table(found.checkpoint.path, judged), "", Text("\n".join(_notes(found))))


def _cells(run: "Run") -> tuple[str, ...]:
    if not run.loaded:
        return (str(run.k), "[red]failed[/]", *("-",) * 6)
    length = run.mean_accepted_length
    by_position = " ".join(f"{100 * share:.0f}" for share in run.acceptance_per_position)
    same = "-" if run.partings is None else f"{len(run.outputs) - len(run.partings)}/{len(run.outputs)}"
    return (
        str(run.k),
        f"{run.seconds_to_health:.0f} s",
        f"{run.accepted_tokens}/{run.draft_tokens}" if run.k else "-",
        f"{by_position} %" if by_position else "-",
        f"{length:.2f}" if length else "-",
        f"{run.tokens_per_second:.1f}",
        f"{run.speed_up:.2f}x" if run.speed_up else "-",
        same,
    )


def _notes(found: "ServeCheck") -> Iterator[str]:
    for served in found.served:
        if served.as_served != "native":
            yield f"The {served.role} was served as a {served.as_served}: {served.reason}."
        for run in served.runs:
            for note in run.notes:
                yield f"{served.role}, k={run.k}: {note}"
            if not run.is_repeatable:
                yield f"{served.role}, k={run.k}: the same prompt got other tokens the second time."
    yield (
        "start: seconds to a healthy server; length: mean accepted length, tokens a step of the target; same: outputs "
        "equal to those of k=0."
    )
    environment, num = found.environment, len(found.prompts)
    yield f"vLLM {environment['vllm']} on {environment['device']}; {num} prompts, {found.seconds:.0f} s in all."


@contextmanager
def _status() -> "Iterator[Watch]":
    """One changing line on a terminal's standard error; in a log, a line for each new server, and now and then."""
    console, paced = Console(stderr=True), Paced()
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda words: status.update(escape(words))
        return

    def tell(words: str) -> None:
        if paced.is_due(1, 1, words.partition(":")[0]):
            say(console, words)

    yield tell


def _named(checkpoint: "Source") -> Path:
    """Where the results of a repository go: it is no folder of anybody's, so here."""
    return Path(f"{checkpoint.where.rpartition('/')[2]}.report")


def _record(
    found: "ServeCheck", checkpoint: "Source", source: "Source | None", out: Path, identity: "Identity"
) -> "JudgementFact":
    """Write serve.json, and check.json if there is none of the same bytes; then the report of all results."""
    from ..validate.facts.results import write_result
    from ..validate.report import report as reports
    from ..validate.report.check_data import record_static

    record_static(out, checkpoint, identity, source=source)
    write_result(out, "serve", found, checkpoint=identity, vllm=found.environment["vllm"])
    judged = reports.refresh(out, measured="serve").judgement
    assert judged is not None, "refresh() judges"
    return judged


def _write(
    found: "ServeCheck", checkpoint: "Source", source: "Source | None", out: Path, limits: "Gates"
) -> "JudgementFact":
    """Write report.json with the static check, sizes and calibration, and the page if what it needs is installed."""
    from ..validate.check.check import check_source
    from ..validate.facts.results import TIME
    from ..validate.report import report as reports
    from ..validate.report.check_data import check_data
    from ..validate.report.gates import judge

    vllm = found.environment["vllm"]
    data = check_data(
        check_source(checkpoint, source=source),
        opened=checkpoint,
        source=source,
    )
    judged = judge(gates=limits, check=data, serve=found, evaluation=None)
    made_at = datetime.now(UTC).strftime(TIME)
    reports.write(out, reports.assemble(data, vllm=vllm, serve=found, judgement=judged, made_at=made_at))
    return judged
