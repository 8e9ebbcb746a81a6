"""Every fault of a Hub at every step of `keepmtp publish`: one sentence, in time, and never public
unless verified.

Each command runs in a process of its own, forked from this one. The report and the card are read
once for all: what is refused before the Hub is asked is in test_upload.py. Some 150 cases are run,
each step and each fault among them; KEEPMTP_FAULTS=all runs every one.

Easy to get wrong: an end without a traceback is not yet a good end. A repository that is public, a
word such as "published", and the other host's list of headers say whether it was.
"""

import json
import os
import re
import shutil
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import cards
import httpx
import hub as loopback
import pytest
from data_files import table
from hub import TOKEN, Fault, Hub, other_hash
from keepmtp.cli import main
from keepmtp.validate.publish import upload
from keepmtp.validate.publish.upload import Parcel, prepare
from processes import Ended, forked

pytestmark = [
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:This process:DeprecationWarning"
    ),  # it forks, and has a thread with the Hub
]

REPO = "org/tiny-glm4-moe-MTP"
SILENT = {"silent", "drips", "headers drip"}
"""Faults for which the Hub may be silent for a moment only, and a command hangs soon. A right answer
may take a busy machine long.
"""
SHARD = "model-00001-of-00005.safetensors"
_OURS = rf"/api/models/{REPO}"

TABLE = table("validate/publish/test_faults")
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


def run(case: Case, parcel: Parcel, seconds: float = 60) -> Ended:
    """Run the command, so long at most, and let go what is held."""
    try:
        return forked(lambda: publish(parcel), seconds=seconds, watch=case.pids.append)
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


# Read once for all: no host here speaks TLS, and each client reads the certificates anew.
TLS = ssl.create_default_context()
SOME = [case for number, case in enumerate(CASES) if number % 7 in (0, 2, 5)]


@pytest.fixture(scope="module")
def parcel(tmp_path_factory) -> Parcel:
    return prepare(cards.green(tmp_path_factory.mktemp("made")))


@pytest.fixture(scope="module")
def contents(parcel) -> dict[str, bytes]:
    return {name: file.path.read_bytes() for name, file in parcel.files.items()}


@pytest.fixture
def other(tmp_path) -> Iterator[Hub]:
    """A host that is not the Hub, and says {} to all."""
    with loopback.serving(tmp_path / "other") as host:
        host.faults = [Fault("", status=200, body=b"{}", times=ALWAYS)]
        yield host


