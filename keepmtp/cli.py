"""The `keepmtp` command: one call a verb, tables for people, `--json` for machines.

In: words of a command line. Out: the answer on standard output, progress and refusals on standard error, and a status.

Easy to get wrong: standard output is read by programs too. Whatever is not the answer goes to standard error.

Exit status: 0 good; 1 the checkpoint has findings or a gate is red; 2 bad input or environment; 3 (`gate`,
`eval`, `all`) too little was measured to tell.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import __version__, calibrated, tables
from .card import card
from .doctor import doctor
from .evaluate import evaluate
from .everything import everything
from .gate import gate
from .progress import place_in_run, watching
from .publish import publish
from .quantize import run
from .quantize.plan import Plan
from .quantize.quant_config import quantization_config
from .recipes.errors import GateError, KeepMTPError, RecipeError, refuse
from .recipes.schema import find_recipe
from .record import begin
from .report import page, save
from .serve_check import serve_check
from .validate.check_data import calibration_fact
from .validate.dry import GPU, GPUS
from .validate.load import Checked, check_on
from .validate.report_html import require_extra
from .validate.static import examine
from .validate.vllm_env import TESTED, find_vllm

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False,
    help="Quantize large models for vLLM and keep their multi-token-prediction (MTP) block usable.",
)  # fmt: skip
out = Console()
err = Console(stderr=True)

Model = Annotated[str, typer.Argument(help="A model's name, a recipe's full name, or a recipe file. See `keepmtp ls`.")]
SourceOption = Annotated[
    str | None, typer.Option("--source", help="Folder or Hub id of the released checkpoint; default: the recipe's.")
]
SchemeOption = Annotated[
    str | None, typer.Option("--scheme", help="Another variant of the model, or a scheme for every quantized group.")
]
MtpOption = Annotated[
    str | None, typer.Option("--mtp", help="MTP block: `source`, `bf16`, a scheme, or `auto`: the smallest that "
                                    "keeps enough acceptance, measured during the run; default: the recipe's.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]


@app.command()
def ls(
    what: Annotated[str, typer.Argument(help="models, schemes or families; all three if left out.")] = "",
    as_json: JsonOption = False,
) -> None:
    """List the models with recipes, the schemes, and the families keepmtp knows."""
    listings = tables.listings()
    if what and what not in listings:
        raise RecipeError(refuse("ls", f"must be one of {', '.join(listings)}", repr(what), "Leave it out for all"))
    chosen = {name: rows for name, rows in listings.items() if what in ("", name)}
    if as_json:
        print_json(chosen)
        return
    for name, rows in chosen.items():
        out.print(tables.listing(name, rows))


@app.command()
def plan(
    model: Model, source: SourceOption = None, scheme: SchemeOption = None, mtp: MtpOption = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Show what would become of every tensor, from headers alone: no weight is read, nothing is written.

    Works on a folder or, by range requests, on a Hub id, in seconds even for 130,000 tensors. Of a calibrated recipe it
    also says what batches contribute to which modules, and whether the MTP block can be measured.

    Example: `keepmtp plan dsv4-flash --source /data/DeepSeek-V4-Flash --scheme w4a16-fp8`
    """
    made, _ = run.plan_for(model, source=source, scheme=scheme, mtp=mtp)
    show_plan(made, as_json=as_json)


