"""`keepmtp eval`: the tasks of a recipe, asked of a checkpoint and its source with method=mtp, and with MTP off.

In: two checkpoints and a protocol, the recipe's with what the command line changes. Out: a table, gsm8k.json with the
answers in the same folder, and the report made anew.

Easy to get wrong: whatever may be refused is refused before a server is started, which may take half an hour: a row of
the dataset, a chat template that is not there, a source that is not found, results of other bytes in the same folder.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..recipes.errors import RecipeError, did_you_mean
from ..recipes.extras import require_extra
from ..recipes.tasks import TASKS
from ..validate.facts.vllm_env import TIMEOUT_SECONDS
from .gate import EXITS
from .options import AnyVLLMOption, JsonOption, ModelCodeOption, TimeoutOption, chosen_vllm, refuse_stray_words
from .progress import asking, bytes_bar, downloaded
from .tables import print_json, say

if TYPE_CHECKING:
    from ..checkpoints.identity import Identity, ReadingBar
    from ..checkpoints.source import Source
    from ..recipes.protocol import Evaluation, Gates
    from ..validate.facts.evaluated import EvaluationFact
    from ..validate.facts.schema import JudgementFact

_CURE = "Name it with --source, or leave the drop unjudged with --source none"
_HUB = "hub"
_OF_ANY_TASK = ("task", "k", "concurrency", "limit", "seed", "prefix_caching")
_OF_THE_SOURCE = ("acceptance", "mean recovery", "worst task")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """A recipe's, as far as this command is concerned."""

    evaluations: "tuple[Evaluation, ...]"
    gates: "Gates"


