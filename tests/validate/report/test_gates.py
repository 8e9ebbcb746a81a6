"""Each gate on a good checkpoint, on one broken on purpose, and on too little to tell."""

from typing import Any

import pytest
import reports
import stations
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
from stations import cell, lossless

SIDE = LoadedModel(cls="Glm4MoeMTP", num_params=12, num_written=12)
LOADED = DryLoad(vllm="0.32.0", gpu="sm100", tp=1, k=1, ok=True, target=SIDE, draft=SIDE)
FINDING = Finding(where="config.json", says="no num_nextn_predict_layers", cure="", rule="no-mtp")
CAST = FINDING.model_copy(
    update={"origin": "dry", "where": "down_proj", "says": "BF16 is cast into FP8."}
)
SILENT = LOADED.model_copy(update={"ok": False, "error": "down_proj: BF16 is cast into FP8."})
FAILED = SILENT.model_copy(
    update={"gpu": "sm90", "failure": reports.REFUSED, "error": "eh_proj: vLLM stops: KeyError"}
)
OLDER = {"vllm": "0.9.0"}
FAR = Parting(prompt=1, at=17, plain_token=2, token=9, gap=2.3)
NATIVE = reports.served(is_copy=False)
COPIED = {"as_served": COPY, "reason": "no kernel"}


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
    found = stations.bench_fact(with_source=False)
    if cells:
        own["cells"] = tuple(cell(**each) for each in cells)
    if rates:
        own["cells"] = stations.benched(rates).cells
    checkpoint = found.checkpoint.model_copy(update=own)
    return found.model_copy(update={"checkpoint": checkpoint, "environment": {"device": device}})


def asked(answers: dict[str, int] | None = None, **parts: Any) -> EvaluationFact:
    return evaluation(Answers(**answers or {}), **parts)


def of(both: int, only_source: int, only_checkpoint: int, neither: int) -> dict[str, int]:
    """Answers."""
    return locals()


def two_tasks(
    first: dict[str, int] | None = None, platinum: dict[str, int] | None = None, **parts: Any
) -> EvaluationFact:
    others = [("gsm8k_platinum", Answers(**platinum))] if platinum else []
    return several(*others, first=Answers(**first or {}), **parts)


def judged(**measured: Any) -> dict[str, ReasonFact]:
    """The reasons by gate, of a checkpoint that was checked and dry-loaded unless said otherwise."""
    found = {}
    for reason in judge(**{"check": checked()} | measured).reasons:
        assert ".." not in reason.says and "  " not in reason.says
        found[reason.gate] = reason
    return found


def turned(gate: str, title: str, says: str, usual: dict[str, ReasonFact], **measured: Any) -> None:
    """This gate says so, and every other says what it usually does."""
    found = judged(**measured)
    assert found[gate].title == title, found[gate]
    assert says in found[gate].says, found[gate]
    for other in usual.keys() - {gate}:
        assert found[other] == usual[other]


ONE_WINDOW = "Not measured in two windows or more: `keepmtp eval CHECKPOINT --only closeness` does."
LOADED_ONLY = judged()
SERVED_ONLY = judged(serve=NATIVE)
PACKED = "Served was a BF16 copy of the same weights: packed"
ONLY_A_COPY = "Served was only a BF16 copy of the same weights."
GOOD = judged(serve=NATIVE, evaluation=evaluation())


def test_nothing_measured_says_what_to_run():
    limits = Gates(max_worst_drop=0.1, max_flips=0.1, min_speedup=1.0)
    found = judged(check=checked(dry=()), gates=limits, listed_tasks=("gsm8k",))
    assert found.pop("findings").title == "pass"
    assert {reason.title for reason in found.values()} == {"not measured"}
    asks = "gsm8k: not asked, or the source gets nothing right. `keepmtp eval CHECKPOINT --source"
    for gate, says in (
        ("loads", "Not tried. `keepmtp check CHECKPOINT --gpu sm100 --record` lets vLLM load it"),
        ("acceptance", "Not measured of both source and checkpoint: `keepmtp eval CHECKPOINT`"),
        ("gsm8k", "Not measured: `keepmtp eval CHECKPOINT` does."),
        ("worst task", asks),
        ("speed", "Not measured of the checkpoint's own bytes on a GPU: `keepmtp bench"),
        ("closeness", ONE_WINDOW),
    ):
        assert found[gate].says.startswith(says)


