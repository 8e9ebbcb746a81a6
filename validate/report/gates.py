"""The judge: what was measured of a checkpoint, whether that is good enough, and why.

In: the check's findings and dry loads, what real servers did, the scores of tasks, speed,
closeness, and the recipe's limits. Out: a `JudgementFact` with a reason for each gate: findings,
loads, acceptance and the first task; drafting where the checkpoint was also asked with MTP off;
probe where it was asked; and one for each limit that only some recipes have (worst task, speed,
closeness). Its verdict is the worst of theirs: pass, regression, or infeasible where a
measurement is missing or too small.

Easy to get wrong: nothing else judges. `eval`, the headline and the card take their
verdict from here.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from ...checkpoints.record import read_record
from ...recipes.errors import CheckpointError, counted, first_fault
from ...recipes.protocol import Evaluation, Evaluations, Gates, listed
from ..facts.benched import BenchFact
from ..facts.binomial import limits, ratio_limits, student
from ..facts.closeness import ClosenessFact
from ..facts.dry_load import newest, places, versions_in_short, with_cures
from ..facts.evaluated import NO_CALL, NOT_EMPTY, EvaluationFact, SwitchFact, TaskFact
from ..facts.findings import errors_of
from ..facts.numbers import nats, percent, points
from ..facts.paired import one_sided
from ..facts.probed import worse
from ..facts.results import CheckData
from ..facts.schema import JudgementFact, JudgementWord, ReasonFact
from ..facts.served import GAP_TOLERANCE, ServeCheck
from .drafted import drafted, has_no_block
from .settle import (
    Estimate,
    of_pair,
    reason,
    settle,
    unmeasured,
    worst,
)

CHANCE = 0.001
"""A split is no chance if two equal servers come to it less often than this: one good checkpoint in
a thousand fails.

Both reports from the field are far beyond it: of 39 questions, 21 that only one server gets right
are 1 in a million.
"""
BOUND = "one-sided, Clopper-Pearson"


def judge(
    *,
    gates: Gates = Gates(),  # noqa: B008 - it is frozen
    check: CheckData | None = None,
    serve: ServeCheck | None = None,
    evaluation: EvaluationFact | None = None,
    bench: BenchFact | None = None,
    closeness: ClosenessFact | None = None,
    listed_tasks: Collection[str] = (),
) -> JudgementFact:
    """Judge a checkpoint by what was measured; None is what was not.

    Args:
        gates: the recipe's limits.
        check: of these bytes, with the dry loads that were made.
        serve: what `keepmtp eval` measured prompt by prompt.
        evaluation: what `keepmtp eval` measured.
        bench: what `keepmtp bench` measured; without a limit on speed in `gates` there is no reason
            for it.
        closeness: what it measured on held-out text; likewise.
        listed_tasks: of the recipe.
    """
    reasons = [
        _findings(check, serve),
        _loads(check, serve, evaluation, bench),
        _acceptance(gates, serve, evaluation),
    ]
    if check is None or check.target is None:
        reasons += [
            _first_task(gates, evaluation),
            *_worst_task(gates, evaluation, listed_tasks),
            *_drafting(serve, evaluation),
            *_probe(serve),
            *_speed(gates, bench),
            *_closeness(gates, closeness),
        ]
    else:  # a draft of its own answers nothing, so it has no score
        reasons += _probe(serve)
        for number, one in enumerate(reasons):
            reasons[number] = one.model_copy(update={"says": of_pair(one.says)})
    return JudgementFact(verdict=worst(reasons), gates=gates, reasons=tuple(reasons))


def verdict_on(judgement: JudgementFact, gates: Iterable[str]) -> JudgementWord:
    """The worst verdict of these gates alone: the part of a judgement that one command measures."""
    wanted = set(gates)
    return worst([one for one in judgement.reasons if one.gate in wanted])


def decided_in(
    record: Path | None, *, cure: str, where: object = None
) -> tuple[Gates, tuple[Evaluation, ...]]:
    """The limits and the protocols, a task each, in a checkpoint's keepmtp.json; the defaults where
    it has none.

    Args:
        record: the file; None where there is none.
        cure: what to do where it cannot be read.
        where: its name in messages; default `record`.

    Raises:
        CheckpointError: keepmtp did not write it, or a limit or a protocol in it is none.
    """
    recipe = {}
    if record:
        recipe = read_record(record, where=where, cure=cure).recipe.whole
    read = {}
    for key, form in {"gates": Gates, "evaluation": Evaluations}.items():
        try:
            read[key] = TypeAdapter(form).validate_python(recipe.get(key) or {})
        except ValidationError as error:
            raise CheckpointError(
                where or record,
                f"recipe.{key} must be as a recipe has it",
                got=first_fault(error),
                cure=cure,
            ) from error
    return read["gates"], listed(read["evaluation"])


def not_its_own(as_served: str) -> str:
    """A warning where other bytes than the checkpoint's were served."""
    if as_served == "native":
        return ""
    return (
        " Served was a BF16 copy of the same weights: packed kernels and quantized activations "
        "were not tried."
    )


