"""What people see of a calibrated run: what it will do, and what it found.

In: a plan, or the calibration part of report.json. Out: tables and plain dictionaries. Nothing is
decided here.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..quantize.calibrate.mtp.facts import CalibrationFact, CandidateFact, SearchFact
from ..quantize.plan.plan import Plan, TensorPlan
from ..recipes.errors import printable, size_in_words
from ..recipes.family import QUANTIZABLE_ROLES
from ..recipes.find import calibration_name
from ..recipes.model_file import in_words
from ..recipes.schema import AUTO, TextsOfMix, candidates_for
from ..recipes.schemes import RESCALING, REWRITES, SCHEMES
from .tables import counted, figure, table


def will_do(plan: Plan) -> RenderableType:
    """The calibration of a plan: data, what batches contribute to which modules, and the MTP
    pass.
    """
    planned = will_do_json(plan)
    assert planned is not None
    lines = [_data(plan, planned["tokens"])]
    if planned["candidates"]:
        candidates = "; ".join(_in_words(policy) for policy in planned["candidates"])
        lines.append(
            "MTP block: auto. The smallest candidate that is shown to keep "
            f"{planned['min_acceptance']:.1%} of the released model's acceptance is written, at "
            f"{planned['confidence']:.0%} confidence; until then it is planned as bf16. "
            f"Candidates: {candidates}."
        )
    if (tuned := plan.recipe.mtp_tuned) is not None:
        lines.append(
            f"MTP block: tuned. It is trained for {tuned.steps:,} steps of {tuned.batch_size:,} "
            f"sequences on what the quantized backbone computes, as {_in_words(tuned.mtp)}, and "
            "written where it is shown to draft better than untrained, at "
            f"{plan.recipe.gates.confidence:.0%} confidence."
        )
    says = (
        "the block is run on the backbone's hidden states, and its acceptance is measured "
        "without a server."
    )
    if not planned["mtp_pass"]["possible"]:
        says = f"not possible, {planned['mtp_pass']['why']}; acceptance is not measured."
    text = Text("\n".join([*lines, f"MTP pass: {says}", ""]))
    columns = ("part", "modules", "stored as", "from batches", ">weights")
    rows = []
    for row in planned["groups"]:
        rows.append(
            [
                row["part"],
                row["modules"],
                row["stored_as"],
                row["from_batches"],
                f"{row['weights']:,}",
            ]
        )
    return (
        Group(table("calibration: what batches contribute", columns, rows), text) if rows else text
    )


def _data(plan: Plan, num_tokens: int) -> str:
    calibration = plan.recipe.calibration
    assert calibration is not None
    name = calibration_name(calibration)
    named = f"--calibration {name}: " if name else ""
    mix = "; ".join(_texts(texts, is_alone=not calibration.also) for texts in calibration.mix)
    own = (
        ", answered by the model itself if memory holds it"
        if calibration.held_out_by == "model"
        else ""
    )
    how = (
        f"{calibration.algorithm} ({in_words(calibration.knobs)})"
        if calibration.knobs
        else calibration.algorithm
    )
    how += " by modelopt" if calibration.backend == "modelopt" else ""
    return (
        f"{named}{how} on {calibration.samples:,} sequences of {calibration.sequence_length:,} "
        f"tokens ({num_tokens:,}) of {mix}; {calibration.held_out:,} more are held out to "
        f"measure on{own}."
    )


def _texts(texts: TextsOfMix, *, is_alone: bool) -> str:
    share = "" if is_alone else f"{texts.share:.0%} "
    subset = f", {texts.subset}" if texts.subset else ""
    return (
        f"{share}{texts.dataset} ({texts.dataset_revision}{subset}, split {texts.split}, column "
        f"{texts.column})"
    )


def will_do_json(plan: Plan) -> dict[str, Any] | None:
    """The same for machines; None for a plan without calibration. The dataset is in the recipe."""
    recipe, family = plan.recipe, plan.view.family
    if recipe.calibration is None or not plan.needs_batches:
        return None
    weights, mtp_groups = Counter[tuple[str, ...]](), set[str]()
    for tensor in plan.tensors:
        if tensor.part == "mtp" and tensor.role in QUANTIZABLE_ROLES:
            mtp_groups.add(tensor.role)
        if tensor.calibrated or tensor.may_change or tensor.tuned:
            stored = "FP8 KV cache" if tensor.calibrated == "cache" else tensor.scheme or "plain"
            gives = _from_batches(tensor, recipe.calibration.algorithm)
            weights[tensor.part, tensor.role, stored, gives] += 1
    names = ("part", "modules", "stored_as", "from_batches")
    auto, candidates = recipe.mtp_auto, []
    if auto is not None and recipe.mtp == AUTO:  # without the groups that the MTP block lacks
        candidates = list(candidates_for(auto.candidates, mtp_groups))
    return {
        "tokens": recipe.calibration.samples * recipe.calibration.sequence_length,
        "groups": [
            {**dict(zip(names, row, strict=True)), "weights": count}
            for row, count in sorted(weights.items())
        ],
        "candidates": candidates,
        "min_acceptance": auto.min_acceptance if auto else None,
        "confidence": recipe.gates.confidence if auto else None,
        "mtp_pass": {"possible": family.draft is not None, "why": family.no_draft},
    }


def _from_batches(tensor: TensorPlan, algorithm: str) -> str:
    if tensor.tuned:
        return (
            "weights and input scales, by training" if tensor.calibrated else "weights, by training"
        )
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


def found(fact: CalibrationFact) -> RenderableType:
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


def _search(search: SearchFact) -> Iterator[RenderableType]:
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


def _remarks(fact: CalibrationFact) -> Iterator[Text]:
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


def _candidates(fact: CalibrationFact) -> RenderableType:
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


def _verdict(candidate: CandidateFact, fact: CalibrationFact) -> Text:
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
