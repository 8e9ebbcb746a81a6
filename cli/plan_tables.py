"""A plan for people and machines: fates, calibration, the entries of config.json, what a run reads
from the Hub, and what would stop it.

In: a plan. Out: tables on standard output, or one JSON value. Nothing is decided here.
"""

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from ..checkpoints.hub import dataset_commit
from ..checkpoints.identity import listed
from ..quantize.needs.needs import Needs, lines
from ..quantize.plan.checkpoint_as_model import NoSchemeError
from ..quantize.plan.choices import choices_of
from ..quantize.plan.configs import config_of
from ..quantize.plan.own_code import code_left_out
from ..quantize.plan.plan import Plan, TensorPlan
from ..quantize.write.refusals import refusals
from ..recipes.errors import printable, size_in_words
from ..recipes.family import QUANTIZABLE_ROLES
from ..recipes.frozen import Json
from ..recipes.model_file import find_path, in_words
from ..recipes.runtimes.sglang import VERSION
from ..recipes.runtimes.vllm import KERNELS, NEWEST, minor
from ..recipes.schema import AUTO, candidates_for
from ..recipes.yaml_file import on_one_line
from ..validate.measure.serve_line import serve_words
from ..validate.report.provenance import gpus_of
from . import tables
from .tables import by_reason, counted, table

_LOCAL = "local"
# MiMo-7B, 15.7 GB, takes 44 to 54 s on two cores: docs/benchmarks.md.
_BYTES_A_MINUTE = 17 * 10**9


def show(made: Plan, needs: Needs, *, as_json: bool) -> None:
    """Print a plan and what it needs, and for people also what would stop the run."""
    value = plan_json(made)
    tables.answer(value | {"needs": asdict(needs)}, _parts(made, value, needs), as_json=as_json)


def show_fits(unchosen: NoSchemeError, *, as_json: bool) -> None:
    """What can be made of a checkpoint: a row for each variant, whose minutes are known where no
    data is needed.
    """
    rows = []
    cells = []
    for fit in unchosen.fits:
        gpus = [f"{count} x {name}" for count, name, _ in gpus_of(unchosen.source, fit.num_bytes)]
        minutes = None
        if not fit.data:
            minutes = 1 + fit.num_bytes_before // _BYTES_A_MINUTE
        rows.append(asdict(fit) | {"gpus": gpus, "minutes": minutes})
        size = size_in_words(fit.num_bytes)
        held_by = ", ".join(gpus) or "-"
        cells.append([fit.variant, fit.data or "none", size, held_by, str(minutes or "-")])
    columns = ("variant", "data", ">bytes", "GPUs that hold it", ">minutes")
    note = "Minutes are those of two cores; of a run with data they are not known."
    parts = [table(str(unchosen.where), columns, cells), f"{note} Choose one with --scheme."]
    value = {"source": unchosen.source.where, "variants": rows}
    tables.answer(value, parts, as_json=as_json)


def _parts(made: Plan, value: Json, needs: Needs) -> Iterator[RenderableType]:
    """For people: what `plan_json` says, and what only they read."""
    columns = ("part", "modules", "fate", ">tensors", ">before", ">after")
    yield table(f"{made.recipe.name}: {made.recipe.summary}", columns, _fates(value["groups"]))
    chosen_elsewhere = []
    for group in value["groups"]:
        if not group["reason"].startswith("recipe:"):
            chosen_elsewhere.append((group["reason"], group["modules"]))
    why = [(modules, reason) for reason, modules in by_reason(chosen_elsewhere).items()]
    yield table("why, where it is not the recipe's choice", ("", ""), why)
    yield totals(made)
    yield ""
    yield f"carried: {', '.join(made.companions) or 'no other file'}"
    if code := code_left_out(made):
        yield code
    if made.source.left:
        yield f"left: {listed(made.source.left)}"
    yield ""
    if "search" in value:
        yield from _budget(value["search"])
    if calibration := value["calibration"]:
        yield from _will_do(made, calibration)
        yield ""
    yield "quantization_config, in vLLM's runtime names"
    yield from _entries(value["quantization_config"])
    yield ""
    yield from _served_by(made)
    yield ""
    yield from lines(needs)
    yield ""
    # The JSON has no refusals: only people see what would stop the run.
    for refusal in refusals(made):
        yield Text.assemble(("Would be refused:", "yellow"), f" {printable(refusal)}")


