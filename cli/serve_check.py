"""`keepmtp serve-check`: a checkpoint and its source in real vLLM servers, with and without method=mtp.

In: two checkpoints. Out: a table, serve.json, report.json and, with the `report` extra, report.html; beside them the
servers' logs.

Easy to get wrong: whatever may be refused is refused before a server is started: a source that is not found, results of
other bytes in the same folder.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..recipes.errors import RecipeError
from ..recipes.extras import require_extra
from ..recipes.families import find_view
from ..validate.serving.acceptance import FLOOR, Run, Served, ServeReport
from ..validate.serving.prompts import PROMPTS, read_prompts
from ..validate.serving.vllm_env import TIMEOUT_SECONDS, find_vllm
from .progress import bytes_bar
from .report import save

if TYPE_CHECKING:
    from ..checkpoints.identity import Identity
    from ..checkpoints.source import Source
    from ..validate.serving.server import Watch

_CURE = "Name it with --source, or leave acceptance unjudged with --source none"
_COLOURS = {"passed": "green", "failed": "red", "not judged": "yellow"}


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
    floor: Annotated[float, typer.Option(min=0, max=1, help="Least acceptance, as a share of the source's.")] = FLOOR,
    prompts: Annotated[
        Path | None, typer.Option(help='Your own: one a line, or .jsonl with "prompt"; default: eight word problems.')
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated a prompt, at most.")] = 256,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Of the servers; default: a free one.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a server may take to be healthy.")] = TIMEOUT_SECONDS,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for a report of this alone, and logs; default: "
            "NAME.report beside the checkpoint, with all its results.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")] = False,
) -> None:
    """Serve a checkpoint and its source with vLLM, with and without MTP, and compare what is accepted.

    Words after `--` go to `vllm serve`. Exit status 1 if a server does not come up, acceptance is below the floor, or
    greedy outputs change by drafting. Without a GPU, what vLLM's CPU build has no kernel for is served as a BF16 copy
    of the same weights, and the report says so.

    Example: `keepmtp serve-check /data/out --source /data/GLM-4.7 -k 3 -- --tensor-parallel-size 8`
    """
    from ..checkpoints.identity import identify
    from ..checkpoints.source import download, open_source
    from ..validate.report import report as reports
    from ..validate.report.html import HTML_FILE
    from ..validate.report.results import report_folder
    from ..validate.serving import serve_check as measure
    from .source_of import original_of

    if context.args and not context.args[0].startswith("-"):
        raise RecipeError("serve-check", "judges one checkpoint", got=f"also {context.args[0]}", cure="Run it for each")
    vllm = find_vllm()
    if vllm.build == "cpu":  # which refuses some checkpoints only when it is asked to serve them
        require_extra("a BF16 copy, for what vLLM's CPU build has no kernel for,", "quantize")
    asked = PROMPTS if prompts is None else read_prompts(prompts)
    checkpoint = download(open_source(path))
    original = original_of(checkpoint, source, cure=_CURE)
    original = original and download(original)
    assert checkpoint.folder is not None
    is_local = Path(path).is_dir()
    out = folder or (report_folder(checkpoint.folder) if is_local else _named(checkpoint))
    view = find_view(checkpoint.config, checkpoint.where)
    check = measure.Check(
        ks=measure.ks_up_to(k, view.num_mtp_layers),
        out=out,
        prompts=asked,
        max_tokens=max_tokens,
        floor=floor,
        port=port,
        timeout=timeout,
        extra=tuple(context.args),
    )
    if check.ks == (0,):
        raise RecipeError(
            "-k",
            f"with {view.num_mtp_layers} MTP layers vLLM drafts a multiple of them",
            got=k,
            cure=f"Use -k {view.num_mtp_layers}",
        )
    identity = None
    if folder is None and is_local:
        identity = identify(checkpoint.folder, cache=out, watch=bytes_bar(Console(stderr=True), "reading"))
        reports.refuse_stale(out, identity, but=("check", "serve"))
    with _status() as watch:
        report = measure.serve_check(checkpoint, original, vllm=vllm, check=check, watch=watch)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
    else:
        Console().print(table(report))
    if identity is None:
        _write(report, checkpoint, original, out)
    else:
        _record(report, checkpoint, original, out, identity)
    if not as_json:
        written = next(out / name for name in (HTML_FILE, reports.JSON_FILE) if (out / name).is_file())
        Console().print(f"Report: {written}; logs: {out / 'logs'}", highlight=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


def table(report: ServeReport) -> RenderableType:
    """One row a server, then the gates and whatever a reader should know."""
    rows = Table(
        title=f"serve-check {escape(report.checkpoint.path)}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("", "k", "start", "accepted", "by position", "length", "tok/s", "speed-up", "same"):
        rows.add_column(name, justify="right" if name else "left", no_wrap=True)
    for served in report.served:
        for run in served.runs:
            rows.add_row(served.role if run is served.runs[0] else "", *_cells(run))
        rows.add_section()
    lines = [f"[{_COLOURS[gate.verdict]}]{gate.name}: {gate.verdict}[/]  {escape(gate.says)}" for gate in report.gates]
    lines += [escape(note) for served in report.served for note in _notes(served)]
    lines.append(
        "start: seconds to a healthy server; length: mean accepted length, tokens a step of the target; same: "
        "outputs equal to those of k=0."
    )
    lines.append(
        escape(
            f"vLLM {report.environment['vllm']} on {report.environment['device']}; {len(report.prompts)} "
            f"prompts, {report.seconds:.0f} s in all."
        )
    )
    return Group(rows, Text.from_markup("\n".join(lines)))


def _cells(run: Run) -> tuple[str, ...]:
    if not run.loaded:
        return (str(run.k), "[red]failed[/]", *("-",) * 6)
    drafts, length = run.drafts, run.drafts.mean_accepted_length
    same = "-" if run.partings is None else f"{len(run.outputs) - len(run.partings)}/{len(run.outputs)}"
    return (
        str(run.k),
        f"{run.seconds_to_health:.0f} s",
        f"{drafts.accepted_tokens}/{drafts.draft_tokens}" if run.k else "-",
        " ".join(f"{100 * share:.0f}" for share in drafts.acceptance_per_position) + " %" if drafts.drafts else "-",
        f"{length:.2f}" if length else "-",
        f"{run.tokens_per_second:.1f}",
        f"{run.speed_up:.2f}x" if run.speed_up else "-",
        same,
    )


def _notes(served: Served) -> Iterator[str]:
    if served.as_served != "native":
        yield f"The {served.role} was served as a {served.as_served}: {served.reason}."
    for run in served.runs:
        for note in run.notes:
            yield f"{served.role}, k={run.k}: {note}"
        if not run.is_repeatable:
            yield f"{served.role}, k={run.k}: the same prompt got other tokens the second time."


@contextmanager
def _status() -> "Iterator[Watch]":
    """One changing line on a terminal's standard error; in a log, a line for each new server."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda words: status.update(escape(words))
        return
    seen: list[str] = []

    def once(words: str) -> None:
        label = words.rpartition(": ")[0] if "starting" not in words else words.partition(": ")[0]
        if label not in seen:
            seen.append(label)
            console.print(label, highlight=False, markup=False)

    yield once


def _named(checkpoint: "Source") -> Path:
    """Where the results of a repository go: it is no folder of anybody's, so here."""
    return Path(f"{checkpoint.where.rpartition('/')[2]}.report")


def _record(
    report: ServeReport, checkpoint: "Source", source: "Source | None", out: Path, identity: "Identity"
) -> None:
    """serve.json, and check.json if there is none of the same bytes; then the report of all results."""
    from ..validate.report import report as reports
    from ..validate.report.check_data import record_static
    from ..validate.report.results import write_result
    from ..validate.report.schema import Serve

    record_static(out, checkpoint, identity, source=source)
    data = Serve.model_validate(report.as_dict())
    write_result(out, "serve", data, checkpoint=identity, vllm=report.environment["vllm"])
    reports.refresh(out)


def _write(report: ServeReport, checkpoint: "Source", source: "Source | None", out: Path) -> None:
    """report.json with the static check, sizes and calibration, and the page if what it needs is installed."""
    from ..validate.check.check import check_source
    from ..validate.report.schema import Serve

    save(
        out,
        check_source(checkpoint, source=source),
        vllm=report.environment["vllm"],
        opened=checkpoint,
        source=source,
        serve=Serve.model_validate(report.as_dict()),
    )
