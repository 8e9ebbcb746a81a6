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
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from ...checkpoints.identity import Identity
from ...checkpoints.scratch import ScratchFolder
from ...checkpoints.source import Source, small_bytes
from ...recipes.errors import RecipeError
from ...recipes.families import find_view
from ..facts.evaluated import Arm
from ..facts.served import AsServed, Role
from ..facts.step import Step
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from .bf16_copy import why_no_kernel, write_copy
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
_TEMPLATE_WORDS = {"--chat-template", "--tokenizer-mode"}

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Serves one checkpoint: its own files, or a BF16 copy where this CPU has no kernel for them.

    Attributes:
        folder: what is served.
        as_served, reason: whether it is a copy, and why.
        tell: called with a line of progress.
    """

    setup: Setup
    folder: Path
    as_served: AsServed
    reason: str
    tell: Watch

    @property
    def served(self) -> dict[str, Any]:
        """As fields of a fact."""
        return {"as_served": self.as_served, "reason": self.reason}

    def serving(
        self,
        name: str,
        *,
        k: int,
        max_model_len: int,
        max_num_seqs: int = 4,
        words: tuple[str, ...] = (),
    ) -> AbstractContextManager[Server]:
        """A server.

        Args:
            name: of its log.
            k: speculative tokens a step; 0 serves without method=mtp.
            max_model_len: tokens of prompt and answer together.
            max_num_seqs: requests that are computed at once.
            words: for `vllm serve`, before the user's own.

        Raises:
            ServerFailed: see `server.serving`.
        """
        limits = ("--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs))
        return serving(
            self.setup.vllm,
            self.folder,
            k=k,
            log=self.setup.log(name),
            timeout=self.setup.timeout,
            extra=(*limits, *words, *self.setup.extra),
            watch=lambda doing: self.tell(f"k={k}: {doing}"),
        )


@contextmanager
def hosting(source: Source, role: Role, setup: Setup, tell: Watch) -> Iterator[Host]:
    """The servers of one checkpoint. A copy is gone with the context.

    Raises:
        VLLMError: no room for a copy.
        CheckpointError: a weight cannot be read.
    """
    assert source.folder is not None, "download() first"
    reason = why_no_kernel(source, setup.vllm)
    if not reason:
        folder = source.folder.absolute()
        yield Host(setup=setup, folder=folder, as_served="native", reason="", tell=tell)
        return
    setup.out.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(f"keepmtp-{role}-bf16-", setup.out) as scratch:
        tell("writing a BF16 copy")
        folder, why = write_copy(source, scratch / "copy").absolute(), f"{reason}; {UNTRIED}"
        yield Host(setup=setup, folder=folder, as_served=COPY, reason=why, tell=tell)


def ask_all(
    items: Sequence[Item],
    ask: Callable[[Item], Got],
    *,
    keep: Callable[[Item, Got], int],
    note: Callable[[float], None],
    name: Callable[[Item], str],
    step: Step,
    concurrency: int,
    watch: Callable[[Step], None],
) -> None:
    """Ask a server everything, and hand each answer on as it comes.

    Args:
        items: in the order in which they are asked.
        ask: an item, of the server; called by several threads.
        keep: writes an answer down, and returns its number of tokens.
        note: writes down for how many seconds the server was asked so far: before the first answer,
            and now and then.
        name: an item in words.
        step: of the progress; what was answered before is done already.
        concurrency: how many are in flight.
        watch: called after each answer.

    Raises:
        ServerFailed: a request failed, in the server's words, after those in flight have come.
    """
    start = noted = time.monotonic()
    pool, waiting = ThreadPoolExecutor(concurrency), iter(items)
    flying: dict[Future[Got], Item] = {}
    failed: tuple[Item, ServerFailed] | None = None
    done = num_tokens = 0
    note(0.0)
    try:
        while True:
            if failed is None:
                for item in islice(waiting, concurrency - len(flying)):
                    flying[pool.submit(ask, item)] = item
            if not flying:
                break
            future = wait(flying, return_when=FIRST_COMPLETED).done.pop()
            item = flying.pop(future)
            try:
                got = future.result()
            except ServerFailed as failure:
                failed = failed or (item, failure)
                continue
            num_tokens += keep(item, got)
            done += 1
            seconds = time.monotonic() - start
            if start + seconds - noted > NOTE_SECONDS:
                note(seconds)
                noted = time.monotonic()
            rate, eta = num_tokens / seconds, (len(items) - done) * seconds / done
            told = replace(step, done=step.done + done, tokens_per_second=rate, eta_seconds=eta)
            watch(told)
    finally:  # on Ctrl-C nobody waits for answers: the server is about to be ended
        pool.shutdown(wait=False, cancel_futures=True)
    note(time.monotonic() - start)
    if failed is not None:
        item, failure = failed
        left = len(items) - done
        cure = f"nothing is lost: the same command asks only the {left} that are missing"
        raise ServerFailed(failure.words, failure.log, asked=name(item), cure=cure) from failure


def refuse_drafts(source: Source, k: int, *, option: str) -> None:
    """Refuse a number of drafted tokens that the MTP block cannot draft.

    Args:
        source: the checkpoint.
        k: drafted tokens a step.
        option: what the user names k with.

    Raises:
        RecipeError: no MTP block, or a k that is no multiple of its layers.
    """
    num_layers = find_view(source.config, source.where, source.entries).num_mtp_layers
    if k and not num_layers:
        rule, cure = "must have an MTP block to draft with", "Draft nothing, or name another"
        raise RecipeError(source.where, rule, got="none", cure=cure)
    if k not in ks_up_to(k, num_layers):
        rule = f"with {num_layers} MTP layers vLLM drafts a multiple of them"
        raise RecipeError(option, rule, got=k, cure=f"Use {option} {num_layers}")


def ks_up_to(most: int, num_mtp_layers: int) -> tuple[int, ...]:
    """0 to `most`, without those that vLLM refuses: above the number of MTP layers, k must be a
    multiple of it.
    """
    layers = max(1, num_mtp_layers)
    return tuple(k for k in range(most + 1) if k <= num_mtp_layers or k % layers == 0)


def has_template(source: Source, further: Sequence[str]) -> bool:
    """Whether the server has a chat template: the checkpoint's, or one that the further words for
    vLLM name.

    Raises:
        CheckpointError: see `source.small_bytes`.
    """
    own = b'"chat_template"' in (small_bytes(source, "tokenizer_config.json") or b"")
    named = _TEMPLATE_WORDS & {*named_options(further)}
    return own or bool(named or _TEMPLATES & set(source.companions))


def most_tokens(source: Source) -> int | None:
    """max_position_embeddings, where config.json says it."""
    config = source.config.get("text_config") or source.config
    most = config.get("max_position_embeddings")
    return most if isinstance(most, int) else None


def room_for(prompts: Iterable[TextOrTurns], source: Source, *, max_tokens: int) -> int:
    """Tokens of the longest prompt and its answer, at most, as far as the model goes: a token has
    at least one byte.
    """
    longest = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            size = len(prompt.encode())
        else:
            turns = [turn["content"].encode() for turn in prompt]
            size = CHAT_TOKENS + TURN_TOKENS * len(turns) + sum(map(len, turns))
        longest = max(longest, size)
    longest += max_tokens + 16
    return min(longest, most_tokens(source) or longest)
