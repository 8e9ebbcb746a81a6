"""The calls of the Hugging Face Hub that `keepmtp publish` needs: sign in, look, create, upload, make public.

In: a token, from huggingface_hub.get_token, and a repository's name. Out: values, or one sentence. Where the server
repeats the token, the sentence has `<token>` instead.

Easy to get wrong: huggingface_hub 1.33 tries again where it uploads bytes (`http_backoff`), but not in whoami-v2,
repos/create, listings, settings, nor in the commit. So each call is tried again here. That is safe, because a commit
holds only what is missing. And it takes an answer as it comes: a field that is not there is a KeyError, and a commit
may be the number 7.
"""

import logging
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from httpx import HTTPError, TransportError
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import parse_ratelimit_headers

from ...checkpoints import hub_client
from ...checkpoints.hub_client import LONGEST_WAIT_SECONDS, PATIENCE, QUESTION_LIMITS, HubError
from ...recipes.errors import KeepMTPError

WAITS_SECONDS = (2, 10, 30)
"""Between attempts, where the Hub does not say how long."""

AGAIN = f"{hub_client.AGAIN}: what has arrived is not sent twice"

T = TypeVar("T")
Say = Callable[[str], None]
_PASSING = (408, 429, 500, 502, 503, 504)
_TOKENS = "https://huggingface.co/settings/tokens"
_NEW_TOKEN = f"Make one with write access at {_TOKENS} and set HF_TOKEN, or run `hf auth login`"
# What huggingface_hub raises where an answer has another form than it expects.
_OTHER_FORM = (KeyError, TypeError, AttributeError, IndexError)


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
        hub_client.refuse_endpoint(constants.ENDPOINT)
        hub_client.install()
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

        def ask() -> tuple[str, object]:
            told = self._api.whoami()
            return _is(told.get("name"), str), told.get("auth", {}).get("accessToken", {}).get("role")

        self._user, role = self._ask("the Hub", ask)
        if role == "read":
            raise HubError(
                "the Hub",
                "the token must be allowed to write",
                got=f"{self._user}'s token for reading",
                cure=_NEW_TOKEN,
            )

    def look(self, repo: str, *, revision: str | None = None) -> Remote | None:
        """What a repository holds, at `revision` or now; None if there is none that this token may see.

        Raises:
            HubError: it has another name now, or the Hub's answer has another form.
        """

        def ask() -> Remote | None:
            try:
                info = self._api.model_info(repo, revision=revision)
            except GatedRepoError:
                raise
            except RepositoryNotFoundError:
                return None
            self._refuse_other_name(repo, _is(info.id, str))
            commit = _commit(info.sha)
            tree = self._api.list_repo_tree(repo, recursive=True, revision=commit)
            files = [_file(entry) for entry in tree if _is(entry.path, str) and isinstance(entry, RepoFile)]
            return Remote(
                repo=repo,
                commit=commit,
                is_private=_is(info.private, bool),
                files={file.path: file for file in files},
            )

        return self._ask(repo, ask)

    def create(self, repo: str) -> None:
        """Make a private repository, if there is none of this name."""
        self._ask(repo, lambda: self._api.create_repo(repo, private=True, exist_ok=True))

    def upload(self, repo: str, files: Callable[[], Sequence[CommitOperationAdd]], *, parent: str, message: str) -> str:
        """Send files on top of the commit `parent`; returns the commit that holds them.

        Args:
            files: called for each attempt, since huggingface_hub notes in them how far it came.
        """

        def ask() -> str:
            done = self._api.create_commit(repo, list(files()), commit_message=message, parent_commit=parent)
            return _commit(done.oid)

        return self._ask(repo, ask, is_long=True)

    def request(
        self, repo: str, files: Mapping[str, bytes | None], *, parent: str, message: str, description: str
    ) -> str:
        """Open a pull request with small files on top of the commit `parent`; returns its address.

        It is sent once: whether one whose answer was lost is there, only the repository's page says.

        Args:
            files: bytes by path; None removes a file.
        """
        operations = [
            CommitOperationDelete(path) if data is None else CommitOperationAdd(path, data)
            for path, data in sorted(files.items())
        ]

        def ask() -> str:
            done = self._api.create_commit(
                repo,
                operations,
                commit_message=message,
                commit_description=description,
                parent_commit=parent,
                create_pr=True,
            )
            return _is(done.pr_url, str)

        return self._ask(repo, ask, waits=(None,))

    def set_visibility(self, repo: str, *, is_private: bool) -> None:
        """Let everybody read it, or nobody but its owners."""
        self._ask(repo, lambda: self._api.update_repo_settings(repo, private=is_private))

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

    def _ask(
        self,
        repo: str,
        call: Callable[[], T],
        *,
        is_long: bool = False,
        waits: Sequence[int | None] = (*WAITS_SECONDS, None),
    ) -> T:
        """The value of `call`, tried again while the fault is one that passes.

        Args:
            is_long: it sends files, and may take as long as bytes arrive.
            waits: seconds between attempts; None after the last.
        """
        PATIENCE.silences = 0
        for wait in waits:
            PATIENCE.until = None if is_long else time.monotonic() + QUESTION_LIMITS * PATIENCE.seconds
            try:
                return call()
            # HfHubHTTPError is an HTTPError; the upload's threads wrap it in a RuntimeError; what the Hub refuses to
            # store is a ValueError (huggingface_hub 1.33 _commit_api.py), and so is an answer that is no JSON.
            except (HTTPError, OSError, RuntimeError, ValueError, *_OTHER_FORM) as error:
                if isinstance(own := _root(error), KeepMTPError):
                    raise own from None
                pause = _pause(error, wait)
                if pause is None:
                    raise self._refusal(repo, error) from error
                self._watch(f"{repo}: {self._words(error)}; trying again in {pause} s")
            finally:
                PATIENCE.until = None
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def _refuse_other_name(self, repo: str, now: str) -> None:
        if now.lower() != repo.lower():
            cure = "Name the repository as it is called now"
            raise HubError("--repo", "must be the repository's own name", got=f"{repo}, which is {now}", cure=cure)

    def _refusal(self, repo: str, error: Exception) -> HubError:
        match _status(error):
            case 401:
                rule, cure = "the Hub must know the token", _NEW_TOKEN
            case 403:
                whose = f"{self._user}'s token" if self._user else "the token"
                rule = f"{whose} must be allowed to write to {repo.partition('/')[0]}"
                cure = f"Take one that is ({_TOKENS}), ask an owner of {repo.partition('/')[0]}, or another --repo"
            case 412:
                rule, cure = "nobody else may write to it meanwhile", AGAIN
            case 400 | 402 | 404 | 409 | 413 | 422:
                rule, cure = "the Hub must accept it", "Check --repo and its page"
            case 0 if isinstance(error, (ValueError, *_OTHER_FORM)):
                rule, cure = "the Hub's answer must have its usual form", f"Check HF_ENDPOINT and the network. {AGAIN}"
            case _:
                rule, cure = "the Hub must answer", AGAIN
        return HubError(repo, rule, got=self._words(error), cure=cure)

    def _words(self, error: BaseException) -> str:
        status, told = _status(error), _root(error)
        said = getattr(told, "server_message", None) or str(told)
        if isinstance(told, KeyError):
            said = f"no {said}"
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
    while seen is not None and not isinstance(seen, (HfHubHTTPError, TransportError, KeepMTPError)):
        seen = seen.__cause__
    return seen or error


