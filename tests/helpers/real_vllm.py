"""The vLLM that `make test` sets up, for tests that start it or compute in it; and
environments that need not be there."""

import json
import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, captured
from keepmtp.validate.facts.served import those
from keepmtp.validate.facts.vllm_env import GPU, VLLM
from keepmtp.validate.measure.harness import measured
from safetensors.torch import load_file, save_file
from torch import Tensor

VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
QWEN = ROOT / "models" / "tiny-qwen3_5"
PLUGIN = ROOT / "validate" / "measure" / "plugin"
HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text()
# For `vllm serve`: the engine computes by itself, without a worker that it sends each step to: half
# the processor time of an answer; servers without these words are in test_separate_draft.py, for one.
UNIPROC = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
NO_AVX512 = "vLLM's CPU attention has an FP8 cache with AVX-512 alone"
NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not VLLM_PYTHON.is_file(), reason="no vLLM environment; `make test` sets one up"
    ),
]
# Engines live in the process of a script.
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def measure(station: Any) -> Any:
    """What one station finds, alone."""
    models = those(station.source, station.checkpoint)
    with station.setup.alone():
        facts, failure = measured({"": station}, models, station.setup)
    if failure:
        raise failure
    return facts[""]


def answers_of_source(made: Path, twin: Path) -> None:
    """What the source answered for one checkpoint, kept for another that is made from it."""
    ours = shutil.ignore_patterns("*.checkpoint.*", "*.plain.*", "*.json", "*.html")
    shutil.copytree(f"{made}.report", f"{twin}.report", ignore=ours)


def ask(program: str, questions: Any) -> Any:
    """What a program in vLLM's environment answers: one line, ANSWERS and JSON."""
    if not VLLM_PYTHON.is_file():
        pytest.skip("no vLLM environment: make .venv-vllm, or set VLLM_PYTHON")
    done = captured(
        [VLLM_PYTHON, "-c", program],
        input=json.dumps(questions),
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert "ANSWERS" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("ANSWERS")[2])


def in_vllm(script: str, jobs: list[dict[str, Any]], *paths: Path) -> list[Any]:
    """What a script of tests/vllm finds for each job, one after another in one process; `paths` are
    searched for packages.
    """
    words = [VLLM_PYTHON, ROOT / "tests" / "vllm" / script, *map(json.dumps, jobs)]
    path = os.pathsep.join(map(str, (*paths, PLUGIN / "stubs")))
    done = captured(words, env=os.environ | QUIET | {"PYTHONPATH": path})
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(jobs), done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(line[7:]) for line in lines]


def computed(code: str, given: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The tensors that code in vLLM's environment makes of these: argv has the file of both."""
    save_file(given, folder / "given")
    words = [VLLM_PYTHON, "-P", "-c", code, folder / "given", folder / "made"]
    captured(words, cwd=folder, status=0)
    return load_file(folder / "made")


CPU = VLLM(
    python=Path("python"),
    version="0.32.0",
    distribution="vllm-cpu",
    build="cpu",
    gpus=(),
    cpu_features=frozenset({"avx2", "avx512f"}),
    python_version=platform.python_version(),
    **dict.fromkeys(("torch", "transformers", "compressed_tensors", "torchvision", "cpu"), ""),
)
H100 = replace(CPU, build="cuda", gpus=(GPU(name="H100", capability="9.0", memory_gib=80.0),))


def asked_names(request: pytest.FixtureRequest) -> set[str]:
    """The values of `name` among those tests of a fixture's file that will run."""
    items = [
        item
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function)
    ]
    params = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {each["name"] for each in params if "name" in each}
