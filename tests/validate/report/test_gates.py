"""Each gate on a good checkpoint, on one broken on purpose, and on too little to tell."""

import math
from typing import Any

import pytest
import reports
from evaluations import COPY, Answers, evaluation
from keepmtp.recipes.protocol import Evaluation, Gates
from keepmtp.validate.facts.dry_load import DryLoad, LoadedModel, LoadFailure
from keepmtp.validate.facts.evaluated import EvaluationFact
from keepmtp.validate.facts.findings import CheckpointFacts, Finding
from keepmtp.validate.facts.results import CheckData
from keepmtp.validate.facts.schema import JudgementFact, ReasonFact
from keepmtp.validate.facts.served import Drafts, Parting, ServeCheck, counters
from keepmtp.validate.report.gates import judge

GATES = Gates()
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
LAX = Gates(min_acceptance=0.5, max_drop=0.5)


def checked(*findings: Finding, dry: tuple[DryLoad, ...] = (LOADED,)) -> CheckData:
    return CheckData(path="out/tiny", facts=CheckpointFacts(), findings=findings, dry=dry)


CHECKED = checked()
served = reports.served


def altered(role: str, k: int, serve: ServeCheck | None = None, **fields: Any) -> ServeCheck:
    """What servers did, with these fields of one run."""
    whole = serve or served()
    model = getattr(whole, role)
    runs = tuple(run.model_copy(update=fields) if run.k == k else run for run in model.runs)
    return whole.model_copy(update={role: model.model_copy(update={"runs": runs})})


def judged(
    gates: Gates = GATES,
    *,
    check: CheckData | None = CHECKED,
    serve: ServeCheck | None = None,
    evaluation: EvaluationFact | None = None,
) -> JudgementFact:
    return judge(gates=gates, check=check, serve=serve, evaluation=evaluation)


def reason(judgement: JudgementFact, gate: str) -> ReasonFact:
    own = [each.gate for each in judgement.reasons if each.gate != "drafting"]
    assert own == ["findings", "loads", "acceptance", "gsm8k"]
    (found,) = [each for each in judgement.reasons if each.gate == gate]
    assert found.says.endswith(".") and ".." not in found.says and "  " not in found.says, (
        found.says
    )
    return found


def test_a_good_checkpoint_passes_with_its_figures():
    judgement = judged(serve=served(is_copy=False), evaluation=evaluation())
    assert judgement.verdict == "pass" and judgement.gates == GATES
    assert all(each.needed is None for each in judgement.reasons)
    assert reason(judgement, "findings").says == "No error in config.json and the headers."
    assert reason(judgement, "loads").says == (
        "vLLM's own classes take every tensor on sm100 (B200) at TP 1. Its own bytes were served."
    )
    assert reason(judgement, "acceptance").says == (
        "On 1,319 questions of gsm8k with k=3: 79.33 % of 120,000 drafted tokens accepted, 79.33 "
        "% of the source's "
        "120,000. That is 100.00 % of it, at least 99.40 % at 95 % confidence (one-sided, "
        "Clopper-Pearson, a draft as "
        "one trial); at least 97 % must be kept."
    )
    assert reason(judgement, "gsm8k").says == (
        "flexible-extract: 68.92 % of 1,319 questions, the source 68.99 %: 0.08 points fewer "
        "(only the source gets 10 "
        "right, only the checkpoint 9), a drop of at most 0.7 points at 95 % confidence "
        "(one-sided, Clopper-Pearson, "
        "paired); at most 2 points may be lost."
    )


def test_nothing_measured_is_infeasible_and_says_what_measures():
    judgement = judged(check=None)
    assert judgement.verdict == "infeasible"
    for gate, command in (
        ("findings", "check CHECKPOINT --record"),
        ("loads", "check CHECKPOINT --gpu sm100 --record"),
        ("acceptance", "eval CHECKPOINT"),
        ("gsm8k", "eval CHECKPOINT"),
    ):
        found = reason(judgement, gate)
        assert (
            found.verdict == "infeasible"
            and f"`keepmtp {command}`" in found.says
            and found.needed is None
        )


