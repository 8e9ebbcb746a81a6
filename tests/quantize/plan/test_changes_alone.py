"""Changes of a repository: only its changed files are read and written, and they are those of a
whole run.
"""

from pathlib import Path

import pytest
from commands import GLM, keepmtp, ran
from data_files import json_of
from hub import Hub, serving
from keepmtp.checkpoints.source import INDEX
from keepmtp.pipeline import plan_for, quantize
from keepmtp.quantize.plan.plan import Plan
from keepmtp.recipes.errors import GateError, RecipeError
from outputs import digests
from written_values import poke

REPO = "org/finished"
BACKBONE = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "glm"
    quantize(*plan_for(str(GLM), scheme="nvfp4a16-fp8"), out=out)
    return out


@pytest.fixture
def hub(hub_at, finished, tmp_path):
    with serving(tmp_path / "hub") as hub:
        hub.mirror(REPO, finished)
        hub_at(hub.endpoint)
        yield hub


def planned(*changes: str, **choices: bool) -> Plan:
    return plan_for(REPO, changes=changes, **choices)[0]


def shards_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.safetensors")}


def test_only_what_changes_is_read_and_written(hub: Hub, finished, tmp_path):
    """The shard of the backbone is asked for its header alone."""
    assert {BACKBONE} < shards_of(finished)
    (block,) = shards_of(finished) - {BACKBONE}
    quantize(planned("mtp=NVFP4A16", changed_only=True), "", out=tmp_path / "new")
    new = tmp_path / "new"
    small = {"config.json", INDEX, "keepmtp.json", "recipe.yaml"}
    assert {path.name for path in new.iterdir()} == {block, *small}
    whole = [line for line in hub.requests if line.startswith("GET") and "bytes=" not in line]
    assert any(block in line for line in whole)
    assert not any(BACKBONE in line for line in whole)
    quantize(planned("mtp=NVFP4A16"), "", out=tmp_path / "whole")
    same = digests(tmp_path / "whole")
    for name in (block, "config.json", INDEX):
        assert digests(new)[name] == same[name]


def test_the_same_words_find_it_finished_and_others_do_not(hub, tmp_path):
    out = tmp_path / "new"
    assert not quantize(planned("head=FP8_DYNAMIC", changed_only=True), "", out=out).was_there
    assert quantize(planned("head=FP8_DYNAMIC", changed_only=True), "", out=out).was_there
    with pytest.raises(RecipeError, match="never overwritten; got a finished checkpoint"):
        quantize(planned("head=FP8_DYNAMIC"), "", out=out)


def test_a_value_that_is_broken_is_found_in_what_was_written(hub, finished, tmp_path):
    """A scale of the head, which changes; the unchanged block is not read."""
    made = planned("head=FP8_DYNAMIC", changed_only=True)
    written = [tensor for shard in made.written for unit in shard.units for tensor in unit]
    norm = "model.norm.weight"
    assert norm in {tensor.name for tensor in written}
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in finished.iterdir():
        if path.is_file():
            (broken / path.name).write_bytes(path.read_bytes())
    poke(broken, norm, float("nan"), at=3)
    hub.mirror("org/broken", broken)
    with pytest.raises(GateError, match=rf"got {norm} element \[3\] is infinite or NaN"):
        made, _ = plan_for("org/broken", changes=["head=FP8_DYNAMIC"], changed_only=True)
        quantize(made, "", out=tmp_path / "new")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["kv_cache=FP8"], "reads no text, .*; got kv_cache: FP8"),
        (["mtp=auto"], "reads no text, .*; got mtp: auto"),
        (["mtp=NVFP4"], "reads no text, .*; got NVFP4"),
    ],
)
def test_a_run_with_text_needs_the_whole(changes, says, hub):
    with pytest.raises(RecipeError, match=says):
        planned(*changes, changed_only=True)


def test_a_folder_and_a_release_have_no_changes_to_propose(finished):
    for model, choices in (
        (finished, {"changes": ["mtp=bf16"]}),
        (GLM, {"scheme": "fp8-dynamic"}),
    ):
        with pytest.raises(RecipeError, match="is for a checkpoint of the Hub of which all stays"):
            plan_for(str(model), changed_only=True, **choices)


@pytest.mark.full
def test_the_command_says_how_to_propose_them(hub, tmp_path):
    at = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    out = tmp_path / "new"
    said = ran(f"quantize {REPO} --set mtp=bf16 --changed-only --out {out}", **at)
    assert f"hf upload {REPO} {out} . --create-pr" in said
    done = keepmtp(f"check {out}", status=1)
    assert "is missing" in done.stdout and BACKBONE in done.stdout
    assert json_of(out / "keepmtp.json")["source"]["name"] == REPO
