"""Each gate on a good checkpoint, on one broken on purpose, and on too little to tell."""

import random
import re
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
from keepmtp.validate.facts.served import Drafts, Parting, ServeCheck, counters
from keepmtp.validate.report.gates import judge
from keepmtp.validate.report.settle import mean_recovery, recovery

SIDE = LoadedModel(cls="Glm4MoeMTP", num_params=12, num_written=12)
LOADED = DryLoad(gpu="sm100", tp=1, k=1, ok=True, target=SIDE, draft=SIDE)
FINDING = Finding(
    origin="static",
    severity="error",
    where="config.json",
    says="no num_nextn_predict_layers",
    cure="Add it",
    rule="no-mtp",
)
CAST = FINDING.model_copy(
    update={"origin": "dry", "where": "down_proj", "says": "BF16 is cast into FP8."}
)
SILENT = LOADED.model_copy(update={"ok": False, "num_errors": 1})
FAILED = SILENT.model_copy(update={"gpu": "sm90", "failure": reports.REFUSED})
served = reports.served


def checked(*findings: Finding, dry: tuple[DryLoad, ...] = (LOADED,)) -> CheckData:
    return CheckData(path="out/tiny", facts=CheckpointFacts(), findings=findings, dry=dry)


def altered(role: str, k: int, serve: ServeCheck | None = None, **fields: Any) -> ServeCheck:
    """What servers did, with these fields of one run."""
    whole = serve or served(is_copy=False)
    model = getattr(whole, role)
    runs = tuple(run.model_copy(update=fields) if run.k == k else run for run in model.runs)
    return whole.model_copy(update={role: model.model_copy(update={"runs": runs})})


def reason(gate: str, gates: Gates = Gates(), **measured: Any) -> ReasonFact:  # noqa: B008
    """One gate's reason, of a checkpoint that was checked and dry-loaded."""
    judgement = judge(gates=gates, **({"check": checked()} | measured))
    (found,) = [each for each in judgement.reasons if each.gate == gate]
    assert found.says.endswith(".") and ".." not in found.says and "  " not in found.says, found
    return found


def test_a_good_checkpoint_passes_with_its_figures():
    measured = {"serve": served(is_copy=False), "evaluation": evaluation()}
    judgement = judge(check=checked(), **measured)
    assert judgement.verdict == "pass" and judgement.gates == Gates()
    assert {each.gate: each.says for each in judgement.reasons} == {
        "findings": "No error in config.json and the headers.",
        "loads": "vLLM's own classes take every tensor on sm100 (B200) at TP 1. Its own bytes were "
        "served.",
        "acceptance": "On 1,319 questions of gsm8k with k=3: 79.33 % of 120,000 drafted tokens "
        "accepted, 79.33 % of the source's. That is 100.00 % of it, at least 99.40 % at 95 % "
        "confidence (one-sided, Clopper-Pearson, a draft as one trial); at least 97.00 % is asked "
        "for.",
        "gsm8k": "gsm8k, flexible-extract: 68.92 % of 1,319 questions, the source 68.99 % (only "
        "the source gets 10 right, only the checkpoint 9): a drop of 0.08 points, at most 0.7 "
        "points at 95 % confidence (one-sided, Clopper-Pearson, paired); at most 2 points is asked "
        "for.",
    }


def test_nothing_measured_is_infeasible_and_says_what_measures():
    limits = Gates(min_mean_recovery=0.9, max_worst_drop=0.1, max_flips=0.1, min_speedup=1.0)
    judgement = judge(gates=limits, listed_tasks=("gsm8k",))
    commands = {each.gate: each.says for each in judgement.reasons}
    for gate, command in (
        ("findings", "check CHECKPOINT --record"),
        ("loads", "check CHECKPOINT --gpu sm100 --record"),
        ("acceptance", "eval CHECKPOINT"),
        ("gsm8k", "eval CHECKPOINT"),
        ("mean recovery", "eval CHECKPOINT --source SOURCE"),
        ("worst task", "eval CHECKPOINT --source SOURCE"),
        ("speed", "bench CHECKPOINT"),
        ("closeness", "closeness CHECKPOINT"),
    ):
        assert f"`keepmtp {command}`" in commands.pop(gate)
    assert not commands
    assert {(each.verdict, each.needed) for each in judgement.reasons} == {("infeasible", None)}