def _entries(config: Json) -> Iterator[str]:
    """Each entry of quantization_config on a line of its own, since a pattern is never broken."""
    for group in config.get("config_groups", {}).values():
        for target in group["targets"]:
            yield f"  {group['format']}  {target}"
    if "quant_algo" in config:
        yield f"  modelopt  {config['quant_algo']}"
        for name, layer in config.get("quantized_layers", {}).items():
            yield f"  {layer['quant_algo']}  {name}"
    for entry in config["ignore"]:
        yield f"  ignore  {entry}"


def _served_by(made: Plan) -> Iterator[str]:
    """The servers, and vLLM's kernel for each scheme on each GPU."""
    yield f"served by: vLLM {minor(NEWEST)}, {config_of(made).line}"
    used = {(tensor.scheme, tensor.role == "experts") for tensor in made.tensors if tensor.scheme}
    kernels = KERNELS["kernels"]
    for scheme, is_routed in sorted(used):
        layers = "linear modules"
        if is_routed:
            layers = "routed experts"
        # The recipe's format may have kernels of its own for the scheme.
        picked = kernels.get(f"{made.recipe.format} {scheme}", kernels[scheme])
        for kernel, gpus in picked[layers].items():
            yield f"  {scheme}, {layers}: {kernel} on {', '.join(gpus)}"


def _fates(groups: list[Json]) -> Iterator[list[str] | None]:
    """Module groups by what becomes of them, with sizes before and after."""
    sums: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for group in groups:
        stored = group["stored_as"]
        added = "a copy"
        if group["modules"] == "attention":
            added = "a scale"
        fates = {
            "quantize": f"quantize to {stored}",
            "dequantize": f"{stored} from {group['stored_before']}",
            "add": f"add {added}",
            "drop": "drop",
            "keep": f"keep {stored}",
        }
        total = sums[group["part"], group["modules"], fates[group["fate"]]]
        for key in ("tensors", "bytes_before", "bytes_after"):
            total[key] += group[key]
    previous = ""
    for (part, modules, fate), total in sums.items():
        shown = part
        if part == previous:
            shown = ""
        elif previous:
            yield None
        before = size_in_words(total["bytes_before"])
        after = size_in_words(total["bytes_after"])
        yield [shown, modules, fate, f"{total['tensors']:,}", before, after]
        previous = part


def totals(plan: Plan) -> str:
    """A plan in one line: its source, tensors, bytes, shards and MTP layers."""
    source = plan.source
    other = source.mtp_source
    line = (
        f"{source.where} ({source.revision}): {len(plan.entries):,} tensors in, "
        f"{plan.num_outputs:,} out; "
        f"{size_in_words(plan.num_bytes_before)} -> {size_in_words(plan.num_bytes_after)} in "
        f"{counted(len(plan.shards), 'shard')}; {counted(plan.view.num_mtp_layers, 'MTP layer')}"
    )
    if other is not None:
        line += f" of {other.where} ({other.revision})"
    if plan.served is not None:
        links = [shard for shard in plan.shards if shard.is_link]
        stays = size_in_words(plan.num_bytes_staying)
        line += f"; {stays} stay byte for byte, {len(links)} of {len(plan.shards)} shards as links"
    return line


def next_steps(plan: Plan, folder: Path) -> Text:
    """Where the result is, and the command that serves it, alone on its line."""
    command = shlex.join(serve_words(str(folder), max(1, plan.view.num_mtp_layers)))
    schemes = {tensor.scheme or "plain" for tensor in plan.mtp if len(tensor.shape) >= 2}
    block = f"stored as {', '.join(sorted(schemes))}"
    if schemes == {"plain"}:
        dtypes = Counter[str]()
        for tensor in plan.mtp:
            dtypes.update(output.dtype for output in tensor.outputs)
        ((most, _),) = dtypes.most_common(1)
        block = f"kept in {most}"
    if any(tensor.tuned for tensor in plan.tensors):
        block = f"tuned, {block}"
    size = size_in_words(plan.num_bytes_after)
    if plan.recipe.kv_cache:
        size += ", FP8 KV cache"
    return Text(f"{printable(str(folder))}: {size}, MTP block {block}. Serve it:\n  {command}")


