"""`make gpu-test` on a machine without a GPU: it says so, and the same program runs on the CPU.

Nothing of the program is untried but the GPU. A pretended one runs the parts that compare and that
count memory.
"""

import re
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import gpu
import gpu_models
import gpu_profile
import pretended_gpu as device_module
import pytest
import torch
from commands import ROOT, make
from figures import Figure
from gpu_kernels import casts, packing
from gpu_models import compared, wide_layer
from gpu_runs import in_a_child
from keepmtp.quantize.needs.memory import stations
from packaging.requirements import Requirement
from pretended_gpu import pretended_gpu
from safetensors.torch import save_file
from tables import cases

PAGE = ROOT / "docs" / "gpu.md"
# The words of docs/gpu.md: what a machine has, with what these install; and what is carried to it.
HAS = "torch scipy transformers accelerate pandas pyarrow xxhash requests aiohttp"


def gpu_test(folder, python, *words, **settings):
    """`make gpu-test` with this Python, and nothing carried to it."""
    places = (f"GPU_PYTHON={python}", f"GPU_SITE={folder}/site", f"GPU_WHEELS={folder}")
    return make("gpu-test", *places, *words, **settings)


def test_without_a_gpu_it_is_one_sentence(tmp_path):
    sentence, *rest = gpu_test(tmp_path, sys.executable, status=2).stderr.splitlines()
    assert sentence.startswith("error: gpu-test: PyTorch must see the device cuda; got PyTorch ")
    assert sentence.endswith("or try the program itself with make gpu-test DEVICE=cpu SMALL=1.")
    assert len(rest) == 1 and rest[0].startswith("make: ")


def test_a_python_without_pytorch_is_one_sentence(tmp_path):
    done = gpu_test(tmp_path, f"{sys.executable} -S", status=2, PYTHONPATH="")
    assert done.stderr.splitlines()[0] == (
        "error: GPU_PYTHON: must have PyTorch for its GPU and what docs/gpu.md names; "
        f"got {sys.executable} without torch. Name a Python that has it, or carry it there."
    )


@pytest.mark.full
def test_the_same_program_runs_on_a_cpu_with_what_such_a_machine_has(tmp_path):
    page = tmp_path / "gpu.md"
    page.write_text(PAGE.read_text())
    python = guarded(tmp_path, {*installed_with(HAS.split()), *carried()})
    words = ("DEVICE=cpu", "SMALL=1", f"PAGE={page}")
    gpu_test(tmp_path, python, *words, status=0, OMP_NUM_THREADS="1")
    before, table, after = parts_of(page)
    first = set()
    for row in table.splitlines():
        if row.startswith("| "):
            first.add(row.removeprefix("| ").partition(" | ")[0])
    was = parts_of(PAGE)
    assert (before, after) == (was[0], was[2])
    assert {*gpu.PARTS} - first == {"line"} and "tiny-glm4-moe.nvfp4-mtp-nvfp4" in first
    assert "**no**" not in table and "Taken on " in table


def parts_of(page: Path) -> list[str]:
    """What stands before the table, the table, and what stands after it."""
    return re.split(f"{gpu.BEGIN}|{gpu.END}", page.read_text())


def test_the_page_says_whether_figures_were_taken():
    _, table, _ = parts_of(PAGE)
    assert ("No figure has been taken on a GPU yet." in table) != ("Taken on " in table)
    for name in (*(f"`{part}`" for part in gpu.PARTS), *carried()):
        assert name in PAGE.read_text()


@cases
def test_wide_layers_are_as_wide_as_the_models(model, width, num_experts, tmp_path, monkeypatch):
    """Holes in place of the noise, which would be 16 GB: the plan is that of the run on a GPU."""
    monkeypatch.setattr(gpu_models, "fill_with_noise", lambda *_: None)
    plan = gpu_models.wide_plan(model, tmp_path / "source", small=False)
    experts = [t.scheme for t in plan.tensors if (t.part, t.role) == ("backbone", "experts")]
    assert experts == ["NVFP4"] * 3 * num_experts
    assert plan.view.text_config["hidden_size"] == width and plan.view.num_layers == 1
    found = stations(plan)
    assert max(station.device_bytes for station in found) <= 70 * 2**30
    taken = re.search(rf"\| {model} \| peak memory \| ([\d.]+) GiB", PAGE.read_text())
    assert float(taken[1]) < found[0].device_bytes / 2**30 < 1.3 * float(taken[1])