# --- findings and loads ---------------------------------------------------------------------------


def _findings(check: CheckData | None, serve: ServeCheck | None) -> ReasonFact:
    """No error in config.json, headers and values, and no output that drafting changes."""
    found = check.findings if check else ()
    all_errors = errors_of(found)
    # Of dry loads the next gate has the word.
    errors = [error for error in all_errors if error.origin != "dry"]
    if errors:
        says = f"{errors[0].where}: {errors[0].says.rstrip('.')}."
        if len(errors) > 1:
            says += f" Errors in all: {len(errors):,}."
        return reason("findings", "regression", says)
    for served in serve.served if serve else ():
        for run in served.runs:
            for parting in run.partings or ():
                if not parting.is_near_tie:
                    says = (
                        f"Drafting changes what is written: {served.role} with k={run.k} leaves "
                        f"the output without it in prompt {parting.prompt} at token {parting.at}, "
                        f"and no log-probability gap below {GAP_TOLERANCE:g} explains it."
                    )
                    return reason("findings", "regression", says)
    if check is None:
        return unmeasured("findings", "Not checked: `keepmtp check CHECKPOINT --record` does.")
    says = "No error in config.json and the headers"
    warnings = len(found) - len(all_errors)
    if warnings:
        says += f"; {counted(warnings, 'warning')}"
    return reason("findings", "pass", f"{says}.")


def _loads(
    check: CheckData | None,
    serve: ServeCheck | None,
    evaluation: EvaluationFact | None,
    bench: BenchFact | None,
) -> ReasonFact:
    """vLLM takes every tensor, on pretended GPUs or in a server of the checkpoint's own bytes."""
    tried = check.dry if check else ()
    # An older vLLM that cannot load it is no fault of the checkpoint: the card says which can.
    loads = newest(tried)
    # vLLM's own defect, which a cure mends where it is served, is no fault of the checkpoint.
    failed = [load for load in loads if not (load.ok or load.cures)]
    if failed:
        why = failed[0].error.rstrip(".")
        says = f"A dry load fails on {places(failed, is_named=True)}: {why}."
        return reason("loads", "regression", says)
    # A source's server may fail without any fault here.
    for run in serve.checkpoint.runs if serve else ():
        server = f"The server with k={run.k}"
        if not run.loaded:
            error = run.error.rstrip(".")
            return reason("loads", "regression", f"{server} did not come up: {error}.")
    served = [part.checkpoint.as_served for part in (serve, evaluation) if part]
    # A matrix whose servers all failed served nothing.
    if bench and any(cell.repetitions for cell in bench.checkpoint.cells):
        served.append(bench.checkpoint.as_served)
    ways = []
    if loads:
        where = f"{places(loads, is_named=True)}{with_cures(loads)}"
        ways.append(f"vLLM's own classes take every tensor on {where}.")
        versions = versions_in_short(tried)
        if versions:
            ways.append(f"vLLM {versions}.")
    if "native" in served:
        ways.append("Its own bytes were served.")
    elif served:
        ways.append(f"Served was only a {served[0]}.")
    if loads or "native" in served:
        return reason("loads", "pass", " ".join(ways))
    cure = "`keepmtp check CHECKPOINT --gpu sm100 --record` lets vLLM load it without a GPU."
    return unmeasured("loads", " ".join(["Not tried.", *ways, cure]))


# --- drafts ---------------------------------------------------------------------------------------


