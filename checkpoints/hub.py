"""What is asked of the Hub for a checkpoint: commits, lists of files, files, and bytes by range
requests.

In: a repository, a commit and a file's name. Out: the answer, or a refusal in one sentence. The
header of a file on the Hub is judged as that of a local file. Deadlines and the token's rules are
those of `hub_client.py`. huggingface_hub 1.33 reads no range into memory that is there, and
compares no header with its file's size.

Easy to get wrong: a server may ignore the range and send the whole file. So no more is read than
was asked for.
"""

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from httpx import HTTPError, InvalidURL, TransportError
from huggingface_hub import HfApi, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ..recipes.errors import KeepMTPError, NoCheckpointError, RecipeError
from .hub_client import BUSY, install_once
from .safetensors_file import LENGTH_BYTES, FileHeader, header_length, parse_header

AT_A_TIME = 16
"""Ranges that are asked for at the same time."""
GAP_BYTES = 1 << 20
"""Between two tensors that are asked for together: what 20 MB/s bring in the 50 ms of a request."""
_FIRST_BYTES = 100_000  # of a shard; most headers are shorter, and then one request is enough
_TRIES = 5
_FIRST_WAIT_SECONDS = 0.25
_EXPIRED = (401, 403, 404, 410)
# The Hub's address of a file -> the one that it answers with, which is good for an hour or so. It
# is kept, so that a thousand ranges are not two thousand requests, and asked for anew when it has
# expired.
_leads_to: dict[str, str] = {}

