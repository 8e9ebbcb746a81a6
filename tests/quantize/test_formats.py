"""A finished checkpoint in the other dialect, and back: the same tensors, but for reciprocals that are
a step of F32 away.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from broken import built
from calibrated import in_both_formats
from checked import check
from checkpoint_files import Checkpoint, pack, write
from commands import ran, refused
from data_files import json_of, table
from good import cached, llmcompressor, ours, outputs_of
from good_checkpoints import GOOD
from keepmtp.checkpoints.files import partial_path
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.pack.unit import with_dtypes
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.write.output import claim
from keepmtp.quantize.write.writer import write_shards
from keepmtp.recipes.errors import KeepMTPError
from outputs import digests
from safetensors.torch import load_file, save_file
from writing import weights_of
from written_values import fill, poke, tensors_of

WORDS = {"experts": "NVFP4", "rest": "FP8_DYNAMIC", "shared_experts": "FP8"}
OTHER = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors"}


@pytest.fixture(scope="module")
def twins(tmp_path_factory) -> dict[str, Path]:
    """One model with a plain MTP block, by the format that it was written in."""
    made = in_both_formats(tmp_path_factory.mktemp("twins"), mtp="bf16", **WORDS)
    return {name: folder for name, (_, folder) in made.items()}


def assert_same(one: Path, other: Path) -> None:
    """Two checkpoints have the same tensors; of a reciprocal's reciprocal its neighbour will do."""
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, (dtype, shape, data) in first.items():
        assert second[name][:2] == (dtype, shape), name
        if second[name][2] != data:
            values = [
                torch.frombuffer(bytearray(raw), dtype=torch.int32)
                for raw in (data, second[name][2])
            ]
            assert dtype == "F32" and (values[0] - values[1]).abs().max() == 1, name


def planned(folder: Path, to: str) -> Plan:
    return plan_for(str(folder), changes=[f"format={to}"])[0]


def converted(folder: Path, out: Path) -> Plan:
    """To the other dialect; nothing of the old folder changes."""
    before = digests(folder)
    made = planned(folder, OTHER[quantization_in(folder)["quant_method"]])
    quantize(made, "", out=out)
    assert digests(folder) == before
    return made


def assert_back(folder: Path, made: Path) -> None:
    """Good there, and good and the same again in `back`."""
    assert_same(folder / "back", made)
    assert check(folder / "there").findings == check(folder / "back").findings == ()


def quantization_in(folder: Path) -> dict:
    """The quantization config, wherever it is."""
    found = json_of(folder / "config.json")
    return found.get("quantization_config") or {"quant_method": "modelopt"}


@pytest.mark.parametrize("first", OTHER)
def test_scales_of_the_cache_follow_their_attention(first, tmp_path):
    """Under the other dialect's names and dtypes; those that are vLLM's own stay."""
    made = write(tmp_path / "first", outputs_of(cached("glm-4.7", "NVFP4", format=first)))
    fill(made)
    converted(made, tmp_path / "there")
    named = "model.layers.0.self_attn.{}k_scale"
    was, becomes = [
        named.format("k_proj." * (name == "modelopt")) for name in (first, OTHER[first])
    ]
    before, after = tensors_of(made), tensors_of(tmp_path / "there")
    assert was in before and was not in after
    # Numbers that BF16 does not hold stay F32.
    assert after[becomes][:2] == ("F32", () if OTHER[first] == "modelopt" else (1,))
    assert weights_of(tmp_path / "there")[becomes].item() == weights_of(made)[was].item()
    own = "model.layers.3.self_attn.attn.v_scale"
    assert after[own] == before[own]
    converted(tmp_path / "there", tmp_path / "back")
    assert_back(tmp_path, made)


@pytest.mark.parametrize("first", OTHER)
def test_there_and_back(twins, first, tmp_path):
    there = converted(twins[first], tmp_path / "there")
    back = converted(tmp_path / "there", tmp_path / "back")
    assert (there.recipe.format, back.recipe.format) == (OTHER[first], first)
    assert_back(tmp_path, twins[first])


def test_a_converted_checkpoint_is_what_quantize_writes_in_that_format(twins, tmp_path):
    converted(twins["compressed-tensors"], tmp_path / "out")
    assert tensors_of(tmp_path / "out") == tensors_of(twins["modelopt"])
    made, written = quantization_in(tmp_path / "out"), quantization_in(twins["modelopt"])
    assert made.pop("ignore").sort() == written.pop("ignore").sort()
    assert made == written


def test_the_plain_block_is_a_hard_link(twins, tmp_path):
    first = twins["compressed-tensors"]
    linked = {shard.file for shard in converted(first, tmp_path / "out").linked}
    assert linked and all(
        os.path.samefile(first / name, tmp_path / "out" / name) for name in linked
    )
    entries = open_source(first).entries.values()
    assert {entry.file for entry in entries if "eh_proj" in entry.name} <= linked


