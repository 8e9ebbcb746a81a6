"""`keepmtp convert`: a finished checkpoint in the other dialect.

In: a checkpoint and a dialect. Out: a new folder, and what the check and vLLM's own loaders find of
it.
"""

from typing import Annotated, Literal

import typer

from ..recipes.extras import require_extra
from ..recipes.frozen import Json
from .new_folder import NewFolder
from .options import PathArgument
from .progress import bytes_bar
from .tables import answer, in_words


def convert(
    path: PathArgument,
    to: Annotated[
        Literal["compressed-tensors", "modelopt"], typer.Option("--to", help="Its new dialect.")
    ],
    new: NewFolder,
) -> None:
    """Convert a finished checkpoint between compressed-tensors' dialect and modelopt's.

    Packed bytes stay as they are. Their tensors get the other names, the scales of a whole tensor
    the other convention, and config.json the other quantization config, in vLLM's names. Shards
    without a quantized weight, such as those of a plain MTP block, are hard links.
    There and back gives the same tensors, but for scales whose reciprocal's reciprocal is the
    neighbouring number.

    A form that the other dialect has no word for is refused with the tensor's name before a byte is
    written. At the end the new checkpoint is checked, and loaded by vLLM's own classes where there
    is a vLLM. Exit status 1 if one of them finds an error.

    \b
    Example: `keepmtp convert out/tiny-glm4-moe.nvfp4-fp8 --to modelopt --dry-run`
    Example: `keepmtp convert /data/GLM-NVFP4 --to modelopt --out /data/GLM-NVFP4-modelopt`
    """
    require_extra("convert", "quantize")
    from ..cure import convert as cure
    from .findings import check_json

    planned = cure.plan_conversion(path, to)
    proposal = planned.proposal
    plan = planned.plan
    value: Json = {
        "path": path,
        "from": planned.first,
        "to": to,
        "tensors_changed": sum(bool(edit.says) for edit in proposal.edits),
        "tensors_with_other_bytes": planned.num_remade,
        "shards_written": sorted(proposal.made_shards),
        "bytes_written": plan.num_bytes_written,
    }
    out = new.folder()
    if out is None:
        answer(value, [in_words(value), *proposal.diffs()], as_json=new.as_json)
        return
    with bytes_bar("converting")(plan.num_bytes_before - plan.num_bytes_linked) as progress:
        written = cure.convert(planned, out, progress=progress)
    judged = new.judge(out)
    checked = judged.checked
    said = in_words(value)
    value |= {"out": str(out), "new": written.new, "kept": written.kept}
    value["check"] = check_json(checked.data, checked.accounts)
    new.end(judged, value, [said, written.sentence], (), str(out))
