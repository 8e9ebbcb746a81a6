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
    "empty": b"",
    "a page": b"<html>Sign in</html>",
    "cut": listing()[:-3],
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "no name": b"{}",
    "deep": b'{"id": %b%b}' % (b"[" * 100_000, b"]" * 100_000),
    "no UTF-8": b'{"id": "\xff\xff\xff"}',
    "files that are a number": listing(siblings=7),
    "files that are numbers": listing(siblings=[7]),
    "files without names": listing(siblings=[{}]),
    "a file whose name is a number": listing(siblings=[{"rfilename": 7}]),
    "a file whose name is a list": listing(siblings=[{"rfilename": []}]),
    "a file above the repository": listing(siblings=[{"rfilename": "../../x.safetensors"}]),
    "a file anywhere": listing(siblings=[{"rfilename": "/x.safetensors"}]),
    "a commit that is a number": listing(sha=7),
    "a commit that leads elsewhere": listing(sha="../../../x"),
    "a date that is none": listing(lastModified="yesterday"),
    "no weights": listing(),
}


@pytest.mark.parametrize("body", LISTINGS.values(), ids=LISTINGS)
def test_a_mangled_list_of_files(hub, body):
    assert refusal(
        hub, Fault(r"GET /api/models/org/model", status=200, body=body, times=9)
    ).startswith("org/model")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 418, 429, 500, 502, 503])
def test_a_refusal_of_the_hub(hub, status):
    assert refusal(hub, Fault(r"GET /api/models/org/model", status=status, times=99)).startswith(
        "org/model"
    )


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{", b'{"model_type": 7}', b"\xff\xfe{"])
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_mangled_small_file(hub, folder, file, body):
    """What arrives is judged as a local file."""
    hub.commit("org/model", {file: body})
    with pytest.raises(CheckpointError, match=f"^org/model/{file}: "):
        open_source("org/model")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(r"[.]safetensors( |$)", status=200, body=b"<html>Sign in</html>", times=99),
        Fault(r"[.]safetensors( |$)", status=206, body=b"", times=99),
        Fault(
            r"safetensors",
            status=206,
            body=b"12345678",
            headers={"Content-Range": "bytes 0-7/9999999999"},
            times=99,
        ),
        Fault(
            r"[.]safetensors( |$)",
            status=206,
            body=b"\xff" * 8,
            headers={"Content-Range": "bytes 0-7/8"},
            times=99,
        ),
        Fault(
            r"[.]safetensors( |$)",
            status=206,
            body=b"{}" * 8,
            headers={"Content-Range": "bytes */*"},
            times=99,
        ),
        Fault(
            r"[.]safetensors( |$)",
            status=206,
            body=b"{}",
            headers={"Content-Range": "bytes 0-1/" + "9" * 99},
            times=99,
        ),
        Fault(r"[.]safetensors( |$)", status=403, times=99),
        Fault(r"[.]safetensors( |$)", status=404, times=99),
        Fault(r"[.]safetensors( |$)", status=416, times=99),
        Fault(r"[.]safetensors( |$)", status=500, times=99),
        Fault(r"[.]safetensors( |$)", times=99),
        Fault(
            r"[.]safetensors( |$)",
            status=302,
            headers={"Location": "/loop.safetensors"},
            body=b"",
            times=99,
        ),
        Fault(
            r"[.]safetensors( |$)",
            status=302,
            headers={"Location": "file:///etc/passwd"},
            body=b"",
            times=99,
        ),
    ],
    ids=lambda fault: f"{fault.status} {fault.body!r} {dict(fault.headers)}"[:60],
)
def test_a_header_that_does_not_arrive(hub, fault, monkeypatch):
    monkeypatch.setattr("keepmtp.checkpoints.hub._FIRST_WAIT_SECONDS", 0.01)
    fault = Fault(
        **{name: getattr(fault, name) for name in ("to", "status", "times", "headers", "body")}
    )
    assert refusal(hub, fault).startswith("org/model")


def test_a_server_that_sends_the_whole_file(hub, folder):
    """It ignores the range; the header is in what it sends, and the rest is not read."""
    shard = min(folder.glob("*.safetensors"))
    raw = shard.read_bytes()
    hub.faults.append(
        Fault(shard.name, status=200, body=raw, headers={"Content-Length": str(len(raw))})
    )
    assert open_source("org/model").entries == open_source(folder).entries
