"""Tasks through real servers: source and checkpoint, each with method=mtp, asked the same questions the same way.

In: two local checkpoints, the questions of each task and a `VLLM`. Out: an `EvaluationFact`, and files of the answers.
The third arm is the checkpoint again, with MTP off: what it answers otherwise then, drafting has changed.

Easy to get wrong: two scores compare only under one protocol, dataset, vLLM and set of bytes. Answers carry all of that
in their file's first line; a run goes on with those that have exactly its own, and a model whose answers are complete
is not served again.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...checkpoints.files import held
from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.families import find_view
from ...recipes.protocol import Evaluation
from ..facts.evaluated import ARM_TITLES, EvaluatedFact, EvaluationFact, TaskFact
from ..facts.paired import paired
from ..facts.served import AsServed, Drafts, counters
from ..facts.step import Step
from ..facts.vllm_env import VLLM
from .answers import Answer, Header, Samples, Sitting, correct, drafts_of, finish, open_samples, take_from_sibling
from .drafting import drafting
from .harness import Model, Setup, asked, has_template, most_tokens, refuse_drafts, served
from .lm_eval_task import VERSIONS, Question, Questions, scores
from .server import Reply, Server, ServerFailed, serving

COUNTERS_SECONDS = 2.0
"""How often vLLM's counters are read while questions are asked: what a server that dies has counted since is lost."""
MOST_STOPS = 4
"""vLLM refuses a request with more (0.32, `stop` of its protocols); lm-eval's humaneval has five."""
# What a chat template adds to a message, and to a conversation (system prompts of releases), in tokens, at most.
_TURN_TOKENS, _CHAT_TOKENS = 64, 2048

Watch = Callable[[Step], None]
Together = Sequence[tuple[Questions, Samples]]
"""Tasks that one server is asked, each with the file of its answers."""


def refuse_model(source: Source, protocol: Evaluation, extra: tuple[str, ...]) -> None:
    """Refuse before anything is read at length or started.

    Raises:
        RecipeError: no MTP block that drafts k tokens, or messages without a template to put them in.
    """
    refuse_drafts(source, protocol.k, where="evaluation.k", without="Name another", use="Use -k ")
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
    tasks: Sequence[Questions],
    *,
    setup: Setup,
    confidence: float,
    has_plain: bool = True,
    watch: Watch = lambda _: None,
) -> EvaluationFact:
    """Ask source, checkpoint, and checkpoint with MTP off what has no answer yet, and let lm-eval score all answers.

    Each of them is served once for all tasks that are drafted alike, not once for each task.

    Args:
        checkpoint: what is judged.
        source: what it was made from; None leaves the difference unknown.
        tasks: the questions of each task, the recipe's first task first.
        setup: how to serve, and where to write.
        confidence: of the interval around the paired difference.
        has_plain: ask the checkpoint with MTP off as well.
        watch: called with each step of progress.

    Raises:
        RecipeError: another run is at work there.
        ServerFailed: a server did not come up, died, refused a request, or was silent.
        VLLMError: no room for a BF16 copy.
        CheckpointError: answers that cannot be read, or weights that cannot be copied.
    """
    plain = replace(checkpoint, role="plain") if has_plain else None
    models = [model for model in (source, checkpoint, plain) if model is not None]
    setup.out.mkdir(parents=True, exist_ok=True)
    with held(setup.out, "only one run may evaluate into a folder"):
        answered = [(model, _answered(model, tasks, setup, watch)) for model in models]
        first, *others = [_task_fact(questions, answered, setup, confidence) for questions in tasks]
    return EvaluationFact(**dict(first), tasks=tuple(others))


