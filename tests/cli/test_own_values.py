"""Our own output gets its name only if a model can compute with its values; else the tensor is
named.
"""

import math
import shutil
from pathlib import Path

import pytest
from commands import GLM, keepmtp
from data_files import cases
from keepmtp import api
from keepmtp.checkpoints.files import partial_path
from keepmtp.recipes.errors import GateError
from keepmtp.validate.check.reading import chosen
from releases import made_of
from written_values import opened, poke

MTP = "model.layers.3"


@pytest.fixture
def source(tmp_path) -> Path:
    return shutil.copytree(GLM, tmp_path / "source")


@cases
def test_a_broken_source_gives_no_output(tensor, value, at, says, source, tmp_path):
    poke(source, tensor, value, **at)
    plan = api.plan("tiny-glm4-moe", source=str(source), scheme="fp8-dynamic", mtp="bf16")
    with pytest.raises(GateError) as refusal:
        api.quantize(plan, tmp_path / "out", threads=2)
    words = str(refusal.value)
    assert f"got {tensor} " in words and says in words
    assert f"{tensor} of the source gives it: download {plan.entries[tensor].file} again" in words
    assert not (tmp_path / "out").exists() and partial_path(tmp_path / "out").is_dir()


@pytest.mark.full
def test_a_run_that_is_resumed_is_read_too_and_a_mended_source_ends_it(source, tmp_path):
    shard = source / opened(source).source.entries["model.norm.weight"].file
    good = shard.read_bytes()
    poke(source, "model.norm.weight", math.nan, at=3)
    plan = api.plan("tiny-glm4-moe", source=str(source), scheme="fp8-dynamic")
    says = r"got model\.norm\.weight element \[3\] is infinite or NaN"
    for _ in range(2):  # the second one finds every shard written
        with pytest.raises(GateError, match=says):
            api.quantize(plan, tmp_path / "out", threads=2)
        assert not (tmp_path / "out").exists()
    shard.write_bytes(good)
    words = f"quantize tiny-glm4-moe --source {source} --scheme fp8-dynamic --out out"
    done = keepmtp(words, cwd=tmp_path, status=0)
    assert "reading values  " in done.stderr, done.stderr
    assert (tmp_path / "out" / "config.json").is_file()


def test_what_is_read_is_all_but_the_backbones_packed_weights(tmp_path):
    runtime = opened(made_of("tiny-glm4-moe", tmp_path / "out", scheme="nvfp4a16-fp8"))
    entries = runtime.source.entries
    left = entries.keys() - {entry.name for entry in chosen(runtime, "unpacked")}
    assert left and not [name for name in left if name.startswith(MTP)]
    assert all(name.startswith("model.layers.") for name in left)
    assert {entries[name].dtype for name in left} == {"U8", "F8_E4M3"}
