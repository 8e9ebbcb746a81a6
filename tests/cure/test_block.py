"""The MTP block of a release, put into a checkpoint that lost it: same bytes as if it had never
been lost.
"""

import json
import shutil
from pathlib import Path

import pytest
from broken import built
from checked import check
from checkpoint_files import ignoring, write
from commands import GLM, keepmtp, refused
from data_files import json_of, table
from good import llmcompressor, ours, released
from hub import Fault, Hub, serving
from keepmtp import pipeline
from keepmtp.checkpoints.files import partial_path
from keepmtp.checkpoints.source import INDEX, open_source
from keepmtp.cure.diff import diffs
from keepmtp.cure.fix import Outcome, proposed
from keepmtp.cure.rewritten import Rewritten, rewrite
from keepmtp.recipes.errors import CheckpointError, KeepMTPError, RecipeError
from outputs import digests, forks
from releases import write_checkpoint
from written_values import drop_block, overwrite, tensors_of, without_block


def quantized(folder: Path, recipe: str, **choices: str) -> Path:
    made, text = pipeline.plan_for(recipe, source=str(GLM), **choices)
    pipeline.quantize(made, text, out=folder)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return quantized(tmp_path_factory.mktemp("whole") / "glm", "tiny-glm4-moe.nvfp4a16-fp8")


@pytest.fixture(scope="module")
def lost(whole, tmp_path_factory) -> Path:
    return drop_block(whole, tmp_path_factory.mktemp("lost") / "glm")


def planned(lost: Path | str, source: Path | str = GLM, **choices) -> Outcome:
    return proposed(str(lost), release=open_source(source), **choices)


def write_fixed(made: Outcome, out: Path) -> Rewritten:
    return rewrite(made.proposal, out, block=made.block)


def grafted(lost: Path, out: Path, source: Path | str = GLM, **choices) -> Path:
    return write_fixed(planned(lost, source, **choices), out).folder


# --- the same bytes -------------------------------------------------------------------------------


def test_the_block_is_the_one_that_was_lost_and_the_rest_is_linked(whole, lost, tmp_path):
    out = grafted(lost, tmp_path / "new")
    assert tensors_of(out) == tensors_of(whole)
    assert check(out).findings == ()
    shard = "model-00001-of-00002.safetensors"
    assert (out / shard).stat().st_ino == (lost / shard).stat().st_ino, "a hard link"
    assert (out / "model-mtp-00001-of-00001.safetensors").is_file()
    assert not (out / "keepmtp.json").exists(), "the record is of the old folder"
    total = json_of(out / INDEX)["metadata"]["total_size"]
    assert total == sum(len(data) for _, _, data in tensors_of(out).values())


@pytest.mark.parametrize("word", ["FP8_DYNAMIC", "W4A16"])
def test_a_scheme_gives_the_bytes_that_quantizing_gives(lost, word, tmp_path):
    same = quantized(tmp_path / "same", "tiny-glm4-moe.nvfp4a16-fp8", mtp=word)
    out = grafted(lost, tmp_path / "new", mtp=word)
    assert tensors_of(out) == tensors_of(same)
    assert check(out).findings == ()
    config = json_of(out / "config.json")["quantization_config"]
    assert any(
        "layers\\.3" in entry
        for group in config["config_groups"].values()
        for entry in group["targets"]
    )


def test_a_kill_at_any_moment_and_the_same_command_give_the_same_bytes(lost, tmp_path):
    wanted = digests(grafted(lost, tmp_path / "wanted", mtp="FP8_DYNAMIC"))
    for seconds in (0.05, 0.2, 0.4, 0.6):
        process = forks().Process(
            target=grafted, args=(lost, tmp_path / "new"), kwargs={"mtp": "FP8_DYNAMIC"}
        )
        process.start()
        process.join(seconds)
        process.kill()
        process.join()
    if not (tmp_path / "new").exists():
        grafted(lost, tmp_path / "new", mtp="FP8_DYNAMIC")
    assert digests(tmp_path / "new") == wanted and not partial_path(tmp_path / "new").exists()
    assert write_fixed(planned(lost, mtp="FP8_DYNAMIC"), tmp_path / "new").is_from_before


