"""`keepmtp serve` with a real vLLM server: its own log counts its drafts, and Ctrl-C leaves nothing."""

import os
import re
import signal
from uuid import uuid4

import httpx
import pytest
from commands import GLM, free_port, started
from keepmtp.validate.measure.texts import PROMPTS
from processes import MARK, none_left, until
from real_vllm import NEEDS_VLLM, VLLM_PYTHON

pytestmark = [*NEEDS_VLLM, pytest.mark.full]


def asked(url: str, prompt: str, **headers: str) -> httpx.Response:
    body = {"model": str(GLM), "prompt": prompt, "max_tokens": 48, "temperature": 0.0}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def test_serve_until_ctrl_c(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    mark = uuid4().hex
    log = tmp_path / "log"
    changes = {
        "VLLM_PYTHON": str(VLLM_PYTHON),
        "VLLM_API_KEY": "mine",
        "VLLM_LOG_STATS_INTERVAL": "1",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        MARK: mark,
    }
    words = f"serve {GLM} -k 3 --port {port} -- --max-model-len 512"
    with log.open("w") as file:
        process = started(words, env=os.environ | changes, stdout=file, stderr=file)
    line = "Application startup complete"
    until(lambda: line in log.read_text(), seconds=400, pause=0.1, by=process)
    assert asked(url, PROMPTS[0]).status_code == 401, "the user's key guards the server"
    for prompt in PROMPTS[:2]:
        assert asked(url, prompt, Authorization="Bearer mine").json()["choices"][0]["text"]
    line = r"Per-position acceptance rate: ([\d.]+), ([\d.]+), ([\d.]+), "
    until(lambda: re.search(line, log.read_text()), by=process)
    rates = re.search(line, log.read_text()).groups()  # pyright: ignore[reportOptionalMemberAccess]
    assert float(rates[0]) > 0.8, "as the shipped model drafts"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    none_left(mark)
