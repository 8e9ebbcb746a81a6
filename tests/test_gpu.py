"""`make gpu` on a machine without a GPU: it says so, and the same program runs on the CPU.

Nothing of the program is untried but the GPU. A pretended one runs the parts that compare.
"""

import re
import sys
from pathlib import Path

import gpu
import gpu_computes
import pretended_gpu as device_module
import pytest
import torch
from commands import ROOT, captured
from data_files import cases
from figures import Figure
from gpu_runs import in_a_child
from keepmtp.quantize.needs.memory import stations
from pretended_gpu import pretended_gpu

PROGRAM = [sys.executable, str(ROOT / "benchmarks" / "gpu.py")]


def test_without_a_gpu_it_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: gpu: PyTorch must see a GPU; got PyTorch ")
    assert sentence.endswith("or try the program itself with make gpu SMALL=1.")


@pytest.mark.full
@pytest.mark.vllm
def test_the_same_program_runs_on_a_cpu():
    """Every part, and of those that serve the one that a CPU has kernels for."""
    parts = [part for part in gpu.PARTS if part not in gpu.SERVED or part == "qwen.w8a8"]
    words = [word for part in parts for word in ("--only", part)]
    said = captured([*PROGRAM, "--small", *words], status=0).stdout
    assert [part for part in parts if f"\n{part}, " not in f"\n{said}"] == []
    assert "qwen.w8a8, starts with method=mtp: " in said and "MISSED" not in said


def test_the_page_names_every_part_and_says_whether_figures_were_taken():
    page = gpu.PAGE.read_text()
    before, table = page.split(gpu.BEGIN)
    assert table.endswith(f" |\n\n{gpu.END}")
    kinds = {"line": "line.SCHEME", "glm": "glm.SCHEME", "qwen": "qwen.SCHEME"}
    for part in gpu.PARTS:
        kind = part.partition(".")[0]
        assert f"`{kinds.get(kind, part)}`" in before, part
    rows = [line.removeprefix("| ").partition(" | ")[0] for line in table.splitlines()[3:-2]]
    assert {*rows} <= {*gpu.PARTS}


def test_a_row_takes_the_place_of_the_same_on_the_same_machine():
    page = f"before\n{gpu.BEGIN}\n| part |\n|---|\n\n{gpu.END}after\n"
    figure = Figure(part="rates", what="copy", measured="1 GB/s")
    for measured, on in (("1", "A"), ("2", "B"), ("3", "A")):
        cells = gpu.row(Figure(part="rates", what="a | b", measured=measured), on)
        page = gpu.with_row(page, cells)
    assert page == (
        f"before\n{gpu.BEGIN}\n| part |\n|---|\n"
        "| rates | a \\| b | 3 |  |  | A |\n| rates | a \\| b | 2 |  |  | B |\n\n"
        f"{gpu.END}after\n"
    )
    assert gpu.row(figure, "A")[-2:] == ["", "A"]


@cases
def test_wide_layers_are_as_wide_as_the_models(model, width, num_experts, tmp_path):
    """Holes in place of numbers, which would be 16 GB: the plan is that of the run on a GPU."""
    plan = gpu_computes.wide_plan(model, tmp_path / "source", small=False, data="sparse")
    experts = [t.scheme for t in plan.tensors if (t.part, t.role) == ("backbone", "experts")]
    assert experts == ["NVFP4"] * 3 * num_experts
    assert plan.view.text_config["hidden_size"] == width and plan.view.num_layers == 1
    found = stations(plan)
    assert max(station.device_bytes for station in found) <= 70 * 2**30
    taken = re.search(rf"\| {model} \| peak memory \| ([\d.]+) GiB", gpu.PAGE.read_text())
    assert float(taken[1]) < found[0].device_bytes / 2**30 < 1.3 * float(taken[1])


# --- what is red ----------------------------------------------------------------------------------


@cases
def test_a_tensor_that_differs_is_red_by_name(changed, red):
    tensors = {
        "m.experts.0.weight_packed": torch.arange(4, dtype=torch.uint8),
        "m.input_global_scale": torch.ones(1),
    }
    other = {name: torch.tensor(value).to(tensors[name]) for name, value in changed.items()}
    acceptance = {"by_position": {"1": [0.9]}}
    row = {"backbone": "source", "mtp": "source", "perplexity": 4.0, "acceptance": acceptance}
    sides = [({"rows": [row]}, values) for values in (tensors | other, tensors)]
    rows = gpu_computes.compared(*sides, is_rewritten=False)
    found = [row.measured for row in rows if not row.met]
    for part, measured in zip(red, found, strict=True):
        assert part in measured


def test_a_kernel_that_the_log_does_not_name_is_red():
    checked = {"layer": "", "method": "", "count": 1, "outcome": "ok"}
    target = {"kernels": [checked | {"where": "model.layers.0.mlp", "kernel": "MarlinKernel"}]}
    dry = gpu.DryLoad.model_validate(
        {"vllm": "0.33.0", "gpu": "sm90", "tp": 1, "k": 3, "ok": True}
        | {"seconds": 1.0, "peak_mib": 1, "target": target, "draft": {"kernels": []}}
    )
    for log, is_met in (("Using MarlinKernel for x", True), ("Using 'Humming' for x", False)):
        figure = gpu.kernels_in_log(dry, log)
        assert figure.met == is_met
    assert figure.measured == (
        "none; not in the log: model.layers.0.mlp MarlinKernel; others in the log: Humming"
    )


# --- on a pretended GPU ---------------------------------------------------------------------------


def test_the_parts_run_on_another_device_than_the_cpu(tmp_path):
    rows, off = in_a_child(on_pretended, tmp_path)
    assert not [row for row in rows if not row.met]
    peak = [row.measured for row in rows if row.what == "peak memory"]
    assert len(peak) == 1 and "of what is planned" in peak[0]
    assert len(rows) > 14
    assert [row.what for row in off] == [
        "BF16 to FP8 E4M3",
        "F32 to FP8 E4M3",
        "float8_e4m3fn to F32",
    ]
    assert [row.measured[:5] for row in off[:2]] == ["5 of ", "5 of "]


def on_pretended(folder: Path) -> tuple[list[Figure], list[Figure]]:
    """The parts; and what is red on a device whose casts to FP8 have other last bits."""
    with pretended_gpu() as device:
        rows = []
        for part in (gpu.casts, gpu.packed, gpu.rates):
            rows += part(device.device, folder, small=True)
        rows += gpu.wide_layer("glm-4.5-air", device.device, folder, small=True)
        real = device_module._moved

        def moved(*args):
            made = real(*args)
            if made.dtype == torch.float8_e4m3fn and made.device == device.device:
                made.held.view(torch.uint8)[:5] ^= 1
            return made

        device_module._moved = moved
        off = [*gpu.casts(device.device, folder, small=True)]
    return rows, [row for row in off if not row.met]
