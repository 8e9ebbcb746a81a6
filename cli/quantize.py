"""`keepmtp quantize`: a checkpoint, quantized as a recipe says, with its MTP block.

In: a model and choices. Out: a checkpoint folder and how to serve it, or JSON; progress on standard
error.

Easy to get wrong: under torchrun every process runs this, and only the first one prints.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..recipes.errors import printable, size_in_words
from . import findings
from .options import AtLeastOneOrNone, DryRunOption, JsonOption, ModelOptions
from .progress import place_in_run, run_progress
from .tables import counted, figure, print_json, say, show, table

if TYPE_CHECKING:
    from ..pipeline import FinishedRun
    from ..quantize.calibrate.mtp.facts import CalibrationFact, CandidateFact, SearchFact


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
    from ..quantize.write import refusals
    from ..validate.facts.vllm_env import gpus_here
    from ..validate.report.check_data import calibration_fact
    from . import plan_tables
    from .check import check_json

    made, (rank, _) = choices.plan(), place_in_run()
    if dry_run:
        if not rank:
            plan_tables.show(
                made, needs.needs_of(made, needs.machine_of(here=gpus_here())), as_json=as_json
            )
        return
    target = out or pipeline.default_out(made.recipe)
    refusals.refuse(made, target)
    err = Console(stderr=True, quiet=as_json or bool(rank))
    if not rank and (
        line := plan_tables.commits_line(made)
    ):  # which refuses a dataset that is out of reach
        say(err, line)
    say(err, f"{made.recipe.name}: {plan_tables.totals(made)}")
    with run_progress(Console(stderr=True), as_json=as_json) as progress:
        result = api.quantize(
            made, target, threads=threads, keep_calibration=keep_calibration, progress=progress
        )
    if rank:
        return
    settings, fact = result.plan.recipe.calibration, None
    if result.calibration and settings:
        fact = calibration_fact(result.calibration.summary, settings.model_dump())
    if not as_json:
        show(_parts(result, fact))
        return
    told = {
        "out": str(result.out),
        "plan": plan_tables.plan_json(result.plan),
        "check": check_json(result.report),
        "calibration": fact and fact.model_dump(mode="json"),
    }
    print_json(told)


def _parts(result: "FinishedRun", fact: "CalibrationFact | None") -> Iterator[RenderableType]:
    from . import plan_tables

    if result.was_there:
        yield f"{result.out}: finished before, with the same recipe, source and versions."
    if fact:
        yield found(fact)
    findings.show(Console(), result.report)
    yield plan_tables.next_steps(result.plan, result.out)


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


def found(fact: "CalibrationFact") -> RenderableType:
    """What a run found: coverage, perplexity and acceptance, and the candidates of `mtp: auto`."""
    rows = []
    for row in fact.rows:
        shares = (
            " ".join(f"{share:.1%}" for share in row.acceptance.shares) if row.acceptance else "-"
        )
        length = figure("{:.2f}", row.acceptance.length if row.acceptance else None)
        rows.append(
            (row.title, f"{row.perplexity:#.4g}", figure("{:.4f}", row.divergence), shares, length)
        )
    columns = ("", ">perplexity", ">divergence", f">accepted, k={fact.k}", ">length")
    parts: list[RenderableType] = [table("held-out text, without a server", columns, rows)]
    if fact.search:
        parts += _search(fact.search)
    if fact.candidates:
        parts.append(_candidates(fact))
    return Group(*parts, *_remarks(fact), "")


def _search(search: "SearchFact") -> Iterator[RenderableType]:
    """The plans that a search under a budget measured."""
    rows = []
    for plan in search.plans:
        losses = f"{plan.predicted:.4f}", f"{plan.divergence:.4f}", figure("{:.1%}", plan.kept)
        rows.append(
            (
                f"{plan.title}{', chosen' * plan.chosen}",
                f"{plan.bytes:,}",
                f"{plan.bits:.2f}",
                *losses,
            )
        )
    title = f"plans for {search.budget}, measured on held-out text before calibration"
    yield table(title, ("", ">bytes", ">bits", ">predicted", ">divergence", ">kept"), rows)
    yield Text(
        f"{search.units:,} units; a better choice could save {search.gap:.1%} of the predicted "
        "loss at most.\n"
        "The recipe that was found is recipe.yaml in the output; it can be edited, and runs "
        "without a search.\n"
        "bits: of weights and scales, for each weight; kept: part of the release's acceptance.\n"
    )


def _remarks(fact: "CalibrationFact") -> Iterator[Text]:
    coverage, fewest = fact.coverage, fact.coverage.fewest_tokens
    least = (
        f"; the fewest, {fewest.tokens:,}, reached {printable(fewest.module)}"
        if fewest and fewest.tokens
        else ""
    )
    batches = f", in batches of {fact.batch_size:,}" if fact.batch_size else ""
    yield Text(
        f"Coverage: {coverage.modules:,} modules calibrated on {fact.data.tokens:,} "
        f"tokens{batches}{least}."
    )
    yield Text(
        f"The quantized backbone chooses the released model's next token at {fact.agreement:.1%} "
        "of held-out slots."
    )
    if never := coverage.never_routed:
        what = (
            f"{counted(len(never), 'expert module')} that the router sent no token, calibrated "
            "on all of them"
        )
        yield _warning(
            "never routed:", f"{what} instead: {_first(never)}. More samples may reach them."
        )
    if fact.data.held_out_by == "model":
        yield Text("The released model wrote the answers of the held-out text itself.")
    if few := coverage.few_tokens:
        what = (
            f"{counted(len(few), 'expert module')} calibrated on fewer tokens than input "
            f"channels: {_first(few)}"
        )
        yield _warning(
            "few tokens:", f"{what}. More samples, or calibration.experts: all, give them more."
        )
    if fact.tuned:
        yield (
            Text(fact.tuned.says) if fact.tuned.chosen else _warning("not tuned:", fact.tuned.says)
        )
    if fact.unmeasured:
        yield _warning("no acceptance:", fact.unmeasured)
    if fact.measured:
        yield Text(
            "accepted: by position in the draft; length: tokens that a step yields, the target's "
            "included."
        )


def _warning(what: str, says: str) -> Text:
    return Text.assemble((what, "yellow"), f" {printable(says)}")


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _candidates(fact: "CalibrationFact") -> RenderableType:
    rows = []
    for each in fact.candidates:
        if each.acceptance is None:
            rows.append((each.title, "-", "-", "-", "-", _warning("does not fit", each.refused)))
            continue
        kept = (
            f"{each.kept:.1%}",
            figure("{:.1%}", each.kept_at_least),
            f"{each.acceptance.length:.2f}",
        )
        rows.append((each.title, size_in_words(each.bytes), *kept, _verdict(each, fact)))
    budget = "" if fact.min_acceptance is None else f"; {fact.min_acceptance:.1%} must be kept"
    budget += "" if fact.confidence is None else f", at {fact.confidence:.0%} confidence"
    columns = ("policy", ">size", ">kept", ">at least", ">length", "verdict")
    return table(f"candidates for the MTP block{budget}", columns, rows)


def _verdict(candidate: "CandidateFact", fact: "CalibrationFact") -> Text:
    verdict = fact.verdict_on(candidate)
    if verdict == "keeps too little":
        return Text(verdict, "red")
    if verdict == "too few slots to tell":
        needed = f": about {candidate.needed_slots:,} would" if candidate.needed_slots else ""
        chosen = (
            Text.assemble(("chosen", "green"), ", stays as released; ")
            if candidate.chosen
            else Text()
        )
        return chosen.append(verdict, "yellow").append(needed)
    return Text("chosen", "green") if candidate.chosen else Text(verdict)
