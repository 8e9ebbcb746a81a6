"""Each gate on a good checkpoint, on one broken on purpose, and on too little to tell."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import benches
import closenesses
import pytest
import reports
from benches import cell
from evaluations import COPY, Answers, evaluation, several
from keepmtp.recipes.protocol import Gates
from keepmtp.validate.facts.benched import BenchFact
from keepmtp.validate.facts.dry_load import DryLoad, LoadedModel
from keepmtp.validate.facts.findings import CheckpointFacts, Finding
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import ReasonFact
from keepmtp.validate.facts.served import Parting, ServeCheck
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.settle import mean_recovery
from printed import printed

SIDE = LoadedModel(cls="Glm4MoeMTP", num_params=12, num_written=12)
LOADED = DryLoad(vllm="0.32.0", gpu="sm100", tp=1, k=1, ok=True, target=SIDE, draft=SIDE)
FINDING = Finding(where="config.json", says="no num_nextn_predict_layers", cure="", rule="no-mtp")
CAST = FINDING.model_copy(
    update={"origin": "dry", "where": "down_proj", "says": "BF16 is cast into FP8."}
)
SILENT = LOADED.model_copy(
    update={"ok": False, "num_errors": 1, "error": "down_proj: BF16 is cast into FP8."}
)
FAILED = SILENT.model_copy(
    update={"gpu": "sm90", "failure": reports.REFUSED, "error": "eh_proj: vLLM stops: KeyError"}
)
OLDER = {"vllm": "0.9.0"}
FAR = Parting(prompt=1, at=17, plain_token=2, token=9, gap=2.3)
NATIVE = reports.served(is_copy=False)
LIMITS = Gates(min_mean_recovery=0.98, max_worst_drop=0.02)
GOOD = Answers(both=900, only_source=8, only_checkpoint=8, neither=84)
BAD = Answers(both=600, only_source=60, only_checkpoint=10, neither=330)
FEW = Answers(both=90, only_source=1, only_checkpoint=1, neither=8)
UNLEARNED = Answers(both=0, only_source=0, only_checkpoint=5, neither=95)


def checked(*findings: Finding, dry: tuple[DryLoad, ...] = (LOADED,)) -> CheckData:
    return CheckData(path="out/tiny", facts=CheckpointFacts(), findings=findings, dry=dry)


def altered(role: str, k: int, **fields: Any) -> ServeCheck:
    """What servers did, with these fields of one run."""
    model = getattr(NATIVE, role)
    runs = tuple(run.model_copy(update=fields) if run.k == k else run for run in model.runs)
    return NATIVE.model_copy(update={role: model.model_copy(update={"runs": runs})})


def bench(*cells: Any, device: str = "NVIDIA H200 (140 GiB)", **own: Any) -> BenchFact:
    found = benches.bench_fact(with_source=False)
    checkpoint = found.checkpoint.model_copy(update=({"cells": cells} if cells else {}) | own)
    return found.model_copy(update={"checkpoint": checkpoint, "environment": {"device": device}})


def of_checkpoint(**changed: Any) -> Any:
    return evaluation(checkpoint=changed)


def of_source(**changed: Any) -> Any:
    return evaluation(source=changed)


NO_DRAFTS, DEAD = {"drafts": 0}, {"shares": (0.002, 0.0, 0.0)}
COPIED = {"as_served": COPY, "reason": "no kernel"}
FINDINGS = {
    "an error": checked(FINDING),
    "two errors": checked(FINDING, FINDING),
    "a refused load": checked(dry=(LOADED, FAILED)),
    "a silent fault": checked(CAST, dry=(SILENT,)),
    "an older vLLM refuses": checked(CAST, dry=(LOADED, FAILED.model_copy(update=OLDER))),
    "a newer vLLM refuses": checked(CAST, dry=(FAILED, LOADED.model_copy(update=OLDER))),
    "no dry load": checked(dry=()),
    "no check": None,
}
SERVED = {
    "as it should": NATIVE,
    "other words with drafts": altered("source", 1, partings=(FAR,)),
    "near-ties": altered("checkpoint", 1, partings=(FAR.model_copy(update={"gap": 0.1}),)),
    "a dead server": altered("checkpoint", 2, loaded=False, error="CUDA out of memory."),
    "a weight unwritten": altered("checkpoint", 1, unwritten=("model.layers.3.enorm.weight",)),
    "a source's dead server": altered("source", 0, loaded=False, error="a source may be dead"),
    "a copy": reports.served(),
    "a dead draft": reports.served(is_dead=True),
} | {
    # 0.05 ** (1 / 154) = 0.98074: what 154 of 154 prove, and 97 % takes 99 drafts.
    f"{mine:,} of {of:,} drafts accepted, {theirs:,} of the source's": reports.accepting(
        mine, theirs, of
    )
    for mine, theirs, of in (
        (9_000, 9_000, 10_000),
        (8_900, 9_000, 10_000),
        (8_730, 9_000, 10_000),
        (8_600, 9_000, 10_000),
        (54, 57, 57),
        (154, 154, 154),
        (99, 99, 99),
        (98, 98, 98),
    )
}
EVALUATED = {
    "as it should": evaluation(),
    "a dead draft": of_checkpoint(**DEAD),
    "no draft": of_checkpoint(**NO_DRAFTS),
    "no draft of the source": of_source(**NO_DRAFTS),
    "a source's dead draft": of_source(shares=(0.0, 0.0, 0.0)),
    "a copy": of_checkpoint(**COPIED),
    "wrong answers": evaluation(Answers(only_source=80)),
    "better answers": evaluation(Answers(only_source=2, only_checkpoint=60)),
    "an ignorant source": evaluation(Answers(both=0, only_source=20, neither=1299)),
    "no source": evaluation(has_source=False),
    "drafts change answers": evaluation(switched=(30, 2)),
    "drafts mend answers": evaluation(switched=(2, 30)),
    "drafts empty answers": evaluation(switched=(0, 0), empty=21),
    "near-ties flip": evaluation(switched=(12, 9)),
    "a drop at the limit": evaluation(
        Answers(both=50, only_source=4, only_checkpoint=2, neither=44)
    ),
}
TASKS = {
    "good at both": several(("gsm8k_platinum", GOOD), first=GOOD),
    "bad at one": several(("gsm8k_platinum", BAD), first=GOOD),
    "few questions": several(("gsm8k_platinum", FEW), first=FEW),
    "one not asked": several(first=GOOD),
    "no source": several(("gsm8k_platinum", GOOD), has_source=False),
    "a source that gets nothing right": several(("gsm8k_platinum", UNLEARNED), first=GOOD),
}
BENCHED = {
    # DeepSeek-V4-Flash: 193.0 over 105.9 tokens a second, with 2 % of spread each way.
    "faster": bench(),
    # vllm #39680: 96.6 % of the drafts accepted, 342 -> 128 tokens a second.
    "slower": bench(*benches.benched({0: 342.0, 1: 210.0, 3: 128.0}).cells),
    "a little faster": bench(cell(0, [100, 103]), cell(1, [102, 104])),
    "a little slower": bench(cell(0, [102, 103]), cell(1, [99, 101])),
    "a copy": bench(**COPIED),
    "a processor": bench(device="CPU: x, 2 cores"),
    "an unknown device": bench(device=""),
    "no k=0": bench(cell(1, [2, 2])),
    "k=0 under another load": bench(cell(0, [1, 1], concurrency=8), cell(1, [2, 2])),
    "k=0 failed": bench(cell(0, [], error="x"), cell(1, [2, 2])),
    "one repetition": bench(cell(0, [1, 1]), cell(1, [9])),
}
NEAR = (
    {"max_divergence": 0.02},
    {"max_divergence": 0.005},
    {"max_divergence": 0.0101},
    {"max_flips": 0.03},
    {"max_flips": 0.01},
    {"max_flips": 0.0199},
    {"max_flips": 0.03, "max_divergence": 0.005},
)


TOGETHER = {
    "served natively with a dead draft, and evaluated": {
        "serve": reports.served(is_copy=False, is_dead=True),
        "evaluation": evaluation(),
    },
    "served on a copy, and evaluated without a source": {
        "serve": reports.served(),
        "evaluation": evaluation(has_source=False),
    },
    "served alone": {"check": None, "serve": NATIVE},
    "served on a copy alone": {"check": None, "serve": reports.served()},
    "timed alone": {"check": None, "bench": bench()},
}


def cases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is judged, after a line that says what it is."""
    two = {"gates": LIMITS, "listed_tasks": ("gsm8k", "gsm8k_platinum")}
    for title, part, facts, others in (
        ("check", "check", FINDINGS, {}),
        ("serve-check", "serve", SERVED, {}),
        ("eval", "evaluation", EVALUATED, {}),
        ("two tasks", "evaluation", TASKS, two),
        ("bench", "bench", BENCHED, {"gates": Gates(min_speedup=1.0)}),
    ):
        for name, fact in facts.items():
            yield f"{title}: {name}", {part: fact} | others
    strict = evaluation(Answers(only_source=22))
    for confidence in (0.8, 0.95, 0.999):
        gates = Gates(filter="strict-match", confidence=confidence)
        yield f"eval: confidence {confidence:g}", {"evaluation": strict, "gates": gates}
    for least in (1.8, 2.0):
        yield f"bench: at least {least}", {"bench": bench(), "gates": Gates(min_speedup=least)}
    near = closenesses.closeness(folder)
    for limits in NEAR:
        yield f"closeness: {limits}", {"closeness": near, "gates": Gates(**limits)}
    one = closenesses.closeness(folder, num_windows=1)
    yield "closeness: one window", {"closeness": one, "gates": Gates(max_divergence=1.0)}
    copied = closenesses.closeness(folder, as_served=COPY)
    yield "closeness: a copy", {"closeness": copied, "gates": Gates(max_divergence=0.02)}
    for name, parts in TOGETHER.items():
        yield name, parts


