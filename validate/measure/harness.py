"""The one way in which keepmtp measures with servers: each server is started once, asked what has
no answer yet by all stations, and stopped.

In: checkpoints on this machine, and stations, which name `Work`: which server it needs, what is
asked of it, and the file for the answers. Out: the files, whole. What the answers mean is the
business of serve_check.py, tasks.py, closeness.py and bench.py.

Easy to get wrong: a request that fails is no answer. And a model whose answers are complete is not
served again.
"""

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

from ...checkpoints.fact import Fact
from ...checkpoints.files import ScratchFolder, held, refuse_strange
from ...checkpoints.identity import Identity
from ...checkpoints.mtp_source import has_mtp
from ...checkpoints.source import Source, small_bytes, view_of
from ...quantize.run.progress import Step
from ...recipes.errors import RecipeError
from ...recipes.frozen import Json, frozen
from ..facts.rows import ARM_TITLES, Arm
from ..facts.served import AsServed, Drafts, TargetFact, counters
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from . import cures as curing
from .bf16_copy import why_no_kernel, write_copy
from .room import options_of
from .serve_line import method_words, separate_draft, setting
from .server import Server, ServerFailed, serving
from .store import Header, LineFile, OneLine, Sitting, open_lines

COPY: AsServed = "BF16 copy of the same weights"
# How often it is noted how a server is doing while it is asked: what one that dies has counted
# since is lost.
NOTE_SECONDS = 2.0
# What a chat template adds to a conversation, at most: system prompts of releases.
CHAT_TOKENS = 2112
TEMPLATES = {"chat_template.jinja", "chat_template.json"}
_TEMPLATE_WORDS = {"--chat-template", "--tokenizer-mode"}

Watch = Callable[[Step], None]
# From a place to its line; None where a server has refused it. Called by several threads.
Ask = Callable[[Any], Any]


def unwatched(step: Step) -> None:
    """A `Watch` where nobody looks."""


@frozen
class Model:
    """One checkpoint: its role, its files on this machine, and their identity; of a draft of its
    own, also its target.
    """

    role: Arm
    source: Source
    identity: Identity
    target: "Model | None" = None

    @property
    def served(self) -> tuple["Model", ...]:
        """What a server loads: a draft of its own comes after its target."""
        if self.target is None:
            return (self,)
        return self.target, self

    @property
    def as_target(self) -> TargetFact:
        """What a draft's results say of it."""
        source = self.source
        sha256 = self.identity.sha256
        return TargetFact(path=source.where, revision=source.revision, sha256=sha256)

    @property
    def title(self) -> str:
        """The role for people."""
        return ARM_TITLES[self.role]


@frozen
class Setup:
    """How to serve, and where to write.

    Attributes:
        vllm: where vLLM lives.
        out: evidence folder.
        timeout: seconds to a healthy server.
        extra: further words for `vllm serve`.
        watch: called with each step of progress.
    """

    vllm: VLLM
    out: Path
    timeout: float = TIMEOUT_SECONDS
    extra: tuple[str, ...] = ()
    watch: Watch = unwatched

    @property
    def environment(self) -> dict[str, str]:
        """What a result says of it, by name."""
        return {**self.vllm.versions, "words": shlex.join(self.extra)}

    def answers(
        self,
        name: str,
        kind: type[OneLine],
        model: Model,
        *,
        words: Sequence[str] = (),
        num: int = 0,
        **asked: Any,
    ) -> LineFile[OneLine]:
        """The file of a model's answers, with what it holds already. It says first of whom they
        are, and how they were asked.

        Raises:
            CheckpointError: it cannot be read.
        """
        words = (*words, *self.extra)
        cures = curing.switched_on(model.served[0].source, self.vllm.version)
        if cures:
            words = (*words, setting(cures))
        if model.target:
            words = (*words, f"target {model.target.identity.sha256}")
        header = Header(
            role=model.role,
            checkpoint_sha256=model.identity.sha256,
            vllm=self.vllm.version,
            device=self.vllm.device,
            words=words,
            num=num,
            **asked,
        )
        return open_lines(self.out, name, kind, header)

    def alone(self) -> AbstractContextManager[None]:
        """Lock the evidence folder.

        Raises:
            RecipeError: another run is at work there.
        """
        for folder in (self.out, self.out / "logs"):
            refuse_strange(folder)
        return held(self.out, "only one run may measure into a folder")

    def log(self, name: str) -> Path:
        """Of a server."""
        return (self.out / "logs" / f"{name}.log").absolute()


