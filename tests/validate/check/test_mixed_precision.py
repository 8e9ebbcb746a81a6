"""modelopt's MIXED_PRECISION: what `quantized_layers` says of the shards of a fused module."""

from broken import GOOD
from checkpoint_files import write
from keepmtp.validate.check.check import check

ATTENTION = "model.layers.0.self_attn"


def test_shards_of_a_fused_module_have_one_algorithm(tmp_path):
    checkpoint = GOOD["glm mixed"]()
    layers = checkpoint.config["quantization_config"]["quantized_layers"]
    algorithm = layers.pop(f"{ATTENTION}.qkv_proj")
    for shard in ("q_proj", "k_proj", "v_proj"):
        layers[f"{ATTENTION}.{shard}"] = algorithm
    assert check(write(tmp_path / "one", checkpoint)).findings == ()
    # The twin: vLLM refuses to build a module of two algorithms.
    layers[f"{ATTENTION}.k_proj"] = {"quant_algo": "NVFP4", "group_size": 16}
    (finding,) = check(write(tmp_path / "two", checkpoint)).findings
    assert finding.severity == "error"
    assert f"Mixed quant_algo within fused layer {ATTENTION}.qkv_proj" in finding.says
