"""`keepmtp fix`: cure what the check finds and what needs no new values.

In: a checkpoint. Out: a diff with reasons; with --out, a new folder, checked and loaded by vLLM's
own loaders.

Easy to get wrong: a person who only looks must not change anything. So without --out nothing is
written, and the old folder is never written to.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from . import exits, findings
from .check import check_json
from .ending import Ending
from .options import DryRunOption, JsonOption, RuntimesOption, chosen_runtimes
from .progress import spinner
from .tables import print_json, say

if TYPE_CHECKING:
    from ..cure.fix import Outcome
    from ..cure.judged import Judged
    from ..cure.rewritten import Rewritten
    from ..validate.facts.results import CheckData

_COLOURS = {
    "---": "bold",
    "+++": "bold",
    "+": "green",
    "-": "red",
    "#": "bold",
    "@": "cyan",
    "~": "green",
}


def fix(
    path: Annotated[
        str, typer.Argument(help="A checkpoint: a folder or a Hub id, ours or anyone's.")
    ],
    ending: Ending,
    out: Annotated[
        Path | None, typer.Option("--out", help="The new folder; without it nothing is written.")
    ] = None,
    runtimes: RuntimesOption = None,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Cure what `keepmtp check` finds and what needs no new values: a diff, and with --out a new
    folder.

    Cured are: ignore lists and targets in the wrong names, MTP files that the index does not list,
    config.json and hf_quant_config.json that disagree, counts and lists of the wrong length, scales
    under another name or in another shape or dtype for the same bytes. No value of a weight
    changes. Each change is printed with its reason.

    With --runtime sglang, names under which SGLang 0.5.23 builds the draft are added to the lists,
    so that one checkpoint loads in both. What no entry can cure is said with SGLang's file.

    Without --out nothing is written. With it, OUT gets the changed files, and hard links of all
    others: they take no room, and PATH stays as it is. Do not edit a linked file in place: it is
    one file with PATH's. At the end OUT is checked, and loaded by vLLM's own loaders where there is
    a vLLM.

    Of a Hub id only headers and small files are read. OUT then has the changed files alone; what
    needs new shards is named, and can be cured in a download. `hf upload PATH OUT . --create-pr`
    proposes them to its owner.

    What needs new values is named with the command for it, such as `keepmtp graft`.

    Exit status 0 if no error is left, 1 if one is, 2 if there is nothing to judge.

    Example: `keepmtp fix /data/GLM-4.7-NVFP4`

    Example: `keepmtp fix /data/GLM-4.7-NVFP4 --out /data/GLM-4.7-NVFP4-fixed`

    Example: `keepmtp fix /data/GLM-4.7-FP8 --runtime sglang`

    Example: `keepmtp fix nvidia/Qwen3.5-397B-A17B-NVFP4 --out NEW`
    """
    from ..cure.fix import proposed, write

    for_sglang = "sglang" in chosen_runtimes(runtimes)
    console, written, judged = Console(quiet=as_json), None, None
    with spinner(Console(stderr=True)) as doing:
        outcome = proposed(path, for_sglang=for_sglang, progress=doing)
        for line in outcome.proposal.diffs():
            say(console, line, _COLOURS.get(line[:3]) or _COLOURS.get(line[:1], ""))
        if outcome.proposal.edits:
            console.print()
        if out is not None and not dry_run and outcome.proposal.edits:
            doing(f"{out}: writing")
            written = write(outcome, out)
            judged = _judged(outcome, out, ending, doing=doing)
    data = judged.checked.data if judged else outcome.after.data
    cures = _cures(outcome, data, _name(outcome, written))
    shown = data
    if judged is None and outcome.proposal.edits:
        shown = data.model_copy(update={"path": f"{path}, as it would be"})
    findings.show(console, shown, path=_name(outcome, written))
    for line in _end(path, outcome, written, judged, cures):
        say(console, line)
    if as_json:
        print_json(_json(outcome, data, written, judged) | {"cures": cures})
    if not (judged.ok if judged else data.ok):
        raise typer.Exit(exits.FINDINGS)


def _judged(outcome: "Outcome", out: Path, ending: Ending, *, doing: Any) -> "Judged":
    """The check and the dry load of OUT; of a repository, whose other files are not here, of
    headers.
    """
    if outcome.proposal.source.folder is not None:
        return ending.judge(out, doing)
    with outcome.proposal.headers() as folder:
        return ending.judge(out, doing, headers=folder, name=outcome.proposal.source.where)


def _end(
    path: str,
    outcome: "Outcome",
    written: "Rewritten | None",
    judged: "Judged | None",
    cures: list[str],
) -> Iterator[str]:
    """What is left and how it is cured, and what was written."""
    for reason in outcome.proposal.not_here:
        yield f"not cured in a repository, because it needs the shards: {reason}"
    for obstacle in outcome.not_for_sglang[:3]:
        yield f"not for SGLang: {obstacle}"
    for cure in cures:
        yield f"needs new values: {cure}"
    if judged and judged.no_vllm is not None:
        yield f"not loaded by vLLM: {judged.no_vllm}"
    if written is not None:
        yield written.sentence
    elif outcome.proposal.edits:
        yield f"nothing is written yet: keepmtp fix {shlex.quote(path)} --out NEW"
    else:
        yield "nothing to change: there is no finding that fix can cure"


def _name(outcome: "Outcome", written: "Rewritten | None") -> str:
    """What is cured next: the new folder, if it has all of the checkpoint."""
    return (
        str(written.folder)
        if written and outcome.proposal.source.folder is not None
        else outcome.proposal.source.where
    )


def _cures(outcome: "Outcome", data: "CheckData", name: str) -> list[str]:
    """The commands for what needs new values, each once."""
    from ..cure.fix import cure_elsewhere

    found = (cure_elsewhere(finding, outcome, name) for finding in data.findings)
    return [*dict.fromkeys(filter(None, found))]


def _json(
    outcome: "Outcome", data: "CheckData", written: "Rewritten | None", judged: "Judged | None"
) -> dict[str, Any]:
    return {
        **check_json(data, judged.checked.accounts if judged else ()),
        "cured": [finding.model_dump(exclude={"origin"}) for finding in outcome.cured],
        "changes": [*dict.fromkeys(change.why for change in outcome.proposal.edits)],
        "diff": outcome.proposal.diffs(),
        "needs_shards": [*outcome.proposal.not_here],
        "not_for_sglang": list(outcome.not_for_sglang),
        "out": str(written.folder) if written else None,
        "new": list(written.new) if written else [],
        "linked": len(written.linked) if written else 0,
        "copied": len(written.copied) if written else 0,
        "not_loaded": str(judged.no_vllm) if judged and judged.no_vllm else None,
    }
