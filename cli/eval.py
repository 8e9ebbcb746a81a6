"""`keepmtp eval`: the tasks of a recipe, asked of a checkpoint and its source with method=mtp, and
with MTP off.

In: two checkpoints and a protocol, the recipe's with what the command line changes. Out: a table,
eval.json with the answers in the same folder, and the report made anew.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..recipes.errors import RecipeError, first_fault
from ..recipes.extras import require_extra
from ..recipes.frozen import Raw, frozen, without_none
from ..recipes.tasks import TASKS, TaskName
from .exits import OF_VERDICT
from .options import (
    K,
    OriginalOption,
    ServeOptions,
)
from .tables import answer

if TYPE_CHECKING:
    from ..recipes.protocol import Evaluation

_HUB = "hub"
_OF_ANY_TASK = ("task", "k", "concurrency", "limit", "seed", "prefix_caching")
_OF_THE_SOURCE = ("acceptance", "mean recovery", "worst task")


@frozen
class ProtocolOptions:
    """What the command line changes of a recipe's protocol; None leaves it."""

    task: Annotated[
        TaskName | None,
        typer.Option(metavar="TASK", help=f"Ask this one alone: {', '.join(TASKS)}."),
    ] = None
    dataset: Annotated[
        str | None, typer.Option(help="A .jsonl or .parquet file; `hub`: its own.")
    ] = None
    shots: Annotated[
        int | None, typer.Option(min=0, help="Solved examples before each question.")
    ] = None
    api: Annotated[
        Literal["completions", "chat"] | None,
        typer.Option(help="chat: messages, through the model's template."),
    ] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer, at most.")] = (
        None
    )
    k: Annotated[int | None, typer.Option(*K, min=1, help="Tokens drafted a step.")] = None
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight.")] = None
    limit: Annotated[
        int | None, typer.Option(min=2, help="Ask the first so many questions only.")
    ] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Of the shots, and of the server.")] = None
    prefix_caching: Annotated[
        bool | None, typer.Option(help="Servers keep what equal starts need.")
    ] = None

    def of(self, recipe: "tuple[Evaluation, ...]") -> "tuple[Evaluation, ...]":
        """The recipe's tasks, or the one that is named, with these changes."""
        asked = [protocol for protocol in recipe if self.task in (None, protocol.task)]
        if self.dataset is not None and len(asked) > 1:
            raise RecipeError(
                "--dataset",
                "belongs to one task, and the recipe lists several",
                got=", ".join(protocol.task for protocol in asked),
                cure="Name one with --task",
            )
        changed = without_none(asdict(self))
        return tuple(_changed(protocol, changed) for protocol in asked or recipe[:1])


def eval(
    served: ServeOptions,
    protocol: ProtocolOptions,
    source: OriginalOption = None,
    recipe: Annotated[
        str | None, typer.Option(help="Whose protocol and gates: model, or recipe file.")
    ] = None,
    plain: Annotated[bool, typer.Option(help="Ask with MTP off, too.")] = True,
) -> None:
    """Score a checkpoint and its source on the recipe's tasks, served by vLLM with method=mtp,
    under one protocol each.

    lm-evaluation-harness builds the prompts, reads the answers (strict-match and flexible-extract)
    and scores them; vLLM's draft counters over the same questions give the acceptance. What is not
    given here is as in the recipe's `evaluation` block, and --recipe names another than the one
    that the checkpoint was made by. The checkpoint is asked once more with MTP off: greedy decoding
    promises the same answers, up to near-ties that flip. An error of the server ends the run and is
    never a wrong answer; the same command then asks only what has no answer yet. Words after `--`
    go to `vllm serve`.

    Exit status 1 if a server fails, if score or acceptance lost more than the recipe's gates allow,
    or if drafting changes right and wrong beyond chance; 3 if the questions are too few to tell. It
    needs the extra keepmtp[evaluate].

    \b
    Example: `keepmtp eval /data/out --source /data/GLM-4.7 --max-tokens 8192 -- -tp 8`
    """
    require_extra("keepmtp eval", "evaluate")
    from .measured import evaluated
    from .session import Session

    session = Session("eval", "eval", served, source)
    from ..recipes.find import find_recipe
    from ..validate.measure import tasks  # lm-eval is known to be there
    from ..validate.report.gates import decided_in, verdict_on

    if recipe is not None:
        named, _ = find_recipe(recipe)
        gates = named.gates
        evaluations = named.evaluations
    else:
        where = f"{session.opened.where}: keepmtp.json"
        gates, evaluations = decided_in(
            session.record, cure="Name a recipe with --recipe", where=where
        )
    protocols = protocol.of(evaluations)
    # Whatever may be refused is refused before a server is started, which may take half an hour: a
    # row of the dataset, a chat template that is not there.
    questions = [tasks.questions_of(asked) for asked in protocols]
    extra = tuple(session.extra)
    for asked in protocols:
        tasks.refuse_model(session.opened, asked, extra, is_original=False)
        if session.original is not None:
            tasks.refuse_model(session.original, asked, extra, is_original=True)
    judged, compared = session.models()
    with session.watched() as setup:
        fact = tasks.evaluate(
            judged,
            compared,
            questions,
            setup=setup,
            confidence=gates.confidence,
            has_plain=plain,
        )
    listed = [of_recipe.task for of_recipe in evaluations]
    judgement = session.keep(fact, judged, gates=gates, evaluation=fact, listed_tasks=listed)
    value = {"evaluation": fact, "judgement": judgement}
    # The status is for what this command measures; findings and loads are other commands'.
    gated = {"drafting", fact.protocol.task, *_OF_THE_SOURCE}
    if not fact.source:
        gated = {"drafting"}
    elif not fact.source.drafts:
        gated.remove("acceptance")
    status = OF_VERDICT[verdict_on(judgement, gated)]
    parts = [*evaluated(fact, judgement), session.places]
    answer(value, parts, as_json=served.as_json, status=status)


def _changed(recipe: "Evaluation", changed: Raw) -> "Evaluation":
    """One task's with what the command line changes."""
    from pydantic import ValidationError

    from ..recipes.protocol import Evaluation

    fields = recipe.model_dump()
    task = changed.get("task", recipe.task)
    # A task that is asked otherwise brings its own protocol: shots and length of the recipe's task
    # mean nothing there.
    if TASKS[task].protocol != TASKS[recipe.task].protocol:
        own = TASKS[task].protocol
        fields = {name: fields[name] for name in _OF_ANY_TASK if name not in own}
    fields |= changed
    # A revision belongs to the dataset it was given with.
    if "dataset" in changed or task != recipe.task:
        fields["dataset_revision"] = None
    if fields.get("dataset") == _HUB:
        fields["dataset"] = None
    try:
        return Evaluation.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        fault = first.get("ctx", {}).get("error")
        if isinstance(fault, RecipeError):
            raise fault.at("eval") from error
        cure = "See `keepmtp eval --help`"
        got = repr(first["input"])
        raise RecipeError("eval", first_fault(error), got=got, cure=cure) from error
