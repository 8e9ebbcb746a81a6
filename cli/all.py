"""`keepmtp all`: quantize, check, serve, evaluate, card; one command after the other, stopped by
the first that is red.

In: what `keepmtp quantize` takes. Out: a checkpoint, its report and its card, ready for `keepmtp
publish`.
"""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..quantize.run.child import Child, environment
from ..recipes.errors import RecipeError
from ..recipes.extras import require_extra
from .exits import TOO_LITTLE
from .options import (
    AtLeastOne,
    DryRunOption,
    GpusOption,
    KOption,
    ModelOptions,
    TpsOption,
    chosen_gpus,
    chosen_vllm,
    refuse_stray_words,
)
from .tables import show, tell

if TYPE_CHECKING:
    from ..quantize.plan.plan import Plan
    from ..recipes.schema import Recipe

_STATION_SECONDS = 60.0  # it may have a server to end, which takes a third of that at most


def everything(
    context: typer.Context,
    choices: ModelOptions,
    base_model: str | None = None,
    out: Path | None = None,
    gpus: GpusOption = None,
    tps: TpsOption = None,
    k: KOption = None,
    nproc: AtLeastOne = 1,
    serving: Annotated[bool, typer.Option("--serve-check/--no-serve-check")] = True,
    text: Path | None = None,
    run_model_code: bool = False,
    dry_run: DryRunOption = False,
) -> None:
    """Quantize, check, serve, evaluate and write the card, in one go; stops at the first red gate.

    A run that was interrupted is continued by the same command: what was measured on the same bytes
    is not measured again. Exit status is the failing station's: 1 for a red gate, 3 where samples
    are too few to tell, 2 for bad input. serve-check alone may find too few: eval asks more. A
    recipe with `gates.min_speedup` is benched, too. Words after `--` go to every `vllm serve`.

    Example: `keepmtp all glm-4.7 --source /data/GLM-4.7 --out /data/out -k 3 --
    --tensor-parallel-size 8`

    Args:
        base_model: As for `keepmtp card`.
        out: Output folder; default out/RECIPE.
        gpus: GPUs that the dry load pretends; default sm90 and sm100.
        k: serve-check serves with 1 to k drafted tokens a step, and eval with k; default: 1, and
            the recipe's.
        nproc: Processes that quantize, one a GPU.
        serving: Also serve both without drafting and with 1 to k tokens, for speed-up and equal
            outputs: 2 * (k + 1) servers more.
        text: Held-out text, as for `keepmtp closeness`, which runs with it, or where the recipe has
            a limit.
    """
    from .. import pipeline
    from ..validate.facts.results import report_folder
    from ..validate.measure.room import refuse_no_room
    from ..validate.measure.server import refuse_words
    from ..validate.report.base_model import refuse_no_id, refuse_unknown

    extra = context.args
    refuse_stray_words("all", extra)
    refuse_words("all", extra)
    refuse_no_id(base_model)
    if choices.draft_for is not None:
        cure = "Use `keepmtp quantize`, `keepmtp serve-check TARGET --draft OUT`, card and publish"
        rule = "measures what is served alone"
        raise RecipeError("keepmtp all", rule, got=f"--draft-for {choices.draft_for}", cure=cure)
    chosen_gpus(gpus or ())
    recipe = choices.recipe()
    out = out or pipeline.default_out(recipe)
    decided = asdict(choices)
    model = decided.pop("model")
    for_vllm = []
    if extra:
        for_vllm = ["--", *extra]
    served = [str(out), *option_words(source=choices.source)]
    pretended = option_words(gpu=gpus or ["sm90", "sm100"], tp=tps, k=k)
    # A checkpoint that is finished is found so by the first of them, and not made again.
    stations = {
        "quantize": [model, *option_words(**decided, out=out)],
        "check": [str(out), "--record", *pretended],
    }
    if serving:
        stations["serve-check"] = [*served, *option_words(k=k), *for_vllm]
    stations["eval"] = [*served, *option_words(k=k, run_model_code=run_model_code), *for_vllm]
    if _is_compared(recipe, text):
        stations["closeness"] = [*served, *option_words(text=text), *for_vllm]
    if recipe.gates.min_speedup is not None:
        ks = []
        if k is not None:
            ks = ["-k", f"0..{k}"]
        stations["bench"] = [str(out), *ks, *for_vllm]
        stations["gate"] = [str(out)]
    # The source's folder, whose card says what license it has; a repository's is not read.
    folder = choices.source
    if folder and not Path(folder).is_dir():
        folder = None
    stations["card"] = [str(out), *option_words(source=folder, base_model=base_model)]
    if dry_run:
        show(f"keepmtp {shlex.join([name, *words])}" for name, words in stations.items())
        return
    require_extra("keepmtp all", "evaluate")
    vllm = chosen_vllm()
    made = choices.plan()
    _refuse_unmeasurable(made, k, extra, run_model_code=run_model_code)
    refuse_no_room((made.source,), vllm, out=report_folder(out), extra=extra)
    if base_model is None:
        refuse_unknown(made.source)
    for name, words in stations.items():
        tell(f"$ keepmtp {shlex.join([name, *words])}", "bold")
        _run(name, words, nproc)


def _is_compared(recipe: "Recipe", text: Path | None) -> bool:
    """Whether held-out text is compared: one is named, or the recipe has a limit.

    Raises:
        RecipeError: there is none.
    """
    from ..validate.measure.texts import text_file

    limits = (recipe.gates.max_divergence, recipe.gates.max_flips)
    if text is None and limits == (None, None):
        return False
    text_file(text, recipe.model)
    return True


def _refuse_unmeasurable(
    made: "Plan", k: int | None, extra: list[str], *, run_model_code: bool
) -> None:
    """Refuse what would stop the run after hours of quantizing."""
    from ..quantize.plan.own_code import refuse_untrusted_code
    from ..validate.measure import tasks  # it needs lm-eval and datasets

    refuse_untrusted_code(made)
    for protocol in made.recipe.evaluations:
        if k is not None:
            protocol = protocol.model_copy(update={"k": k})
        tasks.questions_of(protocol, runs_code=run_model_code)
        tasks.refuse_model(made.source, protocol, tuple(extra))


def _run(name: str, words: list[str], nproc: int) -> None:
    """Run a station, and end with its status where it is red.

    It is a process of its own, the very command that is printed before it: what quantizing held in
    memory is free again before a server starts, and what was interrupted can be continued from
    here or by hand.
    """
    command = [sys.executable]
    if name == "quantize" and nproc > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(nproc)]
    command += ["-m", "keepmtp", name, *words]
    own = environment(reaches_hub=True, is_ours=True)
    with Child(command, environment=own, grace_seconds=_STATION_SECONDS) as child:
        status = child.process.wait()
    if status < 0:
        raise typer.Exit(128 - status)  # it was killed by this signal
    # serve-check may ask too few prompts to tell; eval asks more.
    if status and (name, status) != ("serve-check", TOO_LITTLE):
        raise typer.Exit(status)


def option_words(**options: object) -> list[str]:
    """Options as they are typed: a flag for True, one with each value of a list, nothing for None
    and False.
    """
    words = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if name == "k":
            option = "-k"
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            for item in value:
                words += [option, str(item)]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words
