"""How huggingface_hub talks to the Hub in keepmtp's process: with deadlines, and with the token for
the Hub alone.

In: nothing but the environment: HF_ENDPOINT and KEEPMTP_HUB_TIMEOUT. Out: a client that
huggingface_hub makes all its requests with.

Easy to get wrong: huggingface_hub 1.33 has no deadline, and passes `timeout=None` where it asks.
And the Hub's own answers say where to send a file and where the next page is: that may be another
host, which is nobody to give the token to.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import httpcore
import httpx
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import parse_ratelimit_headers
from huggingface_hub.utils._http import hf_request_event_hook

from ..recipes.errors import NoCheckpointError, RecipeError

SETTING = "KEEPMTP_HUB_TIMEOUT"
DEFAULT_SECONDS = 60.0
LONGEST_WAIT_SECONDS = 600
"""If the Hub asks to wait longer than this, the call fails at once. Its rate limits are for windows
of 300 seconds.
"""
SILENCES = 3
"""So many answers in a row may be late. huggingface_hub asks again by itself where it uploads."""
AGAIN = "Run the same command again"
_SHORTEST_SECONDS = 0.001
_BYTES_PER_SECOND = 10_000
"""The slowest line that counts as one: an answer gets a second more for so many bytes."""
BUSY = (408, 429, 500, 502, 503, 504)
"""Answers after which the same question may be asked again."""


class HubError(NoCheckpointError):
    """The Hub refuses, or does not answer."""


class Patience:
    """How long the Hub may take; one for the process.

    Attributes:
        seconds: for one answer.
        silences: answers that were late, since something arrived that had not arrived before.
    """

    def __init__(self) -> None:
        self.seconds = DEFAULT_SECONDS
        self.silences = 0


PATIENCE = Patience()


def install() -> None:
    """Let huggingface_hub make its requests with this module's client, from now on.

    Raises:
        RecipeError: the setting is no number of seconds.
    """
    text = os.environ.get(SETTING, "")
    try:
        seconds = float(text or DEFAULT_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise RecipeError(
            SETTING,
            "must be a number of seconds up to a day",
            got=text,
            cure=f"Unset it for {DEFAULT_SECONDS:g}",
        )
    PATIENCE.seconds = seconds
    set_client_factory(_client)


install_once = cache(install)
"""For whoever reads from the Hub: a client that is at work keeps its connections."""


def refuse_endpoint(endpoint: str) -> None:
    """Refuse to send a token over a line that others can read.

    Raises:
        RecipeError: neither https, nor http to this machine; or an address with a password in it.
    """
    address = httpx.URL("")
    with suppress(httpx.InvalidURL):
        address = httpx.URL(endpoint)
    is_safe = address.scheme == "https" or (address.scheme == "http" and _is_this_machine(address))
    if not address.host or address.userinfo or not is_safe:
        raise RecipeError(
            "HF_ENDPOINT",
            "a token is sent by https only, or by http to this machine",
            got=f"{address.scheme}://{address.host}",
            cure="Set it to https://huggingface.co, or unset it",
        )


def _client() -> httpx.Client:
    client = httpx.Client(
        event_hooks={"request": [hf_request_event_hook, _before], "response": [_after]},
        follow_redirects=True,
        # A proxy of this machine is for other machines, and would read what plain http sends.
        trust_env=not _is_this_machine(httpx.URL(constants.ENDPOINT)),
    )
    # httpx 0.28 has no argument for the backend of its pools, and httpcore 1.0 has.
    for transport in (client._transport, *client._mounts.values()):
        if (pool := getattr(transport, "_pool", None)) is not None:
            pool._network_backend = _Backend()
    return client


def _before(request: httpx.Request) -> None:
    """Before each request, also each one after a redirect."""
    request.extensions["timeout"] = httpx.Timeout(PATIENCE.seconds).as_dict()
    url = request.url
    hub = httpx.URL(constants.ENDPOINT)
    if (url.scheme, url.host, url.port) != (hub.scheme, hub.host, hub.port):
        for name in ("Authorization", "Cookie"):
            request.headers.pop(name, None)


def _after(response: httpx.Response) -> None:
    """After each answer's header: what the Hub says about when to come again, before
    huggingface_hub obeys it.
    """
    asked = seconds_to_wait(response)
    if response.status_code not in BUSY:
        if response.request.method == "PUT":
            response.read()  # another part of an upload has arrived
            PATIENCE.silences = 0
    elif asked is not None and asked > LONGEST_WAIT_SECONDS:
        raise HubError(
            constants.ENDPOINT,
            f"the Hub must answer within {LONGEST_WAIT_SECONDS} s",
            got=f"{response.status_code}: wait {asked} s",
            cure=f"{AGAIN} after that time: what has arrived is not sent twice",
        )


def seconds_to_wait(response: httpx.Response) -> int | None:
    """How long the Hub asks to wait; None where it does not say."""
    limit = parse_ratelimit_headers(response.headers)
    if limit and not limit.remaining:
        return limit.reset_in_seconds
    after = response.headers.get("Retry-After", "").strip()
    return int(after) if after.isdigit() else None


def _is_this_machine(address: httpx.URL) -> bool:
    return address.host in ("localhost", "127.0.0.1", "::1")


@contextmanager
def _failures() -> Iterator[None]:
    """Count what is late."""
    try:
        yield
    except httpcore.TimeoutException as error:
        PATIENCE.silences += 1
        if PATIENCE.silences < SILENCES:
            raise
        raise HubError(
            constants.ENDPOINT,
            "the Hub must answer",
            got=f"no whole answer within {PATIENCE.seconds:g} s",
            cure=f"{AGAIN}. {SETTING} sets the seconds",
        ) from error


class _Backend(httpcore.SyncBackend):
    """Connections whose answers have a deadline."""

    def connect_tcp(self, *args: Any, **settings: Any) -> httpcore.NetworkStream:
        return _Stream(super().connect_tcp(*args, **settings))


class _Stream(httpcore.NetworkStream):
    """One connection; `_due` is when the answer that is awaited now must be there."""

    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner
        self._due = 0.0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        # A deadline for each read is none: a server that sends a byte a minute keeps it. So an
        # answer has so many seconds from the last byte of its request on, and more only for the
        # bytes that arrive.
        left = self._due - time.monotonic()
        with _failures():
            got = self._inner.read(max_bytes, max(left, _SHORTEST_SECONDS))
        self._due += len(got) / _BYTES_PER_SECOND
        return got

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _failures():
            self._inner.write(buffer, PATIENCE.seconds)
        self._due = time.monotonic() + PATIENCE.seconds

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, *args: Any, **settings: Any) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(*args, **settings))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)
