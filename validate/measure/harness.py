"""What every measurement with servers shares: which checkpoint is served and how, and requests
several at once.

In: a checkpoint on this machine, and what to do with its files. Out: answers as they come. What is
asked, and what the answers mean, is the business of serve_check.py, gsm8k.py, closeness.py and
bench.py.

Easy to get wrong: a request that fails is no answer. The first failure ends the asking; what is in
flight is waited for and handed on, so that something is asked again only if its answer never came.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

from ...checkpoints.identity import Identity
from ...checkpoints.scratch import ScratchFolder
from ...checkpoints.source import Source, small_bytes
from ...recipes.errors import RecipeError
from ...recipes.families import find_view
from ..facts.evaluated import Arm
from ..facts.served import AsServed, Role
from ..facts.step import Step
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from .bf16_copy import NO_KERNEL, why_no_kernel, write_copy
from .room import named_options
from .server import Server, ServerFailed, Watch, serving

COPY: AsServed = "BF16 copy of the same weights"
UNTRIED = (
    "only the rounding of its weights was tried: no kernel, no quantized activations, no "
    "quantization config"
)
NOTE_SECONDS = 2.0
"""How often it is noted how a server is doing while it is asked: what one that dies has counted
since is lost.
"""
CHAT_TOKENS, TURN_TOKENS = 2048, 64
"""What a chat template adds to a conversation (system prompts of releases), and to a message, at
most.
"""
_TEMPLATES = {"chat_template.jinja", "chat_template.json"}
_TEMPLATE_WORDS = ("--chat-template", "--tokenizer-mode")

TextOrTurns = str | Sequence[Mapping[str, str]]
"""A text, or messages for the model's chat template."""
Item = TypeVar("Item")
Got = TypeVar("Got")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One checkpoint: its role, its files on this machine, and their identity."""

    role: Arm
    source: Source
    identity: Identity

    @property
    def whose(self) -> Role:
        """The checkpoint without drafting is the checkpoint."""
        return "source" if self.role == "source" else "checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How to serve, and where to write.

    Attributes:
        vllm: where vLLM lives.
        out: evidence folder.
        timeout: seconds to a healthy server.
        extra: further words for `vllm serve`.
        say: called with a sentence on what is there already.
    """

    vllm: VLLM
    out: Path
    timeout: float = TIMEOUT_SECONDS
    extra: tuple[str, ...] = ()
    say: Callable[[str], None] = lambda _: None

    @property
    def environment(self) -> dict[str, str]:
        """What a result says of it, by name."""
        return {**self.vllm.versions, "words": " ".join(self.extra)}

    @property
    def answered_by(self) -> dict[str, Any]:
        """What every file of answers says of it: fields of its header."""
        return {"vllm": self.vllm.version, "device": self.vllm.device, "words": self.extra}

    def log(self, name: str) -> Path:
        """Of a server."""
        return (self.out / "logs" / f"{name}.log").absolute()


