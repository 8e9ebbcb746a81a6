"""`keepmtp fix`, `graft` and `convert`: a new folder from a finished checkpoint, which stays as it
is.

In: a checkpoint, and what it shall become. Out: a diff or a sentence, the new folder, and what the
check and vLLM's own loaders find of it; exit status 1 if an error is left.
"""

import shlex
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from ..recipes.errors import RecipeError, size_in_words
from ..recipes.extras import require_extra
from ..recipes.frozen import Json, Raw, Say, frozen
from . import exits, findings
from .check import check_json
from .options import DryRunOption, GpusOption, JsonOption, chosen_gpus
from .progress import bytes_bar, spinner
from .tables import answer, print_json, say

if TYPE_CHECKING:
    from ..cure.fix import Outcome
    from ..cure.graft import Graft
    from ..cure.rewritten import Judged, Rewritten

# Of the lines of a diff, by how they begin.
_COLOURS = {
    "---": "bold",
    "+++": "bold",
    "+": "green",
    "-": "red",
    "#": "bold",
    "@": "cyan",
    "~": "green",
}


@frozen
class Ending:
    """Who judges the new folder.

    Attributes:
        gpus: GPU that vLLM pretends for the dry load at the end; may be repeated. Default sm100.
        static_only: End with the check alone: vLLM does not load the result.
    """

    gpus: GpusOption = None
    static_only: bool = False

    def judge(self, out: Path, doing: Say) -> "Judged":
        """Check and load a new folder."""
        from ..cure.rewritten import GPUS, judge

        gpus = GPUS
        if self.static_only:
            gpus = ()
        elif self.gpus:
            gpus = chosen_gpus(self.gpus)
        with exits.judging(out):
            return judge(out, gpus=gpus, progress=doing)


