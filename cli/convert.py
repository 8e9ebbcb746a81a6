"""`keepmtp convert`: a finished checkpoint in the other dialect, compressed-tensors' or modelopt's.

In: a folder and a dialect. Out: a new folder, what was found of it, and a JSON object for machines;
exit status 1 if the new checkpoint has an error.

Easy to get wrong: the old folder and the new one may share files (hard links), so nothing is ever
written into either.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from ..recipes.errors import RecipeError, size_in_words
from .ending import Ending, checked_json, end
from .options import DryRunOption, JsonOption
from .progress import bytes_bar
from .tables import answer, say

if TYPE_CHECKING:
    from ..cure.convert import Conversion


def convert(
    path: Annotated[str, typer.Argument(help="A finished checkpoint's folder, ours or anyone's.")],
    to: Annotated[
        Literal["compressed-tensors", "modelopt"],
        typer.Option("--to", help="The dialect it will have."),
    ],
    ending: Ending,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The new folder; not needed with --dry-run.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a finished checkpoint between compressed-tensors' dialect and modelopt's.

    Packed bytes stay as they are. Their tensors get the other names, the scales of a whole tensor
    the other convention, and config.json the other quantization config, in vLLM's names. Shards
    without a quantized weight, such as those of a plain MTP block, are hard links.
    keepmtp-convert.json in the new folder has what the way back needs: there and back gives the
    same tensors and the same config files.

    A form that the other dialect has no word for is refused with the tensor's name before a byte is
    written. At the end the new checkpoint is checked, and loaded by vLLM's own classes where there
    is a vLLM. Exit status 1 if one of them finds an error.

    Example: `keepmtp convert out/tiny-glm4-moe.nvfp4-fp8 --to modelopt --dry-run`

    Example: `keepmtp convert /data/GLM-NVFP4 --to modelopt --out /data/GLM-NVFP4-modelopt`
    """
    from ..recipes.extras import require_extra

    require_extra("convert", "quantize")
    from ..cure import convert as cure

    planned = cure.plan_conversion(path, to)
    if dry_run:
        answer(
            _planned_json(planned), [_sentence(planned), *planned.proposal.diffs()], as_json=as_json
        )
        return
    if folder is None:
        raise RecipeError(
            "convert",
            "--out must name the new folder",
            got="nothing",
            cure="Add --out, or --dry-run",
        )
    err = Console(stderr=True)
    with bytes_bar(err, "converting")(planned.proposal.num_bytes_again) as progress:
        written = cure.convert(planned, folder, progress=progress)
    judged = ending.judge(folder, partial(say, err))
    made = {
        "out": str(folder),
        "new": written.new,
        "linked": written.linked,
        "copied": written.copied,
    }
    told = _planned_json(planned) | made | {"check": checked_json(judged)}
    end(judged, told, [_sentence(planned), written.sentence], as_json=as_json)


def _sentence(planned: "Conversion") -> str:
    how = "as it was before its last conversion" if planned.is_way_back else f"from {planned.first}"
    num_anew, num_all = (
        len(planned.shards),
        len({entry.file for entry in planned.source.entries.values()}),
    )
    return (
        f"{planned.source.where} to {planned.to}, {how}: {len(planned.changes):,} tensors get "
        f"another name or form, {planned.num_reexpressed:,} of them other bytes; {num_anew} of "
        f"{num_all} shards are written ({size_in_words(planned.proposal.num_bytes_again)})"
    )


def _planned_json(planned: "Conversion") -> dict[str, Any]:
    return {
        "path": planned.source.where,
        "from": planned.first,
        "to": planned.to,
        "is_way_back": planned.is_way_back,
        "tensors_changed": len(planned.changes),
        "tensors_with_other_bytes": planned.num_reexpressed,
        "shards_written": planned.shards,
        "bytes_written": planned.proposal.num_bytes_again,
    }