def _acceptance(
    gates: Gates, serve: ServeCheck | None, evaluation: EvaluationFact | None
) -> ReasonFact:
    """The share of the source's acceptance, on the first task's questions or else on the prompts of
    acceptance.
    """
    # Those that also asked the source come first.
    measured = next(iter(drafted(serve, evaluation)), None)
    if measured is None or measured.source is None:
        says = "Not measured of both source and checkpoint: `keepmtp eval CHECKPOINT` does."
        if has_no_block(serve, evaluation):
            says = (
                "The source has no MTP block and was served with MTP off, so there is nothing to "
                "compare with: `keepmtp fix SOURCE --from RELEASE --out WHOLE` puts the block "
                "back, and `keepmtp eval CHECKPOINT --source WHOLE` compares."
            )
        return unmeasured("acceptance", says)
    where = f"On {measured.what} with k={measured.k}"
    source = measured.source
    mine = measured.checkpoint.acceptance
    theirs = source.acceptance
    if mine is None:
        says = f"{where}, the checkpoint drafted nothing, and the source did."
        return reason("acceptance", "regression", says)
    if not theirs:
        says = f"{where}, none of the source's own drafted tokens was accepted."
        return unmeasured("acceptance", says)

    def bounds(times: float) -> tuple[float, float]:
        # Drafts are taken as independent: within an answer that makes the bounds too near, between
        # two models' answers to one question too far.
        ours = times * measured.checkpoint.trials(measured.k)
        others = times * source.trials(measured.k)
        return ratio_limits(mine * ours, ours, theirs * others, others, gates.confidence)

    estimate = Estimate(
        value=mine / theirs,
        bounds=bounds,
        samples=measured.num_asked,
        unit=measured.unit,
        says=f"{where}: {percent(mine)} of {measured.checkpoint.draft_tokens:,} drafted tokens "
        f"accepted, {percent(theirs)} of the source's. That is {percent(mine / theirs)} of it",
        how=f"{BOUND}, a draft as one trial",
        shown=percent,
        also=not_its_own(measured.as_served),
    )
    return settle("acceptance", estimate, gates.min_acceptance, gates, is_floor=True)


def _drafting(serve: ServeCheck | None, evaluation: EvaluationFact | None) -> Iterator[ReasonFact]:
    """The checkpoint's answers with MTP on against those with MTP off: one reason, where it was
    asked both ways.

    Every task, every filter and empty answers are asked, by the exact sign test.
    """
    # Most checkpoints have some answers that drafting changes, because near-ties flip, as many for
    # the better as for the worse. What is asked is whether the split is one that chance hardly
    # gives, in both directions.
    runs = serve.checkpoint.runs if serve else ()
    is_compared = any(run.partings is not None for run in runs)
    rarest: SwitchFact | None = None
    asked: TaskFact | None = None
    for task in evaluation.by_task if evaluation else ():
        for switch in task.drafting.switches if task.drafting else ():
            if rarest is None or switch.chance < rarest.chance:
                rarest = switch
                asked = task
    if rarest is None or asked is None or asked.drafting is None:
        return
    what = f"right by {rarest.reads}"
    if rarest.reads == NOT_EMPTY:
        what = "with text"
    says = (
        f"{asked.protocol.title}: {asked.drafting.num_changed:,} of "
        f"{asked.checkpoint.num_questions:,} greedy answers are another text with MTP on than off. "
        f"Only without drafting "
        f"{rarest.only_plain:,} are {what}, only with it {rarest.only_drafting:,} (exact sign "
        f"test: {rarest.chance:.2g}), "
    )
    if rarest.chance < CHANCE:
        yield reason("drafting", "regression", f"{says}beyond chance.")
    elif 2 * asked.drafting.num_changed > asked.checkpoint.num_questions and not is_compared:
        # Right and wrong say little where most texts are other ones.
        says += (
            "no more than chance gives. Most texts differ, and were not compared with a control: "
        )
        says += "`keepmtp eval CHECKPOINT --only acceptance` shows whether near-ties explain it."
        yield unmeasured("drafting", says)
    else:
        says += "no more than chance gives where near-ties flip."
        yield reason("drafting", "pass", says)


