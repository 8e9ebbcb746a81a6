"""Tool calls through real vLLM servers on the CPU: a release that calls tools, a twin with a broken
draft, and one that is broken in other scripts alone.
"""

import json
from pathlib import Path

import pytest
import written_values
from commands import ROOT
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.protocol import Evaluation, Gates
from keepmtp.validate.facts.evaluated import EvaluationFact
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.store import AnswersHeader, read_lines
from keepmtp.validate.measure.tasks import Tasks
from keepmtp.validate.measure.tool_calls import conversations
from keepmtp.validate.report.gates import judge
from real_vllm import NEEDS_VLLM, UNIPROC, measure

TOOLS = ROOT / "models" / "tiny-tools"
NUM = 20  # two of each row of our own
ASKED = Evaluation(task="tool-calls", limit=NUM, k=2, max_tokens=128, concurrency=8)
# As byte-level BPE writes ASCII: a letter is itself, blanks and controls come from U+0100 on.
ASCII = {chr(code) for code in (*range(0x21, 0x7F), *range(0x100, 0x122))}
READ = {"ended", "JSON", "schema"}

pytestmark = NEEDS_VLLM


def model(role, folder: Path) -> Model:
    return Model(role=role, source=open_source(folder), identity=identify(folder))


def evaluated(
    folder: Path, out: Path, *, has_plain: bool, protocol: Evaluation = ASKED
) -> EvaluationFact:
    setup = Setup(
        vllm=find_vllm(), out=out, timeout=400, extra=("--tool-call-parser", "hermes", *UNIPROC)
    )
    how = {"setup": setup, "confidence": 0.95, "has_plain": has_plain}
    models = {"source": model("source", TOOLS), "checkpoint": model("checkpoint", folder)}
    return measure(Tasks(asked=(conversations(protocol),), **models, **how))


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def drafted(out) -> EvaluationFact:
    """The release against a twin whose MTP block is noise, with MTP on and off."""
    twin = written_values.noisy(
        TOOLS, out / "draft", r"layers\.2\..*proj", lambda value: 4 * value.std()
    )
    return evaluated(twin, out, has_plain=True)


def scores(arm) -> dict[str, float]:
    return {score.filter: score.value for score in arm.scores}


@pytest.mark.full
def test_a_release_that_knows_its_calls_is_right_in_each_way(drafted):
    found = scores(drafted.source)
    assert found.keys() == {"expected", "streamed", "cached", "cached streamed", *READ}
    assert min(found.values()) > 0.9 and all(found[name] == 1.0 for name in READ)
    assert drafted.source.acceptance > 0.9


@pytest.mark.full
def test_a_broken_draft_changes_no_answer_and_loses_acceptance(drafted):
    checkpoint, plain = drafted.checkpoint, drafted.plain
    assert checkpoint.acceptance < 0.5 and plain.acceptance is None
    assert scores(checkpoint) == pytest.approx(scores(drafted.source), abs=0.051)
    assert drafted.drafting.num_changed <= 2, "near-ties alone may flip"
    judged = judge(gates=Gates(), evaluation=drafted)
    verdicts = {reason.gate: reason.verdict for reason in judged.reasons}
    assert verdicts["drafting"] == "pass" and verdicts["acceptance"] == "regression"
    assert verdicts["tool-calls"] in ("pass", "infeasible")


@pytest.mark.full
def test_a_target_that_is_broken_in_other_scripts_alone_is_found(drafted, out):
    """The rows of its head that write no ASCII are zero; English calls stay as they are."""
    tokens = json.loads((TOOLS / "tokenizer.json").read_text())["model"]["vocab"]
    others = [number for token, number in tokens.items() if not ASCII.issuperset(token)]
    assert len(others) > 200
    twin = written_values.zeroed(TOOLS, out / "scripts", "lm_head.weight", others)
    # Without the server with prefix caching: the other one's answers are the same.
    protocol = ASKED.model_copy(update={"prefix_caching": False})
    fact = evaluated(twin, out, has_plain=False, protocol=protocol)
    scored = ("scores", "samples_sha256")
    same = {name: getattr(drafted.source, name) for name in scored}
    assert fact.source.model_copy(update=same) == drafted.source, "what it answered is asked once"
    gate = {one.gate: one for one in judge(gates=Gates(), evaluation=fact).reasons}["tool-calls"]
    assert gate.verdict == "regression", gate.says
    answers = read_lines(out / fact.checkpoint.samples, AnswersHeader).lines
    items = conversations(ASKED).items
    right = {n for n, line in answers.items() if line.correct["expected"]}
    english = {n for n, item in enumerate(items) if not item.turns[-1].wanted}
    assert english <= right and len(right) < NUM // 2
