"""What a server says is read by one strict reader: a figure or one sentence comes of it, whatever
it is.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from data_files import table
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.validate.facts.served import Drafts, total
from keepmtp.validate.measure import replies
from keepmtp.validate.measure import server as module
from keepmtp.validate.measure.closeness import predictions, tokens_of
from keepmtp.validate.measure.replies import read_counters, said_in_stream
from keepmtp.validate.measure.server import Server

ODD = table("fuzz/odd")
TABLE = table("validate/measure/test_replies")
IDS = (5, 6, 7)
CALLS = {
    "complete": lambda server: server.complete("1 + 1?", max_tokens=2),
    "text": lambda server: server.answer("1 + 1?", timeout=9, max_tokens=2),
    "chat": lambda server: server.answer([{"role": "user", "content": "1 + 1?"}], timeout=9),
    "detokenize": lambda server: server.text_of(IDS),
    "tokenize": lambda server: tokens_of(server, "1 + 1?"),
    "predict": lambda server: predictions(server, IDS, top=2, vocabulary=9),
    "counters": lambda server: server.drafts(Drafts(drafts=3)),
}

METRICS = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.795252730227056e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 17.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 7.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 1.0
"""


def said(call: str, answers: Iterator[bytes], status: int = 200) -> str:
    """What is said of a server that answers so; "" where nothing is wrong."""

    def answered(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=httpx.ByteStream(next(answers)))

    def runs_on(timeout: float) -> None:
        raise subprocess.TimeoutExpired("vllm", timeout)

    client = httpx.Client(transport=httpx.MockTransport(answered), base_url="http://server")
    own = {"process": SimpleNamespace(wait=runs_on), "log": Path("log"), "name": "glm"}
    try:
        CALLS[call](Server(client=client, environment={}, **own))
    except KeepMTPError as error:
        return str(error)
    return ""


def replaced(tree: Any, odd: Any) -> Iterator[Any]:
    """The tree with another value in place of each of its own."""
    children = tree.items() if isinstance(tree, dict) else ()
    if isinstance(tree, list):
        children = enumerate(tree)
    for key, child in children:
        for new in (odd, *replaced(child, odd)):
            copy = tree.copy()
            copy[key] = new
            yield copy


@pytest.mark.parametrize("call", TABLE["good"])
def test_an_odd_value_in_an_answer_is_read_or_refused(call):
    good = TABLE["good"][call]
    assert said(call, repeat(json.dumps(good).encode())) == ""
    refused = 0
    for odd in (*ODD["numbers"], *ODD["others"], "\ud800"):
        for tree in replaced(good, odd):
            says = said(call, repeat(json.dumps(tree).encode()))
            refused += "a reply without an answer (" in says
    assert refused > 20


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("content", [b"\xff", b"[" * 10**5, b"{}", b" " * (replies.MOST_BYTES + 1)])
def test_another_body_is_refused(call, content):
    """{} is a good page of metrics, where nothing was drafted; here three drafts are gone."""
    assert said(call, repeat(content)).startswith("vllm serve: must come up and answer; got ")


@pytest.mark.parametrize("status", [302, 404, 500])
def test_another_status_is_refused(status):
    assert "; got " in said("tokenize", repeat(b""), status)


@pytest.mark.parametrize("number", TABLE["counters"])
def test_a_counter_that_nobody_could_have_counted(number):
    assert "no draft counters at /metrics" in said("counters", repeat(counted(number)))
    assert said("counters", repeat(counted("1.2e+01"))) == ""


def test_counters_that_never_come_to_rest(monkeypatch):
    monkeypatch.setattr(module, "_SETTLE_SECONDS", 0.5)
    says = said("counters", (counted(f"{number}") for number in count(3)))
    assert "draft counters that change" in says


def counted(number: str) -> bytes:
    return f'vllm:spec_decode_num_drafts_total{{engine="0"}} {number}\n'.encode()


def test_an_answer_that_comes_a_byte_at_a_time(monkeypatch):
    """Each byte in time, and never the last."""
    seconds = count(step=10)
    monkeypatch.setattr(replies.time, "monotonic", lambda: next(seconds))
    assert "not whole after 9 s" in said("text", repeat(b"{}"))


def test_a_stream_without_its_end_is_no_answer():
    """A server that dies leaves whole parts, and a reason among them."""
    part = {"choices": [{"finish_reason": "stop", "delta": {"content": "2"}}]}
    parts = f"data: {json.dumps(part)}\n\n".encode()
    assert said_in_stream(parts + b"data: [DONE]\n\n") == (("2", []), 0)
    for cut in (b"", b"data: [DONE", b": [DONE]\n\n", b"data: [DONE]\n\n" + parts):
        assert said_in_stream(parts + cut) == (None, 0)


def test_a_line_of_any_length_is_read_at_once():
    """An expression with `(.*) (.*)` took a minute for 240 kB."""
    line = f"vllm:spec_decode_num_{'a_total' * 30_000}"
    began = time.process_time()
    assert read_counters(f"{line}\n{METRICS}".encode()).drafts == 11
    assert time.process_time() - began < 2


def test_counters():
    found = read_counters(METRICS.encode())
    assert found == Drafts(
        drafts=11, draft_tokens=20, accepted_tokens=17, accepted_per_position=(10, 7)
    )
    assert found.acceptance == 0.85 and found.mean_accepted_length == 1 + 17 / 11
    assert found.since(Drafts()) == found and found.since(found).acceptance is None
    assert read_counters(b"") == Drafts()
    assert total([found, Drafts(drafts=1, accepted_per_position=(1,))]).accepted_per_position == (
        11,
        7,
    )
    assert total([]) == Drafts()
