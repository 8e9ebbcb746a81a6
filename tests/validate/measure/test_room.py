"""What has no room on this machine is refused before anything is downloaded or started, with what
would fit.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import ROOT, keepmtp
from keepmtp.checkpoints import files
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import RecipeError, VLLMError
from keepmtp.validate.facts.vllm_env import GPU, VLLM, find_vllm, gpus_here
from keepmtp.validate.measure.room import (
    loading_sizes,
    options_of,
    refuse_no_room,
    split_of,
    tensor_parallel_size,
)
from stub_vllm import stub_vllm

GLM = "models/tiny-glm4-moe"  # 6.1 MiB, 4 heads
SOURCE = open_source(ROOT / GLM)


@pytest.fixture
def cuda(monkeypatch, tmp_path) -> VLLM:
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path, distribution="vllm", torch="2.13.0")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return find_vllm()


def with_gpus(vllm: VLLM, number: int, *, mib: float, free: float | None = None) -> VLLM:
    gpu = GPU(
        name="H0",
        capability="9.0",
        memory_gib=mib / 1024,
        free_gib=(mib if free is None else free) / 1024,
    )
    return replace(vllm, gpus=(gpu,) * number)


def refused(vllm: VLLM, tmp_path: Path, *extra: str) -> str:
    with pytest.raises(VLLMError) as caught:
        refuse_no_room((SOURCE, None), vllm, out=tmp_path, extra=extra)
    return str(caught.value)


def test_what_fits(cuda, tmp_path):
    vllm = with_gpus(cuda, 4, mib=4)
    message = refused(vllm, tmp_path)
    assert "tiny-glm4-moe: " in message and message.endswith("Add -- --tensor-parallel-size 2.")
    message = refused(with_gpus(cuda, 1, mib=4), tmp_path)
    assert message.endswith("--tensor-parallel-size 2, on a machine with 2 GPUs.")
    assert "Use GPUs with more memory." in refused(with_gpus(cuda, 4, mib=1), tmp_path)
    for words in (
        "--tensor-parallel-size 2",
        "--tensor_parallel_size=4",
        "-tp 2",
        "-pp 2",
        "--cpu-offload-gb 1",
    ):
        refuse_no_room((SOURCE,), vllm, out=tmp_path, extra=words.split())
    refuse_no_room((SOURCE,), with_gpus(cuda, 1, mib=7), out=tmp_path, extra=())
    # Memory that is not known refuses nothing.
    refuse_no_room((SOURCE,), with_gpus(cuda, 1, mib=0), out=tmp_path, extra=())


def test_more_ranks_than_gpus(cuda, monkeypatch, tmp_path):
    vllm = with_gpus(cuda, 4, mib=99)
    assert "8 ranks need as many GPUs; got 4" in refused(vllm, tmp_path, "-tp", "4", "-pp=2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert "4 ranks need as many GPUs; got 2" in refused(
        vllm, tmp_path, "--tensor-parallel-size", "4"
    )


def test_a_size_that_vllm_does_not_load(cuda, tmp_path):
    """Four heads; with eight ranks none has a whole one."""
    vllm = with_gpus(cuda, 8, mib=99)
    message = refused(vllm, tmp_path, "--tensor-parallel-size", "8")
    assert "must be able to split it at TP 8; got config.json: num_attention_heads: 4" in message
    assert message.endswith("Serve it otherwise: it loads at TP 1, 2, 4.")
    refuse_no_room((SOURCE,), vllm, out=tmp_path, extra=("--tensor-parallel-size", "4"))


def test_as_few_gpus_as_hold_it(cuda):
    """6.1 MiB; a tenth of what vLLM may take is left for the KV cache; 4 heads are not split over 8
    GPUs.
    """

    def size(mib: float, *extra: str, number: int = 8, free: float | None = None) -> int:
        return tensor_parallel_size(SOURCE, with_gpus(cuda, number, mib=mib, free=free), extra)

    assert [size(8), size(7), size(4), size(3), size(2), size(1)] == [1, 2, 2, 4, 4, 1]
    assert size(4, number=1) == 1 and size(3, number=2) == 1, "refuse_no_room says what would fit"
    assert size(99, free=3.0) == 4, "others use these GPUs"
    for words in ("-tp 2", "--data-parallel-size=8", "--cpu-offload-gb 1"):
        assert size(3, *words.split()) == 1
    assert size(8, "--gpu-memory-utilization", "0.5") == 2
    assert size(0) == tensor_parallel_size(SOURCE, replace(cuda, build="cpu"), ()) == 1


def test_a_copy_that_the_disk_has_no_room_for(monkeypatch, tmp_path):
    """Before the source is served, which takes the longest; what a killed run left there is no
    longer in the way.
    """
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path)))
    left = tmp_path / "report" / "keepmtp-source-bf16-x"
    left.mkdir(parents=True)
    monkeypatch.setattr(
        files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6)
    )
    refuse_no_room((SOURCE,), find_vllm(), out=tmp_path / "report", extra=())
    assert not left.exists()
    quantized = replace(SOURCE, entries=packed(SOURCE.entries))
    with pytest.raises(RecipeError, match=r"must be free on its disk; got .* A BF16 copy of"):
        refuse_no_room((quantized,), find_vllm(), out=tmp_path / "report" / "not there", extra=())


def packed(entries):
    """Routed experts as FP8_DYNAMIC stores them, in headers alone."""
    made = dict(entries)
    for name, entry in entries.items():
        if ".experts." in name and name.endswith(".weight"):
            made[name] = replace(entry, dtype="F8_E4M3")
            scale = name.replace(".weight", ".weight_scale")
            made[scale] = replace(entry, name=scale, shape=(entry.shape[0], 1))
    return made


def test_the_words_of_an_option():
    words = ["--a", "1", "--tensor_parallel_size=8", "-tp"]
    named = {"--a": "1", "--tensor-parallel-size": "8", "-tp": ""}
    assert options_of(words).items() >= named.items()


@pytest.mark.parametrize(
    ("words", "tp", "whole"),
    [
        ("--tensor-parallel-size 2", 2, False),
        ("-tp 2 --enable_expert_parallel", 2, True),
        ("--tensor_parallel_size=2 -ep", 2, True),
        ("-tp x", 1, False),
        ("", 1, False),
    ],
)
def test_how_the_users_words_split_it(words, tp, whole):
    assert split_of(words.split()) == (tp, whole)


def test_sizes_without_a_familys_table():
    other = replace(SOURCE, config={**SOURCE.config, "model_type": "of_nobody"})
    assert loading_sizes(other) == loading_sizes(SOURCE) == (1, 2, 4)


@pytest.fixture
def smi(monkeypatch, tmp_path) -> Callable[..., None]:
    """Makes an nvidia-smi that says these lines."""

    def says(*lines: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return says


def test_what_nvidia_smi_says(smi):
    smi("NVIDIA H200, 9.0, 143771, 143000", "NVIDIA GB10, 12.1, [N/A], [N/A]")
    assert [(gpu.name, gpu.memory_gib, gpu.free_gib) for gpu in gpus_here()] == [
        ("NVIDIA H200", 140.401, 139.648),
        ("NVIDIA GB10", 0.0, 0.0),
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "command",
    [
        f"serve {GLM} -- -tp 1",
        f"eval {GLM} --only acceptance --source none --out",
        f"eval {GLM} --source none --recipe tiny-glm4-moe --out",
    ],
)
def test_each_command_refuses_before_it_starts_a_server(cuda, smi, tmp_path, command):
    smi("H0, 9.0, 4, 4", "H0, 9.0, 4, 4")
    out = tmp_path / "out"
    done = keepmtp(command, *[out] * command.endswith("--out"), cwd=ROOT, status=2)
    assert "Add -- --tensor-parallel-size 2." in " ".join(done.stderr.split())
    assert not out.exists() and "$ keepmtp" not in done.stderr


@pytest.mark.full
def test_another_vllm_is_named(monkeypatch, tmp_path):
    """The server of any version is measured, and every result says which."""
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path, version="0.99.1")))
    words = f"--only acceptance,lossless --source none --out {tmp_path / 'out'} --json"
    command = f"eval {ROOT / GLM} {words}"
    done = keepmtp(command, status=0)
    assert "vLLM 0.99.1: keepmtp's rules were read from 0.31.0 to" in done.stderr
    assert json.loads(done.stdout)["serve"]["environment"]["vllm"] == "0.99.1"


def test_a_share_that_is_none_is_for_vllm_to_refuse(cuda, tmp_path):
    vllm = with_gpus(cuda, 1, mib=7)
    for word in ("x", "nan", "inf", "7", "-1", ""):
        words = ["--gpu-memory-utilization", word]
        refuse_no_room((SOURCE,), vllm, out=tmp_path, extra=words)
