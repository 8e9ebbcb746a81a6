"""TensorRT-LLM's rules for modelopt's dialect: NVIDIA's own releases pass, and each rule has one that breaks it."""

import json
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint, as_source, lose, write
from good import released
from keepmtp.checkpoints.source import Source, open_source
from keepmtp.cli.main import app
from keepmtp.recipes.families import find_view
from keepmtp.validate.check.rules_tensorrt_llm import ALGORITHMS, DRAFTED, READ, excluded, judge_for_tensorrt_llm
from keepmtp.validate.check.runtime_view import RuntimeView
from keepmtp.validate.facts.findings import Finding, grouped
from modelopt_form import in_hf_quant_config, mixed, modelopt
from real_release import real_release
from typer.testing import CliRunner

# Made by NVIDIA for TensorRT-LLM, with a plain MTP block, in a family whose names were read.
THEIRS = ("deepseek-v3.1-nvfp4", "deepseek-v3.2-nvfp4", "glm-5-nvfp4", "glm-5.1-nvfp4", "glm-5.2-nvfp4")


def found(checkpoint: Checkpoint) -> list[Finding]:
    return judged(as_source(checkpoint, Path("/nonexistent")))


def judged(source: Source) -> list[Finding]:
    return grouped(judge_for_tensorrt_llm(RuntimeView(source=source, view=find_view(source.config, "checkpoint"))))


@pytest.mark.parametrize("name", [*THEIRS, "nemotron-3.5-lightning-nvfp4"])
def test_nvidias_own_releases_pass(name):
    assert [each for each in found(real_release(name)) if each.severity == "error"] == []


@pytest.mark.parametrize("mtp", ["bf16", "NVFP4"])
@pytest.mark.parametrize("model", ["deepseek-r1", "glm-4.7", "glm-5"])
def test_a_layer_that_has_its_name_on_disk_passes(model, mtp):
    assert found(modelopt(model, mtp=mtp)) == []


@pytest.mark.parametrize("model", ["deepseek-r1", "glm-4.7"])
def test_a_plain_layer_that_no_entry_excludes_is_an_error(model):
    checkpoint = modelopt(model)
    checkpoint.quantization["ignore"] = ["lm_head"]
    (finding,) = found(checkpoint)
    assert finding.where.startswith("model.layers.3.") and "'model.layers.3*'" in finding.cure
    assert "read in TensorRT-LLM, not run" in finding.says and READ["exclusion"] in finding.says


def test_mtp_in_an_entry_reaches_no_layer_of_qwen():
    """vLLM leaves the block plain by `mtp.*`; TensorRT-LLM counts it as the layer after the last."""
    checkpoint = modelopt("qwen3-next-80b")
    (finding,) = found(checkpoint)
    assert finding.where.startswith("mtp.layers.0.") and "model.layers.4." in finding.says
    checkpoint.quantization["ignore"].append("model.layers.4*")
    assert found(checkpoint) == []


def test_a_packed_block_of_nemotron_has_no_place():
    (finding,) = found(modelopt("nemotron-3-super", mtp="NVFP4"))
    assert finding.where.startswith("mtp.layers.0.") and READ["nemotron"] in finding.says
    assert found(modelopt("nemotron-3-super")) == []