@frozen
class Work:
    """What one server is asked.

    Attributes:
        name: of the log, where a server is started for it first.
        model: who is asked.
        file: where answers go.
        asking: makes `Ask` of a healthy server.
        k: tokens drafted a step; 0 serves without method=mtp.
        max_model_len: tokens of prompt and answer together.
        concurrency: requests in flight.
        max_num_seqs: requests that are computed at once; 0: as many as are in flight.
        words: for `vllm serve`, before the user's own: what is served otherwise has another server.
        further: words that change no answer of other works; a server gets those of all.
        may_fail: a server that fails is an answer.
        unit, task: see `Step`.
    """

    name: str
    model: Model
    file: LineFile[Any]
    asking: Callable[[Server], AbstractContextManager[Ask]]
    k: int
    max_model_len: int
    concurrency: int = 1
    max_num_seqs: int = 0
    words: tuple[str, ...] = ()
    further: tuple[str, ...] = ()
    may_fail: bool = False
    unit: str = "question"
    task: str = ""


Failures = Mapping[tuple[Arm, int], ServerFailed]
"""Of servers whose failure is an answer: by whose it was, and its k."""


class Measuring(Protocol):
    """Something to measure of a source and a checkpoint."""

    def works(self, model: Model) -> list[Work]:
        """What a model is asked, also where it has answered."""
        ...

    def fact(self, failures: Failures) -> Fact:
        """What was measured, once nothing is left to ask but of servers that failed."""
        ...


@frozen
class Host:
    """Serves one checkpoint: its own files, or a BF16 copy where this CPU has no kernel for them.

    Attributes:
        folder: what is served.
        draft: its draft, where that has a folder of its own.
        as_served, reason: whether it is a copy, and why.
    """

    model: Model
    setup: Setup
    folder: Path
    as_served: AsServed
    reason: str
    draft: Path | None = None

    def answer(self, *works: Work) -> None:
        """Start one server for works that are served alike, and ask it what is missing.

        Raises:
            ServerFailed: it did not come up, died, refused a request, or was silent. What it has
                answered is kept.
        """
        first = works[0]
        room = max(work.max_model_len for work in works)
        at_once = max(work.max_num_seqs or work.concurrency for work in works)
        limits = ("--max-model-len", str(room), "--max-num-seqs", str(at_once))
        step = Step(role=self.model.role, doing="", done=0, total=1, unit=first.unit)
        source = self.model.served[0].source
        cures = curing.switched_on(source, self.setup.vllm.version)
        further = dict.fromkeys(work.further for work in works)
        words = (*method_words(source), *limits, *first.words, *chain(*further))
        if self.draft:
            words = (*separate_draft(str(self.draft)), *words)
        with serving(
            replace(self.setup.vllm, cures=cures),
            self.folder,
            k=first.k,
            log=self.setup.log(first.name),
            timeout=self.setup.timeout,
            extra=(*words, *self.setup.extra),
            watch=lambda doing: self.setup.watch(replace(step, doing=f"k={first.k}: {doing}")),
        ) as server:
            for work in works:
                with work.asking(server) as ask:
                    self._ask(work, server, ask)

    def _ask(self, work: Work, server: Server, ask: Ask) -> None:
        """Ask what one work lacks, several at once, and write each answer down as it comes."""
        file = work.file
        before = server.drafts()
        number = len(file.sittings) + 1
        clauses = (self.reason, curing.in_words(server.log))
        reason = "; ".join(filter(None, clauses))
        failures = list[tuple[Any, ServerFailed]]()

        def note(read: Callable[[Drafts], Drafts], *, has_all: bool = False) -> float:
            """Write down how the server is doing, and return when."""
            file.add(
                Sitting(
                    sitting=number,
                    as_served=self.as_served,
                    reason=reason,
                    has_all=has_all,
                    **counters(read(before)),
                )
            )
            return time.monotonic()

        def answer(place: Any) -> Any:
            # The first failure ends the asking. What is in flight is waited for and kept, so that
            # something is asked again only if its answer never came.
            if failures:
                return None
            try:
                return ask(place)
            except ServerFailed as failure:
                failures.append((place, failure))
                return None

        start = time.monotonic()
        noted = note(server.drafts_now)
        done = num_tokens = 0
        pool = ThreadPoolExecutor(work.concurrency)
        try:
            for future in as_completed([pool.submit(answer, place) for place in file.missing]):
                line = future.result()
                if line is None:
                    continue
                file.add(line)
                done += 1
                num_tokens += line.num_tokens
                if time.monotonic() - noted > NOTE_SECONDS:
                    noted = time.monotonic()
                    with suppress(ServerFailed):  # one that dies fails an answer, which says more
                        note(server.drafts_now)
                seconds = time.monotonic() - start
                left = len(file.missing)
                self.setup.watch(
                    Step(
                        role=work.model.role,
                        doing="",
                        done=len(file.wanted) - left,
                        total=len(file.wanted),
                        tokens_per_second=num_tokens / seconds,
                        eta_seconds=left * seconds / done,
                        unit=work.unit,
                        task=work.task,
                    )
                )
        finally:  # on Ctrl-C nobody waits for answers: the server is about to be ended
            pool.shutdown(wait=False, cancel_futures=True)
        if not failures:
            # The last counts come a moment after the last answer.
            note(server.drafts, has_all=True)
            return
        with suppress(ServerFailed):
            note(server.drafts_now)
        place, failure = failures[0]
        left = len(file.missing)
        at = f"{work.unit} {file.wanted.index(place) + 1} of {len(file.wanted)}"
        raise ServerFailed(
            failure.words,
            failure.log,
            asked=f"{at} for the {work.model.title}",
            cure=f"nothing is lost: the same command asks only the {left} that are missing",
        ) from failure


