"""Evaluations as `keepmtp eval` would leave them, from counts that a test names."""

import math
from dataclasses import dataclass
from typing import Any

import reports
from keepmtp.checkpoints.identity import Identity
from keepmtp.recipes.protocol import Evaluation, Gates
from keepmtp.validate.check.check import check
from keepmtp.validate.facts.binomial import sign_test
from keepmtp.validate.facts.evaluated import (
    NOT_EMPTY,
    Arm,
    ChangedAnswer,
    DraftingFact,
    EvaluatedFact,
    EvaluationFact,
    ScoreFact,
    SwitchFact,
    TaskFact,
)
from keepmtp.validate.facts.paired import paired
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.facts.served import AsServed, ServeCheck
from keepmtp.validate.report.check_data import check_data
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.report import assemble

FILTERS = ("strict-match", "flexible-extract")
COPY: AsServed = "BF16 copy of the same weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Questions that both, only one, or none of two models gets right."""

    both: int = 900
    only_source: int = 10
    only_checkpoint: int = 9
    neither: int = 400

    @property
    def num(self) -> int:
        return self.both + self.only_source + self.only_checkpoint + self.neither


def evaluated(
    role: Arm,
    num_right: int,
    num: int,
    *,
    k: int = 3,
    shares: tuple[float, ...] = (0.93, 0.81, 0.64),
    drafts: int = 40_000,
    **changed: Any,
) -> EvaluatedFact:
    """One model: `shares` of its drafts are accepted up to each position; `changed` are fields of
    the fact.
    """
    accepted = tuple(round(share * drafts) for share in shares[:k])
    value = num_right / num
    score = {"value": value, "stderr": math.sqrt(value * (1 - value) / max(1, num - 1))}
    fields = {
        "role": role,
        "path": "models/tiny" if role == "source" else "out/tiny.nvfp4",
        "sha256": role[0] * 64,
        "as_served": "native",
        "reason": "",
        "scores": tuple(ScoreFact(filter=name, **score) for name in FILTERS),
        "num_questions": num,
        "num_truncated": 3 if num > 3 else 0,
        "num_empty": 0,
        "num_tokens": 130 * num,
        "seconds": 620.4,
        "drafts": drafts,
        "draft_tokens": k * drafts,
        "accepted_tokens": sum(accepted),
        "accepted_per_position": accepted,
        "sittings": 1,
        "samples": f"gsm8k.{role}.jsonl",
        "samples_sha256": "f" * 64,
    }
    return EvaluatedFact(**(fields | changed))


def evaluation(
    answers: Answers | None = None,
    *,
    source: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    has_source: bool = True,
    protocol: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    switched: tuple[int, int] | None = None,
    empty: int = 0,
) -> EvaluationFact:
    """Both models on the same questions; `source` and `checkpoint` go to `evaluated`, `protocol` to
    `Evaluation`.

    `switched`: questions that the checkpoint gets right only with MTP off, and only with it on;
    None: it was not asked with MTP off. `empty`: answers that have a text only with MTP off.
    """
    told = answers or Answers()
    pairs = (
        [(True, True)] * told.both
        + [(True, False)] * told.only_source
        + [(False, True)] * told.only_checkpoint
        + [(False, False)] * told.neither
    )
    before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    theirs = evaluated("source", sum(before), told.num, **(source or {}))
    off = {"shares": (), "drafts": 0, "sha256": "c" * 64}
    third = (
        evaluated("plain", sum(after) + switched[0] - switched[1], told.num, **off)
        if switched
        else None
    )
    return EvaluationFact(
        protocol=Evaluation(**({"k": 3} | (protocol or {}))),
        dataset_sha256="d" * 64,
        source=theirs if has_source else None,
        checkpoint=evaluated("checkpoint", sum(after), told.num, **(checkpoint or {})),
        paired=tuple(paired(name, before, after) for name in FILTERS) if has_source else (),
        environment=environment
        or {"lm-eval": "0.4.13", "vllm": "0.32.0", "device": "CPU: Xeon, 2 cores"},
        plain=third,
        drafting=_drafting(sum(after), told.num, switched, empty) if switched else None,
    )


def _drafting(num_right: int, num: int, switched: tuple[int, int], empty: int) -> DraftingFact:
    """As many questions as named switch, the first ones of all."""

    def switch(reads: str, right: int, only_plain: int, only_drafting: int) -> SwitchFact:
        return SwitchFact(
            reads=reads,
            both=right - only_drafting,
            only_plain=only_plain,
            only_drafting=only_drafting,
            neither=num - right - only_plain,
            chance=sign_test(only_plain, only_drafting),
            questions=tuple(range(min(20, only_plain + only_drafting))),
        )

    shown = ChangedAnswer(question=7, plain="... so it is 8", drafting="... so it is 9")
    return DraftingFact(
        switches=(
            *(switch(name, num_right, *switched) for name in FILTERS),
            switch(NOT_EMPTY, num - empty, empty, 0),
        ),
        num_changed=sum(switched) + empty,
        changed=(shown,) * (sum(switched) > 0),
    )


def several(
    *others: tuple[str, Answers], first: Answers | None = None, **changed: Any
) -> EvaluationFact:
    """GSM8K and other tasks, each with its counts; a task's `changed` fields of the checkpoint are
    those of all.
    """
    found = evaluation(first, **changed)
    tasks = [evaluation(answers, protocol={"task": name}, **changed) for name, answers in others]
    plain = [
        TaskFact(**{key: value for key, value in dict(one).items() if key != "tasks"})
        for one in tasks
    ]
    return found.model_copy(update={"tasks": tuple(plain)})


def judged(
    found: EvaluationFact, gates: Gates | None = None, serve: ServeCheck | None = None
) -> FullReport:
    """A report of a checkpoint that was checked, evaluated and judged."""
    data = check_data(check(reports.MODEL))
    judgement = judge(gates=gates or Gates(), check=data, serve=serve, evaluation=found)
    return assemble(
        data,
        vllm=reports.VLLM,
        made_at=reports.AT,
        serve=serve,
        evaluation=found,
        judgement=judgement,
        identity=Identity(sha256="e" * 64, files={}),
    )


def hostile(word: str) -> FullReport:
    """Every string of an evaluation that a stranger may choose is `word`, names of filters
    included.
    """
    fact = evaluation(
        Answers(both=3, only_source=1, only_checkpoint=1, neither=1),
        environment={word: word},
        source={"path": word, "reason": word},
        checkpoint={"path": word, "reason": word, "as_served": COPY},
        protocol={"dataset": f"{word}.jsonl", "limit": 6},
    )
    told = fact.model_dump() | {"dataset_sha256": word}
    for model in (told["source"], told["checkpoint"]):
        model["scores"][0]["filter"] = word
    told["paired"][0]["filter"] = word
    full = judged(EvaluationFact.model_validate(told))
    assert full.judgement
    reasons = tuple(
        reason.model_copy(update={"says": word, "gate": word}) for reason in full.judgement.reasons
    )
    judgement = full.judgement.model_copy(update={"reasons": reasons})
    return full.model_copy(
        update={"judgement": judgement, "identity": Identity(sha256=word, files={})}
    )
