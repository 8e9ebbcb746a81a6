"""Plans as a search under a budget finds them, loaded by vLLM's own classes: words that differ from
layer to layer.
"""

import pytest
from good import outputs_of
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.choices import choices_of, found_plan
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.conventions import FORMATS
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from keepmtp.validate.check.check import examine
from keepmtp.validate.dryload.check_on import with_loads
from passes import ROOT

pytestmark = pytest.mark.vllm


def mixed(format: str) -> Plan:
    """Each unit with another word than the one before it, in the backbone and in the block."""
    words = ["NVFP4", "FP8_BLOCK", "bf16"]
    auto = {
        "backbone": "auto",
        "mtp": "auto",
        "budget": "16 bits",
        "backbone_auto": {"candidates": words},
    }
    raw = find_recipe("tiny-glm4-moe.nvfp4")[0].model_dump() | auto | {"format": format}
    choices = choices_of(Recipe.model_validate(raw), open_source(ROOT / "models" / "tiny-glm4-moe"))
    turns = {
        unit.name: unit.options[turn % len(unit.options)].word
        for turn, unit in enumerate(choices.units)
    }
    return found_plan(choices, turns, shard_bytes=10**9)


def test_a_mix_by_layer_loads_in_both_dialects(dry_loaded):
    plans = {format: mixed(format) for format in FORMATS}
    accounts = dry_loaded({format: outputs_of(plan) for format, plan in plans.items()})
    for format, plan in plans.items():
        account = accounts[format]
        assert account.load.failure is None
        assert (
            len(
                {
                    tensor.scheme
                    for tensor in plan.tensors
                    if tensor.role == "attention" and tensor.part == "backbone"
                }
            )
            == 3
        )
        checked = with_loads(examine(account.path), [account], "0.32.0")
        assert [finding for finding in checked.data.findings if finding.severity == "error"] == []
        # The record of the load: what has a word runs quantized, whatever its neighbours in other
        # layers do.
        assert not account.unconsumed
