"""`keepmtp serve` with a real vLLM server: its drafts are counted, and Ctrl-C leaves status 0 and
nothing else.
"""

import json
import signal
import time
from uuid import uuid4

import httpx
import pytest
from commands import free_port, started
from keepmtp.validate.measure.texts import PROMPTS
from real_vllm import GLM, NEEDS_VLLM, VLLM_PYTHON
from survivors import MARK, none_left, until
from wheel import stranger

pytestmark = [*NEEDS_VLLM, pytest.mark.full]


def asked(url: str, prompt: str, **headers: str) -> httpx.Response:
    body = {"model": str(GLM), "prompt": prompt, "max_tokens": 48, "temperature": 0.0}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def test_serve_until_ctrl_c(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    mark = uuid4().hex
    log = tmp_path / "log"
    words = f"serve {GLM} -k 3 --port {port} --log {log} --every 1 --json -- --max-model-len 512"
    changes = {
        "VLLM_PYTHON": str(VLLM_PYTHON),
        "VLLM_API_KEY": "mine",
        "OMP_NUM_THREADS": "1",
        MARK: mark,
    }
    process = started(words, env=stranger(**changes))
    line = "Application startup complete"
    until(lambda: log.is_file() and line in log.read_text(), seconds=400, pause=0.1, by=process)
    assert asked(url, PROMPTS[0]).status_code == 401, "the user's key guards the server"
    for prompt in PROMPTS[:2]:
        assert asked(url, prompt, Authorization="Bearer mine").json()["choices"][0]["text"]
    time.sleep(2.5)  # a line of acceptance is due
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    life = json.loads(out)
    assert process.returncode == life["status"] == 0, err
    assert life["is_healthy"] and life["is_stopped"] and life["drafts"] > 10
    assert life["draft_tokens"] == 3 * life["drafts"] and life["acceptance"] > 0.8, (
        "as the shipped model drafts"
    )
    assert (
        len(life["accepted_per_position"]) == 3
        and sum(life["accepted_per_position"]) == life["accepted_tokens"]
    )
    assert f"serves {url} after" in err and "tokens a step; by position" in err
    none_left(mark)
