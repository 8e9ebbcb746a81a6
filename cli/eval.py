"""`keepmtp eval`: how good a checkpoint is next to its source, as real servers show it, and whether
that is good enough.

In: two checkpoints, and what to measure: a recipe's protocols with what the command line changes.
Out: tables, a file for each station with the answers in the same folder, and the report made anew.
"""

from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..recipes.errors import RecipeError, did_you_mean, first_fault
from ..recipes.extras import require_extra
from ..recipes.frozen import Raw, frozen, without_none
from ..recipes.tasks import TASKS, TaskName
from .bench import numbers
from .exits import OF_VERDICT
from .options import (
    DraftOption,
    DryRunOption,
    K,
    OriginalOption,
    PromptsOption,
    ServeOptions,
)
from .progress import bytes_bar
from .tables import answer, verdict

if TYPE_CHECKING:
    from ..recipes.protocol import Evaluation, Gates
    from .session import Session

STATIONS = {
    "acceptance": ("prompts",),
    "tasks": ("task", "dataset", "limit"),
    "lossless": (),
    "closeness": ("text", "tokens"),
}
"""What can be asked, and the options that are for it alone."""
_GATES = "gates"
_HUB = "hub"
_MAX_TOKENS = 256  # of an answer to a prompt
_OF_ANY_TASK = ("task", "k", "concurrency", "limit", "seed", "prefix_caching")
_OF_TASKS = ("task", "dataset", "limit", "max_tokens")
_OF_A_DRAFT = ("acceptance", "lossless")
_TOKENS = 32_768  # of held-out text


@frozen
class EvalOptions:
    """What is measured, where it is not the recipe that says it."""

    only: Annotated[
        str, typer.Option(metavar="STATIONS", help=f"{', '.join(STATIONS)}; or {_GATES}, alone.")
    ] = ""
    k: Annotated[str | None, typer.Option(*K, help="Tokens drafted a step: 3, or 0..3.")] = None
    recipe: Annotated[
        str | None, typer.Option(help="Whose protocol and gates: model, or recipe file.")
    ] = None
    task: Annotated[
        TaskName | None,
        typer.Option(metavar="TASK", help=f"Ask this one alone: {', '.join(TASKS)}."),
    ] = None
    dataset: Annotated[
        str | None, typer.Option(help="A .jsonl or .parquet file; `hub`: its own.")
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=2, help="Ask the first so many questions only.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer, at most.")] = (
        None
    )
    prompts: PromptsOption = None
    text: Annotated[Path | None, typer.Option(help="Held-out text: .txt or .jsonl.")] = None
    tokens: Annotated[
        int | None, typer.Option(min=2, help=f"Tokens of that text, at most: {_TOKENS:,}.")
    ] = None

    def stations(self, gates: "Gates", draft: str) -> tuple[str, ...]:
        """Those that are named; else all that are of use.

        Raises:
            RecipeError: a name that is none of them; a draft alone has no tasks and no closeness;
                or an option of one that is not asked.
        """
        known = tuple(STATIONS)
        if draft:
            known = _OF_A_DRAFT
        elif not (self.text or gates.max_divergence or gates.max_flips):
            known = known[:-1]
        named = known
        if self.only:
            named = tuple(self.only.split(","))
        for name in named:
            if name not in (known if draft else STATIONS):
                cure = did_you_mean(name, STATIONS, otherwise=f"Use --only {','.join(known)}")
                raise RecipeError("--only", "must list what can be measured", got=name, cure=cure)
        for option in dict.fromkeys(chain(*STATIONS.values())):
            users = [name for name, options in STATIONS.items() if option in options]
            if getattr(self, option) is not None and not {*users} & {*named}:
                rule = f"is for {' or '.join(users)}, which must be asked"
                cure = f"Leave it out, or ask --only {users[-1]}"
                raise RecipeError(f"--{option}", rule, got=", ".join(named), cure=cure)
        return named

    def protocols(self, recipe: "tuple[Evaluation, ...]") -> "tuple[Evaluation, ...]":
        """The recipe's tasks, or the one that is named, with these changes."""
        asked = [protocol for protocol in recipe if self.task in (None, protocol.task)]
        if self.dataset is not None and len(asked) > 1:
            raise RecipeError(
                "--dataset",
                "belongs to one task, and the recipe lists several",
                got=", ".join(protocol.task for protocol in asked),
                cure="Name one with --task",
            )
        changed = {name: getattr(self, name) for name in _OF_TASKS}
        if self.k is not None:
            changed["k"] = self.ks[-1]
        return tuple(_changed(protocol, without_none(changed)) for protocol in asked or recipe[:1])

    @property
    def ks(self) -> tuple[int, ...]:
        """Tokens drafted a step that are named, ascending; the tasks are asked with the last."""
        return () if self.k is None else numbers("-k", self.k, least=0)