_REFUSED = "the Hub must let this machine read it"
# What huggingface_hub raises over an answer that has another form than it expects.
_OTHER_FORM = (ValueError, TypeError, KeyError, AttributeError, RecursionError, InvalidURL)


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Turns the Hub's exceptions, and those of its client over a mangled answer, into one
    sentence.
    """
    install_once()
    try:
        yield
    except KeepMTPError:
        raise
    except (*_OTHER_FORM, HTTPError, OSError) as error:
        rule = "the Hub must answer as it is documented"
        cure = "Run it again, or check HF_ENDPOINT"
        if isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError)):
            rule = "must be a folder or a public Hub repository with this revision"
            cure = (
                "Check its name and its revision, or run `hf auth login`, and ask for access on "
                "its page"
            )
        elif isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            rule = _REFUSED
            cure = "Run `hf auth login` with a token that may read it"
        elif isinstance(error, (HTTPError, OSError)):
            rule = "the Hub must be reachable"
            cure = "Check the network, or name a folder"
        said = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".: ")
        raise NoCheckpointError(repo, rule, got=said, cure=cure) from error


def files_of(repo: str, revision: str) -> tuple[str, list[str]]:
    """The commit of a revision, and its files.

    Raises:
        NoCheckpointError: the Hub does not have it, or does not answer.
    """
    with hub_errors(repo):
        info = HfApi().model_info(repo, revision=revision)
        names = sorted(sibling.rfilename for sibling in info.siblings or ())
    for name in (info.sha or "", *names):
        if not isinstance(name, str) or name.startswith("/") or ".." in name.split("/"):
            raise NoCheckpointError(
                repo,
                "the Hub must list files of the repository by name",
                got=repr(name),
                cure="Check HF_ENDPOINT",
            )
    return info.sha or revision, names


def dataset_commit(name: str, revision: str, where: str) -> str:
    """The commit of a dataset; asked before `datasets` is imported, so that a Hub out of reach is
    found in time.

    Args:
        name: its Hub id.
        revision: a branch, a tag or a commit.
        where: who names it, for the refusal.

    Raises:
        RecipeError: there is none that this machine may read, or the Hub does not answer.
    """
    try:
        with hub_errors(name):
            found = HfApi().dataset_info(name, revision=revision)
            return found.sha or revision
    except NoCheckpointError as error:
        rule = error.rule
        cure = (
            "Check the network; or where the Hub is reachable run `hf download --repo-type dataset "
            f"{name} --local-dir DIR`, and name the folder"
        )
        if rule == _REFUSED:
            cure = error.cure
        elif isinstance(error.__cause__, RepositoryNotFoundError | RevisionNotFoundError):
            rule = "must be a dataset on the Hub, or a file or folder"
            cure = (
                "Check its name and dataset_revision, ask for access on its page, run "
                "`hf auth login`"
            )
        raise RecipeError(where, rule, got=error.got, cure=cure) from error


def fetch(repo: str, name: str, *, commit: str) -> Path | None:
    """A file in the Hub's cache, downloaded if it is not there yet; None if the repository has none
    of this name.

    Raises:
        NoCheckpointError: the Hub does not send it.
    """
    with hub_errors(repo):
        try:
            return Path(HfApi().hf_hub_download(repo, name, revision=commit))
        except EntryNotFoundError:
            return None


def fetch_all(repo: str, patterns: Sequence[str], *, commit: str, bars: type[Any] | None) -> Path:
    """A folder in the Hub's cache with a repository's files that fit the patterns.

    Raises:
        NoCheckpointError: the Hub does not send them.
    """
    with hub_errors(repo):
        return Path(
            snapshot_download(repo, revision=commit, allow_patterns=[*patterns], tqdm_class=bars)
        )


def read_remote_header(repo: str, file: str, *, commit: str) -> FileHeader:
    """The header of one file, checked against the size that the Hub gives.

    Raises:
        CheckpointError: as `safetensors_file.read_header`.
        NoCheckpointError: the Hub does not send it.
    """
    where = f"{repo}/{file}"
    start = bytearray(_FIRST_BYTES)
    size = read_range(repo, file, commit=commit, start=0, into=memoryview(start), may_end=True)
    end = LENGTH_BYTES + header_length(bytes(start[: min(LENGTH_BYTES, size)]), size, where)
    if end > len(start):
        rest = bytearray(end - len(start))
        read_range(repo, file, commit=commit, start=len(start), into=memoryview(rest))
        start += rest
    return parse_header(bytes(start[LENGTH_BYTES:end]), file=file, num_bytes=size, where=where)


def read_range(
    repo: str,
    file: str,
    *,
    commit: str,
    start: int,
    into: memoryview,
    may_end: bool = False,
) -> int:
    """Fill `into` with a file's bytes from `start` on; returns the size of the whole file.

    Args:
        repo: ORG/NAME.
        file: its path in the repository.
        commit: the repository's.
        start: counted from the file's first byte.
        into: as long as what is wanted.
        may_end: the file may end before `into` does.

    Raises:
        NoCheckpointError: the Hub does not have it, sends something else, or brings nothing in five
            answers in a row.
    """
    failures = 0
    size = -1
    where = f"{repo}/{file}"
    with hub_errors(repo):
        url = hf_hub_url(repo, file, revision=commit)
        while into and not (may_end and start == size):
            failure: Exception = _no_part(where, "nothing, again and again")
            failures += 1
            try:
                for size, part in _parts(url, start, len(into), where):
                    part = part[: len(into)]
                    into[: len(part)] = part
                    into = into[len(part) :]
                    start += len(part)
                    failures = 0
                    if not into:
                        return size
            except (TransportError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code not in BUSY:
                    raise
                failure = error
            if failures >= _TRIES:
                raise failure
            if failures:  # not where bytes have arrived since the last request
                time.sleep(_FIRST_WAIT_SECONDS * 2**failures)
    return size


def _parts(url: str, start: int, length: int, where: str) -> Iterator[tuple[int, bytes]]:
    """The file's size and what one request brings; nothing if the address that the Hub gave before
    has expired.
    """
    headers = {
        **build_hf_headers(),
        "Range": f"bytes={start}-{start + length - 1}",
        "Accept-Encoding": "identity",
    }
    known = _leads_to.get(url)
    with get_session().stream("GET", known or url, headers=headers) as response:
        if known and response.status_code in _EXPIRED:
            _leads_to.pop(url, None)
            return
        hf_raise_for_status(response)
        said = response.headers.get("Content-Range", "")
        pattern = rf"206 bytes {start}-[0-9]+/([0-9]{{1,18}})"
        if response.status_code == 200 and start == 0:  # it sends the whole file
            said = response.headers.get("Content-Length", "")
            pattern = "200 ([0-9]{1,18})"
        size = re.fullmatch(pattern, f"{response.status_code} {said}")
        if size is None:
            raise _no_part(where, said or f"status {response.status_code} without a range")
        _leads_to[url] = str(response.url)
        for part in response.iter_raw():
            yield int(size[1]), part


def _no_part(where: str, got: str) -> NoCheckpointError:
    return NoCheckpointError(
        where, "the Hub must send a part of the file", got=got, cure="Run it again"
    )
