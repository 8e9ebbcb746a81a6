"""What people see of a calibrated run: what it will do, and what it found.

In: a plan, or the calibration part of report.json. Out: tables and plain dictionaries. Nothing is decided here.
"""

from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..quantize.calibrate.mtp.facts import CalibrationFact, CandidateFact, SearchFact
from ..quantize.plan.plan import Plan, TensorPlan
from ..recipes.family import QUANTIZABLE_ROLES
from ..recipes.find import calibration_name
from ..recipes.model_file import in_words
from ..recipes.schema import AUTO, TextsOfMix, candidates_for
from ..recipes.schemes import RESCALING, REWRITES, SCHEMES
from .tables import escape, plain_table, size_in_words


def will_do(plan: Plan) -> RenderableType:
    """The calibration of a plan: data, what batches contribute to which modules, and the MTP pass."""
    planned = will_do_json(plan)
    assert planned is not None
    lines = [_data(plan, planned["tokens"])]
    if planned["candidates"]:
        candidates = "; ".join(_in_words(policy) for policy in planned["candidates"])
        lines.append(
            f"MTP block: auto. The smallest candidate that is shown to keep {planned['min_acceptance']:.1%} of the "
            f"released model's acceptance is written, at {planned['confidence']:.0%} confidence; until then it is "
            f"planned as bf16. Candidates: {candidates}."
        )
    if (tuned := plan.recipe.mtp_tuned) is not None:
        lines.append(
            f"MTP block: tuned. It is trained for {tuned.steps:,} steps of {tuned.batch_size:,} sequences on what the "
            f"quantized backbone computes, as {_in_words(tuned.mtp)}, and written where it is shown to draft better "
            f"than untrained, at {plan.recipe.gates.confidence:.0%} confidence."
        )
    if planned["mtp_pass"]["possible"]:
        says = "the block is run on the backbone's hidden states, and its acceptance is measured without a server."
    else:
        says = f"not possible, {planned['mtp_pass']['why']}; acceptance is not measured."
    lines.append(f"MTP pass: {says}")
    text = Text("\n".join(lines) + "\n")
    return Group(_contributions(planned["groups"]), text) if planned["groups"] else text


def _contributions(groups: list[dict[str, Any]]) -> Table:
    table = plain_table("calibration: what batches contribute")
    for column in ("part", "modules", "stored as", "from batches"):
        table.add_column(column)
    table.add_column("weights", justify="right")
    for row in groups:
        table.add_row(row["part"], row["modules"], row["stored_as"], row["from_batches"], f"{row['weights']:,}")
    return table


def _data(plan: Plan, num_tokens: int) -> str:
    calibration = plan.recipe.calibration
    assert calibration is not None
    name = calibration_name(calibration)
    named = f"--calibration {name}: " if name else ""
    mix = "; ".join(_texts(texts, is_alone=not calibration.also) for texts in calibration.mix)
    own = ", answered by the model itself if memory holds it" if calibration.held_out_by == "model" else ""
    how = f"{calibration.algorithm} ({in_words(calibration.knobs)})" if calibration.knobs else calibration.algorithm
    how += " by modelopt" if calibration.backend == "modelopt" else ""
    return (
        f"{named}{how} on {calibration.samples:,} sequences of {calibration.sequence_length:,} "
        f"tokens ({num_tokens:,}) of {mix}; {calibration.held_out:,} more are held out to measure on{own}."
    )


def _texts(texts: TextsOfMix, *, is_alone: bool) -> str:
    share = "" if is_alone else f"{texts.share:.0%} "
    subset = f", {texts.subset}" if texts.subset else ""
    return f"{share}{texts.dataset} ({texts.dataset_revision}{subset}, split {texts.split}, column {texts.column})"