def ask(
    server: Server,
    questions: Questions,
    samples: Samples,
    *,
    as_served: AsServed = "native",
    reason: str = "",
    timeout: float | None = None,
    watch: Watch = lambda _: None,
) -> None:
    """Ask what is missing in `samples`, and write down answers and vLLM's counters as they come.

    Args:
        server: fresh or not; only what it counts from here on is taken.
        questions: all of them.
        samples: of these questions.
        as_served: whether `server` runs the checkpoint's own bytes, with `reason` where not.
        timeout: seconds for one answer; default `request_seconds`.
        watch: called after each answer.

    Raises:
        ServerFailed: a request failed, in the server's words, with the number of its question.
    """
    protocol, total = questions.protocol, len(questions.items)
    before, start = server.drafts(), time.monotonic()
    number, num_known = len(samples.sittings) + 1, len(samples.lines)

    def note(now: Drafts) -> None:
        seconds = round(time.monotonic() - start, 3)
        new = counters(now.since(before))
        samples.add(Sitting(sitting=number, as_served=as_served, reason=reason, seconds=seconds, **new))

    replies = asked(
        [questions.items[each] for each in samples.missing],
        lambda item: _reply(server, item, protocol, request_seconds(protocol) if timeout is None else timeout),
        concurrency=protocol.concurrency,
        name=lambda item: f"question {item.number + 1} of {total} for the {ARM_TITLES[samples.header.role]}",
        lack="have no answer",
    )
    num_tokens, read_at = 0, -math.inf  # at the first answer: none is ever without a sitting
    try:
        for item, reply in replies:
            samples.add(
                Answer(
                    question=item.number,
                    prompt_sha256=item.sha256,
                    text=reply.text,
                    finish_reason=reply.finish_reason,
                    num_tokens=reply.num_tokens,
                )
            )
            num_tokens += reply.num_tokens
            if time.monotonic() - read_at > COUNTERS_SECONDS:
                with suppress(ServerFailed):  # one that dies fails an answer too, which says more
                    note(server.drafts_now())
                read_at = time.monotonic()
            done, seconds = len(samples.lines), time.monotonic() - start
            watch(
                Step(
                    role=samples.header.role,
                    doing="",
                    done=done,
                    total=total,
                    tokens_per_second=num_tokens / seconds,
                    eta_seconds=(total - done) * seconds / (done - num_known),
                    task=protocol.task,
                )
            )
    except ServerFailed:
        with suppress(ServerFailed):  # it may be dead
            note(server.drafts_now())
        raise
    note(server.drafts())


def request_seconds(protocol: Evaluation) -> float:
    """How long one answer may take: ten minutes, and a second for each of its tokens."""
    return 600.0 + protocol.max_tokens


def _reply(server: Server, item: Question, protocol: Evaluation, timeout: float) -> Reply:
    """One answer, ended at the stop words that the server was not given; its tokens were generated."""
    reply = server.answer(
        item.prompt if protocol.api == "completions" else item.messages,
        max_tokens=item.max_tokens,
        stop=item.stop[:MOST_STOPS],
        seed=protocol.seed + item.run,
        temperature=protocol.temperature,
        top_p=protocol.top_p,
        timeout=timeout,
    )
    places = [at for word in item.stop[MOST_STOPS:] if (at := reply.text.find(word)) >= 0]
    return replace(reply, text=reply.text[: min(places)], finish_reason="stop") if places else reply


# --- one model --------------------------------------------------------------------------------------------------------


def _answered(model: Model, tasks: Sequence[Questions], setup: Setup, watch: Watch) -> dict[str, Samples]:
    """All answers of one model by task; it is served only if one is missing, and once for all tasks of a kind."""
    # What is sampled differs by its draws, whether it is drafted or not.
    fit = [each for each in tasks if model.role != "plain" or not each.protocol.temperature]
    opened = [(questions, _opened(model, questions, setup)) for questions in fit]
    servers: dict[tuple[int, bool], list[tuple[Questions, Samples]]] = {}
    for questions, samples in opened:
        if samples.missing:
            protocol = questions.protocol
            key = (0 if model.role == "plain" else protocol.k, protocol.prefix_caching)
            servers.setdefault(key, []).append((questions, samples))
    for number, (key, together) in enumerate(servers.items()):
        name = f"eval.{model.role}.{number + 1}" if number else f"eval.{model.role}"
        _serve_and_ask(model, key, together, setup.log(name), setup, watch)
    return {questions.protocol.task: samples for questions, samples in opened}


