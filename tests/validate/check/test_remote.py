"""The value check of a repository: the wanted bytes are fetched, a cut goes on, the verdict is that
of a folder.
"""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from checkpoint_files import write
from commands import GLM
from good import ours
from good_checkpoints import GOOD
from hub import TOKEN, Fault, Hub, serving
from keepmtp.cli import main
from keepmtp.validate.check.reading import chosen, joined
from keepmtp.validate.check.values import check_values
from releases import made_of
from written_values import fill, opened, poke

DOWN = "model.layers.2.mlp.experts.1.down_proj"


@pytest.fixture
def hub(hub_at, tmp_path, monkeypatch):
    monkeypatch.setattr("keepmtp.checkpoints.hub._FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(tmp_path / "hub") as hub:
        hub.leads_elsewhere = True
        hub_at(hub.endpoint)
        yield hub


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    """Our own output: FP8 rows and a BF16 MTP block."""
    return made_of("tiny-glm4-moe", tmp_path_factory.mktemp("made") / "fp8", scheme="fp8-dynamic")


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "checkpoint", GOOD["glm nvfp4"]())


def ranges(hub: Hub) -> list[tuple[int, int]]:
    """Those of the tensors, where the bytes are: each header is asked for from byte 0."""
    asked = [re.search(r"^GET /elsewhere.*bytes=(\d+)-(\d+)$", request) for request in hub.requests]
    return [(int(each[1]), int(each[2])) for each in asked if each and each[1] != "0"]


@pytest.mark.parametrize("level", ["norms", "scalars", "scales", "unpacked", "all"])
def test_a_repository_is_judged_like_its_folder_from_the_bytes_that_were_said(level, hub, folder):
    fill(folder)
    name = f"{DOWN}.input_global_scale"
    if level == "norms":  # of the MTP block alone
        name = "model.layers.3.enorm.weight"
    poke(folder, name, math.inf)
    hub.mirror("org/model", folder)
    found = check_values(opened("org/model"), level)
    assert [finding.where for finding in found] == [name]
    wanted = repr(check_values(opened(folder), level))
    assert repr(found) == wanted.replace(str(folder), "org/model")
    stretches = joined(opened("org/model").source, chosen(opened(folder), level))
    assert sorted(last - first + 1 for first, last in ranges(hub)) == sorted(
        stretch.num_bytes for stretch in stretches
    )


def test_a_cut_in_the_middle_of_a_range_changes_nothing(hub, folder):
    fill(folder)
    poke(folder, f"{DOWN}.weight_scale", math.nan, at=5)
    hub.mirror("org/model", folder)
    runtime = opened("org/model")
    hub.faults.append(Fault("GET /elsewhere", spoils="truncate", times=3, skip=1))
    found = check_values(runtime, "all")
    assert hub.faults[0].times == 0
    assert found == check_values(opened(folder), "all")
    (finding,) = found
    assert finding.where == f"{DOWN}.weight_scale" and finding.says.startswith(
        "element [0, 5] is infinite or NaN"
    )


def test_scalars_are_a_fraction_of_the_scales(hub, tmp_path):
    """A layer in full width, of holes; the file is 1.5 GB and is never read whole."""
    wide = {
        "hidden_size": 5120,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 32,
        "num_hidden_layers": 2,
    }
    folder = write(tmp_path / "checkpoint", ours("glm-4.7", "NVFP4A16", **wide))
    hub.link("org/model", folder)
    read = []
    for level in ("scalars", "scales"):
        hub.requests.clear()
        check_values(opened("org/model"), level)
        read.append(sum(last - first + 1 for first, last in ranges(hub)))
    assert read[0] < read[1] / 50
    assert read[1] < sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 5


def test_the_command_names_the_tensor(hub, quantized, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(quantized, tmp_path / "broken")
    name = "model.layers.2.self_attn.o_proj.weight_scale"
    poke(folder, name, 1e-3)
    hub.mirror("org/model", folder)
    hub.mirror("org/release", GLM)
    words = ["keepmtp", "check", "org/model", "--values", "--source", "org/release"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main.main()
    told = capsys.readouterr()
    assert ended.value.code == 1
    assert name.removesuffix("_scale") in told.out and "differs from the release" in told.out
    assert told.err.startswith("reading values  ")
    assert TOKEN not in told.out + told.err


@pytest.mark.full
def test_ctrl_c_ends_the_command_while_it_waits_for_a_range(hub, folder, tmp_path):
    hub.mirror("org/model", folder)
    held = threading.Event()
    asked = threading.Event()
    hub.faults.append(
        Fault("GET /elsewhere", times=99, skip=2, hold=held, before=asked.set, spoils="truncate")
    )
    env = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "keepmtp", "check", "org/model", "--values", "all"]
    process = subprocess.Popen(
        words, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert asked.wait(60)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        held.set()
    assert process.returncode == 130 and "Traceback" not in err, err