FAR = Parting(prompt=1, at=17, plain_token=2, token=9, gap=2.3)
DEAD = {"checkpoint": {"shares": (0.002, 0.0, 0.0)}}
COPIED = evaluation(checkpoint={"as_served": COPY, "reason": "no kernel"})
REASONS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "an error": ("findings", {"check": checked(FINDING)}, "regression", "config.json: no num_"),
    "two errors": ("findings", {"check": checked(FINDING, FINDING)}, "regression", "in all: 2."),
    "other words with drafts": (
        "findings",
        {"serve": altered("source", 1, partings=(FAR,))},
        "regression",
        "source with k=1 leaves the output without it in prompt 1 at token 17",
    ),
    "near-ties": (
        "findings",
        {"serve": altered("checkpoint", 1, partings=(FAR.model_copy(update={"gap": 0.1}),))},
        "pass",
        "",
    ),
    "a refused load": (
        "loads",
        {"check": checked(dry=(LOADED, FAILED))},
        "regression",
        "on sm90 (H100, H200) at TP 1: KeyError 'model.layers",
    ),
    "a silent fault": (
        "loads",
        {"check": checked(CAST, dry=(SILENT,))},
        "regression",
        "down_proj: BF16 is cast into FP8.",
    ),
    "a dead server": (
        "loads",
        {"serve": altered("checkpoint", 2, loaded=False, error="CUDA out of memory.")},
        "regression",
        "The server with k=2 did not come up: CUDA out of memory.",
    ),
    "a weight unwritten": (
        "loads",
        {"serve": altered("checkpoint", 1, unwritten=("model.layers.3.enorm.weight",))},
        "regression",
        "model.layers.3.enorm.weight unwritten",
    ),
    "a source's dead server": (
        "loads",
        {"serve": altered("source", 0, loaded=False, error="a source may be dead")},
        "pass",
        "",
    ),
    "a copy alone": (
        "loads",
        {"check": checked(dry=()), "serve": served()},
        "infeasible",
        "only a BF16 copy of the same weights.",
    ),
    "served alone": (
        "loads",
        {"check": checked(dry=()), "serve": served(is_copy=False)},
        "pass",
        "Its own bytes",
    ),
    "timed alone": (
        "loads",
        {"check": None, "bench": benches.bench_fact()},
        "pass",
        "Its own bytes were served.",
    ),
    "a dead draft": ("acceptance", {"evaluation": evaluation(**DEAD)}, "regression", "most 0.12 %"),
    "no draft": (
        "acceptance",
        {"evaluation": evaluation(checkpoint={"drafts": 0})},
        "regression",
        "the checkpoint drafted nothing",
    ),
    "a server's dead draft": (
        "acceptance",
        {"serve": served(is_dead=True)},
        "regression",
        "2 prompts with k=3: 0.10 %",
    ),
    "the evaluation first": (
        "acceptance",
        {"serve": served(is_dead=True), "evaluation": evaluation()},
        "pass",
        "questions",
    ),
    "no source's drafts": (
        "acceptance",
        {"evaluation": evaluation(source={"drafts": 0})},
        "infeasible",
        "Not measured of both",
    ),
    "no source's answers": (
        "acceptance",
        {"serve": served(), "evaluation": evaluation(has_source=False)},
        "infeasible",
        "serve-check's 2 prompts with k=3",
    ),
    "a source's dead draft": (
        "acceptance",
        {"evaluation": evaluation(source={"shares": (0.0, 0.0, 0.0)})},
        "infeasible",
        "none of the source's own drafted tokens",
    ),
    "a copy's drafts": ("acceptance", {"evaluation": COPIED}, "pass", "activations were not tried"),
    "a copy's answers": ("gsm8k", {"evaluation": COPIED}, "pass", "activations were not tried"),
    "wrong answers": (
        "gsm8k",
        {"evaluation": evaluation(Answers(only_source=80))},
        "regression",
        "at least 3.99 points",
    ),
    "better answers": (
        "gsm8k",
        {"evaluation": evaluation(Answers(only_source=2, only_checkpoint=60))},
        "pass",
        "at most -3.32 points",
    ),
    "no source": ("gsm8k", {"evaluation": evaluation(has_source=False)}, "infeasible", "--source"),
    "an ignorant source": (
        "gsm8k",
        {"evaluation": evaluation(Answers(both=0, only_source=20, neither=1299))},
        "infeasible",
        "the source itself gets 1.5",
    ),
    "drafts change answers": (
        "drafting",
        {"evaluation": evaluation(switched=(30, 2))},
        "regression",
        "32 of 1,319 greedy answers are another text",
    ),
    "drafts mend answers": (
        "drafting",
        {"evaluation": evaluation(switched=(2, 30))},
        "regression",
        "(exact sign test: 2.5e-07), beyond chance",
    ),
    "drafts empty answers": (
        "drafting",
        {"evaluation": evaluation(switched=(0, 0), empty=21)},
        "regression",
        "Only without drafting 21 are with text, only with it 0",
    ),
    "near-ties flip": ("drafting", {"evaluation": evaluation(switched=(12, 9))}, "pass", "near-"),
}


