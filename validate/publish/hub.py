"""The calls of the Hugging Face Hub that `keepmtp publish` needs: sign in, look, create, upload, make public.

In: a token, from huggingface_hub.get_token, and a repository's name. Out: values, or one sentence. Where the server
repeats the token, the sentence has `<token>` instead.

Easy to get wrong: huggingface_hub 1.33 tries again where it uploads bytes (`http_backoff`), but not in whoami-v2,
repos/create, listings, settings, nor in the commit without Xet. So each call is tried again here. That is safe, because
`upload_folder` sends only what is missing.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from httpx import HTTPError, TransportError
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import parse_ratelimit_headers

from ...recipes.errors import KeepMTPError

WAITS_SECONDS = (2, 10, 30)
"""Between attempts, where the Hub does not say how long."""
LONGEST_WAIT_SECONDS = 600
"""If the Hub says longer than this, the call fails at once. Its rate limits are for windows of 300 seconds."""

T = TypeVar("T")
Say = Callable[[str], None]
_PASSING = (408, 429, 500, 502, 503, 504)
_TOKENS = "https://huggingface.co/settings/tokens"
_NEW_TOKEN = f"Make one with write access at {_TOKENS} and set HF_TOKEN, or run `hf auth login`"
_AGAIN = "Run the same command again: what has arrived is not sent twice"


class HubError(KeepMTPError):
    """The Hub refuses, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A repository at one commit; `files` are by path."""

    repo: str
    commit: str
    is_private: bool
    files: Mapping[str, RepoFile]


class Hub:
    """One token's view of the Hub.

    Args:
        token: lives here and in huggingface_hub's request headers only.
        watch: called with words about what it waits for.
    """

    def __init__(self, token: str, *, watch: Say) -> None:
        self._token, self._watch = token, watch
        self._api = HfApi(token=token)
        self._user = ""

    @property
    def user(self) -> str:
        """Whose token it is, once `sign_in` has asked."""
        return self._user

    def sign_in(self) -> None:
        """Ask whose token it is.

        Raises:
            HubError: it is not valid, or a token that may only read.
        """
        told = self._ask("the Hub", self._api.whoami)
        self._user = str(told.get("name", ""))
        if told.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise HubError(
                "the Hub",
                "the token must be allowed to write",
                got=f"{self._user}'s token for reading",
                cure=_NEW_TOKEN,
            )

    def look(self, repo: str, *, revision: str | None = None) -> Remote | None:
        """What a repository holds, at `revision` or now; None if there is none that this token may see."""

        def ask() -> Remote | None:
            try:
                info = self._api.model_info(repo, revision=revision)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None
            tree = self._api.list_repo_tree(repo, recursive=True, revision=info.sha) if info.sha else ()
            return Remote(
                repo=repo,
                commit=info.sha or "",
                is_private=bool(info.private),
                files={entry.path: entry for entry in tree if isinstance(entry, RepoFile)},
            )

        return self._ask(repo, ask)

    def create(self, repo: str) -> None:
        """Make a private repository, if there is none of this name."""
        self._ask(repo, lambda: self._api.create_repo(repo, private=True, exist_ok=True))

    def upload(self, repo: str, folder: Path, *, parent: str, message: str) -> str:
        """Send the files of a folder on top of the commit `parent`; returns the commit that holds them."""
        return self._ask(
            repo,
            lambda: (
                self._api.upload_folder(
                    repo_id=repo,
                    folder_path=folder,
                    commit_message=message,
                    parent_commit=parent or None,
                ).oid
            ),
        )

    def make_public(self, repo: str) -> None:
        """Let everybody read it."""
        self._ask(repo, lambda: self._api.update_repo_settings(repo, private=False))

    @contextmanager
    def discreet(self) -> Iterator[None]:
        """Remove the token from huggingface_hub's own log, which quotes the server's warnings."""
        handlers = logging.getLogger("huggingface_hub").handlers
        for handler in handlers:
            handler.addFilter(self._cleaned)
        try:
            yield
        finally:
            for handler in handlers:
                handler.removeFilter(self._cleaned)

    def _cleaned(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._clean(record.getMessage()), ()
        return True

    def _ask(self, repo: str, call: Callable[[], T]) -> T:
        for wait in (*WAITS_SECONDS, None):
            try:
                return call()
            # HfHubHTTPError is an HTTPError; the upload's threads wrap it in a RuntimeError, which is also what hf_xet
            # raises; what the Hub refuses to store is a ValueError (huggingface_hub 1.33 _commit_api.py).
            except (HTTPError, OSError, RuntimeError, ValueError) as error:
                pause = _pause(error, wait)
                if pause is None:
                    raise self._refusal(repo, error) from error
                self._watch(f"{repo}: {self._words(error)}; trying again in {pause} s")
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _refusal(self, repo: str, error: Exception) -> HubError:
        match _status(error):
            case 401:
                rule, cure = "the Hub must know the token", _NEW_TOKEN
            case 403:
                whose = f"{self._user}'s token" if self._user else "the token"
                rule = f"{whose} must be allowed to write to {repo.partition('/')[0]}"
                cure = f"Take one that is ({_TOKENS}), ask an owner of {repo.partition('/')[0]}, or another --repo"
            case 412:
                rule, cure = "nobody else may write to it meanwhile", _AGAIN
            case 400 | 402 | 404 | 409 | 413 | 422:
                rule, cure = "the Hub must accept it", "Check --repo and its page"
            case _:
                rule, cure = "the Hub must answer", _AGAIN
        return HubError(repo, rule, got=self._words(error), cure=cure)

    def _words(self, error: BaseException) -> str:
        status, told = _status(error), _root(error)
        said = getattr(told, "server_message", None) or str(told)
        lines = [line.strip() for line in str(said).strip().splitlines() if line.strip()]
        line = lines[0].rstrip(".") if lines else type(told).__name__
        return self._clean(f"{status}: {line}" if status and str(status) not in line else line)

    def _clean(self, text: str) -> str:
        """Without the token, and without the query of a URL: that of a presigned URL has its signature."""
        return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]+", r"\1", text.replace(self._token, "<token>"))


def _pause(error: Exception, wait: int | None) -> int | None:
    """Seconds until another attempt; None if there should be none."""
    status, told = _status(error), _root(error)
    is_passing = status in _PASSING if status else isinstance(told, (TransportError, RuntimeError))
    if wait is None or not is_passing:
        return None
    if isinstance(told, HfHubHTTPError):
        limit = parse_ratelimit_headers(told.response.headers)
        after = told.response.headers.get("Retry-After", "")
        said = limit.reset_in_seconds if limit and not limit.remaining else int(after) if after.isdigit() else None
        wait = wait if said is None else said
    return wait if wait <= LONGEST_WAIT_SECONDS else None


def _status(error: BaseException) -> int:
    told = _root(error)
    return told.response.status_code if isinstance(told, HfHubHTTPError) else 0


def _root(error: BaseException) -> BaseException:
    """The Hub's own answer; a thread of the upload may have wrapped it in other errors."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (HfHubHTTPError, TransportError)):
        seen = seen.__cause__
    return seen or error
