"""`keepmtp graft`: the MTP block of the release, put into a quantized checkpoint without one.

In: a checkpoint and its release. Out: a diff, with --out a new folder, and what the check and
vLLM's own loaders find of it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ..recipes.errors import size_in_words
from ..recipes.extras import require_extra
from ..recipes.frozen import Json
from .new_folder import NewFolder
from .progress import bytes_bar
from .tables import tell

if TYPE_CHECKING:
    from ..cure.graft import Graft


def graft(
    quantized: Annotated[str, typer.Argument(help="A checkpoint without its MTP block.")],
    source: Annotated[str, typer.Option("--from", help="Folder or Hub id of its release.")],
    new: NewFolder,
    mtp: Annotated[
        str | None, typer.Option(help="`source`, `bf16`, or a scheme without data.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also in place of a good block.")
    ] = False,
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

    Without --mtp the block stays as released, where the checkpoint's config can say that, else it
    becomes bf16.

    Refused before a byte is written: another model or another width, a block that is there and
    good, a release without a trained block, a dialect that vLLM or keepmtp does not have.

    \b
    Example: `keepmtp graft GLM-4.7-NVFP4 --from zai-org/GLM-4.7 --out NEW`
    Example: `keepmtp graft GLM-4.7-NVFP4 --from /data/GLM-4.7 --dry-run`
    """
    require_extra("graft", "quantize")
    from ..checkpoints.source import open_source
    from ..cure.graft import carry_out, plan_graft
    from ..cure.rewritten import Judged
    from .findings import check_json

    out = new.folder()
    made = plan_graft(open_source(quantized), open_source(source), mtp=mtp, is_replaced=replace)
    plan = made.plan
    value: Json = {
        "source": {"name": plan.source.where, "revision": plan.source.revision},
        "mtp": plan.recipe.mtp,
        "tensors": plan.num_outputs,
        "bytes": {"read": made.num_bytes_read, "written": plan.num_bytes_after},
        "shards": [shard.file for shard in plan.shards],
        "left_out": made.proposal.empty_shards,
        "written_again": [*made.proposal.shards_again],
    }
    for line in _foreseen(made):
        tell(line)
    diff = made.proposal.diffs()
    value |= {"diff": diff, "new": None}
    # Of a repository, OUT has the new files alone: what the plan's own check found stands then.
    judged = Judged(made.checked)
    if out is not None:
        written = carry_out(made, out, bar=bytes_bar)
        tell(written.sentence)
        value["new"] = written.new
        if made.proposal.source.folder is not None:
            judged = new.judge(out)
    checked = judged.checked
    check = check_json(checked.data, checked.accounts)
    value |= {"vllm": judged.no_vllm, "check": check}
    notes = []
    if out is None:
        notes.append("nothing is written yet: the same command with --out NEW writes it")
    new.end(judged, value, diff, notes, checked.data.path)


def _foreseen(made: "Graft") -> Iterator[str]:
    """What will be read and written."""
    plan = made.plan
    quantized = made.proposal.source
    matrices = [tensor for tensor in plan.tensors if len(tensor.shape) >= 2]
    forms = {tensor.scheme or "plain" for tensor in matrices}
    files = ", ".join(shard.file for shard in plan.shards)
    read = size_in_words(made.num_bytes_read)
    written = size_in_words(plan.num_bytes_after)
    yield f"read: {read} of {plan.source.where}, the MTP block alone"
    yield f"write: {written} in {files}: {', '.join(sorted(forms))}"
    gone = made.proposal.empty_shards
    if gone:
        yield f"leave out: {', '.join(gone)}: nothing but the old block"
    again = made.proposal.shards_again
    if again:
        yield f"write again: {', '.join(again)}: without the old block"
    if quantized.folder is None:
        yield (
            f"OUT gets only files that are new or changed: {quantized.where} is not on this machine"
        )