@pytest.mark.parametrize("case", REASONS)
def test_a_fault_turns_its_gate_and_no_other(case):
    gate, measured, verdict, words = REASONS[case]
    found = reason(gate, **measured)
    assert found.verdict == verdict and words in found.says, found
    judgement = judge(check=measured.pop("check", checked()), **measured)
    red = {each.gate for each in judgement.reasons if each.verdict == "regression"}
    if case != "the evaluation first":
        assert red == ({gate} if verdict == "regression" else set())


def test_gates_that_nothing_asks_for_are_not_there():
    gates = [each.gate for each in judge(bench=benches.bench_fact()).reasons]
    assert gates == ["findings", "loads", "acceptance", "gsm8k"]


# --- too little to tell ---------------------------------------------------------------------------


def accepting(mine: int, theirs: int, of: int = 10_000) -> ServeCheck:
    """Servers with k=1 that accepted so many of these drafts."""
    serve = served(is_copy=False)
    for role, accepted in (("checkpoint", mine), ("source", theirs)):
        drafts = Drafts(
            drafts=of, draft_tokens=of, accepted_tokens=accepted, accepted_per_position=(accepted,)
        )
        serve = altered(role, 1, serve, **counters(drafts))
        model = getattr(serve, role)
        serve = serve.model_copy(update={role: model.model_copy(update={"runs": model.runs[:2]})})
    return serve


@pytest.mark.parametrize(
    ("drafts", "verdict", "words"),
    [
        ((9_000, 9_000), "pass", "100.00 % of it"),
        ((8_900, 9_000), "pass", ""),
        ((8_730, 9_000), "infeasible", "so near the limit that no number of samples tells"),
        ((8_600, 9_000), "regression", ""),
        ((54, 57, 57), "infeasible", "it would be a regression with about "),
        # 0.05 ** (1 / 154) = 0.98074: what 154 of 154 prove, and 97 % takes 99 drafts.
        ((154, 154, 154), "pass", "at least 98.07 % at 95 % confidence"),
        ((99, 99, 99), "pass", "at least 97.01 %"),
        ((98, 98, 98), "infeasible", "at least 96.98 %"),
    ],
)
def test_acceptance_is_judged_by_an_exact_bound_of_drafts(drafts, verdict, words):
    found = reason("acceptance", serve=accepting(*drafts))
    assert found.verdict == verdict and words in found.says, found


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        (Answers(both=20, only_source=3, only_checkpoint=3, neither=14), "pass"),
        (Answers(both=20, only_source=5, only_checkpoint=2, neither=14), "regression"),
    ],
)
def test_the_needed_number_is_one_that_settles_it(answers, verdict):
    """The same shares in as many questions: the gate tells, and with less it does not."""
    first = reason("gsm8k", evaluation=evaluation(answers))
    assert first.verdict == "infeasible" and first.needed is not None
    assert f"it would be a {verdict} with about {first.needed:,} questions." in first.says
    for part, wanted in ((1.1, verdict), (0.6, "infeasible")):
        times = part * first.needed / answers.num
        counts = {name: round(times * getattr(answers, name)) for name in Answers.__slots__}
        assert reason("gsm8k", evaluation=evaluation(Answers(**counts))).verdict == wanted


