"""`keepmtp publish`: a checkpoint and its card to the Hub, private unless asked, and checked there.

In: a checkpoint with a green report and a card. Out: a table or JSON; on the Hub, a commit with exactly those files.

Easy to get wrong: what was public once cannot be taken back. The command asks before it sends a byte. A new repository
becomes public only after its bytes and its loading were checked there. For one that is public already it asks too.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from ..recipes.errors import RecipeError, printable, size_in_words
from . import tables
from .options import JsonOption, chosen_gpus
from .progress import bytes_bar
from .tables import escape

if TYPE_CHECKING:
    from ..validate.publish.hub import Remote
    from ..validate.publish.upload import FileState, Published
    from ..validate.publish.upload_set import Parcel

err = Console(stderr=True)


def publish(
    path: Annotated[Path, typer.Argument(help="The checkpoint's folder NAME, next to NAME.report and NAME.card.")],
    repo: Annotated[str, typer.Option("--repo", help="Repository on the Hub, ORG/NAME.")],
    public: Annotated[bool, typer.Option("--public", help="Let everybody read it, once it is checked there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether to go public.")] = False,
    update: Annotated[
        bool,
        typer.Option(
            "--update",
            help="Replace files that differ in a repository that exists. Its "
            "history keeps them, and nothing is deleted.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be sent and stop.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="GPU that the dry load of the repository pretends; default: the report's first."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Upload a checkpoint and its card to the Hub, private by default, and check what arrived.

    Nothing is sent unless the report is green, its numbers are those of the result files, the card is what the report
    says, and every byte on disk hashes to what was measured. Values are read once more: a scale that is NaN or zero,
    or an MTP block of zeros, is refused by its name. Only files of the report and of the card are sent.

    Then sizes and hashes are compared with the Hub's, and the repository is dry-loaded by range requests (checked
    without vLLM where there is none). A run that was interrupted is continued by the same command. The token is
    HF_TOKEN or that of `hf auth login`.

    Exit status 1 if the report is not green or the repository is not what was sent; 2 for anything else.

    Example: `keepmtp publish /data/GLM-4.7-NVFP4A16 --repo my-org/GLM-4.7-NVFP4A16-MTP --dry-run`
    """
    if err.is_terminal:  # nothing else draws a bar while files are sent
        os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
    from huggingface_hub import constants, get_token

    from ..checkpoints.hub_client import stopped_by_signals
    from ..recipes.extras import require_extra
    from ..validate.publish import upload as publishing
    from ..validate.publish.hub import Hub
    from ..validate.publish.upload_set import prepare, ready_report

    publishing.check_name(repo)
    _say(f"folder      {printable(os.path.realpath(path))}\nrepository  {constants.ENDPOINT}/{repo}")
    chosen = next(iter(chosen_gpus([gpu] if gpu else [])), None)
    ready_report(path)
    token = get_token()
    if token is None and not dry_run:
        raise RecipeError(
            "publish", "needs a token with write access", got="none", cure="Set HF_TOKEN, or run `hf auth login`"
        )
    if public and not dry_run:
        _refuse_unasked(f"{repo} would be public", yes=yes)
    require_extra("publish", "quantize")  # torch reads the values
    parcel = prepare(path, repo=repo, watch=bytes_bar(err, "hashing"), reading=bytes_bar(err, "reading values"))
    if token is None:
        _show(parcel, repo, None, "nothing was asked: no token", as_json=as_json)
        return
    hub = Hub(token, watch=_say)
    with stopped_by_signals():
        hub.sign_in()
        before = hub.look(repo)
        _say(f"on the Hub  {_in_words(before)}")
        found = publishing.compare(parcel, before)
        if dry_run:
            _show(parcel, repo, found, _in_words(before), as_json=as_json)
            return
        if not update:
            publishing.refuse_overwriting(repo, found)
        is_public = before is not None and not before.is_private
        _ask(parcel, repo, is_public=is_public, public=public, yes=yes)
        done = publishing.publish(parcel, hub, repo, public=public, update=update, may_be_public=is_public, gpu=chosen)
    if as_json:
        tables.print_json(_json_of(parcel, repo, done), indent=None)
    else:
        Console().print(_told(parcel, repo, done), highlight=False, soft_wrap=True)