@contextmanager
def hosting(model: Model, setup: Setup) -> Iterator[Host]:
    """The servers of one checkpoint. A copy is gone with the context. A draft is in the form that
    its target builds, so both are copied or neither.

    Raises:
        RecipeError: no room for a copy.
        CheckpointError: a weight cannot be read.
    """
    folders = list[Path]()
    for each in model.served:
        assert each.source.folder is not None, "download() first"
        folders.append(each.source.folder.absolute())
    how = as_hosted(model, setup)
    with ExitStack() as scratch:
        if how["as_served"] == COPY:
            copies = scratch.enter_context(ScratchFolder(f"keepmtp-{model.role}-bf16-", setup.out))
            setup.watch(Step(role=model.role, doing="writing a BF16 copy", done=0, total=1))
            for number, each in enumerate(model.served):
                folders[number] = write_copy(each.source, copies / f"{number}").absolute()
        draft = None
        if model.target:
            draft = folders[-1]
        yield Host(model=model, setup=setup, folder=folders[0], draft=draft, **how)


def as_hosted(model: Model, setup: Setup) -> Json:
    """Whether a copy is served, and why: `as_served` and `reason` of a `Host`."""
    for each in model.served:
        reason = why_no_kernel(each.source, setup.vllm)
        if reason:
            return {"as_served": COPY, "reason": reason}
    return {"as_served": "native", "reason": ""}


def _left(stations: Iterable[Measuring], model: Model) -> list[Work]:
    """What a model has not answered yet."""
    works = chain(*[station.works(model) for station in stations])
    return [work for work in works if work.file.missing]


def planned(stations: Iterable[Measuring], models: Sequence[Model]) -> list[list[Work]]:
    """The servers that are going to be started, each with what it is asked: of each model, the
    fewest drafts first.
    """
    alike = attrgetter("k", "words")
    servers = []
    for model in models:
        works = _left(stations, model)
        for _, together in groupby(sorted(works, key=alike), key=alike):
            servers.append(list(together))
    return servers