def test_another_release_of_the_same_name_is_none_from_before(lost, tmp_path):
    release = tmp_path / "release"
    shutil.copytree(GLM, release)
    grafted(lost, tmp_path / "new", release)
    (release / "config.json").write_text((release / "config.json").read_text() + "\n")
    with pytest.raises(RecipeError, match="never overwritten"):
        grafted(lost, tmp_path / "new", release)


def test_a_broken_block_in_a_file_of_the_backbone_is_replaced(whole, tmp_path):
    """vLLM reads whole files, so the old tensors leave theirs."""
    broken = tmp_path / "broken"
    tensors = {name: (dtype, shape) for name, (dtype, shape, _) in tensors_of(whole).items()}
    del tensors["model.layers.3.eh_proj.weight"]
    write_checkpoint(broken, json_of(whole / "config.json"), tensors, num_shards=1)
    values, block = tensors_of(broken), tensors_of(GLM)
    out = grafted(broken, tmp_path / "new")
    for name, value in tensors_of(out).items():
        assert value == (block if "layers.3." in name else values)[name]
    assert check(out).ok


def test_a_good_block_is_replaced_too(whole, tmp_path):
    out = grafted(whole, tmp_path / "new")
    assert tensors_of(out) == tensors_of(whole)
    assert not (out / "model-00002-of-00002.safetensors").exists(), (
        "it had nothing but the old block"
    )


# --- over the Hub ---------------------------------------------------------------------------------


@pytest.fixture
def hub(hub_at, lost, tmp_path, monkeypatch) -> Hub:
    monkeypatch.setattr("keepmtp.checkpoints.hub._FIRST_WAIT_SECONDS", 0.01)
    with serving(tmp_path / "hub") as hub:
        hub.mirror("org/release", GLM)
        hub.mirror("org/lost", lost)
        hub_at(hub.endpoint)
        yield hub


def asked(hub: Hub) -> int:
    """How many ranges of weights the Hub was asked for since the last time."""
    count = sum("bytes=" in line and "safetensors" in line for line in hub.requests)
    hub.requests.clear()
    return count


def test_only_the_block_is_fetched_and_nothing_twice(hub, whole, lost, tmp_path):
    """A cut line goes on."""
    made = planned(lost, "org/release")
    asked(hub)
    write_fixed(made, tmp_path / "all")
    count = asked(hub)
    names = {tensor.name for tensor in made.block.tensors}
    size = sum(len(data) for name, (_, _, data) in tensors_of(GLM).items() if name in names)
    whole_bytes = sum(path.stat().st_size for path in GLM.glob("*.safetensors"))
    assert size <= made.block.num_bytes_before < size + 10_000 < whole_bytes / 2 and count > 2
    hub.faults.append(Fault(r"GET /org/release/resolve/.*safetensors", spoils="truncate", times=2))
    assert tensors_of(write_fixed(made, tmp_path / "cut").folder) == tensors_of(whole)
    assert asked(hub) == count + 2


def test_a_repository_whose_old_block_shares_a_file_must_be_downloaded(hub, tmp_path):
    broken = ours("glm-4.7", "FP8_DYNAMIC")
    del broken.tensors["model.layers.3.eh_proj.weight"]
    hub.link("org/broken", write(tmp_path / "broken", broken))
    hub.link("org/right", write(tmp_path / "right", released("glm-4.7")))
    with pytest.raises(
        CheckpointError,
        match=r"of the old block and of the backbone must be here; got model-2\.safetensors",
    ):
        planned("org/broken", "org/right")


# --- refused --------------------------------------------------------------------------------------


