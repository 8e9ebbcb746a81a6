"""`keepmtp publish`: a checkpoint and its card to the Hub, private unless asked, and checked there.

In: a checkpoint with a green report and a card. Out: a table or JSON; on the Hub, a commit with
exactly those files.
"""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from ..recipes.errors import RecipeError, counted, printable, size_in_words
from ..recipes.frozen import Json, without
from . import exits
from .options import DryRunOption, JsonOption
from .progress import bytes_bar
from .tables import ERR, answer, in_words, table, tell

if TYPE_CHECKING:
    from ..validate.publish.hub import Hub, Remote
    from ..validate.publish.upload import Delivery


def publish(
    path: Annotated[Path, typer.Argument(help="The checkpoint's folder NAME.")],
    repo: Annotated[str, typer.Option("--repo", help="Repository on the Hub, ORG/NAME.")],
    public: Annotated[
        bool, typer.Option("--public", help="Let everybody read it, once checked there.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask whether to go public.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Replace files that differ; delete none.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Upload a checkpoint and its card to the Hub, private by default, and check what arrived.

    Nothing is sent unless the report is green, its numbers are those of the result files, the card
    is what the report says, and every byte on disk hashes to what was measured. Values are read
    once more: a scale that is NaN or zero, or an MTP block of zeros, is refused by its name. Only
    files of the report and of the card are sent.

    Then sizes and hashes are compared with the Hub's: what is there is what was measured. A run
    that was interrupted is continued by the same command. The token is HF_TOKEN or that of `hf auth
    login`.

    To the repository that it was made from, and to any that is public, only what has changed is
    sent, as one commit in a pull request. If the repository that it was made from has moved on,
    nothing is sent; --update proposes the change to what is there now.

    Exit status 1 if the report is not green or the repository is not what was sent; 2 for anything
    else.

    \b
    Example: `keepmtp publish /data/GLM-4.7-NVFP4A16 --repo my-org/GLM-4.7-NVFP4A16-MTP --dry-run`
    """
    if ERR.is_terminal:
        # Nothing else draws a bar while files are sent.
        os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS", None)
    from huggingface_hub import constants, get_token

    from ..recipes.extras import require_extra
    from ..validate.publish import upload as publishing
    from ..validate.publish.hub import Hub

    publishing.check_name(repo)
    url = f"{constants.ENDPOINT}/{repo}"
    tell(f"folder {os.path.realpath(path)}")
    tell(f"repository {url}")
    publishing.ready_report(path)
    made_from = publishing.commit_to_change(path, repo, update=update, public=public)
    token = get_token()
    if token is None and not dry_run:
        raise _no_token()
    # What was public once cannot be taken back. It is asked before hours of hashing.
    if public and not dry_run and not yes:
        _confirm(f"{repo} would be public")
    require_extra("publish", "quantize")  # torch reads the values
    parcel = publishing.prepare(
        path, repo=repo, watch=bytes_bar("hashing"), reading=bytes_bar("reading values")
    )
    delivery = publishing.Delivery(parcel=parcel, repo=repo)
    there = "nothing was asked: no token"
    with exits.soon(exits.GOES_ON):
        is_public = False
        hub = Hub(token or "", watch=tell)
        if token:
            hub.sign_in()
            before = hub.look(repo)
            there = _there(before)
            tell(f"on the Hub  {there}")
            is_public = before is not None and not before.is_private
            delivery = publishing.deliver(
                parcel, repo, before, made_from=made_from, update=update or dry_run
            )
        files = _files(delivery)
        value = {"repo": repo, "files": files}
        changed = [*parcel.files]
        if delivery.base:
            changed = delivery.missing
        num_bytes = parcel.num_bytes(changed)
        if not token or dry_run:
            value |= {"there": there, "bytes": parcel.num_bytes(parcel.files)}
            value["other_files"] = delivery.named("other")
            if delivery.base:
                value["proposed"] = {"files": changed, "bytes": num_bytes}
            answer(value, [_would_be_sent(files), _rest(value)], as_json=as_json)
            return
        tell(f"to send     {counted(len(changed), 'file')}, {size_in_words(num_bytes)}")
        # A new repository becomes public only after its bytes were checked there. One that is
        # public already shows them at once.
        if is_public and not yes:
            read = "so what is sent can be read in its pull request before it is checked"
            _confirm(f"{repo} is public, {read}")
        verb, done = _sent(delivery, hub, public=public)
    value |= {"url": url, **done}
    said = Text.assemble((verb, "green"), f" {_rest(value)}")
    answer(value, [said, f"checked there: {counted(len(files), 'file')}"], as_json=as_json)


def _sent(delivery: "Delivery", hub: "Hub", *, public: bool) -> tuple[str, Json]:
    """What is done with the files, and what comes of it."""
    from ..validate.publish import upload as publishing

    value: Json = {}
    if delivery.base:
        verb = "proposed"
        done = publishing.propose(delivery, hub)
        value["pull_request"] = done.pull_request
    else:
        verb = "published"
        done = publishing.publish(delivery, hub, public=public)
    return verb, value | {
        "commit": done.commit,
        "private": done.is_private,
        "uploaded_bytes": done.num_bytes,
        "kept_files": delivery.named("same"),
        "other_files": delivery.named("other"),
        "verified": True,
    }


def _no_token() -> RecipeError:
    cure = "Set HF_TOKEN, or run `hf auth login`"
    return RecipeError("publish", "needs a token with write access", got="none", cure=cure)


def _rest(value: Json) -> str:
    return in_words(without(value, "files"))


def _files(delivery: "Delivery") -> list[Json]:
    files = []
    for name, local in delivery.parcel.files.items():
        file = {"name": name, "bytes": local.num_bytes, "sha256": local.sha256}
        files.append(file | {"on_the_hub": delivery.states.get(name, "not asked")})
    return files


def _would_be_sent(files: list[Json]) -> RenderableType:
    rows = []
    for file in files:
        rows.append((file["name"], size_in_words(file["bytes"]), file["on_the_hub"]))
    return table("would be sent", ("file", ">size", "on the Hub"), rows)


def _confirm(what: str) -> None:
    """Ask whether to go on; refuse where no person can be asked."""
    got = f"no terminal to ask on, and {what}"
    if sys.stdin.isatty():
        if typer.confirm(f"{printable(what)}. Go on?", err=True):
            return
        got = "no"
    raise RecipeError("publish", "going public must be confirmed", got=got, cure="Add --yes")


def _there(before: "Remote | None") -> str:
    if before is None:
        return "a new private repository"
    kind = "private" if before.is_private else "PUBLIC"
    return (
        f"a {kind} repository with {counted(len(before.files), 'file')}, at commit {before.commit}"
    )
