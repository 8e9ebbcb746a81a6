"""The task tool-calls on a stand-in server: what is asked, what is right, and that a fault is counted
as what it is.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from answering import Answering, answering
from commands import GLM
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.measure import harness, tool_calls
from keepmtp.validate.measure.harness import Host, Model, Setup
from keepmtp.validate.measure.lm_eval_task import Questions
from keepmtp.validate.measure.server import Server, ServerFailed
from keepmtp.validate.measure.tasks import by_server, refuse_model, work_of
from keepmtp.validate.measure.tool_calls import conversations
from real_vllm import H100


def right_answers(asked: Questions) -> dict[str, Any]:
    """By what is sent, the message that is right."""
    turns = [turn for each in asked.items for turn in each.turns]
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


def built(**protocol) -> Questions:
    return conversations(
        Evaluation(**({"task": "tool-calls", "limit": NUM, "k": 1, "concurrency": 4} | protocol))
    )


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Asks a server that answers right but for `fault`, a function of the request."""

    def found(asked: Questions, fault=lambda _: ""):
        setup = Setup(vllm=H100, out=tmp_path / "out")
        native = {"folder": GLM, "as_served": "native", "reason": ""}
        host = Host(model=MODEL, setup=setup, **native)
        log = tmp_path / "log"
        with answering(right_answers(asked), log, fault, Calling) as (server, requests):
            monkeypatch.setattr(harness, "serving", lambda *_, **__: nullcontext(server))
            works = [work_of(MODEL, one, setup) for one in by_server(asked)]
            for work in works:
                host.answer(work)
        texts = [[answer.text for answer in work.file.in_order()] for work in works]
        return tool_calls.scores(asked, texts), requests

    return found


def values(facts) -> dict[str, float]:
    return {fact.filter: round(fact.value, 4) for fact in facts}


def test_every_conversation_is_asked_in_each_way_and_all_are_right(ask):
    asked = built(prefix_caching=True)
    (facts, right), requests = ask(asked)
    names = ("expected", "streamed", "cached", "cached streamed", "ended", "JSON", "schema")
    assert values(facts) == dict.fromkeys(names, 1.0)
    assert all(len(each) == NUM for each in right.values())
    assert len(requests) == 4 * TURNS == 2 * sum(each.get("stream", False) for each in requests)
    sent = {"max_tokens": 4096, "temperature": 0.0, "seed": 1234}
    assert all(sent.items() <= each.items() and len(each["tools"]) == 5 for each in requests)


def test_prefix_caching_has_a_server_of_its_own(tmp_path):
    setup = Setup(vllm=H100, out=tmp_path, extra=("--tool-call-parser", "hermes"))
    plain, cached = [work_of(MODEL, one, setup) for one in by_server(built())]
    parser = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    assert plain.further == cached.further == parser and plain.words == ()
    assert cached.words == ("--enable-prefix-caching",) and cached.name != plain.name
    assert plain.file.path != cached.file.path and plain.file.header.words[:3] == parser
    assert len(by_server(built(prefix_caching=False))) == 1
    gsm8k = Questions(
        protocol=Evaluation(prefix_caching=True), items=(), dataset_sha256="", tasks=()
    )
    assert by_server(gsm8k) == [gsm8k]


@pytest.mark.parametrize(
    "fault, lacks",
    [
        ("wrong", ""),
        ("words", ""),
        ("off schema", "schema"),
        ("no JSON", "JSON"),
        ("left in the text", "JSON"),
    ],
)
def test_a_call_that_is_not_right_is_counted_as_what_it_is(fault, lacks, ask):
    """In the first conversation of twenty: an answer that cannot be read is no wrong call."""

    def spoil(body) -> str:
        return fault * (body["messages"][-1]["content"] == "What is the weather in Málaga?")

    (facts, right), _ = ask(built(prefix_caching=False), spoil)
    wanted = dict.fromkeys(("expected", "streamed", "ended", "JSON", "schema"), 1.0)
    wanted |= dict.fromkeys(("expected", "streamed", *filter(None, [lacks])), 0.95)
    assert values(facts) == wanted and not right["expected"][0]


