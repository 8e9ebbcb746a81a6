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
from typing import Any

from data_files import table
from hub import TOKEN, Fault, Hub
from processes import Ended, forked

REPO = "org/tiny-glm4-moe-MTP"
SECONDS = 0.4
"""How long the Hub may be silent in these tests."""
LONGEST_SECONDS = 8
"""After which a command hangs."""
SHARD = "model-00001-of-00005.safetensors"
_OURS = rf"/api/models/{REPO}"

TABLE = table("helpers/faults")
STEPS = {
    step: (pattern.replace("OURS", _OURS), before)
    for step, (pattern, before) in TABLE["steps"].items()
}
"""What publish asks, in this order: "METHOD /path", and how many such requests come before."""


def _wrong_types(body: bytes) -> bytes:
    """The same keys, with a value of another type each."""

    def other(value: Any) -> Any:
        return 7 if isinstance(value, (str, list, dict, type(None))) else "seven"

    return json.dumps({key: other(value) for key, value in json.loads(body).items()}).encode()


ALWAYS = 10**6


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


REWRITES = {
    "half of the JSON": lambda body: body[: len(body) // 2],
    "no keys": lambda body: b"{}",
    "wrong types": _wrong_types,
}
for _name, _fault in TABLE["faults"].items():
    if _name in REWRITES:
        _fault["rewrite"] = REWRITES[_name]
    if "body" in _fault:
        _fault["body"] = _fault["body"].encode()
FAULTS = {name: lambda case, fault=fault: fault for name, fault in TABLE["faults"].items()} | {
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
CASES = [
    (step, fault)
    for step in STEPS
    for fault in FAULTS
    if not (fault in REWRITES and step in _BYTES)
]


def spoil(case: Case, step: str, fault: str) -> None:
    """Put a fault of the table on a step."""
    put(case, step, **{"times": ALWAYS, **FAULTS[fault](case)})


def put(case: Case, step: str, **given: Any) -> None:
    to, skip = STEPS[step]
    case.hub.faults = [Fault(to, skip=skip, **given)]


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
    return (0, 2)


def holds(hub: Hub, wanted: Mapping[str, bytes]) -> bool:
    """The repository has these files, byte for byte, and no other."""
    there = hub.files(REPO)
    return {**wanted, ".gitattributes": there[".gitattributes"]} == there
