"""`keepmtp fix`, `graft` and `convert`: a new folder from a finished checkpoint, which stays as it
is.

In: a checkpoint, and what it shall become. Out: a diff or a sentence, the new folder, and what the
check and vLLM's own loaders find of it; exit status 1 if an error is left.
"""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import RenderableType
from rich.text import Text

from ..recipes.errors import printable, size_in_words
from ..recipes.extras import require_extra
from ..recipes.frozen import Json, frozen
from . import exits
from .options import DryRunOption, GpusOption, JsonOption, chosen_gpus
from .progress import bytes_bar, spinner
from .tables import answer, in_words, tell

if TYPE_CHECKING:
    from ..cure.graft import Graft
    from ..cure.rewritten import Judged

# Of the lines of a diff, by how they begin.
_COLOURS = {"---": "bold", "+++": "bold", "+": "green", "-": "red", "#": "bold", "@": "cyan"}


@frozen
class NewFolder:
    """The new checkpoint, and who judges it.

    Attributes:
        out: The new folder; without it, or with --dry-run, nothing is written.
        gpus: GPU that vLLM pretends for the dry load at the end; may be repeated. Default sm100.
        static_only: End with the check alone: vLLM does not load the result.
    """

    out: Path | None = None
    gpus: GpusOption = None
    static_only: bool = False
    dry_run: DryRunOption = False
    as_json: JsonOption = False

    def folder(self) -> Path | None:
        """The folder, if it shall be written."""
        if self.dry_run:
            return None
        return self.out

    def judge(self, out: Path) -> "Judged":
        """Check and load the new folder."""
        from ..cure.rewritten import GPUS, judge

        gpus = GPUS
        if self.static_only:
            gpus = ()
        elif self.gpus:
            gpus = chosen_gpus(self.gpus)
        with exits.judging(out), spinner() as doing:
            return judge(out, gpus=gpus, progress=doing)

    def end(
        self, judged: "Judged", value: Json, diff: Iterable[str], notes: Iterable[str], path: str
    ) -> None:
        """Print what was changed and what was found of it, where commands call it `path`; end with
        the status that this comes to.
        """
        from . import findings

        parts: list[RenderableType] = []
        for line in diff:
            style = _COLOURS.get(line[:3]) or _COLOURS.get(line[:1], "")
            parts.append(Text(printable(line), style))
        parts += findings.parts(judged.checked.data, path=path)
        if judged.no_vllm is not None:
            parts.append(f"not loaded by vLLM: {judged.no_vllm}")
        status = 0
        if not judged.ok:
            status = exits.FINDINGS
        answer(value, [*parts, *notes], as_json=self.as_json, status=status)


def fix(path: str, new: NewFolder) -> None:
    """Cure what `keepmtp check` finds and what needs no new values: a diff, and with --out a new
    folder.

    Cured are: ignore lists and targets in the wrong names, MTP files that the index does not list,
    config.json and hf_quant_config.json that disagree, counts and lists of the wrong length, scales
    under another name or in another shape or dtype for the same bytes. No value of a weight
    changes. Each change is printed with its reason.

    Without --out nothing is written. With it, OUT gets the changed files, and hard links of all
    others: they take no room, and PATH stays as it is. Do not edit a linked file in place: it is
    one file with PATH's. At the end OUT is checked, and loaded by vLLM's own loaders where there is
    a vLLM.

    Of a Hub id only headers and small files are read. OUT then has the changed files alone; what
    needs new shards is named, and can be cured in a download; the check alone judges what it would
    be. `hf upload PATH OUT . --create-pr`
    proposes them to its owner.

    What needs new values is named with the command for it, such as `keepmtp graft`.

    Exit status 0 if no error is left, 1 if one is, 2 if there is nothing to judge.

    Example: `keepmtp fix /data/GLM-4.7-NVFP4`

    Example: `keepmtp fix /data/GLM-4.7-NVFP4 --out /data/GLM-4.7-NVFP4-fixed`

    Example: `keepmtp fix nvidia/Qwen3.5-397B-A17B-NVFP4 --out NEW`

    Args:
        path: A checkpoint: a folder or a Hub id, ours or anyone's.
    """
    from ..cure.fix import proposed, write
    from ..cure.rewritten import Judged
    from ..validate.facts.findings import commands
    from .findings import check_json, with_values_read

    with spinner() as doing:
        outcome = proposed(path, progress=doing)
    proposal = outcome.proposal
    judged = Judged(outcome.after)
    # What is cured next: the new folder, if it has all of the checkpoint.
    next_one = proposal.source.where
    written = None
    out = new.folder()
    if out is not None and proposal.edits:
        # It shares files with the old one (hard links), so nothing is ever written into either.
        written = write(outcome, out)
        # Of a repository, OUT has the changed files alone: no checkpoint to judge.
        if proposal.source.folder is not None:
            judged = new.judge(out)
            next_one = str(out)
    # Names may have changed, and no value has.
    checked = with_values_read(judged.checked, "norms")
    # An edit that is left was tried.
    others = [finding for finding in checked.data.findings if finding.cured_by != "edit"]
    cures = commands(others, next_one)
    diff = proposal.diffs()
    value = check_json(checked.data, checked.accounts) | {
        "cured": [finding.model_dump(exclude={"origin"}) for finding in outcome.cured],
        "changes": [*dict.fromkeys(edit.why for edit in proposal.edits)],
        "diff": diff,
        "needs_shards": [*proposal.not_here],
        "out": None,
        "new": [],
        "kept": 0,
        "not_loaded": judged.no_vllm,
        "cures": cures,
    }
    why = "not cured in a repository, because it needs the shards:"
    notes = [f"{why} {reason}" for reason in proposal.not_here]
    notes += [f"needs new values: {cure}" for cure in cures]
    if written is not None:
        value |= {"out": str(written.folder), "new": written.new, "kept": len(written.kept)}
        if proposal.source.folder is None:
            notes.append("not loaded by vLLM: OUT has only the files that changed")
        notes.append(written.sentence)
    elif proposal.edits:
        notes.append(f"nothing is written yet: keepmtp fix {shlex.quote(path)} --out NEW")
    else:
        notes.append("nothing to change: there is no finding that fix can cure")
    if proposal.edits and judged.checked is outcome.after:
        supposed = checked.data.model_copy(update={"path": f"{path}, as it would be"})
        checked = checked._replace(data=supposed)
    new.end(judged._replace(checked=checked), value, diff, notes, next_one)


def graft(
    quantized: str,
    source: Annotated[str, typer.Option("--from")],
    new: NewFolder,
    mtp: str | None = None,
    replace: bool = False,
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

    Args:
        quantized: The checkpoint that lost its MTP block: a folder or a Hub id.
        source: Folder or Hub id of the release that it was made from.
        mtp: The block: `source` (as released), `bf16`, or a scheme that needs no data; default:
            source where the checkpoint's config can say it, else bf16.
        replace: Also in place of a block with which nothing is wrong.
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


def convert(
    path: str,
    to: Annotated[Literal["compressed-tensors", "modelopt"], typer.Option("--to")],
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

    Example: `keepmtp convert out/tiny-glm4-moe.nvfp4-fp8 --to modelopt --dry-run`

    Example: `keepmtp convert /data/GLM-NVFP4 --to modelopt --out /data/GLM-NVFP4-modelopt`

    Args:
        path: A finished checkpoint's folder, ours or anyone's.
        to: The dialect it will have.
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
