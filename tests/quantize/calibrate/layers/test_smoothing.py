"""Which norms SmoothQuant may rescale, found in a running layer."""

import pytest
from layerwise import GLM, Skeleton, outliers, token_ids

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("scheme", "is_smoothed"), [("W8A8", False), ("NVFP4", True)])
def test_one_scale_for_all_routed_experts_is_not_for_int8(scheme, is_smoothed):
    """INT8 has one scale a token, which the experts would share; NVFP4 has one a group of 16."""
    skeleton = Skeleton(GLM)
    batches = skeleton.enter(1, token_ids(samples=1), outliers(1, 256))
    result = skeleton.calibrated(batches, scheme, algorithm="smoothquant")
    smoothed = {smoothing.smooth for smoothing in result.smoothings}
    assert "model.layers.1.input_layernorm" in smoothed
    assert ("model.layers.1.post_attention_layernorm" in smoothed) == is_smoothed