def _probe(serve: ServeCheck | None) -> Iterator[ReasonFact]:
    """The answers to the probe: the checkpoint's with MTP on against those with MTP off, and these
    against the source's. One reason, where two servers were asked.

    Every fault at every depth is asked, by the exact sign test. What becomes better is no fault.
    """
    if serve is None:
        return
    plain = serve.checkpoint.runs[:1]
    pairs = [("with MTP on", off, on) for off in plain for on in serve.checkpoint.runs[1:]]
    if serve.source:
        for before, after in zip(serve.source.runs, plain, strict=False):
            pairs.append(("of the checkpoint", before, after))
    seen = []
    for whose, before, after in pairs:
        for ours, theirs in zip(before.probed, after.probed, strict=False):
            seen += [(*found, ours.depth, whose) for found in worse(ours, theirs)]
    if not seen:
        return
    rarest = min(seen, key=lambda one: (one[0], -len(one[2])))
    chance, fault, names, num_before, depth, whose = rarest
    if not names:
        servers = " or ".join(dict.fromkeys(one[-1] for one in seen))
        yield reason("probe", "pass", f"No answer {servers} alone has a fault.")
        return
    scripts = dict.fromkeys([name.partition(" ")[0] for name in names])
    verdict = "pass"
    how = "no more than chance gives"
    if chance < CHANCE:
        verdict = "regression"
        how = "beyond chance"
    says = (
        f"At depth {depth:,}, {counted(len(names), 'answer')} {whose} alone "
        f"{'have' if names[1:] else 'has'} a fault of {fault} "
        f"({', '.join(scripts)}), and {num_before:,} the other way round (exact sign "
        f"test: {chance:.2g}), {how}."
    )
    yield reason("probe", verdict, says)


# --- scores ---------------------------------------------------------------------------------------


def _first_task(gates: Gates, evaluation: EvaluationFact | None) -> ReasonFact:
    """The drop of the first task's score, paired by question; the gate has the task's name."""
    if evaluation is None:
        return unmeasured("gsm8k", "Not measured: `keepmtp eval CHECKPOINT` does.")
    gate = evaluation.protocol.task
    source = evaluation.source
    if evaluation.num_calls == 0:
        return unmeasured(gate, NO_CALL)
    if source is None:
        says = "The source was not evaluated: `keepmtp eval CHECKPOINT --source SOURCE` does both."
        return unmeasured(gate, says)
    name = evaluation.judged_filter(gates.filter)
    before = source.score(name).value
    if before <= gates.max_drop:
        says = f"the source itself gets {percent(before)}, so a drop of "
        says += f"{points(gates.max_drop)} could not be seen."
        return unmeasured(gate, f"{name}: {says}")
    return _dropped(gate, gates, evaluation, gates.max_drop)


def _dropped(gate: str, gates: Gates, task: TaskFact, most: float) -> ReasonFact:
    """One task's score against its source's, which was asked."""
    name = task.judged_filter(gates.filter)
    pair = task.pair(gates.filter)
    assert task.source is not None and pair is not None, "the callers ask for a source"
    num = task.checkpoint.num_questions // task.protocol.repeats
    asked = counted(num, "question")
    alone = f"source alone {pair.only_source:,}, in the checkpoint alone {pair.only_checkpoint:,}"

    def bounds(times: float) -> tuple[float, float]:
        low, high = one_sided(pair, gates.confidence, times=times)
        return -high, -low  # of a loss

    estimate = Estimate(
        value=-pair.difference,
        bounds=bounds,
        samples=num,
        unit="questions",
        says=f"{task.protocol.title}, {name}: {percent(task.checkpoint.score(name).value)} of "
        f"{asked}, the source {percent(task.source.score(name).value)} (right in the "
        f"{alone}): a drop of {points(-pair.difference)}",
        how=f"{BOUND}, paired",
        shown=points,
        also=not_its_own(task.checkpoint.as_served),
    )
    return settle(gate, estimate, most, gates, is_floor=False)


def _worst_task(
    gates: Gates, evaluation: EvaluationFact | None, wanted: Collection[str]
) -> Iterator[ReasonFact]:
    """The task that lost most, where the recipe has a limit for it."""
    most = gates.max_worst_drop
    if most is None:
        return
    tasks = evaluation.by_task if evaluation else ()
    names = [task.protocol.task for task in tasks]
    # What the recipe lists and nobody asked may be the worst.
    lacking = [name for name in wanted if name not in names]
    for task in tasks:
        score = task.source and task.source.score(task.judged_filter(gates.filter)).value
        if task.num_calls == 0 or not score:
            lacking.append(task.protocol.task)
    if lacking or not tasks:
        cure = "`keepmtp eval CHECKPOINT --source SOURCE` asks both all that the recipe lists."
        if lacking:
            cure = f"{', '.join(lacking)}: not asked, or the source gets nothing right. {cure}"
        if any(task.num_calls == 0 for task in tasks):
            cure = f"{NO_CALL} {cure}"
        yield unmeasured("worst task", cure)
        return
    drops = [_dropped("worst task", gates, task, most) for task in tasks]
    for drop in drops:
        if drop.verdict == worst(drops):
            yield drop
            return


