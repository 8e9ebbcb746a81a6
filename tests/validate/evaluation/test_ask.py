"""Asking a server that fails: nothing counts as a wrong answer, nothing is lost, nothing is asked
twice.
"""

import json
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
from answering import FAULTS, OOM, TOO_LONG, answering
from headers import header
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.facts.step import Step
from keepmtp.validate.measure import gsm8k
from keepmtp.validate.measure.answers import Samples, correct, drafts_of, finish, read_samples
from keepmtp.validate.measure.line_file import open_lines
from keepmtp.validate.measure.lm_eval_task import Questions, questions, scores
from keepmtp.validate.measure.server import ServerFailed
from task_rows import TASK_ROWS

NUM = 30
ask = partial(gsm8k.ask, served={"as_served": "native", "reason": ""})
QUESTIONS = [f"Ann has {n} pens and buys {n}. How many?" for n in range(NUM)]
# Three are wrong, one of them cut at the limit of tokens.
ANSWERS = {
    text: f" {n} + {n} = {2 * n}\n#### {2 * n + (n in (4, 9))}" for n, text in enumerate(QUESTIONS)
}
ANSWERS[QUESTIONS[20]] = " 20 + ..."
WORDS = {
    "500": OOM,
    "400": TOO_LONG,
    "cut": "RemoteProtocolError",
    "empty": "a reply without an answer",
    "hang": "Timeout",
    "no choices": "a reply without an answer",
    "abort": "finish_reason abort",
}


@pytest.fixture
def asked(tmp_path) -> Questions:
    return built(tmp_path)


def built(tmp_path: Path, **protocol) -> Questions:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": text, "answer": f"#### {2 * n}"} for n, text in enumerate(QUESTIONS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return questions(
        Evaluation(**{"dataset": str(path), "shots": 0, "k": 2, "concurrency": 4, **protocol})
    )


def opened(tmp_path: Path, asked: Questions) -> Samples:
    first = header(
        role="checkpoint",
        protocol=asked.protocol,
        dataset_sha256=asked.dataset_sha256,
        prompts_sha256=asked.prompts_sha256,
        num_questions=len(asked.items),
    )
    return open_lines(tmp_path / "gsm8k.checkpoint.jsonl", first)


def score(asked: Questions, samples: Samples) -> tuple[float, ...]:
    facts, right = scores(asked, {number: answer.text for number, answer in samples.lines.items()})
    finish(samples, right)
    return tuple(fact.value for fact in facts)


def test_every_question_is_asked_once_and_greedily(asked, tmp_path):
    samples, steps = opened(tmp_path, asked), list[Step]()
    with answering(ANSWERS, tmp_path / "log") as (server, requests):
        ask(server, asked, samples, watch=steps.append)
    assert sorted(request["question"] for request in requests) == sorted(QUESTIONS)
    for request in requests:
        assert (
            request["path"] == "/v1/completions"
            and request["temperature"] == 0.0
            and request["seed"] == 1234
        )
        assert request["max_tokens"] == 1024 and request["stop"] == [
            "Question:",
            "</s>",
            "<|im_end|>",
        ]
    assert not samples.missing and [step.done for step in steps] == list(range(1, NUM + 1))
    assert steps[-1].eta_seconds == 0.0 and steps[0].eta_seconds and steps[-1].tokens_per_second > 0
    assert score(asked, samples) == (27 / 30, 27 / 30)
    assert [
        answer.question for answer in samples.lines.values() if answer.finish_reason == "length"
    ] == [20]
    drafts = drafts_of(samples)
    assert (drafts.drafts, drafts.draft_tokens, drafts.accepted_per_position) == (90, 180, (90, 0))
    assert read_samples(samples.path).lines == samples.lines, "the file says the same"


def test_what_was_counted_before_is_not_counted(asked, tmp_path):
    with answering(ANSWERS, tmp_path / "log") as (server, _):
        server.answer(
            f"Question: {QUESTIONS[0]}\nAnswer:", max_tokens=4, stop=(), seed=0, timeout=9
        )
        samples = opened(tmp_path, asked)
        ask(server, asked, samples)
    assert drafts_of(samples).drafts == 90


