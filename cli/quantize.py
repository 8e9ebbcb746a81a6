"""`keepmtp quantize`: a checkpoint, quantized as a recipe says, with its MTP block.

In: a model and choices. Out: a checkpoint folder and how to serve it, or JSON; progress on standard
error.
"""

from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from .. import __version__
from ..recipes.errors import size_in_words
from ..recipes.frozen import Advance
from .options import DryRunOption, JsonOption, ModelOptions
from .progress import run_progress
from .tables import answer, tell

if TYPE_CHECKING:
    from ..quantize.plan.plan import Plan
    from ..quantize.run.progress import CalibrationStep, RunProgress
    from .run_log import RunLog


def quantize(
    choices: ModelOptions,
    out: Annotated[
        Path | None, typer.Option(help="Output folder.", show_default="out/RECIPE")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Shards written at the same time.")
    ] = None,
    keep_calibration: Annotated[
        bool, typer.Option("--keep-calibration", help="Keep OUT.calibration for another --mtp.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize a checkpoint and keep its MTP block, as the model's recipe says.

    The output gets its name only when it is whole and has passed the static check and a check of
    its values: every scale, every weight that is not packed, and the whole MTP block. To resume a
    killed run, repeat the command; the result has the same bytes.

    A recipe with a calibration block (`keepmtp ls models`: batches needed) is calibrated first, one
    decoder layer at a time, so that neither GPU nor memory has to hold the model. Then the MTP
    block is calibrated, and its acceptance is measured on held-out text. This needs the extra
    keepmtp[calibrate], and keepmtp[modelopt] where the algorithm is modelopt's. Several GPUs
    share the batches under torchrun. Progress goes to standard error and to OUT.log.

    A recipe with `backbone: auto` and a budget is searched first: the words of its units are chosen
    by how much the answers and the drafts would suffer. The recipe that was found is written to the
    output as recipe.yaml.

    MODEL may be a checkpoint: a folder, a Hub id, or the address of its page. Then --scheme is
    needed, or --set, which changes one group, `mtp`, `kv_cache` or `format`, and leaves all else
    byte for byte; `from:DONOR` takes the group as another build has it. What is not said is the
    recipe's: `--mtp tuned` trains the block on the quantized backbone, `--mtp auto` takes the
    smallest that keeps enough acceptance. --trust-remote-code lets a recipe with `model_code:
    checkpoint` run that Python. With --keep-calibration, a run that differs only in --mtp skips the
    pass over the backbone if this folder is there under the name of its own OUT.

    \b
    Example: `keepmtp quantize glm-4.7 --source /data/GLM-4.7 --mtp FP8_DYNAMIC --out /data/out`
    Example: `keepmtp quantize glm-4.7.nvfp4-fp8 --source /data/GLM-4.7 --mtp auto`
    Example: `keepmtp quantize /data/my-fine-tune --scheme nvfp4a16-fp8`
    Example: `keepmtp quantize /data/somebodys-NVFP4 --set mtp=FP8_DYNAMIC --set kv_cache=FP8`
    Example: `keepmtp quantize /data/FP8 --set experts=from:ORG/NVFP4 --set mtp=from:ORG/BF16`
    Example: `keepmtp quantize glm-4.7 --draft-for /data/somebodys-NVFP4 --mtp bf16`
    Example: `torchrun --nproc-per-node 8 -m keepmtp quantize glm-4.7.nvfp4-fp8`
    """
    from .. import api
    from ..checkpoints.files import note_on_links
    from ..quantize.run.processes import place_of_process
    from ..validate.report.check_data import calibration_fact
    from . import findings, plan_tables
    from .measured import calibrated
    from .run_log import RunLog

    made = choices.plan()
    # Under torchrun every process runs this, and only the first one prints.
    rank = place_of_process().rank
    if dry_run:
        if not rank:
            plan_tables.show(made, as_json=as_json)
        return
    out = out or Path("out") / made.recipe.name
    log = RunLog(out)
    with run_progress() as progress:
        if not rank:
            progress = _logged(progress, made, log)
        result = api.quantize(
            made, out, threads=threads, keep_calibration=keep_calibration, progress=progress
        )
    if rank:
        return
    results = log.results(result.plan)
    log.say(results)
    settings = result.plan.recipe.calibration
    fact = None
    parts: list[RenderableType] = []
    if result.was_there:
        parts.append(f"{result.out}: finished before, with the same recipe, source and versions.")
    if result.calibration and settings:
        fact = calibration_fact(result.calibration.summary, settings.model_dump())
        parts += calibrated(fact)
    parts += findings.parts(result.report)
    note = note_on_links(result.out, [shard.file for shard in result.plan.linked])
    if note:
        parts.append(f"{note}.")
    parts += [str(results), plan_tables.next_steps(result.plan, result.out)]
    value = {
        "out": str(result.out),
        "plan": plan_tables.plan_json(result.plan),
        "check": findings.check_json(result.report),
        "calibration": fact,
        "results": asdict(results),
    }
    answer(value, parts, as_json=as_json)


def _logged(progress: "RunProgress", made: "Plan", log: "RunLog") -> "RunProgress":
    """The progress of a run that says what it reads and makes once nothing refuses it, and keeps
    its steps in a log.
    """
    from . import plan_tables

    def accepted() -> None:
        totals = f"{made.recipe.name}: {plan_tables.totals(made)}"
        log.begin(f"keepmtp {__version__}: {totals}")
        for line in filter(None, (plan_tables.commits_line(made), totals)):
            tell(line)

    def stepped(step: "CalibrationStep") -> None:
        log.step(step)
        if progress.calibration:
            progress.calibration(step)

    def packing(total_bytes: int) -> AbstractContextManager[Advance]:
        log.say(f"packing {size_in_words(total_bytes)}")
        return progress.packing(total_bytes)

    return replace(progress, accepted=accepted, calibration=stepped, packing=packing)
