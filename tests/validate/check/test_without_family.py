"""Checkpoints of no family: a verdict on what they have, which says what was judged, and never
more.
"""

import json

import pytest
from broken import GOOD
from checkpoint_files import adding, write
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from keepmtp.validate.check.check import WITHOUT_FAMILY, check
from modelopt_form import modelopt
from typer.testing import CliRunner
from without_mtp import SAID, TWINS, broken, llama, said

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
    packed = sum(
        name.endswith((".qweight", ".weight_packed")) for name in open_source(folder).entries
    )
    packed = packed or sum(name.endswith(".weight_scale") for name in open_source(folder).entries)
    assert f"Judged: {packed} of {packed} packed weights" in finding.says
    assert (data.facts.family, data.facts.num_mtp_tensors) == ("", 0) and data.facts.num_tensors


@pytest.mark.parametrize("name", TWINS)
def test_a_broken_one_is_caught_by_name(name, tmp_path):
    tool, change, rule, where = TWINS[name]
    data = check(write(tmp_path / "checkpoint", broken(tool, change)))
    errors = [finding for finding in data.findings if finding.severity == "error"]
    assert not data.ok and any(
        f.rule == rule and where in f.where and f.says and f.cure for f in errors
    ), data.findings
    assert any(
        finding.rule == "family" and finding.severity == "warning" for finding in data.findings
    )


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


def test_a_block_that_nobody_can_judge_is_an_error(tmp_path):
    checkpoint = llama("awq")
    adding("mtp.fc.weight", "BF16", (256, 512))(checkpoint)
    data = check(write(tmp_path / "checkpoint", checkpoint))
    (finding,) = data.findings
    assert (finding.rule, finding.severity, data.facts.num_mtp_tensors) == ("family", "error", 1)


def test_a_scheme_that_is_not_known_is_said(tmp_path):
    checkpoint = llama("quark")
    said(global_quant_config={"weight": {"dtype": "int4", "group_size": 128, "symmetric": True}})(
        checkpoint
    )
    found = {
        finding.rule: finding
        for finding in check(write(tmp_path / "checkpoint", checkpoint)).findings
    }
    assert (
        "weights are not judged against it" in found["dialect"].says
        and "Judged: 0 of 42" in found["family"].says
    )


def test_people_read_that_it_passed_in_part(tmp_path):
    folder = write(tmp_path / "llama-awq", llama("awq"))
    done = CliRunner().invoke(app, ["check", str(folder)])
    assert done.exit_code == 0 and f"check passed in part {folder}: 1 warning" in done.stdout
    said = json.loads(CliRunner().invoke(app, ["check", str(folder), "--json"]).stdout)
    assert said["ok"] and said["facts"]["family"] == ""


def test_every_rule_says_what_it_holds():
    assert all(rule.__doc__ for rule in WITHOUT_FAMILY)


def test_an_entry_that_no_server_can_read_is_a_finding(tmp_path):
    """SGLang makes a regular expression of each glob."""
    checkpoint = modelopt("glm-4.7")
    checkpoint.quantization["ignore"] = ["x["]
    (finding,) = check(write(tmp_path / "checkpoint", checkpoint), runtimes=["sglang"]).findings
    assert (finding.rule, finding.where) == ("config", "x[") and "SGLang raises" in finding.says
