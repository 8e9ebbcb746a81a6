"""fix of a repository: headers and configs are read, the changed files are written, and a pull request has them."""

import io
import json
from collections.abc import Callable

import hub as loopback
import pytest
from broken import BROKEN
from checkpoint_files import write
from hub import READ_ONLY, TOKEN, Fault, Hub
from keepmtp.cli.main import main


@pytest.fixture
def hub(hub_at, tmp_path_factory):
    with loopback.serving(tmp_path_factory.mktemp("hub")) as served:
        hub_at(served.endpoint)
        yield served


@pytest.fixture
def fix(hub, tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: exit status, output, errors."""

    def run(start: str, *words: str, token: str = TOKEN) -> tuple[int, str, str]:
        if "org/model" not in hub.repos:
            case = next(case for case in BROKEN if case.name.startswith(start))
            hub.mirror("org/model", write(tmp_path / "there", case.build()))
        hub.requests.clear()
        monkeypatch.setattr("sys.stdin", io.StringIO())
        for name, value in {"HF_TOKEN": token, "VLLM_PYTHON": "/nowhere", "HF_HOME": str(tmp_path / "home")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.argv", ["keepmtp", "fix", "org/model", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert TOKEN not in printed.out + printed.err
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def weights_read(hub: Hub) -> list[str]:
    """Requests for a shard that are not for its first bytes."""
    return [
        line for line in hub.requests if ".safetensors" in line and line.startswith("GET") and "bytes=0-" not in line
    ]


def test_only_headers_are_read_and_only_changed_files_are_written(fix, hub, tmp_path):
    status, out, err = fix("F11", "--out", str(tmp_path / "new"))
    assert status == 0, err
    assert {path.name for path in (tmp_path / "new").iterdir()} == {".keepmtp", "config.json"}
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert "mtp.fc" in config["quantization_config"]["ignore"] and "check passed org/model" in out
    assert [line for line in weights_read(hub) if "index.json" not in line] == []


def test_what_needs_shards_is_named(fix, tmp_path):
    status, out, _ = fix("F37", "--out", str(tmp_path / "new"))
    assert status == 1 and "not cured in a repository, because it needs the shards" in out
    assert not (tmp_path / "new").exists()


def test_a_pull_request_has_the_files_and_the_reasons(fix, hub):
    status, out, err = fix("F4 ", "--pr", "--yes")
    assert status == 0, err
    (sent,) = hub.pulls
    assert sent.keys() == {"", "model.safetensors.index.json"} and f"{hub.endpoint}/org/model/discussions/1" in out
    assert "mtp.safetensors" in set(json.loads(sent["model.safetensors.index.json"])["weight_map"].values())
    assert "which model.safetensors.index.json does not list" in sent[""]["description"]
    assert len(hub.repos["org/model"].commits) == 1, "the repository itself is not written to"


def test_nobody_is_asked_for_without_a_terminal_and_a_dry_run_sends_nothing(fix, hub):
    status, _, err = fix("F11", "--pr")
    assert status == 2 and "must be confirmed" in err and "Add --yes" in err
    status, _, err = fix("F11", "--pr", "--dry-run")
    assert status == 0 and not hub.pulls and not [line for line in hub.requests if line.startswith("POST")], err


@pytest.mark.parametrize(
    ("spoil", "token", "says"),
    [
        (lambda hub: hub.closed.append("org"), TOKEN, "must be allowed to write there"),
        (lambda hub: None, READ_ONLY, "must be allowed to write"),
        (lambda hub: None, "hf_wrong", "the Hub must know the token"),
        (lambda hub: hub.faults.append(Fault("POST /api/models/org/model/commit", 503, times=9)), TOKEN, "must answer"),
    ],
    ids=["closed", "for reading", "unknown", "no answer"],
)
def test_a_request_that_cannot_be_opened_is_a_sentence(fix, hub, spoil, token, says):
    if token == "hf_wrong":
        fix("F11")  # a token that is wrong cannot even read; what was read is in the cache
    spoil(hub)
    status, _, err = fix("F11", "--pr", "--yes", token=token)
    assert status == 2 and not hub.pulls and len(err.strip().splitlines()) == 1, err
    assert says in err or token == "hf_wrong"
    sent = [line for line in hub.requests if "POST" in line and "/commit/" in line]
    assert len(sent) <= 1, "a pull request is sent once"


def test_a_folder_gets_no_pull_request(tmp_path, monkeypatch, capsys):
    folder = write(tmp_path / "F11", next(case for case in BROKEN if case.name.startswith("F11")).build())
    monkeypatch.setattr("sys.argv", ["keepmtp", "fix", str(folder), "--pr", "--yes"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "is for a repository on the Hub" in capsys.readouterr().err
