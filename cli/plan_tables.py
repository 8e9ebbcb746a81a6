"""A plan for people and machines: fates, calibration, the entries of config.json, what a run reads
from the Hub, and what would stop it.

In: a plan. Out: tables on standard output, or one JSON value. Nothing is decided here.
"""

import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from math import ceil
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from ..checkpoints.hub import dataset_commit
from ..checkpoints.identity import listed
from ..checkpoints.safetensors_file import total_bytes
from ..checkpoints.source import Source, donor_files
from ..quantize.needs.kv_cache import kv_bytes
from ..quantize.needs.needs import Machine, lines, machine_of, needs_of
from ..quantize.plan.checkpoint_as_model import NoSchemeError
from ..quantize.plan.configs import config_of
from ..quantize.plan.own_code import code_left_out
from ..quantize.plan.plan import Plan, TensorPlan
from ..quantize.write.refusals import not_installed, refusals
from ..recipes import tensor_parallel
from ..recipes.errors import counted, printable, size_in_words
from ..recipes.frozen import Json
from ..recipes.model_file import find_path
from ..recipes.runtimes.vllm import NEWEST, minor
from ..recipes.schemes import SCHEMES
from ..validate.facts.vllm_env import gpus_here
from ..validate.measure.room import least_gpus
from ..validate.report.provenance import gpus_of
from . import tables
from .tables import by_reason, in_words, table

_LOCAL = "local"
# The keys by which tensors are grouped into rows.
_ROW = ("part", "modules", "fate", "stored_before", "stored_as", "reason")


def show(made: Plan, *, as_json: bool, gpu_memory: str | None = None) -> None:
    """Print a plan and what it needs, here or with such GPUs, and for people also what would stop
    the run.
    """
    machine = machine_of(gpu_memory, here=gpus_here())
    value = plan_json(made)
    room = _room(made, machine.memory)
    refused = refusals(made)
    parts = _parts(made, value, machine, room, refused)
    value |= {"needs": asdict(needs_of(made, machine)) | room}
    status = 0
    if refused:
        status = 2
    tables.answer(value, parts, as_json=as_json, status=status)


def show_fits(unchosen: NoSchemeError, *, as_json: bool) -> None:
    """What can be made of a checkpoint: a row for each variant."""
    rows = []
    cells = []
    for fit in unchosen.fits:
        gpus = [f"{count} x {name}" for count, name in gpus_of(fit.tps, fit.num_bytes)]
        rows.append(asdict(fit) | {"gpus": gpus})
        size = size_in_words(fit.num_bytes)
        held_by = ", ".join(gpus) or "-"
        cells.append([fit.variant, fit.data or "none", size, held_by])
    columns = ("variant", "data", ">bytes", "GPUs that hold it")
    parts = [table(str(unchosen.where), columns, cells), "Choose one with --scheme."]
    tables.answer({"source": unchosen.source.where, "variants": rows}, parts, as_json=as_json)


def _parts(
    made: Plan, value: Json, machine: Machine, room: Json, refused: list[str]
) -> Iterator[RenderableType]:
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
    code = code_left_out(made)
    if code:
        yield code
    if made.source.left:
        yield f"left: {listed(made.source.left)}"
    if made.recipe.is_searched:
        yield f"searched under {made.recipe.budget}, from BF16"
    if made.needs_batches:
        yield ""
        settings = made.calibration.model_dump(mode="json", exclude_defaults=True)
        yield f"calibration: {in_words(settings)}"
    yield ""
    yield from _served_by(made)
    yield ""
    yield from lines(needs_of(made, machine))
    yield ""
    if room["gpus"]:
        yield from _on_gpus(room, machine.title)
        yield ""
    # The JSON has no refusals: only people see what would stop the run.
    for refusal in refused:
        yield Text.assemble(("Would be refused:", "yellow"), f" {printable(refusal)}")
    # Another machine may have it.
    for lack in not_installed(made):
        yield Text.assemble(("Not installed:", "yellow"), f" {printable(lack)}")


def _room(made: Plan, memory: int) -> Json:
    """On how few GPUs the weights fit; what these and a token of the KV cache take of each."""
    sizes = tensor_parallel.sizes_of(made.view.text_config, made.cuts)
    size = memory and least_gpus(sizes, made.num_bytes_after, memory)
    room: Json = {"gpus": size, "weights": None, "kv_token": None, "kv_token_draft": None}
    if size:
        room["weights"] = ceil(made.num_bytes_after / size)
        width = 1 if made.recipe.kv_cache else 2
        counted_bytes = kv_bytes(made.view, tp=size, width=width)
        if counted_bytes:
            room["kv_token"], room["kv_token_draft"] = counted_bytes
    return room


def _on_gpus(room: Json, machine: str) -> Iterator[str]:
    """The same, for people."""
    cache = "the KV cache is not counted for this attention"
    if room["kv_token"]:
        drafting = size_in_words(room["kv_token"] + room["kv_token_draft"])
        cache = (
            f"a token of the KV cache takes {size_in_words(room['kv_token'])}, drafting {drafting}"
        )
    weights = size_in_words(room["weights"])
    yield f"served on {room['gpus']} x {machine}: on each {weights} of weights"
    yield f"  {cache}"


def _served_by(made: Plan) -> Iterator[str]:
    """The servers, and the GPUs that compute each scheme."""
    line = config_of(made).line
    if made.is_draft_alone:
        line = "with its target"
    yield f"served by: vLLM {minor(NEWEST)}, {line}"
    yield f"  {tensor_parallel.in_words(made.view.text_config, made.cuts)}"
    for scheme in sorted({tensor.scheme for tensor in made.tensors}):
        if scheme and SCHEMES[scheme].inputs:
            yield f"  {scheme} runs on {SCHEMES[scheme].hardware}"
    for gpu, backend in made.view.family.attention_backends.items():
        yield f"  on {gpu} with --attention-backend {backend}"


