"""A Hub that is not well, or is none: one sentence, and no wait without end; parts of a file, also
over a line that is cut; and where a token goes.
"""

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hub as loopback
import pytest
from data_files import cases, spelled
from hub import TOKEN, Fault, Hub
from huggingface_hub import close_session, get_session
from keepmtp.checkpoints import hub_client
from keepmtp.checkpoints.hub import dataset_commit, read_range
from keepmtp.checkpoints.source import INDEX, open_source
from keepmtp.recipes.errors import CheckpointError, NoCheckpointError, RecipeError
from releases import source_layout, write_checkpoint

REPO, FILE = "org/model", "model.safetensors"
CONTENT = random.Random(0).randbytes(300_000)
START, LENGTH = 1_001, 200_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    config, tensors = source_layout("glm-4.7")
    return write_checkpoint(tmp_path_factory.mktemp("made") / "source", config, tensors)


@pytest.fixture
def hub(hub_at, tmp_path, monkeypatch) -> Iterator[Hub]:
    """A Hub with an empty repository, which is asked again soon."""
    monkeypatch.setattr("keepmtp.checkpoints.hub._FIRST_WAIT_SECONDS", 0.01)
    with loopback.serving(tmp_path / "hub") as hub:
        hub.add(REPO, private=False)
        hub_at(hub.endpoint)
        yield hub


# --- a checkpoint on a Hub that is not well -------------------------------------------------------


@pytest.fixture
def whole(hub, folder) -> Hub:
    hub.mirror(REPO, folder)
    return hub


def refused(hub: Hub, to: str, **how: object) -> None:
    hub.faults = [Fault(to, times=99, **how)]  # type: ignore[arg-type]
    start = time.monotonic()
    with pytest.raises(CheckpointError, match="; got ") as caught:
        open_source(REPO)
    assert time.monotonic() - start < 30
    message = str(caught.value)
    assert message.startswith(REPO) and message.isprintable() and len(message) < 1500


def listing(**changes: object) -> bytes:
    files = [{"rfilename": "config.json"}]
    return json.dumps({"id": REPO, "sha": f"{1:040x}", "siblings": files} | changes).encode()


@cases
def test_a_mangled_list_of_files(whole, body):
    sent = listing(**body) if isinstance(body, dict) else spelled(body).encode("latin-1")
    refused(whole, f"GET /api/models/{REPO}", status=200, body=sent)


@pytest.mark.parametrize("status", [400, 401, 404, 418, 429, 503])
def test_a_refusal_of_the_hub(whole, status):
    refused(whole, f"GET /api/models/{REPO}", status=status)


@pytest.mark.parametrize("body", [b"<html>", b'{"model_type": 7}'])
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_mangled_small_file(whole, file, body):
    """What arrives is judged as a local file."""
    whole.commit(REPO, {file: body})
    with pytest.raises(CheckpointError, match=f"^{REPO}/{file}: "):
        open_source(REPO)


@cases
def test_a_header_that_does_not_arrive(whole, fault):
    if "body" in fault:
        fault = fault | {"body": fault["body"].encode("latin-1")}
    refused(whole, r"[.]safetensors( |$)", **fault)


def test_a_server_that_sends_the_whole_file(whole, folder):
    """It ignores the range; the header is in what it sends, and the rest is not read."""
    shard = min(folder.glob("*.safetensors"))
    whole.faults = [Fault(shard.name, status=200, body=shard.read_bytes())]
    assert open_source(REPO).entries == open_source(folder).entries


# --- a part of a file -----------------------------------------------------------------------------


@pytest.fixture
def part(hub) -> Hub:
    """A Hub with one file, of random bytes."""
    hub.commit(REPO, {FILE: CONTENT})
    return hub


def get(hub: Hub) -> None:
    """The bytes of the range are those of the file."""
    into = bytearray(LENGTH)
    commit = hub.repos[REPO].head
    read_range(REPO, FILE, commit=commit, start=START, into=memoryview(into))
    assert into == CONTENT[START : START + LENGTH]


def ranges(hub: Hub) -> list[str]:
    return [request.rpartition("=")[2] for request in hub.requests if "bytes=" in request]


def test_a_range_is_the_files_bytes(part):
    get(part)
    assert ranges(part) == [f"{START}-{START + LENGTH - 1}"]


