"""Runs the real server check: source and checkpoint, each served at k = 0..n, asked the same prompts.

In: two local checkpoints and a `VLLM`. Out: a `ServeCheck`. One server at a time; each log is kept.

Easy to get wrong: vLLM's weight tracking (`enable_weights_track`) is off for quantized checkpoints, so dead drafts load
without a word. Here it is on. Some parameters that it names are filled later or never read. A server that it refuses is
started again without it: if only such parameters were named, that is harmless; any other name is a fault, and the
second start measures what it does to acceptance.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...checkpoints.scratch import ScratchFolder
from ...checkpoints.source import Source, small_bytes
from ...checkpoints.stored import stored_weights
from ..facts.served import AsServed, Role, Run, ServeCheck, Served, counters, partings
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from .bf16_copy import NO_KERNEL, why_no_kernel, write_copy
from .prompts import PROMPTS
from .server import Server, ServerFailed, Watch, serving

COPY: AsServed = "BF16 copy of the same weights"
UNTRIED = "only the rounding of its weights was tried: no kernel, no quantized activations, no quantization config"
_TEMPLATES = {"chat_template.jinja", "chat_template.json"}
_TEMPLATE_WORDS = ("--chat-template", "--tokenizer-mode")
_WARM_UP_TOKENS = 32
# Parameters that no tensor writes in a good checkpoint; the first two only in a draft.
_PLACEHOLDERS = (
    (re.compile(r"(^|\.)embed_tokens\.weight$"), True, "the draft's embedding, which vLLM replaces by the target's"),
    (
        re.compile(r"(^|\.)(lm_head|shared_head\.head)\.weight$"),
        True,
        "the draft's head, which vLLM replaces by the target's",
    ),
    (
        re.compile(r"\.w(13|2)_input_global_scale$"),
        False,
        "activation scales that weight-only NVFP4 experts never read",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What to ask, and how.

    Attributes:
        ks: speculative tokens a step, ascending, starting with 0.
        out: folder for logs, and for BF16 copies while they are needed.
        extra: further words for `vllm serve`.
    """

    ks: tuple[int, ...]
    out: Path
    prompts: tuple[str, ...] = PROMPTS
    max_tokens: int = 256
    timeout: float = TIMEOUT_SECONDS
    extra: tuple[str, ...] = ()

    @property
    def max_model_len(self) -> int:
        """Room for the longest prompt: a token has at least one byte."""
        return max(len(prompt.encode()) for prompt in self.prompts) + self.max_tokens + 16


def serve_check(
    checkpoint: Source, source: Source | None, *, vllm: VLLM, check: Check, watch: Watch | None = None
) -> ServeCheck:
    """Serve both and compare.

    Args:
        checkpoint: what is judged, local.
        source: what it was made from, local; None leaves acceptance unjudged.
        vllm: where vLLM lives.
        check: what to ask.
        watch: called with a line of progress.

    Raises:
        VLLMError: no room for a BF16 copy.
        CheckpointError: a copy is needed and a weight cannot be read.
    """
    start = time.monotonic()
    original = None if source is None else serve(source, "source", vllm=vllm, check=check, watch=watch)
    judged = serve(checkpoint, "checkpoint", vllm=vllm, check=check, watch=watch)
    return ServeCheck(
        checkpoint=judged,
        source=original,
        prompts=check.prompts,
        max_tokens=check.max_tokens,
        environment={
            "vllm": vllm.version,
            "torch": vllm.torch,
            "transformers": vllm.transformers,
            "compressed_tensors": vllm.compressed_tensors,
            "build": vllm.build,
            "device": vllm.device,
        },
        seconds=time.monotonic() - start,
    )


def serve(source: Source, role: Role, *, vllm: VLLM, check: Check, watch: Watch | None = None) -> Served:
    """One checkpoint at every k: as it is, or as a BF16 copy where this CPU has no kernel for it."""
    assert source.folder is not None, "download() first"
    reason = why_no_kernel(source, vllm)
    runs: tuple[Run, ...] = ()
    if not reason:
        runs = _runs(source.folder.absolute(), role, vllm, check, watch)
        reason = lack_of_kernel(vllm, next((run.error for run in runs if not run.loaded), ""))
    if reason:
        with bf16_copy(source, role, out=check.out, watch=watch) as copy:
            runs = _runs(copy, role, vllm, check, watch)
        reason = f"{reason}; {UNTRIED}"
    return Served(
        role=role,
        path=source.where,
        as_served=COPY if reason else "native",
        reason=reason,
        dtype=_forms(source),
        num_bytes=sum(entry.num_bytes for entry in source.entries.values()),
        runs=runs,
    )


def lack_of_kernel(vllm: VLLM, error: str) -> str:
    """Why a checkpoint that vLLM's CPU build refused is to be served as a copy; "" for any other error or build."""
    is_lack = vllm.build == "cpu" and any(words in error for words in NO_KERNEL)
    return f"vLLM's CPU build refused it on this machine: {error}" if is_lack else ""


