"""`keepmtp fix`: cures of a finished checkpoint, with its release's MTP block where it has none.

In: a checkpoint, and its release where it lacks a good block. Out: a diff, with --out a new folder,
and what the check finds of it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from ..recipes.errors import RecipeError, printable, size_in_words
from ..recipes.extras import require_extra
from ..recipes.frozen import Json
from . import exits
from .options import DryRunOption, JsonOption, PathArgument
from .progress import bytes_bar, live_line
from .tables import answer, tell

if TYPE_CHECKING:
    from ..cure.fix import Outcome
    from ..cure.rewritten import Rewritten
    from ..quantize.plan.plan import Plan


# Of the lines of a diff, by how they begin.
_COLOURS = {"---": "bold", "+++": "bold", "+": "green", "-": "red", "#": "bold", "@": "cyan"}


def fix(
    path: PathArgument,
    out: Annotated[
        Path | None, typer.Option(help="The new folder; without it, nothing is written.")
    ] = None,
    release: Annotated[
        str | None, typer.Option("--from", help="Its release, whose MTP block it gets.")
    ] = None,
    mtp: Annotated[
        str | None, typer.Option(help="With --from: `source`, `bf16`, a scheme without data.")
    ] = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Cure what `keepmtp check` finds, where no new values are needed: print a diff, and with --out
    write a new folder. With --from, the MTP block of the release replaces one that is lost or
    broken.

    It cures ignore lists and targets with wrong names, MTP files that the index does not list, a
    config.json and hf_quant_config.json that disagree, counts and lists of the wrong length, and
    scales whose bytes are right, but whose name, shape or dtype is wrong. No value of a weight
    changes. Each change is printed with its reason.

    With --from, only the block's tensors of the release are read; from a Hub repository by range
    requests, and the number of bytes is printed before. They are packed as --mtp says, into files
    of their own. The configs and the index say so in their own dialect. Without --mtp the block
    stays as released if the checkpoint's config can say that, and becomes bf16 otherwise. Another
    model, another width, and a dialect that vLLM or keepmtp does not have are refused before a byte
    is written; a block that was never trained once it is read.

    Without --out nothing is written. With it, OUT gets the changed files, and hard links to all
    others, which take no room; PATH stays as it is. Do not edit a linked file in place: it is the
    same file as PATH's. At the end OUT is checked; `keepmtp check OUT --gpu sm100` lets vLLM's own
    loaders judge it too.

    Of a Hub id only headers and small files are read, and OUT gets the changed files alone:
    `hf upload PATH OUT . --create-pr` proposes them. What needs new shards is named.

    Exit status 0 if no error is left, 1 if one is, 2 if there is nothing to judge.

    \b
    Example: `keepmtp fix /data/GLM-4.7-NVFP4 --out /data/GLM-4.7-NVFP4-fixed`
    Example: `keepmtp fix nvidia/Qwen3.5-397B-A17B-NVFP4 --out NEW`
    Example: `keepmtp fix GLM-4.7-NVFP4 --from zai-org/GLM-4.7 --out NEW`
    """
    from ..checkpoints.source import open_source
    from ..cure.fix import proposed
    from ..cure.rewritten import rewrite
    from ..validate.check.check import examine
    from ..validate.facts.findings import commands
    from . import findings

    opened = None
    if release is not None:
        require_extra("fix --from", "quantize")
        opened = open_source(release)
    elif mtp is not None:
        rule = "is the form of the block that --from gives"
        raise RecipeError("--mtp", rule, got=mtp, cure="Add --from RELEASE, or leave it out")
    with live_line() as doing:
        outcome = proposed(path, release=opened, mtp=mtp, progress=doing)
    proposal = outcome.proposal
    block = outcome.block
    if block is not None:
        for line in _foreseen(block):
            tell(line)
    checked = outcome.after
    written = None
    place = path
    if out is not None and outcome.changes and not dry_run:
        # It shares files with the old one (hard links), so nothing is ever written into either.
        written = rewrite(proposal, out, block=block, bar=bytes_bar)
        # Of a repository, OUT has the changed files alone: no checkpoint to judge.
        if proposal.source.folder is not None:
            place = str(out)
            checked = examine(out)
    cures = list[str]()
    if block is None or place != path:  # else its values are in no file yet
        # Names may have changed, and no value has.
        checked = findings.with_values_read(checked, "norms")
    if block is None:
        left = [each for each in checked.data.findings if each.cured_by == "block"]
        cures = commands(left, proposal.source.where)
    value = findings.check_json(checked.data) | _changes(outcome, written) | {"cures": cures}
    if proposal.edits and place == path:
        supposed = checked.data.model_copy(update={"path": f"{path}, as it would be"})
        checked = checked._replace(data=supposed)
    parts = [*_coloured(value["diff"]), *findings.parts(checked.data, path=place)]
    status = 0
    if not checked.data.ok:
        status = exits.FINDINGS
    answer(value, [*parts, *_notes(outcome, written, cures)], as_json=as_json, status=status)


def _coloured(diff: Iterable[str]) -> Iterator[RenderableType]:
    for line in diff:
        style = _COLOURS.get(line[:3]) or _COLOURS.get(line[:1], "")
        yield Text(printable(line), style)


def _changes(outcome: "Outcome", written: "Rewritten | None") -> Json:
    """What changes, for machines."""
    from ..cure.diff import diffs

    value: Json = {
        "cured": [finding.model_dump(exclude={"origin"}) for finding in outcome.cured],
        "changes": [*dict.fromkeys(edit.why for edit in outcome.proposal.edits)],
        "diff": diffs(outcome.proposal),
        "block": None,
        "needs_shards": [*outcome.proposal.not_here],
        "out": None,
        "new": [],
        "kept": 0,
    }
    plan = outcome.block
    if plan is not None:
        value["block"] = {
            "source": {"name": plan.source.where, "revision": plan.source.revision},
            "mtp": plan.recipe.mtp,
            "tensors": plan.num_outputs,
            "bytes": {"read": plan.num_bytes_before, "written": plan.num_bytes_after},
            "shards": [shard.file for shard in plan.shards],
        }
    if written is not None:
        value |= {"out": str(written.folder), "new": written.new, "kept": len(written.kept)}
    return value


def _notes(outcome: "Outcome", written: "Rewritten | None", cures: Iterable[str]) -> Iterator[str]:
    """What is left, and what was written."""
    proposal = outcome.proposal
    for reason in proposal.not_here:
        yield f"not cured in a repository, because it needs the shards: {reason}"
    for cure in cures:
        yield f"needs new values: {cure}"
    if written is not None:
        yield written.sentence
    elif outcome.changes:
        yield "nothing is written yet: the same command with --out NEW writes it"
    else:
        yield "nothing to change: there is no finding that fix can cure"


def _foreseen(plan: "Plan") -> Iterator[str]:
    """What will be read and written of the release."""
    forms = set[str]()
    for tensor in plan.tensors:
        if len(tensor.shape) >= 2:
            forms.add(tensor.scheme or "plain")
    files = ", ".join(shard.file for shard in plan.shards)
    read = size_in_words(plan.num_bytes_before)
    yield f"read: {read} of {plan.source.where}, the MTP block alone"
    yield f"write: {size_in_words(plan.num_bytes_after)} in {files}: {', '.join(sorted(forms))}"