@pytest.fixture
def case(other, hub_at, tmp_path, monkeypatch) -> Iterator[Case]:
    for name, value in {
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
        "KEEPMTP_HUB_TIMEOUT": "60",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    with loopback.serving(tmp_path / "hub") as hub:
        hub_at(hub.endpoint)
        yield Case(hub=hub, other=other.endpoint, pids=[], end=threading.Event())


def test_some_cases_are_of_every_step_and_fault():
    assert len(SOME) >= 140
    assert {step for step, _ in SOME} == {*STEPS} and {fault for _, fault in SOME} == {*FAULTS}


def publish(parcel: Parcel) -> None:
    """The real command, with pauses of no length; it hangs where it would wait longer than it
    may.
    """
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(seconds if seconds > 700 else min(seconds, 0.02))
    upload.prepare = lambda *_, **__: parcel
    httpx._transports.default.create_ssl_context = lambda **_: TLS
    command = f"keepmtp publish {parcel.folder} --repo {REPO} --public --yes --json"
    sys.argv = command.split()
    main.main()


def published(case: Case, parcel: Parcel, *, code: int = 0, says: str = "") -> Ended:
    """How it ends: with this status, and with these words."""
    ended = run(case, parcel)
    assert ended.code == code and says in ended.err, ended
    return ended


@pytest.mark.few(16)
@pytest.mark.parametrize(
    "step, fault", CASES if os.environ.get("KEEPMTP_FAULTS") == "all" else SOME
)
def test_a_fault_ends_well(case, other, parcel, contents, step, fault, monkeypatch):
    spoil(case, step, fault)
    seconds = 60
    if fault in SILENT:
        monkeypatch.setenv("KEEPMTP_HUB_TIMEOUT", "0.4")
        seconds = 8
    ended = run(case, parcel, seconds)
    wrong = list(complaints(case, ended, step, fault, contents))
    assert not other.authorizations, "the token is for the Hub alone"
    assert not wrong, (wrong, ended)


def test_a_wait_that_is_long_is_told_with_the_time(case, parcel):
    spoil(case, "send", "429, in a day")
    ended = run(case, parcel)
    said = " ".join(ended.err.split())
    assert ended.code == 2 and "the Hub must answer within 600 s; got 429: wait 86400 s" in said
    assert "Run the same command again after that time: what has arrived is not sent twice" in said


@pytest.mark.few(5)
@pytest.mark.parametrize("fault", ["killed", "Ctrl-C", "cut", "503"])
@pytest.mark.parametrize("step", ["create", "send", "commit", "go public"])
def test_the_next_run_goes_on(case, parcel, contents, step, fault):
    spoil(case, step, fault)
    assert run(case, parcel).code != 0
    case.hub.faults = []
    ended = run(case, parcel)
    assert ended.code == 0 and holds(case.hub, contents) and not case.hub.repos[REPO].private, ended
    assert len(case.hub.repos[REPO].commits) == 2, "nothing is committed twice"


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_does_not_wait_for_a_shard(case, parcel, number):
    """The Hub takes the shards and says nothing, for a minute; the command ends at once."""
    case.hub.faults = [Fault("PUT /lfs/", times=99, before=case.signal(number), hold=case.end)]
    ended = run(case, parcel)
    assert ended.code == 128 + number and not ended.hung and ended.seconds < 30, ended
    assert "The same command goes on where this one stopped" in ended.err
    assert len(case.hub.repos[REPO].commits) == 1


# --- The bytes that are sent ----------------------------------------------------------------------


@pytest.fixture
def own(parcel, tmp_path) -> Parcel:
    """The parcel in a folder of its own, to be spoilt."""
    folder = tmp_path / parcel.folder.name
    for suffix in ("", ".report", ".card"):
        shutil.copytree(f"{parcel.folder}{suffix}", f"{folder}{suffix}")
    moved = {
        name: replace(file, path=(tmp_path / file.path.relative_to(parcel.folder.parent)))
        for name, file in parcel.files.items()
    }
    return replace(parcel, folder=folder, files=moved)


@pytest.mark.few(2)
@pytest.mark.parametrize("step", ["ask how to send", "commit"])
@pytest.mark.parametrize("name", ["config.json", "README.md", "report.json", "keepmtp.json"])
def test_a_small_file_that_changes_is_never_public(case, own, contents, name, step):
    """A file of the card is sent as the report makes it; one of the checkpoint must be what was
    measured.
    """
    path = own.files[name].path
    put(case, step, before=lambda: path.write_bytes(path.read_bytes()[::-1]))
    ended = run(case, own)
    assert path.read_bytes() != contents[name]
    if own.files[name].content is not None:
        assert ended.code == 0 and holds(case.hub, contents), ended
        return
    assert ended.code == 1 and f"got {name} has another size or hash there" in ended.err, ended
    assert "It stays private." in ended.err and case.hub.repos[REPO].private


@pytest.mark.few(1)
@pytest.mark.parametrize("step", ["ask how to send", "send"])
def test_a_shard_that_changes_is_never_public(case, own, contents, step):
    """All shards are another before the first is sent."""

    def change() -> None:
        for path in own.folder.glob("*.safetensors"):
            path.write_bytes(path.read_bytes()[::-1])

    put(case, step, before=change)
    ended = run(case, own)
    if step == "send" and ended.code == 0:  # the shards are small, and were read in time
        assert holds(case.hub, contents)
        return
    assert ended.code in (1, 2) and case.hub.repos[REPO].private, ended
    assert ended.code == 2 or f"got {SHARD} has another size or hash there" in ended.err, ended


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["README.md", "config.json", SHARD])
def test_a_file_that_is_stored_otherwise_is_named(case, parcel, name):
    """The Hub's list of the commit has another hash of it."""
    put(case, "look at the commit", **other_hash(name))
    ended = published(
        case, parcel, code=1, says=f"must hold the bytes that were sent; got {name} has another"
    )
    assert "It stays private." in ended.err and case.hub.repos[REPO].private


# --- Whose repository it is -----------------------------------------------------------------------


def test_the_token_is_not_sent_where_the_hub_says_a_file_is_verified(case, other, parcel):
    def elsewhere(body: bytes) -> bytes:
        return body.replace(
            f"{case.hub.endpoint}/lfs-verify".encode(), f"{other.endpoint}/lfs-verify".encode()
        )

    put(case, "ask where to send", spoils="rewrite", rewrite=elsewhere)
    ended = run(case, parcel)
    assert ended.code == 0 and other.requests and not other.authorizations, ended


def test_a_repository_that_the_hub_makes_public_gets_no_byte(case, parcel):
    def show() -> None:
        case.hub.repos[REPO].private = False

    put(case, "look at the new one", before=show)
    published(case, parcel, code=2, says="must be private until it is checked; got a public one")
    assert not any(line.startswith("PUT") for line in case.hub.requests)


def test_a_repository_that_was_renamed(case, parcel):
    case.hub.add(REPO)

    def renamed(body: bytes) -> bytes:
        return json.dumps(json.loads(body) | {"id": "org/new"}).encode()

    put(case, "look", spoils="rewrite", rewrite=renamed)
    published(case, parcel, code=2, says="got org/tiny-glm4-moe-MTP, which is org/new")


def test_a_commit_between_the_check_and_going_public_makes_it_private_again(case, parcel):
    put(case, "go public", before=case.commit_by_others)
    ended = published(case, parcel, code=2, says="nobody else may write to it meanwhile")
    assert "It is private again" in ended.err
    assert case.hub.repos[REPO].private
