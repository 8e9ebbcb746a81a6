"""Groups of other builds of a model: what is taken, byte for byte, and what fits not."""

import os
import re
import shutil
from pathlib import Path

import pytest
from checked import check
from checkpoint_files import Checkpoint, write
from commands import ran
from data_files import json_of, put_json
from good import MODELS, builds, changes, llmcompressor, ours, released
from hub import serving
from keepmtp.checkpoints.donors import with_donors
from keepmtp.checkpoints.record import RECORD, read_record
from keepmtp.checkpoints.source import open_source, view_of
from keepmtp.checkpoints.values import read_tensor, refuse_other_norms
from keepmtp.pipeline import plan_for, quantize
from keepmtp.recipes.conventions import FORMATS, in_compressed_tensors, in_modelopt
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.family import HFName
from written_values import drop_block, fill, overwrite, poke, tensors_of


def with_norms_of(first: Path, *others: Path) -> None:
    """All builds are of one release, so they have its norms."""
    view = view_of(open_source(first))
    for folder in others:
        own = open_source(folder).entries
        for name, (_, _, raw) in tensors_of(first).items():
            place = view.place(HFName(name))
            if place and place.role == "norm" and place.part == "backbone":
                overwrite(folder, own[HFName(name)], raw)


@pytest.fixture
def filled(tmp_path):
    """The three builds of a model in these formats, with values."""

    def made(model: str = "glm-4.7", format: str = FORMATS[0]) -> tuple[Path, Path, Path]:
        folders = builds(tmp_path, model, format)
        for seed, folder in enumerate(folders):
            fill(folder, seed)
        with_norms_of(*folders)
        return folders

    return made


def codes(folder: Path, group: str, part: str) -> dict[str, bytes]:
    """The packed bytes of a group, by module: no dialect has others."""
    view = view_of(open_source(folder))
    found = {}
    for name, (_, _, raw) in tensors_of(folder).items():
        place = view.place(HFName(name))
        if place is None or place.part != part or place.leaf not in ("weight", "weight_packed", ""):
            continue
        if part == "mtp" or place.role == group:
            found[place.module] = raw
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("model", MODELS)
def test_groups_have_the_bytes_of_their_donors(model, format, filled, tmp_path):
    first, heavy, block = filled(model, format)
    out = tmp_path / "out"
    plan, text = plan_for(str(first), changes=changes(model, heavy, block))
    quantize(plan, text, out=out)
    group = MODELS[model]
    assert codes(out, group, "backbone") == codes(heavy, group, "backbone")
    assert codes(out, "", "mtp") == codes(block, "", "mtp")
    kept = tensors_of(first)
    view = view_of(open_source(first))
    for name, tensor in tensors_of(out).items():
        place = view.place(HFName(name))
        if place and place.part == "backbone" and place.role != group:
            assert tensor == kept[name], name
    assert check(out).findings == ()


@pytest.mark.few(1)
@pytest.mark.parametrize("format", FORMATS)
def test_scales_are_those_of_the_donor(format, filled, tmp_path):
    """As the output's dialect spells them; and in the donor's own, every tensor as it is."""
    first, heavy, _ = filled(format=format)
    out = tmp_path / "out"
    quantize(*plan_for(str(first), changes=[f"experts=from:{heavy}"]), out=out)
    new, old = tensors_of(out), tensors_of(heavy)
    spelled = in_compressed_tensors
    if format == "modelopt":
        spelled = lambda *form: in_modelopt(*form, of_experts=True)  # noqa: E731
    scales = 0
    for name, (dtype, shape, raw) in old.items():
        module, _, leaf = name.rpartition(".")
        if ".experts." in name and "layers.3." not in name:
            other = spelled("NVFP4A16", leaf, dtype, shape)
            assert new[f"{module}.{other.leaf}"][:2] == (other.dtype, other.shape)
            scales += other.change == "none" and new[f"{module}.{other.leaf}"][2] == raw
    assert scales
    same = tmp_path / "same"
    quantize(*plan_for(str(heavy), changes=[f"experts=from:{heavy}"]), out=same)
    assert tensors_of(same) == old


