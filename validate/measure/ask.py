"""Asks a server the questions of an evaluation that have no answer yet, several at once, and keeps every answer.

In: a healthy `Server`, `Questions`, and the file that the answers go to. Out: the file, with all of them and a sitting.

Easy to get wrong: a request that fails is no wrong answer. The first failure ends the sitting; what is in flight is
waited for and kept, so that a question is asked again only if its answer never came.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace

from ...recipes.protocol import Evaluation
from ..facts.evaluated import ARM_TITLES
from ..facts.served import AsServed, Drafts, counters
from ..facts.step import Step
from .answers import Answer, Samples, Sitting
from .lm_eval_task import Question, Questions
from .server import Reply, Server, ServerFailed

COUNTERS_SECONDS = 2.0
"""How often vLLM's counters are read while questions are asked: what a server that dies has counted since is lost."""
MOST_STOPS = 4
"""vLLM refuses a request with more (0.32, `stop` of its protocols); lm-eval's humaneval has five."""


Watch = Callable[[Step], None]


def request_seconds(protocol: Evaluation) -> float:
    """How long one answer may take: ten minutes, and a second for each of its tokens."""
    return 600.0 + protocol.max_tokens


def ask(
    server: Server,
    asked: Questions,
    samples: Samples,
    *,
    as_served: AsServed = "native",
    reason: str = "",
    timeout: float | None = None,
    watch: Watch | None = None,
) -> None:
    """Ask what is missing in `samples`, and write down answers and vLLM's counters as they come.

    Args:
        server: fresh or not; only what it counts from here on is taken.
        asked: all questions.
        samples: of these questions.
        as_served: whether `server` runs the checkpoint's own bytes, with `reason` where not.
        timeout: seconds for one answer; default `request_seconds`.
        watch: called after each answer.

    Raises:
        ServerFailed: a request failed, in the server's words, with the number of its question.
    """
    timeout = request_seconds(asked.protocol) if timeout is None else timeout
    before, start = server.drafts(), time.monotonic()
    number, num_known = len(samples.sittings) + 1, len(samples.answers)

    def note(now: Drafts) -> None:
        samples.add(
            Sitting(
                sitting=number,
                as_served=as_served,
                reason=reason,
                seconds=round(time.monotonic() - start, 3),
                **counters(now.since(before)),
            )
        )

    num_tokens, read_at = 0, -math.inf  # at the first answer: none is ever without a sitting
    failed: tuple[Question, ServerFailed] | None = None
    for item, reply in _replies(server, [asked.items[each] for each in samples.missing], asked.protocol, timeout):
        if isinstance(reply, ServerFailed):
            failed = failed or (item, reply)
            continue
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
        if failed is None and time.monotonic() - read_at > COUNTERS_SECONDS:
            with suppress(ServerFailed):  # one that dies fails an answer too, which says more
                note(server.drafts_now())
            read_at = time.monotonic()
        if watch is not None:
            watch(_step(samples, num_tokens, len(samples.answers) - num_known, time.monotonic() - start))
    if failed is None:
        note(server.drafts())
        return
    with suppress(ServerFailed):  # it may be dead
        note(server.drafts_now())
    item, failure = failed
    total = len(asked.items)
    raise ServerFailed(
        failure.words,
        failure.log,
        asked=f"question {item.number + 1} of {total} for the {ARM_TITLES[samples.header.role]}",
        cure=f"nothing is lost: the same command asks only the {len(samples.missing)} that have no answer",
    ) from failure


def _replies(
    server: Server, items: list[Question], protocol: Evaluation, timeout: float
) -> Iterator[tuple[Question, Reply | ServerFailed]]:
    """Answers and failures as they come; after the first failure nothing more is asked."""
    failed = threading.Event()

    def reply(item: Question) -> tuple[Question, Reply | ServerFailed] | None:
        prompt = item.prompt if protocol.api == "completions" else item.messages
        if failed.is_set():
            return None
        try:
            whole = server.answer(
                prompt,
                max_tokens=item.max_tokens,
                stop=item.stop[:MOST_STOPS],
                seed=protocol.seed + item.run,
                temperature=protocol.temperature,
                top_p=protocol.top_p,
                timeout=timeout,
            )
            return item, _ended(whole, item.stop[MOST_STOPS:])
        except ServerFailed as failure:
            failed.set()
            return item, failure

    pool = ThreadPoolExecutor(protocol.concurrency)
    try:
        for future in as_completed([pool.submit(reply, item) for item in items]):
            if (replied := future.result()) is not None:
                yield replied
    finally:  # on Ctrl-C nobody waits for answers: the server is about to be ended
        pool.shutdown(wait=False, cancel_futures=True)


def _ended(reply: Reply, stop: Sequence[str]) -> Reply:
    """As the server would have ended it at the words that it was not given; its tokens were generated."""
    places = [at for word in stop if (at := reply.text.find(word)) >= 0]
    return replace(reply, text=reply.text[: min(places)], finish_reason="stop") if places else reply


def _step(samples: Samples, num_tokens: int, num_asked: int, seconds: float) -> Step:
    total, done = samples.header.num_questions, len(samples.answers)
    return Step(
        role=samples.header.role,
        doing="",
        done=done,
        total=total,
        tokens_per_second=num_tokens / seconds,
        eta_seconds=(total - done) * seconds / num_asked,
        task=samples.header.protocol.task,
    )
