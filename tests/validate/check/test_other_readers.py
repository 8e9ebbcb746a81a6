"""Readers that do not take several groups: which they are, by what threads, and what cures it."""

import json
from pathlib import Path

import pytest
from checkpoint_files import Checkpoint, as_source, write
from good import ours
from keepmtp.cli.main import app
from keepmtp.recipes.families import find_view
from keepmtp.validate.check.check import check_source
from keepmtp.validate.check.other_readers import CONVERT, other_readers
from keepmtp.validate.check.runtime_view import RuntimeView
from typer.testing import CliRunner


def lines(checkpoint: Checkpoint) -> tuple[str, ...]:
    source = as_source(checkpoint, Path("/nonexistent"))
    assert check_source(source).findings == (), "vLLM takes it: this is no finding"
    return other_readers(RuntimeView(source=source, view=find_view(source.config, source.where)))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("NVFP4", "FP8_DYNAMIC"), ("#26407", "mlx-vlm 0.6.5", "SGLang without #32736", CONVERT)),
        (("NVFP4A16", "FP8_BLOCK"), ("#26407", "mlx-vlm 0.6.5", "SGLang without #32736", "#37207")),
        (("FP8_BLOCK", "FP8"), ("#26407", "#37207")),
        (("W4A16", "FP8"), ("#26407", "mlx-vlm 0.6.5", "SGLang without #32736")),
        (("NVFP4", "NVFP4A16"), ()),
        (("NVFP4", "NVFP4"), ()),
    ],
    ids="-".join,
)
def test_each_reader_has_one_line(words, named):
    found = lines(ours("qwen3.5-text", *words))
    assert len(found) == len(named) and all(word in line for word, line in zip(named, found, strict=True))


def test_the_cure_is_named_only_where_it_is_one():
    assert CONVERT not in lines(ours("glm-4.7", "FP8_DYNAMIC", "NVFP4")), "modelopt has no scales a row for experts"


def test_modelopts_dialect_has_nothing_to_say():
    assert lines(ours("qwen3.5-text", "NVFP4", "FP8_DYNAMIC", format="modelopt")) == ()


def test_people_see_them_before_the_verdict(tmp_path):
    folder = write(tmp_path / "mixed", ours("qwen3.5-text", "NVFP4", "FP8_DYNAMIC"))
    said = json.loads(CliRunner().invoke(app, ["check", str(folder), "--json"]).stdout)
    assert len(said["other_readers"]) == 4 and said["findings"] == []
    shown = CliRunner().invoke(app, ["check", str(folder)]).stdout
    assert shown.count("other readers") == 1
    convert = CONVERT.replace("PATH", str(folder))
    assert shown.index("#26407") < shown.index(convert) < shown.index("check passed")