def _json_of(parcel: "Parcel", repo: str, done: "Published") -> dict[str, Any]:
    from huggingface_hub import constants

    return {
        "repo": repo,
        "url": f"{constants.ENDPOINT}/{repo}",
        "commit": done.commit,
        "private": done.is_private,
        "files": _files(parcel),
        "uploaded_bytes": done.num_bytes,
        "kept_files": done.kept,
        "other_files": done.others,
        "verified": True,
        "loaded": done.how,
    }


def _told(parcel: "Parcel", repo: str, done: "Published") -> str:
    from huggingface_hub import constants

    count, kept = len(parcel.files), len(done.kept)
    kind = "private" if done.is_private else "public"
    sent = f"all {count} files were there already"
    if count > kept:
        sent = f"sent {_counted(count - kept)}, {size_in_words(done.num_bytes)}; were there already: {kept}"
    lines = [
        f"[green]published[/] {constants.ENDPOINT}/{repo} ({kind}), commit {done.commit}",
        sent,
        f"checked there: sizes and hashes of {count} files; {done.how}",
    ]
    if done.others:
        lines.append(f"not ours and left alone: {escape(printable(', '.join(done.others)))}")
    return "\n".join(lines)


def _ask(parcel: "Parcel", repo: str, *, is_public: bool, public: bool, yes: bool) -> None:
    """Confirm that everybody may read it.

    Raises:
        RecipeError: nobody to ask, or the answer is no.
    """
    _say(f"to send     {_counted(len(parcel.files))}, {size_in_words(parcel.num_bytes)}")
    if not public and not is_public:
        return
    what = f"{repo} would be public"
    if is_public:
        what = f"{repo} is public, so what is sent can be read on a branch before it is checked"
    _refuse_unasked(what, yes=yes)
    if not yes and not typer.confirm(f"{what}. Go on?", err=True):
        raise RecipeError(repo, "going public must be confirmed", got="no", cure="Nothing was sent")


def _refuse_unasked(what: str, *, yes: bool) -> None:
    if not yes and not sys.stdin.isatty():
        raise RecipeError(
            "publish", "going public must be confirmed", got=f"no terminal to ask on, and {what}", cure="Add --yes"
        )


def _show(parcel: "Parcel", repo: str, found: "Mapping[str, FileState] | None", there: str, *, as_json: bool) -> None:
    """The allow-list, and what the Hub holds of it where it was asked."""
    if as_json:
        told = {
            "repo": repo,
            "there": there,
            "files": _files(parcel, found),
            "bytes": parcel.num_bytes,
            "other_files": _others(found),
        }
        tables.print_json(told, indent=None)
        return
    Console().print(_table(parcel, repo, found, there))


def _table(parcel: "Parcel", repo: str, found: "Mapping[str, FileState] | None", there: str) -> RenderableType:
    rows = Table(title=f"would be sent to {repo}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("file", overflow="fold")
    rows.add_column("size", justify="right", no_wrap=True)
    rows.add_column("on the Hub", no_wrap=True)
    for name, local in parcel.files.items():
        rows.add_row(escape(printable(name)), size_in_words(local.num_bytes), found[name] if found else "not asked")
    lines = [f"{len(parcel.files)} files, {size_in_words(parcel.num_bytes)}. On the Hub: {there}."]
    others = ", ".join(_others(found))
    if others:
        lines.append(f"There and not of this checkpoint: {escape(printable(others))}.")
    return Group(rows, *lines)


def _others(found: "Mapping[str, FileState] | None") -> list[str]:
    return [name for name, state in (found or {}).items() if state == "other"]


def _files(parcel: "Parcel", found: "Mapping[str, FileState] | None" = None) -> list[dict[str, Any]]:
    return [
        {"name": name, "bytes": local.num_bytes, "sha256": local.sha256}
        | ({"on_the_hub": found[name]} if found else {})
        for name, local in parcel.files.items()
    ]


def _in_words(remote: "Remote | None") -> str:
    if remote is None:
        return "a new private repository"
    kind = "private" if remote.is_private else "PUBLIC"
    return f"a {kind} repository with {_counted(len(remote.files))}, at commit {remote.commit}"


def _counted(files: int) -> str:
    return f"{files} file{'s' * (files != 1)}"


def _say(words: str) -> None:
    for line in words.splitlines():
        tables.say(err, line)