def test_chat_sends_messages(tmp_path):
    asked = built(tmp_path, api="chat", shots=2)
    samples = opened(tmp_path, asked)
    with answering(ANSWERS, tmp_path / "log") as (server, requests):
        ask(server, asked, samples)
    roles = ["user", "assistant", "user", "assistant", "user"]
    for request in requests:
        assert request["path"] == "/v1/chat/completions" and "prompt" not in request
        assert [turn["role"] for turn in request["messages"]] == roles
    assert score(asked, samples) == (27 / 30, 27 / 30)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_sitting_and_the_next_asks_only_the_rest(fault, asked, tmp_path):
    """The twelfth request fails; then a good server. The score is that of a run without a fault."""

    def at_the_twelfth(number: int) -> str:
        time.sleep(0.5 * (number > 12))  # the failure is known by then, on a busy machine too
        return fault * (number == 12)

    samples = opened(tmp_path, asked)
    with (
        answering(ANSWERS, tmp_path / "log", at_the_twelfth) as (server, requests),
        pytest.raises(ServerFailed) as caught,
    ):
        ask(server, asked, samples, timeout=2.0 if fault == "hang" else 60.0)
    message, left = str(caught.value), len(samples.missing)
    assert WORDS[fault] in message, message
    failed = next(request["question"] for number, request in enumerate(requests, 1) if number == 12)
    assert (
        f"must answer question {QUESTIONS.index(failed) + 1} of {NUM} for the checkpoint; got "
        in message
    )
    assert (
        f"the same command asks only the {left} that are missing." in message
        and str(tmp_path / "log") in message
    )
    assert QUESTIONS.index(failed) in samples.missing, "no answer is not a wrong answer"
    # A server that has closed a connection is given five seconds to say why it died.
    most = NUM - 1 if fault in ("cut", "hang") else 15
    assert 11 <= NUM - left <= most, "what was in flight is kept, what was not is not asked"

    again = opened(tmp_path, asked)
    assert again.lines == samples.lines
    with answering(ANSWERS, tmp_path / "log") as (server, later):
        ask(server, asked, again)
    assert sorted(request["question"] for request in later) == sorted(
        QUESTIONS[number] for number in samples.missing
    )
    assert score(asked, again) == (27 / 30, 27 / 30) and list(again.sittings) == [1, 2]
    assert drafts_of(again).drafts == 3 * (len(requests) + len(later)), "counters of both sittings"


def test_a_server_that_dies_is_quoted_from_its_log(asked, tmp_path):
    samples = opened(tmp_path, asked)
    with answering(ANSWERS, tmp_path / "log", lambda number: "cut" * (number >= 7)) as (server, _):
        threading.Timer(0.5, server.process.kill).start()
        with pytest.raises(ServerFailed, match="CUDA out of memory"):
            ask(server, asked, samples)
    assert len(samples.lines) == 6


def test_counters_survive_a_server_that_cannot_be_asked_any_more(asked, tmp_path, monkeypatch):
    """Read while asking; the last ones that were read stand."""
    monkeypatch.setattr("keepmtp.validate.measure.harness.NOTE_SECONDS", 0.0)
    samples = opened(tmp_path, asked)
    with answering(ANSWERS, tmp_path / "log") as (server, requests):
        fault = ServerFailed("gone", tmp_path / "log")
        real = type(server).answer

        def answer(self, prompt, **settings):
            if len(requests) >= 16:
                monkeypatch.setattr(
                    type(server), "drafts_now", lambda _: (_ for _ in ()).throw(fault)
                )
                raise fault
            return real(self, prompt, **settings)

        monkeypatch.setattr(type(server), "answer", answer)
        with pytest.raises(ServerFailed):
            ask(server, asked, samples)
    found = opened(tmp_path, asked)
    assert found.sittings and drafts_of(found).drafts >= 3 * 12 and found.sittings[1].seconds > 0


def test_ctrl_c_does_not_wait_for_answers(asked, tmp_path):
    samples = opened(tmp_path, asked)
    with answering(ANSWERS, tmp_path / "log", lambda number: "hang" * (number > 4)) as (server, _):

        def stop(step: Step) -> None:
            if step.done == 4:
                raise KeyboardInterrupt

        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ask(server, asked, samples, watch=stop)
        assert time.monotonic() - start < 15 and len(samples.lines) == 4


def test_runs_are_sampled_with_a_seed_each(tmp_path):
    asked = built(tmp_path, repeats=2, temperature=0.6, top_p=0.95)
    samples = opened(tmp_path, asked)
    with answering(ANSWERS, tmp_path / "log") as (server, requests):
        ask(server, asked, samples)
    assert len(requests) == 2 * NUM == len(samples.lines) and not samples.missing
    assert {(each["temperature"], each["top_p"]) for each in requests} == {(0.6, 0.95)}
    seeds = [each["seed"] for each in requests]
    assert sorted(seeds) == sorted([asked.protocol.seed] * NUM + [asked.protocol.seed + 1] * NUM)
    assert score(asked, samples)[0] == pytest.approx(1 - 3 / NUM)
    again = read_samples(samples.path)
    assert (
        correct(again, "strict-match") == correct(samples, "strict-match")
        and len(again.lines) == 2 * NUM
    )


def test_an_answer_that_lm_eval_begins_is_continued(tmp_path):
    """HumanEval's instruct form and RULER's end with the assistant's own words."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in TASK_ROWS["humaneval"].rows))
    found = questions(Evaluation(task="humaneval", dataset=str(path)), runs_code=True)
    samples = opened(tmp_path, found)
    with answering(defaultdict(lambda: "    return 1\nprint(2)\nclass"), tmp_path / "log") as (
        server,
        requests,
    ):
        ask(server, found, samples)
    assert {(each.text, each.finish_reason) for each in samples.lines.values()} == {
        ("    return 1", "stop")
    }
    for request in requests:
        assert len(request["stop"]) == 4 < len(found.items[0].stop), (
            "vLLM takes no more; ours ends it at the others"
        )
        assert request["messages"][-1]["role"] == "assistant"
        assert (request["continue_final_message"], request["add_generation_prompt"]) == (
            True,
            False,
        )
