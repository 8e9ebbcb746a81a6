"""What a server has room for, beyond what tests/vllm/test_caches.py compares with vLLM's own answers."""

from dataclasses import replace

import pytest
import releases
from commands import ran
from good import cached
from json_files import json_of
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.needs.fits import MOST_DRAFTS, OWN_BYTES, caches, fits, sequences, weights_of
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family_view import FamilyView
from keepmtp.validate.measure.room import room_on

GIB = 2**30


def view_of(model: str, **changes: object) -> FamilyView:
    config, _ = releases.source_layout(model, size="full", changes=changes)
    return find_view(config, model)


def test_what_is_left_is_for_the_cache():
    """By hand: 92 layers and one of the draft keep 8 heads of 128 numbers, twice, in BF16."""
    plain, *drafted = fits(view_of("glm-4.7"), (100 * GIB, 8 * GIB), 80 * GIB, tp=2, share=0.9)
    assert [fit.drafts for fit in (plain, *drafted)] == [*range(MOST_DRAFTS + 1)]
    assert plain.weights == 50 * GIB and {fit.weights for fit in drafted} == {54 * GIB}
    for fit in (plain, *drafted):
        assert fit.cache == 72 * GIB - OWN_BYTES - fit.weights
        assert (
            fit.target == 92 * 4 * 128 * 2 * 2 and fit.draft == bool(fit.drafts) * fit.target // 92
        )
        blocks = fit.cache // (16 * (fit.target + fit.draft))
        assert fit.sequences == blocks / (32768 // 16)
        assert fit.longest == min(16 * blocks, 202752)


def test_a_fp8_cache_holds_twice_as_much():
    wide, narrow = (
        fits(view_of("glm-4.7"), (0, 0), 80 * GIB, width=width)[1].sequences for width in (2, 1)
    )
    assert narrow == pytest.approx(2 * wide, rel=1e-4)


def test_with_no_room_nothing_fits():
    fit = fits(view_of("glm-4.7"), (100 * GIB, 0), 80 * GIB)[0]
    assert (fit.cache, fit.longest, fit.sequences) == (0, 0, 0)


def test_a_draft_that_is_broken_on_purpose_is_seen():
    """The twin: one layer more of the draft takes room."""
    target, draft = caches(view_of("glm-4.7"), 1)
    right, wrong = (sequences(target + more, 64 * GIB, 4096) for more in (draft, draft * 2))
    assert wrong < right < sequences(target, 64 * GIB, 4096)


@pytest.mark.parametrize(
    "model",
    [
        "dsv4-flash",
        "inkling",
        "minimax-m3",
        "qwen3.8-flash-next",
        "dots3-note-prev",
        "glm-5.3-flash",
    ],
)
def test_attention_that_is_not_counted(model):
    assert fits(view_of(model), (0, 0), 80 * GIB) == []


@pytest.mark.parametrize("changes", [{"index_topk_freq": 4}, {"index_topk_pattern": "FS"}])
def test_an_indexer_in_some_layers_alone_is_not_counted(changes):
    assert fits(view_of("glm-5", **changes), (0, 0), 80 * GIB) == []
    assert fits(view_of("glm-5"), (0, 0), 80 * GIB)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"num_key_value_heads": "8"}, "num_key_value_heads must be a whole number"),
        ({"head_dim": -1}, "head_dim must be a whole number"),
        ({"head_dim": 0, "hidden_size": 0}, ""),
    ],
)
def test_sizes_that_are_none(changes, says):
    view = view_of("glm-4.7")
    view = replace(view, config={**view.config, **changes})
    if not says:
        assert fits(view, (0, 0), 80 * GIB) == []
        return
    with pytest.raises(CheckpointError, match=says):
        fits(view, (0, 0), 80 * GIB)


def test_copies_of_embedding_and_head_are_not_counted():
    """vLLM's draft gets the target's in their place."""
    plan = cached("glm-4.5-air")
    outputs = [output for tensor in plan.tensors for output in tensor.outputs]
    target, draft = weights_of(plan.view, outputs)
    copies = sum(
        plan.num_bytes_of(tensor) for tensor in plan.mtp if tensor.role in ("embedding", "head")
    )
    assert copies and target + draft + copies == plan.num_bytes_after


def test_a_checkpoint_whose_config_says_fp8(tmp_path):
    folder = releases.write_checkpoint(tmp_path / "m", *releases.source_layout("glm-4.7"))
    plain = room_on(open_source(folder), 80 * GIB, 1)
    assert room_on(open_source(folder), 80 * GIB, 1, {"--kv-cache-dtype": "fp8"}) != plain
    config = json_of(folder / "config.json")
    scheme = {"num_bits": 8, "type": "float"}
    quantized = {
        "quant_method": "compressed-tensors",
        "kv_cache_scheme": scheme,
        "config_groups": {},
    }
    releases.write_checkpoint(
        folder, {**config, "quantization_config": quantized}, releases.source_layout("glm-4.7")[1]
    )
    fp8 = room_on(open_source(folder), 80 * GIB, 1)
    assert fp8[0].target * 2 == plain[0].target
    assert room_on(open_source(folder), 80 * GIB, 1, {"--kv-cache-dtype": "bfloat16"}) == plain
    long = room_on(open_source(folder), 80 * GIB, 1, {"--max-model-len": "64"})
    assert long[0].length == 64


def test_plan_says_it_for_a_gpu_that_is_named(tmp_path):
    folder = releases.write_checkpoint(
        tmp_path / "m", *releases.source_layout("glm-4.7", size="full"), num_shards=None
    )
    words = f"plan glm-4.7.w4a16-fp8 --source {folder} --gpu H200"
    said = ran(words)
    assert "room in 2 x H200, served" in said and "Assumed: vLLM needs 4.0 GiB more" in said
    assert max(map(len, said[said.index("room in") :].splitlines())) <= 80
