"""The parsers that a card names are vLLM's."""

from keepmtp.recipes.families import families
from real_vllm import NEEDS_VLLM, ask

pytestmark = NEEDS_VLLM

NAMES = """
import json
from vllm.reasoning import _REASONING_PARSERS_TO_REGISTER as thoughts
from vllm.tool_parsers import _TOOL_PARSERS_TO_REGISTER as tools
print("ANSWERS", json.dumps([[*tools], [*thoughts]]))
"""


def test_parsers_are_vllms():
    tools, thoughts = ask(NAMES, [])
    called = {family.tool_parser for family in families().values()} - {""}
    thinking = {family.reasoning_parser for family in families().values()} - {""}
    assert len(called) > 10 and called <= {*tools}
    assert len(thinking) > 10 and thinking <= {*thoughts}
