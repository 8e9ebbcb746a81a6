"""`keepmtp compare` as people type it: two columns on 80, a line of JSON, refusals; and a
repository, of which headers alone are fetched.
"""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_files import write
from commands import assert_shows, keepmtp, ran, refused
from data_files import put_json
from good_checkpoints import GOOD
from hub import TOKEN, serving
from keepmtp import api
from releases import made_of


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    """Two checkpoints of the tiny model, and one of another."""
    parent = tmp_path_factory.mktemp("several")
    for scheme in ("FP8_BLOCK", "NVFP4A16"):
        made_of("tiny-glm4-moe", parent / scheme.lower(), scheme=scheme)
    write(parent / "other", GOOD["mimo fp8"]())
    shutil.copytree(parent / "nvfp4a16", parent / "broken")
    config = json.loads((parent / "broken" / "config.json").read_text())
    config["quantization_config"]["config_groups"] = 7
    put_json(parent / "broken" / "config.json", config)
    shutil.copytree(parent / "broken", parent / "config")
    write(parent / "short", GOOD["glm nvfp4"]())
    with open(parent / "short" / "model-1.safetensors", "rb+") as file:
        file.truncate(100_000)
    return parent


def test_two_columns_on_80(parent):
    said = ran("compare fp8_block nvfp4a16", cwd=parent, COLUMNS="80")
    tables = said.partition("Forms with less")[0]
    assert max(map(len, tables.splitlines())) <= 80
    assert_shows(
        said,
        "What each is 1 2",
        "dialect compressed-tensors compressed-tensors",
        "vLLM 0.31.0 loads loads",
        "attention 0.6 MiB FP8_BLOCK 0.3 MiB NVFP4A16",
        "MTP block 2.1 MiB BF16 2.1 MiB BF16",
        "Forms with less than 1 % of a group's bytes are left out.",
    )


def test_what_is_done_is_said(parent):
    said = []
    api.compare([parent / "fp8_block"], progress=said.append)
    assert f"{parent / 'fp8_block'}: judging it by each vLLM's rules" in said


def test_json(parent):
    done = keepmtp("compare fp8_block nvfp4a16 --json", cwd=parent, status=0)
    found = json.loads(done.stdout)
    for one in found["checkpoints"]:
        assert one["stored"]["experts"] and not one["verdicts"]["vLLM 0.31.0"]
    assert done.stderr == ""


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("fp8_block other", "other: must be of the model of fp8_block, whose family is glm4_moe; "),
        ("fp8_block nowhere", "nowhere: a checkpoint is a folder with config.json"),
        ("fp8_block broken", "broken: config.json: quantization_config: must have the types"),
        ("config", "error: config: config.json: quantization_config: must have the types"),
        ("fp8_block short", "short/model-1.safetensors: must be "),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(words, says, parent):
    refused(f"compare {words}", says=says, cwd=parent)


def test_of_a_repository_headers_are_fetched(parent, hub_at, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(tmp_path / "hub") as hub:
        hub.leads_elsewhere = True
        hub_at(hub.endpoint)
        hub.mirror("org/model", parent / "nvfp4a16")
        (one,) = api.compare(["org/model"]).checkpoints
        (local,) = api.compare([parent / "nvfp4a16"]).checkpoints
        assert one.stored == local.stored and one.verdicts == local.verdicts