def test_packed_glue_has_no_place():
    checkpoint = modelopt("glm-4.7", mtp="NVFP4")
    name = "model.layers.3.eh_proj.weight"
    _, (rows, columns) = checkpoint.tensors[name]
    checkpoint.tensors |= {name: ("U8", (rows, columns // 2)), f"{name}_scale": ("F8_E4M3", (rows, columns // 16))}
    checkpoint.tensors |= {f"{name}_scale_2": ("F32", ()), "model.layers.3.eh_proj.input_scale": ("F32", ())}
    assert [each.where for each in found(checkpoint)] == [name]


def test_an_entry_that_excludes_what_is_packed_is_an_error():
    checkpoint = modelopt("glm-4.7", mtp="NVFP4")
    checkpoint.quantization["ignore"].append("model.layers.3")
    errors = found(checkpoint)
    assert errors and all("the entry 'model.layers.3' excludes it" in each.says for each in errors)


def test_hf_quant_config_is_read_first(tmp_path):
    """vLLM reads config.json, TensorRT-LLM the other file."""
    checkpoint = in_hf_quant_config(modelopt("glm-4.7"))
    assert judged(open_source(write(tmp_path / "good", checkpoint))) == []
    checkpoint.json_files["hf_quant_config.json"]["quantization"]["exclude_modules"] = ["lm_head"]
    checkpoint.config["quantization_config"] = modelopt("glm-4.7").quantization
    (finding,) = judged(open_source(write(tmp_path / "broken", checkpoint)))
    assert finding.where.startswith("model.layers.3.")


def test_an_algorithm_that_it_has_not_is_named():
    checkpoint = modelopt("glm-4.7")
    checkpoint.quantization["quant_algo"] = "NVFP4_SVD"
    (finding,) = found(checkpoint)
    assert finding.rule == "tensorrt-llm-algorithm" and "NVFP4_SVD" in finding.says


def test_a_mixture_without_layers_is_named():
    checkpoint = mixed()
    assert found(checkpoint) == []
    del checkpoint.quantization["quantized_layers"]
    assert [each.where for each in found(checkpoint)] == ["config.json: quantized_layers"]


def test_a_family_without_a_draft_there_is_named():
    (finding,) = [each for each in found(released("mimo-7b")) if each.severity == "error"]
    assert (finding.rule, finding.where) == (
        "tensorrt-llm-draft",
        "config.json: model_type",
    ) and "'mimo'" in finding.says


def test_what_was_not_read_is_said():
    (finding,) = found(released("deepseek-r1"))
    assert (finding.severity, finding.rule) == ("warning", "tensorrt-llm-dialect") and "is fp8" in finding.says


@pytest.mark.parametrize(
    ("entry", "is_excluded"),
    [
        ("model.layers.3", True),
        ("model.layers.3*", True),
        ("model.layers.3.*", True),
        ("model.layers.3.self_attn", True),
        ("re:model\\.layers\\.3\\..*", True),
        ("model.layers.3.mlp", False),
        ("layers.3", False),
        ("re:layers\\.3", False),
        ("re:model\\.lay", False),
    ],
)
def test_an_entry_excludes_by_whole_names(entry, is_excluded):
    assert bool(excluded("model.layers.3.self_attn.o_proj", (entry,))) == is_excluded


def test_the_lists_name_what_is_judged():
    assert {"deepseek_v3", "glm4_moe", "qwen3_next", "nemotron_h"} <= DRAFTED and "NVFP4" in ALGORITHMS


def test_a_block_that_was_dropped_is_named():
    checkpoint = modelopt("glm-4.7")
    lose(r"model\.layers\.3\..*")(checkpoint)
    (finding,) = found(checkpoint)
    assert (finding.rule, finding.where) == ("tensorrt-llm-mtp-missing", "model.layers.3.*")


def test_the_verb_judges_for_it_alone_or_for_all(tmp_path):
    checkpoint = modelopt("qwen3-next-80b")
    folder = write(tmp_path / "next", checkpoint)
    vllm = CliRunner().invoke(app, ["check", str(folder)])
    assert vllm.exit_code == 0, vllm.stdout
    alone = CliRunner().invoke(app, ["check", str(folder), "--runtime", "tensorrt-llm", "--json"])
    (finding,) = json.loads(alone.stdout)["findings"]
    assert alone.exit_code == 1 and finding["runtime"] == "tensorrt-llm" and READ["qwen"] in finding["says"]
    refused = CliRunner().invoke(app, ["check", str(folder), "--runtime", "tensorrt"])
    assert refused.exit_code != 0 and "vllm, sglang, tensorrt-llm" in str(refused.exception)
