"""A change says only itself: modules that change, the smallest edit of the owner's config, all else
as it is, in forms that no recipe has a word for too.
"""

from functools import partial
from pathlib import Path

import pytest
from checkpoint_files import write
from data_files import json_of
from foreign_form import awq, gptq, in_hf_quant_config, modelopt, mxfp8_block
from good import integers, llmcompressor, nvfp4_experts, outputs_of, qwen_fp8, released
from keepmtp.pipeline import plan_for, quantize
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.validate.check.check import check
from written_values import fill, tensors_of

QWEN = "qwen3.5-27b"
# What stands there, the word for the block (None: that of the release), and the keys of the
# quantization config that may change.
CASES = {
    "native FP8": (qwen_fp8, "bf16", {"modules_to_not_convert"}),
    "W4 in groups of 64": (partial(integers, QWEN, columns=64), "FP8_DYNAMIC", None),
    "W4 g32 asymmetric": (partial(integers, QWEN, columns=32, has_zeros=True), "NVFP4A16", None),
    "W4 by channel": (partial(integers, QWEN, columns=None), "source", set()),
    "W4 g64 experts": (partial(integers, "glm-4.7", columns=64), "FP8_BLOCK", None),
    "NVFP4 of V4": (nvfp4_experts, "source", set()),
    "one algorithm": (partial(modelopt, "glm-4.7"), "FP8_BLOCK", None),
    "MXFP8": (mxfp8_block, "bf16", None),
    "targets by class": (partial(llmcompressor, QWEN, "FP8_DYNAMIC", "FP8_DYNAMIC"), "bf16", None),
    "as it is": (partial(modelopt, "glm-4.7"), "source", set()),
    "GPTQ": (gptq, None, {"dynamic"}),
    "AWQ": (awq, None, {"modules_to_not_convert"}),
}


def by_key(folder: Path) -> tuple[dict, dict]:
    """config.json without its quantization config, and that."""
    config = json_of(folder / "config.json")
    return config, config.pop("quantization_config")


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_change_is_not_looked_at(name, tmp_path):
    make, word, keys = CASES[name]
    first = write(tmp_path / "first", make())
    fill(first)
    changes = [f"mtp={word}"]
    if word is None:
        release = write(tmp_path / "release", released("glm-4.7"))
        fill(release)
        changes = [f"mtp=from:{release}"]
    made, text = plan_for(str(first), changes=changes)
    out = tmp_path / "out"
    quantize(made, text, out=out)
    old, new = tensors_of(first), tensors_of(out)
    for tensor, value in old.items():
        if not made.view.is_mtp(tensor):
            assert new[tensor] == value, tensor
    for shard in made.shards:
        one = first / shard.file
        assert shard.is_link == (one.exists() and one.samefile(out / shard.file)), shard.file
    (outer, given), (now_outer, said) = by_key(first), by_key(out)
    if keys is None:
        keys = {"config_groups", "ignore", "format", "quant_algo", "quantized_layers"}
    assert outer == now_outer
    assert {key for key in given | said if given.get(key) != said.get(key)} <= keys
    assert {each.key for each in check(out).findings} <= {
        each.key for each in check(first).findings
    }


def test_a_block_in_a_form_that_no_scheme_has_is_taken(tmp_path):
    """MXFP8, which modelopt has a word for."""
    change = f"mtp=from:{write(tmp_path / 'block', mxfp8_block())}"
    made, _ = plan_for(str(write(tmp_path / "first", modelopt("glm-4.7"))), changes=[change])
    assert not check(write(tmp_path / "out", outputs_of(made))).findings


def test_only_the_blocks_shard_is_written(tmp_path):
    checkpoint = qwen_fp8()
    checkpoint.elsewhere = checkpoint.take(r"mtp\..*")
    checkpoint.index = lambda index: index["weight_map"].update(
        dict.fromkeys(checkpoint.elsewhere, "mtp.safetensors")
    )
    made, _ = plan_for(str(write(tmp_path / "first", checkpoint)), changes=["mtp=bf16"])
    assert [shard.file for shard in made.written] == ["mtp.safetensors"]
    assert len(made.linked) == 2


def test_both_files_of_modelopt_say_it(tmp_path):
    """What only one of them has a word for stays."""
    first = write(tmp_path / "first", in_hf_quant_config(modelopt("glm-4.7")))
    made, _ = plan_for(str(first), changes=["mtp=FP8_BLOCK"])
    said = made.edited.value("hf_quant_config.json", ("quantization",))
    assert said["quant_algo"] == "MIXED_PRECISION" and said["quantized_layers"]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (qwen_fp8, "mtp=FP8_DYNAMIC"),
        (qwen_fp8, "attention=W8A8"),
        (gptq, "mtp=FP8_DYNAMIC"),
        (awq, "kv_cache=FP8"),
    ],
)
def test_what_a_dialect_cannot_say_is_one_sentence(make, change, tmp_path):
    first = write(tmp_path / "first", make())
    with pytest.raises(
        KeepMTPError, match=r"must have a word for .*--set format=compressed-tensors"
    ):
        plan_for(str(first), changes=[change], requantize=True)