def _fates(rows: list[Json]) -> Iterator[list[str] | None]:
    """The rows of a plan, with a line before the MTP block."""
    part = rows[0]["part"]
    for row in rows:
        if row["part"] != part:
            part = row["part"]
            yield None
        fate = f"{row['fate']} {row['stored_as']}"
        if row["fate"] == "dequantize":
            fate += f" from {row['stored_before']}"
        sizes = [size_in_words(row["bytes_before"]), size_in_words(row["bytes_after"])]
        yield [part, row["modules"], fate, f"{row['tensors']:,}", *sizes]


def totals(plan: Plan) -> str:
    """A plan in one line: its source, tensors, bytes, shards and MTP layers."""
    source = plan.source
    line = (
        f"{source.where} ({source.revision}): {counted(len(plan.entries), 'tensor')} in, "
        f"{plan.num_outputs:,} out; "
        f"{size_in_words(plan.num_bytes_before)} -> {size_in_words(plan.num_bytes_after)} in "
        f"{counted(len(plan.shards), 'shard')}; {plan.view.drafter}"
    )
    if plan.is_draft_alone:
        line += "; the block alone"
    elif plan.keeps_shards:
        links = [shard for shard in plan.shards if shard.is_link]
        stays = size_in_words(plan.num_bytes_staying)
        how = "as links"
        if plan.changed_only:
            how = "where they are"
        line += f"; {stays} stay byte for byte, {len(links)} of {len(plan.shards)} shards {how}"
    for group, donor in source.donors.items():
        size = size_in_words(plan.num_bytes_given[donor_files(group)])
        line += f"; {group} from {donor.where} ({donor.revision}): {size}"
    return line


def next_steps(plan: Plan, folder: Path) -> Text:
    """Where the result is, and the command that serves it, alone on its line."""
    if plan.changed_only:
        repo = plan.source.where
        size = size_in_words(total_bytes(plan.written))
        upload = shlex.join(("hf", "upload", repo, str(folder), ".", "--create-pr"))
        return Text(f"{printable(str(folder))}: {size} for {repo}. Propose it:\n  {upload}")
    words = [str(folder)]
    if plan.is_draft_alone:
        target = plan.target.where if plan.target else "TARGET"
        words = [target, "--draft", *words]
    command = shlex.join(["keepmtp", "serve", *words])
    forms = {_stored(tensor) for tensor in plan.mtp if len(tensor.shape) >= 2}
    block = ", ".join(sorted(forms))
    size = size_in_words(plan.num_bytes_after)
    return Text(f"{printable(str(folder))}: {size}, MTP block {block}. Serve it:\n  {command}")


def _stored(tensor: TensorPlan) -> str:
    dtypes = {output.dtype for output in tensor.outputs}
    return tensor.scheme or "/".join(sorted(dtypes)) or "-"


def plan_rows(plan: Plan) -> list[Json]:
    """The plan by part, module group, fate and reason, with counts and bytes."""
    groups: dict[tuple[str, ...], list[TensorPlan]] = defaultdict(list)
    for tensor in plan.tensors:
        key = (tensor.part, tensor.role, tensor.fate, tensor.form, _stored(tensor), tensor.reason)
        groups[key].append(tensor)
    rows = []
    for key, tensors in sorted(groups.items()):
        row: Json = dict(zip(_ROW, key, strict=True))
        row |= {"tensors": len(tensors), "bytes_before": 0}
        # A copy that is added has the bytes of its original, which are counted there.
        if row["fate"] != "add":
            row["bytes_before"] = plan.num_bytes_read(tensors)
        row["bytes_after"] = sum(
            output.num_bytes for tensor in tensors for output in tensor.outputs
        )
        rows.append(row)
    return rows


def plan_json(plan: Plan) -> Json:
    """A plan for machines: totals, rows by module group, and the quantization_config."""
    config = config_of(plan)
    left = list(plan.source.left)
    if not plan.trust_remote_code:
        left = [*plan.source.code, *left]
    value = {
        "recipe": plan.recipe,
        "source": _named(plan.source),
        "tensors": {"before": len(plan.entries), "after": plan.num_outputs},
        "bytes": {"before": plan.num_bytes_before, "after": plan.num_bytes_after},
        "shards": len(plan.shards),
        "carried": list(plan.companions),
        "left": left,
        "mtp_layers": plan.view.num_mtp_layers,
        "needs_calibration": plan.needs_calibration,
        "groups": plan_rows(plan),
        "quantization_config": config.value,
        **config.other_servers,
    }
    for group, donor in plan.source.donors.items():
        given = {"bytes": plan.num_bytes_given[donor_files(group)]}
        value.setdefault("from", {})[group] = _named(donor) | given
    if plan.keeps_shards:
        links = [shard.file for shard in plan.shards if shard.is_link]
        value["stays"] = {"bytes": plan.num_bytes_staying, "links": links}
    return value


def _named(source: Source) -> Json:
    return {"name": source.where, "revision": source.revision}


def commits_line(plan: Plan) -> str:
    """The commits of the datasets; "" where none is from the Hub.

    Raises:
        RecipeError: a dataset is on the Hub, and this machine cannot read it.
    """
    commits = []
    calibration = plan.recipe.calibration
    if calibration is not None and plan.needs_batches:
        for texts in calibration.mix:
            name = texts.dataset
            asked = texts.dataset_revision
            if asked != _LOCAL and find_path(name) is None and name.count("/") == 1:
                commit = dataset_commit(name, asked, f"calibration.dataset {name}")
                commits.append(f"dataset {name} at commit {commit}")
    return ", ".join(commits)
