"""`keepmtp graft`: the MTP block of the release, put into a checkpoint that lost it.

In: a quantized checkpoint, its release, and a new folder. Out: the folder, what changed in
config.json, and what the check and vLLM's loaders find; exit status 1 if an error is left.

Easy to get wrong: standard output is the answer, so bars and what is about to be fetched go to
standard error.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..recipes.errors import RecipeError, size_in_words
from .ending import Ending, checked_json, end
from .options import DryRunOption, JsonOption
from .progress import bytes_bar
from .tables import say

if TYPE_CHECKING:
    from ..cure.graft import Graft


def graft(
    quantized: Annotated[
        str, typer.Argument(help="The checkpoint that lost its MTP block: a folder or a Hub id.")
    ],
    source: Annotated[
        str, typer.Option("--from", help="Folder or Hub id of the release that it was made from.")
    ],
    ending: Ending,
    out: Annotated[
        Path | None, typer.Option("--out", help="The new folder; not needed with --dry-run.")
    ] = None,
    mtp: Annotated[
        str | None,
        typer.Option(
            "--mtp",
            help=(
                "The block: `source` (as released), `bf16`, or a scheme that needs no data; "
                "default: source where the checkpoint's config can say it, else bf16."
            ),
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Also in place of a block with which nothing is wrong."),
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put the MTP block of the release into a quantized checkpoint that lost it, or whose block is
    broken.

    Reads only the block's tensors of the release, from a Hub repository by range requests, and says
    before how many bytes. Packs them as asked, into files of their own. config.json,
    hf_quant_config.json and the index get what vLLM needs, in the dialect that they have:
    compressed-tensors, modelopt, native FP8, GPTQ, AWQ, AutoRound or Quark.

    OUT is a new folder: files that stay are hard links, and nothing is written into the old
    checkpoint. Of a Hub repository that is not on this machine, OUT gets only the files that are
    new or changed. It ends with the check and, where there is a vLLM, with vLLM's own loaders. Exit
    status 1 if one of them finds an error.

    Refused before a byte is written: another model or another width, a block that is there and
    good, a release without a trained block, a dialect that vLLM or keepmtp does not have.

    Example: `keepmtp graft GLM-4.7-NVFP4 --from zai-org/GLM-4.7 --out NEW`

    Example: `keepmtp graft GLM-4.7-NVFP4 --from /data/GLM-4.7 --dry-run`
    """
    from ..recipes.extras import require_extra

    require_extra("graft", "quantize")
    from ..checkpoints.source import open_source
    from ..cure.graft import plan_graft
    from ..cure.judged import Judged

    if out is None and not dry_run:
        raise RecipeError(
            "graft", "needs a folder to write", got="no --out", cure="Add --out NEW, or --dry-run"
        )
    err, new = Console(stderr=True), None
    made = plan_graft(open_source(quantized), open_source(source), mtp=mtp, is_replaced=replace)
    for line in _foreseen(made):
        say(err, line)
    judged = Judged(checked=made.checked)
    if out is not None and not dry_run:
        from ..cure.graft_write import carry_out

        fetching, reading, packing = (
            bytes_bar(err, label) for label in ("fetching", "reading values", "packing")
        )
        written = carry_out(made, out, fetching=fetching, reading=reading, packing=packing)
        say(err, written.sentence)
        new = list(written.new)
        if made.quantized.folder is not None:
            judged = ending.judge(out, partial(say, err))
    plan = made.plan
    told = {
        "source": {"name": plan.source.where, "revision": plan.source.revision},
        "mtp": plan.recipe.mtp,
        "tensors": sum(len(tensor.outputs) for tensor in plan.tensors),
        "bytes": {"read": made.num_bytes_read, "written": plan.num_bytes_after},
        "requests": made.num_requests,
        "shards": [shard.file for shard in plan.shards],
        "left_out": made.proposal.empty_shards,
        "written_again": list(made.proposal.shards_again),
        "diff": made.proposal.diffs(),
        "new": new,
        "vllm": None if judged.no_vllm is None else str(judged.no_vllm),
        "check": checked_json(judged),
    }
    end(judged, told, made.proposal.diffs(), as_json=as_json)


def _foreseen(made: "Graft") -> Iterator[str]:
    """What will be read and written."""
    plan, size = made.plan, size_in_words
    asked = f" in {made.num_requests:,} range requests" if plan.source.folder is None else ""
    forms = sorted({tensor.scheme or "plain" for tensor in plan.tensors if len(tensor.shape) >= 2})
    yield f"read: {size(made.num_bytes_read)} of {plan.source.where}{asked}, the MTP block alone"
    yield (
        f"write: {size(plan.num_bytes_after)} in "
        f"{', '.join(shard.file for shard in plan.shards)}: {', '.join(forms)}"
    )
    if gone := made.proposal.empty_shards:
        yield f"leave out: {', '.join(gone)}: nothing but the old block"
    if again := made.proposal.shards_again:
        yield f"write again: {', '.join(again)}: without the old block"
    if made.quantized.folder is None:
        yield (
            f"OUT gets only files that are new or changed: {made.quantized.where} is not on this "
            "machine"
        )