@pytest.mark.parametrize("fault", ["", "left in the text"])
def test_calls_are_counted_as_the_parser_found_them(fault, ask, monkeypatch):
    """One that does not fit leaves them in the text."""
    monkeypatch.setattr(tool_calls, "scores", lambda _, texts: texts)
    texts, _ = ask(built(prefix_caching=False), lambda _: fault)
    assert bool(tool_calls.num_calls(chain(*texts))) == (fault == "")


@pytest.mark.parametrize(
    "fault, lacks",
    [
        ("lost piece", "JSON"),
        ("no end", "ended"),
        ("cut", "ended"),
        ("an error for a part", "ended"),
        ("HTTP 500", "ended"),
    ],
)
def test_streams_that_break_are_found_as_such(fault, lacks, ask):
    """The whole answers are right."""

    def spoil(body) -> str:
        is_spoilt = body["messages"][-1]["content"].startswith("What is")
        return fault * (is_spoilt and body.get("stream", False))

    (facts, right), _ = ask(built(prefix_caching=False), spoil)
    wanted = dict.fromkeys(("expected", "streamed", "ended", "JSON", "schema"), 1.0)
    assert values(facts) == wanted | {"streamed": 0.8, lacks: 0.8}
    assert right["streamed"].count(False) == 4


def test_a_parser_that_fails_on_a_whole_answer_is_no_wrong_call(ask):
    (facts, _), _ = ask(
        built(prefix_caching=False),
        lambda body: "HTTP 500" * body["messages"][-1]["content"].startswith("What is"),
    )
    lost = dict.fromkeys(("expected", "streamed", "ended"), 0.8)
    assert values(facts) == {"JSON": 1.0, "schema": 1.0} | lost


def test_a_stream_that_ends_because_the_server_died_is_asked_again(ask, monkeypatch):
    real = Server._ask

    def dead(self, path, **how):
        if path == "/health":
            raise ServerFailed("EngineDeadError", self.log)
        return real(self, path, **how)

    monkeypatch.setattr(Server, "_ask", dead)
    with pytest.raises(ServerFailed, match="EngineDeadError"):
        ask(built(limit=2), lambda body: "no end" * body.get("stream", False))


# --- what is refused before a server is started ---------------------------------------------------


def refusal(folder: Path, *extra: str) -> str:
    with pytest.raises(KeepMTPError) as caught:
        refuse_model(open_source(folder), Evaluation(task="tool-calls", k=1), extra)
    return str(caught.value)


def test_a_template_without_tools(tmp_path):
    folder = shutil.copytree(GLM, tmp_path / "glm")
    (folder / "chat_template.jinja").write_text("{% for one in messages %}tool{% endfor %}")
    assert f"{folder}: needs a chat template with tools for the task tool-calls" in refusal(folder)
    named = tmp_path / "named"
    named.write_text("{% if tools %}{% endif %}")
    # vLLM takes a file, or the template itself, which is longer than any file's name.
    for words in (f"{named}", f"{named.read_text()}{'x' * 300}"):
        tool_calls.refuse_tools(open_source(folder), ("--chat-template", words))
    assert "needs a chat template" in refusal(folder, f"--chat-template={'{x}' * 100}")
    (folder / "chat_template.jinja").write_text(named.read_text())
    refuse_model(open_source(folder), Evaluation(task="tool-calls", k=1), ())


def test_no_parser_of_calls(tmp_path, monkeypatch):
    folder = shutil.copytree(GLM, tmp_path / "glm")
    (folder / "chat_template.jinja").write_text("{% if tools %}{% endif %}")
    assert tool_calls.parser_words(open_source(folder), ())[-1] == "glm45"
    none = replace(tool_calls.view_of(open_source(folder)).family, tool_parser="")
    view = type("View", (), {"family": none})
    monkeypatch.setattr(tool_calls, "view_of", lambda _: view)
    message = refusal(folder)
    assert "needs a parser of tool calls, and its family's table names none" in message
    assert "Add -- --tool-call-parser NAME" in message
    tool_calls.refuse_tools(open_source(folder), ("--tool-call-parser=hermes",))
