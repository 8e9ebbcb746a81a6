"""Answers of a Hub that is not well, or that is not one: one sentence, and no wait without end."""

import json
import time
from pathlib import Path

import pytest
from hub import Fault, Hub, serving
from keepmtp.checkpoints.source import INDEX, open_source
from keepmtp.recipes.errors import CheckpointError
from releases import source_layout, write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    config, tensors = source_layout("glm-4.7", size="tiny")
    return write_checkpoint(tmp_path_factory.mktemp("made") / "source", config, tensors)


@pytest.fixture
def hub(folder, hub_at, tmp_path):
    """A Hub with the folder as org/model."""
    with serving(tmp_path / "hub") as hub:
        hub.mirror("org/model", folder)
        hub_at(hub.endpoint)
        yield hub


def refusal(hub: Hub, fault: Fault) -> str:
    hub.faults.append(fault)
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        open_source("org/model")
    assert time.monotonic() - start < 30
    message = str(caught.value)
    assert "; got " in message and message.isprintable() and len(message) < 1500
    return message


def listing(**changes: object) -> bytes:
    return json.dumps(
        {"id": "org/model", "sha": f"{1:040x}", "siblings": [{"rfilename": "config.json"}]}
        | changes
    ).encode()


LISTINGS = {
    "a page": b"<html>Sign in</html>",
    "a list": b"[]",
    "deep": b'{"id": %b%b}' % (b"[" * 100_000, b"]" * 100_000),
    "no UTF-8": b'{"id": "\xff\xff\xff"}',
    "files that are a number": listing(siblings=7),
    "files without names": listing(siblings=[{}]),
    "a file whose name is a number": listing(siblings=[{"rfilename": 7}]),
    "a file above the repository": listing(siblings=[{"rfilename": "../../x.safetensors"}]),
    "a commit that is a number": listing(sha=7),
    "a date that is none": listing(lastModified="yesterday"),
    "no weights": listing(),
}


@pytest.mark.parametrize("body", LISTINGS.values(), ids=LISTINGS)
def test_a_mangled_list_of_files(hub, body):
    assert refusal(
        hub, Fault(r"GET /api/models/org/model", status=200, body=body, times=9)
    ).startswith("org/model")


@pytest.mark.parametrize("status", [400, 401, 404, 418, 429, 503])
def test_a_refusal_of_the_hub(hub, status):
    assert refusal(hub, Fault(r"GET /api/models/org/model", status=status, times=99)).startswith(
        "org/model"
    )


@pytest.mark.parametrize("body", [b"<html>", b'{"model_type": 7}'])
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_mangled_small_file(hub, folder, file, body):
    """What arrives is judged as a local file."""
    hub.commit("org/model", {file: body})
    with pytest.raises(CheckpointError, match=f"^org/model/{file}: "):
        open_source("org/model")


SPOILT = [
    {"status": 200, "body": b"<html>Sign in</html>"},
    {"status": 206, "body": b""},
    {"status": 206, "body": b"12345678", "headers": {"Content-Range": "bytes 0-7/9999999999"}},
    {"status": 206, "body": b"\xff" * 8, "headers": {"Content-Range": "bytes 0-7/8"}},
    {"status": 206, "body": b"{}", "headers": {"Content-Range": "bytes 0-1/" + "9" * 99}},
    {"status": 404},
    {"status": 416},
    {"status": 500},
    {},
    {"status": 302, "headers": {"Location": "/loop.safetensors"}, "body": b""},
    {"status": 302, "headers": {"Location": "file:///etc/passwd"}, "body": b""},
]


@pytest.mark.parametrize("fault", SPOILT, ids=lambda fault: str(fault)[:60])
def test_a_header_that_does_not_arrive(hub, fault, monkeypatch):
    monkeypatch.setattr("keepmtp.checkpoints.hub._FIRST_WAIT_SECONDS", 0.01)
    fault = Fault(r"[.]safetensors( |$)", times=99, **fault)
    assert refusal(hub, fault).startswith("org/model")


def test_a_server_that_sends_the_whole_file(hub, folder):
    """It ignores the range; the header is in what it sends, and the rest is not read."""
    shard = min(folder.glob("*.safetensors"))
    raw = shard.read_bytes()
    hub.faults.append(
        Fault(shard.name, status=200, body=raw, headers={"Content-Length": str(len(raw))})
    )
    assert open_source("org/model").entries == open_source(folder).entries