def test_a_good_checkpoint_passes():
    """With figures, which are in tests/printed/card.md."""
    assert {reason.verdict for reason in GOOD.values()} == {"pass"}


MENDED = FAILED.model_copy(update={"cures": ("step.layer_types", "heads.a")})
OLDER_REFUSES = checked(CAST, dry=(LOADED, FAILED.model_copy(update=OLDER)))
NEWER_REFUSES = checked(CAST, dry=(FAILED, LOADED.model_copy(update=OLDER)))


@pytest.mark.parametrize(
    "check, gate, title, says",
    [
        (checked(FINDING, FINDING), "findings", "regression", "layers. Errors in all: 2."),
        (
            checked(reports.WARNED),
            "findings",
            "pass",
            "No error in config.json and the headers; 1 warning.",
        ),
        (
            checked(dry=(LOADED, FAILED)),
            "loads",
            "regression",
            "(H100, H200) at TP 1: eh_proj: vLLM stops:",
        ),
        (
            checked(CAST, dry=(SILENT,)),
            "loads",
            "regression",
            "fails on sm100 (B200) at TP 1: down_proj: BF16 is cast into FP8.",
        ),
        (
            checked(CAST, dry=(MENDED,)),
            "loads",
            "pass",
            "with keepmtp's cures step.layer_types and heads.a.",
        ),
        (checked(CAST, dry=(MENDED, SILENT)), "loads", "regression", "fails on sm100 (B200) at TP"),
        (
            OLDER_REFUSES,
            "loads",
            "pass",
            "vLLM 0.32.0 is the oldest that loads and drafts it, of 0.9.0 and 0.32.0.",
        ),
        (NEWER_REFUSES, "loads", "regression", "(H100, H200) at TP 1: eh_proj: vLLM stops:"),
        (checked(dry=()), "loads", "not measured", "Not tried. `keepmtp check CHECKPOINT --gpu"),
    ],
)
def test_findings_and_loads(check, gate, title, says):
    turned(gate, title, says, LOADED_ONLY, check=check)


NEAR_TIE = (FAR.model_copy(update={"gap": 0.1}),)


@pytest.mark.parametrize(
    "serve, gate, title, says",
    [
        (
            altered("source", 1, partings=(FAR,)),
            "findings",
            "regression",
            "Drafting changes what is written: source with k=1 leaves the output without it in "
            "prompt 1 at token 17, and no log-probability gap below 0.25 explains it.",
        ),
        (altered("checkpoint", 1, partings=NEAR_TIE), "findings", "pass", "No error"),
        (
            altered("checkpoint", 2, loaded=False, error="CUDA out of memory."),
            "loads",
            "regression",
            "The server with k=2 did not come up: CUDA out of memory.",
        ),
        (altered("source", 0, loaded=False, error="dead"), "loads", "pass", "Its own bytes were"),
        (reports.served(), "loads", "pass", ONLY_A_COPY),
        (NATIVE, "acceptance", "not measured", "On 2 prompts with k=3: 78.17 %"),
        (
            reports.served(is_dead=True),
            "acceptance",
            "regression",
            "is 0.13 % of it, at most 0.60 %",
        ),
    ],
)
def test_servers(serve, gate, title, says):
    usual = {}
    if serve.checkpoint.as_served == "native":
        usual = SERVED_ONLY
    turned(gate, title, says, usual, serve=serve)


@pytest.mark.parametrize(
    "mine, theirs, of, title, says",
    [
        (9_000, 9_000, 10_000, "pass", "at least 99.21 % at 95 % confidence"),
        (8_730, 9_000, 10_000, "not measured", "so near the limit that no number of samples tells"),
        (8_600, 9_000, 10_000, "regression", "That is 95.56 % of it, at most 96.39 %"),
        (54, 57, 57, "not measured", "at these figures it would be a regression with about"),
        # 0.05 ** (1 / 154) = 0.98074: what 154 of 154 prove, and 97 % takes 99 drafts
        (154, 154, 154, "pass", "at least 98.07 %"),
        (98, 98, 98, "not measured", "at these figures it would be a pass with about"),
    ],
)
def test_drafts_are_trials(mine, theirs, of, title, says):
    serve = reports.accepting(mine, theirs, of)
    turned("acceptance", title, says, SERVED_ONLY, serve=serve)


