"""`keepmtp quantize`: a checkpoint, quantized as a recipe says, with its MTP block. And what stands
around it: `init` writes a recipe's file, `extra` says what a run needs, `where` what it has made.

In: a model and choices. Out: a checkpoint folder and how to serve it, or JSON; progress on standard
error. Of `init` a recipe to edit, of `where` the name of a folder.
"""

import glob
import importlib
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console, RenderableType

from ..recipes.errors import RecipeError, folded, printable
from . import findings
from .options import (
    AtLeastOneOrNone,
    DryRunOption,
    JsonOption,
    ModelArgument,
    ModelOptions,
    MtpSourceOption,
)
from .progress import run_progress
from .tables import drawn, print_json, say, show

if TYPE_CHECKING:
    from ..quantize.calibrate.mtp.facts import CalibrationFact
    from ..quantize.plan.plan import Plan
    from ..quantize.run.progress import RunProgress

# A command to which an extra's name is added: it installs what that extra needs.
_INSTALL = "KEEPMTP_INSTALL"
_NEXT_TO_IT = (".partial", ".report", ".card", ".calibration")  # of a checkpoint


def quantize(
    choices: ModelOptions,
    out: Path | None = None,
    threads: AtLeastOneOrNone = None,
    keep_calibration: bool = False,
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
    keepmtp[calibrate], and keepmtp[modelopt] where the recipe says backend: modelopt. Several GPUs
    share the batches under torchrun or SLURM's srun. Progress goes to standard error, with --json
    as one JSON line for each step.

    A recipe with `backbone: auto` and a budget is searched first: the words of its units are chosen
    by how much the answers and the drafts would suffer. The recipe that was found is written to the
    output as recipe.yaml.

    Example: `keepmtp quantize glm-4.7 --source /data/GLM-4.7 --mtp FP8_DYNAMIC --out
    /data/GLM-4.7-NVFP4A16`

    Example: `keepmtp quantize glm-4.7.nvfp4-fp8 --source /data/GLM-4.7 --mtp auto`

    Example: `keepmtp quantize /data/my-fine-tune --scheme nvfp4a16-fp8`

    Example: `keepmtp quantize /data/somebodys-NVFP4 --set mtp=FP8_DYNAMIC --set kv_cache=FP8`

    Example: `torchrun --nproc-per-node 8 -m keepmtp quantize glm-4.7.nvfp4-fp8 --source
    /data/GLM-4.7`

    Args:
        out: Output folder; default out/RECIPE.
        threads: Shards written at the same time; default one for each core.
        keep_calibration: Keep OUT.calibration. A run that differs only in --mtp skips the pass over
            the backbone if this folder is there under the name of its own OUT.
    """
    from .. import api, pipeline
    from ..quantize.needs import needs
    from ..quantize.run.processes import place_of_process
    from ..validate.facts.vllm_env import gpus_here
    from ..validate.report.check_data import calibration_fact
    from . import plan_tables
    from .check import check_json

    made = choices.plan()
    # Under torchrun every process runs this, and only the first one prints.
    rank = place_of_process().rank
    if dry_run:
        if not rank:
            needed = needs.needs_of(made, needs.machine_of(here=gpus_here()))
            plan_tables.show(made, needed, as_json=as_json)
        return
    target = out or pipeline.default_out(made.recipe)
    err = Console(stderr=True, quiet=as_json or bool(rank))
    with run_progress(Console(stderr=True), as_json=as_json) as progress:
        progress = _beginning(progress, made, err, is_first=not rank)
        result = api.quantize(
            made, target, threads=threads, keep_calibration=keep_calibration, progress=progress
        )
    if rank:
        return
    settings = result.plan.recipe.calibration
    fact = None
    if result.calibration and settings:
        fact = calibration_fact(result.calibration.summary, settings.model_dump())
    if not as_json:
        if result.was_there:
            show([f"{result.out}: finished before, with the same recipe, source and versions."])
        if fact:
            show(found(fact))
        findings.show(Console(), result.report)
        show([plan_tables.next_steps(result.plan, result.out)])
        return
    value = {
        "out": str(result.out),
        "plan": plan_tables.plan_json(result.plan),
        "check": check_json(result.report),
        "calibration": None,
    }
    if fact is not None:
        value["calibration"] = fact.model_dump(mode="json")
    print_json(value)


def _beginning(
    progress: "RunProgress", made: "Plan", err: Console, *, is_first: bool
) -> "RunProgress":
    """The progress of a run that says what it reads and makes once nothing refuses it, and brings
    packages where `make quantize` has said how.
    """
    from . import plan_tables

    @cache
    def commits() -> str:
        return plan_tables.commits_line(made)

    def accepted() -> None:
        if is_first and commits():
            say(err, commits())
        say(err, f"{made.recipe.name}: {plan_tables.totals(made)}")

    def install(extra: str) -> None:
        commits()  # which refuses a dataset that is out of reach
        _installed(extra)

    progress = replace(progress, accepted=accepted)
    if _INSTALL in os.environ:
        progress = replace(progress, install=install)
    return progress


def _installed(extra: str) -> None:
    """The packages of an extra, brought by the command that `make quantize` names: the plan that
    this process has made need not be made again.
    """
    from ..quantize.run.child import Child, environment

    *command, stamp = shlex.split(os.environ[_INSTALL])
    own = environment(reaches_hub=True, is_ours=True)
    with Child([*command, stamp + extra], environment=own) as child:
        status = child.process.wait()
    if status:
        raise typer.Exit(status)
    importlib.invalidate_caches()


def extra(choices: ModelOptions) -> None:
    """Print which of keepmtp's extras `keepmtp quantize` needs for a recipe: quantize, calibrate or
    modelopt.
    """
    from ..quantize.plan import own_code
    from ..quantize.write import refusals
    from . import plan_tables

    # The whole plan: what would refuse it, or a Hub out of reach, is known before anything is
    # installed.
    made = choices.plan()
    own_code.refuse_untrusted_code(made)
    own_code.refuse_no_draft(made)
    plan_tables.commits_line(made)
    sys.stdout.write(f"{refusals.extra_of(made)}\n")


def found(fact: "CalibrationFact") -> Iterator[RenderableType]:
    """What a run found: coverage, perplexity and acceptance, and the candidates of `mtp: auto`."""
    from ..validate.report import tables

    yield drawn("held-out text, without a server", tables.held_out(fact))
    if search := fact.search:
        title = f"plans for {search.budget}, measured on held-out text before calibration"
        yield drawn(title, tables.plans(search))
        yield f"{search.units:,} units were searched."
        yield (
            "The recipe that was found is recipe.yaml in the output; it can be edited, and runs "
            "without a search."
        )
        yield (
            "bits: of weights and scales, for each weight; kept: part of the release's acceptance; "
            "lost: nats of it, where a loss against another plan is shown."
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


def init(
    model: ModelArgument, out: Path = Path("recipe.yaml"), mtp_source: MtpSourceOption = None
) -> None:
    """Write a recipe to edit: for a folder or Hub id of a known family, or a copy of a model's own.

    `keepmtp quantize recipe.yaml` takes it as it is. Comments explain its keys.

    Example: `keepmtp init /data/my-fine-tune --out my-fine-tune.yaml`

    Args:
        out: The file to write.
    """
    from ..checkpoints.files import write_whole

    if out.exists():
        raise RecipeError(
            "--out", "an existing file is never overwritten", got=out, cure="Choose another --out"
        )
    if not out.absolute().parent.is_dir():
        raise RecipeError(
            "--out", "the folder of the file must exist", got=out, cure="Make it, or choose another"
        )
    write_whole(out, _text(model, out, mtp_source))
    sys.stdout.write(f"{printable(str(out))}\n")


def _text(model: str, out: Path, mtp_source: str | None) -> str:
    from ..quantize.plan.checkpoint_as_model import (
        family_mapping,
        fitting,
        model_word,
        opened,
        refuse_unfit,
    )
    from ..recipes.family_wide import text_of
    from ..recipes.find import named_file

    word = model_word(model)
    if word.is_recipe:
        if mtp_source is not None:
            raise RecipeError(
                "--mtp-source",
                "belongs to a checkpoint without a block; a model's recipe is copied",
                got=mtp_source,
                cure="Edit mtp_source in the copy",
            )
        file, _ = named_file(word.name)
        return file.path.read_text()
    source = opened(word, mtp_source)
    raw = family_mapping(source)
    # Unedited, the file makes the same bytes as `keepmtp quantize` with the checkpoint as MODEL.
    variants = [fit.variant for fit in fitting(source, raw)]
    if not variants:
        refuse_unfit(source, raw, raw["default"])  # which says why
        raise RecipeError(
            source.where,
            "a variant of its family must fit",
            got=f"none of {', '.join(raw['variants'])}",
            cure="Copy a recipe of the family and edit it: `keepmtp ls models`",
        )
    return text_of(raw | {"default": variants[0]}, variants, file=str(out))


def where(choices: ModelOptions) -> None:
    """Print the folder that `keepmtp quantize` with the same words has written; the make targets
    ask this.
    """
    from ..checkpoints.record import RECORD
    from ..quantize.plan.checkpoint_as_model import model_name, model_word
    from ..recipes.find import find_recipe

    word = model_word(choices.model)
    scheme = choices.scheme
    mtp = choices.mtp
    name = ""
    if word.is_recipe:
        recipe, _ = find_recipe(word.name, scheme=scheme, mtp=mtp, calibration=choices.calibration)
        model = recipe.model
        name = recipe.name
    else:
        model = model_name(word.name)
        if choices.changes:
            name = choices.recipe().name
        elif scheme:
            name = f"{model}.{folded(scheme)}"
            if mtp:
                name += f"-mtp-{folded(mtp)}"
    rule = "SCHEME must be given where MODEL is a checkpoint"
    if name:
        wanted = Path("out", name)
        if (wanted / "config.json").is_file():
            sys.stdout.write(f"{printable(str(wanted))}\n")
            return
        rule = f"{wanted} must be there"
    # Nothing is guessed: with two variants in out/, the bare name means the default one, or
    # nothing.
    there = []
    for record in sorted(Path("out").glob(f"{glob.escape(model)}.*/{RECORD}")):
        folder = str(record.parent)
        if not folder.endswith(_NEXT_TO_IT):
            there.append(folder)
    got = f"no out/{model}.*"
    cure = "Run make quantize, or name a folder by OUT"
    if there:
        got = f"only {', '.join(there)}"
        cure = "Name one by SCHEME or OUT"
    raise RecipeError(f"MODEL {choices.model}", rule, got=got, cure=cure)