# --- the twins: a fault for each gate, and its name in the reason ---------------------------------

FAILED = LOADED.model_copy(
    update={
        "ok": False,
        "gpu": "sm90",
        "failure": LoadFailure(
            stage="load",
            role="draft",
            type="KeyError",
            words="'model.layers.3.eh_proj.weight_scale'",
        ),
    }
)
CAST = FINDING.model_copy(
    update={"origin": "dry", "where": "down_proj", "says": "BF16 is cast into FP8."}
)
SILENT = LOADED.model_copy(update={"ok": False, "num_errors": 1})
DEAD = {"checkpoint": {"shares": (0.002, 0.0, 0.0)}}
TWINS = {
    "an error": (
        "findings",
        {"check": checked(FINDING)},
        "config.json: no num_nextn_predict_layers.",
    ),
    "two errors": ("findings", {"check": checked(FINDING, FINDING)}, ", and 1 more error."),
    "a refused load": (
        "loads",
        {"check": checked(dry=(LOADED, FAILED))},
        "on sm90 (H100, H200) at TP 1: KeyError: 'model.layers",
    ),
    "a silent fault": (
        "loads",
        {"check": checked(CAST, dry=(SILENT,))},
        "down_proj: BF16 is cast into FP8.",
    ),
    "a dead draft": (
        "acceptance",
        {"evaluation": evaluation(**DEAD)},
        "at most 0.12 % at 95 % confidence",
    ),
    "no draft": (
        "acceptance",
        {"evaluation": evaluation(checkpoint={"drafts": 0})},
        "the checkpoint drafted nothing",
    ),
    "a dead draft of a server": (
        "acceptance",
        {"serve": served(is_dead=True)},
        "2 prompts with k=3: 0.10 %",
    ),
    "answers that drafting changes": (
        "drafting",
        {"evaluation": evaluation(switched=(30, 2))},
        "(exact sign test: 2.5e-07). 1,287 of 1,319 greedy answers",
    ),
    "answers that drafting empties": (
        "drafting",
        {"evaluation": evaluation(switched=(0, 0), empty=21)},
        "Only without drafting 21 are with text, only with it 0",
    ),
    "wrong answers": (
        "gsm8k",
        {"evaluation": evaluation(Answers(only_source=80))},
        "a drop of at least 3.99 points",
    ),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_fault_turns_its_gate_red_and_no_other(twin):
    gate, broken, words = TWINS[twin]
    judgement = judged(**({"serve": served(), "evaluation": None} | broken))
    found = reason(judgement, gate)
    assert judgement.verdict == found.verdict == "regression" and words in found.says, found.says
    assert [each.gate for each in judgement.reasons if each.verdict == "regression"] == [gate]


def test_drafting_that_flips_near_ties_is_no_fault():
    """As many for the better as for the worse; and a checkpoint that was not asked with MTP off has
    no such gate.
    """
    found = reason(
        judged(serve=served(is_copy=False), evaluation=evaluation(switched=(12, 9))), "drafting"
    )
    assert found.verdict == "pass" and found.says.startswith(
        "1,298 of 1,319 greedy answers are the same text"
    ), found
    assert (
        "near-ties may flip the others. Only without drafting 12 are right by strict-match, only "
        "with it 9"
    ) in found.says
    assert "drafting" not in [each.gate for each in judged(evaluation=evaluation()).reasons]
    better = reason(judged(evaluation=evaluation(switched=(2, 30))), "drafting")
    assert better.verdict == "regression", (
        "right more often is no proof of equal computation either"
    )


def test_a_server_that_dies_or_lacks_a_weight_is_red():
    dead = altered(
        "checkpoint", 2, served(is_copy=False), loaded=False, error="CUDA out of memory."
    )
    found = reason(judged(serve=dead), "loads")
    assert (found.verdict, found.says) == (
        "regression",
        "The server with k=2 did not come up: CUDA out of memory.",
    )
    unwritten = altered("checkpoint", 1, unwritten=("model.layers.3.enorm.weight",))
    assert "model.layers.3.enorm.weight unwritten" in reason(judged(serve=unwritten), "loads").says
    source = altered("source", 0, loaded=False, error="a source may be dead")
    assert reason(judged(serve=source), "loads").verdict == "pass"


def test_drafting_that_changes_what_is_written_is_a_finding():
    """Of the checkpoint or of the source; with the twin that parts at a near-tie."""
    far = Parting(prompt=1, at=17, plain_token=2, token=9, gap=2.3)
    for role in ("checkpoint", "source"):
        found = reason(judged(serve=altered(role, 1, partings=(far, far))), "findings")
        assert found.verdict == "regression"
        assert found.says == (
            f"Drafting changes what is written: {role} with k=1 leaves the output without it in "
            "prompt 1 at token 17: "
            "9 instead of 2, log-probability gap 2.300, more than a near-tie's 0.25, and 1 more "
            "output."
        )
    unknown = far.model_copy(update={"gap": None})
    assert (
        "unknown, more"
        in reason(judged(serve=altered("checkpoint", 1, partings=(unknown,))), "findings").says
    )
    near = far.model_copy(update={"gap": 0.1})
    assert (
        reason(judged(serve=altered("checkpoint", 1, partings=(near,))), "findings").verdict
        == "pass"
    )


def test_a_source_that_did_not_come_up_leaves_acceptance_open_and_says_so():
    serve = served()
    assert serve.source is not None
    dead = serve.source.runs[0].model_copy(
        update={"loaded": False, "error": "ValueError: no kernel"}
    )
    alone = serve.model_copy(update={"source": serve.source.model_copy(update={"runs": (dead,)})})
    found = reason(judged(serve=alone), "acceptance")
    assert found.verdict == "infeasible"
    assert found.says.endswith("A server did not come up: source, k=0: ValueError: no kernel.")


# --- servers alone --------------------------------------------------------------------------------


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
    ("mine", "verdict"),
    [
        (9_000, "pass"),
        (8_900, "pass"),
        (8_730, "infeasible"),
        (8_600, "regression"),
        (0, "regression"),
    ],
)
def test_acceptance_of_servers_is_judged_against_the_source(mine, verdict):
    """10,000 drafts each, 0.9 of the source's accepted: 97 % of it is 8,730."""
    assert reason(judged(serve=accepting(mine, 9_000)), "acceptance").verdict == verdict


