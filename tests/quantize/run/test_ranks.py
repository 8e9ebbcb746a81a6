"""Several processes, as torchrun starts them: the same checkpoint as from one, and no one waits for
the dead.
"""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import yaml
from commands import IN_F32, ROOT
from data_files import json_of
from keepmtp.quantize.run.processes import place_of_process
from keepmtp.quantize.run.ranks import _device_of, joined
from keepmtp.recipes.errors import RecipeError
from killed import error, events, finished, small_recipe, start, statistics, summary
from outputs import digests
from passes import ALONE
from processes import until
from safetensors.torch import load_file

BIN = Path(sys.executable).parent
TWO = (BIN / "torchrun", "--standalone", "--nproc-per-node", "2", IN_F32[-1])


def command(recipe: Path, out: Path, *start: object) -> subprocess.Popen[str]:
    words = [*map(str, start), "quantize", str(recipe), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.full
def test_ranks_share_the_work_and_survive_none_of_them(tmp_path):
    """One is killed, and the other says so and ends; the same command then ends in what one process
    makes.
    """
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", samples=16)
    whole = tmp_path / "whole" / "out"
    out = tmp_path / "two" / "out"
    alone = command(recipe, whole, sys.executable, *IN_F32)
    process = command(recipe, out, *TWO)
    first = out.parent / "out.calibration" / "states" / "00001"
    until(first.exists, seconds=600, pause=0.005, by=process)
    os.kill(worker(process.pid, rank=1), signal.SIGKILL)
    _, told = process.communicate(timeout=120)
    assert process.returncode != 0 and not out.exists()
    assert "rank 0 of 2: error: torchrun: all processes must stay until the end; got " in told
    assert "cli/main.py" not in told, "no traceback of ours"
    again = command(recipe, out, *TWO)
    said, told = again.communicate()
    assert again.returncode == 0, told
    assert said.count("check passed") == told.count("layer 3 of 3") == 1, "one speaks for all"
    names = sorted(path.name for path in out.parent.iterdir())
    assert "layer 1 of 3" not in told and names == ["out", "out.log"]
    assert alone.communicate()[1] is not None and alone.returncode == 0
    account, known = (json_of(each / "keepmtp.json") for each in (out, whole))
    made = digests(out)
    expected = digests(whole)
    assert made.pop("keepmtp.json") != expected.pop("keepmtp.json") and made == expected
    sizes = [found["calibration"].pop("processes") for found in (account, known)]
    assert sizes == [2, 1] and account == known


def worker(torchrun: int, *, rank: int) -> int:
    """The process id of a rank."""
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank}")


# --- statistics -----------------------------------------------------------------------------------


def error_of(folder: Path) -> float:
    """What quantization does to held-out text: relative error of the states behind the last
    layer.
    """
    last = folder / "states" / "00003"
    source, served = (
        torch.cat([load_file(path)["0"].float() for path in sorted(last.glob(f"{stream}-*"))])
        for stream in ("source", "served")
    )
    return float((served - source).norm() / source.norm())


