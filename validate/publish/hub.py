"""The calls of the Hugging Face Hub that `keepmtp publish` needs: sign in, look, create, upload,
make public.

In: a token, from huggingface_hub.get_token, and a repository's name. Out: values, or one sentence.
Where the server repeats the token, the sentence has `<token>` instead.

Easy to get wrong: huggingface_hub takes an answer as it comes: a field that is not there is a
KeyError, and a commit may be the number 7.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from httpx import HTTPError, TransportError
from huggingface_hub import CommitOperationAdd, HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hf_logging
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...checkpoints import hub_client
from ...checkpoints.hub_client import (
    BUSY,
    LONGEST_WAIT_SECONDS,
    PATIENCE,
    HubError,
    seconds_to_wait,
)
from ...recipes.errors import KeepMTPError, first_fault

WAITS_SECONDS = (2, 10, 30)
"""Between attempts, where the Hub does not say how long."""

AGAIN = f"{hub_client.AGAIN}: what has arrived is not sent twice"

T = TypeVar("T")
_TOKENS = "https://huggingface.co/settings/tokens"
_NEW_TOKEN = f"Make one with write access at {_TOKENS} and set HF_TOKEN, or run `hf auth login`"
_RULES: Mapping[int, tuple[str, str]] = {
    401: ("the Hub must know the token", _NEW_TOKEN),
    403: (
        "the token must be allowed to write there",
        f"Take one that is ({_TOKENS}), ask an owner, or another --repo",
    ),
    412: ("nobody else may write to it meanwhile", AGAIN),
    **dict.fromkeys(
        (400, 402, 404, 409, 413, 422), ("the Hub must accept it", "Check --repo and the card")
    ),
}
# What huggingface_hub raises where an answer has another form than it expects, or is no JSON; a
# ValueError is also what the Hub refuses to store (1.33 _commit_api.py).
_OTHER_FORM = (KeyError, TypeError, AttributeError, IndexError, ValueError)
# A HfHubHTTPError is an HTTPError, and the upload's threads wrap it in a RuntimeError.
_FAULTS = (HTTPError, OSError, RuntimeError, *_OTHER_FORM)


class _Answer(BaseModel):
    """What huggingface_hub made of an answer, if it has the usual form."""

    model_config = ConfigDict(frozen=True, strict=True, from_attributes=True)


class _Large(_Answer):
    sha256: str


class Blob(_Answer):
    """A file of a commit; the Hub has the SHA-256 of a large one, and of a small one git's hash
    alone.
    """

    rfilename: str
    size: int
    blob_id: str
    lfs: _Large | None


class Remote(_Answer):
    """A repository at one commit."""

    repo: str = Field(alias="id")
    commit: str = Field(alias="sha", pattern="^[0-9a-f]{40}$")
    is_private: bool = Field(alias="private")
    siblings: list[Blob]

    @property
    def files(self) -> dict[str, Blob]:
        """By path."""
        return {blob.rfilename: blob for blob in self.siblings}


class Hub:
    """One token's view of the Hub.

    Args:
        token: lives here and in huggingface_hub's request headers only.
        watch: called with words about what it waits for.
    """

    def __init__(self, token: str, *, watch: Callable[[str], None]) -> None:
        hub_client.refuse_endpoint(constants.ENDPOINT)
        hub_client.install()
        # its warnings quote the server's, which may hold the token
        hf_logging.set_verbosity_error()
        self._token = token
        self.watch = watch
        self._api = HfApi(token=token)

    def sign_in(self) -> None:
        """Ask whose token it is.

        Raises:
            HubError: it is not valid, or a token that may only read.
        """

        def ask() -> tuple[str, object]:
            answer = self._api.whoami()
            return answer["name"], answer.get("auth", {}).get("accessToken", {}).get("role")

        name, role = self._ask("the Hub", ask)
        if role == "read":
            raise HubError(
                "the Hub",
                "the token must be allowed to write",
                got=f"{name}'s token for reading",
                cure=_NEW_TOKEN,
            )

    def look(self, repo: str, *, revision: str | None = None) -> Remote | None:
        """What a repository holds, at `revision` or now; None if there is none that this token may
        see.

        Raises:
            HubError: it has another name now, or the Hub's answer has another form.
        """

        def ask() -> Remote | None:
            try:
                info = self._api.model_info(repo, revision=revision, files_metadata=True)
            except GatedRepoError:
                raise
            except (RepositoryNotFoundError, RevisionNotFoundError):
                return None
            remote = Remote.model_validate(info)
            if remote.repo.lower() != repo.lower():
                raise HubError(
                    "--repo",
                    "must be the repository's own name",
                    got=f"{repo}, which is {remote.repo}",
                    cure="Name the repository as it is called now",
                )
            return remote

        return self._ask(repo, ask)

    def create(self, repo: str) -> None:
        """Make a private repository, if there is none of this name."""
        self._ask(repo, lambda: self._api.create_repo(repo, private=True, exist_ok=True))

    def send(
        self,
        repo: str,
        files: Mapping[str, Path | bytes],
        *,
        parent: str,
        message: str,
        is_request: bool = False,
    ) -> tuple[str, str]:
        """Send files in one commit on top of the commit `parent`; returns that commit, and the page
        of its pull request where one was made.

        With hf_xet, huggingface_hub sends by Xet: what the Hub has of a file already is not sent
        again.

        Args:
            repo: ORG/NAME.
            files: by their path there.
            parent: the newest commit.
            message: the commit's.
            is_request: a pull request gets the commit, and not the main branch.

        Raises:
            HubError: the Hub refuses. For a request it is asked once: a second answer would be a
                second request.
        """
        waits = WAITS_SECONDS
        if is_request:
            waits = ()

        def ask() -> tuple[str, str]:
            added = [CommitOperationAdd(name, content) for name, content in files.items()]
            made = self._api.create_commit(
                repo, added, commit_message=message, parent_commit=parent, create_pr=is_request
            )
            return made.oid, str(made.pr_url)

        return self._ask(repo, ask, waits=waits)

    def requests(self, repo: str, title: str) -> list[tuple[str, str]]:
        """The branches and pages of open pull requests that have this title."""

        def ask() -> list[tuple[str, str]]:
            found = self._api.get_repo_discussions(
                repo, discussion_type="pull_request", discussion_status="open"
            )
            return [(str(one.git_reference), one.url) for one in found if one.title == title]

        return self._ask(repo, ask)

    def set_visibility(self, repo: str, *, is_private: bool) -> None:
        """Let everybody read it, or nobody but its owners."""
        self._ask(repo, lambda: self._api.update_repo_settings(repo, private=is_private))

    def _ask(
        self,
        repo: str,
        call: Callable[[], T],
        *,
        waits: Sequence[int] = WAITS_SECONDS,
    ) -> T:
        """The value of `call`, tried again while the fault is one that passes.

        Args:
            waits: seconds before each other attempt.
        """
        # huggingface_hub 1.33 tries again where it uploads bytes (`http_backoff`), but not in
        # whoami-v2, repos/create, listings, settings, nor in each commit. To do it here is safe,
        # because a commit holds only what is missing.
        PATIENCE.silences = 0
        for wait in (*waits, None):
            try:
                return call()
            except _FAULTS as error:
                # The Hub's own answer; a thread of the upload may have wrapped it in other errors.
                seen: BaseException | None = error
                while seen is not None and not isinstance(
                    seen, (HfHubHTTPError, TransportError, KeepMTPError)
                ):
                    seen = seen.__cause__
                root = seen or error
                if isinstance(root, KeepMTPError):
                    raise root from None
                rule = "the Hub must answer"
                cure = AGAIN
                passes = isinstance(root, (TransportError, RuntimeError))
                pause = wait
                if isinstance(root, HfHubHTTPError):
                    status = root.response.status_code
                    asked = seconds_to_wait(root.response)
                    rule, cure = _RULES.get(status, (rule, cure))
                    passes = status in BUSY
                    if None not in (wait, asked):
                        pause = asked
                elif isinstance(root, _OTHER_FORM):
                    rule = "the Hub's answer must have its usual form"
                    cure = f"Check HF_ENDPOINT and the network. {AGAIN}"
                if not passes or pause is None or pause > LONGEST_WAIT_SECONDS:
                    raise HubError(repo, rule, got=self._words(root), cure=cure) from error
                self.watch(f"{repo}: {self._words(root)}; trying again in {pause} s")
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _words(self, root: BaseException) -> str:
        """The Hub's words on one line: without the token, and without the query of a URL, because
        that of a presigned URL has its signature.
        """
        said = str(getattr(root, "server_message", None) or root).strip()
        if isinstance(root, KeyError):
            said = f"no {root}"
        if isinstance(root, ValidationError):
            said = first_fault(root)
        line = next(iter(said.splitlines()), type(root).__name__).strip().rstrip(".")
        if isinstance(root, HfHubHTTPError) and str(root.response.status_code) not in line:
            line = f"{root.response.status_code}: {line}"
        line = line.replace(self._token, "<token>")
        return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]+", r"\1", line)
