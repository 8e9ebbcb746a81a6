"""Asking a server that fails: nothing counts as a wrong answer, nothing is lost, nothing is asked
twice.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from answering import FAULTS, OOM, TOO_LONG, answering
from commands import GLM
from data_files import put_lines
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.run.progress import Step
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.facts.served import total
from keepmtp.validate.measure import harness, tasks
from keepmtp.validate.measure.harness import Host, Model, Setup
from keepmtp.validate.measure.lm_eval_task import Questions, questions, scores
from keepmtp.validate.measure.server import ServerFailed
from keepmtp.validate.measure.store import Answer, Samples, finish, read_lines
from keepmtp.validate.measure.tasks import work_of
from real_vllm import H100

MODEL = Model(role="checkpoint", source=open_source(GLM), identity=identify(GLM))
NUM = 30
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
    "abort": "choices.0.finish_reason: must be one of stop, length",
}


def built(tmp_path: Path, **protocol) -> Questions:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": text, "answer": f"#### {2 * n}"} for n, text in enumerate(QUESTIONS)]
    put_lines(path, rows)
    fixed = {"dataset": str(path), "shots": 0, "k": 2, "concurrency": 4}
    return questions(Evaluation(**(fixed | protocol)))


@pytest.fixture
def asked(tmp_path) -> Questions:
    return built(tmp_path)


@pytest.fixture
def ask(monkeypatch, tmp_path):
    """Asks a server what is missing; returns the file of answers."""
    setup = Setup(vllm=H100, out=tmp_path / "out")

    def answers(
        server, asked: Questions, *, timeout: float = 60.0, watch=lambda _: None
    ) -> Samples:
        monkeypatch.setattr(harness, "serving", lambda *_, **__: nullcontext(server))
        native = {"folder": GLM, "as_served": "native", "reason": ""}
        host = Host(model=MODEL, setup=replace(setup, watch=watch), **native)
        if server is not None:
            monkeypatch.setattr(tasks, "_LEAST_SECONDS", timeout - asked.protocol.max_tokens)
            host.answer(work_of(MODEL, asked, setup))
        return work_of(MODEL, asked, setup).file

    return answers


def score(asked: Questions, samples: Samples) -> tuple[float, ...]:
    facts, right = scores(asked, [answer.text for answer in samples.in_order()])
    finish(samples, right)
    return tuple(fact.value for fact in facts)


def drafts_of(samples: Samples):
    return total(list(samples.sittings.values()))


def test_every_question_is_asked_once_and_greedily(ask, asked, tmp_path):
    steps = list[Step]()
    with answering(ANSWERS, tmp_path / "log") as (server, requests):
        # What was counted before is not counted.
        server.answer(
            f"Question: {QUESTIONS[0]}\nAnswer:", max_tokens=4, stop=(), seed=0, timeout=9
        )
        samples = ask(server, asked, watch=steps.append)
    assert sorted(request["question"] for request in requests[1:]) == sorted(QUESTIONS)
    stop = ["Question:", "</s>", "<|im_end|>"]
    sent = {
        "path": "/v1/completions",
        "temperature": 0,
        "seed": 1234,
        "max_tokens": 1024,
        "stop": stop,
    }
    assert all(sent.items() <= request.items() for request in requests[1:])
    assert not samples.missing and [step.done for step in steps] == list(range(1, NUM + 1))
    assert steps[-1].eta_seconds == 0.0 and steps[0].eta_seconds and steps[-1].tokens_per_second > 0
    assert score(asked, samples) == (27 / 30, 27 / 30)
    cut = [number for number, each in samples.lines.items() if each.finish_reason == "length"]
    assert cut == [20]
    drafts = drafts_of(samples)
    assert (drafts.drafts, drafts.draft_tokens, drafts.accepted_per_position) == (90, 180, (90, 0))
    assert read_lines(samples.path, Answer).lines == samples.lines, "the file says the same"


@pytest.mark.few(4)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_the_sitting_and_the_next_asks_only_the_rest(fault, ask, asked, tmp_path):
    """The twelfth request fails; then a good server. The score is that of a run without a fault."""

    def at_the_twelfth(number: int) -> str:
        time.sleep(0.5 * (number > 12))  # the failure is known by then, on a busy machine too
        return fault * (number == 12)

    with (
        answering(ANSWERS, tmp_path / "log", at_the_twelfth) as (server, requests),
        pytest.raises(ServerFailed) as caught,
    ):
        ask(server, asked, timeout=2.0 if fault == "hang" else 60.0)
    samples = ask(None, asked)
    message, left = str(caught.value), len(samples.missing)
    failed = QUESTIONS.index(requests[11]["question"])
    assert WORDS[fault] in message and str(tmp_path / "log") in message
    assert f"must answer question {failed + 1} of {NUM} for the checkpoint; got " in message
    assert f"the same command asks only the {left} that are missing." in message
    assert failed in samples.missing, "no answer is not a wrong answer"
    # A server that has closed a connection is given five seconds to say why it died.
    most = NUM - 1 if fault in ("cut", "hang") else 15
    assert 11 <= NUM - left <= most, "what was in flight is kept, what was not is not asked"
    with answering(ANSWERS, tmp_path / "log") as (server, later):
        again = ask(server, asked)
    missing = sorted(QUESTIONS[number] for number in samples.missing)
    assert sorted(request["question"] for request in later) == missing
    assert score(asked, again) == (27 / 30, 27 / 30) and list(again.sittings) == [1, 2]
    assert drafts_of(again).drafts == 3 * (len(requests) + len(later)), "counters of both sittings"


def test_counters_survive_a_server_that_cannot_be_asked_any_more(ask, asked, tmp_path, monkeypatch):
    """Read while asking; the last ones that were read stand."""
    monkeypatch.setattr("keepmtp.validate.measure.harness.NOTE_SECONDS", 0.0)
    with answering(ANSWERS, tmp_path / "log") as (server, requests):
        fault = ServerFailed("gone", tmp_path / "log")
        real = type(server).answer

        def gone(*_, **__):
            raise fault

        def answer(self, prompt, **settings):
            if len(requests) >= 16:
                monkeypatch.setattr(type(server), "drafts_now", gone)
                raise fault
            time.sleep(0.05)  # as long as counters are read
            return real(self, prompt, **settings)

        monkeypatch.setattr(type(server), "answer", answer)
        with pytest.raises(ServerFailed):
            ask(server, asked)
    found = ask(None, asked)
    assert drafts_of(found).drafts >= 3 * 12


def test_runs_that_are_sampled_are_asked_with_seeds_of_their_own(ask, tmp_path):
    asked = built(tmp_path, temperature=0.6, top_p=0.95, repeats=2)
    with answering(ANSWERS, tmp_path / "log") as (server, requests):
        samples = ask(server, asked)
    assert len(requests) == 2 * NUM == len(samples.lines) and not samples.missing
    assert {(each["temperature"], each["top_p"]) for each in requests} == {(0.6, 0.95)}
    seeds = sorted(each["seed"] for each in requests)
    assert seeds == [asked.protocol.seed] * NUM + [asked.protocol.seed + 1] * NUM
    assert score(asked, samples)[0] == pytest.approx(1 - 3 / NUM)
