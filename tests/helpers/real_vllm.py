"""The vLLM that `make test` sets up, for tests that start it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT

VLLM_PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
GLM, QWEN = ROOT / "models" / "tiny-glm4-moe", ROOT / "models" / "tiny-qwen3_5"
NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not VLLM_PYTHON.is_file(), reason="no vLLM environment; `make test` sets one up"
    ),
]


def ask(program: str, questions: Any) -> Any:
    """What a program in vLLM's environment answers: one line, ANSWERS and JSON."""
    if not VLLM_PYTHON.is_file():
        pytest.skip("no vLLM environment: make .venv-vllm, or set VLLM_PYTHON")
    done = subprocess.run(
        [VLLM_PYTHON, "-c", program],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
    )
    assert "ANSWERS" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("ANSWERS")[2])
