"""Bytes of a file on the Hub by range requests, which go on where a connection was cut.

In: a repository's file at a commit, and a place in memory to fill. Out: the bytes, or a refusal in one sentence.
Deadlines and the token's rules are those of `hub_client.py`.

Easy to get wrong: the Hub answers for each large file with another address, which is good for an hour or so. It is
kept, so that a thousand ranges are not two thousand requests, and asked for anew when it has expired. A server may
ignore the range and send the whole file from its first byte.
"""

import re
from collections.abc import Callable, Iterator

from httpx import TransportError
from huggingface_hub import hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ..recipes.errors import NoCheckpointError
from .hub import hub_errors
from .hub_client import BUSY, PATIENCE

AT_A_TIME = 16
"""Ranges that are asked for at the same time."""
GAP_BYTES = 1 << 20
"""Between two tensors that are asked for together: what 20 MB/s bring in the 50 ms that a request is on its way."""
_TRIES = 5
_FIRST_WAIT_SECONDS = 0.25
_EXPIRED = (401, 403, 404, 410)
# The Hub's address of a file -> the one that it answers with.
_leads_to: dict[str, str] = {}


def read_range(
    repo: str,
    file: str,
    *,
    commit: str,
    start: int,
    into: memoryview,
    arrived: Callable[[int], None] = lambda _bytes: None,
) -> None:
    """Fill `into` with a file's bytes from `start` on.

    Args:
        repo: ORG/NAME.
        file: its path in the repository.
        commit: the repository's.
        start: counted from the file's first byte.
        into: as long as what is wanted.
        arrived: called with the number of bytes, whenever that many more are there.

    Raises:
        NoCheckpointError: the Hub does not have it, sends something else, or brings nothing in five answers in a row.
    """
    failures = 0
    with hub_errors(repo, commit):
        url = hf_hub_url(repo, file, revision=commit)
        while into:
            before = len(into)
            failure = None
            try:
                for part in _parts(url, start, len(into), f"{repo}/{file}"):
                    part = part[: len(into)]
                    into[: len(part)] = part
                    into, start = into[len(part) :], start + len(part)
                    arrived(len(part))
            except (TransportError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code not in BUSY:
                    raise
                failure = error
            failures = failures + 1 if len(into) == before else 0
            if into:
                _wait_or_give_up(failures, f"{repo}/{file}", failure)


def _parts(url: str, start: int, length: int, where: str) -> Iterator[bytes]:
    """What one request brings; nothing if the address that the Hub gave before has expired."""
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
    known = _leads_to.get(url)
    with get_session().stream("GET", known or url, headers=headers) as response:
        if known and response.status_code in _EXPIRED:
            _leads_to.pop(url, None)
            return
        hf_raise_for_status(response)
        said = response.headers.get("Content-Range", "")
        if response.status_code != 206 or not re.match(rf"bytes {start}-[0-9]+/", said):
            got = said or f"status {response.status_code} without a range"
            raise NoCheckpointError(where, "the Hub must send a part of the file", got=got, cure="Run it again")
        _leads_to[url] = str(response.url)
        yield from response.iter_raw()


def _wait_or_give_up(failures: int, where: str, failure: Exception | None) -> None:
    """Wait before the next request; not at all where bytes have arrived since the last one."""
    if failures >= _TRIES:
        if failure is not None:
            raise failure
        rule, got = "the Hub must send a part of the file", f"nothing in {failures} answers"
        raise NoCheckpointError(where, rule, got=got, cure="Run it again")
    if failures:
        PATIENCE.stopped.wait(_FIRST_WAIT_SECONDS * 2**failures)
    PATIENCE.refuse_stopped()
