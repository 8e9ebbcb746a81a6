"""modelopt's MIXED_PRECISION: what `quantized_layers` says of the shards of a fused module."""

from broken import GOOD
from checked import check
from checkpoint_files import write
from keepmtp.checkpoints.dialects.choose import read_dialect
from keepmtp.recipes.family import VLLMName

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


def test_parts_are_looked_for_where_the_models_class_names_none():
    """GLM-OCR's merger: its class says no parts of gate_up_proj, and vLLM asks for gate and up."""
    config = GOOD["glm mixed"]().config
    config["quantization_config"]["quantized_layers"] = {
        "visual.merger.gate_proj": {"quant_algo": "FP8"},
        "visual.merger.up_proj": {"quant_algo": "FP8"},
    }
    dialect = read_dialect(config, None)
    merged = dialect.resolve(VLLMName("visual.merger.gate_up_proj"), shards=(), kind="linear")
    other = dialect.resolve(VLLMName("visual.merger.down_proj"), shards=(), kind="linear")
    assert (merged.built.form, other.built.form) == ("fp8_tensor", "plain")
