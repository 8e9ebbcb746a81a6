"""Tasks through real servers: source and checkpoint, each with method=mtp, asked the same questions
the same way.

In: two local checkpoints, the questions of each task and a `VLLM`. Out: an `EvaluationFact`, and
files of the answers. The third arm is the checkpoint again, with MTP off: what it answers otherwise
then, drafting has changed.

Easy to get wrong: two scores compare only under one protocol, dataset, vLLM and set of bytes.
Answers carry all of that in their file's first line; a run goes on with those that have exactly its
own, and a model whose answers are complete is not served again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ...checkpoints.files import held
from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.families import find_view
from ...recipes.protocol import Evaluation
from ..facts.evaluated import ARM_TITLES, Arm, EvaluatedFact, EvaluationFact, PairedFact, TaskFact
from ..facts.paired import paired
from ..facts.served import AsServed, Drafts, counters
from ..facts.step import Step
from ..facts.vllm_env import VLLM
from .answers import Answer, Header, Samples, Sitting, correct, drafts_of, finish
from .drafting import drafting
from .harness import Asking, Host, Model, Setup, TextOrTurns, has_template, refuse_drafts, room_for
from .line_file import open_lines
from .lm_eval_task import VERSIONS, Question, Questions, scores
from .server import Reply, Server, ServerFailed

MOST_STOPS = 4
"""vLLM refuses a request with more (0.32, `stop` of its protocols); lm-eval's humaneval has
five.
"""

Watch = Callable[[Step], None]


def refuse_model(source: Source, protocol: Evaluation, extra: tuple[str, ...]) -> None:
    """Refuse before anything is read at length or started.

    Raises:
        RecipeError: no MTP block that drafts k tokens, or messages without a template to put them
            in.
    """
    refuse_drafts(source, protocol.k, where="evaluation.k", without="Name another", use="Use -k ")
    if protocol.api == "chat" and not has_template(source, extra):
        rule, cure = (
            "needs a chat template for evaluation.api chat",
            "Use --api completions or -- --chat-template FILE",
        )
        raise RecipeError(source.where, rule, got="none beside the weights", cure=cure)


def refuse_prefix_caching(source: Source, protocol: Evaluation, vllm: VLLM) -> None:
    """Refuse what vLLM's CPU build cannot serve: it has no kernel that puts a linear layer's state
    back after a draft.

    Raises:
        RecipeError: prefix caching on a CPU, for a model with linear attention.
    """
    has_linear = find_view(source.config, source.where, source.entries).has_linear_attention
    if protocol.prefix_caching and vllm.build == "cpu" and has_linear:
        rule = (
            "on a CPU vLLM 0.32 cannot combine prefix caching with drafting where layers have "
            "linear attention"
        )
        raise RecipeError(
            source.where, rule, got="evaluation.prefix_caching", cure="Use --no-prefix-caching"
        )


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
    """Ask source, checkpoint, and checkpoint with MTP off what has no answer yet, and let lm-eval
    score all answers.

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
        for model in models:
            _ask_missing(model, tasks, setup, watch)
        first, *others = [_task_fact(questions, models, setup, confidence) for questions in tasks]
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
    protocol, role, total = questions.protocol, samples.header.role, len(questions.items)
    before, number = server.drafts(), len(samples.sittings) + 1
    limit = request_seconds(protocol) if timeout is None else timeout

    def keep(item: Question, reply: Reply) -> int:
        said = {
            "text": reply.text,
            "finish_reason": reply.finish_reason,
            "num_tokens": reply.num_tokens,
        }
        samples.add(Answer(question=item.number, prompt_sha256=item.sha256, **said))
        return reply.num_tokens

    def note(seconds: float, counted: Callable[[], Drafts] = server.drafts_now) -> None:
        with suppress(ServerFailed):  # one that dies fails an answer too, which says more
            new = counters(counted().since(before))
            served = {"as_served": as_served, "reason": reason, "seconds": round(seconds, 3)}
            samples.add(Sitting(sitting=number, **served, **new))

    Asking(
        items=[questions.items[each] for each in samples.missing],
        ask=lambda item: _reply(server, item, protocol, limit),
        keep=keep,
        note=note,
        name=lambda item: f"question {item.number + 1} of {total} for the {ARM_TITLES[role]}",
        step=Step(role=role, doing="", done=len(samples.lines), total=total, task=protocol.task),
        concurrency=protocol.concurrency,
    ).run(watch)
    note(
        samples.sittings[number].seconds, server.drafts
    )  # the last ones come a moment after the last answer


def request_seconds(protocol: Evaluation) -> float:
    """How long one answer may take: ten minutes, and a second for each of its tokens."""
    return 600.0 + protocol.max_tokens