def test_a_drop_exactly_at_the_limit_is_not_told_by_any_number():
    answers = Answers(both=50, only_source=4, only_checkpoint=2, neither=44)
    found = reason("gsm8k", Gates(max_drop=0.02), evaluation=evaluation(answers))
    assert (found.verdict, found.needed) == ("infeasible", None)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_more_confidence_never_makes_a_verdict_of_none(confidence):
    strict = Gates(filter="strict-match", confidence=confidence)
    found = reason("gsm8k", strict, evaluation=evaluation(Answers(only_source=22)))
    assert "strict-match: " in found.says and f"at {100 * confidence:g} % conf" in found.says
    assert found.verdict == ("pass" if confidence < 0.99 else "infeasible")


# --- all tasks ------------------------------------------------------------------------------------

LIMITS = Gates(min_mean_recovery=0.98, max_worst_drop=0.02)
GOOD = Answers(both=900, only_source=8, only_checkpoint=8, neither=84)
BAD = Answers(both=600, only_source=60, only_checkpoint=10, neither=330)
FEW = Answers(both=90, only_source=1, only_checkpoint=1, neither=8)


@pytest.mark.parametrize(
    ("fact", "verdict", "mean", "worst"),
    [
        (
            several(("gsm8k_platinum", GOOD), first=GOOD),
            "pass",
            "gsm8k, gsm8k_platinum: 100.00 % of the source's scores on average, at least 99.4",
            "at most 0.76 points",
        ),
        (
            several(("gsm8k_platinum", BAD), first=GOOD),
            "regression",
            "96.21 % of the source's scores on average, at most 97.",
            "gsm8k_platinum, flexible-extract: 61.00 % of 1,000 questions, the source 66.00 %",
        ),
        (several(("gsm8k_platinum", FEW), first=FEW), "infeasible", "with about", "with about"),
        (several(first=GOOD), "infeasible", "gsm8k_platinum: not asked", "gsm8k_platinum: not"),
        (
            several(("gsm8k_platinum", GOOD), has_source=False),
            "infeasible",
            "or the source gets nothing right",
            "",
        ),
    ],
)
def test_all_tasks_together(fact, verdict, mean, worst):
    tasks = ("gsm8k", "gsm8k_platinum")
    for gate, words in (("mean recovery", mean), ("worst task", worst)):
        found = reason(gate, LIMITS, evaluation=fact, listed_tasks=tasks)
        assert found.verdict == verdict and words in found.says, found


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


def test_a_source_that_gets_nothing_right_has_no_recovery():
    nothing = evaluation(Answers(both=0, only_source=0, only_checkpoint=5, neither=95))
    assert recovery(nothing, "flexible-extract") is None
    assert mean_recovery([nothing], "flexible-extract") is None


# --- speed ----------------------------------------------------------------------------------------


def bench(*cells: Any, device: str = "NVIDIA H200 (140 GiB)", **own: Any) -> BenchFact:
    found = benches.bench_fact(with_source=False)
    checkpoint = found.checkpoint.model_copy(update=({"cells": cells} if cells else {}) | own)
    return found.model_copy(update={"checkpoint": checkpoint, "environment": {"device": device}})


LONG = (cell(0, [10, 10], context=8192), cell(1, [5, 5], context=8192))


