"""Every fault of a Hub at every step of `keepmtp publish`: the table of both, and what may never
happen.

In: a Hub on loopback (hub.py) and a parcel. Out: how the command ended, in a process of its own,
and what was wrong with that, in words.

Easy to get wrong: an end without a traceback is not yet a good end. A repository that is public, a
word such as "published", and the other host's list of headers say whether it was.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import Ended, forked
from hub import TOKEN, Fault, Hub

REPO = "org/tiny-glm4-moe-MTP"
SECONDS = 0.4
"""How long the Hub may be silent in these tests."""
LONGEST_SECONDS = 8
"""After which a command hangs."""
SHARD = "model-00001-of-00005.safetensors"
_OURS, _SHA = rf"/api/models/{REPO}", f"{2:040x}"

STEPS: Mapping[str, tuple[str, int]] = {
    "sign in": ("GET /api/whoami-v2", 0),
    "look": (f"GET {_OURS}$", 0),
    "create": ("POST /api/repos/create", 0),
    "look at the new one": (f"GET {_OURS}$", 2),
    "list the new one": (f"GET {_OURS}/tree/", 0),
    "front matter": ("POST /api/validate-yaml", 0),
    "ask how to send": (f"POST {_OURS}/preupload/", 0),
    "ask where to send": (r"POST /.*\.git/info/lfs/objects/batch", 0),
    "send": ("PUT /lfs/", 0),
    "say it is sent": ("POST /lfs-verify", 0),
    "commit": (f"POST {_OURS}/commit/", 0),
    "look at the commit": (f"GET {_OURS}/revision/{_SHA}", 0),
    "list the commit": (f"GET {_OURS}/tree/{_SHA}", 0),
    "go public": (f"PUT {_OURS}/settings", 0),
}
"""What publish asks, in this order: "METHOD /path", and how many such requests come before."""


def _wrong_types(body: bytes) -> bytes:
    """The same keys, with a value of another type each."""

    def other(value: Any) -> Any:
        return 7 if isinstance(value, (str, list, dict, type(None))) else "seven"

    told = json.loads(body)
    if isinstance(told, list):
        return json.dumps(
            [{key: other(value) for key, value in entry.items()} for entry in told]
        ).encode()
    return json.dumps({key: other(value) for key, value in told.items()}).encode()


def _no_keys(body: bytes) -> bytes:
    return b"[{}]" if body.lstrip().startswith(b"[") else b"{}"


_ALWAYS = 10**6


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is set before a fault's command runs: `other` is another host, `pids` gets the command's
    process id.
    """

    hub: Hub
    other: str
    pids: list[int]
    end: threading.Event

    def signal(self, number: signal.Signals) -> Callable[[], None]:
        """Sends a signal to the command, once, and gives it the time to arrive.

        Two uploads run at a time. A second signal while Python leaves would end it at once, without
        its exit status.
        """
        unsent = [number]

        def send() -> None:
            with suppress(IndexError):
                os.kill(self.pids[0], unsent.pop())
            time.sleep(0.05)

        return send

    def commit_by_others(self) -> None:
        """Somebody's commit to the repository, if it is there."""
        if REPO in self.hub.repos:
            self.hub.commit(REPO, {"strange.txt": b"by somebody else"})


