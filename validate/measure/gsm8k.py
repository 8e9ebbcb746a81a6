"""Tasks through real servers: source and checkpoint, each with method=mtp, asked the same questions the same way.

In: two local checkpoints, the questions of each task and a `VLLM`. Out: an `EvaluationFact`, and files of the answers.
The third arm is the checkpoint again, with MTP off: what it answers otherwise then, drafting has changed.

Easy to get wrong: two scores compare only under one protocol, dataset, vLLM and set of bytes. Answers carry all of that
in their file's first line; a run goes on with those that have exactly its own, and a model whose answers are complete
is not served again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...checkpoints.files import held
from ...checkpoints.identity import Identity, file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.families import find_view
from ...recipes.protocol import Evaluation
from ..facts.evaluated import ARM_TITLES, Arm, EvaluatedFact, EvaluationFact, TaskFact
from ..facts.paired import paired
from ..facts.served import AsServed, counters
from ..facts.step import Step
from ..facts.vllm_env import TIMEOUT_SECONDS, VLLM
from .answers import Header, Samples, open_samples, take_from_sibling
from .ask import Watch, ask
from .bf16_copy import why_no_kernel
from .drafting import drafting
from .lm_eval_task import VERSIONS, Questions, scores
from .serve_check import COPY, UNTRIED, bf16_copy, has_template, ks_up_to, lack_of_kernel
from .server import ServerFailed, serving

# What a chat template adds to a message, and to a conversation (system prompts of releases), in tokens, at most.
_TURN_TOKENS, _CHAT_TOKENS = 64, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How to serve, and where to write.

    Attributes:
        out: evidence folder.
        confidence: of the interval around the paired difference.
        extra: further words for `vllm serve`.
        timeout: seconds to a healthy server.
        say: called with a sentence on answers that are there already.
        has_plain: ask the checkpoint with MTP off as well.
    """

    out: Path
    confidence: float
    has_plain: bool = True
    timeout: float = TIMEOUT_SECONDS
    extra: tuple[str, ...] = ()
    say: Callable[[str], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One checkpoint: its role, its files on this machine, and their identity."""

    role: Arm
    source: Source
    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """One server to start: whose, with how many draft tokens, its log, and further words for `vllm serve`."""

    model: Model
    k: int
    log: Path
    words: tuple[str, ...]
    setup: Setup


def refuse_model(source: Source, protocol: Evaluation, extra: tuple[str, ...]) -> None:
    """Refuse before anything is read at length or started.

    Raises:
        RecipeError: no MTP block that drafts k tokens, or messages without a template to put them in.
    """
    view = find_view(source.config, source.where, source.entries)
    num_layers = view.num_mtp_layers
    if not num_layers:
        raise RecipeError(source.where, "must have an MTP block to draft with", got="none", cure="Name another")
    if protocol.k not in ks_up_to(protocol.k, num_layers):
        rule = f"with {num_layers} MTP layers vLLM drafts a multiple of them"
        raise RecipeError("evaluation.k", rule, got=protocol.k, cure=f"Use -k {num_layers}")
    if protocol.api == "chat" and not has_template(source, extra):
        rule, cure = "needs a chat template for evaluation.api chat", "Use --api completions or -- --chat-template FILE"
        raise RecipeError(source.where, rule, got="none beside the weights", cure=cure)


def refuse_prefix_caching(source: Source, protocol: Evaluation, vllm: VLLM) -> None:
    """Refuse what vLLM's CPU build cannot serve: it has no kernel that puts a linear layer's state back after a draft.

    Raises:
        RecipeError: prefix caching on a CPU, for a model with linear attention.
    """
    has_linear = find_view(source.config, source.where, source.entries).has_linear_attention
    if protocol.prefix_caching and vllm.build == "cpu" and has_linear:
        rule = "on a CPU vLLM 0.32 cannot combine prefix caching with drafting where layers have linear attention"
        raise RecipeError(source.where, rule, got="evaluation.prefix_caching", cure="Use --no-prefix-caching")


def evaluate(
    checkpoint: Model,
    source: Model | None,
    asked: Sequence[Questions],
    *,
    vllm: VLLM,
    setup: Setup,
    watch: Watch | None = None,
) -> EvaluationFact:
    """Ask source, checkpoint, and checkpoint with MTP off what has no answer yet, and let lm-eval score all answers.

    Each of them is served once for all tasks that are drafted alike, not once for each task.

    Args:
        checkpoint: what is judged.
        source: what it was made from; None leaves the difference unknown.
        asked: the questions of each task, the recipe's first task first.
        vllm: where vLLM lives.
        setup: how to serve, and where to write.
        watch: called with each step of progress.

    Raises:
        RecipeError: another run is at work there.
        ServerFailed: a server did not come up, died, refused a request, or was silent.
        VLLMError: no room for a BF16 copy.
        CheckpointError: answers that cannot be read, or weights that cannot be copied.
    """
    plain = replace(checkpoint, role="plain") if setup.has_plain else None
    models = [model for model in (source, checkpoint, plain) if model is not None]
    setup.out.mkdir(parents=True, exist_ok=True)
    with held(setup.out, "only one run may evaluate into a folder"):
        answered = [(model, _answered(model, asked, vllm, setup, watch)) for model in models]
        first, *others = [_task_fact(questions, answered, vllm, setup) for questions in asked]
    return EvaluationFact(**dict(first), tasks=tuple(others))


def _task_fact(
    questions: Questions, answered: Sequence[tuple[Model, Mapping[str, Samples]]], vllm: VLLM, setup: Setup
) -> TaskFact:
    """What one task gave, once all have answered it."""
    task = questions.protocol.task
    files = {model.role: samples[task] for model, samples in answered if task in samples}
    facts = {model.role: _fact(model, samples[task], questions) for model, samples in answered if task in samples}
    drafted, filters = files["checkpoint"], [score.filter for score in facts["checkpoint"].scores]
    pairs = [
        paired(
            name,
            files["source"].correct(name),
            drafted.correct(name),
            runs=questions.protocol.repeats,
            confidence=setup.confidence,
        )
        for name in filters
        if "source" in files
    ]
    return TaskFact(
        protocol=questions.protocol,
        dataset_sha256=questions.dataset_sha256,
        source=facts.get("source"),
        checkpoint=facts["checkpoint"],
        paired=tuple(pairs),
        plain=facts.get("plain"),
        drafting=drafting(files["plain"], drafted, filters) if "plain" in files else None,
        environment={
            **VERSIONS,
            "vllm": vllm.version,
            "torch": vllm.torch,
            "transformers": vllm.transformers,
            "compressed_tensors": vllm.compressed_tensors,
            "build": vllm.build,
            "device": vllm.device,
            "words": " ".join(setup.extra),
        },
    )


def _answered(
    model: Model, asked: Sequence[Questions], vllm: VLLM, setup: Setup, watch: Watch | None
) -> dict[str, Samples]:
    """All answers of one model by task; it is served only if one is missing, and once for all tasks of a kind."""
    # What is sampled differs by its draws, whether it is drafted or not.
    fit = [each for each in asked if model.role != "plain" or not each.protocol.temperature]
    opened = [(questions, _opened(model, questions, vllm, setup)) for questions in fit]
    servers: dict[tuple[int, bool], list[tuple[Questions, Samples]]] = {}
    for questions, samples in opened:
        if samples.missing:
            protocol = questions.protocol
            key = (0 if model.role == "plain" else protocol.k, protocol.prefix_caching)
            servers.setdefault(key, []).append((questions, samples))
    for number, ((k, prefix_caching), together) in enumerate(servers.items()):
        name = f"eval.{model.role}.{number + 1}.log" if number else f"eval.{model.role}.log"
        words = (*(["--enable-prefix-caching"] if prefix_caching else []), *setup.extra)
        sitting = _Server(model=model, k=k, log=(setup.out / "logs" / name).absolute(), words=words, setup=setup)
        _serve_and_ask(sitting, together, vllm, watch)
    return {questions.protocol.task: samples for questions, samples in opened}


def _opened(model: Model, questions: Questions, vllm: VLLM, setup: Setup) -> Samples:
    """The file of one model's answers to one task, with what is in it already."""
    protocol = questions.protocol
    header = Header(
        role=model.role,
        protocol=protocol,
        dataset_sha256=questions.dataset_sha256,
        prompts_sha256=questions.prompts_sha256,
        num_questions=len(questions.items),
        checkpoint_sha256=model.identity.sha256,
        vllm=vllm.version,
        device=vllm.device,
        words=setup.extra,
    )
    path, say = setup.out / f"{protocol.task}.{model.role}.jsonl", setup.say or (lambda _: None)
    if sibling := take_from_sibling(path, header):
        whose = ARM_TITLES[model.role]
        say(f"The {whose} answered the same questions of {protocol.task} before: taken from {sibling.name}.")
    samples, aside = open_samples(path, header)
    if aside is not None:
        say(f"Answers to another protocol or other bytes are kept in {aside.name}.")
    return samples


def _serve_and_ask(
    server: _Server, together: Sequence[tuple[Questions, Samples]], vllm: VLLM, watch: Watch | None
) -> None:
    """As it is, or as a BF16 copy where this CPU has no kernel for it."""
    model = server.model

    def sit(folder: Path, as_served: AsServed, reason: str) -> None:
        with serving(
            vllm,
            folder,
            k=server.k,
            log=server.log,
            is_tracked=False,
            max_model_len=max(_room(questions, model.source) for questions, _ in together),
            max_num_seqs=max(questions.protocol.concurrency for questions, _ in together),
            timeout=server.setup.timeout,
            extra=server.words,
            watch=tell,
        ) as healthy:
            for questions, samples in together:
                ask(healthy, questions, samples, as_served=as_served, reason=reason, watch=watch)

    def tell(words: str) -> None:
        if watch is not None:
            done = sum(len(samples.answers) for _, samples in together)
            total = sum(len(questions.items) for questions, _ in together)
            watch(Step(role=model.role, doing=words.removeprefix(f"{model.role}: "), done=done, total=total))

    assert model.source.folder is not None, "download() first"
    reason = why_no_kernel(model.source, vllm)
    if not reason:
        try:
            return sit(model.source.folder.absolute(), "native", "")
        except ServerFailed as failure:
            reason = lack_of_kernel(vllm, failure.words)
            if not reason:
                raise
    whose = "source" if model.role == "source" else "checkpoint"
    with bf16_copy(model.source, whose, out=server.setup.out, watch=tell) as copy:
        sit(copy, COPY, f"{reason}; {UNTRIED}")


def _fact(model: Model, samples: Samples, asked: Questions) -> EvaluatedFact:
    """One model's part, once all is answered; finishes the file."""
    answers = samples.answers
    found, correct = scores(asked, {number: answer.text for number, answer in answers.items()})
    samples.finish(correct)
    last = samples.sittings[max(samples.sittings)]
    return EvaluatedFact(
        role=model.role,
        path=model.source.where,
        sha256=model.identity.sha256,
        as_served=last.as_served,
        reason=last.reason,
        scores=found,
        num_questions=len(answers),
        num_truncated=sum(answer.finish_reason == "length" for answer in answers.values()),
        num_empty=sum(not answer.text.strip() for answer in answers.values()),
        num_tokens=sum(answer.num_tokens for answer in answers.values()),
        seconds=sum(sitting.seconds for sitting in samples.sittings.values()),
        **counters(samples.drafts),
        sittings=len(samples.sittings),
        samples=samples.path.name,
        samples_sha256=file_sha256(samples.path),
    )


def _room(asked: Questions, source: Source) -> int:
    """Tokens of the longest prompt and its answer, at most: a token has at least one byte."""
    if asked.protocol.api == "chat":
        longest = max(
            _CHAT_TOKENS + sum(len(turn["content"].encode()) + _TURN_TOKENS for turn in item.messages)
            for item in asked.items
        )
    else:
        longest = max(len(item.prompt.encode()) for item in asked.items)
    config = source.config.get("text_config") or source.config
    most = config.get("max_position_embeddings")
    room = longest + asked.protocol.max_tokens + 16
    return min(room, most) if isinstance(most, int) else room