@pytest.mark.parametrize(
    ("fact", "least", "verdict", "words"),
    [
        # DeepSeek-V4-Flash: 193.0 over 105.9 tokens a second, with 2 % of spread each way.
        (bench(), 1.0, "pass", "k=3 is 1.82 times as fast as k=0, by the repetitions 1.75 to 1.90"),
        (bench(), 1.8, "infeasible", "too far apart to tell"),
        (bench(), 2.0, "regression", "No other k is faster"),
        # vllm #39680: 96.6 % of the drafts accepted, 342 -> 128 tokens a second.
        (bench(*benches.benched({0: 342.0, 1: 210.0, 3: 128.0}).cells), 1.0, "regression", "0.61"),
        (bench(cell(0, [100, 103]), cell(1, [102, 104])), 1.0, "infeasible", "too far apart"),
        (bench(cell(0, [102, 103]), cell(1, [99, 101])), 1.0, "regression", ""),
        (bench(*LONG, cell(0, [10, 10]), cell(1, [20, 20])), 1.0, "pass", "2.00 times"),
        (bench(as_served=COPY, reason="x"), 1.0, "infeasible", "own bytes on a GPU"),
        (bench(device="CPU: x, 2 cores"), 1.0, "infeasible", "own bytes on a GPU"),
        (bench(device=""), 1.0, "infeasible", "own bytes on a GPU"),
        (bench(cell(1, [2, 2])), 1.0, "infeasible", "k=0 and a k with drafting must both"),
        (bench(cell(0, [1, 1], concurrency=8), cell(1, [2, 2])), 1.0, "infeasible", "must both"),
        (bench(cell(0, [], error="x"), cell(1, [2, 2])), 1.0, "infeasible", "must both"),
        (bench(cell(0, [1, 1]), cell(1, [9])), 1.0, "infeasible", "must both"),
    ],
)
def test_the_spread_of_the_checkpoints_own_speed_decides(fact, least, verdict, words):
    found = reason("speed", Gates(min_speedup=least), bench=fact)
    assert found.verdict == verdict and words in found.says, found


# --- closeness ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def near(tmp_path_factory):
    """0.01 nats a token and 2 % flips, over 4,000 tokens in 40 windows."""
    return closenesses.closeness(tmp_path_factory.mktemp("found"))


@pytest.mark.parametrize(
    ("limits", "verdict", "says"),
    [
        ({"max_divergence": 0.02}, "pass", "0.01 nats a token from the source, at most 0.01"),
        ({"max_divergence": 0.02}, "pass", r"lower bound: 1\.00 % of the source's probability"),
        ({"max_divergence": 0.005}, "regression", "at least 0.00"),
        ({"max_divergence": 0.0101}, "infeasible", "it would be a pass with about "),
        ({"max_flips": 0.03}, "pass", "is another at 1.98 % of the tokens, at most 2."),
        ({"max_flips": 0.01}, "regression", "at least 1."),
        ({"max_flips": 0.0199}, "infeasible", "it would be a pass with about "),
        ({"max_flips": 0.03, "max_divergence": 0.005}, "regression", "one. The first choice"),
    ],
)
def test_closeness_is_judged_by_bounds_over_windows(limits, verdict, says, near):
    found = reason("closeness", Gates(**limits), closeness=near)
    assert found.verdict == verdict and re.search(says, found.says), found
    assert (found.needed is not None) == (verdict == "infeasible")
    assert (found.needed or 10**9) > near.tokens


def test_one_window_has_no_error_and_a_copy_is_said(near, tmp_path):
    one = closenesses.fact_of(closenesses.compared(tmp_path, closenesses.spread(1)))
    found = reason("closeness", Gates(max_divergence=1.0), closeness=one)
    assert one.stderr is None and found.verdict == "infeasible" and "two windows" in found.says
    copied = closenesses.fact_of(closenesses.compared(tmp_path, closenesses.spread()), is_copy=True)
    found = reason("closeness", Gates(max_divergence=0.02), closeness=copied)
    assert found.verdict == "pass" and found.says.endswith("were not tried.")