def _is(value: Any, kind: type[T]) -> T:
    """The value, if it is of this type."""
    if not isinstance(value, kind):
        raise ValueError(f"{str(value)[:80]!r} in place of a {kind.__name__}")
    return value


def _commit(value: object) -> str:
    """A commit's name: 40 hexadecimal digits."""
    if not re.fullmatch("[0-9a-f]{40}", _is(value, str)):
        raise ValueError(f"{str(value)[:80]!r} in place of a commit")
    return str(value)


def _file(entry: RepoFile) -> RepoFile:
    """A file of a listing, if its size and hashes are what they must be."""
    texts, numbers = [entry.blob_id], [entry.size]
    if entry.lfs is not None:
        texts.append(entry.lfs.sha256)
        numbers.append(entry.lfs.size)
    for text in texts:
        _is(text, str)
    for number in numbers:
        _is(number, int)
    return entry


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end what threads send to the Hub or read from it; Python would wait: a shard takes minutes."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a program that uses keepmtp has its own way to stop a thread
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        PATIENCE.stop(lambda: end(number, frame))
        end(number, frame)

    def end(number: int, frame: FrameType | None) -> None:
        usual = before[signal.Signals(number)]
        if callable(usual):
            usual(number, frame)
        raise SystemExit(128 + number)

    PATIENCE.stopped.clear()  # a program may ask the Hub again, after it has stopped an upload
    PATIENCE.is_watched = True
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:  # what is stopped stays so: a thread that has not noticed yet would send its shard again
        PATIENCE.is_watched = False
        for number, usual in before.items():
            signal.signal(number, usual)