@pytest.mark.parametrize(
    "parts, title, says",
    [
        ({"checkpoint": {"shares": [0.002, 0.0, 0.0]}}, "regression", "That is 0.08 % of it, at"),
        (
            {"checkpoint": {"drafts": 0}},
            "regression",
            "with k=3, the checkpoint drafted nothing, and the source did.",
        ),
        (
            {"source": {"drafts": 0}},
            "not measured",
            "`keepmtp fix SOURCE --from RELEASE --out WHOLE` puts the",
        ),
        (
            {"source": {"shares": [0.0, 0.0, 0.0]}},
            "not measured",
            "none of the source's own drafted tokens was accepted.",
        ),
    ],
)
def test_acceptance_on_questions(parts, title, says):
    turned("acceptance", title, says, GOOD, evaluation=asked(**parts))


NO_FAULT = "No answer with MTP on or of the checkpoint alone has a fault."
SIXTEEN = tuple(f"{script} {number}" for script in ("Greek", "Thai") for number in range(8))


@pytest.mark.parametrize(
    "broken, verdict, says",
    [
        (((), (), ()), "pass", NO_FAULT),
        # 2 / 2**11 is below a thousandth, 2 / 2**10 is not.
        (((), (), SIXTEEN[:11]), "regression", "11 answers with MTP on alone have"),
        (((), (), SIXTEEN[:10]), "pass", "0.002), no more than chance gives."),
        (((), SIXTEEN, ()), "regression", "16 answers of the checkpoint alone have"),
        ((SIXTEEN, SIXTEEN, SIXTEEN), "pass", NO_FAULT),
        ((SIXTEEN, (), ()), "pass", NO_FAULT),
        (
            (SIXTEEN[1:], SIXTEEN[:1], SIXTEEN[:1]),
            "pass",
            "(Greek), and 15 the other way round (exact",
        ),
        (((), (), SIXTEEN[:1]), "pass", "1 answer with MTP on alone has a fault"),
        (
            ((), (), SIXTEEN),
            "regression",
            "Asked 32 at once, 16 answers with MTP on alone have a fault of characters (Greek, "
            "Thai), and 0 the other way round (exact sign test: 3.1e-05), beyond chance.",
        ),
    ],
)
def test_lossless(broken, verdict, says):
    """More faults with MTP on than off, or than the source has, beyond chance; fewer are none."""
    fact = lossless(*broken)
    found = judged(lossless=fact)["lossless"]
    assert found.verdict == verdict and says in found.says
    (note,) = fact.notes()
    assert note.startswith("MTP on against off, vLLM 0.32.0 on H200: ")
    assert "of the checkpoint" not in note, "of the source it says nothing"
    assert "lossless" not in SERVED_ONLY, "where it was not asked"


def test_one_server_alone_is_compared_with_nothing():
    fact = lossless((), (), ())
    alone = fact.checkpoint.model_copy(update={"asked": fact.checkpoint.asked[:2]})
    alone = fact.model_copy(update={"source": None, "checkpoint": alone})
    assert "lossless" not in judged(lossless=alone) and not [*alone.notes()]


def test_a_source_that_was_not_asked_leaves_both_unmeasured():
    found = judged(evaluation=asked(has_source=False))
    assert found["acceptance"].says.startswith("Not measured of both source and checkpoint")
    assert found["gsm8k"].title == "not measured"
    assert found["gsm8k"].says == (
        "The source was not evaluated: `keepmtp eval CHECKPOINT --source SOURCE` does both."
    )
    # What acceptance measured of both then counts.
    served = judged(evaluation=asked(has_source=False), serve=reports.served())["acceptance"]
    assert served.says.startswith("On 2 prompts with k=3")
    both = judged(evaluation=evaluation(), serve=reports.served(is_copy=False, is_dead=True))
    assert both == GOOD, "an evaluation that asked the source comes first"


def test_what_a_copy_gave_is_said_to_be_of_a_copy():
    found = judged(evaluation=asked(checkpoint=COPIED))
    assert found["loads"].says.endswith(ONLY_A_COPY)
    for gate in ("acceptance", "gsm8k"):
        assert found[gate].verdict == "pass"
        assert PACKED in found[gate].says


