"""Runs that end at any moment: by kill -9 again and again, by SIGTERM and by Ctrl-C. The same
command goes on.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import outputs
import pytest
from keepmtp.checkpoints.files import partial_path
from killed import small_recipe
from outputs import MODEL, digests, end, killed_again_and_again, start

ROOT = Path(__file__).parent.parent.parent
DATA_FREE = f"{MODEL}.w4a16-fp8"


@pytest.mark.parametrize(
    ("recipe", "num_trials", "num_kills", "seconds"), [("", 8, 4, 0.5), ("fp8", 1, 3, 4.0)]
)
def test_kill_9_at_random_moments_leaves_the_same_bytes_and_nothing_else(
    recipe, num_trials, num_kills, seconds, tmp_path
):
    source = shutil.copytree(ROOT / "models" / MODEL, tmp_path / MODEL)
    recipe = str(small_recipe(tmp_path, f"{MODEL}.{recipe}")) if recipe else DATA_FREE
    assert end(start(source, tmp_path / "unbroken", recipe)) == 0, outputs.refusal(
        tmp_path / "unbroken"
    )
    unbroken, chance, out = digests(tmp_path / "unbroken"), random.Random(11), tmp_path / "out"
    for _ in range(num_trials):
        moments = [chance.random() * seconds for _ in range(num_kills)]
        assert killed_again_and_again(source, out, recipe, moments) == 0, outputs.refusal(out)
        assert digests(out) == unbroken, moments
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == [
            "out"
        ], moments
        shutil.rmtree(out)


SLOW = """
import os, sys, time
real = os.pwrite
def slow(*words):
    time.sleep(0.02)
    return real(*words)
os.pwrite = slow
from keepmtp.cli.main import main
main()
"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("number", "status", "name"), [(signal.SIGTERM, 143, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")]
)
def test_a_run_that_is_stopped_says_how_to_go_on(number, status, name, tmp_path):
    command = [
        "quantize",
        MODEL,
        "--source",
        str(ROOT / "models" / MODEL),
        "--out",
        str(tmp_path / "out"),
    ]
    stopped = subprocess.Popen(
        [sys.executable, "-c", SLOW, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    while not list(partial_path(tmp_path / "out").glob("*.partial")):
        assert stopped.poll() is None
        time.sleep(0.01)
    began = time.monotonic()
    os.kill(stopped.pid, number)
    _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == status and time.monotonic() - began < 30
    assert (
        f"stopped by {name}. The same command goes on where this one stopped." in said
        and "Traceback" not in said
    )
    assert not (tmp_path / "out").exists()
    for words in ("packing", "finished before, with the same recipe, source and versions"):
        again = subprocess.run(
            [sys.executable, "-m", "keepmtp", *command],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        assert again.returncode == 0 and words in again.stdout + again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
