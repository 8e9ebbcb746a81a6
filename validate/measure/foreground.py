"""A `vllm serve` for its user: on a port, until it is stopped, with its acceptance watched.

In: the words of the server, its address, and what was measured of its drafts before. Out: a
`ServerLife`.

Easy to get wrong: acceptance depends on what is asked, so a server is doubted only where it is far
lower than it was.
"""

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import httpx

from ...checkpoints.fact import Figure, NumDrafts
from ...checkpoints.files import ScratchFolder
from ...quantize.run.child import Child
from ...recipes.errors import VLLMError
from ...recipes.frozen import Say, frozen
from ..facts.served import Drafts, counters
from ..facts.vllm_env import VLLM
from .replies import fetched, read_counters
from .room import refuse_options, value_of
from .server import server_environment, started

_POLL_SECONDS = 5.0
_WAIT_SECONDS = 0.2
_STOP_SECONDS = 60.0
ENOUGH_DRAFTS = 200
"""With fewer drafts, one odd answer may be all of them."""
# The least share of first tokens that is no reason for doubt, where nothing was measured before.
_LEAST = 0.1
_DRAFTS = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")
_NAMED = ("--host", "--port", "--dry-run", "--gpu", "--log")
_OURS = {
    **dict.fromkeys(_NAMED, "Name it before `--`"),
    **dict.fromkeys(_DRAFTS, "Leave it out, and use -k; -k 0 serves without drafting"),
    **dict.fromkeys(("--uds", "--headless"), "Leave it out: the server listens on its port"),
    "--disable-log-stats": "Leave it out: acceptance is read from these figures",
}


@frozen
class Address:
    """Where a server listens."""

    host: str
    port: int
    is_tls: bool = False

    @property
    def url(self) -> str:
        """For a client on this machine."""
        any_address = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - a name, no socket
        host = any_address.get(self.host, self.host)
        if ":" in host:
            host = f"[{host}]"
        if self.is_tls:
            return f"https://{host}:{self.port}"
        return f"http://{host}:{self.port}"


class ServerLife(Drafts):
    """A server from its start to its end, with vLLM's counters over that time.

    Attributes:
        k: tokens drafted a step.
        is_healthy: it came up.
        is_stopped: it ended because it was asked to.
        seconds: from start to end.
        status: exit status of its process, as a shell has it.
        doubt: why its draft may be broken; "" where nothing says so.
    """

    k: NumDrafts
    is_healthy: bool
    is_stopped: bool
    seconds: Figure
    status: int
    doubt: str


@frozen
class Expected:
    """Draft counters that were measured before, and the command that did so."""

    drafts: Drafts
    measured_by: str


def refuse_our_words(extra: Sequence[str]) -> None:
    """Refuse words for `vllm serve` that keepmtp serve says itself.

    Raises:
        RecipeError: names the first such word.
    """
    refuse_options(
        "keepmtp serve", extra, _OURS, rule="keepmtp serve says this to vLLM itself, or needs it"
    )


def refuse_taken(address: Address) -> None:
    """Refuse an address on which no server of ours can listen.

    Raises:
        VLLMError: another program listens there, or this machine does not have that address.
    """
    family = socket.AF_INET
    if ":" in address.host:
        family = socket.AF_INET6
    with socket.socket(family) as tried:
        # A server that has just ended is no reason.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((address.host, address.port))
        except OSError as error:
            where = f"{address.host}:{address.port}"
            got = str(error)
            if error.strerror:
                got = error.strerror
            cure = "Name an address of this machine with --host"
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                cure = f"Choose another --port, such as {address.port % 60_000 + 1024}"
            raise VLLMError(where, "must be free for the server", got=got, cure=cure) from error


def serve_until_stopped(
    vllm: VLLM,
    words: Sequence[str],
    *,
    k: int,
    address: Address,
    expected: Expected | None,
    every: float,
    log: IO[bytes] | int,
    tell: Say,
) -> ServerLife:
    """Run the server until it ends, or until Ctrl-C, SIGTERM or SIGHUP ends it.

    Args:
        vllm: where vLLM lives.
        words: of the server, from "serve" on.
        k: tokens drafted a step, as `words` say it.
        address: where it listens, as `words` say it.
        expected: what its drafts are compared with.
        every: seconds between two lines of acceptance.
        log: where everything goes that the server prints.
        tell: called when it is healthy, and with its acceptance where that has changed.
    """
    start = time.monotonic()
    grace = _STOP_SECONDS
    shutdown = value_of(words, "--shutdown-timeout")
    if shutdown.replace(".", "", 1).isdigit():  # what is no number is for vLLM to refuse
        grace += float(shutdown)
    is_healthy = False
    drafts = Drafts()
    with ScratchFolder("keepmtp-server-") as private:
        variables = server_environment(vllm, private)
        key = os.environ.get("VLLM_API_KEY")
        if key:
            variables["VLLM_API_KEY"] = key  # without it, the server would answer everybody
        with (
            started(vllm, words, variables, log=log, grace_seconds=grace) as child,
            httpx.Client(
                base_url=address.url,
                trust_env=False,
                verify=False,  # noqa: S501 - ours
            ) as client,
        ):
            with _stop_asked() as stop:
                is_healthy = _wait(client, child, stop, start, tell)
                if is_healthy and not k:
                    every = 0.0  # nothing is drafted
                if is_healthy:
                    drafts = _watch(client, child, stop, expected, every, tell)
            child.end()
    status = child.process.returncode
    if status < 0:  # a signal ended it
        status = 128 - status
    return ServerLife(
        k=k,
        is_healthy=is_healthy,
        is_stopped=stop.is_set(),
        seconds=time.monotonic() - start,
        status=status,
        doubt=doubt(drafts, expected),
        **counters(drafts),
    )