@pytest.mark.full
@pytest.mark.parametrize("variant", ["w4a16-gptq", "w4a16-awq", "w8a8-smoothquant"])
def test_three_ranks_find_what_one_finds(variant, tmp_path):
    """Four batches, so one rank has two. Ranks add up in another order than one process does, in
    F32.

    Largest magnitudes have no order, so SmoothQuant and NVFP4 (above) come out to the bit. AWQ
    takes the best of 20 candidates by a sum of squares, and where two are equal the CPU decides which
    wins, so there the error is compared alone. GPTQ's Hessians differ
    by an ulp, which moves codes that lie between two steps, and each moves the rest of its row, so
    rows are counted: which ones part depends on the CPU (measured in the first layer: none to 2 of
    128, 3 of 256). Later layers see other inputs, so codes say nothing; their error stays
    (measured: within 5 %, as after changing batch_size in one process).
    """
    recipe = small_recipe(tmp_path, f"tiny-glm4-moe.{variant}")
    one = tmp_path / "one"
    three = tmp_path / "three"
    assert finished(start(recipe, one)) == [0]
    assert finished(start(recipe, three, size=3)) == [0, 0, 0]
    states = [
        {path.name for path in folder.glob("states/00003/calibration-*")} for folder in (one, three)
    ]
    assert states[0] == states[1] and len(states[0]) == 4, "every batch"
    if variant == "w8a8-smoothquant":
        assert statistics(three) == statistics(one)
        return
    assert error_of(three) == pytest.approx(error_of(one), rel=0.1)
    if variant == "w4a16-awq":
        return
    first, other = (
        load_file(folder / "statistics" / "layer-00000.safetensors") for folder in (one, three)
    )
    assert first.keys() == other.keys()
    for name in (name for name in first if name.endswith("weight_packed")):
        parted = (first[name] != other[name]).any(-1)  # rows of words of eight codes
        assert parted.float().mean() < 0.05, name


def rewrite(recipe: Path, words: str) -> None:
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | yaml.safe_load(words)))


def test_two_ranks_find_the_plan_that_one_finds(tmp_path):
    """A search under a budget, with half of the text for each: sums differ in their last bits, the
    plan does not.
    """
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4")
    rewrite(recipe, "{backbone: auto, budget: 4.06MB, backbone_auto: {candidates: [NVFP4, bf16]}}")
    one = tmp_path / "one"
    two = tmp_path / "two"
    assert finished(start(recipe, one, is_whole=True)) == [0]
    assert finished(start(recipe, two, size=2, is_whole=True)) == [0, 0]
    alone = summary(one)["search"]
    first = summary(two)["search"]
    assert first == summary(two, 1)["search"]
    assert first.pop("predicted") == pytest.approx(alone.pop("predicted"), rel=0.02)
    assert first == alone


@pytest.mark.full
def test_any_number_of_ranks_goes_on_with_a_pass_and_finds_the_same(tmp_path):
    """Three ranks for four batches, and for two of held-out text; one is killed; two ranks go on in
    larger batches.

    The MTP block is calibrated too, and all figures are those of one process, to the last bit.
    """
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4")
    (tmp_path / "more").mkdir()
    larger = small_recipe(tmp_path / "more", "tiny-glm4-moe.nvfp4", batch_size=4)
    rewrite(recipe, "mtp: NVFP4")
    rewrite(larger, "mtp: NVFP4")
    one = tmp_path / "one"
    many = tmp_path / "many"
    assert finished(start(recipe, one, is_whole=True)) == [0]
    killed = start(recipe, many, size=3, kill=("amid states", 1), killed_rank=2, is_whole=True)
    assert finished(killed, 60) == [2, 2, -9]
    assert "all processes must stay until the end; got no answer from another" in error(many, 0)
    assert finished(start(larger, many, size=2, is_whole=True), 60) == [0, 0]
    assert statistics(many) == statistics(one)
    assert summary(many, 0) == summary(many, 1) == summary(one)
    assert finished(start(recipe, many, size=3, is_whole=True), 60) == [0, 0, 0]
    assert summary(many, 2) == summary(one)
    assert events(many)[:3] == [1, 2, 3], "nothing is computed again"


TUNED = """
mtp: tuned
mtp_tuned: {mtp: NVFP4, steps: 3, batch_size: 4, learning_rate: 1.0e-3, seed: 0, loss: kl_div, draft_steps: 2, decay: 0.6}
"""


