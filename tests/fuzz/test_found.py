"""What fuzzing found in files that several verbs read, each once."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import measured
import pytest
from broken import GOOD
from checkpoint_files import write
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import CheckpointError
from keepmtp.validate.check.check import check
from keepmtp.validate.evaluation.answers import read_samples
from keepmtp.validate.publish.card_metadata import read_front_matter
from keepmtp.validate.publish.provenance import recipe_text
from keepmtp.validate.report.report import read_json, refresh
from keepmtp.validate.report.results import read_result

READERS: dict[str, Callable[[Path], object]] = {
    "check.json": lambda path: read_result(path.parent, "check"),
    "report.json": read_json,
    "recipe.yaml": lambda path: recipe_text(path.parent),
    "answers.jsonl": read_samples,
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="regular file"):
        READERS[name](tmp_path / name)


def test_a_pipe_in_place_of_the_kept_hashes_is_no_cache(tmp_path):
    folder = measured.checkpoint(tmp_path / "NAME")
    first = identify(folder, cache=tmp_path)
    (cache,) = tmp_path.glob("*.json")
    cache.unlink()
    os.mkfifo(cache)
    assert identify(folder, cache=tmp_path).sha256 == first.sha256


def test_links_that_lead_to_each_other_are_refused(tmp_path):
    folder = write(tmp_path / "NAME", GOOD["glm fp8"]())
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(CheckpointError, match="link"):
        open_source(folder)


def test_a_report_says_why_a_part_is_absent(tmp_path):
    path = measured.measured(tmp_path / "NAME") / "report.json"
    refresh(path.parent)
    report = json.loads(path.read_bytes())
    del report["identity"]
    path.write_text(json.dumps(report))
    with pytest.raises(CheckpointError, match=r"absent\.identity must say why"):
        read_json(path)


@pytest.mark.parametrize("text", ["a: " + "[" * 20_000, f"a: {'9' * 5000}", "a: 2020-99-99", "a: !!python/tuple [1]"])
def test_front_matter_that_is_no_yaml_is_refused(text, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")
    with pytest.raises(CheckpointError, match="front matter must be a YAML mapping"):
        read_front_matter(tmp_path)


@pytest.mark.parametrize("raw", [b"[]", b"", b"{", '{"a": 1}'.encode("utf-16"), b'{"a":' * 5000], ids=range(5))
def test_modelopts_file_must_be_json_where_vllm_reads_it(raw, tmp_path):
    for name, is_read in (("glm modelopt file", True), ("glm modelopt", False)):
        folder = write(tmp_path / name, GOOD[name]())
        (folder / "hf_quant_config.json").write_bytes(raw)
        report = check(folder)
        assert report.ok is not is_read
        assert not is_read or "hf_quant_config.json" in report.findings[0].where