def test_every_verdict_has_its_reason(tmp_path):
    """Of each case what differs from a good checkpoint that was checked and dry-loaded, and maybe
    evaluated: a fault turns its gate and no other.
    """

    def said(name: str, usual: tuple[ReasonFact, ...] = (), **measured: Any) -> list[str]:
        reasons = [each for each in judge(**measured).reasons if each not in usual]
        return [name, *(f"    {each.gate}: {each.title}. {each.says}" for each in reasons)]

    limits = Gates(min_mean_recovery=0.9, max_worst_drop=0.1, max_flips=0.1, min_speedup=1.0)
    good = {"check": checked(), "serve": NATIVE, "evaluation": evaluation()}
    text = said("nothing measured", gates=limits, listed_tasks=("gsm8k",))
    text += said("a good checkpoint", **good)
    evaluated, loaded = judge(**good).reasons, judge(check=checked()).reasons
    for name, measured in cases(tmp_path):
        usual = evaluated if "evaluation" in measured else loaded
        text += said(name, usual, **{"check": checked()} | measured)
    assert not [line for line in text if ".." in line or "  " in line.strip()]
    printed("gates.txt", "\n".join(text) + "\n")


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        (Answers(both=20, only_source=3, only_checkpoint=3, neither=14), "pass"),
        (Answers(both=20, only_source=5, only_checkpoint=2, neither=14), "regression"),
    ],
)
def test_the_needed_number_is_one_that_settles_it(answers, verdict):
    """The same shares in as many questions: the gate tells, and with less it does not."""

    def reason(answers: Answers) -> ReasonFact:
        return judge(check=checked(), evaluation=evaluation(answers)).reasons[-1]

    first = reason(answers)
    assert (first.gate, first.verdict) == ("gsm8k", "infeasible") and first.needed
    assert f"it would be a {verdict} with about {first.needed:,} questions." in first.says
    for part, wanted in ((1.1, verdict), (0.6, "infeasible")):
        times = part * first.needed / answers.num
        counts = {name: round(times * getattr(answers, name)) for name in Answers.__slots__}
        assert reason(Answers(**counts)).verdict == wanted


def test_the_interval_of_a_mean_recovery_holds():
    """Drawn 300 times from two tasks whose true recoveries are known: 95 % intervals hold as often
    as they say.
    """
    generator = random.Random(0)
    shares = {"gsm8k": (0.80, 0.04, 0.02, 0.14), "gsm8k_platinum": (0.50, 0.03, 0.03, 0.44)}
    truth = sum((both + mine) / (both + theirs) for both, theirs, mine, _ in shares.values()) / 2
    held = 0
    for _ in range(300):
        drawn = [generator.choices(range(4), weights, k=400) for weights in shares.values()]
        first, second = (
            Answers(**dict(zip(Answers.__slots__, map(d.count, range(4)), strict=True)))
            for d in drawn
        )
        fact = several(("gsm8k_platinum", second), first=first)
        mean = mean_recovery(fact.by_task, "flexible-extract")
        assert mean is not None
        held += mean.interval[0] <= truth <= mean.interval[1]
    # 285 are expected, with a standard deviation of 3.8.
    assert 270 <= held <= 298, held
