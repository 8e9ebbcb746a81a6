"""Real releases that differ from their family's layout, in the plan and in the static check."""

import re

import pytest
from checked import check
from checkpoint_files import Checkpoint, as_source, lose, setting, write
from good import released
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.source import Source, open_source, read
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.plan.configs import files_of
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.find import find_recipe
from real_releases import TABLE, nemotron_ultra, qwen38_fp8
from releases import write_checkpoint


def plan_of(checkpoint: Checkpoint, name: str, folder) -> Plan:
    recipe, _ = find_recipe(name)
    return make_plan(recipe, as_source(checkpoint, folder))


def test_layers_counted_by_a_list_of_their_kinds(tmp_path):
    """Nemotron-3-Ultra: a KeyError in plan, and "Take the original's config.json" of check,
    before.
    """
    plan = plan_of(nemotron_ultra(), "nemotron-3-super", tmp_path)
    assert (plan.view.num_layers, plan.view.num_mtp_layers) == (4, 2)
    assert check(plan.source).findings == ()


def test_a_config_that_counts_no_layers_is_refused_in_one_true_sentence(tmp_path):
    """The twin: no key that says it. Which file to take is not known, as this one may be the
    original's.
    """
    checkpoint = nemotron_ultra()
    setting("layers_block_type", None)(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        plan_of(checkpoint, "nemotron-3-super", tmp_path)
    sentence = (
        "layers_block_type or hybrid_override_pattern must say how many decoder layers there are; "
        "got none of them. Take the key from the original release; if that lacks it too, "
        "keepmtp's table for nemotron_h does not know this release"
    )
    assert sentence in str(caught.value)
    (finding,) = check(as_source(checkpoint, tmp_path)).findings
    assert finding.where.endswith("config.json") and "got none of them" in finding.says


def test_a_list_of_layers_without_end_is_refused(tmp_path):
    checkpoint = nemotron_ultra()
    checkpoint.config["layers_block_type"] = ["mamba"] * 2001
    with pytest.raises(CheckpointError, match="layers_block_type: must "):
        open_source(write(tmp_path / "checkpoint", checkpoint))


def test_a_table_in_fp8_is_carried_and_vllm_is_told(tmp_path):
    """Qwen3.8-Flash-Next-FP8: refused by plan, and 128 ungrouped errors of check, before."""
    plan = plan_of(qwen38_fp8(), "qwen3.8-flash-next", tmp_path)
    parts = [tensor for tensor in plan.tensors if tensor.name.startswith(TABLE)]
    assert {tensor.fate for tensor in parts} == {"keep"}
    assert {output.dtype for tensor in parts for output in tensor.outputs} == {"F8_E4M3", "BF16"}
    assert files_of(plan)["config.json"]["text_config"]["ple_embedding_dtype"] == "float8_e4m3fn"
    assert check(plan.source).findings == ()


def test_a_table_in_bf16_changes_no_key(tmp_path):
    plan = plan_of(released("qwen3.8-flash-next"), "qwen3.8-flash-next", tmp_path)
    assert "ple_embedding_dtype" not in files_of(plan)["config.json"]["text_config"]


def test_a_table_in_fp8_without_its_scale_is_refused(tmp_path):
    checkpoint = qwen38_fp8()
    lose(rf"{re.escape(TABLE)}\.weight_scale")(checkpoint)
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(TABLE)}\.shard_0\.weight.*must have its scale"
    ):
        plan_of(checkpoint, "qwen3.8-flash-next", tmp_path)


def test_a_table_in_fp8_keeps_its_bytes(tmp_path):
    """A whole run: written, checked, and its values read."""
    source = qwen38_fp8()
    write_checkpoint(tmp_path / "source", source.config, source.tensors, data="random")
    made, text = plan_for("qwen3.8-flash-next", source=str(tmp_path / "source"))
    out = quantize(made, text, out=tmp_path / "out", threads=1).out
    before, after = open_source(tmp_path / "source"), open_source(out)
    for leaf in ("shard_0.weight", "shard_1.weight", "weight_scale"):
        one, other = (opened.entries[f"{TABLE}.{leaf}"] for opened in (before, after))
        assert bytes_of(before, one) == bytes_of(after, other)


def bytes_of(opened: Source, entry: Entry) -> bytes:
    found = bytearray(entry.num_bytes)
    read(opened, entry, memoryview(found))
    return bytes(found)
