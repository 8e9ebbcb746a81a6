"""The vLLM that `make test` sets up, for tests that start it."""

import os
from pathlib import Path

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
