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
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..facts.benched import Latency, Repetition, RequestForm
from ..facts.child import Child
from ..facts.results import TIME
from ..facts.served import counters
from ..facts.vllm_env import VLLM
from .server import PLUGIN, Server, ServerFailed, last_error

_BACKENDS = {"chat": "openai-chat", "completions": "openai"}
_ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
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
    """

    server: Server
    form: RequestForm
    process: subprocess.Popen[Any]
    log: Path

    def measure(
        self, texts: Sequence[str], *, number: int, concurrency: int, output_tokens: int
    ) -> Repetition:
        """Send all texts, so many at once, greedily, each answer up to its own end or the limit.

        Raises:
            RequestsFailed: a request was not answered.
            ServerFailed: the server or the benchmark died.
        """
        before, began = self.server.drafts(), datetime.now(UTC)
        address, endpoint = str(self.server.client.base_url), _ENDPOINTS[self.form]
        asked = {
            "texts": list(texts),
            "is_chat": self.form == "chat",
            "output_tokens": output_tokens,
            "asked": {
                "endpoint_type": _BACKENDS[self.form],
                "api_url": f"{address}{endpoint}",
                "base_url": address,
                "model_id": self.server.name,
                "model_name": self.server.name,
                "max_concurrency": concurrency,
                "extra_body": {"temperature": 0},  # greedy; answers end by themselves
            },
        }
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):  # it has ended, and the next line is empty
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        drafted = self.server.drafts().since(before)  # a server that died says so here
        if not line:
            words = last_error(self.log, self.process.wait())
            raise ServerFailed(words, self.log, asked="vllm bench serve")
        found = json.loads(line)
        if failed := len(texts) - found["completed"]:
            words = next(filter(None, found["errors"]), "no reason given").strip().splitlines()[-1]
            raise RequestsFailed(failed, len(texts), words)
        times = {}
        for name, short in (("first_token", "ttft"), ("per_token", "tpot"), ("between", "itl")):
            median, p99 = found[f"median_{short}_ms"], found[f"p99_{short}_ms"]
            times[name] = Latency(median_ms=median, p99_ms=p99)
        return Repetition(
            number=number,
            at=began.strftime(TIME),
            seconds=found["duration"],
            requests=found["completed"],
            input_tokens=found["total_input_tokens"],
            output_tokens=found["total_output_tokens"],
            **times,
            **counters(drafted),
        )


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
    words = [vllm.python, PLUGIN / "keepmtp_bench.py"]
    with (
        open(log, "wb") as file,
        Child(words, environment=variables, stderr=file, **pipes) as child,
    ):
        yield Client(server=server, form=form, process=child.process, log=log)
