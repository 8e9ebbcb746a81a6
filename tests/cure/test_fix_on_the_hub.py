"""fix of a repository: headers and configs are read, and the changed files alone are written."""

import json

import hub as loopback
import pytest
from broken import BROKEN
from checkpoint_files import write
from keepmtp.cli.main import app
from typer.testing import CliRunner, Result


@pytest.fixture
def hub(hub_at, tmp_path_factory):
    with loopback.serving(tmp_path_factory.mktemp("hub")) as served:
        hub_at(served.endpoint)
        yield served


def fixed(hub, place, start: str) -> Result:
    case = next(case for case in BROKEN if case.name.startswith(start))
    hub.mirror("org/model", write(place / "there", case.build()))
    return CliRunner().invoke(
        app, ["fix", "org/model", "--out", str(place / "new")], env={"VLLM_PYTHON": "/nowhere"}
    )


def test_only_headers_are_read_and_only_changed_files_are_written(hub, tmp_path):
    done = fixed(hub, tmp_path, "F11")
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "new").iterdir()} == {".keepmtp", "config.json"}
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (
        "mtp.fc" in config["quantization_config"]["ignore"]
        and "check passed org/model" in done.stdout
    )
    read = [
        line for line in hub.requests if line.startswith("GET") and ".safetensors " in f"{line} "
    ]
    assert [line for line in read if "bytes=0-" not in line] == []


def test_what_needs_shards_is_named(hub, tmp_path):
    done = fixed(hub, tmp_path, "F37")
    assert (
        done.exit_code == 1
        and "not cured in a repository, because it needs the shards" in done.stdout
    )
    assert not (tmp_path / "new").exists()