@pytest.mark.parametrize(
    "answers, title, says",
    [
        ({"only_source": 80}, "regression", "a drop of 5.11 points, at least 3.99 points"),
        (
            {"only_source": 2, "only_checkpoint": 60},
            "pass",
            "a drop of -4.26 points, at most -3.32",
        ),
        (
            {"both": 0, "only_source": 20, "neither": 1299},
            "not measured",
            "flexible-extract: the source itself gets 1.51 %, so a drop of 2 points could not be",
        ),
        (
            of(50, 4, 2, 44),
            "not measured",
            "a drop of 2 points, at most 7.24 points at 95 % confidence (one-sided, "
            "Clopper-Pearson, paired); at most 2 points is asked for. It is so near the limit",
        ),
    ],
)
def test_the_score_of_the_first_task(answers, title, says):
    usual = {"findings": GOOD["findings"], "loads": GOOD["loads"]}
    turned("gsm8k", title, says, usual, evaluation=asked(answers))


@pytest.mark.parametrize(
    "confidence, title, says",
    [
        (0.8, "pass", "gsm8k, strict-match: 68.29 % of 1,331 questions"),
        (0.95, "pass", "at most 1.75 points at 95 % confidence"),
        (0.999, "not measured", "at most 2.45 points at 99.9 % confidence"),
    ],
)
def test_confidence_and_filter_are_the_recipes(confidence, title, says):
    gates = Gates(filter="strict-match", confidence=confidence)
    turned("gsm8k", title, says, {}, evaluation=asked({"only_source": 22}), gates=gates)


@pytest.mark.parametrize(
    "switched, empty, title, says",
    [
        (
            (30, 2),
            0,
            "regression",
            "it 2 (exact sign test: 2.5e-07), beyond chance.",
        ),
        ((2, 30), 0, "regression", "2 are right by strict-match, only with it 30"),
        ((0, 0), 21, "regression", "Only without drafting 21 are with text, only with it 0 (exact"),
        ((12, 9), 0, "pass", "0.66), no more than chance gives where near-ties flip."),
    ],
)
def test_drafting_changes_answers(switched, empty, title, says):
    fact = asked(switched=switched, empty=empty)
    turned("drafting", title, says, GOOD, evaluation=fact)


def test_most_texts_are_no_near_ties_without_a_control():
    """19 of 24 texts that drafting changes are no pass until the prompts have been compared."""
    fact = asked(switched=(1, 2))
    drafting = fact.drafting.model_copy(update={"num_changed": 700})
    fact = fact.model_copy(update={"drafting": drafting})
    says = "not compared with a control: `keepmtp eval CHECKPOINT --only acceptance` shows"
    turned("drafting", "not measured", says, {}, evaluation=fact)
    runs = [*NATIVE.checkpoint.runs]
    runs[-1] = runs[-1].model_copy(update={"partings": NEAR_TIE})
    served = NATIVE.checkpoint.model_copy(update={"runs": tuple(runs)})
    serve = NATIVE.model_copy(update={"checkpoint": served})
    turned("drafting", "pass", "700 of 1,319 greedy answers", {}, serve=serve, evaluation=fact)


WELL = of(900, 8, 8, 84)
BADLY = of(600, 60, 10, 330)
FEW = of(90, 1, 1, 8)
NOTHING = of(0, 0, 5, 95)
NOT_ASKED = "gsm8k_platinum: not asked, or the source gets nothing right. `keepmtp eval CHECKPOINT"


@pytest.mark.parametrize(
    "parts, title, drop",
    [
        (
            {"first": WELL, "platinum": WELL},
            "pass",
            "gsm8k, flexible-extract: 90.80 % of 1,000 questions",
        ),
        (
            {"first": WELL, "platinum": BADLY},
            "regression",
            "gsm8k_platinum, flexible-extract: 61.00 % of 1,000 questions, the source 66.00 %",
        ),
        (
            {"first": FEW, "platinum": FEW},
            "not measured",
            "Too few to tell: at these figures it would be a pass",
        ),
        ({"first": WELL}, "not measured", NOT_ASKED),
        ({"first": WELL, "platinum": NOTHING}, "not measured", NOT_ASKED),
        (
            {"platinum": WELL, "has_source": False},
            "not measured",
            "gsm8k, gsm8k_platinum: not asked",
        ),
    ],
)
def test_all_tasks(parts, title, drop):
    gates = Gates(max_worst_drop=0.02)
    listed = ("gsm8k", "gsm8k_platinum")
    found = judged(evaluation=two_tasks(**parts), gates=gates, listed_tasks=listed)
    assert found["worst task"].title == title
    assert drop in found["worst task"].says