@pytest.mark.full
def test_two_ranks_train_what_one_trains(tmp_path):
    """Each takes two of the four sequences of a step. Gradients are summed in another order, in
    F32: weights differ in last bits of BF16, some codes in NVFP4.
    """
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4")
    rewrite(recipe, TUNED)
    found = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        ended = finished(start(recipe, folder, size=size, is_whole=True), 120)
        assert ended == [0] * size, error(folder)
        each = map(load_file, (folder / "mtp").glob("*.safetensors"))
        found += [tensors for tensors in each if "model.layers.3.enorm.weight" in tensors]
    assert summary(tmp_path / "2", 0) == summary(tmp_path / "2", 1)
    weights, others = found
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        if value.dtype != torch.bfloat16:
            continue
        # A step of AdamW is about the learning rate at most, whatever the gradient: three of them,
        # and a last bit.
        near = 3 * 1e-3 * 2 + 2**-8 * value.float().abs().max().item()
        assert (value.float() - others[name].float()).abs().max().item() < near, name
        assert (value == others[name]).float().mean().item() > 0.9, name


def test_the_first_rank_reads_the_dataset_and_all_refuse_it(tmp_path):
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", samples=100_000)
    assert finished(start(recipe, tmp_path / "pass", size=2, is_whole=True), 60) == [2, 2]
    told = {error(tmp_path / "pass", rank) for rank in (0, 1)}
    assert len(told) == 1 and "must hold 100000 + 4 sequences of 32 tokens" in told.pop()


# --- places and devices ---------------------------------------------------------------------------


@pytest.fixture
def environment(monkeypatch):
    """Sets the environment of a process, and how many GPUs it sees."""
    for name in [*os.environ]:
        if name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)

    def change(words: str = "", num_gpus: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", Mock(return_value=num_gpus > 0))
        monkeypatch.setattr(torch.cuda, "device_count", Mock(return_value=num_gpus))
        for word in words.split():
            monkeypatch.setenv(*word.split("=", 1))

    return change


TORCHRUN = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=5 LOCAL_WORLD_SIZE=8"


def test_a_process_without_a_gpu_is_refused(environment):
    environment(TORCHRUN, num_gpus=4)
    rule = r"must have a GPU of its own; got 8 processes for 4 GPUs\. Lower NPROC"
    with pytest.raises(RecipeError, match=rule), joined():
        pass


def test_each_process_of_a_node_has_its_gpu(environment):
    environment(TORCHRUN, num_gpus=8)
    place = place_of_process()
    assert (place.rank, place.size, place.local, place.local_size) == (5, 8, 5, 8)
    assert _device_of(place) == torch.device("cuda", 5)
    environment("CUDA_VISIBLE_DEVICES=0", num_gpus=1)
    with pytest.raises(RecipeError, match="got 8 processes for 1 GPU"):
        _device_of(place)


@pytest.mark.parametrize(
    "kind, error",
    [
        ("AcceleratorError", "CUDA error: device-side assert triggered\nCompile with DSA"),
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered"),
        ("RuntimeError", "No CUDA-capable device is detected"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
    ],
)
def test_a_gpu_that_fails_is_a_sentence(kind, error, environment):
    environment()
    with pytest.raises(RecipeError) as refused, joined():
        raise getattr(torch, kind, RuntimeError)(error)
    said = str(refused.value)
    assert said.startswith("cpu of rank 0 of 1 on ") and "goes on where this run stopped" in said
    assert f"the GPU must work until the end; got {error.splitlines()[0]}" in said


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA error: out of memory"), RuntimeError("shapes do not fit")],
)
def test_what_is_no_lost_gpu_stays_as_it_is(error, environment):
    environment()
    with pytest.raises(type(error), match=str(error)), joined():
        raise error


@pytest.mark.parametrize(
    "num_rows, size",
    [
        (16, 8),
        (16, 3),
        (16, 1),
        (14, 3),
        (5, 8),
        (64, 8),
        (9, 2),
    ],
)
def test_shares_are_whole_batches_where_all_get_one(num_rows, size):
    ranks = (replace(ALONE, rank=rank, size=size) for rank in range(size))
    shares = [own.share(num_rows, 4) for own in ranks]
    assert [*chain(*shares)] == [*range(num_rows)]
    if -(-num_rows // 4) >= size:
        assert all(share and share.start % 4 == 0 for share in shares)
    else:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