def doubt(drafts: Drafts, expected: Expected | None) -> str:
    """Why a draft may be broken; "" where too little was drafted, or enough is accepted."""
    # The share of first tokens hardly depends on k, and a draft of garbage has next to none.
    share = first_share(drafts)
    least = _LEAST
    against = ""
    if expected is not None:
        usual = first_share(expected.drafts)
        if usual is not None:
            least = usual / 2
            against = f"; {expected.measured_by} measured {usual:.1%}"
    if share is None or drafts.drafts < ENOUGH_DRAFTS or share >= least:
        return ""
    found = f"only {share:.1%} of first drafted tokens are accepted, over {drafts.drafts:,} drafts"
    doubted = "Other texts are drafted otherwise, but a broken draft also looks like this"
    return f"{found}{against}. {doubted}"


def first_share(drafts: Drafts) -> float | None:
    """The share of drafts whose first token was accepted; None where nothing was drafted."""
    return next(iter(drafts.acceptance_per_position), drafts.acceptance)


def in_words(drafts: Drafts) -> str:
    """`1,234 drafts, 71.2 % accepted, 3.14 tokens a step; by position 81.0, 70.2, 62.3 %`."""
    if not drafts.drafts or drafts.acceptance is None:
        return "nothing was drafted"
    says = f"{drafts.drafts:,} drafts, {100 * drafts.acceptance:.1f} % of their tokens accepted"
    says += f", {drafts.mean_accepted_length:.2f} tokens a step"
    shares = [f"{100 * share:.1f}" for share in drafts.acceptance_per_position]
    if shares:
        says += f"; by position {', '.join(shares)} %"
    return says


def _get(client: httpx.Client, path: str) -> bytes | None:
    """What a server answers, if it does."""
    with suppress(httpx.HTTPError):
        status, content = fetched(client, path)
        if status == 200:
            return content
    return None


def _wait(
    client: httpx.Client, child: Child, stop: threading.Event, start: float, tell: Say
) -> bool:
    """Whether it came up, before it ended or was asked to."""
    while _get(client, "/health") is None:
        if child.process.poll() is not None or stop.wait(_WAIT_SECONDS):
            return False
    seconds = time.monotonic() - start
    tell(f"serves {client.base_url} after {seconds:.0f} s; Ctrl-C stops it")
    return True


def _watch(
    client: httpx.Client,
    child: Child,
    stop: threading.Event,
    expected: Expected | None,
    every: float,
    tell: Say,
) -> Drafts:
    """Its last counters, once it has ended or was asked to; `every` is 0 where nothing is
    drafted.
    """
    said_at = asked_at = time.monotonic()
    drafts = Drafts()
    said = Drafts()
    doubted = ""
    while True:
        is_over = child.process.poll() is not None or stop.wait(_WAIT_SECONDS)
        now = time.monotonic()
        if every and (is_over or now - asked_at >= min(_POLL_SECONDS, every)):
            asked_at = now
            content = _get(client, "/metrics")
            if content is not None:
                with suppress(ValueError):  # no counters are no answer
                    drafts = read_counters(content)
        if is_over:  # the counters are gone with the server, so they were read before it is stopped
            return drafts
        if drafts != said and now - said_at >= every:
            tell(f"last {now - said_at:.0f} s: {in_words(drafts.since(said))}")
            said = drafts
            said_at = now
            if not doubted:
                doubted = doubt(drafts, expected)
                if doubted:
                    tell(f"warning: {doubted}")


@contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP set, instead of what they do otherwise. A second
    Ctrl-C is usual again once the context is left, and then ends by force.
    """
    asked = threading.Event()
    usual = {}

    def stop(*_: object) -> None:
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            usual[number] = signal.signal(number, stop)
    try:
        yield asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
