"""Which blocks draft: what vLLM's proposers run."""

import pytest
from good import planned
from keepmtp.quantize.calibrate.mtp.mtp_policy import blocks_that_draft


@pytest.mark.parametrize("model, runs", [("glm-4.7", ["a"]), ("step-3.5-flash", ["a", "b", "c"])])
def test_blocks_that_draft(model, runs):
    """vLLM's proposer for Step runs the next MTP layer at each draft step; others the first one."""
    plan = planned(model, "FP8_DYNAMIC", "bf16")
    assert blocks_that_draft(plan, ["a", "b", "c"]) == runs