ON_A_GPU = "Not measured of the checkpoint's own bytes on a GPU: `keepmtp bench CHECKPOINT` there"
BOTH = "k=0 and a k with drafting must both answer one request at a time, twice or more: `keepmtp"
PLAIN = {"k": 0, "rates": [1, 1]}
TWICE = {"k": 1, "rates": [2, 2]}


@pytest.mark.parametrize(
    "parts, least, title, says",
    [
        # DeepSeek-V4-Flash: 193.0 over 105.9 tokens a second, with 2 % of spread each way.
        (
            {},
            1.0,
            "pass",
            "at least 1 times is asked for.",
        ),
        ({}, 1.8, "not measured", "The repetitions are too far apart to tell."),
        ({}, 2.0, "regression", "at least 2 times is asked for. No other k is faster."),
        # vllm #39680: 96.6 % of the drafts accepted, 342 -> 128 tokens a second.
        ({"rates": {0: 342.0, 1: 210.0, 3: 128.0}}, 1.0, "regression", "k=1 is 0.61 times as fast"),
        (
            {"cells": [{"k": 0, "rates": [100, 103]}, {"k": 1, "rates": [102, 104]}]},
            1.0,
            "not measured",
            "k=1 is 1.01 times as fast as k=0, by the repetitions 0.99 to 1.04 times",
        ),
        (COPIED, 1.0, "not measured", ON_A_GPU),
        ({"device": "CPU: x, 2 cores"}, 1.0, "not measured", ON_A_GPU),
        ({"cells": [TWICE]}, 1.0, "not measured", BOTH),
        ({"cells": [PLAIN | {"concurrency": 8}, TWICE]}, 1.0, "not measured", BOTH),
        ({"cells": [PLAIN, {"k": 1, "rates": [9]}]}, 1.0, "not measured", BOTH),
    ],
)
def test_speed(parts, least, title, says):
    loads = "Served was only a BF16 copy" if parts == COPIED else "Its own bytes were served."
    found = judged(bench=bench(**parts), gates=Gates(min_speedup=least))
    assert found["speed"].title == title
    assert says in found["speed"].says
    assert loads in found["loads"].says


LOWER = "It is a lower bound: 1.00 % of"


@pytest.mark.parametrize(
    "limits, title, says",
    [
        (
            {"max_divergence": 0.02},
            "pass",
            f"at most 0.02 nats is asked for. {LOWER}",
        ),
        ({"max_divergence": 0.005}, "regression", "at least 0.0096 nats"),
        (
            {"max_divergence": 0.0101},
            "not measured",
            f"it would be a pass with about 58,233 tokens. {LOWER}",
        ),
        (
            {"max_flips": 0.03},
            "pass",
            "at most 2.38 % at 95 % confidence",
        ),
        ({"max_flips": 0.01}, "regression", "at least 1.62 %"),
        ({"max_flips": 0.0199}, "not measured", "it would be a pass with about 2,348,323"),
        (
            {"max_flips": 0.03, "max_divergence": 0.005},
            "regression",
            "compared as one. The first choice is another at 1.98 %",
        ),
    ],
)
def test_closeness(limits, title, says, tmp_path):
    fact = stations.closeness(tmp_path)
    turned("closeness", title, says, LOADED_ONLY, closeness=fact, gates=Gates(**limits))


def test_closeness_of_one_window_and_of_a_copy(tmp_path):
    gates = Gates(max_divergence=0.02)
    one = stations.closeness(tmp_path, num_windows=1)
    turned("closeness", "not measured", ONE_WINDOW, LOADED_ONLY, closeness=one, gates=gates)
    copied = stations.closeness(tmp_path, as_served=COPY)
    says = f"compared as one. {PACKED}"
    turned("closeness", "pass", says, LOADED_ONLY, closeness=copied, gates=gates)


@pytest.mark.parametrize(
    "measured, title, says",
    [
        ({"serve": NATIVE}, "pass", "Its own bytes were served."),
        ({"bench": bench()}, "pass", "Its own bytes were served."),
        (
            {"serve": reports.served()},
            "not measured",
            "Not tried. Served was only a BF16 copy of the same weights. `keepmtp check",
        ),
    ],
)
def test_a_server_of_its_own_bytes_is_a_load(measured, title, says):
    found = judged(check=checked(dry=()), **measured)
    assert found["loads"].title == title
    assert found["loads"].says.startswith(says)


@pytest.mark.parametrize(
    "answers, verdict",
    [
        (of(20, 3, 3, 14), "pass"),
        (of(20, 5, 2, 14), "regression"),
    ],
)
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