def _opened(model: Model, questions: Questions, setup: Setup) -> Samples:
    """The file of one model's answers to one task, with what is in it already."""
    protocol = questions.protocol
    header = Header(
        role=model.role,
        protocol=protocol,
        dataset_sha256=questions.dataset_sha256,
        prompts_sha256=questions.prompts_sha256,
        num_questions=len(questions.items),
        checkpoint_sha256=model.identity.sha256,
        vllm=setup.vllm.version,
        device=setup.vllm.device,
        words=setup.extra,
    )
    path = setup.out / f"{protocol.task}.{model.role}.jsonl"
    if sibling := take_from_sibling(path, header):
        whose = ARM_TITLES[model.role]
        setup.say(f"The {whose} answered the same questions of {protocol.task} before: taken from {sibling.name}.")
    samples, aside = open_samples(path, header)
    if aside is not None:
        setup.say(f"Answers to another protocol or other bytes are kept in {aside.name}.")
    return samples


def _serve_and_ask(
    model: Model, key: tuple[int, bool], together: Together, log: Path, setup: Setup, watch: Watch
) -> None:
    """One server for tasks of one (k, prefix caching)."""
    k, prefix_caching = key

    def use(folder: Path, as_served: AsServed, reason: str) -> None:
        with serving(
            setup.vllm,
            folder,
            k=k,
            log=log,
            is_tracked=False,
            max_model_len=max(_room(questions, model.source) for questions, _ in together),
            max_num_seqs=max(questions.protocol.concurrency for questions, _ in together),
            timeout=setup.timeout,
            extra=(*(["--enable-prefix-caching"] if prefix_caching else []), *setup.extra),
            watch=tell,
        ) as server:
            for questions, samples in together:
                ask(server, questions, samples, as_served=as_served, reason=reason, watch=watch)

    def tell(words: str) -> None:
        done = sum(len(samples.lines) for _, samples in together)
        total = sum(len(questions.items) for questions, _ in together)
        watch(Step(role=model.role, doing=words.removeprefix(f"{model.role}: "), done=done, total=total))

    served(model.source, model.whose, setup, use, tell)


def _room(questions: Questions, source: Source) -> int:
    """Tokens of the longest prompt and its answer, at most: a token has at least one byte."""
    if questions.protocol.api == "chat":
        longest = max(
            _CHAT_TOKENS + sum(len(turn["content"].encode()) + _TURN_TOKENS for turn in item.messages)
            for item in questions.items
        )
    else:
        longest = max(len(item.prompt.encode()) for item in questions.items)
    room = longest + questions.protocol.max_tokens + 16
    return min(room, most_tokens(source) or room)


# --- facts ------------------------------------------------------------------------------------------------------------


def _task_fact(
    questions: Questions,
    answered: Sequence[tuple[Model, Mapping[str, Samples]]],
    setup: Setup,
    confidence: float,
) -> TaskFact:
    """What one task gave, once all have answered it."""
    task = questions.protocol.task
    files = {model.role: samples[task] for model, samples in answered if task in samples}
    facts = {model.role: _fact(model, samples[task], questions) for model, samples in answered if task in samples}
    drafted, filters = files["checkpoint"], [score.filter for score in facts["checkpoint"].scores]
    pairs = []
    for name in filters if "source" in files else ():
        before, after = correct(files["source"], name), correct(drafted, name)
        pairs.append(paired(name, before, after, runs=questions.protocol.repeats, confidence=confidence))
    return TaskFact(
        protocol=questions.protocol,
        dataset_sha256=questions.dataset_sha256,
        source=facts.get("source"),
        checkpoint=facts["checkpoint"],
        paired=tuple(pairs),
        plain=facts.get("plain"),
        drafting=drafting(files["plain"], drafted, filters) if "plain" in files else None,
        environment={**VERSIONS, **setup.environment},
    )


def _fact(model: Model, samples: Samples, questions: Questions) -> EvaluatedFact:
    """One model's part, once all is answered; finishes the file."""
    answers = samples.lines
    found, right = scores(questions, {number: answer.text for number, answer in answers.items()})
    finish(samples, right)
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
        **counters(drafts_of(samples)),
        sittings=len(samples.sittings),
        samples=samples.path.name,
        samples_sha256=file_sha256(samples.path),
    )
