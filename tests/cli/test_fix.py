"""`keepmtp fix` as people use it: a diff, a new folder, JSON, exit statuses."""

import json
import os
import shlex
from collections.abc import Callable
from inspect import signature
from typing import NamedTuple

import pytest
from broken import BROKEN, GOOD
from checkpoint_files import write
from keepmtp.cli.main import VERBS, flat, main


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def keepmtp(monkeypatch, capsys) -> Callable[..., Ended]:
    """The command in this process."""

    def run(command: str, **environment: str) -> Ended:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["keepmtp", *shlex.split(command)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(int(ended.value.code or 0), *capsys.readouterr())

    return run


def broken(folder, start: str):
    return write(folder, next(case for case in BROKEN if case.name.startswith(start)).build())


@pytest.fixture(scope="module")
def no_fc(tmp_path_factory):
    return broken(tmp_path_factory.mktemp("broken") / "F11", "F11")


def test_without_out_the_diff_is_printed_and_nothing_is_written(keepmtp, no_fc):
    before = sorted(os.listdir(no_fc.parent))
    done = keepmtp(f"fix {no_fc}")
    assert done.returncode == 0, done.stderr
    assert (
        '+      "mtp.fc"' in done.stdout
        and "# plain on disk, and built quantized by vLLM" in done.stdout
    )
    assert f"nothing is written yet: keepmtp fix {no_fc} --out NEW" in done.stdout
    assert sorted(os.listdir(no_fc.parent)) == before


def test_with_out_a_new_folder_is_written_and_judged(keepmtp, no_fc, tmp_path):
    done = keepmtp(f"fix {no_fc} --out {tmp_path}/new", VLLM_PYTHON="/nowhere")
    assert done.returncode == 0, done.stderr
    assert (
        "check passed" in done.stdout
        and "1 new, 3 kept" in done.stdout
        and "not loaded by vLLM" in done.stdout
    )
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "mtp.fc" in config["quantization_config"]["ignore"]
    again = keepmtp(f"fix {no_fc} --out {tmp_path}/new", VLLM_PYTHON="/nowhere")
    assert again.returncode == 0 and "finished before, by the same command" in again.stdout, (
        again.stderr
    )
    (tmp_path / "new" / "config.json").unlink()
    edited = keepmtp(f"fix {no_fc} --out {tmp_path}/new", VLLM_PYTHON="/nowhere")
    assert edited.returncode == 2 and "never overwritten" in edited.stderr


def test_static_only_does_not_look_for_vllm(keepmtp, no_fc, tmp_path):
    done = keepmtp(f"fix {no_fc} --out {tmp_path}/new --static-only", VLLM_PYTHON="/nowhere")
    assert done.returncode == 0 and "check passed" in done.stdout, done.stderr
    assert "vLLM was not asked" not in done.stdout and "/nowhere" not in done.stdout + done.stderr


def test_all_cures_end_alike():
    for verb in ("fix", "graft", "convert"):
        options = {"dry_run", "gpus", "static_only", "any_vllm", "as_json"}
        assert options <= {*signature(flat(VERBS[verb].load())).parameters}, verb


def test_json_has_the_changes_the_diff_and_what_is_left(keepmtp, no_fc, tmp_path):
    done = keepmtp(f"fix {no_fc} --json")
    found = json.loads(done.stdout)
    assert (
        found["ok"]
        and found["out"] is None
        and found["cured"][0]["rule"] == "form"
        and found["changes"]
    )
    assert any('"mtp.fc"' in line for line in found["diff"])


def test_what_needs_new_values_is_an_exit_status_of_one_and_a_command(keepmtp, tmp_path):
    folder = broken(tmp_path / "F1", "F1 ")
    done = keepmtp(f"fix {folder} --out {tmp_path}/new")
    assert (
        done.returncode == 1
        and f"needs new values: keepmtp graft {folder} --from RELEASE" in done.stdout
    )
    assert not (tmp_path / "new").exists()


def test_after_a_fix_the_next_command_takes_the_new_folder(keepmtp, tmp_path):
    """Else what was cured would be lost in the graft."""
    case = next(case for case in BROKEN if case.name.startswith("F1 ")).build()
    case.quantization["kv_cache_scheme"] = "fp8"
    new = tmp_path / "a new one"
    write(tmp_path / "F1", case)
    done = keepmtp(f"fix {tmp_path}/F1 --out '{new}'", VLLM_PYTHON="/nowhere")
    assert f"needs new values: keepmtp graft '{new}' --from RELEASE --out NEW" in done.stdout, (
        done.stderr
    )


def test_a_good_checkpoint_has_nothing_to_change(keepmtp, tmp_path):
    write(tmp_path / "good", GOOD["glm fp8"]())
    done = keepmtp(f"fix {tmp_path}/good --out {tmp_path}/new")
    assert (
        done.returncode == 0
        and "nothing to change" in done.stdout
        and not (tmp_path / "new").exists()
    )


def test_what_cannot_be_read_is_refused(keepmtp, tmp_path):
    assert keepmtp(f"fix {tmp_path}/nowhere").returncode == 2
    done = keepmtp(f"fix {broken(tmp_path / 'short', 'R6 shard cut')}")
    assert (
        done.returncode == 2
        and done.stderr.count("; got ") == 1
        and "model-2.safetensors: must be " in done.stderr
    )