def measured(
    stations: Mapping[str, Measuring], models: Sequence[Model], setup: Setup
) -> tuple[dict[str, Any], ServerFailed | None]:
    """Ask the models one after the other what is missing: each of their servers once, and none
    where nothing is.

    After a failure that is an answer, nothing is asked but what may fail, and of that model nothing
    where its server without drafts failed: with method=mtp it would fail the same way, minutes
    later.

    Returns: what each station found, by its name; without a fact are those that a failure, which
        comes with them, has left without answers.

    Raises:
        ServerFailed: see `Host.answer`.
        RecipeError, CheckpointError: see `hosting`.
    """
    failures = dict[tuple[Arm, int], ServerFailed]()
    for model in models:
        servers = planned(stations.values(), [model])
        if not servers:
            continue
        with hosting(model, setup) as host:
            for works in servers:
                if failures:
                    works = [work for work in works if work.may_fail]
                if not works or (model.role, 0) in failures:
                    continue
                try:
                    host.answer(*works)
                except ServerFailed as failure:
                    if not any(work.may_fail for work in works):
                        raise
                    failures[model.role, works[0].k] = failure
    facts = {}
    for name, station in stations.items():
        left = chain(*[_left([station], model) for model in models])
        if all(work.may_fail for work in left):
            facts[name] = station.fact(failures)
    if facts.keys() == stations.keys():
        return facts, None
    return facts, next(iter(failures.values()))


def drafted_by(model: Model, k: int) -> int:
    """How many of `k` tokens a model drafts: 0 with MTP off, and for a source without an MTP
    block.
    """
    # Training code drops the block and leaves its count in config.json, so the tensors are asked.
    if model.role == "plain" or (model.role == "source" and not has_mtp(model.source)):
        return 0
    return k


def refuse_drafts(source: Source, *ks: int, option: str, is_original: bool = False) -> None:
    """Refuse numbers of drafted tokens a step that the MTP block cannot draft.

    Args:
        source: the checkpoint.
        ks: drafted tokens a step.
        option: what the user names k with.
        is_original: what is judged was made from it; without a block it is served with MTP off.

    Raises:
        RecipeError: no MTP block, or a k that is no multiple of its layers.
    """
    if is_original and not has_mtp(source):
        return
    num_layers = view_of(source).draft_unit
    for k in ks:
        if k and not num_layers:
            rule = "must have an MTP block to draft with"
            cure = "Draft nothing, or name another"
            raise RecipeError(source.where, rule, got="none", cure=cure)
        if k not in ks_up_to(k, num_layers):
            rule = f"with {num_layers} MTP layers vLLM drafts a multiple of them"
            raise RecipeError(option, rule, got=k, cure=f"Use {option} {num_layers}")


def ks_up_to(most: int, num_mtp_layers: int) -> tuple[int, ...]:
    """0 to `most`, without those that vLLM refuses: above the number of MTP layers, k must be a
    multiple of it.
    """
    layers = max(1, num_mtp_layers)
    return tuple([k for k in range(most + 1) if k <= num_mtp_layers or k % layers == 0])


def has_template(source: Source, further: Sequence[str]) -> bool:
    """Whether the server has a chat template: the checkpoint's, or one that the further words for
    vLLM name.

    Raises:
        CheckpointError: see `source.small_bytes`.
    """
    if TEMPLATES & {*source.companions} or _TEMPLATE_WORDS & options_of(further).keys():
        return True
    return b'"chat_template"' in (small_bytes(source, "tokenizer_config.json") or b"")


def room_for(prompts: Iterable[str], source: Source, *, is_chat: bool, max_tokens: int) -> int:
    """Tokens of the longest prompt and its answer, at most, as far as the model goes: a token has
    at least one byte. Messages are in JSON, which is longer than what they become.
    """
    longest = max([len(prompt.encode()) for prompt in prompts]) + max_tokens + 16
    if is_chat:
        longest += CHAT_TOKENS
    return min(longest, positions(source))


def positions(source: Source) -> int:
    """Tokens that a model can hold; without a number in config.json, any."""
    most = source.text_config.get("max_position_embeddings")
    if isinstance(most, int):
        return most
    return sys.maxsize
