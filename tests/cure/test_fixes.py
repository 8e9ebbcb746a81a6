"""What each change of `keepmtp fix` leaves in config.json."""

import json
import re
from functools import partial

import pytest
from broken import BROKEN
from checkpoint_files import Checkpoint, changed, config, quantization, write
from foreign_form import SAID, mixed, modelopt, quark_mxfp4
from good import ours, released
from keepmtp.cure.fix import proposed
from keepmtp.validate.check.check import examine

ROWS = SAID["quark"]["global_quant_config"]
EXPERTS = r"(layers|mtp)\.\d+\.ffn\.experts\.\d+\.w\d\."


def without_none(checkpoint: Checkpoint) -> None:
    """Targets of experts name what is on disk alone, as another tool writes them."""
    for group in checkpoint.quantization["config_groups"].values():
        group["targets"] = [re.sub(r"\|?None", "", target) for target in group["targets"]]


def experts_in_blocks(scale: str) -> Checkpoint:
    """DeepSeek-V4 with experts in FP8 blocks, which config.json does not say."""
    checkpoint = released("dsv4-flash")
    checkpoint.retype(EXPERTS + "weight", "F8_E4M3", lambda n, k: (n, 2 * k))
    checkpoint.retype(EXPERTS + "scale", scale, lambda n, k: (-(-n // 128), -(-k * 32 // 128)))
    return checkpoint


def lost_line(checkpoint: Checkpoint) -> None:
    del checkpoint.quantization["quantized_layers"]["model.layers.1.self_attn.qkv_proj"]


EDITS = {
    "patterns that reach the body": (
        partial(quark_mxfp4),
        [
            quantization("layer_quant_config", {"*gate_proj": ROWS, "*up_proj": ROWS}),
            quantization("exclude", [r"re:^model\.layers\.3\."]),
        ],
        "Let layer_quant_config name the modules",
    ),
    "a line of quantized_layers": (mixed, [lost_line], "in quantized_layers: vLLM's name"),
    "zero points in a symmetric group": (
        partial(ours, "glm-4.7", "W4A16_ASYM"),
        [quantization("config_groups/*/weights/symmetric", True)],
        "to false: they have zero points",
    ),
    "no zero points in an asymmetric group": (
        partial(ours, "glm-4.7", "W4A16"),
        [quantization("config_groups/*/weights/symmetric", False)],
        "to true: they have no zero points",
    ),
    "experts without a gate": (
        partial(ours, "nemotron-3-super", "FP8_DYNAMIC", "FP8_DYNAMIC"),
        [without_none],
        "Name all projections",
    ),
    "the dtype of experts": (partial(experts_in_blocks, "F32"), [], "Set expert_dtype of"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_the_config_cures_what_it_says_otherwise(edit, tmp_path):
    """No tensor is touched, and the check names the edit."""
    make, changes, cure = EDITS[edit]
    folder = str(write(tmp_path / "it", changed(make, *changes)))
    errors = [each for each in examine(folder).data.findings if each.count]
    assert errors and all(cure in each.cure and each.cured_by == "edit" for each in errors)
    outcome = proposed(folder)
    assert outcome.after.data.findings == ()
    assert {each.file for each in outcome.proposal.edits} == {"config.json"}


@pytest.mark.parametrize("expert_dtype", [None, "fp8"])
def test_bytes_of_exponents_are_no_numbers_for_experts(expert_dtype, tmp_path):
    """vLLM puts the bytes of E8M0 into float32: the cure is no other dtype for the same bytes."""
    build = partial(experts_in_blocks, "F8_E8M0")
    folder = str(write(tmp_path / "it", changed(build, config("expert_dtype", expert_dtype))))
    outcome = proposed(folder)
    assert outcome.proposal.edits == [] and not outcome.before.data.ok
    for finding in outcome.before.data.findings:
        assert ".ffn.experts.0.w1." in finding.where
        assert "F32: their numbers, not their bytes" in finding.cure


def test_the_group_size_of_the_other_config_stays(tmp_path):
    """config.json may have no word for it."""
    checkpoint = modelopt("qwen3.5-397b")
    checkpoint.json_files["hf_quant_config.json"] = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []},
    }
    checkpoint.quantization["ignore"] = [
        entry for entry in checkpoint.quantization["ignore"] if not entry.startswith("mtp")
    ]
    del checkpoint.quantization["group_size"]
    outcome = proposed(str(write(tmp_path / "it", checkpoint)))
    assert outcome.after.data.ok and outcome.cured
    left = outcome.proposal.value("hf_quant_config.json", ("quantization",))
    assert left["group_size"] == 16 and "mtp" in json.dumps(left["exclude_modules"])


def test_layer_types_are_cut(tmp_path):
    """The decoder's layers come first; what is too much is the MTP layer's."""
    (case,) = (case for case in BROKEN if case.name.startswith("E5 "))
    checkpoint = case.build()
    listed = checkpoint.config["text_config"]["layer_types"]
    assert listed != listed[::-1], "else either end could be cut"
    outcome = proposed(str(write(tmp_path / "E5", checkpoint)))
    assert outcome.after.data.ok
    fixed = outcome.proposal.value("config.json", ("text_config", "layer_types"))
    assert fixed == listed[: checkpoint.config["text_config"]["num_hidden_layers"]]
