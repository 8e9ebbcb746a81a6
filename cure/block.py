"""`keepmtp fix --from`: the MTP block of the release, in place of one that is lost or broken.

In: a checkpoint, its release, and a word for the block. Out: the plan of the block; and in the
proposal, the checkpoint with it.

The packing is that of `keepmtp quantize`. What the new checkpoint will be is checked from headers
before a byte is written. Only the block's tensors are read, from a Hub repository by range
requests.

Easy to get wrong: vLLM reads whole files that the index names, so tensors of an old block must
leave their files.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..checkpoints.dialects.choose import UNQUANTIZED
from ..checkpoints.dialects.compressed_tensors import CompressedTensors
from ..checkpoints.dialects.dialect import UnknownDialect
from ..checkpoints.dialects.fp8 import Fp8
from ..checkpoints.dialects.runtime_view import RuntimeView
from ..checkpoints.dialects.said import say_what_is_stored
from ..checkpoints.mtp_source import mtp_keys
from ..checkpoints.proposal import CONFIG, Proposal
from ..checkpoints.safetensors_file import Entry, read_header
from ..checkpoints.source import Source, refuse_changed_files
from ..checkpoints.source_of import refuse_another_model
from ..quantize.plan.mtp_alone import plan_mtp_alone
from ..quantize.plan.plan import Plan
from ..quantize.write.writer import write_shards
from ..recipes.errors import CheckpointError, RecipeError
from ..recipes.family import HFName
from ..recipes.family_view import FamilyView
from ..recipes.frozen import Bar
from ..validate.check.values import check_values


def put_block(proposal: Proposal, source: Source, mtp: str | None = None) -> Plan:
    """Give a checkpoint the block of its release, and the lists that say so.

    Args:
        proposal: of the checkpoint, without a change.
        source: the release that it was made from.
        mtp: `source`, `bf16` or a scheme; None for `source` where the checkpoint's dialect can say
            it, else `bf16`.

    Raises:
        RecipeError: another family or another width; a word that is not possible.
        CheckpointError: no block in the release, or an unknown dialect.
    """
    quantized = proposal.source
    runtime = RuntimeView.of(quantized)
    dialect = runtime.dialect
    family = runtime.view.family
    refuse_another_model(quantized, source)
    if isinstance(dialect, UnknownDialect):
        raise CheckpointError(
            "config.json: quantization_config",
            "fix --from writes dialects that keepmtp knows",
            got=dialect.name,
            cure="Quantize the release with keepmtp, which keeps its MTP block",
        )
    for place, value, why in mtp_keys(proposal.value(CONFIG, ()), source.config, family):
        proposal.set(CONFIG, place, value, why)
    view = FamilyView(family, proposal.value(CONFIG, ()), quantized.entries)
    runtime = RuntimeView(source=quantized, view=view)
    # Whole or not, also under a wrong prefix.
    both = (*quantized.entries.values(), *quantized.unindexed.values())
    old = [entry for entry in both if runtime.is_mtp_name(entry.name)]
    word = "bf16"
    if mtp is not None:
        word = mtp
    elif dialect is UNQUANTIZED or isinstance(dialect, CompressedTensors | Fp8):
        word = "source"
    as_released = word == "source" and isinstance(dialect, Fp8)
    plan = plan_mtp_alone(source, view, word, as_released=as_released)
    for tensor in plan.tensors:
        if tensor.scheme and not (as_released or isinstance(dialect, CompressedTensors)):
            raise RecipeError(
                "--mtp",
                f"a packed MTP block is written in compressed-tensors only, not in {dialect.name}",
                got=f"{word}, so {tensor.scheme} for {tensor.name}",
                cure="Use --mtp bf16",
            )
    made = dict[str, list[Entry]]()
    for shard in plan.shards:
        made[shard.file] = shard.entries
    # A file with nothing but the old block is left out, and one with tensors of the backbone is
    # written again without them.
    proposal.put_shards(old, made, "the release's block takes the place of the old one")
    if proposal.shards_again and quantized.folder is None:
        raise CheckpointError(
            quantized.where,
            "a shard with tensors of the old block and of the backbone must be here",
            got=f"{next(iter(proposal.shards_again))} on the Hub",
            cure=f"Download it: hf download {quantized.where} --local-dir FOLDER",
        )
    # Without a finding too: some schemes of AutoRound and Quark are not judged, and the block must
    # be on the list.
    schemes = {tensor.module: tensor.scheme for tensor in plan.tensors}
    for _ in range(2):
        say_what_is_stored(RuntimeView.of(proposal.outcome()), proposal, schemes)
    return plan


def write_block(plan: Plan, folder: Path, bar: Callable[[str], Bar]) -> None:
    """Write the block's files into an unfinished folder; a run that was killed is continued.

    Args:
        plan: of the block alone; its source is the release.
        folder: from `output.claimed`.
        bar: a bar for bytes, by what is done with them.

    Raises:
        CheckpointError: the block was never trained, a file ends early, or the release changed
            meanwhile.
    """
    release = plan.source
    with bar("packing")(plan.num_bytes_before) as progress:
        write_shards(plan, folder, threads=os.cpu_count() or 1, progress=progress)
    entries = dict[HFName, Entry]()
    for shard in plan.shards:
        path = folder / shard.file
        entries |= read_header(path, str(path)).entries
    written = replace(release, folder=folder, entries=entries, unindexed={})
    for found in check_values(RuntimeView.of(written), "all", reading=bar("reading values")):
        # A block of chance may be served by whoever measures it; but nobody wants it put into
        # another checkpoint.
        if found.severity == "error" or found.rule == "mtp-untrained":
            raise CheckpointError(
                f"{release.where}: {found.where}",
                "the release's MTP block must hold what a trained model holds",
                got=found.says,
                cure="Download the release again; "
                "if its values stay so, nothing can draft with them",
            )
    changed = f"Remove {folder}, and run the same command again"
    refuse_changed_files(release, release.states, cure=changed)
