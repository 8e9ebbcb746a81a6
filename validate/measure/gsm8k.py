"""Tasks through real servers: source and checkpoint, each with method=mtp, asked the same questions
the same way.

In: two local checkpoints, the questions of each task and a `VLLM`. Out: an `EvaluationFact`, and
files of the answers. The third arm is the checkpoint again, with MTP off: what it answers otherwise
then, drafting has changed.

Easy to get wrong: two scores compare only under one protocol, dataset, vLLM and set of bytes.
Answers carry all of that in their file's first line; a run goes on with those that have exactly its
own, and a model whose answers are complete is not served again.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ...checkpoints.files import held
from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.families import find_view
from ...recipes.protocol import Evaluation
from ..facts.evaluated import ARM_TITLES, EvaluatedFact, EvaluationFact, TaskFact
from ..facts.paired import paired
from ..facts.served import Drafts, counters
from ..facts.step import Step
from ..facts.vllm_env import VLLM
from .answers import Answer, Header, Samples, Sitting, correct, counted, drafting, finish
from .harness import Model, Setup, ask_all, has_template, hosting, refuse_drafts, room_for
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
    refuse_drafts(source, protocol.k, option="-k")
    if protocol.api == "chat" and not has_template(source, extra):
        rule = "needs a chat template for evaluation.api chat"
        cure = "Use --api completions or -- --chat-template FILE"
        raise RecipeError(source.where, rule, got="none beside the weights", cure=cure)


def refuse_prefix_caching(source: Source, protocol: Evaluation, vllm: VLLM) -> None:
    """Refuse what vLLM's CPU build cannot serve: it has no kernel that puts a linear layer's state
    back after a draft.

    Raises:
        RecipeError: prefix caching on a CPU, for a model with linear attention.
    """
    if not protocol.prefix_caching or vllm.build != "cpu":
        return
    if find_view(source.config, source.where, source.entries).has_linear_attention:
        rule = (
            "on a CPU vLLM 0.32 cannot combine prefix caching with drafting where layers have "
            "linear attention"
        )
        got, cure = "evaluation.prefix_caching", "Use --no-prefix-caching"
        raise RecipeError(source.where, rule, got=got, cure=cure)


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
        RecipeError: another run is at work there, or a CPU that cannot cache prefixes.
        ServerFailed: a server did not come up, died, refused a request, or was silent.
        VLLMError: no room for a BF16 copy.
        CheckpointError: answers that cannot be read, or weights that cannot be copied.
    """
    for each in tasks:
        refuse_prefix_caching(checkpoint.source, each.protocol, setup.vllm)
    models = [checkpoint]
    if source is not None:
        models = [source, checkpoint]
    if has_plain:
        models.append(replace(checkpoint, role="plain"))
    setup.out.mkdir(parents=True, exist_ok=True)
    with held(setup.out, "only one run may evaluate into a folder"):
        for model in models:
            _ask_missing(model, tasks, setup, watch)
        first, *others = [_task_fact(each, models, setup, confidence) for each in tasks]
    return EvaluationFact(**dict(first), tasks=tuple(others))


def ask(
    server: Server,
    questions: Questions,
    samples: Samples,
    *,
    served: Mapping[str, Any],
    timeout: float | None = None,
    watch: Watch = lambda _: None,
) -> None:
    """Ask what is missing in `samples`, and write down answers and vLLM's counters as they come.

    Args:
        server: fresh or not; only what it counts from here on is taken.
        questions: all of them.
        samples: of these questions.
        served: whether `server` runs the checkpoint's own bytes, and why not: see `Host.served`.
        timeout: seconds for one answer; default ten minutes, and a second for each of its tokens.
        watch: called after each answer.

    Raises:
        ServerFailed: a request failed, in the server's words, with the number of its question.
    """
    protocol, role, total = questions.protocol, samples.header.role, len(questions.items)
    before, number = server.drafts(), len(samples.sittings) + 1
    limit = timeout or 600.0 + protocol.max_tokens

    def keep(item: Question, reply: Reply) -> int:
        said = {name: getattr(reply, name) for name in ("text", "finish_reason", "num_tokens")}
        samples.add(Answer(question=item.number, prompt_sha256=item.sha256, **said))
        return reply.num_tokens

    def note(seconds: float, read: Callable[[], Drafts] = server.drafts_now) -> None:
        with suppress(ServerFailed):  # one that dies fails an answer too, which says more
            new = counters(read().since(before))
            samples.add(Sitting(sitting=number, seconds=round(seconds, 3), **served, **new))

    ask_all(
        [questions.items[each] for each in samples.missing],
        lambda item: _reply(server, item, protocol, limit),
        keep=keep,
        note=note,
        name=lambda item: f"question {item.number + 1} of {total} for the {ARM_TITLES[role]}",
        step=Step(role=role, doing="", done=len(samples.lines), total=total, task=protocol.task),
        concurrency=protocol.concurrency,
        watch=watch,
    )
    # The last counts come a moment after the last answer.
    note(samples.sittings[number].seconds, server.drafts)


