"""`keepmtp fix --runtime sglang`: entries for SGLang in other people's lists, with vLLM's verdict
as it was.
"""

import json

import good
import pytest
from checkpoint_files import write
from keepmtp.cure.fix import proposed
from keepmtp.recipes.errors import RecipeError
from keepmtp.validate.check.check import check
from sglang_wheel import FUSED, MISSING, UTILS, group_of

DRAFT = "model.decoder.self_attn.qkv_proj"


def fixed(checkpoint, folder):
    """The outcome, and the quantization config that it proposes."""
    outcome = proposed(str(write(folder, checkpoint)), for_sglang=True)
    made = outcome.proposal.files().get("config.json")
    return outcome, json.loads(made)["quantization_config"] if made else checkpoint.quantization


@pytest.mark.skipif(not UTILS.is_file(), reason=MISSING)
def test_a_plain_draft_under_target_linear_is_ignored_in_both(tmp_path):
    checkpoint = good.llmcompressor("glm-4.7", "FP8_DYNAMIC")
    assert group_of(checkpoint.quantization, DRAFT, FUSED)  # SGLang would build it in FP8
    outcome, config = fixed(checkpoint, tmp_path / "linear")
    assert group_of(config, DRAFT, FUSED) is None
    assert group_of(config, "model.layers.0.self_attn.qkv_proj", FUSED)
    assert outcome.before.data.findings == outcome.after.data.findings == ()
    assert "models/glm4_moe_nextn.py" in "".join(outcome.proposal.diffs())


@pytest.mark.skipif(not UTILS.is_file(), reason=MISSING)
def test_a_quantized_draft_gets_targets_in_its_group(tmp_path):
    checkpoint = good.ours("glm-4.7", "FP8_DYNAMIC", "FP8_DYNAMIC")
    group = checkpoint.quantization["config_groups"]["group_0"]
    group["targets"] = [target for target in group["targets"] if "decoder" not in target]
    with pytest.raises(ValueError, match="Unable to find matching target"):
        group_of(checkpoint.quantization, DRAFT, FUSED)
    outcome, config = fixed(checkpoint, tmp_path / "targets")
    assert group_of(config, DRAFT, FUSED) == config["config_groups"]["group_0"]
    assert outcome.after.data.findings == ()


def test_modelopts_list_names_the_draft(tmp_path):
    checkpoint = good.ours("glm-4.7", "FP8", format="modelopt")
    checkpoint.quantization["ignore"] = [
        name for name in checkpoint.quantization["ignore"] if "decoder" not in name
    ]
    outcome, config = fixed(checkpoint, tmp_path / "modelopt")
    assert "model.decoder.*" in config["ignore"]
    assert [each for each in outcome.after.data.findings if each.severity == "error"] == []


def test_what_is_written_by_keepmtp_needs_nothing(tmp_path):
    outcome, _ = fixed(good.ours("deepseek-r1", "FP8_DYNAMIC"), tmp_path / "ours")
    assert outcome.proposal.edits == [] and outcome.not_for_sglang == ()


def test_what_no_entry_can_cure_is_said_and_nothing_changes(tmp_path):
    outcome, _ = fixed(good.llmcompressor("qwen3-next-80b", "FP8_DYNAMIC"), tmp_path / "shared")
    assert "model.layers.0.mlp.experts.0" in outcome.not_for_sglang[0]
    assert outcome.proposal.edits == []


def test_a_dialect_without_such_lists_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="--runtime sglang: adds entries to compressed-tensors"):
        fixed(good.qwen_fp8(), tmp_path / "fp8")


def test_without_the_option_nothing_is_added(tmp_path):
    folder = write(tmp_path / "alone", good.llmcompressor("glm-4.7", "FP8_DYNAMIC"))
    assert proposed(str(folder)).proposal.edits == []
    assert check(folder).findings == ()
