"""The shipped checkpoints and what keepmtp makes of them, in a real vLLM with method=mtp on the
CPU.

Acceptance decides: greedy texts stay right however broken a draft is. One process serves all
checkpoints in turn.
"""

import pytest
from commands import GLM, ROOT
from keepmtp.validate.check.check import examine
from readme import ACCEPTED
from real_vllm import HAS_AVX512, NEEDS_VLLM, QWEN, asked_names, in_vllm
from releases import made_of
from written_values import broken

QUESTION = (
    "Question: {0} has {2} {1}. {0} buys {3} more {1}. How many {1} does {0} have now?\nAnswer:"
)
PROMPTS = [
    QUESTION.format("Tom", "apples", 5, 7),
    QUESTION.format("Ann", "books", 12, 3),
    QUESTION.format("Leo", "pens", 8, 9),
    QUESTION.format("Mia", "eggs", 4, 6),
]
ANSWERS = ["12", "15", "17", "10"]
SOURCES = (GLM.name, QWEN.name)
# Every scheme that vLLM's CPU build has a kernel for: all linears of Qwen3.5, all but the routed
# experts of GLM.
MADE = {
    "qwen-w8a8-mtp-fp8": ("tiny-qwen3_5", {"scheme": "W8A8", "mtp": "FP8_DYNAMIC"}),
    "glm-fp8": ("tiny-glm4-moe", {"scheme": "fp8-dynamic"}),
    "qwen-fp8": ("tiny-qwen3_5", {}),
}
# The same bytes as qwen-fp8, its BF16 draft claimed by the FP8 group: an ignore list in wrong names.
TWIN = "qwen-fp8, ignore list broken"
if HAS_AVX512:  # its W4A16 kernel needs it
    MADE["qwen-fp8-mtp-w4a16"] = ("tiny-qwen3_5", {"scheme": "FP8_DYNAMIC", "mtp": "W4A16"})
    MADE["glm-w4a16"] = ("tiny-glm4-moe", {"scheme": "w4a16"})

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def served(request, tmp_path_factory) -> dict[str, dict]:
    """Results by checkpoint: the sources and the quantized ones."""
    made = tmp_path_factory.mktemp("made")
    asked = asked_names(request)
    sources = {MADE[name][0] for name in asked & {*MADE}} | asked & {*SOURCES}
    folders = {name: ROOT / "models" / name for name in sources}
    for name in asked & {*MADE}:
        model, choices = MADE[name]
        folders[name] = made_of(model, made / name, source=str(ROOT / "models" / model), **choices)
    if "qwen-fp8" in asked:
        folders[TWIN] = broken(folders["qwen-fp8"], made / "twin")
        checked = examine(folders[TWIN]).data
        assert any(finding.where.startswith("mtp.layers.0.") for finding in checked.findings)
    jobs = [{"folder": str(each), "prompts": PROMPTS, "num_drafts": 1} for each in folders.values()]
    return dict(zip(folders, in_vllm("serve.py", jobs), strict=True))


def acceptance(result: dict) -> float:
    assert result["draft_tokens"] > 20
    return result["accepted_tokens"] / result["draft_tokens"]


def answers(result: dict) -> list[str]:
    return [text.rpartition("####")[2].strip() for text in result["texts"]]


@pytest.mark.parametrize("name", [pytest.param(GLM.name, marks=pytest.mark.full), QWEN.name])
def test_the_shipped_models_draft(served, name):
    assert acceptance(served[name]) > 0.85
    assert answers(served[name]) == ANSWERS


@pytest.mark.parametrize(
    "name",
    [name if "w8a8" in name else pytest.param(name, marks=pytest.mark.full) for name in MADE],
)
def test_quantized_models_keep_their_draft(served, name):
    """At least 97 % of the source's acceptance, and the same answers."""
    assert acceptance(served[name]) >= 0.97 * acceptance(served[MADE[name][0]])
    assert answers(served[name]) == ANSWERS


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen-fp8"])
def test_its_twin_with_a_broken_ignore_list_answers_right_and_drafts_in_vain(served, name):
    """vLLM loads it without a word; what the README's picture shows of the two."""
    wrong = served[TWIN]
    assert answers(wrong) == ANSWERS and wrong["accepted_tokens"] == 0
    found = {"right": acceptance(served[name]), "wrong": acceptance(wrong)}
    shown = {word: accepted / drafted for word, (accepted, drafted) in ACCEPTED.items()}
    assert found == pytest.approx(shown, abs=0.05)
