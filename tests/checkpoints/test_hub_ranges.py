"""Parts of a file on the Hub: the bytes of the range, also over a line that is cut, and no request
too many.
"""

import random

import pytest
from hub import Fault, Hub, serving
from keepmtp.checkpoints.hub import read_range
from keepmtp.recipes.errors import NoCheckpointError

FILE = "model.safetensors"
CONTENT = random.Random(0).randbytes(300_000)
START, LENGTH = 1_001, 200_000


@pytest.fixture
def hub(hub_at, tmp_path, monkeypatch):
    monkeypatch.setattr("keepmtp.checkpoints.hub._FIRST_WAIT_SECONDS", 0.01)
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / FILE).write_bytes(CONTENT)
    with serving(tmp_path / "hub") as hub:
        hub.mirror("org/model", folder)
        hub_at(hub.endpoint)
        yield hub


def got(hub: Hub) -> bytes:
    into = bytearray(LENGTH)
    read_range(
        "org/model", FILE, commit=hub.repos["org/model"].head, start=START, into=memoryview(into)
    )
    return bytes(into)


def ranges(hub: Hub) -> list[str]:
    return [request.rpartition("=")[2] for request in hub.requests if "bytes=" in request]


def test_a_range_is_the_files_bytes(hub):
    assert got(hub) == CONTENT[START : START + LENGTH]
    assert ranges(hub) == [f"{START}-{START + LENGTH - 1}"]


def test_a_cut_in_the_middle_goes_on_from_there(hub):
    hub.faults.append(Fault("GET .*resolve", spoils="truncate", times=2))
    assert got(hub) == CONTENT[START : START + LENGTH]
    starts = [int(each.partition("-")[0]) for each in ranges(hub)]
    assert starts == [START, START + LENGTH // 2, START + LENGTH * 3 // 4], "nothing is sent twice"


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET .*resolve"),
        Fault("GET .*resolve", status=503),
        Fault("GET .*resolve", status=429),
    ],
)
def test_an_answer_without_a_byte_is_asked_for_again(hub, fault):
    fault.times = 2
    hub.faults.append(fault)
    assert got(hub) == CONTENT[START : START + LENGTH]
    assert len(ranges(hub)) == 3


def test_a_line_that_stays_cut_is_given_up(hub):
    hub.faults.append(Fault("GET .*resolve", times=99))
    with pytest.raises(NoCheckpointError, match="org/model: the Hub must be reachable"):
        got(hub)
    assert len(ranges(hub)) == 5


def test_a_refusal_is_not_asked_again(hub):
    hub.faults.append(Fault("GET .*resolve", status=403, times=99))
    with pytest.raises(NoCheckpointError, match="org/model"):
        got(hub)
    assert len(ranges(hub)) == 1


@pytest.mark.parametrize("said", ["", f"bytes 0-{LENGTH - 1}/300000", "nonsense"])
def test_other_bytes_than_were_asked_for_are_not_taken(hub, said):
    hub.faults.append(
        Fault(
            "GET .*resolve",
            status=206 if said else 200,
            body=CONTENT,
            headers={"Content-Range": said},
        )
    )
    with pytest.raises(
        NoCheckpointError, match=f"org/model/{FILE}: the Hub must send a part of the file; got "
    ):
        got(hub)


def test_the_address_that_the_hub_leads_to_is_kept_and_asked_for_anew_when_it_expires(hub):
    hub.leads_elsewhere = True
    for _ in range(3):
        assert got(hub) == CONTENT[START : START + LENGTH]
    asked = [request.split()[1].split("/")[1] for request in hub.requests if "bytes=" in request]
    assert asked == ["org", "elsewhere", "elsewhere", "elsewhere"]
    hub.faults.append(Fault("GET /elsewhere", status=403))
    assert got(hub) == CONTENT[START : START + LENGTH]
    asked = [request.split()[1].split("/")[1] for request in hub.requests if "bytes=" in request]
    assert asked[4:] == ["elsewhere", "org", "elsewhere"]
