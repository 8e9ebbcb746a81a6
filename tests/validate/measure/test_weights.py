"""The error of a group against that of its tensors as compressed-tensors reads them; a broken matrix
stands out by name; experts in one tensor are read one by one.
"""

import math
import shutil
from pathlib import Path

import pytest
from checkpoint_files import write
from commands import GLM
from good_checkpoints import GOOD
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.check.against import pairs, relative_error
from keepmtp.validate.facts.comparison import group_of
from keepmtp.validate.measure.weights import weight_errors
from releases import made_of
from torch import cat
from writing import weights_of
from written_values import decompressed, fill, opened, poke


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of the tiny model in a scheme, made once."""
    folder = tmp_path_factory.mktemp("weights")

    def make(scheme: str) -> Path:
        if not (folder / scheme).is_dir():
            made_of("tiny-glm4-moe", folder / scheme, scheme=scheme)
        return folder / scheme

    return make


def whole(folder: Path, scheme: str, group: str) -> float:
    """The error of a group by compressed-tensors, over the tensors that are compared."""
    tensors, released = weights_of(folder), weights_of(GLM)
    both = []
    for pair in pairs(opened(folder), opened(GLM), whole=False).found:
        module = pair.weight.module
        if group_of(pair.place) == group:
            ours = decompressed(scheme, module, tensors)
            both.append((ours.flatten(), released[f"{module}.weight"].flatten()))
    ours, theirs = (cat(flat)[None] for flat in zip(*both, strict=True))
    return relative_error(ours, theirs)


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "NVFP4A16", "W4A16_ASYM", "W8A8"])
def test_the_error_of_a_group_is_that_of_its_tensors(scheme, made):
    errors, not_finite = weight_errors(opened(made(scheme)), opened(GLM))
    assert not not_finite and errors["MTP block"].value == 0
    for group in ("attention", "experts"):
        assert errors[group].value == pytest.approx(whole(made(scheme), scheme, group), rel=1e-4)


def test_one_matrix_ten_times_too_large_is_named(made, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(made("W8A8"), folder)
    module = "model.layers.2.mlp.experts.1.up_proj"
    before, _ = weight_errors(opened(folder), opened(GLM))
    scale = weights_of(folder)[f"{module}.weight_scale"].float() * 10
    poke(folder, f"{module}.weight_scale", scale.flatten().tolist())
    after, _ = weight_errors(opened(folder), opened(GLM))
    assert after["experts"].worst == module and after["experts"].worst_value > 8
    assert after["experts"].value > 50 * before["experts"].value
    assert {**after, "experts": None} == {**before, "experts": None}, "of no other group"


def test_a_group_with_a_value_that_is_no_number_is_not_measured(made, tmp_path):
    """It is named with the matrix; the other groups have their errors."""
    folder = tmp_path / "broken"
    shutil.copytree(made("W8A8"), folder)
    name = "model.layers.0.self_attn.o_proj"
    every, _ = weight_errors(opened(folder), opened(GLM))
    poke(folder, f"{name}.weight_scale", math.nan, at=9)
    errors, not_finite = weight_errors(opened(folder), opened(GLM))
    assert not_finite == {"attention": f"infinity or NaN in {name}"}
    assert errors == {group: error for group, error in every.items() if group != "attention"}


def test_integers_in_an_order_that_is_none_are_refused(tmp_path):
    release = write(tmp_path / "release", GOOD["released glm-4.7"]())
    fill(release)
    folder = write(tmp_path / "gptq", GOOD["glm gptq"]())
    fill(folder)
    with pytest.raises(CheckpointError, match=r"gptq: model\S+: weight_g_idx: must be groups"):
        weight_errors(opened(folder), opened(release))


def test_experts_in_one_tensor_are_compared_one_by_one(tmp_path):
    """The release has one tensor for all experts of a layer, its quantization three an expert."""
    release = write(tmp_path / "release", GOOD["released qwen3.5-397b"]())
    fill(release)
    folder = made_of("qwen3.5-397b", tmp_path / "out", source=str(release), scheme="FP8_DYNAMIC")
    errors, not_finite = weight_errors(opened(folder), opened(release))
    assert not not_finite and 0.01 < errors["experts"].value < 0.04


def test_of_a_repository_it_is_the_same(made, serve_hub):
    folder = made("FP8_BLOCK")
    wanted = weight_errors(opened(folder), opened(GLM))
    serve_hub(folder)
    assert weight_errors(RuntimeView.of(open_source("org/model")), opened(GLM)) == wanted
