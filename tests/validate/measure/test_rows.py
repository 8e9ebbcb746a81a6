"""The error of a sample against that of whole tensors, which compressed-tensors reads; and a broken
matrix that stands out by name.
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
from keepmtp.pipeline import plan_for, quantize
from keepmtp.validate.check.against import matrices, relative_error
from keepmtp.validate.facts.comparison import group_of
from keepmtp.validate.measure.rows import read_rows, sampled_errors
from releases import made_of
from torch import cat, equal
from writing import tiny, weights_of
from written_values import decompressed, fill, opened, poke

ALL = 10**9
SCHEMES = [
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4A16",
    "MXFP4A16",
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "W8A8",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of the tiny model in a scheme, made once."""
    folder = tmp_path_factory.mktemp("rows")

    def make(scheme: str) -> Path:
        if not (folder / scheme).is_dir():
            made_of("tiny-glm4-moe", folder / scheme, scheme=scheme)
        return folder / scheme

    return make


def whole(folder: Path, scheme: str, group: str) -> float:
    """The error of a group by compressed-tensors, over all its tensors."""
    tensors, released = weights_of(folder), weights_of(GLM)
    pairs = []
    for module, (place, weight) in matrices(opened(folder)).items():
        if group_of(place) == group:
            ours = tensors.get(f"{module}.weight")
            if weight.form != "plain":
                ours = decompressed(scheme, module, tensors)
            pairs.append((ours.flatten(), released[f"{module}.weight"].flatten()))
    ours, theirs = (cat(flat)[None] for flat in zip(*pairs, strict=True))
    return relative_error(ours, theirs)


@pytest.mark.few(3)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_sample_has_the_error_of_whole_tensors_within_its_interval(scheme, made):
    ours, release = opened(made(scheme)), opened(GLM)
    true = {group: whole(made(scheme), scheme, group) for group in ("attention", "experts")}
    every, _ = sampled_errors(ours, release, ALL)
    held = 0
    for group, value in true.items():
        assert every[group].value == pytest.approx(value, rel=1e-4)
        assert every[group].low == every[group].high, "all of it was read"
        assert every[group].stretches == every[group].of_stretches
    for stretches in (16, 24, 32, 40, 48):
        errors, _ = sampled_errors(ours, release, 8 * stretches)
        again, _ = sampled_errors(ours, release, 8 * stretches)
        assert errors == again, "the same sample again"
        for group, value in true.items():
            error = errors[group]
            assert error.stretches == stretches and error.low <= error.value <= error.high
            assert error.high - error.low <= 0.2 * error.value
            held += error.low <= value <= error.high
    # Of ten intervals of 95 %, more than two miss once in a hundred.
    assert held >= 8, (scheme, held)


@pytest.mark.few(2)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stretch_of_rows_is_that_of_the_whole_tensor(scheme, made):
    """Of every stretch of one matrix of each kind, with blocks, zero points and scales a row."""
    folder = made(scheme)
    runtime, tensors = opened(folder), weights_of(folder)
    seen = set[str]()
    for module, (place, weight) in matrices(runtime).items():
        if weight.form != "plain" and place.row.path not in seen:
            seen.add(place.row.path)
            full = decompressed(scheme, module, tensors).float()
            for first in range(0, len(full), 8):
                values, _, num_bytes = read_rows(runtime.source, weight, first)
                assert equal(values, full[first : first + 8]), (module, first)
                assert 0 < num_bytes < sum(entry.num_bytes for entry in weight.parts.values())
    assert len(seen) > 6


def test_one_matrix_ten_times_too_large_is_named(made, tmp_path):
    folder = tmp_path / "broken"
    shutil.copytree(made("W8A8"), folder)
    module = "model.layers.2.mlp.experts.3.up_proj"
    before, _ = sampled_errors(opened(folder), opened(GLM), 1024)
    scale = weights_of(folder)[f"{module}.weight_scale"].float() * 10
    poke(folder, f"{module}.weight_scale", scale.flatten().tolist())
    after, _ = sampled_errors(opened(folder), opened(GLM), 1024)
    assert after["experts"].worst == module and after["experts"].worst_value > 8
    assert after["experts"].value > 50 * before["experts"].value
    assert after["experts"].low > before["experts"].high
    assert {**after, "experts": None} == {**before, "experts": None}, "of no other group"


def test_a_group_with_a_value_that_is_no_number_is_not_measured(made, tmp_path):
    """It is named with the rows; the other groups have their errors."""
    folder = tmp_path / "broken"
    shutil.copytree(made("W8A8"), folder)
    name = "model.layers.0.self_attn.o_proj"
    every, _ = sampled_errors(opened(folder), opened(GLM), ALL)
    poke(folder, f"{name}.weight_scale", math.nan, at=9)
    errors, not_finite = sampled_errors(opened(folder), opened(GLM), ALL)
    assert not_finite == {"attention": f"infinity or NaN in {name}, rows 8 to 15"}
    assert errors == {group: error for group, error in every.items() if group != "attention"}
    _, not_finite = sampled_errors(opened(GLM), opened(folder), ALL)
    says = f"infinity or NaN in {name} of the release, rows 8 to 15"
    assert not_finite == {"attention": says}


def test_both_dialects_have_the_same_error(made, tmp_path):
    ours = made("NVFP4A16")
    theirs = tmp_path / "modelopt"
    quantize(*plan_for(str(ours), changes=["format=modelopt"]), out=theirs)
    errors, _ = sampled_errors(opened(ours), opened(GLM), 256)
    others, _ = sampled_errors(opened(theirs), opened(GLM), 256)
    assert errors.keys() == others.keys()
    for group, error in errors.items():  # 1 / (1 / x) may be the neighbour of x
        assert others[group].value == pytest.approx(error.value, rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("model", ["deepseek-r1", "qwen3-next-80b", "mimo-7b"])
def test_a_release_in_fp8_blocks_and_other_families(model, tmp_path):
    release = tiny(tmp_path / "release", model)
    folder = made_of(model, tmp_path / "out", source=str(release), scheme="NVFP4A16")
    errors, _ = sampled_errors(opened(folder), opened(release), 512)
    assert 0.05 < max(error.value for error in errors.values()) < 0.2, errors
    assert errors["head"].value == 0


def test_experts_in_one_tensor_are_compared_one_by_one(tmp_path):
    """The release has one tensor for all experts of a layer, its quantization three an expert."""
    release = write(tmp_path / "release", GOOD["released qwen3.5-397b"]())
    fill(release)
    folder = made_of("qwen3.5-397b", tmp_path / "out", source=str(release), scheme="FP8_DYNAMIC")
    errors, not_finite = sampled_errors(opened(folder), opened(release), 512)
    error = errors["experts"]
    assert not not_finite
    assert 0.01 < error.value < 0.04 and error.matrices == error.of_matrices > 10


def test_a_repository_is_asked_in_runs_of_rows(made, serve_hub):
    """A sample is hundreds of stretches of eight rows, each with its scales: 3,353 requests when each
    was one.
    """
    folder = made("FP8_DYNAMIC")
    wanted = sampled_errors(opened(folder), opened(GLM), 4096)
    requests = serve_hub(folder)
    remote = RuntimeView.of(open_source("org/model"))
    before = len(requests)
    assert sampled_errors(remote, opened(GLM), 4096) == wanted
    assert len(requests) - before < 30