def plan_rows(plan: Plan) -> list[Json]:
    """The plan by part, module group, fate and reason, with counts and bytes."""
    groups: dict[tuple[str, ...], list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        dtypes = {output.dtype for output in tensor.outputs}
        stored = tensor.scheme or "/".join(sorted(dtypes)) or "-"
        key = (tensor.part, tensor.role, tensor.fate, stored, tensor.form, tensor.reason)
        groups[key].append(tensor)
    rows = []
    for (part, role, fate, stored, form, reason), tensors in sorted(groups.items()):
        # A copy that is added has the bytes of its original, which are counted there.
        num_before = 0
        if fate != "add":
            num_before = plan.num_bytes_read(tensors)
        num_after = 0
        for tensor in tensors:
            num_after += sum(output.num_bytes for output in tensor.outputs)
        rows.append(
            {
                "part": part,
                "modules": role,
                "fate": fate,
                "stored_before": form,
                "stored_as": stored,
                "reason": reason,
                "tensors": len(tensors),
                "bytes_before": num_before,
                "bytes_after": num_after,
            }
        )
    return rows


def budget_json(plan: Plan) -> Json:
    """What is known of a search before it: the budget, the units, and the sizes that are
    possible.
    """
    choices = choices_of(plan.recipe, plan.source)
    assert plan.recipe.backbone_auto is not None
    # A word for all units is that for those that it suits.
    possible = {"smallest": choices.smallest}
    for word in plan.recipe.backbone_auto.candidates:
        possible[word] = choices.uniform(word)
    possible["largest"] = choices.largest
    sizes = {}
    for name, choice in possible.items():
        sizes[name] = {
            "bytes": choices.num_bytes(choice),
            "bits": round(choices.bits(choice), 4),
            "fits": choices.fits(choice),
        }
    return {"budget": plan.recipe.budget, "units": len(choices.units), "plans": sizes}


def _budget(search: Json) -> Iterator[str]:
    """The same for people."""
    yield (
        f"Budget {search['budget']}: a search chooses the words of {search['units']} units. All "
        "files would have"
    )
    for name, size in search["plans"].items():
        fits = "does not fit"
        if size["fits"]:
            fits = "fits"
        yield f"  {name:<12} {size['bytes']:>19,} bytes  {size['bits']:>6.2f} bits a weight  {fits}"
    yield ""


def plan_json(plan: Plan) -> Json:
    """A plan for machines: totals, rows by module group, the quantization_config, and the
    calibration.
    """
    config = config_of(plan)
    other = plan.source.mtp_source
    left = list(plan.source.left)
    if not plan.trust_remote_code:
        left = [*plan.source.code, *left]
    value = {
        "recipe": plan.recipe.model_dump(mode="json"),
        "source": {"name": plan.source.where, "revision": plan.source.revision},
        "tensors": {"before": len(plan.entries), "after": plan.num_outputs},
        "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
        "shards": len(plan.shards),
        "carried": list(plan.companions),
        "left": left,
        "mtp_layers": plan.view.num_mtp_layers,
        "needs_calibration": plan.needs_calibration,
        "groups": plan_rows(plan),
        "quantization_config": config.value,
        "sglang": {"version": VERSION, "obstacles": list(config.obstacles)},
        "calibration": will_do_json(plan),
    }
    if other is not None:
        value["mtp_source"] = {"name": other.where, "revision": other.revision}
    if plan.served is not None:
        links = [shard.file for shard in plan.shards if shard.is_link]
        value["stays"] = {"bytes": plan.num_bytes_staying, "links": links}
    if plan.recipe.is_searched:
        value["search"] = budget_json(plan)
    return value


def _will_do(plan: Plan, planned: Json) -> Iterator[str]:
    """The calibration of a plan: data, what is chosen by measuring, and the MTP pass."""
    yield _data(plan, planned["tokens"])
    if planned["candidates"]:
        candidates = "; ".join(on_one_line(words) for words in planned["candidates"])
        yield (
            "MTP block: auto. The smallest candidate that is shown to keep "
            f"{planned['min_acceptance']:.1%} of the released model's acceptance is written, at "
            f"{planned['confidence']:.0%} confidence; until then it is planned as bf16. "
            f"Candidates: {candidates}."
        )
    if (tuned := plan.recipe.mtp_tuned) is not None:
        yield (
            f"MTP block: tuned. It is trained for {tuned.steps:,} steps of {tuned.batch_size:,} "
            f"sequences on what the quantized backbone computes, as {on_one_line(tuned.mtp)}, and "
            "written where it is shown to draft better than untrained, at "
            f"{plan.recipe.gates.confidence:.0%} confidence."
        )
        if tuned.guard:
            kinds = ", ".join(texts.title for texts in tuned.guard)
            yield f"Guards: it may not be worse on {kinds} either; none of that is trained on."
        elif not plan.calibration.also:
            yield "It will be judged on one kind of text alone; mtp_tuned.guard names others."
    if planned["mtp_pass"]["possible"]:
        yield (
            "MTP pass: the block is run on the backbone's hidden states, and its acceptance is "
            "measured without a server."
        )
    else:
        why = planned["mtp_pass"]["why"]
        yield f"MTP pass: not possible, {why}; acceptance is not measured."


def _data(plan: Plan, num_tokens: int) -> str:
    calibration = plan.recipe.calibration
    assert calibration is not None
    how = calibration.algorithm
    if calibration.knobs:
        how += f" ({in_words(calibration.knobs)})"
    if calibration.backend == "modelopt":
        how += " by modelopt"
    mix = []
    for texts in calibration.mix:
        subset = ""
        if texts.subset:
            subset = f"{texts.subset}, "
        rows = f"{texts.dataset_revision}, {subset}split {texts.split}, column {texts.column}"
        named = f"{texts.dataset} ({rows})"
        if calibration.also:
            named = f"{texts.share:.0%} {named}"
        mix.append(named)
    held_out = f"{calibration.held_out:,} more are held out to measure on"
    if calibration.held_out_by == "model":
        held_out += ", answered by the model itself if memory holds it"
    return (
        f"{how} on {calibration.samples:,} sequences of {calibration.sequence_length:,} "
        f"tokens ({num_tokens:,}) of {'; '.join(mix)}; {held_out}."
    )


def will_do_json(plan: Plan) -> Json | None:
    """The same for machines; None for a plan without calibration. The dataset is in the recipe."""
    recipe = plan.recipe
    family = plan.view.family
    if recipe.calibration is None or not plan.needs_batches:
        return None
    auto = recipe.mtp_auto
    candidates = []
    if auto is not None and recipe.mtp == AUTO:  # without the groups that the MTP block lacks
        groups = {t.role for t in plan.mtp}.intersection(QUANTIZABLE_ROLES)
        candidates = list(candidates_for(auto.candidates, groups))
    return {
        "tokens": recipe.calibration.samples * recipe.calibration.sequence_length,
        "candidates": candidates,
        "min_acceptance": auto and auto.min_acceptance,
        "confidence": auto and recipe.gates.confidence,
        "mtp_pass": {"possible": family.draft is not None, "why": family.no_draft},
    }


def commits_line(plan: Plan) -> str:
    """The commits of model and dataset; "" where nothing is from the Hub.

    Raises:
        RecipeError: the dataset is on the Hub, and this machine cannot read it.
    """
    source = plan.source
    other = source.mtp_source
    calibration = plan.recipe.calibration
    commits = [(source.where, source.revision)]
    if other is not None:
        commits.append((f"the MTP block of {other.where}", other.revision))
    if calibration is not None and plan.needs_batches:
        for texts in calibration.mix:
            name = texts.dataset
            asked = texts.dataset_revision
            if asked != _LOCAL and find_path(name) is None and name.count("/") == 1:
                commit = dataset_commit(name, asked, f"calibration.dataset {name}")
                commits.append((f"dataset {name}", commit))
    read = [f"{what} at commit {commit}" for what, commit in commits if commit != _LOCAL]
    if not read:
        return ""
    return f"reads {', '.join(read)}"
