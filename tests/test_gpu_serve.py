"""The steps of `make gpu-serve`, on a CPU."""

import sys

import gpu_serve
import pytest
from commands import ROOT, captured


@pytest.mark.full
@pytest.mark.vllm
def test_the_same_steps_run_on_a_cpu(tmp_path):
    page = tmp_path / "gpu.md"
    words = [sys.executable, ROOT / "benchmarks/gpu_serve.py", "--device", "cpu", "--small"]
    captured([*words, "--folder", tmp_path, "--page", page], status=0)
    table = page.read_text().partition(gpu_serve.BEGIN)[2].splitlines()
    rows = "\n".join(row for row in table if "NVIDIA" not in row)  # those of a GPU stay
    names = captured([*words, "--list"], status=0).stdout.splitlines()
    assert [name for name in names if f"\n| {name} |" not in rows] == [] and "**no**" not in rows
