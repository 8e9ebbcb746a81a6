"""Conversations with tools on a stand-in server: what is asked, what is right, and that a fault is
counted as what it is, alone and streamed.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from answering import Answering, answering
from commands import GLM
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.validate.facts.lossless import LosslessFact
from keepmtp.validate.measure import harness, lossless, tool_calls
from keepmtp.validate.measure.harness import Host, Model, Setup
from keepmtp.validate.measure.server import Server, ServerFailed
from real_vllm import H100


def right_answers() -> dict[str, Any]:
    """By what is sent, the message that is right."""
    turns = [turn for turns in CONVERSATIONS for turn in turns]
    return {json.dumps(list(turn.messages)): turn.answer for turn in turns}


class Calling(Answering):
    """`answers` by messages; `fault` says what is wrong with the answer to a request."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        message = self.answers[json.dumps(body["messages"])]
        fault = self.fault(body)
        if fault == "HTTP 500":
            return self.reply(500, b"")
        calls = [dict(call["function"]) for call in message.get("tool_calls", ())]
        content = message["content"]
        if fault == "wrong":
            calls = [{"name": "weather", "arguments": '{"city": "Ur"}'}]
        elif fault == "off schema":
            calls = [{"name": "weather", "arguments": '{"town": "Ur"}'}]
        elif fault == "no JSON":
            calls = [{"name": "weather", "arguments": '{"city": "Ur'}]
        elif fault == "words":
            content, calls = "I cannot tell the weather.", []
        elif fault == "left in the text":
            content, calls = json.dumps(calls), []
        reason = "tool_calls" if calls else "stop"
        if body.get("stream"):
            return self.stream(list(parts(content, calls, reason)), fault)
        said = {"content": content, "tool_calls": [{"id": "a", "function": one} for one in calls]}
        choice = {"index": 0, "finish_reason": reason, "message": said}
        reply = {"choices": [choice], "usage": {"completion_tokens": 9}}
        self.reply(200, json.dumps(reply).encode())

    def stream(self, sent: list[dict], fault: str):
        if fault == "lost piece" and len(sent) > 5:
            del sent[3]
        if fault in ("no end", "cut"):
            sent = sent[:-2]
        if fault == "an error for a part":
            sent[1] = {"error": {"message": "the parser failed", "code": 500}}
        lines = [f"data: {json.dumps(one)}\n\n" for one in sent]
        if fault not in ("no end", "cut"):
            lines.append("data: [DONE]\n\n")
        text = "".join(lines).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text) + 99 * (fault == "cut")))
        self.end_headers()
        self.wfile.write(text)
        self.wfile.flush()
        self.close_connection = fault == "cut"


def parts(content: str, calls: list[dict], reason: str) -> Iterator[dict]:
    """Of a stream: words, then each call piece by piece, the end, and the tokens."""

    def part(reason: str | None = None, **delta: Any) -> dict:
        return {"choices": [{"index": 0, "finish_reason": reason, "delta": delta}]}

    yield part(role="assistant", content=content)
    for index, call in enumerate(calls):
        yield part(tool_calls=[{"index": index, "type": "function"}])  # as Mistral's parser does
        yield part(tool_calls=[{"index": index, "id": "a", "function": {"name": call["name"]}}])
        text = call["arguments"]
        for at in range(0, len(text), 5):
            piece = {"index": index, "function": {"arguments": text[at : at + 5]}}
            yield part(tool_calls=[piece])
    yield part(reason)
    yield {"choices": [], "usage": {"completion_tokens": 9}}


