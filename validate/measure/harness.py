"""What every measurement with servers shares: which checkpoint is served and how, and requests several at once.

In: a checkpoint on this machine, and what to do with its files. Out: answers as they come. What is asked, and what the
answers mean, is the business of serve_check.py, gsm8k.py, closeness.py and bench.py.

Easy to get wrong: a request that fails is no answer. The first failure ends the asking; what is in flight is waited for
and handed on, so that something is asked again only if its answer never came.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

from ...checkpoints.identity import Identity
from ...checkpoints.scratch import ScratchFolder
from ...checkpoints.source import Source, small_bytes
from ...recipes.errors import RecipeError
from ...recipes.families import find_view
from ..facts.evaluated import Arm
from ..facts.served import AsServed, Role
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from .bf16_copy import NO_KERNEL, why_no_kernel, write_copy
from .room import named_options
from .server import ServerFailed, Watch

COPY: AsServed = "BF16 copy of the same weights"
UNTRIED = "only the rounding of its weights was tried: no kernel, no quantized activations, no quantization config"
_TEMPLATES = {"chat_template.jinja", "chat_template.json"}
_TEMPLATE_WORDS = ("--chat-template", "--tokenizer-mode")

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

    def log(self, name: str) -> Path:
        """Of a server."""
        return (self.out / "logs" / f"{name}.log").absolute()


def served(source: Source, role: Role, setup: Setup, use: Callable[[Path, AsServed, str], Got], watch: Watch) -> Got:
    """What `use` makes of a checkpoint's own files, or of a BF16 copy where this CPU has no kernel for them.

    Args:
        source: local.
        role: names the copy's folder.
        setup: says where the copy goes; it is gone afterwards.
        use: starts servers; it gets a folder, and as what it serves the checkpoint, and why. It raises a server's
            failure where vLLM's CPU build may have no kernel, and is then called once more, with the copy.
        watch: called with a line of progress.

    Raises:
        ServerFailed: as `use` does.
        VLLMError: no room for a copy.
        CheckpointError: a weight cannot be read.
    """
    assert source.folder is not None, "download() first"
    reason = why_no_kernel(source, setup.vllm)
    if not reason:
        try:
            return use(source.folder.absolute(), "native", "")
        except ServerFailed as failure:
            reason = lack_of_kernel(setup.vllm, failure.words)
            if not reason:
                raise
    setup.out.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(f"keepmtp-{role}-bf16-", setup.out) as folder:
        watch(f"{role}: writing a BF16 copy")
        return use(write_copy(source, folder / "copy").absolute(), COPY, f"{reason}; {UNTRIED}")


def lack_of_kernel(vllm: VLLM, error: str) -> str:
    """Why a checkpoint that vLLM's CPU build refused is to be served as a copy; "" for any other error or build."""
    is_lack = vllm.build == "cpu" and any(words in error for words in NO_KERNEL)
    return f"vLLM's CPU build refused it on this machine: {error}" if is_lack else ""


def asked(
    items: Sequence[Item],
    ask: Callable[[Item], Got],
    *,
    concurrency: int,
    name: Callable[[Item], str],
    lack: str,
) -> Iterator[tuple[Item, Got]]:
    """Each item with its answer, as answers come.

    Args:
        items: in the order in which they are asked.
        ask: of a server; called by several threads.
        concurrency: how many are in flight.
        name: an item in words.
        lack: what those are that nobody has answered, in words.

    Raises:
        ServerFailed: a request failed, in the server's words, after those in flight have come.
    """
    pool, waiting = ThreadPoolExecutor(concurrency), iter(items)
    flying = {pool.submit(ask, item): item for item in islice(waiting, concurrency)}
    failed: tuple[Item, ServerFailed] | None = None
    left = len(items)
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
                flying |= {pool.submit(ask, following): following for following in islice(waiting, 1)}
            left -= 1
            yield item, got
    finally:  # on Ctrl-C nobody waits for answers: the server is about to be ended
        pool.shutdown(wait=False, cancel_futures=True)
    if failed is not None:
        item, failure = failed
        cure = f"nothing is lost: the same command asks only the {left} that {lack}"
        raise ServerFailed(failure.words, failure.log, asked=name(item), cure=cure) from failure


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
        raise RecipeError(source.where, "must have an MTP block to draft with", got="none", cure=without)
    if k not in ks_up_to(k, num_layers):
        rule = f"with {num_layers} MTP layers vLLM drafts a multiple of them"
        raise RecipeError(where, rule, got=k, cure=f"{use}{num_layers}")


def ks_up_to(most: int, num_mtp_layers: int) -> tuple[int, ...]:
    """0 to `most`, without those that vLLM refuses: above the number of MTP layers, k must be a multiple of it."""
    return tuple(k for k in range(most + 1) if k <= num_mtp_layers or k % max(1, num_mtp_layers) == 0)


def has_template(source: Source, further: Sequence[str]) -> bool:
    """Whether the server has a chat template: the checkpoint's, or one that the further words for vLLM name.

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