def test_a_killed_run_keeps_the_shards_that_it_had(twins, tmp_path):
    first, out = twins["modelopt"], tmp_path / "out"
    made = planned(first, "compressed-tensors")
    whole = with_dtypes(made)
    with claim(whole, out) as work:
        write_shards(whole, work, threads=1)
    finished = {path.stat().st_ino for path in partial_path(out).glob("*.safetensors")}
    quantize(made, "", out=out)
    assert finished <= {path.stat().st_ino for path in out.glob("*.safetensors")} and finished
    quantize(made, "", out=tmp_path / "whole")
    assert digests(out).items() >= digests(tmp_path / "whole").items()


def test_scales_of_one_module_may_have_two_dtypes(tmp_path):
    """Each keeps its values: one in BF16, and one in F32, which BF16 does not hold."""
    first = write(tmp_path / "first", ours("glm-4.7", "FP8"))
    fill(first)
    for path in first.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith(".input_scale"):
                tensors[name] = torch.full((1,), 1 / 3)
        save_file(tensors, path)
    converted(first, tmp_path / "there")
    name = "model.layers.1.mlp.experts.0.up_proj.input_scale"
    before, after = tensors_of(first)[name], tensors_of(tmp_path / "there")[name]
    assert before == ("F32", (1,), after[2]) and after[:2] == ("F32", ())


def unsloth_mixed() -> Checkpoint:
    """As unsloth/Qwen3.6-27B-NVFP4 is published, its regexes: NVFP4 MLPs, FP8 attention, and an FP8
    head.
    """
    mlp = r"model\.language_model\..*mlp\.(gate|up|down)_proj\..*"
    checkpoint, other = ours("qwen3.5-27b", "FP8_DYNAMIC"), ours("qwen3.5-27b", "NVFP4")
    checkpoint.take(mlp)
    checkpoint.tensors |= other.take(mlp)
    pack("lm_head", "FP8_DYNAMIC")(checkpoint)
    (fp8,), (nvfp4,) = (each.quantization["config_groups"].values() for each in (checkpoint, other))
    attention = [
        r"re:.*self_attn\.(q|k|v|o)_proj$",
        r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
    ]
    fp8["targets"] = [*attention, "re:.*lm_head"]
    nvfp4["targets"] = [r"re:.*mlp\.(gate|up|down)_proj$"]
    checkpoint.quantization.update(
        format="mixed-precision",
        config_groups={"group_0": fp8, "group_1": nvfp4},
        ignore=[
            "re:.*mtp.*",
            "re:.*visual.*",
            r"re:.*linear_attn\.in_proj_(a|b)$",
            "re:.*embed_tokens",
        ],
    )
    return checkpoint


FOREIGN = {name: build for name, build in GOOD.items() if "modelopt" in name or "mixed" in name} | {
    "unsloth mixed": unsloth_mixed,
    "llm-compressor nvfp4": lambda: llmcompressor("glm-4.7", "NVFP4"),
    "llm-compressor fp8": lambda: llmcompressor("qwen3.5-27b", "FP8_DYNAMIC", "FP8_DYNAMIC"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_wrote(name, tmp_path):
    """There and back, and the check has no word to say."""
    first = write(tmp_path / "first", FOREIGN[name]())
    fill(first)
    converted(first, tmp_path / "there")
    assert check(tmp_path / "first").findings == check(tmp_path / "there").findings == ()
    converted(tmp_path / "there", tmp_path / "back")
    assert_same(tmp_path / "back", first)


REFUSED = table("quantize/test_formats")["refused"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_is_refused_before_a_byte(name, tmp_path):
    row = REFUSED[name]
    folder = write(tmp_path / "first", built(row))
    with pytest.raises(KeepMTPError) as caught:
        quantize(planned(folder, "modelopt"), "", out=tmp_path / "out")
    assert re.search(row["where"], f"{caught.value.where} {caught.value.got}")
    assert row["says"] in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_integers_of_other_tools_become_a_scheme(tmp_path):
    folder = write(tmp_path / "first", built({"of": "glm gptq"}))
    assert "W4A16" in ran(f"quantize {folder} --set format=compressed-tensors --dry-run")


def test_a_scale_of_zero_is_named(tmp_path):
    folder = write(tmp_path / "first", ours("glm-4.7", "NVFP4"))
    fill(folder)
    name = "model.layers.1.mlp.experts.3.up_proj.weight_global_scale"
    poke(folder, name, 0.0)
    with pytest.raises(KeepMTPError, match=re.escape(name)):
        quantize(planned(folder, "modelopt"), "", out=tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_format_that_it_has_is_refused(twins):
    command = f"quantize {twins['modelopt']} --set format=modelopt"
    refused(command, says="got modelopt, which it is in already. There is nothing to do")