REFUSED = table("cure/refused")["block"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused(name, tmp_path):
    row = REFUSED[name]
    lost = without_block(ours("glm-4.7", "FP8_DYNAMIC"))
    lost.config |= row.get("lost", {})
    release = write(tmp_path / "release", built(row.get("release", "released glm-4.7")))
    with pytest.raises(KeepMTPError, match=row["says"]):
        planned(write(tmp_path / "lost", lost), release)


@pytest.mark.parametrize(
    "part, values, says",
    [
        ("", b"\0\0", r"model\.layers\.3\..*holds zeros only"),
        ("eh_proj", b"\xc0\x7f", r"eh_proj\.weight.*infinite or NaN"),
        ("norm", b"\x80\x3f", r"norm.*hold 1 only, as before training"),
    ],
    ids=["zeros", "nan", "norms as they were set"],
)
def test_a_block_that_was_never_trained_is_refused_by_its_values(
    lost, part, values, says, tmp_path
):
    release = tmp_path / "release"
    shutil.copytree(GLM, release)
    for entry in open_source(release).entries.values():
        if entry.name.startswith("model.layers.3.") and part in entry.name:
            overwrite(release, entry, values * (entry.num_bytes // 2))
    with pytest.raises(CheckpointError, match=says):
        grafted(lost, tmp_path / "new", release)
    assert not (tmp_path / "new").exists()


def test_words_that_need_data_are_refused(lost):
    with pytest.raises(
        RecipeError, match=r"only batches give, and fix runs none; got NVFP4\. Use NVFP4A16"
    ):
        planned(lost, mtp="NVFP4")
    with pytest.raises(RecipeError, match="fix measures nothing"):
        planned(lost, mtp="auto")


def test_an_unknown_dialect_is_one_sentence(tmp_path):
    checkpoint = without_block(ours("glm-4.7", "FP8_DYNAMIC"))
    checkpoint.config["quantization_config"] = {"quant_method": "exl3", "bits": 4}
    folder = write(tmp_path / "exl3", checkpoint)
    release = write(tmp_path / "release", released("glm-4.7"))
    for words in ("", " --dry-run"):
        command = f"fix {folder} --from {release}{words}"
        refused(command, says="exl3")


# --- config.json ----------------------------------------------------------------------------------


def test_keys_that_a_tool_dropped_come_from_the_release(tmp_path):
    """numind/NuExtract3-FP8 #1: the count of MTP layers was removed with the file."""
    checkpoint = without_block(llmcompressor("qwen3.5-27b", "FP8_DYNAMIC"))
    del checkpoint.config["text_config"]["mtp_num_hidden_layers"]
    ignoring(without="^mtp")(checkpoint)
    lost = write(tmp_path / "lost", checkpoint)
    made = planned(lost, write(tmp_path / "release", released("qwen3.5-27b")))
    config = json.loads(made.proposal.files()["config.json"])
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert made.after.data.findings == ()
    shown = "\n".join(diffs(made.proposal))
    assert "# the release describes its MTP block so" in shown and "mtp" in shown


def test_lists_with_a_value_for_each_layer_are_whole_again(tmp_path):
    release = released("step-3.5-flash")
    checkpoint = without_block(ours("step-3.5-flash", "NVFP4A16"))
    assert len(release.config["layer_types"]) > checkpoint.config["num_hidden_layers"]
    del checkpoint.config["layer_types"][checkpoint.config["num_hidden_layers"] :]
    made = planned(write(tmp_path / "lost", checkpoint), write(tmp_path / "release", release))
    config = json.loads(made.proposal.files()["config.json"])
    assert config["layer_types"] == release.config["layer_types"]


def test_dry_run_writes_nothing_and_shows_the_diff(lost, tmp_path):
    before = digests(lost)
    done = keepmtp(f"fix {lost} --from {GLM} --dry-run --mtp FP8_DYNAMIC", status=0)
    for line in (
        "# vLLM builds these modules packed\n",
        '\n+      "mtp_0": {\n',
        "\n+  ... 15 more lines ...\n",
        '\n-      "re:^model\\\\.layers\\\\.3\\\\.self_attn\\\\.(?:k_proj|o_proj|q_proj|qkv_proj|v_proj)$"\n',
        '\n-  "metadata": {}\n+  "metadata": {\n+    "total_size": 3547032\n',
        '\n+    "model.layers.3.mlp.experts.0.down_proj.weight_scale": "model-mtp-00001-of-00001.safetensors"\n',
        f"\ncheck passed {lost}, as it would be: no findings; values: not read (--values reads them)\n"
        "nothing is written yet: the same command with --out NEW writes it\n",
    ):
        assert line in done.stdout, done.stdout
    assert digests(lost) == before and [*tmp_path.iterdir()] == []
