"""A plan for people and machines: fates, calibration, the entries of config.json, what a run reads
from the Hub, and what would stop it.

In: a plan. Out: tables on standard output, or one JSON value. Nothing is decided here.

Easy to get wrong: the JSON has no refusals. Only people see what would stop the run.
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
    if as_json:
        tables.print_json(plan_json(made) | {"needs": asdict(needs)})
    else:
        tables.show(_parts(made, needs))


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
        held = ", ".join(gpus) or "-"
        cells.append([fit.variant, fit.data or "none", size, held, str(minutes or "-")])
    if as_json:
        tables.print_json({"source": unchosen.source.where, "variants": rows})
        return
    columns = ("variant", "data", ">bytes", "GPUs that hold it", ">minutes")
    note = "Minutes are those of two cores; of a run with data they are not known."
    tables.show([table(str(unchosen.where), columns, cells), f"{note} Choose one with --scheme."])


def _parts(made: Plan, needs: Needs) -> Iterator[RenderableType]:
    rows = plan_rows(made)
    columns = ("part", "modules", "fate", ">tensors", ">before", ">after")
    yield table(f"{made.recipe.name}: {made.recipe.summary}", columns, _fates(rows))
    why = by_reason(
        (row["reason"], row["modules"]) for row in rows if not row["reason"].startswith("recipe:")
    )
    yield table(
        "why, where it is not the recipe's choice",
        ("", ""),
        ((modules, reason) for reason, modules in why.items()),
    )
    yield totals(made)
    yield ""
    yield f"carried: {', '.join(made.companions) or 'no other file'}"
    if code := code_left_out(made):
        yield code
    if made.source.left:
        yield f"left: {listed(made.source.left)}"
    yield ""
    if made.recipe.is_searched:
        yield from _budget(made)
    if made.needs_batches:
        yield from will_do(made)
        yield ""
    written = config_of(made)
    config = written.value
    yield "quantization_config, in vLLM's runtime names"  # a pattern is never broken
    for group in config.get("config_groups", {}).values():
        for target in group["targets"]:
            yield f"  {group['format']}  {target}"
    if "quant_algo" in config:
        yield f"  modelopt  {config['quant_algo']}"
        for name, row in config.get("quantized_layers", {}).items():
            yield f"  {row['quant_algo']}  {name}"
    for entry in config["ignore"]:
        yield f"  ignore  {entry}"
    yield ""
    yield f"served by: vLLM {minor(NEWEST)}, {written.line}"
    used = {(each.scheme, each.role == "experts") for each in made.tensors if each.scheme}
    kernels = KERNELS["kernels"]
    for scheme, is_routed in sorted(used):
        layers = ("linear modules", "routed experts")[is_routed]
        picked = kernels.get(f"{made.recipe.format} {scheme}", kernels[scheme])
        for kernel, gpus in picked[layers].items():
            yield f"  {scheme}, {layers}: {kernel} on {', '.join(gpus)}"
    yield ""
    yield from lines(needs)
    yield ""
    for refusal in refusals(made):
        yield Text.assemble(("Would be refused:", "yellow"), f" {printable(refusal)}")


def _fates(rows: list[Json]) -> Iterator[list[str] | None]:
    """Module groups by what becomes of them, with sizes before and after."""
    sums: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for row in rows:
        counts = {key: row[key] for key in ("tensors", "bytes_before", "bytes_after")}
        stored = row["stored_as"]
        fates = {
            "quantize": f"quantize to {stored}",
            "dequantize": f"{stored} from {row['stored_before']}",
            "add": "add a scale" if row["modules"] == "attention" else "add a copy",
            "drop": "drop",
            "keep": f"keep {stored}",
        }
        sums[row["part"], row["modules"], fates[row["fate"]]].update(counts)
    previous = ""
    for (part, modules, fate), total in sums.items():
        if previous not in ("", part):
            yield None
        sizes = size_in_words(total["bytes_before"]), size_in_words(total["bytes_after"])
        yield ["" if part == previous else part, modules, fate, f"{total['tensors']:,}", *sizes]
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
    return line


def next_steps(plan: Plan, folder: Path) -> Text:
    """Where the result is, and the command that serves it, alone on its line."""
    command = shlex.join(serve_words(str(folder), max(1, plan.view.num_mtp_layers)))
    schemes = sorted({t.scheme or "plain" for t in plan.mtp if len(t.shape) >= 2})
    block = f"stored as {', '.join(schemes)}"
    if schemes == ["plain"]:
        dtypes = Counter(output.dtype for tensor in plan.mtp for output in tensor.outputs)
        block = f"kept in {dtypes.most_common(1)[0][0]}"
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
        stored = tensor.scheme or "/".join(sorted({each.dtype for each in tensor.outputs})) or "-"
        groups[tensor.part, tensor.role, tensor.fate, stored, tensor.form, tensor.reason].append(
            tensor
        )
    rows = []
    for (part, role, fate, stored, form, reason), tensors in sorted(groups.items()):
        # A copy that is added has the bytes of its original, which are counted there.
        num_before = 0
        if fate != "add":
            num_before = plan.num_bytes_read(tensors)
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
                "bytes_after": sum(
                    output.num_bytes for tensor in tensors for output in tensor.outputs
                ),
            }
        )
    return rows


def budget_json(plan: Plan) -> Json:
    """What is known of a search before it: the budget, the units, and the sizes that are
    possible.
    """
    choices = choices_of(plan.recipe, plan.source)
    assert plan.recipe.backbone_auto is not None
    words = {word: choices.uniform(word) for word in plan.recipe.backbone_auto.candidates}
    sizes = {}
    for name, each in {"smallest": choices.smallest, **words, "largest": choices.largest}.items():
        sizes[name] = {
            "bytes": choices.num_bytes(each),
            "bits": round(choices.bits(each), 4),
            "fits": choices.fits(each),
        }
    return {"budget": plan.recipe.budget, "units": len(choices.units), "plans": sizes}


def _budget(plan: Plan) -> Iterator[str]:
    """The same for people; one word for all units is that for those that it suits."""
    found = budget_json(plan)
    yield (
        f"Budget {found['budget']}: a search chooses the words of {found['units']} units. All "
        "files would have"
    )
    for name, size in found["plans"].items():
        yield (
            f"  {name:<12} {size['bytes']:>19,} bytes  {size['bits']:>6.2f} bits a weight  "
            f"{'fits' if size['fits'] else 'does not fit'}"
        )
    yield ""


def plan_json(plan: Plan) -> Json:
    """A plan for machines: totals, rows by module group, the quantization_config, and the
    calibration.
    """
    config = config_of(plan)
    other = plan.source.mtp_source
    told = {
        "recipe": plan.recipe.model_dump(mode="json"),
        "source": {"name": plan.source.where, "revision": plan.source.revision},
        "tensors": {"before": len(plan.entries), "after": plan.num_outputs},
        "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
        "shards": len(plan.shards),
        "carried": list(plan.companions),
        "left": [*(() if plan.trust_remote_code else plan.source.code), *plan.source.left],
        "mtp_layers": plan.view.num_mtp_layers,
        "needs_calibration": plan.needs_calibration,
        "groups": plan_rows(plan),
        "quantization_config": config.value,
        "sglang": {"version": VERSION, "obstacles": list(config.obstacles)},
        "calibration": will_do_json(plan),
    }
    if other is not None:
        told["mtp_source"] = {"name": other.where, "revision": other.revision}
    if plan.recipe.is_searched:
        told["search"] = budget_json(plan)
    return told


def will_do(plan: Plan) -> Iterator[str]:
    """The calibration of a plan: data, what is chosen by measuring, and the MTP pass."""
    planned = will_do_json(plan)
    assert planned is not None
    yield _data(plan, planned["tokens"])
    if planned["candidates"]:
        candidates = "; ".join(map(on_one_line, planned["candidates"]))
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
    says = (
        "the block is run on the backbone's hidden states, and its acceptance is measured "
        "without a server."
    )
    if not planned["mtp_pass"]["possible"]:
        says = f"not possible, {planned['mtp_pass']['why']}; acceptance is not measured."
    yield f"MTP pass: {says}"


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
        of = filter(None, (texts.dataset_revision, texts.subset, f"split {texts.split}"))
        named = f"{texts.dataset} ({', '.join(of)}, column {texts.column})"
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
    read = [(source.where, source.revision)]
    if other is not None:
        read.append((f"the MTP block of {other.where}", other.revision))
    for texts in calibration.mix if calibration is not None and plan.needs_batches else ():
        name = texts.dataset
        asked = texts.dataset_revision
        if asked != _LOCAL and find_path(name) is None and name.count("/") == 1:
            commit = dataset_commit(name, asked, f"calibration.dataset {name}")
            read.append((f"dataset {name}", commit))
    line = ", ".join(f"{what} at commit {commit}" for what, commit in read if commit != _LOCAL)
    return line and f"reads {line}"