@pytest.mark.full
def test_plan_record_and_card_name_the_donors(filled, tmp_path):
    first, heavy, block = filled()
    words = " ".join(f"--set {word}" for word in changes("glm-4.7", heavy, block))
    assert re.search(rf"experts from {heavy}\s+\(local\): 0\.4 MiB", ran(f"plan {first} {words}"))
    out = tmp_path / "out"
    ran(f"quantize {first} {words} --out {out}")
    assert "finished before" in ran(f"quantize {first} {words} --out {out}")
    donors = read_record(out / RECORD).donors
    assert donors and {name: each.name for name, each in donors.items()} == {
        "experts": "heavy",
        "mtp": "block",
    }
    # Another build in the donor's place makes another output.
    for file in heavy.glob("*.safetensors"):
        os.utime(file)
    plan, text = plan_for(str(first), changes=changes("glm-4.7", heavy, block))
    with pytest.raises(KeepMTPError, match="an existing output is never overwritten"):
        quantize(plan, text, out=out)


def test_a_block_that_was_lost(filled, tmp_path):
    """As fix puts it back: config.json counts it; and packed, where --mtp says so."""
    first, _, block = filled()
    lost = drop_block(first, tmp_path / "lost")
    config = json_of(lost / "config.json")
    config["num_nextn_predict_layers"] = 0
    put_json(lost / "config.json", config)
    out = tmp_path / "out"
    quantize(*plan_for(str(lost), changes=[f"mtp=from:{block}"]), out=out)
    assert codes(out, "", "mtp") == codes(block, "", "mtp")
    assert json_of(out / "config.json")["num_nextn_predict_layers"] == 1
    plain = write(tmp_path / "plain", released("glm-4.7"))
    plan, _ = plan_for(str(lost), changes=[f"mtp=from:{plain}"], mtp="NVFP4A16")
    assert {tensor.scheme for tensor in plan.mtp if tensor.role == "experts"} == {"NVFP4A16"}


def test_experts_of_a_release_that_stacks_them(tmp_path):
    """A build stores each expert alone, the release a layer's in one tensor."""
    release = write(tmp_path / "release", released("qwen3.5-397b"))
    heavy = write(tmp_path / "heavy", ours("qwen3.5-397b", "NVFP4A16"))
    for one, other in ((release, heavy), (heavy, release)):
        plan, _ = plan_for(str(one), changes=[f"experts=from:{other}"])
        schemes = {t.scheme for t in plan.tensors if (t.part, t.role) == ("backbone", "experts")}
        assert schemes == ({"NVFP4A16"} if other is heavy else {""})


@pytest.mark.parametrize("format", FORMATS)
def test_experts_of_a_native_fp8_release(format, tmp_path):
    first = write(tmp_path / "first", ours("deepseek-v3.1", "NVFP4A16", format=format))
    release = write(tmp_path / "release", released("deepseek-v3.1"))
    plan, _ = plan_for(str(first), changes=[f"experts=from:{release}"])
    schemes = {t.scheme for t in plan.tensors if (t.part, t.role) == ("backbone", "experts")}
    assert schemes == {"FP8_BLOCK"} and {t.fate for t in plan.tensors} == {"keep"}


def test_of_a_repository_only_the_group_is_read(filled, hub_at, tmp_path):
    """By ranges, and nothing of it is downloaded; the recipe names the commit."""
    first, heavy, _ = filled()
    wanted = tmp_path / "wanted"
    quantize(*plan_for(str(first), changes=[f"experts=from:{heavy}"]), out=wanted)
    with serving(tmp_path / "hub") as hub:
        commit = hub.mirror("org/heavy", heavy)
        hub_at(hub.endpoint)
        plan, text = plan_for(str(first), changes=["experts=from:org/heavy"])
        assert commit in text
        hub.requests.clear()
        quantize(plan, text, out=tmp_path / "out")
        asked = [line for line in hub.requests if "safetensors" in line]
    assert asked and all("bytes=" in line for line in asked)
    assert tensors_of(tmp_path / "out") == tensors_of(wanted)
    donors = read_record(tmp_path / "out" / RECORD).donors
    assert donors and donors["experts"].revision == commit


# --- what fits not --------------------------------------------------------------------------------


def resized(key: str):
    def change(checkpoint: Checkpoint) -> None:
        checkpoint.config[key] *= 2

    return change


def without(pattern: str):
    def change(checkpoint: Checkpoint) -> None:
        checkpoint.take(pattern)

    return change


