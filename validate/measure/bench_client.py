"""`vllm bench serve` against one server: a process in vLLM's Python that measures one load after
the other.

In: a healthy `Server`, and for each measurement the requests and how many are in flight. Out: a
`Repetition`.

Easy to get wrong: vLLM's benchmark counts a failed request and goes on, and its figures are then
those of a smaller load. Here a request that fails leaves no figure, only the sentence that says
why. And vLLM's draft counters come a moment after the last token, so they are read from the server
once they no longer change.
"""

import json
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..facts.benched import Latency, Repetition, RequestForm
from ..facts.child import Child
from ..facts.served import counters
from ..facts.vllm_env import VLLM
from .bench_prompts import Request
from .server import PLUGIN, Server, ServerFailed, Watch, last_error

TIME = "%Y-%m-%d %H:%M:%S UTC"
_ENDPOINTS = {
    "chat": ("openai-chat", "/v1/chat/completions"),
    "completions": ("openai", "/v1/completions"),
}
_REFUSED = ("Bad Request", "Unprocessable Entity")
_ANSWER_SECONDS = 600.0
_MAX_WORDS = 300


class RequestsFailed(Exception):
    """Not every request of a measurement was answered: it has no figures, and `words` say why."""

    def __init__(self, failed: int, asked: int, words: str):
        self.words = f"{failed} of {asked} requests failed: {words[:_MAX_WORDS]}"
        super().__init__(self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A running benchmark process.

    Attributes:
        server: what it asks.
        form: how requests are sent.
        process: it reads a line for each measurement, and answers with one.
        log: everything that vLLM's benchmark prints.
        silent_seconds: how long the server may read and write no token before it counts as dead.
    """

    server: Server
    form: RequestForm
    process: subprocess.Popen[Any]
    log: Path
    silent_seconds: float = 1800.0

    def measure(
        self,
        requests: Sequence[Request],
        *,
        number: int,
        concurrency: int,
        output_tokens: int,
        watch: Watch = lambda _: None,
    ) -> Repetition:
        """Send all requests, so many at once, greedily, each answer up to its own end or the limit.

        Raises:
            RequestsFailed: a request was not answered.
            ServerFailed: the server died or fell silent, or the benchmark itself died.
        """
        before, began = self.server.drafts(), datetime.now(UTC)
        address, (backend, endpoint) = str(self.server.client.base_url), _ENDPOINTS[self.form]
        asked = {
            "requests": list(requests),
            "output_tokens": output_tokens,
            "asked": {
                "endpoint_type": backend,
                "api_url": f"{address}{endpoint}",
                "base_url": address,
                "model_id": self.server.name,
                "model_name": self.server.name,
                "max_concurrency": concurrency,
                "extra_body": {"temperature": 0},  # greedy; answers end by themselves
            },
        }
        found = self._run(asked, watch)
        drafted = self.server.drafts().since(before)  # a server that died says so here
        if failed := len(requests) - found["completed"]:
            words = next(filter(None, found["errors"]), "no reason given").strip().splitlines()[-1]
            if words in _REFUSED:
                words = self.why_refused(requests, output_tokens) or words
            raise RequestsFailed(failed, len(requests), words)
        return Repetition(
            number=number,
            at=began.strftime(TIME),
            seconds=found["duration"],
            requests=found["completed"],
            input_tokens=found["total_input_tokens"],
            output_tokens=found["total_output_tokens"],
            first_token=_latency(found, "ttft"),
            per_token=_latency(found, "tpot"),
            between=_latency(found, "itl"),
            **counters(drafted),
        )

    def why_refused(self, requests: Sequence[Request], output_tokens: int) -> str:
        """The server's own words about the longest request; vLLM's benchmark keeps only those of
        the HTTP status.
        """
        longest = max(requests, key=lambda each: len(json.dumps(each)))
        prompt = longest["text"] if "text" in longest else longest["messages"]
        try:
            self.server.answer(
                prompt, max_tokens=output_tokens, stop=(), seed=0, timeout=_ANSWER_SECONDS
            )
        except ServerFailed as failure:
            return failure.words
        return ""

    def _run(self, asked: dict[str, Any], watch: Watch) -> dict[str, Any]:
        pipe = self.process.stdout
        assert self.process.stdin and pipe
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, and the next line is empty
        tokens, since = -1, time.monotonic()
        while not select.select([pipe], [], [], 1.0)[0]:
            if self.server.process.poll() is not None:
                raise ServerFailed(
                    last_error(self.server.log, self.server.process.returncode), self.server.log
                )
            silent = time.monotonic() - since
            if (
                silent > self.silent_seconds / 2
            ):  # seldom: reading the counters takes the server a moment
                now = self.server.tokens_so_far()
                if now == tokens and silent > self.silent_seconds:
                    raise ServerFailed(f"no token for {silent:.0f} s", self.server.log)
                tokens, since = now, since if now == tokens else time.monotonic()
            watch("measuring")
        line = pipe.readline()
        if not line:
            raise ServerFailed(
                last_error(self.log, self.process.wait()), self.log, asked="vllm bench serve"
            )
        return json.loads(line)


@contextmanager
def benchmarking(vllm: VLLM, server: Server, form: RequestForm, log: Path) -> Iterator[Client]:
    """The benchmark process of a server, for as long as the context lasts.

    Args:
        vllm: where vLLM lives.
        server: healthy.
        form: how requests are sent.
        log: file for everything that is printed, overwritten.
    """
    variables = {**server.environment, "NO_PROXY": "*", "no_proxy": "*"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with open(log, "wb") as file:
        words = [vllm.python, PLUGIN / "keepmtp_bench.py"]
        with Child(words, environment=variables, stderr=file, **pipes) as child:
            yield Client(server=server, form=form, process=child.process, log=log)


def _latency(found: dict[str, Any], name: str) -> Latency:
    return Latency(median_ms=found[f"median_{name}_ms"], p99_ms=found[f"p99_{name}_ms"])