def _reply(server: Server, item: Question, protocol: Evaluation, timeout: float) -> Reply:
    """One answer, ended at the stop words that the server was not given; its tokens were
    generated.
    """
    reply = server.answer(
        _prompt(item, protocol),
        max_tokens=item.max_tokens,
        stop=item.stop[:MOST_STOPS],
        seed=protocol.seed + item.run,
        temperature=protocol.temperature,
        top_p=protocol.top_p,
        timeout=timeout,
    )
    places = [at for word in item.stop[MOST_STOPS:] if (at := reply.text.find(word)) >= 0]
    return replace(reply, text=reply.text[: min(places)], finish_reason="stop") if places else reply


def _prompt(item: Question, protocol: Evaluation) -> TextOrTurns:
    return item.prompt if protocol.api == "completions" else item.messages


# --- one model
# --------------------------------------------------------------------------------------------------


def _fits(role: Arm, questions: Questions) -> bool:
    """Whether an arm is asked a task: what is sampled differs by its draws, whether it is drafted
    or not.
    """
    return role != "plain" or not questions.protocol.temperature


def _ask_missing(model: Model, tasks: Sequence[Questions], setup: Setup, watch: Watch) -> None:
    """All answers of one model; it is served only if one is missing, and once for all tasks of one
    (k, caching).
    """
    servers: dict[tuple[int, bool], list[tuple[Questions, Samples]]] = {}
    for questions in tasks:
        samples = _opened(model, questions, setup) if _fits(model.role, questions) else None
        if samples is not None and samples.missing:
            k = 0 if model.role == "plain" else questions.protocol.k
            servers.setdefault((k, questions.protocol.prefix_caching), []).append(
                (questions, samples)
            )
    if not servers:
        return
    missing = [samples for together in servers.values() for _, samples in together]
    step = Step(
        role=model.role,
        doing="",
        done=sum(len(samples.lines) for samples in missing),
        total=sum(samples.header.num_questions for samples in missing),
    )
    with Host(
        model.source, model.whose, setup, lambda doing: watch(replace(step, doing=doing))
    ) as host:
        for number, ((k, prefix_caching), together) in enumerate(servers.items(), 1):
            protocols = [questions.protocol for questions, _ in together]
            rooms = [_room(questions, model.source) for questions, _ in together]
            with host.serving(
                f"eval.{model.role}.{number}" if number > 1 else f"eval.{model.role}",
                k=k,
                max_model_len=max(rooms),
                max_num_seqs=max(protocol.concurrency for protocol in protocols),
                words=("--enable-prefix-caching",) if prefix_caching else (),
            ) as server:
                for questions, samples in together:
                    ask(
                        server,
                        questions,
                        samples,
                        as_served=host.as_served,
                        reason=host.reason,
                        watch=watch,
                    )


def _room(questions: Questions, source: Source) -> int:
    prompts = [_prompt(item, questions.protocol) for item in questions.items]
    return room_for(prompts, source, max_tokens=questions.protocol.max_tokens)


def _opened(model: Model, questions: Questions, setup: Setup) -> Samples:
    """The file of one model's answers to one task, with what is in it already."""
    header = Header(
        role=model.role,
        protocol=questions.protocol,
        dataset_sha256=questions.dataset_sha256,
        prompts_sha256=questions.prompts_sha256,
        num_questions=len(questions.items),
        checkpoint_sha256=model.identity.sha256,
        **setup.answered_by,
    )
    return open_lines(
        setup.out / f"{questions.protocol.task}.{model.role}.jsonl", header, setup.say
    )


# --- facts
# --------------------------------------------------------------------------------------------------


def _task_fact(
    questions: Questions, models: Sequence[Model], setup: Setup, confidence: float
) -> TaskFact:
    """What one task gave, once all have answered it."""
    asked = [model for model in models if _fits(model.role, questions)]
    files: dict[Arm, Samples] = {model.role: _opened(model, questions, setup) for model in asked}
    facts = {model.role: _fact(model, files[model.role], questions) for model in asked}
    filters = [score.filter for score in facts["checkpoint"].scores]
    return TaskFact(
        protocol=questions.protocol,
        dataset_sha256=questions.dataset_sha256,
        source=facts.get("source"),
        checkpoint=facts["checkpoint"],
        paired=tuple(_pairs(files, filters, questions.protocol.repeats, confidence))
        if "source" in files
        else (),
        plain=facts.get("plain"),
        drafting=drafting(files["plain"], files["checkpoint"], filters)
        if "plain" in files
        else None,
        environment={**VERSIONS, **setup.environment},
    )


def _pairs(
    files: Mapping[Arm, Samples], filters: Sequence[str], runs: int, confidence: float
) -> Iterator[PairedFact]:
    for name in filters:
        before, after = correct(files["source"], name), correct(files["checkpoint"], name)
        yield paired(name, before, after, runs=runs, confidence=confidence)


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