def test_few_drafts_of_servers_are_no_regression():
    """54 of 57 against 57 of 57, 94.7 % of it: below the limit, and too few to tell."""
    found = reason(judged(serve=accepting(54, 57, 57)), "acceptance")
    assert (
        found.verdict == "infeasible"
        and "Too few to tell" in found.says
        and "prompts." in found.says
    )
    assert reason(judged(serve=accepting(5, 57, 57)), "acceptance").verdict == "regression"


@pytest.mark.parametrize(
    ("drafts", "bound", "verdict"),
    [(154, "98.07", "pass"), (99, "97.01", "pass"), (98, "96.98", "infeasible")],
)
def test_everything_accepted_is_as_sure_as_the_exact_limit(drafts, bound, verdict):
    """0.05 ** (1 / 154) = 0.98074: what 154 of 154 prove, and 97 % takes 99 drafts."""
    found = reason(judged(serve=accepting(drafts, drafts, drafts)), "acceptance")
    assert found.verdict == verdict
    words = "% at 95 % confidence (one-sided, Clopper-Pearson, a draft as one trial)"
    assert f"That is 100.00 % of it, at least {bound} {words}" in found.says
    assert (found.needed is None) == (verdict == "pass") and found.needed in (None, 99)


def test_a_source_whose_own_draft_is_dead_decides_nothing():
    found = reason(judged(serve=accepting(0, 0)), "acceptance")
    assert found.verdict == "infeasible" and "none of the source's own 10,000" in found.says


def test_a_server_that_did_not_come_up_leaves_acceptance_open():
    dead = altered(
        "checkpoint", 1, accepting(9_000, 9_000), loaded=False, error="ValueError: no kernel"
    )
    judgement = judged(serve=dead)
    assert reason(judgement, "loads").verdict == judgement.verdict == "regression"
    found = reason(judgement, "acceptance")
    assert (
        found.verdict == "infeasible"
        and "did not come up: checkpoint, k=1: ValueError" in found.says
    )