MODEL = Model(role="checkpoint", source=open_source(GLM), identity=identify(GLM))
NUM = 20  # two of each row of our own
TURNS = 30
CONVERSATIONS = tool_calls.conversations()[:NUM]
PARSER = ("--tool-call-parser", "hermes", "--chat-template", "{% if tools %}{% endif %}")


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Asks a server that answers right but for `fault`, a function of the request; with MTP off."""
    every = lossless.Lossless._requests
    monkeypatch.setattr(lossless.Lossless, "_requests", lambda *way: every(*way)[56:])
    monkeypatch.setattr(tool_calls, "conversations", lambda: CONVERSATIONS)

    def found(fault=lambda _: "", *, has_cache: bool = False):
        setup = Setup(vllm=H100, out=tmp_path / "out", extra=PARSER)
        how = {"setup": setup, "source": None, "k": 0, "has_cache": has_cache, "parser": PARSER[:2]}
        station = lossless.Lossless(checkpoint=MODEL, **how)
        native = {"folder": GLM, "as_served": "native", "reason": ""}
        host = Host(model=MODEL, setup=setup, **native)
        log = tmp_path / "log"
        with answering(right_answers(), log, fault, Calling) as (server, requests):
            monkeypatch.setattr(harness, "serving", lambda *_, **__: nullcontext(server))
            for work in station.works(MODEL):
                host.answer(work)
        return seen(station.fact({})), requests

    return found


def seen(fact: LosslessFact) -> dict[str, dict[str, int]]:
    """By way how many conversations have each fault."""
    found = {}
    for one in fact.checkpoint.asked:
        assert one.num == NUM
        found[one.way] = {fault: len(names) for fault, names in one.seen.items()}
    return found


def test_every_conversation_is_asked_in_each_way_and_all_are_right(ask):
    found, requests = ask(has_cache=True)
    assert found == {"one at a time": {}, "32 at once": {}, "with prefix caching": {}}
    assert len(requests) == 3 * TURNS
    assert sum(each.get("stream", False) for each in requests) == 2 * TURNS
    sent = {"max_tokens": 1024, "temperature": 0.0, "seed": 0}
    assert all(sent.items() <= each.items() and len(each["tools"]) == 5 for each in requests)


def test_prefix_caching_has_a_server_of_its_own(tmp_path):
    setup = Setup(vllm=H100, out=tmp_path, extra=PARSER)
    words = tool_calls.parser_words(MODEL.source, PARSER)
    how = {"setup": setup, "source": None, "k": 0, "has_cache": True, "parser": words}
    alone, load, cached = lossless.Lossless(checkpoint=MODEL, **how).works(MODEL)
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    assert alone.further == load.further == cached.further == parser
    assert alone.words == load.words == () and cached.words == ("--enable-prefix-caching",)
    assert (alone.concurrency, load.concurrency, cached.concurrency) == (1, 32, 32)
    assert len({work.file.path for work in (alone, load, cached)}) == 3 and cached.name != load.name
    assert alone.file.header.words[:3] == parser and (
        alone.file.header.num,
        load.file.header.num,
    ) == (76, 176)


@pytest.mark.parametrize(
    "fault, named",
    [
        ("wrong", "calls"),
        ("words", "calls"),
        ("off schema", "schema"),
        ("no JSON", "JSON"),
        ("left in the text", "JSON"),
    ],
)
def test_a_call_that_is_not_right_is_counted_as_what_it_is(fault, named, ask):
    """In the first conversation of twenty: an answer that cannot be read is no wrong call."""

    def spoil(body) -> str:
        return fault * (body["messages"][-1]["content"] == "What is the weather in Málaga?")

    assert ask(spoil)[0] == {"one at a time": {named: 1}, "32 at once": {named: 1}}


@pytest.mark.parametrize(
    "fault, named",
    [
        ("lost piece", "JSON"),
        ("no end", "no end"),
        ("cut", "no end"),
        ("an error for a part", "no end"),
        ("HTTP 500", "no end"),
    ],
)
def test_streams_that_break_are_found_as_such(fault, named, ask):
    """The whole answers are right."""

    def spoil(body) -> str:
        is_spoilt = body["messages"][-1]["content"].startswith("What is")
        return fault * (is_spoilt and body.get("stream", False))

    assert ask(spoil)[0] == {"one at a time": {}, "32 at once": {named: 4}}


def test_a_server_whose_cached_prefixes_are_wrong_is_found_as_such(ask):
    before = count()
    found, _ = ask(lambda _: "wrong" * (next(before) >= 2 * TURNS), has_cache=True)
    assert found == {"one at a time": {}, "32 at once": {}, "with prefix caching": {"calls": NUM}}


def test_a_parser_that_fails_on_a_whole_answer_is_no_wrong_call(ask):
    found, _ = ask(lambda body: "HTTP 500" * body["messages"][-1]["content"].startswith("What is"))
    assert found["one at a time"] == {"no end": 4}


def test_a_stream_that_ends_because_the_server_died_is_asked_again(ask, monkeypatch):
    real = Server._ask

    def dead(self, path, **how):
        if path == "/health":
            raise ServerFailed("EngineDeadError", self.log)
        return real(self, path, **how)

    monkeypatch.setattr(Server, "_ask", dead)
    with pytest.raises(ServerFailed, match="EngineDeadError"):
        ask(lambda body: "no end" * body.get("stream", False))


# --- where no tool is called ----------------------------------------------------------------------


def test_a_template_without_tools(tmp_path):
    folder = shutil.copytree(GLM, tmp_path / "glm")
    (folder / "chat_template.jinja").write_text("{% for one in messages %}tool{% endfor %}")
    assert tool_calls.parser_words(open_source(folder), ()) == ()
    named = tmp_path / "named"
    named.write_text("{% if tools %}{% endif %}")
    # vLLM takes a file, or the template itself, which is longer than any file's name.
    for words in (f"{named}", f"{named.read_text()}{'x' * 300}"):
        assert tool_calls.parser_words(open_source(folder), ("--chat-template", words))
    assert not tool_calls.parser_words(open_source(folder), (f"--chat-template={'{x}' * 100}",))
    (folder / "chat_template.jinja").write_text(named.read_text())
    assert tool_calls.parser_words(open_source(folder), ())[-1] == "glm45"


def test_no_parser_of_calls(tmp_path, monkeypatch):
    folder = shutil.copytree(GLM, tmp_path / "glm")
    (folder / "chat_template.jinja").write_text("{% if tools %}{% endif %}")
    none = replace(tool_calls.view_of(open_source(folder)).family, tool_parser="")
    view = type("View", (), {"family": none})
    monkeypatch.setattr(tool_calls, "view_of", lambda _: view)
    assert tool_calls.parser_words(open_source(folder), ()) == ()
    assert tool_calls.parser_words(open_source(folder), ("--tool-call-parser=hermes",))


# --- the conversations ----------------------------------------------------------------------------


def test_our_own_are_120_and_hold_what_breaks():
    found = tool_calls.conversations()
    assert len(found) == 120 == len({tool_calls.longest(turns) for turns in found})
    kinds = Counter[int](len(turn.wanted) for turns in found for turn in turns)
    assert min(kinds[0], kinds[1], kinds[2]) >= 36 and sum(kinds.values()) == 180
    for turns in found[:12]:
        assert any(ord(letter) > 127 for letter in tool_calls.longest(turns))
    last = found[119][-1]
    assert last.messages[0]["role"] == "system" and last.messages[-1]["role"] == "tool"
    called = last.messages[-2]["tool_calls"][0]
    assert called["id"] == last.messages[-1]["tool_call_id"] and len(called["id"]) == 9
    assert json.loads(called["function"]["arguments"]).keys() == {"name"}


def test_the_order_of_parallel_calls_does_not_matter():
    turns = CONVERSATIONS[1]
    malaga, lima = [["weather", json.dumps(given)] for _, given in turns[0].wanted]
    for calls, is_right in (
        ([malaga, lima], True),
        ([lima, malaga], True),
        ([lima, lima], False),
        ([malaga, lima, lima], False),
        ([malaga], False),
    ):
        found = [*tool_calls.seen_in_turns(turns, json.dumps([["", calls]]))]
        assert found == ["calls"] * (not is_right), calls