# --- speed and closeness --------------------------------------------------------------------------


def _speed(gates: Gates, bench: BenchFact | None) -> Iterator[ReasonFact]:
    """Whether drafting makes one request at a time faster; none where the recipe has no limit."""
    least = gates.min_speedup
    if least is None:
        return
    if bench is None or not bench.counts():
        says = "Not measured of the checkpoint's own bytes on a GPU: `keepmtp bench CHECKPOINT` "
        yield unmeasured("speed", f"{says}there does.")
        return
    plain = bench.checkpoint.cell(0, 1)
    found = []
    for cell in bench.checkpoint.cells:
        times = bench.checkpoint.times(cell)
        has_spread = plain and min(len(plain.rates), len(cell.rates)) > 1
        if cell.concurrency == 1 and cell.k and times and has_spread:
            # The estimate of a ratio is no proof. A k passes only if its slowest repetition reaches
            # the limit against the fastest one without drafting; all of them fail only if no pair
            # of repetitions reaches it.
            found.append((*times, cell.k))
    if not found:
        says = "k=0 and a k with drafting must both answer one request at a time, twice or more: "
        cure = "`keepmtp bench CHECKPOINT --k 0,1 --concurrency 1 --repeat 3`."
        yield unmeasured("speed", says + cure)
        return
    low, middle, high, k = max(found)
    says = (
        f"One request at a time on {bench.environment['device']}: k={k} is {middle:.2f} times as "
        f"fast as k=0, by the repetitions {low:.2f} to {high:.2f} times; at least {least:g} times "
        "is asked for."
    )
    if low >= least:
        yield reason("speed", "pass", says)
    elif all(high < least for _, _, high, _ in found):
        yield reason("speed", "regression", f"{says} No other k is faster.")
    else:
        yield unmeasured("speed", f"{says} The repetitions are too far apart to tell.")


def _closeness(gates: Gates, fact: ClosenessFact | None) -> Iterator[ReasonFact]:
    """The worse of both limits, and what was found for each; none where the recipe has no limit."""
    if gates.max_divergence is None and gates.max_flips is None:
        return
    if fact is None or fact.stderr is None:
        says = (
            "Not measured in two windows or more: `keepmtp eval CHECKPOINT --only closeness` does."
        )
        yield unmeasured("closeness", says)
        return
    # Tokens of one window are not independent: the bound of a mean is Student's over windows, and
    # that of a share is Clopper and Pearson's over as many independent positions as would tell as
    # much (Korn and Graubard).
    reach = student(gates.confidence, fact.windows - 1) * fact.stderr

    def around(times: float) -> tuple[float, float]:
        near = reach / times**0.5
        return fact.divergence - near, fact.divergence + near

    flips = fact.flip_rate * fact.effective_tokens
    also = ""
    if not fact.is_exact:
        also = (
            f" It is a lower bound: {percent(fact.outside)} of the source's probability lies on "
            "tokens that were compared as one."
        )
    divergence = Estimate(
        value=fact.divergence,
        bounds=around,
        samples=fact.tokens,
        unit="tokens",
        says=f"On {fact.tokens:,} tokens of held-out text {nats(fact.divergence)} a token from the "
        "source",
        how="one-sided, over windows",
        shown=nats,
        also=also,
    )
    flipped = Estimate(
        value=fact.flip_rate,
        bounds=lambda times: limits(times * flips, times * fact.effective_tokens, gates.confidence),
        samples=fact.tokens,
        unit="tokens",
        says=f"The first choice is another at {percent(fact.flip_rate)} of the tokens",
        how=f"{BOUND}, as {fact.effective_tokens:,.0f} independent tokens",
        shown=percent,
    )
    found = list[ReasonFact]()
    for estimate, most in ((divergence, gates.max_divergence), (flipped, gates.max_flips)):
        if most is not None:
            found.append(settle("closeness", estimate, most, gates, is_floor=False))
    # So many samples settle both; None where no number settles one of them.
    needed = [one.needed or 0 for one in found if one.verdict == "infeasible"]
    if 0 in needed:
        needed = []
    says = " ".join([one.says for one in found])
    yield ReasonFact(
        gate="closeness",
        verdict=worst(found),
        says=says + not_its_own(fact.checkpoint.as_served),
        needed=max(needed, default=None),
    )
