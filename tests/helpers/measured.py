"""A checkpoint with all its results beside it, as the stations leave them, small enough to be made
in a moment.
"""

from pathlib import Path
from typing import Any

import reports
from data_files import put_json
from evaluations import FILTERS, Answers, evaluation
from keepmtp.checkpoints.identity import Identity, file_sha256, identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.facts.evaluated import EvaluationFact
from keepmtp.validate.facts.results import report_folder, write_result
from keepmtp.validate.facts.served import ResultFact, TargetFact, counters
from keepmtp.validate.measure.store import Answer, Header, Samples, Sitting, finish
from keepmtp.validate.report.check_data import record_static
from releases import source_layout, write_checkpoint

ANSWERS = Answers(both=50, only_source=2, only_checkpoint=3, neither=5)
LAX = {"max_drop": 0.2, "min_acceptance": 0.9}
SERVED_AT = "2030-01-02 03:04:05 UTC"
ASKED_AT = "2030-01-02 04:00:00 UTC"


def checkpoint(folder: Path, *, record: dict[str, Any] | None = None) -> Path:
    """A tiny checkpoint that passes the static check, with a record of its own, or none if `record`
    is empty.
    """
    write_checkpoint(folder, *source_layout("glm-4.7"), data="random")
    if record is None or record:
        put_json(folder / "keepmtp.json", record or recorded(gates=LAX))
    return folder


def recorded(
    *, made_from: dict[str, Any] | None = None, summary: object = None, **recipe: Any
) -> dict[str, Any]:
    """keepmtp.json of a folder's checkpoint, with these parts of its source and its recipe."""
    source = {"name": "glm", "revision": "local", "files": {}}
    return {
        "keepmtp": "0.1.0",
        "recipe": reports.FACTS["recipe"] | recipe,
        "source": source | (made_from or {}),
        **({} if summary is None else {"calibration": summary}),
        **reports.FACTS["record"],
    }


def measured(
    folder: Path,
    *,
    answers: Answers = ANSWERS,
    record: dict[str, Any] | None = None,
) -> Path:
    """Check, server and GSM8K of the checkpoint in `folder`, which is made; returns its evidence
    folder.
    """
    checkpoint(folder, record=record)
    evidence = report_folder(folder)
    identity = identify(folder, cache=evidence)
    record_static(evidence, open_source(folder), identity)
    write(evidence, reports.served(is_copy=False), identity)
    fact = asked(evidence, identity.sha256, answers)
    write(evidence, fact, identity, made_at=ASKED_AT)
    return evidence


def write(
    evidence: Path,
    fact: ResultFact,
    identity: Identity,
    made_at: str = SERVED_AT,
    target: TargetFact | None = None,
) -> None:
    """A result, as vLLM 0.32.0 gave it."""
    write_result(
        evidence,
        fact,
        checkpoint=identity,
        vllm=reports.VLLM,
        target=target,
        made_at=made_at,
    )


def asked(evidence: Path, sha256: str, answers: Answers) -> EvaluationFact:
    """An evaluation and the files of answers that it follows from."""
    fact = evaluation(answers, checkpoint={"sha256": sha256})
    sums = {}
    for model in fact.arms:
        right = [True] * answers.both + [model.role == "source"] * answers.only_source
        right += [model.role == "checkpoint"] * answers.only_checkpoint + [False] * answers.neither
        first = header(
            role=model.role,
            protocol=fact.protocol,
            dataset_sha256=fact.dataset_sha256,
            prompts_sha256="",
            num=answers.num,
            checkpoint_sha256=model.sha256,
        )
        path = evidence / model.samples
        path.unlink(missing_ok=True)
        samples = Samples(path, first)
        for number in range(answers.num):
            samples.add(
                Answer(
                    question=number,
                    prompt_sha256="e" * 64,
                    text="#### 8",
                    num_tokens=130,
                    finish_reason="length" if number < model.num_truncated else "stop",
                )
            )
        served = {"as_served": "native", "reason": ""}
        samples.add(Sitting(sitting=1, **served, **counters(model)))
        finish(samples, dict.fromkeys(FILTERS, right))
        sums[model.role] = {"sha256": model.sha256, "samples_sha256": file_sha256(path)}
    return evaluation(answers, **sums)


def header(**changed: Any) -> Header:
    """Of three questions to the source, unless something else is said."""
    return Header(
        **{
            "role": "source",
            "protocol": Evaluation(),
            "dataset_sha256": "d",
            "prompts_sha256": "p",
            "num": 3,
            "checkpoint_sha256": "c",
            "vllm": "0.32.0",
            "device": "CPU",
            **changed,
        }
    )
