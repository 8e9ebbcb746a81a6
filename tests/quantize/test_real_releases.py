"""Real releases that differ from their family's layout, in the plan and in the static check."""

import pytest
from checkpoint_files import Checkpoint, as_source, setting, write
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan import Plan, make_plan
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.check.check import check_source
from real_releases import nemotron_ultra


def plan_of(checkpoint: Checkpoint, name: str, folder) -> Plan:
    recipe, _ = find_recipe(name)
    return make_plan(recipe, as_source(checkpoint, folder))


def test_layers_counted_by_a_list_of_their_kinds(tmp_path):
    """Nemotron-3-Ultra: a KeyError in plan, and "Take the original's config.json" of check, before."""
    plan = plan_of(nemotron_ultra(), "nemotron-3-super", tmp_path)
    assert (plan.view.num_layers, plan.view.num_mtp_layers) == (4, 2)
    assert check_source(plan.source).findings == ()


def test_a_config_that_counts_no_layers_is_refused_in_one_true_sentence(tmp_path):
    """The twin: no key that says it. Which file to take is not known, as this one may be the original's."""
    checkpoint = nemotron_ultra()
    setting("layers_block_type", None)(checkpoint)
    with pytest.raises(CheckpointError) as caught:
        plan_of(checkpoint, "nemotron-3-super", tmp_path)
    sentence = (
        "num_hidden_layers or layers_block_type or hybrid_override_pattern must say how many decoder layers there are; "
        "got none of them. Take the key from the original release; if that lacks it too, keepmtp's table for "
        "nemotron_h does not know this release"
    )
    assert sentence in str(caught.value)
    (finding,) = check_source(as_source(checkpoint, tmp_path)).findings
    assert finding.where.endswith("config.json") and "got none of them" in finding.says


def test_a_list_of_layers_without_end_is_refused(tmp_path):
    checkpoint = nemotron_ultra()
    checkpoint.config["layers_block_type"] = ["mamba"] * 2001
    with pytest.raises(CheckpointError, match="layers_block_type must be a short text or a list of at most 2000"):
        open_source(write(tmp_path / "checkpoint", checkpoint))
