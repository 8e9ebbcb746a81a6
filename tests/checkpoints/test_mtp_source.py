"""A release without an MTP block, and the block of another folder: one checkpoint in plan, bytes,
record and config.
"""

from pathlib import Path

import pytest
import torch
from checked import check
from checkpoint_files import Checkpoint, as_source, write
from data_files import json_of
from good import released
from keepmtp.checkpoints.mtp_source import with_mtp_of
from keepmtp.checkpoints.record import RECORD, read_record
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.plan.plan import Plan
from keepmtp.quantize.write.output import claim
from keepmtp.quantize.write.writer import write as write_shards
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.find import find_recipe
from real_releases import minimax_halves
from releases import source_layout, write_checkpoint
from safetensors import safe_open


def on_disk(folder: Path) -> tuple[Path, Path]:
    """Both, with small finite numbers."""
    places = folder / "release", folder / "block"
    for seed, (place, checkpoint) in enumerate(zip(places, minimax_halves(), strict=True)):
        write_checkpoint(place, checkpoint.config, checkpoint.tensors, data="random", seed=seed)
    return places


def planned(release: Path, block: Path) -> tuple[Plan, str]:
    return plan_for("minimax-m3", source=str(release), mtp_source=str(block), scheme="fp8-dynamic")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("separate")
    release, block = on_disk(folder)
    plan, text = planned(release, block)
    return release, block, quantize(plan, text, out=folder / "out", threads=1).out


def raw(folder: Path, name: str) -> bytes:
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            if name in opened.keys():  # noqa: SIM118  no mapping
                return bytes(opened.get_tensor(name).view(dtype=torch.uint8).flatten().tolist())
    raise AssertionError(name)


def test_the_block_is_that_of_the_other_folder_under_the_releases_names(made):
    release, block, out = made
    name = "mtp.layers.0.hnorm.weight"
    assert raw(out, f"language_model.model.{name}") == raw(block, f"model.{name}")
    assert json_of(out / "config.json")["text_config"]["num_mtp_modules"] == 1
    shared = "language_model.model.norm.weight"
    assert raw(out, shared) == raw(release, shared)


def test_the_record_says_where_the_block_is_from(made):
    _, block, out = made
    record = read_record(out / RECORD)
    assert record.source.name == "release" and record.donors is not None
    donor = record.donors["mtp"]
    assert (donor.name, donor.revision) == ("block", "local")
    opened = open_source(block)
    files = {entry.file for name, entry in opened.entries.items() if ".mtp." in name}
    assert set(donor.files) == files


def test_a_finished_output_is_of_this_block_and_no_other(made):
    """The same command finds it finished; with another block it is another output."""
    release, block, out = made
    plan, text = planned(release, block)
    assert quantize(plan, text, out=out).was_there
    (block / "config.json").touch()  # its config makes no byte
    assert quantize(plan, text, out=out).was_there
    (block / open_source(block).entries["model.mtp.layers.0.hnorm.weight"].file).touch()
    plan, text = planned(release, block)
    with pytest.raises(RecipeError, match="an existing output is never overwritten"):
        quantize(plan, text, out=out)


def test_a_killed_run_goes_on_with_the_same_block_only(tmp_path, caplog):
    """The stamps of the block's files are in the hashes of the shards, so another block's shards
    are written anew.
    """
    release, block = on_disk(tmp_path)

    def write_again() -> list[str]:
        plan, text = planned(release, block)
        caplog.clear()
        with claim(plan, tmp_path / "out") as partial:
            write_shards(plan, partial, recipe_text=text, threads=1)
        of_block = (shard for shard in plan.shards if shard.units[0][0].part == "mtp")
        assert {Path(line.partition(": ")[0]).name for line in caplog.messages} <= {
            shard.file for shard in of_block
        }
        return caplog.messages

    assert not write_again() and not write_again()
    (block / open_source(block).entries["model.mtp.layers.0.hnorm.weight"].file).touch()
    assert write_again()


def test_a_release_without_a_block_is_not_told_to_get_it_from_itself(tmp_path):
    release, _ = minimax_halves()
    write(tmp_path / "release", release)
    text = find_recipe("minimax-m3")[1].replace("MiniMaxAI/MiniMax-M3", str(tmp_path / "release"))
    text = "".join(
        line
        for line in text.splitlines(keepends=True)
        if not line.startswith(("mtp_source", "  source:"))
    )
    (tmp_path / "mine.yaml").write_text(text.replace("  revision: main\n", ""))
    with pytest.raises(CheckpointError) as caught:
        plan_for(str(tmp_path / "mine.yaml"))
    assert (
        "got no such tensor in any file. Add --mtp-source with a checkpoint that has the block: "
        "the original release, "
        "since most tools drop it, or another repository where the release has none"
        in str(caught.value)
    )
    found = check(as_source(release, tmp_path)).findings
    cures = {finding.cure for finding in found if finding.rule == "mtp-missing"}
    assert len(cures) == 1 and "--mtp-source" in cures.pop()


def sized(checkpoint: Checkpoint) -> None:
    checkpoint.config["hidden_size"] = 512


def emptied(checkpoint: Checkpoint) -> None:
    checkpoint.take(r"model\.mtp\..*")


@pytest.mark.parametrize(
    "change, says",
    [
        (sized, r"config.json: hidden_size must be 256, that of .*; got 512"),
        (
            emptied,
            (
                r"must have tensors of minimax_m3_vl's MTP block, "
                r"language_model\.model\.mtp\.layers\.0\.\*"
            ),
        ),
    ],
)
def test_a_block_of_another_model_is_refused(change, says, tmp_path):
    release, block = minimax_halves()
    change(block)
    with pytest.raises(CheckpointError, match=says):
        with_mtp_of(as_source(release, tmp_path), as_source(block, tmp_path))


def test_a_second_block_is_refused(tmp_path):
    _, block = minimax_halves()
    whole = released("minimax-m3")
    with pytest.raises(
        CheckpointError, match="for a release without an MTP block of its own; got language_model"
    ):
        with_mtp_of(as_source(whole, tmp_path), as_source(block, tmp_path))


def test_layers_that_continue_the_decoder_layers_keep_their_names(tmp_path):
    """Two releases of one model: the MTP layer has one name in both."""
    config, tensors = source_layout("glm-4.7")
    block = {name: spec for name, spec in tensors.items() if name.startswith("model.layers.3.")}
    release = Checkpoint(
        config=config, tensors={name: spec for name, spec in tensors.items() if name not in block}
    )
    joined = with_mtp_of(
        as_source(release, tmp_path),
        as_source(Checkpoint(config=config, tensors=dict(tensors)), tmp_path),
    )
    assert set(joined.entries) == set(tensors)
    assert {entry.file for name, entry in joined.entries.items() if name in block} == {
        "from/mtp/model.safetensors"
    }
    assert check(joined).findings == ()
