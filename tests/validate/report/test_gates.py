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
from keepmtp.validate.facts.evaluated import EvaluationFact
from keepmtp.validate.facts.findings import CheckpointFacts, Finding
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import ReasonFact
from keepmtp.validate.facts.served import Parting, ServeCheck
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.settle import mean_recovery
from printed import printed
from tables import table

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
CASES = table("validate/report/test_gates")


def checked(*findings: Finding, dry: tuple[DryLoad, ...] = (LOADED,)) -> CheckData:
    return CheckData(path="out/tiny", facts=CheckpointFacts(), findings=findings, dry=dry)


def altered(role: str, k: int, **fields: Any) -> ServeCheck:
    """What servers did, with these fields of one run."""
    model = getattr(NATIVE, role)
    runs = tuple(run.model_copy(update=fields) if run.k == k else run for run in model.runs)
    return NATIVE.model_copy(update={role: model.model_copy(update={"runs": runs})})


def bench(
    cells: list[dict[str, Any]] | None = None,
    *,
    rates: dict[int, float] | None = None,
    device: str = "NVIDIA H200 (140 GiB)",
    **own: Any,
) -> BenchFact:
    found = benches.bench_fact(with_source=False)
    if cells:
        own["cells"] = tuple(cell(**each) for each in cells)
    if rates:
        own["cells"] = benches.benched(rates).cells
    checkpoint = found.checkpoint.model_copy(update=own)
    return found.model_copy(update={"checkpoint": checkpoint, "environment": {"device": device}})


def asked(answers: dict[str, int] | None = None, **parts: Any) -> EvaluationFact:
    return evaluation(Answers(**answers or {}), **parts)


def two_tasks(
    first: dict[str, int] | None = None, platinum: dict[str, int] | None = None, **parts: Any
) -> EvaluationFact:
    others = [("gsm8k_platinum", Answers(**platinum))] if platinum else []
    return several(*others, first=Answers(**first or {}), **parts)


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
    f"{mine:,} of {of:,} drafts accepted, {theirs:,} of the source's": reports.accepting(
        mine, theirs, of
    )
    for mine, theirs, of in CASES["accepted"]
}
EVALUATED = {name: asked(**parts) for name, parts in CASES["evaluated"].items()}
TASKS = {name: two_tasks(**parts) for name, parts in CASES["tasks"].items()}
BENCHED = {name: bench(**parts) for name, parts in CASES["benched"].items()}
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
    for limits in CASES["near"]:
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


@pytest.mark.parametrize("answers, verdict", CASES["needed"])
def test_the_needed_number_is_one_that_settles_it(answers, verdict):
    """The same shares in as many questions: the gate tells, and with less it does not."""

    def reason(answers: Answers) -> ReasonFact:
        return judge(check=checked(), evaluation=evaluation(answers)).reasons[-1]

    answers = Answers(**answers)
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