def fix(
    path: str,
    ending: Ending,
    out: Path | None = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
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
        out: The new folder; without it nothing is written.
    """
    from ..cure.fix import cure_elsewhere, proposed, write

    console = Console(quiet=as_json)
    written = None
    judged = None
    with spinner(Console(stderr=True)) as doing:
        outcome = proposed(path, progress=doing)
        proposal = outcome.proposal
        diff = proposal.diffs()
        for line in diff:
            say(console, line, _COLOURS.get(line[:3]) or _COLOURS.get(line[:1], ""))
        if proposal.edits:
            console.print()
        # A person who only looks changes nothing. The new folder shares files with the old one
        # (hard links), so nothing is ever written into either.
        if out is not None and not dry_run and proposal.edits:
            doing(f"{out}: writing")
            written = write(outcome, out)
            # Of a repository, OUT has the changed files alone: no checkpoint to judge.
            if proposal.source.folder is not None:
                judged = ending.judge(out, doing)
    # What is cured next: the new folder, if it has all of the checkpoint.
    next_one = proposal.source.where
    data = outcome.after.data
    shown = data
    is_good = data.ok
    accounts = ()
    if judged is not None:
        next_one = str(out)
        data = shown = judged.checked.data
        is_good = judged.ok
        accounts = judged.checked.accounts
    elif proposal.edits:
        shown = data.model_copy(update={"path": f"{path}, as it would be"})
    cures = []
    for finding in data.findings:
        cure = cure_elsewhere(finding, outcome, next_one)
        if cure and cure not in cures:
            cures.append(cure)
    findings.show(console, shown, path=next_one)
    for reason in proposal.not_here:
        say(console, f"not cured in a repository, because it needs the shards: {reason}")
    for cure in cures:
        say(console, f"needs new values: {cure}")
    not_loaded = None
    if judged is not None and judged.no_vllm is not None:
        not_loaded = str(judged.no_vllm)
        say(console, f"not loaded by vLLM: {not_loaded}")
    if written is not None:
        if judged is None:
            say(console, "not loaded by vLLM: OUT has only the files that changed")
        say(console, written.sentence)
    elif proposal.edits:
        say(console, f"nothing is written yet: keepmtp fix {shlex.quote(path)} --out NEW")
    else:
        say(console, "nothing to change: there is no finding that fix can cure")
    if as_json:
        value = check_json(data, accounts) | _fixed_json(outcome, diff, written)
        print_json(value | {"not_loaded": not_loaded, "cures": cures})
    if not is_good:
        raise typer.Exit(exits.FINDINGS)


def _fixed_json(outcome: "Outcome", diff: list[str], written: "Rewritten | None") -> Json:
    value: Json = {
        "cured": [finding.model_dump(exclude={"origin"}) for finding in outcome.cured],
        "changes": [*dict.fromkeys(edit.why for edit in outcome.proposal.edits)],
        "diff": diff,
        "needs_shards": [*outcome.proposal.not_here],
        "out": None,
        "new": [],
        "kept": 0,
    }
    if written is not None:
        value |= {"out": str(written.folder), "new": [*written.new], "kept": len(written.kept)}
    return value


def graft(
    quantized: str,
    source: Annotated[str, typer.Option("--from")],
    ending: Ending,
    out: Path | None = None,
    mtp: str | None = None,
    replace: bool = False,
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

    Args:
        quantized: The checkpoint that lost its MTP block: a folder or a Hub id.
        source: Folder or Hub id of the release that it was made from.
        out: The new folder; not needed with --dry-run.
        mtp: The block: `source` (as released), `bf16`, or a scheme that needs no data; default:
            source where the checkpoint's config can say it, else bf16.
        replace: Also in place of a block with which nothing is wrong.
    """
    require_extra("graft", "quantize")
    from ..checkpoints.source import open_source
    from ..cure.graft import carry_out, plan_graft
    from ..cure.rewritten import Judged

    _refuse_no_out("graft", out, dry_run=dry_run)
    err = Console(stderr=True)
    new = None
    made = plan_graft(open_source(quantized), open_source(source), mtp=mtp, is_replaced=replace)
    for line in _foreseen(made):
        say(err, line)
    # Of a repository, OUT has the new files alone: what the plan's own check found stands then.
    judged = Judged(checked=made.checked)
    if out is not None and not dry_run:
        written = carry_out(made, out, bar=partial(bytes_bar, err))
        say(err, written.sentence)
        new = list(written.new)
        if made.proposal.source.folder is not None:
            judged = ending.judge(out, partial(say, err))
    plan = made.plan
    diff = made.proposal.diffs()
    not_loaded = None
    if judged.no_vllm is not None:
        not_loaded = str(judged.no_vllm)
    value = {
        "source": {"name": plan.source.where, "revision": plan.source.revision},
        "mtp": plan.recipe.mtp,
        "tensors": plan.num_outputs,
        "bytes": {"read": made.num_bytes_read, "written": plan.num_bytes_after},
        "shards": [shard.file for shard in plan.shards],
        "left_out": made.proposal.empty_shards,
        "written_again": list(made.proposal.shards_again),
        "diff": diff,
        "new": new,
        "vllm": not_loaded,
    }
    _end(judged, value, diff, as_json=as_json)


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
    if gone := made.proposal.empty_shards:
        yield f"leave out: {', '.join(gone)}: nothing but the old block"
    if again := made.proposal.shards_again:
        yield f"write again: {', '.join(again)}: without the old block"
    if quantized.folder is None:
        yield (
            f"OUT gets only files that are new or changed: {quantized.where} is not on this machine"
        )


def convert(
    path: str,
    to: Annotated[Literal["compressed-tensors", "modelopt"], typer.Option("--to")],
    ending: Ending,
    out: Path | None = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
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
        out: The new folder; not needed with --dry-run.
    """
    require_extra("convert", "quantize")
    from ..cure import convert as cure

    planned = cure.plan_conversion(path, to)
    proposal = planned.proposal
    shards = tuple(proposal.shards_again)
    value = {
        "path": path,
        "from": planned.first,
        "to": planned.to,
        "tensors_changed": planned.num_changed,
        "tensors_with_other_bytes": len(proposal.made),
        "shards_written": shards,
        "bytes_written": proposal.num_bytes_again,
    }
    sentence = (
        f"{path} from {planned.first} to {to}: {planned.num_changed:,} tensors get another name or "
        f"form, {len(proposal.made):,} of them other bytes; {len(shards)} shards are written "
        f"({size_in_words(proposal.num_bytes_again)})"
    )
    if dry_run:
        answer(value, [sentence, *proposal.diffs()], as_json=as_json)
        return
    _refuse_no_out("convert", out, dry_run=dry_run)
    assert out is not None
    err = Console(stderr=True)
    with bytes_bar(err, "converting")(proposal.num_bytes_again) as progress:
        written = cure.convert(planned, out, progress=progress)
    judged = ending.judge(out, partial(say, err))
    value |= {"out": str(out), "new": written.new, "kept": written.kept}
    _end(judged, value, [sentence, written.sentence], as_json=as_json)


def _refuse_no_out(verb: str, out: Path | None, *, dry_run: bool) -> None:
    if out is None and not dry_run:
        raise RecipeError(
            verb, "needs a folder to write", got="no --out", cure="Add --out NEW, or --dry-run"
        )


def _end(judged: "Judged", value: Raw, lines: Iterable[str], *, as_json: bool) -> None:
    """Print what was made, and what was found of it; end with the status that this comes to."""
    checked = judged.checked
    if as_json:
        print_json({**value, "check": check_json(checked.data, checked.accounts)})
    else:
        console = Console()
        for line in lines:
            say(console, line)
        if judged.no_vllm is not None:
            say(console, f"vLLM was not asked: {judged.no_vllm}")
        findings.show(console, checked.data)
    if not judged.ok:
        raise typer.Exit(exits.FINDINGS)
