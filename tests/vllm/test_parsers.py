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
    named = {family.parsers for family in families().values() if family.parsers}
    assert len(named) > 10 and {tool for tool, _ in named} <= {*tools}
    assert {thought for _, thought in named} <= {*thoughts}
