"""A `vllm serve` for its user: on a port, until it is stopped, with its acceptance watched.

In: the words of the server, its address, and what was measured of its drafts before. Out: a
`ServerLife`.

Easy to get wrong: acceptance depends on what is asked, so a server is doubted only where it is far
lower than it was.
"""

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
from ...recipes.errors import VLLMError
from ...recipes.frozen import Say, frozen
from ..facts.served import Drafts, counters
from ..facts.vllm_env import VLLM
from .replies import fetched, read_counters
from .room import refuse_options
from .server import server_environment, started

_WAIT_SECONDS = 0.2
_STOP_SECONDS = 60.0
# With fewer drafts, one odd answer may be all of them.
ENOUGH_DRAFTS = 200
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
        return f"http{'s' * self.is_tls}://{host}:{self.port}"


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

    @property
    def judged(self) -> int:
        """The exit status that says whether it served until it was stopped."""
        if not self.is_stopped:
            return max(self.status, 1)  # vLLM's front end ends with 0 where its engine has died
        if self.is_healthy:
            # Once stopped, vLLM may still end with a traceback: it asks for the command of a worker
            # that it has just killed (0.32.0, entrypoints/launchers/launcher.py, serve_http).
            return 0
        return self.status


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
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        socket.create_server((address.host, address.port), family=family).close()
    except OSError as error:
        where = f"{address.host}:{address.port}"
        cure = "Choose another --port, or an address of this machine with --host"
        got = error.strerror or str(error)
        raise VLLMError(where, "must be free for the server", got=got, cure=cure) from error


def serve_until_stopped(
    vllm: VLLM,
    words: Sequence[str],
    *,
    k: int,
    address: Address,
    expected: tuple[Drafts | None, str],
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
        expected: what its drafts are compared with, and the command that measured it.
        every: seconds between two lines of acceptance.
        log: where everything goes that the server prints.
        tell: called when it is healthy, and with its acceptance where that has changed.
    """
    start = said_at = time.monotonic()
    drafts = said = Drafts()
    is_healthy = is_over = False
    warning = ""
    with ScratchFolder("keepmtp-server-") as private, _stop_asked() as stop:
        variables = server_environment(vllm, private)
        key = os.environ.get("VLLM_API_KEY")
        if key:
            variables["VLLM_API_KEY"] = key  # without it, the server would answer everybody
        with (
            started(vllm, words, variables, log=log, grace_seconds=_STOP_SECONDS) as child,
            httpx.Client(
                base_url=address.url,
                trust_env=False,
                verify=False,  # noqa: S501 - ours
            ) as client,
        ):
            while not is_over:
                is_over = child.process.poll() is not None or stop.wait(_WAIT_SECONDS)
                now = time.monotonic()
                if not is_healthy and not is_over and _get(client, "/health") is not None:
                    is_healthy = True
                    tell(f"serves {client.base_url} after {now - start:.0f} s; Ctrl-C stops it")
                # The counters are gone with the server: they are read before it is stopped, too.
                if not (k and is_healthy and (is_over or now - said_at >= every)):
                    continue
                content = _get(client, "/metrics")
                with suppress(ValueError):  # no counters are no answer
                    drafts = read_counters(content) if content is not None else drafts
                if drafts != said and not is_over:
                    tell(f"last {now - said_at:.0f} s: {in_words(drafts.since(said))}")
                    said = drafts
                    if not warning:
                        warning = doubt(drafts, *expected)
                        if warning:
                            tell(f"warning: {warning}")
                said_at = now
    status = child.process.returncode
    if status < 0:  # a signal ended it
        status = 128 - status
    return ServerLife(
        k=k,
        is_healthy=is_healthy,
        is_stopped=stop.is_set(),
        seconds=time.monotonic() - start,
        status=status,
        doubt=doubt(drafts, *expected),
        **counters(drafts),
    )


def doubt(drafts: Drafts, expected: Drafts | None, measured_by: str) -> str:
    """Why a draft may be broken; "" where too little was drafted, or enough is accepted."""
    # The share of first tokens hardly depends on k, and a draft of garbage has next to none.
    share = first_share(drafts)
    usual = first_share(expected) if expected else None
    least = _LEAST
    against = ""
    if usual is not None:
        least = usual / 2
        against = f"; {measured_by} measured {usual:.1%}"
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


@contextmanager
def _stop_asked() -> Iterator[threading.Event]:
    """An event that Ctrl-C, SIGTERM and SIGHUP set, instead of what they do otherwise; the second
    one does that, and ends by force.
    """
    asked = threading.Event()
    usual = {}

    def stop(number: int, _: object) -> None:
        asked.set()
        signal.signal(number, usual[number])

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            usual[number] = signal.signal(number, stop)
    try:
        yield asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
