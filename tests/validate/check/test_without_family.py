"""Checkpoints of no family: a verdict on what they have, which says what was judged, and never
more.
"""

import json
from collections import Counter
from functools import partial

import pytest
from broken_case import finds, met
from checked import check
from checkpoint_files import config, lose, quantization, write
from good_checkpoints import GOOD
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from typer.testing import CliRunner
from without_mtp import SAID, llama

# vLLM has a quantization class for a model_type alone, which reads the experts otherwise; and the
# family alone says that vLLM puts the target's embedding and head in the draft's place, whatever
# their form on the disk.
OF_ONE_MODEL = ("dsv4 nvfp4 experts", "glm fp8, the draft's copies too")


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("tool", ["", *SAID])
def test_a_model_that_never_had_a_block_passes_in_part(tool, experts, tmp_path):
    folder = write(tmp_path / "checkpoint", llama(tool, experts=experts))
    data = check(folder)
    (finding,) = data.findings
    assert data.ok and (finding.rule, finding.severity) == ("family", "warning")
    assert (
        "no MTP block, and nothing to draft with" in finding.says
        and "Not judged: vLLM's names" in finding.says
    )
    leaves = Counter(name.rpartition(".")[2] for name in open_source(folder).entries)
    packed = leaves["qweight"] + leaves["weight_packed"] or leaves["weight_scale"]
    assert f"Judged: {packed} of {packed} packed weights" in finding.says
    assert (data.facts.family, data.facts.num_mtp_tensors) == ("", 0) and data.facts.num_tensors


@pytest.mark.parametrize("name", [name for name in GOOD if name not in OF_ONE_MODEL])
def test_a_good_checkpoint_stays_one_without_its_family(name, tmp_path):
    """Every family and dialect of the corpus under a name that nobody knows: no rule objects to
    what is right.
    """
    checkpoint = GOOD[name]()
    holders = [checkpoint.config, checkpoint.config.get("text_config") or {}]
    for holder in holders:
        holder |= {"model_type": "never_seen", "architectures": ["NeverSeen"]}
    (finding,) = check(write(tmp_path / "checkpoint", checkpoint)).findings
    assert finding.rule == "family"


# What somebody did to the dense model.
test_a_broken_one_is_caught = finds(
    "form",
    met(
        "AWQ, scales of one matrix lost",
        partial(llama, "awq with a list"),
        lose(r"model\.layers\.3\.self_attn\.o_proj\.scales"),
        where="model.layers.3.self_attn.o_proj.",
    ),
    met(
        "AWQ, an entry is a part of a packed name",
        partial(llama, "awq"),
        quantization("modules_to_not_convert", ["lm_head", "o_proj"]),
        where="model.layers.0.self_attn.o_proj.qweight",
    ),
    met(
        "AWQ in three bits",
        partial(llama, "awq"),
        quantization("bits", 3),
        rule="config-group",
        where="quantization_config",
    ),
    met(
        "GPTQ, groups of 64 by its word",
        partial(llama, "gptq"),
        quantization("group_size", 64),
        where="model.layers.0.self_attn.q_proj.scales",
    ),
    met(
        "GPTQ, a matrix lost but for its scales",
        partial(llama, "gptq"),
        lose(r"model\.layers\.3\.self_attn\.o_proj\.qweight"),
        rule="unknown-tensor",
        where="model.layers.3.self_attn.o_proj.",
    ),
    met(
        "Quark, one scale lost",
        partial(llama, "quark"),
        lose(r"model\.layers\.3\.self_attn\.o_proj\.weight_scale"),
        where="model.layers.3.self_attn.o_proj",
    ),
    met(
        "packed without a config",
        partial(llama, "compressed-tensors"),
        config("quantization_config", None),
        where="model.layers.0.",
    ),
    met(
        "a layer lost",
        partial(llama, "awq"),
        lose(r"model\.layers\.2\..*"),
        rule="layer-missing",
        where="model.layers.2.",
    ),
    met(
        "modelopt, input scales lost",
        partial(llama, "modelopt"),
        lose(r".*o_proj\.input_scale"),
        where=".o_proj.input_scale",
    ),
)


def test_people_read_that_it_passed_in_part(tmp_path):
    folder = write(tmp_path / "llama-awq", llama("awq"))
    done = CliRunner().invoke(app, ["check", str(folder)])
    assert done.exit_code == 0 and f"check passed in part {folder}: 1 warning" in done.stdout
    said = json.loads(CliRunner().invoke(app, ["check", str(folder), "--json"]).stdout)
    assert said["ok"] and said["facts"]["family"] == ""
