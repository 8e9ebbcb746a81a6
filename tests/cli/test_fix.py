"""`keepmtp fix` as people use it: a diff, a new folder, JSON, exit statuses."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from broken import BROKEN
from checkpoint_files import write
from commands import assert_shows
from data_files import json_of
from good import released
from good_checkpoints import GOOD
from keepmtp.cli.main import main
from written_values import fill, poke


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """The current folder, with a checkpoint whose fc is in no ignore list."""
    monkeypatch.chdir(tmp_path)
    fill(write(Path("F11"), broken("F11")))
    return tmp_path


def broken(start: str):
    return next(case for case in BROKEN if case.name.startswith(start)).build()


@pytest.fixture
def fix(monkeypatch, capsys) -> Callable[..., str]:
    """What the command prints, in this process; of a refusal on standard error."""

    def run(words: str, *, status: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["keepmtp", "fix", *shlex.split(words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == status, out + err
        if status == 2:
            return err
        return out

    return run


def test_without_out_the_diff_is_printed_and_nothing_is_written(fix, place):
    assert_shows(
        fix("F11"),
        "# plain on disk, and built quantized by vLLM, which calls them so: mtp.fc",
        '"mtp.layers.0*" + "mtp.fc" ]',
        "check passed F11, as it would be: no findings; values: read of the MTP block's norms alone",
        "nothing is written yet: the same command with --out NEW writes it",
    )
    assert [path.name for path in place.iterdir()] == ["F11"]


def test_with_out_a_new_folder_is_written_and_judged(fix, place):
    assert_shows(
        fix("F11 --out new"),
        "# plain on disk, and built quantized by vLLM, which calls them so: mtp.fc",
        '"mtp.layers.0*" + "mtp.fc" ]',
        "check passed new: no findings; values: read of the MTP block's norms alone",
        "new: files: 1 new, 3 kept. Unchanged files are hard links:",
    )
    config = json_of(place / "new" / "config.json")
    assert "mtp.fc" in config["quantization_config"]["ignore"]
    assert "finished before, by the same command" in fix("F11 --out new")
    (place / "new" / "config.json").unlink()
    assert "never overwritten" in fix("F11 --out new", status=2)


def test_json_has_the_changes_the_diff_and_what_is_left(fix):
    found = json.loads(fix("F11 --json"))
    assert found["ok"] and found["out"] is None and found["changes"]
    assert found["cured"][0]["rule"] == "form"
    assert any('"mtp.fc"' in line for line in found["diff"])


def test_what_needs_new_values_is_an_exit_status_of_one_and_a_command(fix, place):
    fill(write(place / "F1", broken("F1 ")))
    assert_shows(
        fix("F1 --out new", status=1),
        "num_nextn_predict_layers=1 promises MTP layer 0, but no file has a tensor of it",
        "cure: Put the release's block in check failed F1: 1 error "
        "needs new values: keepmtp fix F1 --from RELEASE --out NEW "
        "nothing to change: there is no finding that fix can cure",
    )
    assert not (place / "new").exists()


def test_one_command_cures_the_config_and_gives_the_block(fix, place):
    case = broken("F1 ")
    case.quantization["kv_cache_scheme"] = "fp8"
    write(place / "F1", case)
    fill(write(place / "release", released("glm-5")))
    said = fix("F1 --out 'a new one'", status=1)
    assert "needs new values: keepmtp fix F1 --from RELEASE --out NEW" in said
    assert "no findings" in fix("F1 --from release --out whole")
    assert (
        json_of(place / "whole" / "config.json")["quantization_config"]["kv_cache_scheme"] is None
    )
    assert "Add --from RELEASE" in fix("F1 --mtp bf16", status=2)


def test_a_good_checkpoint_has_nothing_to_change(fix, place):
    fill(write(place / "good", GOOD["glm fp8"]()))
    assert "nothing to change" in fix("good --out new") and not (place / "new").exists()


@pytest.mark.parametrize("kv_cache", [None, "fp8"])
def test_a_block_with_norms_of_zero_is_not_called_good(kv_cache, fix, place):
    """It loads without a word and drafts at 0 %: neither as it is, nor with its config cured."""
    case = GOOD["glm fp8"]()
    case.quantization["kv_cache_scheme"] = kv_cache
    fill(write(place / "glm", case))
    poke(place / "glm", "model.layers.3.enorm.weight", 0.0)
    said = fix("glm --out new", status=1)
    assert "error: model.layers.3.enorm.weight\n  its largest value is 0" in said
    assert "--from RELEASE --out NEW" in said
    assert (place / "new").exists() == (kv_cache is not None)


def test_what_cannot_be_read_is_refused(fix, place):
    write(place / "short", broken("R6 shard cut"))
    said = fix("short", status=2)
    assert said.count("; got ") == 1 and "model-2.safetensors: must be " in said
