"""A server on loopback that calls tools as vLLM does, right or broken on purpose."""

import json
from collections.abc import Iterator
from typing import Any

from answering import Answering
from keepmtp.validate.measure.lm_eval_task import Questions


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
