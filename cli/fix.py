"""`keepmtp fix`: cures of a finished checkpoint that need no new values.

In: a checkpoint. Out: a diff, with --out a new folder, and what the check finds of it.
"""

import shlex

from .new_folder import NewFolder
from .options import PathArgument
from .progress import spinner


def fix(
    path: PathArgument,
    new: NewFolder,
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
    a vLLM, on a pretended sm100 if --gpu names no other.

    Of a Hub id only headers and small files are read. OUT then has the changed files alone; what
    needs new shards is named, and can be cured in a download; the check alone judges what it would
    be. `hf upload PATH OUT . --create-pr` proposes them to its owner.

    What needs new values is named with the command for it, such as `keepmtp graft`.

    Exit status 0 if no error is left, 1 if one is, 2 if there is nothing to judge.

    \b
    Example: `keepmtp fix /data/GLM-4.7-NVFP4`
    Example: `keepmtp fix /data/GLM-4.7-NVFP4 --out /data/GLM-4.7-NVFP4-fixed`
    Example: `keepmtp fix nvidia/Qwen3.5-397B-A17B-NVFP4 --out NEW`
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