@app.command()
def quantize(
    model: Model, source: SourceOption = None, scheme: SchemeOption = None, mtp: MtpOption = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Output folder; default out/RECIPE.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Shards written side by side; default one a core.")] = None,
    keep_calibration: Annotated[bool, typer.Option(
        "--keep-calibration", help="Leave OUT.calibration behind. Renamed to another run's, it saves the pass over the "
        "backbone where only --mtp differs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")] = False,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Quantize a checkpoint and keep its MTP block, as the model's recipe says.

    The output appears under its name only when it is whole and has passed the static check. A killed run is resumed by
    running the same command again; the result is the same byte for byte.

    A recipe with a calibration block (`keepmtp ls models`: batches needed) is calibrated first, one decoder layer at a
    time, so that neither GPU nor memory has to hold the model; then the MTP block is calibrated, and its acceptance is
    measured on held-out text. It needs `pip install 'keepmtp[calibrate]'`. Several GPUs share the batches under
    torchrun. Progress goes to standard error, with --json as a JSON line a step.

    Example: `keepmtp quantize glm-4.7 --source /data/GLM-4.7 --mtp FP8_DYNAMIC --out /data/GLM-4.7-NVFP4A16`

    Example: `keepmtp quantize glm-4.7.nvfp4-fp8 --source /data/GLM-4.7 --mtp auto`

    Example: `torchrun --nproc-per-node 8 -m keepmtp quantize glm-4.7.nvfp4-fp8 --source /data/GLM-4.7`
    """
    made, text = run.plan_for(model, source=source, scheme=scheme, mtp=mtp)
    rank, _ = place_in_run()
    if dry_run:
        if not rank:
            show_plan(made, as_json=as_json)
        return
    target = folder or run.default_out(made.recipe)
    run.refuse(made, target)
    if not (as_json or rank):
        out.print(tables.plan_summary(made))
        if run.needs_calibration(made):
            out.print(calibrated.will_do(made))
    with watching(err, as_json=as_json) as watch:
        result = run.quantize(
            made, text, out=target, threads=threads, keep_calibration=keep_calibration, watch=watch.packing,
            watch_calibration=watch.calibration,
        )  # fmt: skip
    if not rank:
        _show_result(result, as_json=as_json)


def _show_result(result: run.Result, *, as_json: bool) -> None:
    settings, fact = result.plan.recipe.calibration, None
    if result.calibration and settings:
        fact = calibration_fact(result.calibration.summary, settings.model_dump())
    if as_json:
        print_json({
            "out": str(result.out), "plan": _plan_json(result.plan), "check": result.report.as_dict(),
            "calibration": fact.model_dump(mode="json") if fact else None,
        })  # fmt: skip
        return
    if fact:
        out.print(calibrated.found(fact))
    out.print(tables.report(result.report))
    out.print(tables.next_steps(result.plan, result.out))


@app.command(hidden=True)
def extra(model: Model, scheme: SchemeOption = None, mtp: MtpOption = None) -> None:
    """Print which of keepmtp's extras `keepmtp quantize` needs for a recipe: quantize or calibrate."""
    recipe, _ = find_recipe(model, scheme=scheme, mtp=mtp)
    sys.stdout.write("calibrate\n" if recipe.calibration else "quantize\n")


@app.command()
def check(
    paths: Annotated[list[str], typer.Argument(help="Checkpoints: folders or Hub ids, ours or anyone's.")],
    gpus: Annotated[
        list[str] | None,
        typer.Option("--gpu", help="Also let vLLM load it, on a pretended sm90, sm100 or sm120; may be repeated."),
    ] = None,
    tps: Annotated[list[int] | None, typer.Option("--tp", min=1, help="Tensor-parallel size; may be repeated.")] = None,
    num_drafts: Annotated[int, typer.Option("-k", min=1, help="num_speculative_tokens.")] = 1,
    draft: Annotated[str, typer.Option("--draft", help="The draft's own checkpoint, where it has one.")] = "",
    static_only: Annotated[bool, typer.Option("--static-only", help="No vLLM, whatever --gpu says.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also write report.json and report.html there.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Keep what is found, and of which bytes, in PATH.report: for "
                                         "the checkpoint's report and card.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Judge checkpoints from config.json and headers: will vLLM load them, and will the MTP draft be real?

    Reads compressed-tensors, modelopt and native FP8 dialects; a Hub id is judged by range requests, not downloaded.
    Each finding says what will happen at serve time and what to do about it. With --gpu, vLLM's own target and draft
    classes and loaders judge too, on meta tensors for a GPU that need not be there: every parameter must be written,
    every tensor used, and each layer must get a kernel. Exit status 1 if any checkpoint has an error.

    With --record, every byte of one local checkpoint is hashed, once, and check.json, report.json and report.html are
    written beside it. What is measured later, by serve-check and eval, joins them if the bytes are the same.

    Example: `keepmtp check /data/out nvidia/Qwen3.5-397B-A17B-NVFP4 --gpu sm100 --gpu sm90 --tp 4`

    Example: `keepmtp check out/tiny-glm4-moe.w4a16-fp8 --gpu sm100 --record`
    """
    if not gpus and not static_only and (tps or num_drafts != 1 or draft):
        raise RecipeError(refuse("check", "--tp, -k and --draft need a GPU to pretend", "no --gpu", "Add --gpu sm100"))
    if html is not None:
        require_extra()
    is_dry = bool(gpus) and not static_only
    chosen = _gpus(gpus or []) if is_dry else []
    notes = begin(paths) if record else None
    is_good = True
    for number, checked in enumerate(_loaded(paths, chosen, tps or [1], num_drafts, draft) if is_dry
                                     else _checked(paths)):  # fmt: skip
        is_good &= checked.report.ok
        if html is not None:
            folder = html if len(paths) == 1 else html / f"{number + 1}-{Path(paths[number]).name}"
            page = save(folder, checked.report, vllm=TESTED[0], evidence=checked.evidence, opened=checked.source)
            err.print(f"report: {page}", highlight=False)
        if as_json:
            print_json(checked.report.as_dict(), indent=None)
        else:
            out.print(tables.report(checked.report))
        if notes is not None:
            err.print(f"recorded: {notes.keep(checked)}", highlight=False, soft_wrap=True)
    if not is_good:
        raise typer.Exit(1)


def _checked(paths: list[str]) -> Iterator[Checked]:
    return (Checked(*examine(path)) for path in paths)


def _gpus(gpus: list[str]) -> list[GPU]:
    if wrong := [gpu for gpu in gpus if gpu not in GPUS]:
        raise RecipeError(refuse("--gpu", f"must be one of {', '.join(GPUS)}", wrong[0], "Take the nearest"))
    return [gpu for gpu in GPUS if gpu in gpus]


def _loaded(paths: list[str], gpus: list[GPU], tps: list[int], num_drafts: int, draft: str) -> Iterator[Checked]:
    vllm = find_vllm()
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err,
                  transient=True) as progress:  # fmt: skip
        task = progress.add_task("starting vLLM", total=None)
        yield from check_on(
            paths, vllm=vllm, gpus=gpus, tps=tps, num_drafts=num_drafts, draft=draft,
            watch=lambda doing: progress.update(task, description=doing),
        )  # fmt: skip


def show_plan(made: Plan, *, as_json: bool) -> None:
    """Print a plan, and on a terminal also what would stop it from running."""
    if as_json:
        print_json(_plan_json(made))
        return
    out.print(tables.plan_summary(made))
    if run.needs_calibration(made):
        out.print(calibrated.will_do(made))
    out.print(tables.config_listing(quantization_config(made)))
    for refusal in run.refusals(made):
        out.print(f"[yellow]Would be refused:[/] {escape(refusal)}", highlight=False)


def _plan_json(made: Plan) -> dict[str, Any]:
    return tables.plan_json(made) | {"calibration": calibrated.will_do_json(made)}


def print_json(value: object, indent: int | None = 2) -> None:
    """One JSON value on standard output, nothing else."""
    sys.stdout.write(json.dumps(value, indent=indent) + "\n")


def _version(value: bool) -> None:
    if value:
        out.print(f"keepmtp {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    # llm-compressor logs to standard output, some of it while it is imported. Not LLM_COMPRESSOR_LOG_DISABLED: then it
    # does not define its own level METRIC, at which GPTQ reports (0.14.0.1 logger.py).
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "CRITICAL")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own, and would say all twice


app.command("serve-check", context_settings={"allow_extra_args": True})(serve_check)
app.command("eval", context_settings={"allow_extra_args": True})(evaluate)
app.command()(gate)
app.command()(card)
app.command()(publish)
app.command("all")(everything)
app.command("report")(page)
app.command()(doctor)


def main() -> None:
    """Entry point: a refusal is one sentence on standard error, never a traceback; under torchrun it says whose."""
    try:
        app()
    except KeepMTPError as error:
        rank, size = place_in_run()
        whose = f"rank {rank} of {size}: " if size > 1 else ""
        err.print(f"{whose}[red]error:[/] {escape(str(error))}", highlight=False, markup=True, soft_wrap=True)
        sys.exit(1 if isinstance(error, GateError) else 2)
