"""Our own output gets its name only if a model can compute with its values; else the tensor is
named.
"""

import math
import shutil
from pathlib import Path

import pytest
from commands import keepmtp
from keepmtp import api
from keepmtp.checkpoints.files import partial_path
from keepmtp.recipes.errors import GateError
from keepmtp.validate.check.reading import chosen
from written_values import opened, poke

RELEASE = Path(__file__).parents[2] / "models" / "tiny-glm4-moe"
MTP = "model.layers.3"


@pytest.fixture
def source(tmp_path) -> Path:
    return shutil.copytree(RELEASE, tmp_path / "source")


BROKEN = {
    "a kept weight with NaN": (
        "model.embed_tokens.weight",
        math.nan,
        7,
        "element [0, 7] is infinite or NaN, as are 1",
    ),
    "a kept weight with inf": (
        f"{MTP}.eh_proj.weight",
        math.inf,
        0,
        "element [0, 0] is infinite or NaN, as are 1",
    ),
    "an MTP norm of zeros": (f"{MTP}.enorm.weight", 0.0, slice(None), "its largest value is 0"),
    "an MTP matrix of zeros": (
        f"{MTP}.mlp.experts.1.up_proj.weight",
        0.0,
        slice(None),
        "holds zeros only",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_source_gives_no_output(name, source, tmp_path):
    tensor, value, at, says = BROKEN[name]
    poke(source, tensor, value, at=at)
    plan = api.plan("tiny-glm4-moe", source=str(source), scheme="fp8-dynamic", mtp="bf16")
    with pytest.raises(GateError) as refusal:
        api.quantize(plan, tmp_path / "out", threads=2)
    words = str(refusal.value)
    assert f"got {tensor} " in words and says in words
    assert f"{tensor} of the source gives it: download {plan.entries[tensor].file} again" in words
    assert not (tmp_path / "out").exists() and partial_path(tmp_path / "out").is_dir()


@pytest.mark.full
def test_a_run_that_is_resumed_is_read_too_and_a_mended_source_ends_it(source, tmp_path):
    words = f"quantize tiny-glm4-moe --source {source} --scheme fp8-dynamic --out out"
    shard = source / opened(source).source.entries["model.norm.weight"].file
    good = shard.read_bytes()
    poke(source, "model.norm.weight", math.nan, at=3)
    plan = api.plan("tiny-glm4-moe", source=str(source), scheme="fp8-dynamic")
    for _ in range(2):  # the second one finds every shard written
        with pytest.raises(
            GateError, match=r"got model\.norm\.weight element \[3\] is infinite or NaN"
        ):
            api.quantize(plan, tmp_path / "out", threads=2)
        assert not (tmp_path / "out").exists()
    shard.write_bytes(good)
    done = keepmtp(words, cwd=tmp_path)
    assert done.returncode == 0 and "reading values  " in done.stderr, done.stderr
    assert (tmp_path / "out" / "config.json").is_file()


def test_what_is_read_is_all_but_the_backbones_packed_weights(tmp_path):
    out = api.quantize(
        api.plan("tiny-glm4-moe", scheme="nvfp4a16-fp8"), tmp_path / "out", threads=2
    ).out
    runtime = opened(out)
    read = {entry.name for entry in chosen(runtime, "unpacked")}
    left = runtime.source.entries.keys() - read
    assert left and all(
        name.startswith("model.layers.") and not name.startswith(MTP) for name in left
    )
    assert {runtime.source.entries[name].dtype for name in left} == {"U8", "F8_E4M3"}
