"""`keepmtp fix`: cure what the check finds and what needs no new values.

In: a checkpoint. Out: a diff with reasons; with --out, a new folder, checked and loaded by vLLM's own loaders.

Easy to get wrong: a person who only looks must not change anything. So without --out nothing is written, and the old
folder is never written to.
"""

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..recipes.errors import RecipeError, printable
from . import exits, findings, tables
from .options import AnyVLLMOption, JsonOption, PretendedOption, StaticOnlyOption, chosen_runtimes, gpus_at_the_end

if TYPE_CHECKING:
    from ..cure.fix import Outcome
    from ..cure.judged import Judged
    from ..cure.rewritten import Rewritten
    from ..validate.facts.results import CheckData

_COLOURS = {"+": "green", "-": "red", "#": "bold", "@": "cyan", "~": "green"}


def fix(
    path: Annotated[str, typer.Argument(help="A checkpoint: a folder or a Hub id, ours or anyone's.")],
    out: Annotated[Path | None, typer.Option("--out", help="The new folder; without it nothing is written.")] = None,
    values: Annotated[
        bool,
        typer.Option("--values", help="Also read a folder's scales, and give fused NVFP4 weights one where exact."),
    ] = False,
    runtimes: Annotated[
        list[str] | None,
        typer.Option("--runtime", help="sglang: also add the entries that SGLang needs; vLLM's answers stay."),
    ] = None,
    pr: Annotated[
        bool, typer.Option("--pr", help="Open a pull request with the changed files in the Hub repository PATH.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --pr: do not ask before the pull request is opened.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change, and stop.")] = False,
    gpus: PretendedOption = None,
    static_only: StaticOnlyOption = False,
    any_vllm: AnyVLLMOption = False,
    as_json: JsonOption = False,
) -> None:
    """Cure what `keepmtp check` finds and what needs no new values: a diff, and with --out a new folder.

    Cured are: ignore lists and targets in the wrong names, MTP files that the index does not list, config.json and
    hf_quant_config.json that disagree, counts and lists of the wrong length, scales under another name or in another
    shape or dtype for the same bytes. No value of a weight changes. Each change is printed with its reason.

    With --values, scales are read too: gate and up whose global scales differ by a power of two get one for both, if
    every product of scales stays the same.

    With --runtime sglang, names under which SGLang 0.5.23 builds the draft are added to the lists, so that one
    checkpoint loads in both. What no entry can cure is said with SGLang's file.

    Without --out nothing is written. With it, OUT gets the changed files, and hard links of all others: they take no
    room, and PATH stays as it is. Do not edit a linked file in place: it is one file with PATH's. At the end OUT is
    checked, and loaded by vLLM's own loaders where there is a vLLM.

    Of a Hub id only headers and small files are read. OUT then has the changed files alone; what needs new shards is
    named, and can be cured in a download. With --pr, the changed files become a pull request there, which everybody can
    read: it is asked for before, and a token may be needed that can write.

    What needs new values is named with the command for it, such as `keepmtp graft`.

    Exit status 0 if no error is left, 1 if one is, 2 if there is nothing to judge.

    Example: `keepmtp fix /data/GLM-4.7-NVFP4`

    Example: `keepmtp fix /data/GLM-4.7-NVFP4 --out /data/GLM-4.7-NVFP4-fixed`

    Example: `keepmtp fix /data/GLM-4.7-FP8 --runtime sglang`

    Example: `keepmtp fix nvidia/Qwen3.5-397B-A17B-NVFP4 --pr --dry-run`
    """
    from ..cure.fix import proposed, write
    from ..cure.fix_request import refuse_request
    from ..recipes.extras import require_extra
    from .check import spinner

    if values:
        require_extra("fix --values", "quantize")
    servers = chosen_runtimes(runtimes or [])
    err, console = Console(stderr=True), Console()
    pretended = gpus_at_the_end(gpus, static_only=static_only)
    with spinner(err, is_shown=True) as doing:
        outcome = proposed(path, with_scales=values, for_sglang="sglang" in servers, progress=doing)
        if pr:
            refuse_request(outcome)
        written = judged = None
        if out is not None and not dry_run and outcome.proposal.edits:
            if not as_json:
                _show_diff(console, outcome)
            doing(f"{out}: writing")
            written = write(outcome, out)
            with exits.judging(out, is_whole=outcome.source.folder is not None):
                judged = _judged(outcome, out, pretended, any_vllm=any_vllm, doing=doing)
                if values and outcome.source.folder is not None:
                    judged = _with_values(judged)
    if not as_json:
        if written is None:
            _show_diff(console, outcome)
        _show_end(console, path, outcome, written, judged)
    opened = _open_request(outcome, yes=yes) if pr and not dry_run else None
    if as_json:
        tables.print_json({**_as_json(path, outcome, written, judged), "pull_request": opened}, indent=None)
    elif opened:
        tables.say(console, f"pull request: {opened}")
    if not (judged.ok if judged else outcome.after.ok):
        raise typer.Exit(exits.FINDINGS)


