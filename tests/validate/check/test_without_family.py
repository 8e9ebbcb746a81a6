"""Checkpoints of no family: a verdict on what they have, which says what was judged, and never
more.
"""

import json

import pytest
from broken import GOOD
from checkpoint_files import write
from keepmtp.checkpoints.source import open_source
from keepmtp.cli.main import app
from keepmtp.validate.check.check import check
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
    packed = sum(
        name.endswith((".qweight", ".weight_packed")) for name in open_source(folder).entries
    )
    packed = packed or sum(name.endswith(".weight_scale") for name in open_source(folder).entries)
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


def test_people_read_that_it_passed_in_part(tmp_path):
    folder = write(tmp_path / "llama-awq", llama("awq"))
    done = CliRunner().invoke(app, ["check", str(folder)])
    assert done.exit_code == 0 and f"check passed in part {folder}: 1 warning" in done.stdout
    said = json.loads(CliRunner().invoke(app, ["check", str(folder), "--json"]).stdout)
    assert said["ok"] and said["facts"]["family"] == ""
