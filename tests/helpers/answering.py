"""A server on loopback that answers as vLLM does, and fails where it is told to: a real one does
too seldom.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from keepmtp.validate.measure.server import Server

TOO_LONG = (
    "This model's maximum context length is 64 tokens. However, your prompt contains 71 input "
    "tokens."
)
OOM = "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
FAULTS = ("500", "400", "cut", "empty", "no choices", "abort", "hang")


class Answering(BaseHTTPRequestHandler):
    """One request: `answers` by question, `fault` by the number of the request, counted from 1."""

    protocol_version = "HTTP/1.1"

    def __init__(
        self, *args, answers: Mapping[str, str], fault: Callable[[int], str], asked: list, **kwargs
    ):
        self.answers, self.fault, self.asked = answers, fault, asked
        super().__init__(*args, **kwargs)

    def log_message(self, *_):
        pass

    def do_GET(self):
        drafts = 3 * len(self.asked)
        rows = {
            "drafts_total": drafts,
            "draft_tokens_total": 2 * drafts,
            "accepted_tokens_total": drafts,
        }
        lines = [
            f'vllm:spec_decode_num_{name}{{engine="0"}} {count}.0' for name, count in rows.items()
        ]
        lines += [
            (
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{at}"}} '
                f"{count}.0"
            )
            for at, count in enumerate((drafts, 0))
        ]
        self.reply(200, "\n".join(lines).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_chat = "messages" in body
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        question = prompt.rpartition("Question: ")[2].removesuffix("\nAnswer:")
        request = {"question": question, "path": self.path, **body}
        self.asked.append(request)
        fault = self.fault(
            next(number for number, each in enumerate(self.asked, 1) if each is request)
        )
        if fault == "hang":
            time.sleep(30)
        if fault in ("cut", "hang"):
            if fault == "cut":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')
                self.wfile.flush()
            self.close_connection = True
            return self.connection.close()
        if fault in ("500", "400"):
            words = OOM if fault == "500" else TOO_LONG
            return self.reply(int(fault), json.dumps({"error": {"message": words}}).encode())
        if fault == "empty":
            return self.reply(200, b"")
        text = self.answers[question]
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        reason = "abort" if fault == "abort" else "length" if text.endswith("...") else "stop"
        choices = [] if fault == "no choices" else [{"index": 0, "finish_reason": reason, **said}]
        self.reply(
            200,
            json.dumps(
                {"choices": choices, "usage": {"completion_tokens": len(text.split())}}
            ).encode(),
        )

    def reply(self, status: int, body: bytes):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Several(ThreadingHTTPServer):
    """Takes as many connections at once as a station opens."""

    request_queue_size = 64


@contextmanager
def answering(
    answers: Mapping[str, Any],
    log: Path,
    fault: Callable[[Any], str] = lambda _: "",
    handler: type[Answering] = Answering,
) -> Iterator[tuple[Server, list[dict]]]:
    """A `Server`, and the list that its requests are noted in."""
    asked: list[dict] = []
    http = Several(("127.0.0.1", 0), partial(handler, answers=answers, fault=fault, asked=asked))
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    log.write_text(f"INFO started\n{OOM}\n")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    address = f"http://127.0.0.1:{http.server_port}"
    try:
        with httpx.Client(base_url=address, timeout=httpx.Timeout(30.0), trust_env=False) as client:
            yield (
                Server(
                    client=client,
                    process=process,
                    log=log,
                    name="glm",
                    environment={},
                ),
                asked,
            )
    finally:
        process.kill()
        process.wait()
        http.shutdown()
