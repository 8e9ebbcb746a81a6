"""`keepmtp convert`: a finished checkpoint in the other dialect, compressed-tensors' or modelopt's.

In: a folder and a dialect. Out: a `Conversion`, which says all that will be written before a byte
is; then a new folder. It is the plan of `keepmtp quantize` in which every group is `source` and
`format` is the other one: packed bytes are copied from file to file under their new names, scales
of a module are re-expressed, shards in which nothing changes are hard links.

Easy to get wrong: the plan knows dtypes, and only values say whether BF16 holds them. And the way
back: 1 / (1 / x) is not x for one F32 in seven, but its neighbour.
"""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..checkpoints.companions import HF_QUANT_CONFIG
from ..checkpoints.dialects.choose import UNQUANTIZED
from ..checkpoints.values import read_tensor
from ..quantize.pack.unit import carried
from ..quantize.plan.checkpoint_as_model import changed_recipe, family_mapping
from ..quantize.plan.configs import files_of
from ..quantize.plan.plan import Plan, make_plan
from ..quantize.plan.tensor_plan import Output, same_output
from ..recipes.conventions import FORMATS, Format
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.frozen import Advance, nowhere
from ..validate.check.check import examine
from ..validate.facts.findings import errors_of
from .proposal import CONFIG, Edit, Proposal
from .rewritten import Rewritten, rewrite, write_planned


@dataclass(frozen=True)
class Conversion:
    """What will be written.

    Attributes:
        first: the checkpoint's dialect; the new one is the format of the plan's recipe.
        plan: of the whole checkpoint.
        proposal: the checkpoint as it will be; an edit for each tensor that gets another name,
            another form or other bytes.
        num_remade: tensors whose values are written anew.
    """

    first: str
    plan: Plan
    proposal: Proposal
    num_remade: int


def plan_conversion(where: str, to: Format) -> Conversion:
    """Decide everything about a conversion; only scales that are re-expressed are read.

    Args:
        where: a checkpoint's folder.
        to: the dialect that it will have.

    Raises:
        RecipeError: a Hub repository, or a form that the other dialect has no word for.
        CheckpointError: it does not pass its own check, it is not in the other one of the two
            dialects, or a scale has a value that cannot be re-expressed.
    """
    checked = examine(where)
    source = checked.readable()
    for found in errors_of(checked.data.findings):
        raise CheckpointError(
            f"{where}: {found.where}",
            "must pass its own check before it is converted",
            got=found.says,
            cure=found.cure,
        )
    if source.folder is None:
        raise RecipeError(
            where,
            "what is converted must be a folder here",
            got="a Hub repository",
            cure="Download it: `hf download` puts a repository into a folder",
        )
    raw = family_mapping(source)
    assert checked.runtime is not None, f"{where}: no family"
    first = checked.runtime.dialect.name
    if {first, to} != {*FORMATS}:
        got = first
        cure = "Quantize the original release anew"
        if to == "compressed-tensors" and first != UNQUANTIZED.name:
            cure = f"Run `keepmtp quantize {shlex.quote(where)} --set format={to}`"
        if first == to:
            got = f"one in {to} already"
            cure = "There is nothing to do"
        rule = f"only {' and '.join(FORMATS)} are converted into each other"
        raise CheckpointError(where, rule, got=got, cure=cure)
    recipe, source = changed_recipe(source, raw, [f"format={to}"])
    plan = make_plan(recipe, source)
    proposal = Proposal(source)
    why = f"so {to} has it"
    plan, num_remade = _with_values(plan, proposal, why)
    again = {shard.file: shard.entries for shard in plan.written}
    files = {entry.file for entry in source.entries.values()}
    files -= {shard.file for shard in plan.linked}
    proposal.put_shards(
        [entry for entry in plan.entries.values() if entry.file in files], again, why
    )
    configs = files_of(plan)
    for name in (CONFIG, HF_QUANT_CONFIG):
        proposal.set(name, (), configs.get(name), why)
    return Conversion(first, plan, proposal, num_remade)


def convert(planned: Conversion, out: Path, *, progress: Advance = nowhere) -> Rewritten:
    """Write the new folder; a run that was killed is continued by the same call, with the same
    bytes.

    Args:
        planned: what is written.
        out: where; nothing may be there.
        progress: called with numbers of bytes of old shards that are done.

    Raises:
        RecipeError, CheckpointError: see `rewritten.rewrite`.
    """
    return rewrite(
        planned.proposal,
        out,
        made_by=f"convert --to {planned.plan.recipe.format}",
        make_shards=lambda folder: write_planned(planned.plan, folder, progress),
        num_bytes=planned.plan.num_bytes_written,
    )


def _with_values(plan: Plan, proposal: Proposal, why: str) -> tuple[Plan, int]:
    """The plan with each scale that gets another dtype in BF16, or in F32 where that cannot hold
    its values; how many tensors get other values or dtypes; and in the proposal what changes.

    Raises:
        CheckpointError: one is re-expressed, and not positive and finite.
    """
    tensors = []
    num_remade = 0
    for tensor in plan.tensors:
        if tensor.fate != "keep" or plan.stays(tensor):
            tensors.append(tensor)
            continue
        outputs = list[Output]()
        for output, entry, change in carried(plan, tensor):
            other = plan.spelled.get(output.name)
            if other is not None:
                change = other.change
            if plan.on_disk(output) != same_output(entry) and change != "none":
                num_remade += 1
                value = read_tensor(plan.source, entry).float()
                if not bool(((value > 0) & value.isfinite()).all()):
                    raise CheckpointError(
                        f"{plan.source.where}: {entry.name}",
                        "a scale that is re-expressed must be positive and finite",
                        got=f"{value.flatten().tolist()[:4]}",
                        cure="See `keepmtp check --values`",
                    )
                if change == "dtype":
                    dtype = "F32"
                    if torch.equal(value.bfloat16().float(), value):
                        dtype = "BF16"
                    output = output._replace(dtype=dtype)
            outputs.append(output)
            written = plan.on_disk(output)
            if written != same_output(entry):
                says = f"{entry.name} -> {written.name} {written.dtype}{list(written.shape)}"
                proposal.edits.append(Edit(why, says=says))
        tensors.append(tensor._replace(outputs=tuple(outputs)))
    return replace(plan, tensors=tuple(tensors)), num_remade
