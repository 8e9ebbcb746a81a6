"""What `keepmtp fix` shows and writes: a diff that people read, and the files of a repository.
test_cured_failures.py judges real cures.
"""

import json

import hub as loopback
import pytest
from broken import BROKEN
from checkpoint_files import write
from data_files import json_of
from keepmtp.checkpoints.proposal import in_form_of
from keepmtp.cli.main import app
from keepmtp.cure.diff import json_diff
from typer.testing import CliRunner

# --- the diff -------------------------------------------------------------------------------------


def diff(before: dict, after: dict) -> list[str]:
    return json_diff("a", json.dumps(before).encode(), json.dumps(after, indent=4).encode(), ["so"])


def test_a_hunk_has_its_reason_and_a_longer_list_one_new_line():
    before = {"a": 1, "config": {"ignore": ["lm_head", "x"], "bits": 4}, "z": [1, 2]}
    after = before | {"config": {"ignore": ["lm_head", "x", "re:^mtp"], "bits": 4}}
    assert diff(before, before) == []
    assert diff(before, after) == [
        "--- a/a",
        "+++ b/a",
        "# so",
        "@@ -5,4 +5,5 @@",
        '       "lm_head"',
        '       "x"',
        '+      "re:^mtp"',
        "     ]",
        '     "bits": 4',
    ]


def test_a_long_file_shows_the_ends_of_what_is_new_and_the_longest_its_lengths():
    old = {f"layer.{n:05}": "a" for n in range(5_000)}
    lines = diff(old, old | {f"mtp.{n:03}\u202e": "b" for n in range(800)})
    assert len(lines) < 25 and any("786 more lines" in line for line in lines)
    assert all(line.isprintable() for line in lines)
    long = {f"layer.{n:05}": "a" for n in range(10_000)}
    assert diff(long, long | {"b": 1})[3:] == ["@@ -10002 +10003 @@"]


def test_a_file_keeps_its_indent_its_escapes_and_its_end():
    for text in ('{\n    "é": 1\n}\n', '{\n  "\\u00e9": 1\n}', '{"a": 1}'):
        value = json.loads(text)
        written = in_form_of(text.encode(), value).decode()
        assert json.loads(written) == value and (text.count("\n") == 0 or written == text)


# --- a repository, whose changed files alone are written ------------------------------------------


@pytest.mark.parametrize("start, status", [("F11", 0), ("F37", 1)])
def test_of_a_repository_headers_are_read_and_changed_files_written(
    start, status, hub_at, tmp_path
):
    """F11 needs another config alone, F37 other shards."""
    case = next(case for case in BROKEN if case.name.startswith(start))
    with loopback.serving(tmp_path / "hub") as hub:
        hub_at(hub.endpoint)
        hub.mirror("org/model", write(tmp_path / "there", case.build()))
        done = CliRunner().invoke(app, ["fix", "org/model", "--out", str(tmp_path / "new")])
    assert done.exit_code == status, done.output
    if status:
        assert "not cured in a repository, because it needs the shards" in done.stdout
        assert not (tmp_path / "new").exists()
        return
    assert {path.name for path in (tmp_path / "new").iterdir()} == {".keepmtp", "config.json"}
    config = json_of(tmp_path / "new" / "config.json")
    assert "mtp.fc" in config["quantization_config"]["ignore"]
    assert "check passed org/model" in done.stdout
    read = [line for line in hub.requests if ".safetensors " in f"{line} "]
    values = [line for line in read if line.startswith("GET") and "bytes=0-" not in line]
    assert len(values) == 1, "the norms of the block"