EXPERT = r"model\.layers\.1\.mlp\.experts\.0\.down_proj"
BROKEN = {
    "width": (resized("hidden_size"), "must be a build of the same model as .*, whose hidden_size"),
    "vocabulary": (resized("vocab_size"), "whose vocab_size is 512; got 1024"),
    "layers": (resized("num_hidden_layers"), "whose num_hidden_layers is 3; got 6"),
    "experts": (resized("n_routed_experts"), "whose n_routed_experts is 4; got 8"),
    "a group": (
        without(r".*\.mlp\.experts\..*"),
        "heavy: model.layers.1.mlp.experts.0.down_proj: ",
    ),
    "an expert": (without(rf"{EXPERT}\..*"), f"heavy: {EXPERT}: a donor must have the modules of"),
    "GPTQ": (
        lambda other: other.rename(rf"({EXPERT})\.weight_packed", r"\1.qweight"),
        rf"heavy: {EXPERT}\.weight: must be plain, .*; got qweight U8",
    ),
    "a scale": (without(rf"{EXPERT}\.weight_scale"), rf"heavy: {EXPERT}\.weight: must be plain"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_disagrees_is_refused_before_a_byte(name, tmp_path):
    change, says = BROKEN[name]
    first, heavy, _ = builds(tmp_path, "glm-4.7", "compressed-tensors")
    shutil.rmtree(heavy)
    other = ours("glm-4.7", "NVFP4A16")
    change(other)
    write(heavy, other)
    with pytest.raises(KeepMTPError) as caught:
        plan_for(str(first), changes=[f"experts=from:{heavy}"])
    assert re.search(says, str(caught.value)), caught.value


def test_another_family_is_refused(tmp_path):
    first = write(tmp_path / "first", ours("glm-4.7", "FP8_DYNAMIC"))
    other = write(tmp_path / "other", ours("deepseek-v3.1", "FP8_DYNAMIC"))
    with pytest.raises(KeepMTPError, match="whose family is glm4_moe; got deepseek_v3"):
        plan_for(str(first), changes=[f"experts=from:{other}"])


def test_what_the_dialect_cannot_say_is_refused(tmp_path):
    first = write(tmp_path / "first", ours("glm-4.7", "NVFP4A16", format="modelopt"))
    other = write(tmp_path / "other", llmcompressor("glm-4.7", "FP8_DYNAMIC"))
    with pytest.raises(KeepMTPError, match=r"FP8_DYNAMIC; got none, for model.layers.1.mlp.expert"):
        plan_for(str(first), changes=[f"experts=from:{other}"])


def test_norms_of_another_build_are_refused(filled, tmp_path):
    """AWQ and SmoothQuant move scale from a norm into the weights after it."""
    first, heavy, _ = filled()
    name = "model.layers.1.post_attention_layernorm.weight"
    poke(heavy, name, 0.75, at=3)
    plan, text = plan_for(str(first), changes=[f"experts=from:{heavy}"])
    with pytest.raises(KeepMTPError, match=f"heavy: {name}: a donor must have the norms of"):
        quantize(plan, text, out=tmp_path / "out")
    assert not [*tmp_path.glob("out*")]


def test_a_group_is_named_once(tmp_path):
    first, heavy, block = builds(tmp_path, "glm-4.7", "compressed-tensors")
    for twice in ("mtp", "experts"):
        with pytest.raises(KeepMTPError, match="names a group once"):
            plan_for(str(first), changes=[f"{twice}=from:{heavy}", f"{twice}=from:{block}"])
    with pytest.raises(KeepMTPError, match=r"got experts=from:\. Write experts=VALUE"):
        plan_for(str(first), changes=["experts=from:"])


def test_a_group_that_both_lack_is_refused(tmp_path):
    first, heavy, _ = builds(tmp_path, "glm-4.7", "compressed-tensors")
    opened = open_source(str(first))
    with pytest.raises(KeepMTPError, match=r"heavy: linear_attention: .*; got none in either"):
        with_donors(opened, {"linear_attention": open_source(str(heavy))})


def test_norms_of_a_donor_are_read_once(filled, monkeypatch):
    """Of a repository each is a request."""
    first, heavy, _ = filled()
    changes = [f"{group}=from:{heavy}" for group in ("experts", "attention")]
    plan, _ = plan_for(str(first), changes=changes)
    names = []

    def watched(source, entry):
        names.append((source.where, entry.name))
        return read_tensor(source, entry)

    monkeypatch.setattr("keepmtp.checkpoints.values.read_tensor", watched)
    refuse_other_norms(plan.source)
    assert names and len({*names}) == len(names)