def _open_request(outcome: "Outcome", *, yes: bool) -> str:
    """Open the pull request, once a person has agreed."""
    from huggingface_hub import get_token

    from ..cure.fix_request import request

    token, where = get_token(), outcome.source.where
    if token is None:
        cure = "Set HF_TOKEN, or run `hf auth login`"
        raise RecipeError("--pr", "needs a token with write access", got="none", cure=cure)
    if not yes and not sys.stdin.isatty():
        rule, got = "a pull request must be confirmed, because everybody can read it", "no terminal to ask on"
        raise RecipeError("--pr", rule, got=got, cure="Add --yes")
    if not yes and not typer.confirm(f"Open a pull request in {printable(where)}?", err=True):
        raise RecipeError("--pr", "a pull request must be confirmed", got="no", cure="Nothing was sent")
    return request(outcome, token, watch=partial(tables.say, Console(stderr=True)))


def _judged(outcome: "Outcome", out: Path, gpus: Any, *, any_vllm: bool, doing: Any) -> "Judged":
    """The check and the dry load of OUT; of a repository, whose other files are not here, of headers."""
    from ..cure.judged import judge

    settings = {"gpus": gpus, "any_vllm": any_vllm, "progress": doing}
    if outcome.source.folder is not None:
        return judge(out, **settings)
    with outcome.proposal.headers() as folder:
        return judge(folder, name=outcome.source.where, **settings)


def _with_values(judged: "Judged") -> "Judged":
    """Also with what the value check finds in the scales of OUT."""
    from dataclasses import replace

    from ..validate.check.values import with_values

    return replace(judged, checked=with_values(judged.checked, "scalars"))


def _show_diff(console: Console, outcome: "Outcome") -> None:
    for line in outcome.proposal.diffs():
        style = "bold" if line.startswith(("---", "+++")) else _COLOURS.get(line[:1], "")
        console.print(Text(line, style), highlight=False, soft_wrap=True)
    if outcome.proposal.edits:
        console.print()


def _show_end(
    console: Console, path: str, outcome: "Outcome", written: "Rewritten | None", judged: "Judged | None"
) -> None:
    """What is left and how it is cured, what was written, and the verdict."""
    data = judged.checked.data if judged else outcome.after
    if judged is None and outcome.proposal.edits:
        data = data.model_copy(update={"path": f"{path}, as it would be"})
    findings.show(console, data, path=_name(outcome, written))
    cures = _cures(outcome, data, written)
    for reason in outcome.proposal.not_here:
        tables.say(console, f"not cured in a repository, because it needs the shards: {reason}")
    for obstacle in outcome.not_for_sglang[:3]:
        tables.say(console, f"not for SGLang: {obstacle}")
    for cure in cures:
        tables.say(console, f"needs new values: {cure}")
    if judged and judged.no_vllm is not None:
        tables.say(console, f"not loaded by vLLM: {judged.no_vllm}")
    if written is not None:
        tables.say(console, written.sentence)
    elif outcome.proposal.edits:
        tables.say(console, f"nothing is written yet: keepmtp fix {shlex.quote(path)} --out NEW")
    else:
        tables.say(console, "nothing to change: there is no finding that fix can cure")


def _name(outcome: "Outcome", written: "Rewritten | None") -> str:
    """What is cured next: the new folder, if it has all of the checkpoint."""
    return str(written.folder) if written and outcome.source.folder is not None else outcome.source.where


def _cures(outcome: "Outcome", data: "CheckData", written: "Rewritten | None") -> list[str]:
    """The commands for what needs new values, each once."""
    from ..cure.fix import cure_elsewhere

    found = (cure_elsewhere(finding, outcome, _name(outcome, written)) for finding in data.findings)
    return [*dict.fromkeys(filter(None, found))]


def _as_json(path: str, outcome: "Outcome", written: "Rewritten | None", judged: "Judged | None") -> dict[str, Any]:
    """What `keepmtp fix --json` prints."""
    from .check import check_json

    data = judged.checked.data if judged else outcome.after
    checked = check_json(data, judged.checked.accounts if judged else ())
    return {
        **checked,
        "cured": [finding.model_dump(exclude={"origin"}) for finding in outcome.cured],
        "changes": [*dict.fromkeys(change.why for change in outcome.proposal.edits)],
        "diff": outcome.proposal.diffs(),
        "needs_shards": [*outcome.proposal.not_here],
        "cures": _cures(outcome, data, written),
        "not_for_sglang": list(outcome.not_for_sglang),
        "out": str(written.folder) if written else None,
        "new": list(written.new) if written else [],
        "linked": len(written.linked) if written else 0,
        "copied_bytes": written.copied_bytes if written else 0,
        "not_loaded": str(judged.no_vllm) if judged and judged.no_vllm else None,
    }
