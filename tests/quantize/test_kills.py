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

import outputs
import pytest
from commands import ROOT, keepmtp
from keepmtp.checkpoints.files import partial_path
from killed import small_recipe
from outputs import MODEL, digests, end, killed_again_and_again, start
from processes import until


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "recipe, num_trials, num_kills, seconds",
    [(f"{MODEL}.w4a16-fp8", 8, 4, 0.5), ("fp8", 1, 3, 4.0)],
)
def test_kill_9_at_random_moments_leaves_the_same_bytes_and_nothing_else(
    recipe, num_trials, num_kills, seconds, tmp_path
):
    source = shutil.copytree(ROOT / "models" / MODEL, tmp_path / MODEL)
    if recipe == "fp8":
        recipe = str(small_recipe(tmp_path, f"{MODEL}.fp8"))
    whole, out, chance = tmp_path / "unbroken", tmp_path / "out", random.Random(11)
    assert end(start(source, whole, recipe)) == 0, outputs.refusal(whole)
    for _ in range(num_trials):
        moments = [chance.random() * seconds for _ in range(num_kills)]
        assert killed_again_and_again(source, out, recipe, moments) == 0, outputs.refusal(out)
        assert digests(out) == digests(whole), moments
        assert [path.name for path in tmp_path.glob("out*")] == ["out"], moments
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
    "number, name",
    [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C"), (signal.SIGHUP, "SIGHUP")],
)
def test_a_run_that_is_stopped_says_how_to_go_on(number, name, tmp_path):
    source = shutil.copytree(ROOT / "models" / MODEL, tmp_path / "source")
    words = f"quantize {MODEL} --source {source} --out out"
    stopped = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words.split()],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    partial = partial_path(tmp_path / "out")
    until(lambda: [*partial.glob("*.partial")], seconds=600, pause=0.01, by=stopped)
    began = time.monotonic()
    os.kill(stopped.pid, number)
    _, said = stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + number and time.monotonic() - began < 30
    assert f"stopped by {name}. The same command goes on where this one stopped." in said
    assert "Traceback" not in said and not (tmp_path / "out").exists()
    for says in ("packing", "finished before, with the same recipe, source and versions"):
        again = keepmtp(words, cwd=tmp_path)
        assert again.returncode == 0 and says in again.stdout + again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.log", "source"]
