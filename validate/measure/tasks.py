"""The station tasks: source and checkpoint, each with method=mtp, asked the same questions the same
way.

In: two local checkpoints, the questions of each task and a `Setup`. Out: an `EvaluationFact`, and
files of the answers.

Easy to get wrong: two scores compare only under one protocol, dataset, vLLM and set of bytes.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from ...checkpoints.identity import file_sha256
from ...checkpoints.source import Source
from ...recipes.errors import RecipeError
from ...recipes.frozen import frozen
from ...recipes.protocol import Evaluation
from ..facts.evaluated import EvaluatedFact, EvaluationFact, TaskFact
from ..facts.paired import paired
from ..facts.served import those
from . import lossless
from .harness import (
    Failures,
    Model,
    Setup,
    Work,
    drafted_by,
    has_template,
    room_for,
)
from .lm_eval_task import VERSIONS, Questions, scores
from .server import Server
from .store import Answer, finish, sum_of

_LEAST_SECONDS = 600.0


def refuse_model(source: Source, protocol: Evaluation, extra: tuple[str, ...]) -> None:
    """Refuse before anything is read at length or started.

    Raises:
        RecipeError: messages without a template to put them in.
    """
    if protocol.api == "chat" and not has_template(source, extra):
        raise RecipeError(
            source.where,
            "needs a chat template for evaluation.api chat",
            got="none beside the weights",
            cure="Set api: completions, or use -- --chat-template FILE",
        )


@frozen
class Tasks:
    """The station: source and checkpoint are asked with method=mtp, the checkpoint with MTP off as
    well, and lm-eval scores all answers.

    Attributes:
        setup, source, checkpoint: how to serve, and what.
        asked: the questions of each task, the recipe's first task first.
        has_plain: ask the checkpoint with MTP off.
    """

    setup: Setup
    source: Model | None
    checkpoint: Model
    asked: tuple[Questions, ...]
    has_plain: bool = True

    def works(self, model: Model) -> list[Work]:
        """What is asked of a checkpoint, and of it with MTP off.

        Raises:
            CheckpointError: answers that cannot be read.
        """
        works = []
        for arm in self._arms(model):
            for questions in self.asked:
                if _is_asked(arm, questions):
                    works.append(work_of(arm, questions, self.setup))
        return works

    def fact(self, failures: Failures) -> EvaluationFact:
        """What all tasks gave, once all have answered; finishes the files. Without a source the
        difference is unknown.
        """
        models = those(self.source, *self._arms(self.checkpoint))
        facts = [_task_fact(one, models, self.setup) for one in self.asked]
        return EvaluationFact(**dict(facts[0]), tasks=tuple(facts[1:]))

    def _arms(self, model: Model) -> list[Model]:
        # What the checkpoint answers otherwise with MTP off, drafting has changed.
        if self.has_plain and model.role == "checkpoint":
            return [model, replace(model, role="plain")]
        return [model]


def work_of(model: Model, questions: Questions, setup: Setup) -> Work:
    """What one server is asked, with what is answered already."""
    protocol = questions.protocol
    caching = ("--enable-prefix-caching",) * protocol.prefix_caching
    # Answers carry in their file's first line all that a score depends on; a run goes on with those
    # that have exactly its own.
    file = setup.answers(
        f"{protocol.task}.{model.role}",
        Answer,
        model,
        num=questions.num,
        protocol=protocol,
        dataset_sha256=questions.dataset_sha256,
        prompts_sha256=questions.prompts_sha256,
    )
    return Work(
        name=f"eval.{model.role}.{protocol.task}",
        model=model,
        file=file,
        asking=lambda server: nullcontext(partial(_answer, server, questions)),
        k=drafted_by(model, protocol.k),
        max_model_len=room_for(
            [item.prompt for item in questions.items],
            model.source,
            is_chat=protocol.api == "chat",
            max_tokens=protocol.max_tokens,
        ),
        concurrency=protocol.concurrency,
        words=caching,
        task=protocol.task,
    )


def _is_asked(model: Model, questions: Questions) -> bool:
    """What is sampled differs by its draws, whether it is drafted or not."""
    return model.role != "plain" or not questions.protocol.temperature


def _answer(server: Server, questions: Questions, number: int) -> Answer:
    """One answer."""
    protocol = questions.protocol
    run, at = divmod(number, len(questions.items))
    item = questions.items[at]
    asked = {
        "max_tokens": protocol.max_tokens,
        "temperature": protocol.temperature,
        "seed": protocol.seed + run,
        "stop": list(item.stop),
    }
    if protocol.top_p != 1.0:
        asked["top_p"] = protocol.top_p
    # Ten minutes, and a second for each token.
    timeout = _LEAST_SECONDS + protocol.max_tokens
    text, reason, num_tokens = server.answer(questions.sent(number), timeout=timeout, **asked)
    return Answer(
        question=number,
        prompt_sha256=sum_of(item.prompt),
        text=text,
        finish_reason=reason,
        num_tokens=num_tokens,
    )


def _task_fact(questions: Questions, models: Sequence[Model], setup: Setup) -> TaskFact:
    """What one task gave, once all have answered it; finishes the files."""
    protocol = questions.protocol
    files = {}
    facts = {}
    rights = {}
    for model in models:
        if not _is_asked(model, questions):
            continue
        role = model.role
        files[role] = samples = work_of(model, questions, setup).file
        texts = [answer.text for answer in samples.in_order()]
        found, rights[role] = scores(questions, texts)
        finish(samples, rights[role])
        answers = samples.lines.values()
        facts[role] = EvaluatedFact(
            role=role,
            path=model.source.where,
            sha256=model.identity.sha256,
            scores=found,
            num_questions=len(answers),
            num_truncated=sum([answer.finish_reason == "length" for answer in answers]),
            num_empty=sum([not answer.text.strip() for answer in answers]),
            samples=samples.path.name,
            samples_sha256=file_sha256(samples.path),
            **samples.counts,
            **samples.served,
        )
    after = rights["checkpoint"]
    pairs = []
    for name, before in rights.get("source", {}).items():
        pairs.append(paired(name, before, after[name], runs=protocol.repeats))
    drafted = None
    if "plain" in files:
        drafted = lossless.drafting(files["plain"], files["checkpoint"], list(after))
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