@contextmanager
def bf16_copy(source: Source, role: Role, *, out: Path, watch: Watch | None = None) -> Iterator[Path]:
    """A BF16 copy of a local checkpoint's weights, in a folder of `out` that is gone afterwards.

    Raises:
        VLLMError: no room for it.
        CheckpointError: a weight cannot be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    with ScratchFolder(f"keepmtp-{role}-bf16-", out) as folder:
        if watch is not None:
            watch(f"{role}: writing a BF16 copy")
        yield write_copy(source, folder / "copy").absolute()


def ks_up_to(most: int, num_mtp_layers: int) -> tuple[int, ...]:
    """0 to `most`, without those that vLLM refuses: above the number of MTP layers, k must be a multiple of it."""
    return tuple(k for k in range(most + 1) if k <= num_mtp_layers or k % max(1, num_mtp_layers) == 0)


def explained(names: Iterable[str], *, is_draft: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names from weight tracking: why those are harmless that are, and the others.

    Args:
        names: runtime parameters that no tensor wrote.
        is_draft: they are a draft's, since the target alone has passed.

    Returns: explanations, each once, and the names without one.
    """
    whys, faults = [], []
    for name in names:
        why = next(
            (
                why
                for pattern, only_draft, why in _PLACEHOLDERS
                if pattern.search(name) and (is_draft or not only_draft)
            ),
            "",
        )
        if why:
            whys.append(why)
        else:
            faults.append(name)
    return tuple(dict.fromkeys(whys)), tuple(faults)


def _runs(folder: Path, role: Role, vllm: VLLM, check: Check, watch: Watch | None) -> tuple[Run, ...]:
    """Every k in turn; what needs the outputs of k=0 is filled in after it."""
    runs: list[Run] = []
    is_tracked = True
    for k in check.ks:
        run, is_tracked = _run(folder, role, k, vllm, check, watch, is_tracked)
        plain = runs[0] if runs and runs[0].k == 0 else None
        if run.loaded and plain is not None and plain.loaded:
            assert run.tokens_per_second and plain.tokens_per_second
            compared = {
                "partings": partings(plain.outputs, run.outputs),
                "speed_up": run.tokens_per_second / plain.tokens_per_second,
            }
            run = run.model_copy(update=compared)
        runs.append(run)
        if k == 0 and not run.loaded:
            break  # with method=mtp it would fail the same way, minutes later
    return tuple(runs)


def _run(
    folder: Path, role: Role, k: int, vllm: VLLM, check: Check, watch: Watch | None, is_tracked: bool
) -> tuple[Run, bool]:
    """One k, started a second time where only weight tracking refuses it. Returns the run, and whether to go on so."""
    log = (check.out / "logs" / f"{role}-k{k}.log").absolute()
    notes: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    if is_tracked:
        run, names = _attempt(folder, role, k, vllm, check, watch, log, is_tracked=True)
        if not names:
            return run, True
        whys, unwritten = explained(names, is_draft=k > 0)
        notes = tuple(f"Weight tracking named {why}: harmless; started again without it." for why in whys)
        if unwritten:
            notes += ("Started again without weight tracking, to measure what the unwritten weights do.",)
        log = log.with_name(f"{role}-k{k}-untracked.log")
    run, _ = _attempt(folder, role, k, vllm, check, watch, log, is_tracked=False)
    return run.model_copy(update={"unwritten": unwritten, "notes": notes}), False


def _attempt(
    folder: Path, role: Role, k: int, vllm: VLLM, check: Check, watch: Watch | None, log: Path, *, is_tracked: bool
) -> tuple[Run, tuple[str, ...]]:
    """One server. Returns the run, and the names that weight tracking refused it for."""
    label = f"{role}, k={k}"

    def tell(words: str) -> None:
        if watch is not None:
            watch(f"{label}: {words}")

    try:
        with serving(
            vllm,
            folder,
            k=k,
            log=log,
            is_tracked=is_tracked,
            max_model_len=check.max_model_len,
            timeout=check.timeout,
            extra=check.extra,
            watch=tell,
        ) as server:
            return _ask(server, k, check, tell), ()
    except ServerFailed as failure:
        return Run(k=k, loaded=False, error=failure.words, log=str(log)), failure.unwritten if is_tracked else ()


def _ask(server: Server, k: int, check: Check, tell: Watch) -> Run:
    """The first prompt once for warming up, then all of them in turn, timed; counters over the timed ones."""
    tell("warming up")
    warm_up = server.complete(check.prompts[0], max_tokens=min(_WARM_UP_TOKENS, check.max_tokens)).token_ids
    before = server.drafts()
    outputs = []
    start = time.monotonic()
    for number, prompt in enumerate(check.prompts, 1):
        tell(f"prompt {number} of {len(check.prompts)}")
        outputs.append(server.complete(prompt, max_tokens=check.max_tokens))
    seconds = time.monotonic() - start
    return Run(
        k=k,
        loaded=True,
        seconds_to_health=server.seconds_to_health,
        tokens_per_second=sum(len(output.token_ids) for output in outputs) / seconds,
        **counters(server.drafts().since(before)),
        outputs=tuple(outputs),
        is_repeatable=warm_up == outputs[0].token_ids[: len(warm_up)],
        log=str(server.log),
    )


def _forms(source: Source) -> str:
    """Stored forms, largest share of bytes first; plain weights as their dtype."""
    sizes: Counter[str] = Counter()
    for weight in stored_weights(source.entries.values())[0].values():
        name = weight.weight.dtype if weight.form == "plain" else weight.scheme or weight.form
        sizes[name] += sum(entry.num_bytes for entry in weight.parts.values())
    return ", ".join(name for name, _ in sizes.most_common()) or "no weights"


def has_template(source: Source, further: Sequence[str]) -> bool:
    """Whether the server has a chat template: the checkpoint's, or one that the further words for vLLM name.

    Raises:
        CheckpointError: see `source.small_bytes`.
    """
    own = b'"chat_template"' in (small_bytes(source, "tokenizer_config.json") or b"")
    named = any(word.partition("=")[0] in _TEMPLATE_WORDS for word in further)
    return own or named or bool(_TEMPLATES & set(source.companions))
