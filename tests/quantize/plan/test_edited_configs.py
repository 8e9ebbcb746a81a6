"""A change says only itself: a block in a form that no scheme has, and the shards that are written;
tests/vllm/test_finished.py has every dialect.
"""

from checked import check
from checkpoint_files import write
from foreign_form import modelopt, mxfp8_block
from good import outputs_of, qwen_fp8
from keepmtp.pipeline import plan_for


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
