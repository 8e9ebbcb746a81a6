"""q, k and v in one matrix whose rows come in slices (MiMo-V2.5): what is written against the
release, row by row.
"""

from pathlib import Path

import pytest
import torch
from checkpoint_files import write
from data_files import json_of
from good import released
from keepmtp.checkpoints.source import open_source
from keepmtp.checkpoints.stored import num_slices
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.families import find_view
from keepmtp.recipes.family import HFName
from keepmtp.recipes.find import find_recipe
from releases import source_layout
from writing import tiny, weights_of, written

# The tiny model's two kinds of attention: layers 0 (full), 1 and 2 (sliding), and the three MTP
# layers (sliding).
FULL, SLIDING = (8, 4), (8, 8)
SLICES = 4
HEAD = 192
VALUE = 128
STEMS = {
    "model.layers.0.": FULL,
    "model.layers.1.": SLIDING,
    "model.mtp.layers.0.": SLIDING,
    "model.mtp.layers.2.": SLIDING,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Path]:
    """The release's tensors, ours, and our folder."""
    folder = tmp_path_factory.mktemp("interleaved")
    out = folder / "out"
    source = tiny(folder / "source", "mimo-v2.5")
    plan = make_plan(find_recipe("mimo-v2.5")[0], open_source(source))
    return weights_of(source), written(plan, out), out


def row_of(weight: torch.Tensor, scale: torch.Tensor, slice_: int, row: int) -> torch.Tensor:
    """A row of a slice, dequantized with the slice's own blocks of 128 rows and columns."""
    rows = weight.shape[0] // SLICES
    scales = scale.shape[0] // SLICES
    factor = scale[slice_ * scales + row // 128].repeat_interleave(128)[: weight.shape[1]]
    return (weight[slice_ * rows + row].float() * factor).to(torch.bfloat16)


@pytest.mark.parametrize("stem", STEMS)
def test_each_head_has_its_rows(stem, made):
    """Head h of q is in slice h // (heads a slice), and so on: head by head, without keepmtp's
    arithmetic.
    """
    source, ours, _ = made
    heads, groups = STEMS[stem]
    weight = source[f"{stem}self_attn.qkv_proj.weight"]
    scale = source[f"{stem}self_attn.qkv_proj.weight_scale_inv"]
    of_q = heads // SLICES
    of_kv = groups // SLICES
    first = {"q": 0, "k": of_q * HEAD, "v": of_q * HEAD + of_kv * HEAD}
    for name, count, each, size in (
        ("q", heads, of_q, HEAD),
        ("k", groups, of_kv, HEAD),
        ("v", groups, of_kv, VALUE),
    ):
        found = ours[f"{stem}self_attn.{name}_proj.weight"]
        assert (found.shape, found.dtype) == ((count * size, weight.shape[1]), torch.bfloat16)
        for head in range(count):
            for row in (0, 1, size - 1):
                expected = row_of(
                    weight, scale, head // each, first[name] + head % each * size + row
                )
                assert torch.equal(found[head * size + row], expected), (name, head, row)


def test_the_fused_matrix_is_gone_and_config_says_so(made):
    _, ours, out = made
    assert not [name for name in ours if "qkv_proj" in name]
    config = json_of(out / "config.json")
    assert config["attention_projection_layout"] == "split"
    assert any("qkv_proj" in entry for entry in config["quantization_config"]["ignore"])


def test_sizes_that_config_does_not_have_are_refused_by_name(tmp_path):
    recipe, _ = find_recipe("mimo-v2.5")
    for key, value in (("num_key_value_heads", 2), ("head_dim", "192"), ("v_head_dim", 64)):
        checkpoint = released("mimo-v2.5")
        checkpoint.config[key] = value
        with pytest.raises(CheckpointError, match=rf"layers\.0\.self_attn\.qkv_proj|json: {key}"):
            make_plan(recipe, open_source(write(tmp_path / key, checkpoint)))


def test_pro_has_eight_slices_and_no_tower():
    """MiMo-V2.5-Pro: 128 heads on 8 groups in every layer; a slice of 3392 rows ends in a part
    block.
    """
    sizes = {"num_attention_heads": 128, "num_key_value_heads": 8, "hidden_size": 6144}
    changes = sizes | {
        "swa_num_attention_heads": 128,
        "vision_config": None,
        "num_hidden_layers": 2,
    }
    config, _ = source_layout("mimo-v2-flash", size="full", changes={"num_hidden_layers": 1})
    view = find_view(
        config | changes | {"model_type": "mimo_v2", "architectures": ["MiMoV2ForCausalLM"]}, "pro"
    )
    for stem in ("model.layers.0.", "model.layers.1.", "model.mtp.layers.2."):
        place = view.place(HFName(f"{stem}self_attn.qkv_proj.weight"))
        assert place is not None and place.runtime == f"{stem}self_attn.qkv_proj"
        assert view.slices(place) == (8, 3072, 192, 128)
    assert num_slices(8 * 3392, 216, 128) == 8
    assert num_slices(4 * 3392, 108, 128) == 4