# --- too little to tell ---------------------------------------------------------------------------


def test_a_copy_alone_does_not_load_the_checkpoint():
    found = reason(judged(check=checked(dry=()), serve=served()), "loads")
    assert (
        found.verdict == "infeasible"
        and "only a BF16 copy of the same weights was served" in found.says
    )
    assert (
        reason(judged(check=checked(dry=()), serve=served(is_copy=False)), "loads").verdict
        == "pass"
    )
    assert reason(judged(serve=served()), "loads").says.endswith(
        "Served was only a BF16 copy of the same weights."
    )


def test_too_few_questions_say_how_many_are_needed():
    few = evaluation(
        Answers(both=30, only_source=2, only_checkpoint=1, neither=20), protocol={"limit": 53}
    )
    found = reason(judged(evaluation=few), "gsm8k")
    assert found.verdict == "infeasible" and found.needed is not None and found.needed > 53
    assert f"it would pass with about {found.needed:,} questions." in found.says
    whole = reason(judged(evaluation=few.model_copy(update={"protocol": Evaluation()})), "gsm8k")
    assert whole.says.endswith(f"{found.needed:,} questions, more than this dataset has.")
    answers = Answers(both=90, only_source=6, only_checkpoint=1, neither=20)
    worse = reason(judged(evaluation=evaluation(answers)), "gsm8k")
    assert (
        worse.verdict == "infeasible" and f"it would fail with about {worse.needed:,}" in worse.says
    )


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        (Answers(both=20, only_source=3, only_checkpoint=3, neither=14), "pass"),
        (Answers(both=20, only_source=5, only_checkpoint=2, neither=14), "regression"),
    ],
)
def test_the_needed_number_is_one_that_settles_it(answers, verdict):
    """The same shares in as many questions: the gate tells, and with a tenth less it does not."""
    first = reason(judged(evaluation=evaluation(answers)), "gsm8k")
    assert first.verdict == "infeasible" and first.needed is not None

    def asked(num: float) -> str:
        times = num / answers.num
        more = Answers(
            **{name: round(times * getattr(answers, name)) for name in Answers.__dataclass_fields__}
        )
        return reason(judged(evaluation=evaluation(more)), "gsm8k").verdict

    assert asked(1.1 * first.needed) == verdict, "whole questions are no exact shares"
    assert asked(0.6 * first.needed) == "infeasible"


def test_one_question_is_never_enough():
    found = reason(
        judged(evaluation=evaluation(Answers(both=1, only_source=0, only_checkpoint=0, neither=0))),
        "gsm8k",
    )
    assert found.verdict == "infeasible" and found.needed


def test_a_drop_exactly_at_the_limit_is_not_told_by_any_number():
    """Two of a hundred questions lost, and two points are the limit."""
    answers = Answers(both=50, only_source=4, only_checkpoint=2, neither=44)
    found = reason(judged(Gates(max_drop=0.02), evaluation=evaluation(answers)), "gsm8k")
    assert (found.verdict, found.needed) == ("infeasible", None)
    assert "It lies on the limit itself, or so near that no number of samples tells." in found.says


def test_a_gain_passes_and_is_called_one():
    found = reason(
        judged(evaluation=evaluation(Answers(only_source=2, only_checkpoint=60))), "gsm8k"
    )
    assert (
        found.verdict == "pass"
        and "points more" in found.says
        and "a gain of at least 3." in found.says
    )
    same = reason(judged(evaluation=evaluation(Answers(only_source=0, only_checkpoint=0))), "gsm8k")
    assert same.verdict == "pass" and "as many (only the source gets 0 right" in same.says


def test_a_source_that_was_not_evaluated_or_knows_nothing():
    found = reason(judged(evaluation=evaluation(has_source=False)), "gsm8k")
    assert found.verdict == "infeasible" and "--source" in found.says
    ignorant = evaluation(Answers(both=0, only_source=20, only_checkpoint=0, neither=1299))
    found = reason(judged(evaluation=ignorant), "gsm8k")
    assert found.verdict == "infeasible" and "the source itself gets 1.52 % of 1,319" in found.says


