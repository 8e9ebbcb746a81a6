"""A server is known to be keepmtp's own: nobody else can answer for it. A stub takes vLLM's
place. And what its log says of its end.
"""

import os
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from keepmtp.validate.measure.server import ServerFailed, _said, last_error, serving
from processes import only_child
from stub_vllm import stub_vllm

WORKER = "(Worker pid=7) ERROR 11-21 09:17:21 [multiproc_executor.py:953] "
ENGINE = "(EngineCore pid=6) ERROR 11-21 09:17:22 [core.py:1510] "


@pytest.fixture
def vllm(monkeypatch, tmp_path) -> VLLM:
    monkeypatch.setenv("VLLM_PYTHON", str(stub_vllm(tmp_path, start=0.5)))
    return find_vllm()


def test_nobody_gets_the_port_of_a_server(vllm, tmp_path):
    """It is this machine's alone, and nobody else can listen on it; and another server there is not
    believed.
    """
    with serving(vllm, tmp_path, k=1, log=tmp_path / "log", timeout=60) as server:
        port = server.client.base_url.port
        words = Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert words[words.index("--port") + 1] == str(port)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        for name in ("checkpoint", server.name[:-1]):
            with pytest.raises(ServerFailed):
                replace(server, name=name).complete("1 + 1?", max_tokens=4)


def test_a_front_end_that_is_killed_is_not_believed(vllm, tmp_path):
    """Nor is its engine left behind, which vLLM's front end alone would have ended."""
    with serving(vllm, tmp_path, k=1, log=tmp_path / "log", timeout=60) as server:
        os.kill(only_child(server.process.pid), signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(ServerFailed, match="ended by SIGKILL"):
            server.complete("1 + 1?", max_tokens=4)
        assert time.monotonic() - start < 60


def test_the_innermost_error_is_quoted(tmp_path):
    """Three processes raise one after the other; the first one knows why."""
    log = tmp_path / "log"
    log.write_text(
        f"{WORKER}Traceback (most recent call last):\n{WORKER}    raise ValueError(\n"
        f"{WORKER}ValueError: Failed to find a kernel. Reasons: \n{WORKER}CpuKernel requires AMX\n"
        f"{ENGINE}Exception: WorkerProc initialization failed due to an exception in a "
        "background process.\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core "
        "proc(s): {}\n"
    )
    assert (
        last_error(log, 1) == "ValueError: Failed to find a kernel. Reasons: CpuKernel requires AMX"
    )


def test_what_the_front_end_says_next_is_no_part_of_an_error(tmp_path):
    log = tmp_path / "log"
    dead = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
    log.write_text(
        f'{WORKER}{dead}\n(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/completions '
        'HTTP/1.1" 500\n'
    )
    assert last_error(log, None) == dead


@pytest.mark.parametrize(
    "text, status, says",
    [
        ("usage: vllm serve\nvllm: error: unrecognized arguments: --nope\n", 2, "--nope"),
        ("(APIServer pid=1) INFO 11-21 09:17:21 [api.py:1] Starting\n", -9, "memory"),
        ("", 3, "exit status 3: an empty log"),
    ],
)
def test_a_server_that_dies_without_a_traceback(tmp_path, text, status, says):
    (tmp_path / "log").write_text(text)
    assert says in last_error(tmp_path / "log", status)


def test_a_start_shows_what_vllm_logs_and_no_line_of_code(tmp_path):
    log = tmp_path / "log"
    assert _said(log) == ""
    log.write_text(
        "(EngineCore pid=7) INFO 11-28 19:00:01 [core.py:12] Loading weights took 2 seconds\n"
        "(EngineCore pid=7) ERROR 11-28 19:00:02 [core.py:15]     return func(*args)\n"
        "    self.model = build(config)\n"
    )
    assert _said(log) == "vLLM says: Loading weights took 2 seconds"


def test_the_last_error_has_no_greeting(tmp_path):
    log = tmp_path / "log"
    log.write_text("RuntimeError: Gloo found no interface. Set GLOO_SOCKET_IFNAME. GLHF!\n")
    assert last_error(log, 1) == "RuntimeError: Gloo found no interface. Set GLOO_SOCKET_IFNAME."