def _reply(server: Server, item: Question, protocol: Evaluation, timeout: float) -> Reply:
    """One answer, ended at the stop words that the server was not given; its tokens were
    generated.
    """
    asked = {
        "max_tokens": item.max_tokens,
        "temperature": protocol.temperature,
        "seed": protocol.seed + item.run,
        "stop": list(item.stop[:MOST_STOPS]),
    }
    if protocol.top_p != 1.0:
        asked["top_p"] = protocol.top_p
    reply = server.answer(item.sent, timeout=timeout, **asked)
    for word in item.stop[MOST_STOPS:]:
        text, found, _ = reply.text.partition(word)
        if found:
            reply = replace(reply, text=text, finish_reason="stop")
    return reply


def _is_asked(model: Model, questions: Questions) -> bool:
    """What is sampled differs by its draws, whether it is drafted or not."""
    return model.role != "plain" or not questions.protocol.temperature


def _ask_missing(model: Model, tasks: Sequence[Questions], setup: Setup, watch: Watch) -> None:
    """All answers of one model; it is served only if one is missing, and once for all tasks of one
    (k, caching).
    """
    servers: dict[tuple[int, bool], list[tuple[Questions, Samples]]] = {}
    done = total = 0
    for questions in tasks:
        if _is_asked(model, questions):
            samples, protocol = _opened(model, questions, setup), questions.protocol
            if samples.missing:
                k = 0 if model.role == "plain" else protocol.k
                together = servers.setdefault((k, protocol.prefix_caching), [])
                together.append((questions, samples))
                done, total = done + len(samples.lines), total + len(questions.items)
    if not servers:
        return
    step = Step(role=model.role, doing="", done=done, total=total)

    def tell(doing: str) -> None:
        watch(replace(step, doing=doing))

    with hosting(model.source, model.whose, setup, tell) as host:
        for number, ((k, prefix_caching), together) in enumerate(servers.items(), 1):
            room = concurrency = 0
            for questions, _ in together:
                protocol, prompts = questions.protocol, [item.sent for item in questions.items]
                most = room_for(prompts, model.source, max_tokens=protocol.max_tokens)
                room, concurrency = max(room, most), max(concurrency, protocol.concurrency)
            name = f"eval.{model.role}" + f".{number}" * (number > 1)
            words = ("--enable-prefix-caching",) * prefix_caching
            how = {"max_model_len": room, "max_num_seqs": concurrency, "words": words}
            with host.serving(name, k=k, **how) as server:
                for questions, samples in together:
                    ask(server, questions, samples, served=host.served, watch=watch)


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
    path = setup.out / f"{questions.protocol.task}.{model.role}.jsonl"
    return open_lines(path, header, setup.say)


def _task_fact(
    questions: Questions, models: Sequence[Model], setup: Setup, confidence: float
) -> TaskFact:
    """What one task gave, once all have answered it."""
    protocol, files, facts = questions.protocol, {}, {}
    for model in models:
        if _is_asked(model, questions):
            files[model.role] = samples = _opened(model, questions, setup)
            facts[model.role] = _fact(model, samples, questions)
    filters, pairs, drafted = [score.filter for score in facts["checkpoint"].scores], [], None
    if "source" in files:
        for name in filters:
            before, after = correct(files["source"], name), correct(files["checkpoint"], name)
            pair = paired(name, before, after, runs=protocol.repeats, confidence=confidence)
            pairs.append(pair)
    if "plain" in files:
        drafted = drafting(files["plain"], files["checkpoint"], filters)
    return TaskFact(
        protocol=protocol,
        dataset_sha256=questions.dataset_sha256,
        source=facts.get("source"),
        checkpoint=facts["checkpoint"],
        paired=tuple(pairs),
        plain=facts.get("plain"),
        drafting=drafted,
        environment={**VERSIONS, **setup.environment},
    )


def _fact(model: Model, samples: Samples, questions: Questions) -> EvaluatedFact:
    """One model's part, once all is answered; finishes the file."""
    answers = {number: answer.text for number, answer in samples.lines.items()}
    found, right = scores(questions, answers)
    finish(samples, right)
    return EvaluatedFact(
        path=model.source.where,
        scores=found,
        samples=samples.path.name,
        samples_sha256=file_sha256(samples.path),
        **counted(samples),
    )