def will_do_json(plan: Plan) -> dict[str, Any] | None:
    """The same for machines; None for a plan without calibration. The dataset is in the recipe."""
    recipe, family = plan.recipe, plan.view.family
    if recipe.calibration is None or not plan.needs_batches:
        return None
    weights = Counter(
        (tensor.part, tensor.role, _stored_as(tensor), _from_batches(tensor, recipe.calibration.algorithm))
        for tensor in plan.tensors
        if tensor.calibrated or tensor.may_change or tensor.tuned
    )
    return {
        "tokens": recipe.calibration.samples * recipe.calibration.sequence_length,
        "groups": [
            {"part": part, "modules": role, "stored_as": stored, "from_batches": gives, "weights": count}
            for (part, role, stored, gives), count in sorted(weights.items())
        ],
        "candidates": _candidates_of(plan),
        "min_acceptance": recipe.mtp_auto.min_acceptance if recipe.mtp_auto else None,
        "confidence": recipe.gates.confidence if recipe.mtp_auto else None,
        "mtp_pass": {"possible": family.draft is not None, "why": family.no_draft},
    }


def _candidates_of(plan: Plan) -> list[Any]:
    """What `mtp: auto` will try, without the groups that the MTP block lacks."""
    recipe = plan.recipe
    if recipe.mtp_auto is None or recipe.mtp != AUTO:
        return []
    groups = {tensor.role for tensor in plan.tensors if tensor.part == "mtp"} & {*QUANTIZABLE_ROLES}
    return list(candidates_for(recipe.mtp_auto.candidates, groups))


def found(fact: CalibrationFact) -> RenderableType:
    """What a run found: coverage, perplexity and acceptance, and the candidates of `mtp: auto`."""
    rows = plain_table("held-out text, without a server")
    rows.add_column("", overflow="fold")
    for column in ("perplexity", "divergence", f"accepted, k={fact.k}", "length"):
        rows.add_column(column, justify="right", no_wrap=True)
    for row in fact.rows:
        shares = " ".join(f"{share:.1%}" for share in row.acceptance.shares) if row.acceptance else "-"
        length = f"{row.acceptance.length:.2f}" if row.acceptance else "-"
        apart = "-" if row.divergence is None else f"{row.divergence:.4f}"
        rows.add_row(row.title, f"{row.perplexity:#.4g}", apart, shares, length)
    parts: list[RenderableType] = [rows]
    if fact.search:
        parts.append(_search(fact.search))
    if fact.candidates:
        parts.append(_candidates(fact))
    return Group(*parts, Text.from_markup("\n".join(_remarks(fact)) + "\n"))


def _search(search: SearchFact) -> RenderableType:
    """The plans that a search under a budget measured."""
    table = plain_table(f"plans for {search.budget}, measured on held-out text before calibration")
    table.add_column("", overflow="fold")
    for column in ("bytes", "bits", "predicted", "divergence", "kept"):
        table.add_column(column, justify="right", no_wrap=True)
    for plan in search.plans:
        kept = "-" if plan.kept is None else f"{plan.kept:.1%}"
        title = f"{plan.title}{', chosen' * plan.chosen}"
        figures = (f"{plan.bytes:,}", f"{plan.bits:.2f}", f"{plan.predicted:.4f}", f"{plan.divergence:.4f}", kept)
        table.add_row(escape(title), *figures)
    said = (
        f"{search.units:,} units; a better choice could save {search.gap:.1%} of the predicted loss at most.\n"
        "The recipe that was found is recipe.yaml in the output; it can be edited, and runs without a search.\n"
        "bits: of weights and scales, for each weight; kept: part of the release's acceptance.\n"
    )
    return Group(table, Text(said))