def eval(
    served: ServeOptions,
    asked: EvalOptions,
    source: OriginalOption = None,
    draft: DraftOption = "",
    dry_run: DryRunOption = False,
) -> None:
    """Measure with vLLM how good a checkpoint is next to its source, and judge it by its recipe's
    gates.

    \b
    acceptance  what is accepted of the drafts, and outputs with and without MTP
    tasks       the recipe's tasks: lm-evaluation-harness asks and scores
    lossless    MTP on against off: scripts, code, tools, load; and the tasks
    closeness   divergence and flips of the predictions on held-out text

    Closeness is measured where the recipe limits it, or with --text; the others always. Each server
    is started once, for all that it is asked; --dry-run prints which. Each answer is kept as it
    comes: the same command asks only what is missing. An error of a server never counts as a wrong
    answer. What the command line does not say is as in the recipe's `evaluation` block. Words after
    `--` go to `vllm serve`.

    Exit status 1 if a server fails, or if a gate of what was measured shows a regression; 3 if too
    little was measured to tell. `--only gates` asks nothing: it judges what was measured before, by
    all gates.

    With --draft, the draft is judged, PATH is its target, and its results are in DRAFT.report.

    \b
    Example: `keepmtp eval /data/out --source /data/GLM-4.7 -k 3 -- -tp 8`
    """
    if asked.only == _GATES:
        _judge(Path(served.path), as_json=served.as_json)
        return
    require_extra("keepmtp eval", "evaluate")
    from .measured import exit_status, shown
    from .session import Session

    session = Session("eval", served, source, draft, is_dry=dry_run)
    gates, listed = session.decided(asked.recipe)
    makers = _stations(session, asked, gates, listed)
    tasks = [protocol.task for protocol in listed]
    facts, judged = session.measure(makers, "check", gates=gates, listed_tasks=tasks)
    value = {**facts, "judgement": judged}
    status = exit_status(judged, facts)
    answer(value, [*shown(facts, judged), session.places], as_json=served.as_json, status=status)


def _stations(
    session: "Session", asked: EvalOptions, gates: "Gates", recipe: "tuple[Evaluation, ...]"
) -> dict[str, Any]:
    """What makes each station, by the name of its result, of a `Setup` and both models. Whatever
    may be refused is refused here, before a server is started, which may take half an hour.
    """
    from ..checkpoints.record import read_record
    from ..validate.measure import closeness, harness, lossless, tasks, tool_calls
    from ..validate.measure.lm_eval_task import questions as questions_of
    from ..validate.measure.serve_check import AcceptanceStation
    from ..validate.measure.texts import PROMPTS, held_out, read_prompts

    chosen = asked.stations(gates, session.draft)
    protocols = asked.protocols(recipe)
    original = session.original
    opened = [session.opened]
    ks = sorted({0, *asked.ks, *[protocol.k for protocol in protocols]})
    harness.refuse_drafts(session.opened, *ks, option="-k")
    if original is not None:
        opened.append(original)
        harness.refuse_drafts(original, *ks, option="-k", is_original=True)
    makers = {}
    if "acceptance" in chosen:
        prompts = PROMPTS
        if asked.prompts is not None:
            prompts = tuple([item.text for item in read_prompts(asked.prompts).items])
        most = asked.max_tokens or _MAX_TOKENS
        makers["serve"] = partial(AcceptanceStation, ks=tuple(ks), prompts=prompts, max_tokens=most)
    if "lossless" in chosen:
        makers["lossless"] = partial(
            lossless.Lossless,
            k=ks[-1],
            has_cache=any(protocol.prefix_caching for protocol in protocols),
            parser=tool_calls.parser_words(session.target or session.opened, session.extra),
            max_tokens=min(asked.max_tokens or _MAX_TOKENS, lossless.MAX_TOKENS),
        )
    if "tasks" in chosen:
        questions = []
        for protocol in protocols:
            for each in opened:
                tasks.refuse_model(each, protocol, session.extra)
            questions.append(questions_of(protocol))
        makers["evaluation"] = partial(
            tasks.Tasks, asked=tuple(questions), has_plain="lossless" in chosen
        )
    if "closeness" in chosen:
        if original is None:
            cure = "Name the release"
            raise RecipeError("--source", "closeness is to a source", got="none", cure=cure)
        record = session.record
        where = f"{session.opened.where}: keepmtp.json"
        # A text of the calibration data is refused: it says nothing.
        text = held_out(asked.text, record and read_record(record, where=where))
        most = asked.tokens or _TOKENS
        makers["closeness"] = partial(closeness.Closeness, text=text, tokens=most)
    return makers


def _judge(path: Path, *, as_json: bool) -> None:
    """Judge a checkpoint, its folder or its NAME.report, by what was measured before."""
    from ..checkpoints.identity import identify, refuse_other_bytes
    from ..validate.facts.results import checkpoint_folder, report_folder
    from ..validate.report.report import of_checkpoint

    checkpoint = path
    if path.suffix == ".report":
        checkpoint = checkpoint_folder(path)
    # There is no verdict on numbers that were edited, which the seals of the results show...
    full = of_checkpoint(checkpoint)
    assert full.identity is not None, "verify() has made it"
    # ... or on bytes that have changed since.
    now = identify(checkpoint, cache=report_folder(checkpoint), watch=bytes_bar("reading"))
    refuse_other_bytes(checkpoint, full.identity, now)
    judged = full.judgement
    found = {"path": full.path, "sha256": full.identity.sha256, **judged.model_dump(mode="json")}
    status = OF_VERDICT[judged.verdict]
    answer(found, verdict(full.path, judged), as_json=as_json, status=status)


def _changed(recipe: "Evaluation", changed: Raw) -> "Evaluation":
    """One task's with what the command line changes."""
    from pydantic import ValidationError

    from ..recipes.protocol import Evaluation

    fields = recipe.model_dump()
    task = changed.get("task", recipe.task)
    # A task that is asked otherwise brings its own protocol: shots and length of the recipe's task
    # mean nothing there.
    if TASKS[task].protocol != TASKS[recipe.task].protocol:
        fields = {name: fields[name] for name in _OF_ANY_TASK}
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