def installed_with(names: list[str]) -> set[str]:
    """These packages, and what pip installs with them."""
    here = {normal(name) for names in packages_distributions().values() for name in names}
    found = set()
    waiting = [*names]
    while waiting:
        name = normal(waiting.pop())
        if name in found:
            continue
        found.add(name)
        if name in here:
            for needed in map(Requirement, requires(name) or ()):
                if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                    waiting.append(needed.name)
    return found


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def carried() -> list[str]:
    """What `make gpu-wheels` downloads."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", "")
    return re.search(r"^CARRIED := (.+)$", text, re.MULTILINE)[1].split()


def guarded(folder: Path, allowed: set[str]) -> Path:
    """A Python that refuses to import what is installed here and would not be there."""
    wrapper = folder / "python"
    guard = folder / "guard.py"
    guard.write_text(
        f"""
import runpy, sys
from importlib.metadata import packages_distributions
there, allowed = packages_distributions(), {allowed!r}
class Guard:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, *args):
        names = {{each.lower().replace("_", "-") for each in there.get(name.partition(".")[0], ())}}
        return None if names - {{"keepmtp"}} and not names & allowed else self.finder.find_spec(name, *args)
sys.meta_path[:] = map(Guard, sys.meta_path)
sys.argv = sys.argv[1:]
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    )
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} {guard} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


# --- what is red ----------------------------------------------------------------------------------


@cases
def test_a_tensor_that_differs_is_red_by_name(changed, red, tmp_path):
    tensors = {
        "m.experts.0.weight_packed": torch.arange(4, dtype=torch.uint8),
        "m.input_global_scale": torch.ones(1),
    }
    other = {name: torch.tensor(value).to(tensors[name]) for name, value in changed.items()}
    sides = []
    for name, values in (("device", tensors | other), ("cpu", tensors)):
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "model.safetensors")
        acceptance = {"by_position": {"1": [0.9]}}
        row = {"backbone": "source", "mtp": "source", "perplexity": 4.0, "acceptance": acceptance}
        sides.append(({"rows": [row]}, tmp_path / name))
    found = [row.measured for row in compared("line", *sides) if not row.met]
    for part, measured in zip(red, found, strict=True):
        assert part in measured


# --- on a pretended GPU ---------------------------------------------------------------------------


def test_the_parts_run_on_another_device_than_the_cpu(tmp_path):
    rows, off = in_a_child(on_pretended, tmp_path)
    assert not [row for row in rows if not row.met]
    assert {row.part for row in rows} == {"casts", "packed", "packing", "glm-4.5-air"}
    assert any(row.what == "peak memory" and "of what is planned" in row.measured for row in rows)
    assert [row.what for row in off] == [
        "BF16 to FP8 E4M3",
        "F32 to FP8 E4M3",
        "float8_e4m3fn to F32",
    ]
    assert [row.measured[:5] for row in off[:2]] == ["5 of ", "5 of "]


def on_pretended(folder: Path) -> tuple[list[Figure], list[Figure]]:
    """The parts; and what is red on a device whose casts to FP8 have other last bits."""
    with pretended_gpu() as device:
        rows = [*casts(device.device, small=True), *packing(device.device, small=True)]
        rows += wide_layer("glm-4.5-air", device.device, folder, small=True)
        real = device_module._moved

        def moved(*args):
            made = real(*args)
            if made.dtype == torch.float8_e4m3fn and made.device == device.device:
                made.held.view(torch.uint8)[:5] ^= 1
            return made

        device_module._moved = moved
        off = casts(device.device, small=True)
    return rows, [row for row in off if row.part == "casts" and not row.met]


def test_a_profile_counts_what_overlaps_once(tmp_path):
    """Two kernels at a time, then nothing for two seconds, then a copy; and what the host waits."""
    seen = [("product", True, 1, 3), ("product", True, 2, 3), ("copy", True, 7, 1)]
    seen.append(("cudaStreamSynchronize", False, 0, 6))
    events = [
        gpu_profile.Event(name=name, is_on_device=here, start=start, seconds=seconds)
        for name, here, start, seconds in seen
    ]
    assert gpu_profile.spent(events) == [
        "GPU busy 5.00 s of 7.00 s, 3 kernels and copies",
        "6.000 s, 2 times: product",
        "6.000 s, 1 times: host in cudaStreamSynchronize",
        "1.000 s, 1 times: copy",
    ]
    places = (f"GPU_PYTHON={sys.executable}", f"GPU_SITE={tmp_path}/site", f"GPU_WHEELS={tmp_path}")
    words = ("MODEL=glm-4.5-air", "DEVICE=cpu", "SMALL=1", f"TRACE={tmp_path}/trace.json.gz")
    told = make("gpu-profile", *places, *words, status=0).stdout
    assert "one layer, 64 tokens: " in told and told.endswith("no kernel ran on a GPU\n")
    assert (tmp_path / "trace.json.gz").stat().st_size