FAULTS: Mapping[str, Callable[[Case], Mapping[str, Any]]] = {
    name: lambda case, fault=fault: fault
    for name, fault in {
        "cut": {},
        **{str(code): {"status": code} for code in (401, 403, 404, 409, 412, 500, 502, 503)},
        "429, soon": {"status": 429, "headers": {"Retry-After": "0"}},
        "429, in a day": {"status": 429, "headers": {"Retry-After": "86400"}},
        "503, in a day": {"status": 503, "headers": {"Retry-After": "86400"}},
        "drips": {"spoils": "drip"},
        "headers drip": {"spoils": "headers"},
        "truncated": {"spoils": "truncate"},
        "no JSON": {"status": 200, "body": b"<html>Welcome to this network</html>"},
        "half of the JSON": {"spoils": "rewrite", "rewrite": lambda body: body[: len(body) // 2]},
        "no keys": {"spoils": "rewrite", "rewrite": _no_keys},
        "wrong types": {"spoils": "rewrite", "rewrite": _wrong_types},
        "a list": {"status": 200, "body": b"[7]"},
        "null": {"status": 200, "body": b"null"},
        "sent in a circle": {"status": 307, "headers": {"Location": "?"}},
        "cut once": {"times": 1},
        "503 once": {"times": 1, "status": 503, "headers": {"Retry-After": "0"}},
    }.items()
} | {
    "silent": lambda case: {"before": bool, "hold": case.end},
    "sent to another host": lambda case: {
        "status": 307,
        "headers": {"Location": f"{case.other}/x"},
    },
    "somebody commits": lambda case: {"times": 1, "before": case.commit_by_others},
    "Ctrl-C": lambda case: {"times": 1, "before": case.signal(signal.SIGINT)},
    "killed": lambda case: {"times": 1, "before": case.signal(signal.SIGKILL)},
}
"""On every such request, but where it says `times`."""
PASSING = ("cut once", "503 once", "429 once")
# Of requests whose answer is no JSON.
_BYTES = ("send", "say it is sent")
_OF_JSON = ("no keys", "wrong types", "half of the JSON")
CASES = [
    (step, fault)
    for step in STEPS
    for fault in FAULTS
    if not (fault in _OF_JSON and step in _BYTES)
]


def spoil(case: Case, step: str, fault: str) -> None:
    """Put a fault on a step."""
    to, skip = STEPS[step]
    case.hub.faults = [Fault(to, skip=skip, **{"times": _ALWAYS, **FAULTS[fault](case)})]


def run(case: Case, call: Callable[[], object], *, seconds: float = LONGEST_SECONDS) -> Ended:
    """Run the command, and let go what is held."""
    try:
        return forked(call, seconds=seconds, watch=case.pids.append)
    finally:
        case.pids.clear()
        case.end.set()


def complaints(
    case: Case, ended: Ended, step: str, fault: str, wanted: Mapping[str, bytes]
) -> Iterator[str]:
    """What is wrong with how a command ended."""
    said = ended.out + ended.err
    repo = case.hub.repos.get(REPO)
    is_good = repo is not None and holds(case.hub, wanted)
    if ended.hung:
        yield f"hangs for {ended.seconds:.0f} s"
    if "Traceback" in said:
        yield "a traceback"
    if TOKEN in said:
        yield "the token is printed"
    if not ended.hung and ended.code not in _statuses(step, fault):
        yield f"exit status {ended.code}"
    if ended.code == 0 and not is_good:
        yield "called published, and is something else"
    if ended.code and '"verified"' in ended.out:
        yield "called verified, and then failed"
    if (
        repo is not None
        and not repo.private
        and (ended.code or not is_good)
        and step != "go public"
    ):
        yield "public, and not verified"
    if ended.code == 2 and not re.search(r"error: .+; got .+\. .+", " ".join(ended.err.split())):
        yield "no sentence"


def _statuses(step: str, fault: str) -> tuple[int, ...]:
    if fault == "Ctrl-C":
        return (130,)
    if fault == "killed":
        return (-9,)
    if fault in PASSING:
        return (0,)
    if step.startswith("list ") and fault == "sent to another host":
        return (0, 1, 2)  # what is listed there is not what was sent
    return (0, 2)


def holds(hub: Hub, wanted: Mapping[str, bytes]) -> bool:
    """The repository has these files, byte for byte, and no other."""
    there = hub.repos[REPO].at("main")
    return {*wanted, ".gitattributes"} == {*there} and all(
        hub.read(REPO, name) == wanted[name] for name in wanted
    )


def contents(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Of files, by name."""
    return {name: path.read_bytes() for name, path in files.items()}
