"""Values against the release's: rounding passes in every scheme, and each way to write a weight
wrong has its name.
"""

import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import changed, lose, write
from commands import ROOT, keepmtp, keepmtp_without, ran, refused
from good_checkpoints import GOOD
from keepmtp.checkpoints.dequantize import dequantize
from keepmtp.quantize.pack.pack import pack
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.family import HFName
from keepmtp.recipes.forms import FORMS
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check import against
from keepmtp.validate.check.against import (
    compared,
    has_column_factors,
    not_compared,
    pairs,
    relative_error,
)
from keepmtp.validate.check.check import examine
from keepmtp.validate.check.values import check_values, with_values
from keepmtp.validate.facts.findings import commands
from releases import made_of
from written_values import fill, opened, poke

MODELS = ROOT / "models"
N = K = 256
O_PROJ = "model.layers.1.self_attn.o_proj"


@pytest.fixture(scope="module")
def weight():
    return torch.randn(N, K, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()


@pytest.fixture(scope="module")
def packed(weight):
    """The NVFP4 weight of compressed-tensors, as a writer stores it."""
    return pack(SCHEMES["NVFP4A16"], [weight])[0]


def named(folder: Path, end: str) -> HFName:
    """The first tensor of a checkpoint whose name ends so."""
    return next(name for name in opened(folder).source.entries if name.endswith(end))


def differing(folder: Path, release: Path, level: str) -> list[str]:
    """The weights that are not the release's."""
    findings = check_values(opened(folder), level, release=opened(release))
    return [finding.where for finding in findings if finding.rule == "release"]


def values(parts, form="nvfp4"):
    return dequantize(form, parts, shape=(N, K)).float()


def half_of_the_scales(scale):
    other = scale[N // 2 :].float().div(4).to(torch.float8_e4m3fn)
    return torch.cat([scale[: N // 2], other])


def codes_swapped(codes):
    return (codes << 4) | (codes >> 4)


# The part that is wrong, and what was done to it.
WRONG = {
    "global scale x8": ("weight_global_scale", lambda scale: scale / 8),
    "half of the scales x4": ("weight_scale", half_of_the_scales),
    "codes swapped": ("weight_packed", codes_swapped),
    "another weight": ("weight_packed", lambda codes: codes.flip(0)),
}


# Each form that can be read: the scheme that packs it, and its tensors by the form's own names.
PACKED_AS = {
    "fp8_block": ["FP8_BLOCK", {}],
    "fp8_channel": ["FP8_DYNAMIC", {}],
    "int8": ["W8A8", {}],
    "int_packed": ["W4A16", {}],
    "mxfp4": ["MXFP4", {}],
    "nvfp4": ["NVFP4A16", {}],
    "nvfp4_modelopt": [
        "NVFP4A16",
        {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"},
    ],
}


@pytest.mark.parametrize("form", PACKED_AS)
def test_rounding_is_within_the_bound_and_a_row_of_scales_that_is_not_is_named(form, weight):
    scheme, names = PACKED_AS[form]
    parts = {
        names.get(leaf, leaf): part for leaf, part in pack(SCHEMES[scheme], [weight])[0].items()
    }
    if form == "nvfp4_modelopt":
        parts["weight_scale_2"] = 1 / parts["weight_scale_2"]
    block = (128, 128) if form == "fp8_block" else None
    own = dequantize(form, parts, shape=(N, K), block=block).float()
    assert relative_error(own, weight.float()) < FORMS[form].error / 1.5
    own[: N // 2] *= 4
    assert relative_error(own, weight.float()) > FORMS[form].error


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pack_is_outside_the_bound_and_no_transform(name, weight, packed):
    leaf, change = WRONG[name]
    wrong = values(packed | {leaf: change(packed[leaf])})
    original = weight.float()
    assert relative_error(wrong, original) > FORMS["nvfp4"].error
    assert not has_column_factors(wrong, original, FORMS["nvfp4"].error)


def test_smoothed_columns_are_told_from_another_weight(weight):
    original = weight.float()
    assert has_column_factors(original * torch.linspace(0.1, 4, K), original, 0.08)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A real output, FP8 rows with a BF16 MTP block."""
    return made_of("tiny-glm4-moe", tmp_path_factory.mktemp("values") / "fp8", scheme="fp8-dynamic")


@pytest.mark.parametrize("level", ["scales", "all"])
def test_our_own_output_is_what_the_release_was(written, level):
    release = opened(MODELS / "tiny-glm4-moe")
    assert check_values(opened(written), level, release=release) == ()
    paired = pairs(opened(written), release, whole=level == "all")
    assert len(paired.found) > 20 and not paired.others


def test_a_release_with_stacked_experts_is_compared_expert_by_expert(tmp_path):
    """The release has one tensor for all experts of a layer, its quantization three tensors an
    expert.
    """
    release = write(tmp_path / "release", GOOD["released qwen3.5-397b"]())
    fill(release)
    choices = {"source": str(release), "scheme": "fp8-dynamic"}
    folder = made_of("qwen3.5-397b", tmp_path / "out", **choices)
    assert check_values(opened(folder), "all", release=opened(release)) == ()
    name = named(folder, "experts.1.up_proj.weight_scale")
    poke(folder, name, 1e-3)
    assert differing(folder, release, "all") == [name.removesuffix("_scale")]
    # And the other way round: a copy that has them stacked, of a release that has them one by one.
    (finding,) = check_values(opened(release), "all", release=opened(folder))
    assert (
        finding.where.endswith("experts.gate_up_proj")
        and "differs from the release" in finding.says
    )


def test_the_error_is_a_share_of_the_release(weight):
    assert relative_error(weight * 8, weight) == pytest.approx(7.0)
    assert relative_error(weight * 0, weight * 0) == 0.0
    assert relative_error(weight, weight * 0) == 1.0


def test_bytes_that_are_the_releases_are_not_computed_with(written, tmp_path, monkeypatch):
    """And the twin: a few rows of a tensor that is else the same are found."""
    release = opened(written)
    folder = shutil.copytree(written, tmp_path / "changed")
    name = "model.embed_tokens.weight"
    poke(folder, name, 3.0, at=slice(0, 4096))
    found = [
        pair
        for pair in pairs(release, opened(folder), whole=True).found
        if pair.weight.weight.name == name
    ]
    [objected] = compared(opened(folder), release, found)
    assert objected.finding.where == name
    monkeypatch.setattr(against, "dequantize", None)
    assert not [*compared(opened(written), release, found)]


def test_not_compared_is_said_with_a_weight_and_the_reason(tmp_path):
    own = opened(write(tmp_path / "own", GOOD["glm nvfp4"]()))
    lacking = changed(GOOD["released glm-4.7"], lose(re.escape(f"{O_PROJ}.weight")))
    paired = pairs(own, opened(write(tmp_path / "release", lacking)), whole=True)
    (objected,) = not_compared(paired)
    found = objected.finding
    assert found.where.startswith(O_PROJ)
    total = len(paired.found) + 1
    assert f"{total - 1:,} of {total:,} weights are compared" in found.says
    assert "the release has none of the name" in found.says


def test_compared_names_another_models_release_by_its_widths(written, tmp_path):
    wide = write(tmp_path / "wide", GOOD["released glm-4.7"]())
    fill(wide)
    findings = check_values(opened(written), "scales", release=opened(wide))
    assert any("where the release has [" in finding.says for finding in findings)
    other = write(tmp_path / "other", GOOD["released qwen3.5-27b"]())
    with pytest.raises(CheckpointError, match="the release must have weights by the names of"):
        check_values(opened(written), "scales", release=opened(other))


def test_compared_names_a_wrong_scale_of_a_real_output(written, tmp_path):
    folder = shutil.copytree(written, tmp_path / "broken")
    name = named(folder, "o_proj.weight_scale")
    poke(folder, name, 1e-3)
    found = differing(folder, MODELS / "tiny-glm4-moe", "scales")
    assert found == [name.removesuffix("_scale")]


def test_compared_names_the_command_that_puts_the_block_back(written, tmp_path):
    """Of the MTP block; a module of the backbone is quantized again."""
    release = MODELS / "tiny-glm4-moe"
    folder = shutil.copytree(written, tmp_path / "broken")
    block = opened(folder)
    mtp = [name for name in block.mtp_names if name.endswith(".eh_proj.weight")]
    poke(folder, mtp[0], 1e3)
    findings = check_values(opened(folder), "scales", release=opened(release))
    (found,) = (finding for finding in findings if finding.rule == "release")
    assert (found.where, found.cure) == (mtp[0], "Put the release's block in")
    judged = with_values(examine(folder), "scales", source=str(release)).data.findings
    assert commands(judged, "it") == ["keepmtp fix it --from RELEASE --out NEW"]


@pytest.fixture
def broken(written, tmp_path) -> tuple[Path, str]:
    """A checkpoint with a scale that is no number, and the scale's name."""
    folder = shutil.copytree(written, tmp_path / "broken")
    name = named(folder, "o_proj.weight_scale")
    poke(folder, name, float("nan"), at=0)
    return folder, name


@pytest.mark.full
def test_the_command_reads_values_and_names_the_tensor(written, broken):
    folder, name = broken
    good = keepmtp(f"check {written} --values --source {MODELS}/tiny-glm4-moe", status=0)
    assert "no findings" in good.stdout, good.stderr
    assert "reading values" in good.stderr
    ran(f"check {folder}")
    for words in (
        ["--values", str(folder)],
        [str(folder), "--values=all"],
        [str(folder), "--values", "scales"],
    ):
        done = keepmtp("check", *words, status=1)
        assert f"error: {name}\n" in done.stdout, done.stdout + done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words, says",
    [
        ("--source x", "--source is what values are compared with; got no --values. Add --values."),
        ("--values --source ./nothing", "nothing: a checkpoint is a folder with config.json"),
        (
            "--values --source MODELS/tiny-qwen3_5",
            "of a glm4_moe checkpoint is of the same family; got",
        ),
    ],
)
def test_a_release_that_cannot_be_compared_is_refused(words, says, written):
    refused("check", str(written), *words.replace("MODELS", str(MODELS)).split(), says=says)


@pytest.mark.full
def test_a_finding_of_values_is_a_red_gate(broken):
    folder, name = broken
    ran(f"check {folder} --values --record", status=1)
    assert name in ran(f"eval {folder} --only gates", status=1)


def test_torch_is_asked_for_before_a_byte_is_read(written, tmp_path):
    done = keepmtp_without(("torch",), f"check {written} --values", cwd=tmp_path)
    assert done.stderr.startswith("error: check --values: needs keepmtp's `quantize` extra")
