"""What a token takes of the KV cache, beyond what tests/vllm/test_caches.py compares with vLLM's own answers."""

import json
from dataclasses import replace

import pytest
import releases
from commands import ran
from keepmtp.quantize.needs.kv_cache import kv_bytes
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family_view import FamilyView


def view_of(model: str, **changes: object) -> FamilyView:
    config, _ = releases.source_layout(model, size="full", changes=changes)
    return find_view(config, model)


@pytest.mark.parametrize("tp, width", [(1, 2), (2, 2), (8, 2), (16, 2), (2, 1)])
def test_every_layer_and_the_draft_keep_keys_and_values(tp, width):
    """By hand: 92 layers and one of the draft keep 8 heads of 128 numbers, twice."""
    a_layer = max(1, 8 // tp) * 128 * 2 * width
    assert kv_bytes(view_of("glm-4.7"), tp=tp, width=width) == (92 * a_layer, a_layer)


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
    assert kv_bytes(view_of(model)) is None


@pytest.mark.parametrize("changes", [{"index_topk_freq": 4}, {"index_topk_pattern": "FS"}])
def test_an_indexer_in_some_layers_alone_is_not_counted(changes):
    assert kv_bytes(view_of("glm-5", **changes)) is None
    assert kv_bytes(view_of("glm-5"))


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
        assert kv_bytes(view) is None
        return
    with pytest.raises(CheckpointError, match=says):
        kv_bytes(view)


def test_plan_says_it_for_a_gpu_that_is_named(tmp_path):
    folder = releases.write_checkpoint(
        tmp_path / "m", *releases.source_layout("glm-4.7", size="full"), num_shards=None
    )
    made = json.loads(ran(f"plan glm-4.7.w4a16-fp8 --source {folder} --gpu H200 --json"))
    needs = made["needs"]
    assert needs["gpus"] == 2 and needs["weights"] * 2 - made["bytes"]["after"] in (0, 1)
    assert (needs["kv_token"], needs["kv_token_draft"]) == kv_bytes(view_of("glm-4.7"), tp=2)