def test_a_cut_in_the_middle_goes_on_from_there(part):
    part.faults = [Fault("GET .*resolve", spoils="truncate", times=2)]
    get(part)
    starts = [int(each.partition("-")[0]) for each in ranges(part)]
    assert starts == [START, START + LENGTH // 2, START + LENGTH * 3 // 4], "nothing is sent twice"


@pytest.mark.parametrize("status", [0, 429, 503])
def test_an_answer_without_a_byte_is_asked_for_again(part, status):
    part.faults = [Fault("GET .*resolve", status=status, times=2)]
    get(part)
    assert len(ranges(part)) == 3


@pytest.mark.parametrize(
    "status, says, asked",
    [
        (0, "the Hub must be reachable", 5),
        (403, "", 1),
    ],
)
def test_a_line_that_stays_cut_is_given_up_and_a_refusal_not_asked_again(part, status, says, asked):
    part.faults = [Fault("GET .*resolve", status=status, times=99)]
    with pytest.raises(NoCheckpointError, match=f"{REPO}: {says}"):
        get(part)
    assert len(ranges(part)) == asked


@pytest.mark.parametrize("said", ["", f"bytes 0-{LENGTH - 1}/300000", "nonsense"])
def test_other_bytes_than_were_asked_for_are_not_taken(part, said):
    how = {"status": 206 if said else 200, "headers": {"Content-Range": said}}
    part.faults = [Fault("GET .*resolve", body=CONTENT, **how)]
    says = f"{REPO}/{FILE}: the Hub must send a part of the file; got "
    with pytest.raises(NoCheckpointError, match=says):
        get(part)


def test_the_address_that_the_hub_leads_to_is_kept_and_asked_for_anew_when_it_expires(part):
    part.leads_elsewhere = True
    for _ in range(3):
        get(part)
    part.faults = [Fault("GET /elsewhere", status=403)]
    get(part)
    asked = [request.split()[1].split("/")[1] for request in part.requests if "bytes=" in request]
    assert asked == ["org", *["elsewhere"] * 4, "org", "elsewhere"]


# --- deadlines, and where a token goes ------------------------------------------------------------


@pytest.fixture
def hasty(hub, monkeypatch) -> Iterator[Hub]:
    """It must answer within 0.3 s, and after the test in the time that it had before."""
    monkeypatch.setattr(hub_client.PATIENCE, "seconds", hub_client.PATIENCE.seconds)
    monkeypatch.setattr(hub_client.PATIENCE, "silences", 0)
    monkeypatch.setenv("KEEPMTP_HUB_TIMEOUT", "0.3")
    hub_client.install()
    yield hub
    close_session()


def ask(place: str) -> dict[str, str]:
    return get_session().get(place, headers={"Authorization": f"Bearer {TOKEN}"}).json()


ENDPOINTS = (
    "http://huggingface.co http://localhost.evil.org ftp://huggingface.co huggingface.co "
    "https://me:secret@huggingface.co "
)


@pytest.mark.parametrize("endpoint", ENDPOINTS.split(" "))
def test_a_token_is_sent_by_https_only(endpoint):
    with pytest.raises(RecipeError, match="HF_ENDPOINT: a token is sent by https only") as refusal:
        hub_client.refuse_endpoint(endpoint)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        "https://huggingface.co",
        "https://hub.corp:8443",
        "http://127.0.0.1:8000",
    ],
)
def test_an_endpoint_that_will_do(endpoint):
    hub_client.refuse_endpoint(endpoint)


@pytest.mark.parametrize("value", ["soon", "0", "nan", "1e9"])
def test_a_deadline_is_a_number_of_seconds(monkeypatch, value):
    monkeypatch.setenv("KEEPMTP_HUB_TIMEOUT", value)
    with pytest.raises(RecipeError, match="KEEPMTP_HUB_TIMEOUT: must be a number of seconds"):
        hub_client.install()


def test_a_proxy_does_not_read_what_goes_to_this_machine(hub, tmp_path, monkeypatch):
    with loopback.serving(tmp_path / "proxy") as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.endpoint)
        monkeypatch.delenv("NO_PROXY", raising=False)
        hub_client.install()
        assert ask(f"{hub.endpoint}/api/whoami-v2")["name"] == "me"
    assert proxy.requests == []


@pytest.mark.parametrize(
    "question", [open_source, lambda name: dataset_commit(name, "main", "calibration.dataset")]
)
@pytest.mark.parametrize("fault", [{"spoils": "drip"}, {"spoils": "headers"}, {"before": bool}])
def test_a_hub_that_does_not_end_its_answer(hasty, fault, question):
    """`check org/model` too: one sentence, and in time."""
    end = threading.Event()
    if "before" in fault:
        fault = fault | {"hold": end}
    hasty.faults = [Fault("GET", times=99, **fault)]
    start = time.monotonic()
    with pytest.raises((NoCheckpointError, RecipeError), match="the Hub must"):
        question(REPO)
    end.set()
    assert time.monotonic() - start < 30, "the Hub would drip for minutes"


def test_a_long_answer_may_take_long(hasty, monkeypatch):
    """What comes at a usable speed is waited for, however long it is: here longer than a second."""
    monkeypatch.setenv("KEEPMTP_HUB_TIMEOUT", "1")
    hub_client.install()
    hasty.commit(REPO, {"large": bytes(200_000)})
    hasty.faults = [Fault("resolve", spoils="drip", drop=8_000)]
    got = get_session().get(f"{hasty.endpoint}/{REPO}/resolve/main/large")
    assert len(got.content) == 200_000
