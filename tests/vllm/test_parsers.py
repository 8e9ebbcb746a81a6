"""The parsers that a card names are vLLM's."""

import ast

from keepmtp.recipes.families import families
from keepmtp.validate.facts.vllm_env import find_vllm
from real_vllm import NEEDS_VLLM

pytestmark = NEEDS_VLLM


def registered(package: str) -> set[str]:
    """The names in the table of one of its packages."""
    (file,) = find_vllm().python.parents[1].glob(f"lib/*/site-packages/vllm/{package}/__init__.py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and "PARSERS_TO_REGISTER" in ast.unparse(node.targets[0]):
            return {*ast.literal_eval(node.value)}
    raise AssertionError(f"no table in {file}")


def test_parsers_are_vllms():
    for kind, package in (("tool", "tool_parsers"), ("reasoning", "reasoning")):
        named = {getattr(family, f"{kind}_parser") for family in families().values()} - {""}
        assert len(named) > 10 and named <= registered(package)