def test_few_drafted_tokens_say_how_many_are_needed_and_in_how_many_questions():
    both = {"source": {"drafts": 200}, "checkpoint": {"drafts": 200}}
    found = reason(judged(evaluation=evaluation(**both)), "acceptance")
    assert found.verdict == "infeasible" and found.needed is not None and found.needed > 600
    questions = math.ceil(found.needed / 600 * 1319)
    assert (
        f"it would pass with about {found.needed:,} drafted tokens, about {questions:,} questions."
        in found.says
    )
    drafts = math.ceil(found.needed / 3)
    more = {name: {"drafts": math.ceil(1.01 * drafts)} for name in both}
    assert reason(judged(evaluation=evaluation(**more)), "acceptance").verdict == "pass"
    less = {name: {"drafts": math.floor(0.9 * drafts)} for name in both}
    assert reason(judged(evaluation=evaluation(**less)), "acceptance").verdict == "infeasible"


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (
            evaluation(source={"shares": (0.0, 0.0, 0.0)}),
            "none of the source's own 120,000 drafted tokens",
        ),
        (evaluation(source={"drafts": 0}), "Not measured of both"),
        (evaluation(source={"drafts": 0}, checkpoint={"drafts": 0}), "Not measured of both"),
        (evaluation(has_source=False), "Not measured of both"),
    ],
)
def test_a_source_without_drafts_leaves_nothing_to_keep(fact, words):
    found = reason(judged(evaluation=fact), "acceptance")
    assert found.verdict == "infeasible" and found.needed is None and words in found.says


def test_a_server_is_asked_where_the_evaluation_has_no_counters():
    found = reason(judged(serve=served(), evaluation=evaluation(has_source=False)), "acceptance")
    assert "serve-check's 2 prompts with k=3" in found.says and "BF16 copy" in found.says


# --- what a reader must know ----------------------------------------------------------------------


def test_two_measurements_that_disagree_are_both_told():
    """The larger one judges; the other is in the sentence."""
    judgement = judged(serve=served(is_dead=True, is_copy=False), evaluation=evaluation())
    found = reason(judgement, "acceptance")
    assert (
        found.verdict == "pass"
        and "The other measurement says regression: On serve-check's 2 prompts" in found.says
    )
    assert (
        "other measurement"
        not in reason(judged(serve=served(), evaluation=evaluation()), "acceptance").says
    )


def test_a_copy_is_said_to_be_one():
    judgement = judged(evaluation=evaluation(checkpoint={"as_served": COPY, "reason": "no kernel"}))
    for gate in ("acceptance", "gsm8k"):
        assert (
            "packed kernels and quantized activations were not tried"
            in reason(judgement, gate).says
        )
    assert "packed kernels" not in str(judged(evaluation=evaluation()).reasons)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_more_confidence_never_makes_a_verdict_of_none(confidence):
    """What is told at a confidence is told at each lower one, and the other filter's score is not
    judged.
    """
    fact = evaluation(Answers(only_source=22))
    strict = Gates(filter="strict-match", confidence=confidence)
    found = reason(judged(strict, evaluation=fact), "gsm8k")
    assert (
        found.says.startswith("strict-match: ")
        and f"at {100 * confidence:g} % confidence" in found.says
    )
    assert found.verdict == ("pass" if confidence < 0.99 else "infeasible")


def test_loads_and_warnings_are_counted_together():
    full = reports.whole(is_copy=False)
    judgement = judged(
        LAX, check=checked(*full.findings, dry=full.dry), serve=full.serve, evaluation=evaluation()
    )
    assert judgement.verdict == "pass"
    assert (
        "sm90 (H100, H200), sm100 (B200) and sm120 (RTX PRO 6000, RTX 5090) at TP 1 and 4"
        in reason(judgement, "loads").says
    )
    assert reason(judgement, "findings").says.endswith("; 1 warning.")