class Host:
    """Serves one checkpoint: its own files, or a BF16 copy where this CPU has no kernel for them. A
    context manager.

    Attributes:
        as_served, reason: what is served now, and why a copy; the copy is gone once the context is
            left.
    """

    def __init__(
        self, source: Source, role: Role, setup: Setup, tell: Watch = lambda _: None
    ) -> None:
        assert source.folder is not None, "download() first"
        self.as_served: AsServed = "native"
        self.reason = ""
        self._source, self._role, self._setup, self._tell = source, role, setup, tell
        self._folder, self._kept = source.folder.absolute(), ExitStack()

    def __enter__(self) -> "Host":
        """Write the copy, if one is needed.

        Raises:
            VLLMError: no room for it.
            CheckpointError: a weight cannot be read.
        """
        try:
            if reason := why_no_kernel(self._source, self._setup.vllm):
                self._copy(reason)
        except BaseException:
            self._kept.close()  # no context is left that would remove a part of a copy
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    @contextmanager
    def serving(
        self,
        name: str,
        *,
        k: int,
        max_model_len: int,
        max_num_seqs: int = 4,
        words: tuple[str, ...] = (),
        is_tracked: bool = False,
    ) -> Iterator[Server]:
        """A server of what is served now; of the copy, from here on, where vLLM's CPU build turns
        out to need one.

        Args:
            name: of its log.
            words: for `vllm serve`, before the user's own.
            k, max_model_len, max_num_seqs, is_tracked: as in `server.serving`.

        Raises:
            ServerFailed: as there.
        """

        def started() -> Server:
            return stack.enter_context(
                serving(
                    self._setup.vllm,
                    self._folder,
                    k=k,
                    log=self._setup.log(name),
                    is_tracked=is_tracked,
                    max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs,
                    timeout=self._setup.timeout,
                    extra=(*words, *self._setup.extra),
                    watch=lambda doing: self._tell(f"k={k}: {doing}"),
                )
            )

        with ExitStack() as stack:
            try:
                server = started()
            except ServerFailed as failure:
                is_lack = self._setup.vllm.build == "cpu" and any(
                    lack in failure.words for lack in NO_KERNEL
                )
                if not is_lack or self.as_served == COPY:
                    raise
                self._copy(f"vLLM's CPU build refused it on this machine: {failure.words}")
                server = started()
            yield server

    def _copy(self, reason: str) -> None:
        self._setup.out.mkdir(parents=True, exist_ok=True)
        folder = self._kept.enter_context(
            ScratchFolder(f"keepmtp-{self._role}-bf16-", self._setup.out)
        )
        self._tell("writing a BF16 copy")
        self._folder = write_copy(self._source, folder / "copy").absolute()
        self.as_served, self.reason = COPY, f"{reason}; {UNTRIED}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking(Generic[Item, Got]):
    """What one server is asked, and what becomes of its answers.

    Attributes:
        items: in the order in which they are asked.
        ask: an item, of the server; called by several threads.
        keep: writes an answer down, and returns its number of tokens.
        note: writes down for how many seconds the server was asked so far: before the first answer,
            and now and then.
        name: an item in words.
        step: of the progress; what was answered before is done already.
        concurrency: how many are in flight.
    """

    items: Sequence[Item]
    ask: Callable[[Item], Got]
    keep: Callable[[Item, Got], int]
    note: Callable[[float], None]
    name: Callable[[Item], str]
    step: Step
    concurrency: int

    def run(self, watch: Callable[[Step], None]) -> None:
        """Ask all, and hand each answer on as it comes.

        Raises:
            ServerFailed: a request failed, in the server's words, after those in flight have come.
        """
        start = noted = time.monotonic()
        num_tokens = 0
        self.note(0.0)
        try:
            for number, (item, got) in enumerate(self._answers(), 1):
                num_tokens += self.keep(item, got)
                now = time.monotonic()
                if now - noted > NOTE_SECONDS:
                    self.note(now - start)
                    noted = time.monotonic()
                seconds = time.monotonic() - start
                rates = {
                    "tokens_per_second": num_tokens / seconds,
                    "eta_seconds": (len(self.items) - number) * seconds / number,
                }
                watch(replace(self.step, done=self.step.done + number, **rates))
        except ServerFailed:
            self.note(time.monotonic() - start)
            raise
        self.note(time.monotonic() - start)

    def _answers(self) -> Iterator[tuple[Item, Got]]:
        pool, waiting = ThreadPoolExecutor(self.concurrency), iter(self.items)
        flying = {pool.submit(self.ask, item): item for item in islice(waiting, self.concurrency)}
        failed: tuple[Item, ServerFailed] | None = None
        left = len(self.items)
        try:
            while flying:
                future = wait(flying, return_when=FIRST_COMPLETED).done.pop()
                item = flying.pop(future)
                try:
                    got = future.result()
                except ServerFailed as failure:
                    failed = failed or (item, failure)
                    continue
                if failed is None:
                    flying |= {
                        pool.submit(self.ask, following): following
                        for following in islice(waiting, 1)
                    }
                left -= 1
                yield item, got
        finally:  # on Ctrl-C nobody waits for answers: the server is about to be ended
            pool.shutdown(wait=False, cancel_futures=True)
        if failed is not None:
            item, failure = failed
            cure = f"nothing is lost: the same command asks only the {left} that are missing"
            raise ServerFailed(
                failure.words, failure.log, asked=self.name(item), cure=cure
            ) from failure


def refuse_drafts(source: Source, k: int, *, where: str, without: str, use: str) -> None:
    """Refuse a number of drafted tokens that the MTP block cannot draft.

    Args:
        source: the checkpoint.
        k: drafted tokens a step.
        where: what the user named k with.
        without: what to do where there is no MTP block.
        use: the words that name a k; the number of MTP layers follows.

    Raises:
        RecipeError: no MTP block, or a k that is no multiple of its layers.
    """
    num_layers = find_view(source.config, source.where, source.entries).num_mtp_layers
    if k and not num_layers:
        raise RecipeError(
            source.where, "must have an MTP block to draft with", got="none", cure=without
        )
    if k not in ks_up_to(k, num_layers):
        rule = f"with {num_layers} MTP layers vLLM drafts a multiple of them"
        raise RecipeError(where, rule, got=k, cure=f"{use}{num_layers}")


def ks_up_to(most: int, num_mtp_layers: int) -> tuple[int, ...]:
    """0 to `most`, without those that vLLM refuses: above the number of MTP layers, k must be a
    multiple of it.
    """
    return tuple(
        k for k in range(most + 1) if k <= num_mtp_layers or k % max(1, num_mtp_layers) == 0
    )


def has_template(source: Source, further: Sequence[str]) -> bool:
    """Whether the server has a chat template: the checkpoint's, or one that the further words for
    vLLM name.

    Raises:
        CheckpointError: see `source.small_bytes`.
    """
    own = b'"chat_template"' in (small_bytes(source, "tokenizer_config.json") or b"")
    named = not {*named_options(further)}.isdisjoint(_TEMPLATE_WORDS)
    return own or named or bool(_TEMPLATES & set(source.companions))


def most_tokens(source: Source) -> int | None:
    """max_position_embeddings, where config.json says it."""
    config = source.config.get("text_config") or source.config
    most = config.get("max_position_embeddings")
    return most if isinstance(most, int) else None


def room_for(prompts: Iterable[TextOrTurns], source: Source, *, max_tokens: int) -> int:
    """Tokens of the longest prompt and its answer, at most, as far as the model goes: a token has
    at least one byte.
    """
    longest = max(map(_most_tokens_of, prompts)) + max_tokens + 16
    return min(longest, most_tokens(source) or longest)


def _most_tokens_of(prompt: TextOrTurns) -> int:
    if isinstance(prompt, str):
        return len(prompt.encode())
    return CHAT_TOKENS + sum(len(turn["content"].encode()) + TURN_TOKENS for turn in prompt)