def evaluate(
    context: typer.Context,
    path: Annotated[str, typer.Argument(help="Checkpoint to evaluate: a folder or a Hub id.")],
    source: Annotated[
        str | None,
        typer.Option(
            help="What it was made from, folder or Hub id; default: what its keepmtp.json names, if that is a folder "
            "here. `none`: the drop stays unjudged."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Whose protocol and gates to take: a model's name or a recipe "
            "file; default: the recipe that the checkpoint was made by."
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help=f"Ask this one alone, not all that the recipe lists: {', '.join(TASKS)}.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="A .jsonl, .json or .parquet file with the fields of the task's dataset; `hub`: its own."),
    ] = None,
    shots: Annotated[int | None, typer.Option(min=0, help="Solved examples before each question.")] = None,
    api: Annotated[
        str | None,
        typer.Option(help="completions: the text as it is. chat: messages, through the model's chat template."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer, at most.")] = None,
    k: Annotated[
        int | None, typer.Option("-k", "--num-speculative-tokens", min=1, help="Tokens drafted a step.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None,
    limit: Annotated[int | None, typer.Option(min=2, help="Ask the first so many questions only.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the shots drawn, and of the server.")] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option("--prefix-caching/--no-prefix-caching", help="Servers keep what they computed for equal starts."),
    ] = None,
    plain: Annotated[
        bool,
        typer.Option("--plain/--no-plain", help="Ask the checkpoint with MTP off, too: does drafting change answers?"),
    ] = True,
    run_model_code: ModelCodeOption = False,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    any_vllm: AnyVLLMOption = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for gsm8k.json and the answers alone; default: "
            "NAME.report beside the checkpoint, with all its results.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Score a checkpoint and its source on the recipe's tasks, served by vLLM with method=mtp, under one protocol each.

    lm-evaluation-harness builds the prompts, reads the answers (strict-match and flexible-extract) and scores them;
    vLLM's draft counters over the same questions give the acceptance. What is not given here is as in the recipe's
    `evaluation` block. The checkpoint is asked once more with MTP off: greedy decoding promises the same answers, up to
    near-ties that flip. An error of the server ends the run and is never a wrong answer; the same command then asks
    only what has no answer yet. Words after `--` go to `vllm serve`.

    Exit status 1 if a server fails, if score or acceptance lost more than the recipe's gates allow, or if drafting
    changes right and wrong beyond chance; 3 if the questions are too few to tell. It needs the extra keepmtp[evaluate].

    Example: `keepmtp eval /data/out --source /data/GLM-4.7 --api chat --max-tokens 8192 -- --tensor-parallel-size 8`
    """
    from ..checkpoints.source import open_source
    from ..checkpoints.source_of import original_of
    from ..validate.facts.results import report_folder, write_result
    from ..validate.measure.harness import Model, Setup
    from ..validate.measure.room import refuse_no_room
    from ..validate.measure.server import refuse_words
    from ..validate.report import report as reports
    from ..validate.report.gates import judge

    refuse_stray_words("eval", context.args)
    refuse_words("eval", context.args)
    if task is not None and task not in TASKS:
        cure = did_you_mean(task, TASKS, otherwise="Name one; a recipe may list several")
        raise RecipeError("--task", f"must be one of {', '.join(TASKS)}", got=repr(task), cure=cure)
    require_extra("keepmtp eval", "evaluate")
    extra, err = tuple(context.args), Console(stderr=True)
    opened = open_source(path)
    original = original_of(opened, source, cure=_CURE)
    from ..validate.measure import gsm8k, lm_eval_task, model_code  # lm-eval is known to be there

    changed = {
        "task": task,
        "dataset": dataset,
        "shots": shots,
        "api": api,
        "max_tokens": max_tokens,
        "k": k,
        "concurrency": concurrency,
        "limit": limit,
        "seed": seed,
        "prefix_caching": prefix_caching,
    }
    rules = _rules(opened, recipe)
    protocols = _protocols(rules.evaluations, {key: value for key, value in changed.items() if value is not None})
    if run_model_code and any(TASKS[protocol.task].runs_code for protocol in protocols) and not model_code.fence():
        err.print(model_code.OPEN, highlight=False)
    asked = [lm_eval_task.questions(protocol, runs_code=run_model_code) for protocol in protocols]
    for protocol in protocols:
        gsm8k.refuse_model(opened, protocol, extra)
        if original:
            gsm8k.refuse_model(original, protocol, extra)
    vllm = chosen_vllm(any_vllm=any_vllm)
    for protocol in protocols:
        gsm8k.refuse_prefix_caching(opened, protocol, vllm)
    is_recorded = folder is None and Path(path).is_dir()
    out = folder or (report_folder(Path(path)) if is_recorded else Path(f"{Path(opened.where).name}.report"))
    refuse_no_room((opened, original), vllm, out=out, extra=extra)
    checkpoint = downloaded(opened, err, is_shown=not as_json)
    original = original and downloaded(original, err, is_shown=not as_json)
    reading = None if as_json else bytes_bar(err, "reading")
    judged = Model(role="checkpoint", source=checkpoint, identity=_identity(checkpoint, out, reading))
    if is_recorded:
        reports.refuse_stale(out, judged.identity, but=("gsm8k",))
    compared = original and Model(role="source", source=original, identity=_identity(original, out, reading))
    if compared is not None and compared.identity.sha256 == judged.identity.sha256:
        rule = "must be what the checkpoint was made from, not the checkpoint itself"
        raise RecipeError("--source", rule, got=f"the same bytes in {compared.source.where}", cure=_CURE)
    setup = Setup(vllm=vllm, out=out, timeout=timeout, extra=extra, say=partial(say, err))
    with asking(err, as_json=as_json) as watch:
        fact = gsm8k.evaluate(
            judged, compared, asked, setup=setup, confidence=rules.gates.confidence, has_plain=plain, watch=watch
        )
    write_result(out, "gsm8k", fact, checkpoint=judged.identity, vllm=vllm.version)
    judgement = reports.refresh(out, measured="gsm8k").judgement if is_recorded else None
    if judgement is None:
        tasks = [one.task for one in rules.evaluations]
        judgement = judge(gates=rules.gates, check=None, serve=None, evaluation=fact, listed_tasks=tasks)
    _show(fact, judgement, out, as_json=as_json)


def _show(fact: "EvaluationFact", judged: "JudgementFact", out: Path, *, as_json: bool) -> None:
    """Print what was found, and end with the status it comes to."""
    from ..validate.facts.results import file_of
    from .eval_tables import table

    if as_json:
        found = {"evaluation": fact.model_dump(mode="json"), "judgement": judged.model_dump(mode="json")}
        print_json(found, indent=None)
    else:
        Console().print(table(fact, judged))
        say(Console(), f"Result: {file_of(out, 'gsm8k')}; answers beside it; logs: {out / 'logs'}")
    if status := _status(judged, fact):
        raise typer.Exit(status)


def _identity(source: "Source", out: Path, reading: "ReadingBar | None") -> "Identity":
    from ..checkpoints.identity import identify

    assert source.folder is not None
    return identify(source.folder, cache=out, watch=reading)


def _rules(checkpoint: "Source", recipe: str | None) -> _Rules:
    """The named recipe's, or those in the checkpoint's record; without one the defaults."""
    from ..checkpoints.record import RECORD
    from ..checkpoints.source import small_file
    from ..recipes.find import find_recipe
    from ..validate.report.gates import limits_in, protocols_in

    if recipe is not None:
        found, _ = find_recipe(recipe)
        return _Rules(evaluations=found.evaluations, gates=found.gates)
    record = small_file(checkpoint, RECORD)
    where, cure = f"{checkpoint.where}: {RECORD}", "Name a recipe with --recipe"
    return _Rules(
        evaluations=protocols_in(record, cure=cure, where=where), gates=limits_in(record, cure=cure, where=where)
    )


def _protocols(recipe: "tuple[Evaluation, ...]", changed: Mapping[str, Any]) -> "tuple[Evaluation, ...]":
    """The recipe's tasks, or the one that is named, with what the command line changes."""
    named = changed.get("task")
    if named is None:
        if "dataset" in changed and len(recipe) > 1:
            rule, got = "belongs to one task, and the recipe lists several", ", ".join(one.task for one in recipe)
            raise RecipeError("--dataset", rule, got=got, cure="Name one with --task")
        return tuple(_protocol(one, changed) for one in recipe)
    if own := next((one for one in recipe if one.task == named), None):
        return (_protocol(own, {key: value for key, value in changed.items() if key != "task"}),)
    return (_protocol(recipe[0], changed),)


def _protocol(recipe: "Evaluation", changed: Mapping[str, Any]) -> "Evaluation":
    """One task's with what the command line changes; a task that is asked otherwise brings its own protocol.

    A revision belongs to the dataset it was given with.
    """
    from pydantic import ValidationError

    from ..recipes.protocol import Evaluation

    fields = recipe.model_dump()
    other = TASKS.get(changed.get("task", recipe.task))
    if other is not None and other.protocol != TASKS[recipe.task].protocol:
        fields = {name: fields[name] for name in _OF_ANY_TASK}
    fields |= dict(changed)
    if {"dataset", "task"} & changed.keys():
        fields["dataset_revision"] = None
    if fields.get("dataset") == _HUB:
        fields["dataset"] = None
    try:
        return Evaluation.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + (".".join(map(str, first["loc"])) or "dataset").replace("_", "-")
        if isinstance(fault := first.get("ctx", {}).get("error"), RecipeError):
            fault.where = f"--{fault.where}"
            raise fault from error
        rule, names = first["msg"].replace("Input should", "must"), re.findall("'([^']+)'", first["msg"])
        cure = did_you_mean(first["input"], names, otherwise="See `keepmtp eval --help`")
        raise RecipeError(option, rule, got=repr(first["input"]), cure=cure) from error


def _status(judged: "JudgementFact", fact: "EvaluationFact") -> int:
    """The exit status for what this command measures; findings and loads are other commands'."""
    from ..validate.report.gates import verdict_on

    wanted = {"drafting"} | ({fact.protocol.task, *_OF_THE_SOURCE} if fact.source else set())
    own = wanted & {reason.gate for reason in judged.reasons}
    return EXITS[verdict_on(judged, own)] if own else 0
