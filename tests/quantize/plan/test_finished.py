"""A finished checkpoint as a source: what `--set` names changes, all else keeps names and bytes."""

import os
import re
import shutil
from pathlib import Path

import pytest
from checked import check
from checkpoint_files import write
from commands import GLM, ran
from data_files import json_of, put_json, table
from good import cached, llmcompressor, ours, outputs_of, released
from keepmtp.checkpoints.safetensors_file import total_bytes
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.conventions import FORMATS
from keepmtp.recipes.errors import KeepMTPError
from outputs import digests
from safetensors.torch import load_file, save_file
from written_values import fill, tensors_of

REFUSED = table("quantize/plan/test_finished")["refused"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> dict[str, Path]:
    """One model, quantized, in each format."""
    home = tmp_path_factory.mktemp("finished")
    first = home / "compressed-tensors"
    quantize(*plan_for(str(GLM), scheme="nvfp4a16-fp8"), out=first)
    other = home / "modelopt"
    quantize(*plan_for(str(first), changes=["format=modelopt"]), out=other)
    return {"compressed-tensors": first, "modelopt": other}


def planned(folder: Path, *changes: str, **choices: bool) -> Plan:
    return plan_for(str(folder), changes=changes, **choices)[0]


def linked(first: Path, second: Path) -> set[str]:
    """The shards that are one file in both folders."""
    names = {path.name for path in first.glob("*.safetensors")}
    return {name for name in names if os.path.samefile(first / name, second / name)}


@pytest.mark.parametrize("format", FORMATS)
def test_one_group_changes(format, finished, tmp_path):
    """By the command; the other shard is a link, and the same words find that it is finished."""
    first = finished[format]
    before = digests(first)
    out = tmp_path / "out"
    ran(f"quantize {first} --set mtp=NVFP4A16 --out {out}")
    assert digests(first) == before
    assert linked(first, out) == {"model-00001-of-00002.safetensors"}
    old, new = tensors_of(first), tensors_of(out)
    changed = {name for name in new if new[name] != old.get(name)}
    assert changed and all(name.startswith("model.layers.3.") for name in changed)
    assert check(out).findings == ()
    assert json_of(out / "config.json")["quantization_config"]["quant_method"] == format
    assert quantize(*plan_for(str(first), changes=["mtp=NVFP4A16"]), out=out).was_there
    made = planned(first, "mtp=source")
    assert made.num_bytes_staying == total_bytes(made.linked) == made.num_bytes_before
    # The recipe that it carries makes the same bytes.
    again = tmp_path / "again"
    quantize(*plan_for(str(out / "recipe.yaml"), source=str(first)), out=again)
    assert digests(again).items() >= tensors_digests(out).items()


def tensors_digests(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in digests(folder).items() if "safetensors" in name}


def test_scales_that_another_format_names_as_the_release_does_are_found(tmp_path):
    """Those of experts in FP8 blocks."""
    write(tmp_path / "first", released("deepseek-r1"))
    made = planned(tmp_path / "first", "format=modelopt")
    written = {output.name for shard in made.shards for output in shard.outputs}
    assert "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv" in written


def test_of_a_release_too(tmp_path):
    """Its plain shards are links; what else a server has of it is what it was."""
    shutil.copytree(GLM, tmp_path / "first")
    out = tmp_path / "out"
    made = planned(tmp_path / "first", "mtp=FP8_DYNAMIC")
    quantize(made, "", out=out)
    new = {shard.file for shard in made.written}
    shards = {path.name for path in out.glob("*.safetensors")}
    assert linked(tmp_path / "first", out) == shards - new and new < shards
    assert check(out).findings == ()
    old = tensors_of(GLM)
    changed = {name for name, value in tensors_of(out).items() if value != old.get(name)}
    assert changed and all(name.startswith("model.layers.3.") for name in changed)


def test_activations_say_what_eight_bits_are(tmp_path):
    """FP8 with a scale a row is FP8_DYNAMIC only where the config quantizes activations."""
    folder = write(tmp_path / "first", ours("glm-4.7", "FP8_DYNAMIC"))
    assert {t.scheme for t in planned(folder, "mtp=source").tensors} == {"", "FP8_DYNAMIC"}
    config = json_of(folder / "config.json")
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    put_json(folder / "config.json", config)
    assert all(shard.is_link for shard in planned(folder, "mtp=source").shards)
    with pytest.raises(KeepMTPError, match="`source` needs a form that modelopt can say"):
        planned(folder, "format=modelopt")


@pytest.mark.parametrize("format", FORMATS)
def test_scales_of_the_cache(format, tmp_path):
    """They travel with their layer, and go where others are asked for."""
    folder = write(tmp_path / "first", outputs_of(cached("glm-4.7", "NVFP4", format=format)))
    fill(folder)
    scales = [name for name in tensors_of(folder) if name.endswith(("k_scale", "v_scale"))]
    made = planned(folder, "mtp=source")
    assert all(shard.is_link for shard in made.shards)
    anew = planned(folder, "kv_cache=FP8")
    dropped = {tensor.name for tensor in anew.tensors if tensor.fate == "drop"}
    assert dropped == {*scales} and anew.needs_calibration


def test_new_scales_of_the_cache_leave_all_shards_alone(finished):
    made = planned(finished["modelopt"], "kv_cache=FP8")
    (new,) = (shard for shard in made.shards if not shard.is_link)
    assert new.file == "model-kv-scales.safetensors" and len(made.shards) == 3
    assert {output.shape for output in new.outputs} == {()}


def test_rotations_are_not_lost(tmp_path):
    folder = write(tmp_path / "first", ours("glm-4.7", "FP8_DYNAMIC"))
    config = json_of(folder / "config.json")
    config["quantization_config"]["transform_config"] = {"config_groups": {"R1": {}}}
    put_json(folder / "config.json", config)
    for change in ("attention=bf16", "format=modelopt"):
        with pytest.raises(KeepMTPError, match="transform_config: must be empty"):
            planned(folder, change)
    assert all(shard.is_link for shard in planned(folder, "mtp=source").shards)


def test_parts_of_a_module_stay_in_their_files(finished, tmp_path):
    """A scale that is in another file than its weight."""
    folder = tmp_path / "first"
    shutil.copytree(finished["compressed-tensors"], folder)
    for record in ("keepmtp.json", "recipe.yaml"):
        (folder / record).unlink()
    one, two = sorted(folder.glob("*.safetensors"))
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    tensors, others = load_file(one), load_file(two)
    others[name] = tensors.pop(name)
    index = json_of(folder / "model.safetensors.index.json")
    index["weight_map"][name] = two.name
    put_json(folder / "model.safetensors.index.json", index)
    for path, held in ((one, tensors), (two, others)):
        path.unlink()
        save_file(held, path)
    made = planned(folder, "experts=bf16")
    assert [shard.is_link for shard in made.shards] == [False, True]
    quantize(made, "", out=tmp_path / "out")
    assert check(tmp_path / "out").findings == ()


def test_a_whole_block_in_bf16_has_no_packed_matrix(tmp_path):
    """No recipe quantizes the indexer; other tools do."""
    checkpoint = llmcompressor("deepseek-v3.2", "FP8_DYNAMIC", "FP8_DYNAMIC")
    stems = set[str]()
    for name, (_, shape) in [*checkpoint.tensors.items()]:
        if name.endswith("indexer.wq_b.weight"):
            checkpoint.tensors[name] = ("F8_E4M3", shape)
            checkpoint.tensors[f"{name}_scale"] = ("BF16", (shape[0], 1))
            stems.add(name.removesuffix(".weight"))
    ignored = checkpoint.quantization["ignore"]
    checkpoint.quantization["ignore"] = [name for name in ignored if "wq_b" not in name]
    plan = planned(write(tmp_path / "first", checkpoint), "mtp=bf16")
    fates = {tensor.module: tensor.fate for tensor in plan.tensors if tensor.module in stems}
    last = max(stems, key=lambda stem: int(stem.split(".")[2]))
    assert len(fates) > 1
    assert fates == dict.fromkeys(stems, "keep") | {last: "dequantize"}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_before_a_byte(name, finished, tmp_path):
    row = REFUSED[name]
    with pytest.raises(KeepMTPError) as caught:
        plan_for(str(finished["compressed-tensors"]), **row["asked"])
    assert re.search(row["says"], str(caught.value)), caught.value


def test_a_second_rounding_is_asked_for(finished):
    made = planned(finished["compressed-tensors"], "attention=NVFP4A16", requantize=True)
    assert made.recipe.requantize
    assert {t.scheme for t in made.tensors if t.role == "attention"} >= {"NVFP4A16"}
