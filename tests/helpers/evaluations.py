"""Evaluations as `keepmtp eval` would leave them, from counts that a test names."""

import math
from dataclasses import dataclass
from typing import Any

import reports
from data_files import table
from keepmtp.checkpoints.identity import Identity
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.facts.binomial import sign_test
from keepmtp.validate.facts.evaluated import (
    NOT_EMPTY,
    DraftingFact,
    EvaluatedFact,
    EvaluationFact,
    ScoreFact,
    SwitchFact,
    TaskFact,
)
from keepmtp.validate.facts.paired import paired
from keepmtp.validate.facts.schema import FullReport
from keepmtp.validate.facts.served import Arm

FACTS = table("helpers/facts")
FILTERS = ("strict-match", "flexible-extract")
COPY = "BF16 copy of the same weights"


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
        "scores": tuple(ScoreFact(filter=name, **score) for name in FILTERS),
        "num_questions": num,
        "num_truncated": 3 if num > 3 else 0,
        "drafts": drafts,
        "draft_tokens": k * drafts,
        "accepted_tokens": sum(accepted),
        "accepted_per_position": accepted,
        "samples": f"gsm8k.{role}.jsonl",
    }
    return EvaluatedFact(**(FACTS["evaluated"] | fields | changed))


def evaluation(
    answers: Answers = Answers(),
    *,
    source: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    has_source: bool = True,
    protocol: dict[str, Any] | None = None,
    switched: tuple[int, int] | None = None,
    empty: int = 0,
) -> EvaluationFact:
    """Both models on the same questions; `source` and `checkpoint` go to `evaluated`, `protocol` to
    `Evaluation`.

    `switched`: questions that the checkpoint gets right only with MTP off, and only with it on;
    None: it was not asked with MTP off. `empty`: answers that have a text only with MTP off.
    """
    pairs = (
        [(True, True)] * answers.both
        + [(True, False)] * answers.only_source
        + [(False, True)] * answers.only_checkpoint
        + [(False, False)] * answers.neither
    )
    before, after = zip(*pairs, strict=True)
    num, right = answers.num, sum(after)
    added = {"source": None, "paired": ()}
    if has_source:
        added["source"] = evaluated("source", sum(before), num, **(source or {}))
        added["paired"] = tuple(paired(name, before, after) for name in FILTERS)
    if switched:
        off, on = switched
        drafts = {"shares": (), "drafts": 0, "sha256": "c" * 64}
        added["plain"] = evaluated("plain", right + off - on, num, **drafts)
        added["drafting"] = DraftingFact(
            switches=(
                *(_switch(name, off, on) for name in FILTERS),
                _switch(NOT_EMPTY, empty, 0),
            ),
            num_changed=off + on + empty,
        )
    return EvaluationFact(
        protocol=Evaluation(**({"k": 3} | (protocol or {}))),
        checkpoint=evaluated("checkpoint", right, num, **(checkpoint or {})),
        **FACTS["evaluation"],
        **added,
    )


def _switch(reads: str, only_plain: int, only_drafting: int) -> SwitchFact:
    """As many questions as named switch."""
    return SwitchFact(
        reads=reads,
        only_plain=only_plain,
        only_drafting=only_drafting,
        chance=sign_test(only_plain, only_drafting),
    )


def several(
    *others: tuple[str, Answers],
    first: Answers = Answers(),
    **changed: Any,
) -> EvaluationFact:
    """GSM8K and other tasks, each with its counts; a task's `changed` fields of the checkpoint are
    those of all.
    """
    found = evaluation(first, **changed)
    tasks = [
        dict(evaluation(answers, protocol={"task": name}, **changed)) for name, answers in others
    ]
    plain = tuple(
        TaskFact(**{name: task[name] for name in TaskFact.model_fields}) for task in tasks
    )
    return found.model_copy(update={"tasks": plain})


def hostile(word: str) -> FullReport:
    """Every string of an evaluation on a copy and of its gates is `word`, its first filter's
    included.
    """
    answers = Answers(both=3, only_source=1, only_checkpoint=1, neither=1)
    fact = evaluation(answers, checkpoint={"as_served": COPY})
    full = reports.judged(evaluation=fact, identity=Identity(sha256="e" * 64, files={}))
    return reports.strange(full, word)
