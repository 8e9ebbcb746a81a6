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
from keepmtp.validate.facts.lossless import LosslessFact
from keepmtp.validate.facts.vllm_env import find_vllm
from keepmtp.validate.measure.harness import Model, Setup
from keepmtp.validate.measure.lossless import Lossless
from keepmtp.validate.measure.tool_calls import conversations, parser_words
from keepmtp.validate.report.gates import judge
from real_vllm import NEEDS_VLLM, UNIPROC, measure
from reports import UNTRIED

TOOLS = ROOT / "models" / "tiny-tools"
# As byte-level BPE writes ASCII: a letter is itself, blanks and controls come from U+0100 on.
ASCII = {chr(code) for code in (*range(0x21, 0x7F), *range(0x100, 0x122))}
pytestmark = NEEDS_VLLM


def model(role, folder: Path) -> Model:
    return Model(role=role, source=open_source(folder), identity=identify(folder))


def answered(folder: Path, out: Path, k: int) -> LosslessFact:
    setup = Setup(
        vllm=find_vllm(), out=out, timeout=400, extra=("--tool-call-parser", "hermes", *UNIPROC)
    )
    models = {"source": model("source", TOOLS), "checkpoint": model("checkpoint", folder)}
    words = parser_words(models["checkpoint"].source, setup.extra)
    return measure(Lossless(setup=setup, k=k, has_cache=True, parser=words, **models))


def wrong(one) -> set[str]:
    """Conversations with any fault of calls."""
    return {
        name for fault in ("no end", "JSON", "schema", "calls") for name in one.seen.get(fault, ())
    }


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.mark.full
def test_a_broken_draft_changes_no_answer(out):
    """The release against a twin whose MTP block is noise: calls are right in each way."""
    twin = written_values.noisy(
        TOOLS, out / "draft", r"layers\.2\..*proj", lambda value: 4 * value.std()
    )
    fact = answered(twin, out, 2)
    assert [one.way for one in fact.source.asked] == [
        "one at a time",
        "32 at once",
        "with prefix caching",
    ]
    assert len(fact.checkpoint.asked) == 6
    for one in (*fact.source.asked, *fact.checkpoint.asked):
        assert len([name for name in wrong(one) if name.startswith("tools")]) < 12, one.way
        assert one.num_changed <= 8, "near-ties alone may flip"
    assert {one.gate: one.verdict for one in judge(check=UNTRIED, lossless=fact).reasons}[
        "lossless"
    ] == "pass"


@pytest.mark.full
def test_a_target_that_is_broken_in_other_scripts_alone_is_found(out):
    """The rows of its head that write no ASCII are zero; English calls stay as they are."""
    tokens = json.loads((TOOLS / "tokenizer.json").read_text())["model"]["vocab"]
    others = [number for token, number in tokens.items() if not ASCII.issuperset(token)]
    assert len(others) > 200
    twin = written_values.zeroed(TOOLS, out / "scripts", "lm_head.weight", others)
    fact = answered(twin, out, 0)
    gate = {one.gate: one for one in judge(check=UNTRIED, lossless=fact).reasons}["lossless"]
    assert gate.verdict == "regression" and "of the checkpoint alone" in gate.says, gate.says
    broken = wrong(fact.checkpoint.asked[1])
    english = {
        f"tools {number}" for number, turns in enumerate(conversations(), 1) if not turns[-1].wanted
    }
    assert english and not english & broken and len(broken) > 60