def _remarks(fact: CalibrationFact) -> list[str]:
    fewest = fact.coverage.fewest_tokens
    least = f"; the fewest, {fewest.tokens:,}, reached {escape(fewest.module)}" if fewest and fewest.tokens else ""
    batches = f", in batches of {fact.batch_size:,}" if fact.batch_size else ""
    lines = [
        f"Coverage: {fact.coverage.modules:,} modules calibrated on {fact.data.tokens:,} tokens{batches}{least}.",
        f"The quantized backbone chooses the released model's next token at {fact.agreement:.1%} of held-out slots.",
    ]
    if never := fact.coverage.never_routed:
        named = ", ".join(map(escape, never[:3])) + (", ..." if len(never) > 3 else "")
        lines.append(
            f"[yellow]never routed:[/] {len(never):,} expert module{'s' * (len(never) > 1)} that the router sent no "
            f"token, calibrated on all of them instead: {named}. More samples may reach them."
        )
    if fact.data.held_out_by == "model":
        lines.append("The released model wrote the answers of the held-out text itself.")
    if few := fact.coverage.few_tokens:
        named = ", ".join(map(escape, few[:3])) + (", ..." if len(few) > 3 else "")
        lines.append(
            f"[yellow]few tokens:[/] {len(few):,} expert module{'s' * (len(few) > 1)} calibrated on fewer tokens than "
            f"input channels: {named}. More samples, or calibration.experts: all, give them more."
        )
    if fact.tuned:
        lines.append(fact.tuned.says if fact.tuned.chosen else f"[yellow]not tuned:[/] {fact.tuned.says}")
    if fact.unmeasured:
        lines.append(f"[yellow]no acceptance:[/] {escape(fact.unmeasured)}")
    if fact.measured:
        lines.append("accepted: by position in the draft; length: tokens that a step yields, the target's included.")
    return lines


def _candidates(fact: CalibrationFact) -> RenderableType:
    budget = "" if fact.min_acceptance is None else f"; {fact.min_acceptance:.1%} must be kept"
    budget += "" if fact.confidence is None else f", at {fact.confidence:.0%} confidence"
    table = plain_table(f"candidates for the MTP block{budget}")
    table.add_column("policy", overflow="fold")
    for column in ("size", "kept", "at least", "length"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for each in fact.candidates:
        if each.acceptance is None:
            table.add_row(escape(each.title), "-", "-", "-", "-", f"[yellow]does not fit[/] {escape(each.refused)}")
            continue
        low = "-" if each.kept_at_least is None else f"{each.kept_at_least:.1%}"
        numbers = size_in_words(each.bytes), f"{each.kept:.1%}", low, f"{each.acceptance.length:.2f}"
        table.add_row(escape(each.title), *numbers, _verdict(each, fact))
    return table


def _verdict(candidate: CandidateFact, fact: CalibrationFact) -> str:
    verdict = fact.verdict_on(candidate)
    if verdict == "keeps too little":
        return f"[red]{verdict}[/]"
    if verdict == "too few slots to tell":
        needed = f": about {candidate.needed_slots:,} would" if candidate.needed_slots else ""
        return ("[green]chosen[/], stays as released; " if candidate.chosen else "") + f"[yellow]{verdict}[/]{needed}"
    return "[green]chosen[/]" if candidate.chosen else verdict


def _stored_as(tensor: TensorPlan) -> str:
    return "FP8 KV cache" if tensor.calibrated == "cache" else tensor.scheme or "plain"


def _from_batches(tensor: TensorPlan, algorithm: str) -> str:
    if tensor.tuned:
        return "weights and input scales, by training" if tensor.calibrated else "weights, by training"
    if tensor.calibrated == "weights":
        return f"weights, by {algorithm}"
    if tensor.calibrated == "scales":
        scales = ["input scales"] * bool(SCHEMES[tensor.scheme].extra)
        return " and ".join([*scales, *["importance of input channels"] * tensor.weighted])
    if tensor.calibrated == "cache":
        return "scales of keys and values"
    assert tensor.may_change and algorithm in RESCALING and REWRITES[algorithm]
    return f"perhaps rescaled, by {algorithm}"


def _in_words(policy: object) -> str:
    if isinstance(policy, dict):
        return ", ".join(f"{group}: {word}" for group, word in policy.items())
    return str(policy)
